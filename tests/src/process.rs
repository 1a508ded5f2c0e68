//! One process of a cluster, started as by an orchestrator: with a role, and settings in its environment.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::logs::ExpectedPeer;
use crate::{eventually, executable, free_addr};

/// A process of a cluster. Dropping it kills the process; a failing test prints its log.
#[derive(Debug)]
pub struct Process {
    launch: Launch,
    child: Child,
    log: PathBuf,
    expected: ExpectedPeer,
    /// The part of the log that is checked; `None` if all of it is.
    judged: Option<String>,
}

/// How a process is started, each time.
#[derive(Debug)]
struct Launch {
    role: &'static str,
    settings: Vec<(&'static str, String)>,
    /// The network namespace of its host; `None` for that of the test.
    namespace: Option<String>,
}

/// The variable of a router's admin port. A router gets a free port if a test does not set it.
const ADMIN: &str = "BATON_ROUTER__ADMIN";

impl Process {
    /// Starts `baton <role>`, which logs to `<name>.log` in `folder`.
    pub fn start(
        folder: &Path,
        name: &str,
        role: &'static str,
        mut settings: Vec<(&'static str, String)>,
    ) -> Self {
        if role == "router" && settings.iter().all(|(key, _)| *key != ADMIN) {
            settings.push((ADMIN, free_addr().to_string()));
        }
        Self::launch(folder, name, Launch { role, settings, namespace: None })
    }

    /// Starts `baton <role>` on the host with this network namespace. The log has the namespace's name.
    pub fn start_on(
        namespace: String,
        folder: &Path,
        role: &'static str,
        settings: Vec<(&'static str, String)>,
    ) -> Self {
        Self::launch(folder, &namespace.clone(), Launch { role, settings, namespace: Some(namespace) })
    }

    fn launch(folder: &Path, name: &str, launch: Launch) -> Self {
        let log = folder.join(format!("{name}.log"));
        File::create(&log).expect("a log file");
        let child = launch.spawn(&log);
        Self { launch, child, log, expected: ExpectedPeer::default(), judged: None }
    }

    /// Stops the process, waits for its end, and starts it again on the same ports.
    pub async fn restart(&mut self) {
        self.stop().await;
        self.child = self.launch.spawn(&self.log);
    }

    /// Asks the process to stop, and waits until it has ended.
    pub async fn stop(&mut self) {
        self.signal(Signal::TERM);
        let status =
            eventually("the process to stop", async || self.child.try_wait().expect("our child")).await;
        assert!(status.success(), "{} ended with {status}:\n{}", self.launch.role, self.log());
    }

    /// Kills the process without a drain.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Starts a killed process again on the same ports.
    pub fn revive(&mut self) {
        self.kill();
        self.child = self.launch.spawn(&self.log);
    }

    pub fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.child.id() as i32).expect("a pid is not zero");
        kill_process(pid, signal).expect("it is there");
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns whether the process is running.
    pub fn is_alive(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Names parts of warnings that the test is about to cause. Other warnings fail the test.
    pub fn expect_log(&self, parts: &[&'static str]) {
        self.expected.add(parts);
    }

    /// Ends the check of the process's log, because the processes that it is connected to are about to end.
    pub fn judge_until_now(&mut self) {
        self.judged = Some(self.log());
    }

    /// Returns the log of the process, restarts included.
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let judged = self.judged.take().unwrap_or_else(|| self.log());
        self.kill();
        if std::thread::panicking() {
            eprintln!("--- log of a {} ---\n{}", self.launch.role, self.log());
        }
        self.expected.check(&judged);
    }
}

/// Returns the memory that a process has in use, in KiB; `None` once it has ended.
pub fn resident_kib(pid: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Returns the processor time that a process has used; `None` once it has ended.
pub fn processor_time(pid: u32) -> Option<Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The process's name ends with a parenthesis. `utime` and `stime` are the 12th and 13th fields after it.
    let fields: Vec<&str> = stat.rsplit_once(") ")?.1.split(' ').collect();
    let ticks = fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?;
    // Linux shows these times in hundredths of a second.
    Some(Duration::from_millis(ticks * 10))
}

/// Returns the number of files and sockets that a process has open.
pub fn open_files(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count)
}

impl Launch {
    fn spawn(&self, log: &Path) -> Child {
        let log = File::options().append(true).open(log).expect("the log file");
        let mut command = self.namespace.as_deref().map_or_else(executable::command, executable::command_on);
        command.arg(self.role).envs(self.settings.iter().cloned()).stdout(Stdio::null()).stderr(log);
        command.spawn().expect("baton starts")
    }
}
