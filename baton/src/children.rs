//! The nodes of `baton up`: child processes that cannot outlive their parent.

use std::os::unix::process::CommandExt as _;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use tokio::process::{Child, ChildStdin, Command};
use tracing::warn;
use types::Role;

use crate::exit::Failed;

/// How long a child that was asked to stop may take, beyond its own drain.
const STOP_WITHIN: Duration = Duration::from_secs(40);

/// One node's process. It stops when its standard input closes, which the kernel does even if this process is killed.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) id: String,
    child: Child,
    stdin: Option<ChildStdin>,
}

impl Node {
    /// Starts `baton <role>` with `settings` as overrides in its environment.
    pub(crate) fn start(role: Role, id: String, settings: &[(&str, String)]) -> Result<Self, Failed> {
        let executable = std::env::current_exe().map_err(Failed::start)?;
        let mut command = std::process::Command::new(executable);
        command.arg(role.as_str()).arg("--stop-with-stdin").env("BATON_NODE__ID", &id);
        // What is meant for another process is an unknown setting to this one.
        let for_others = |key: &str| {
            key == "BATON_CONFIG" || sections_of_others(role).iter().any(|section| key.starts_with(section))
        };
        std::env::vars().filter(|(key, _)| for_others(key)).for_each(|(key, _)| {
            command.env_remove(key);
        });
        command.envs(settings.iter().map(|(key, value)| (*key, value)));
        // A group of its own: Ctrl-C reaches the parent alone, which drains the router before it stops the nodes.
        command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::null());
        let mut child = Command::from(command).kill_on_drop(true).spawn().map_err(Failed::start)?;
        let stdin = child.stdin.take();
        Ok(Self { id, child, stdin })
    }

    /// Ends when the process has ended.
    pub(crate) async fn ended(&mut self) -> std::io::Result<ExitStatus> {
        self.child.wait().await
    }

    /// The status of a process that has ended already.
    pub(crate) fn has_ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// Lets the node drain, and kills it if it takes too long.
    pub(crate) async fn stop(mut self) {
        drop(self.stdin.take());
        if tokio::time::timeout(STOP_WITHIN, self.child.wait()).await.is_err() {
            warn!(node = self.id, "node did not stop, killing it");
            let _ = self.child.kill().await;
        }
    }
}

/// What a node of this kind has no settings in.
fn sections_of_others(role: Role) -> &'static [&'static str] {
    match role {
        Role::Pool => &["BATON_ROUTER__", "BATON_MODEL__", "BATON_SCHEDULER__", "BATON_DECODE__"],
        Role::Prefill | Role::Decode | Role::Both => &["BATON_ROUTER__", "BATON_POOL__"],
    }
}
