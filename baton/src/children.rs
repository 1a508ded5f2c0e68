//! The nodes of `baton up`: child processes that end with their parent, and are restarted when they end.

use std::collections::VecDeque;
use std::io::{BufRead as _, BufReader};
use std::os::unix::process::CommandExt as _;
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::process::{Child, ChildStdin, Command};
use tokio::time::Instant;
use tracing::warn;
use types::Role;

use crate::exit::CommandError;
use crate::output;
use crate::process_variables;

/// The time that a child process may take to stop before it is killed, longer than its own drain.
const STOP_WITHIN: Duration = Duration::from_secs(40);
/// How long to wait for the last lines of a process that has ended. Its own child processes may keep standard
/// error open.
const LAST_LINES_WITHIN: Duration = Duration::from_millis(200);
/// The number of last lines that are printed again when a process ends.
const LAST_LINES: usize = 10;
/// The pause before the first restart of a node. It doubles with each restart up to the maximum.
const RESTART_FIRST: Duration = Duration::from_secs(1);
const RESTART_LONGEST: Duration = Duration::from_secs(60);
/// The time after which a node counts as started successfully. If it ends later, its next pause is
/// `RESTART_FIRST` again.
const CAME_UP_AFTER: Duration = Duration::from_secs(60);

/// One node of the cluster: its process, and the settings to start it again.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) id: String,
    role: Role,
    settings: Vec<(&'static str, String)>,
    process: Process,
    /// The pause before the next restart, if the process ends soon.
    pause: Duration,
}

/// The process of a node. It stops when its standard input closes, which the kernel does even if this process
/// is killed.
#[derive(Debug)]
struct Process {
    child: Child,
    stdin: Option<ChildStdin>,
    started: Instant,
    last_lines: Arc<LastLines>,
}

/// The last lines that a process wrote to standard error.
#[derive(Debug, Default)]
struct LastLines {
    /// The lines, the oldest first. The mutex is never held across an await.
    lines: Mutex<VecDeque<String>>,
    ended: tokio::sync::Notify,
}

impl Node {
    /// Starts `baton <role>` with `settings` as overrides in its environment.
    pub(crate) fn start(
        role: Role,
        id: String,
        settings: Vec<(&'static str, String)>,
    ) -> Result<Self, CommandError> {
        let process = Process::start(role, &id, &settings).map_err(CommandError::start)?;
        Ok(Self { id, role, settings, process, pause: RESTART_FIRST })
    }

    /// Returns the exit status of the node's process if it has ended.
    pub(crate) fn has_ended(&mut self) -> Option<ExitStatus> {
        self.process.child.try_wait().ok().flatten()
    }

    /// Restarts the process whenever it has ended, after a pause that grows as long as it ends soon. Never
    /// returns. Cancel-safe: the node always has a process, which may have ended.
    pub(crate) async fn keep_running(&mut self) {
        loop {
            let ended = match self.process.child.wait().await {
                Ok(status) => status.to_string(),
                Err(error) => format!("unknown status: {error}"),
            };
            if self.process.started.elapsed() >= CAME_UP_AFTER {
                self.pause = RESTART_FIRST;
            }
            warn!(
                node = self.id,
                status = ended,
                pause_ms = self.pause.as_millis() as u64,
                "node process ended, restarting it after a pause"
            );
            let last_lines = self.process.last_lines.wait().await;
            let (id, seconds) = (&self.id, self.pause.as_secs());
            output::tell_later(format!(
                "{id} ended with {ended}; it starts again in {seconds} s\n{last_lines}"
            ));
            tokio::time::sleep(self.pause).await;
            self.pause = (self.pause * 2).min(RESTART_LONGEST);
            match Process::start(self.role, &self.id, &self.settings) {
                Ok(process) => self.process = process,
                Err(error) => warn!(node = self.id, %error, "node process cannot be started"),
            }
        }
    }

    /// Closes the node's standard input, so that it drains, and kills it if that takes too long.
    pub(crate) async fn stop(mut self) {
        drop(self.process.stdin.take());
        if tokio::time::timeout(STOP_WITHIN, self.process.child.wait()).await.is_err() {
            warn!(node = self.id, "node process did not stop in time, killing it");
            let _ = self.process.child.kill().await;
        }
        self.process.last_lines.wait().await;
    }
}

impl Process {
    fn start(role: Role, id: &str, settings: &[(&'static str, String)]) -> std::io::Result<Self> {
        let mut command = std::process::Command::new(std::env::current_exe()?);
        command.arg(role.as_str()).arg("--stop-with-stdin").env("BATON_NODE__ID", id);
        // Variables for other processes are removed, because this process would refuse them as unknown
        // settings.
        let for_others = |key: &str| {
            key == "BATON_CONFIG"
                || sections_of_others(role).iter().any(|section| key.starts_with(section))
                || process_variables::is_for_others(role, key)
        };
        std::env::vars().filter(|(key, _)| for_others(key)).for_each(|(key, _)| {
            command.env_remove(key);
        });
        command.envs(settings.iter().map(|(key, value)| (*key, value)));
        // The child gets its own process group, so that Ctrl-C reaches only the parent. The parent drains the
        // router before it stops the nodes.
        command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = Command::from(command).kill_on_drop(true).spawn()?;
        let stdin = child.stdin.take();
        let last_lines = Arc::<LastLines>::default();
        if let Some(stderr) = child.stderr.take() {
            let (stderr, last_lines) = (std::fs::File::from(stderr.into_owned_fd()?), last_lines.clone());
            std::thread::Builder::new()
                .name(format!("stderr-{id}"))
                .spawn(move || last_lines.pass_on(stderr))?;
        }
        Ok(Self { child, stdin, started: Instant::now(), last_lines })
    }
}

impl LastLines {
    /// Copies a process's output to standard error and keeps its last lines. Blocks until the process closes
    /// its standard error.
    fn pass_on(&self, stderr: std::fs::File) {
        let mut stderr = BufReader::new(stderr);
        let mut line = Vec::new();
        while stderr.read_until(b'\n', &mut line).is_ok_and(|n_bytes| n_bytes > 0) {
            let text = String::from_utf8_lossy(&line).trim_end().to_owned();
            line.clear();
            output::tell(&text);
            let mut lines = self.lines();
            if lines.len() == LAST_LINES {
                lines.pop_front();
            }
            lines.push_back(text);
        }
        self.ended.notify_one();
    }

    /// Waits briefly for the last line, and returns the kept lines, indented.
    async fn wait(&self) -> String {
        let _ = tokio::time::timeout(LAST_LINES_WITHIN, self.ended.notified()).await;
        let lines = self.lines();
        if lines.is_empty() {
            return "  it wrote nothing".to_owned();
        }
        lines.iter().map(|line| format!("  {line}")).collect::<Vec<_>>().join("\n")
    }

    fn lines(&self) -> MutexGuard<'_, VecDeque<String>> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the prefixes of variables that a node of this role has no settings for.
fn sections_of_others(role: Role) -> &'static [&'static str] {
    match role {
        Role::Pool => &["BATON_ROUTER__", "BATON_BALANCE__"],
        Role::Prefill | Role::Decode | Role::Both => &["BATON_ROUTER__", "BATON_BALANCE__", "BATON_POOL__"],
    }
}
