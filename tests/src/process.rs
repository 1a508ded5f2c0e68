//! One process of a cluster, started by hand as an orchestrator would: by role, and settings in its environment.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use crate::{eventually, executable};

/// Dropped, it is killed; a test that fails prints what it logged.
#[derive(Debug)]
pub struct Process {
    role: &'static str,
    settings: Vec<(&'static str, String)>,
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Starts `baton <role>`, which logs to `<name>.log` in `folder`.
    pub fn start(
        folder: &Path,
        name: &str,
        role: &'static str,
        settings: Vec<(&'static str, String)>,
    ) -> Self {
        let log = folder.join(format!("{name}.log"));
        File::create(&log).expect("a log file");
        Self { role, child: spawn(role, &settings, &log), settings, log }
    }

    /// Asks it to stop, waits until it has, and starts it again at the same ports.
    pub async fn restart(&mut self) {
        let pid = Pid::from_raw(self.child.id() as i32).expect("a pid is not zero");
        kill_process(pid, Signal::TERM).expect("it is there");
        let status =
            eventually("the process to stop", async || self.child.try_wait().expect("our child")).await;
        assert!(status.success(), "{} ended with {status}:\n{}", self.role, self.log());
        self.child = spawn(self.role, &self.settings, &self.log);
    }

    /// Everything that it logged in all its lives.
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("--- log of a {} ---\n{}", self.role, self.log());
        }
    }
}

fn spawn(role: &str, settings: &[(&'static str, String)], log: &Path) -> Child {
    let log = File::options().append(true).open(log).expect("the log file");
    let ours = std::env::vars().map(|(name, _)| name).filter(|name| name.starts_with("BATON_"));
    let mut command = Command::new(executable::baton());
    ours.for_each(|name| {
        command.env_remove(name);
    });
    command.arg(role).envs(settings.iter().cloned()).stdout(Stdio::null()).stderr(log);
    command.spawn().expect("baton starts")
}
