//! A real etcd for one test: one process, or a cluster of three.

use crate::free_addr;
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;

/// An etcd with a folder for each member. Dropping it ends the processes and removes the folders.
#[derive(Debug)]
pub struct Etcd {
    members: Vec<Member>,
}

#[derive(Debug)]
struct Member {
    name: String,
    client: u16,
    peer: u16,
    data: TempDir,
    /// The process; `None` while it is stopped.
    child: Option<Child>,
}

impl Etcd {
    /// Starts one process.
    pub fn start() -> Self {
        Self::of(1)
    }

    /// Starts a cluster of `n_members` processes.
    pub fn of(n_members: usize) -> Self {
        let members = (0..n_members).map(|nth| Member::new(format!("etcd-{nth}"))).collect();
        let mut etcd = Self { members };
        (0..n_members).for_each(|nth| etcd.spawn(nth));
        etcd
    }

    /// Returns the `registry.url` of processes in this cluster.
    pub fn url(&self, cluster: &str) -> String {
        format!("etcd://{}/{cluster}", self.endpoints().join(","))
    }

    /// Returns the `host:port` of every member, for clients.
    pub fn endpoints(&self) -> Vec<String> {
        self.members.iter().map(|member| format!("127.0.0.1:{}", member.client)).collect()
    }

    /// Kills all members and keeps their data.
    pub fn kill(&mut self) {
        (0..self.members.len()).for_each(|nth| self.kill_one(nth));
    }

    pub fn kill_one(&mut self, nth: usize) {
        self.members[nth].kill();
    }

    /// Kills all members and starts them again with the old data.
    pub fn restart(&mut self) {
        self.kill();
        (0..self.members.len()).for_each(|nth| self.spawn(nth));
    }

    /// Kills all members and starts them again without data.
    pub fn restart_empty(&mut self) {
        self.kill();
        for member in &mut self.members {
            member.data = tempfile::tempdir().expect("a folder");
        }
        self.restart();
    }

    fn spawn(&mut self, nth: usize) {
        let all: Vec<String> =
            self.members.iter().map(|member| format!("{}={}", member.name, url(member.peer))).collect();
        self.members[nth].spawn(&all.join(","));
    }
}

fn url(port: u16) -> String {
    format!("http://127.0.0.1:{port}")
}

fn free_port() -> u16 {
    free_addr().port()
}

impl Member {
    fn new(name: String) -> Self {
        let data = tempfile::tempdir().expect("a folder");
        Self { name, client: free_port(), peer: free_port(), data, child: None }
    }

    fn spawn(&mut self, all: &str) {
        let child = Command::new(etcd_bin_vendored::etcd_bin_path().expect("etcd for this platform"))
            .args(["--name", &self.name, "--initial-cluster", all, "--unsafe-no-fsync"])
            .args(["--listen-client-urls", &url(self.client), "--advertise-client-urls", &url(self.client)])
            .args(["--listen-peer-urls", &url(self.peer), "--initial-advertise-peer-urls", &url(self.peer)])
            .arg("--data-dir")
            .arg(self.data.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        self.child = Some(child.expect("etcd starts"));
    }

    fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.kill();
    }
}
