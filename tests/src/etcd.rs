//! A real etcd for one test: one process, or a cluster of three.

use std::net::{IpAddr, Ipv4Addr};
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;

use crate::free_addr;
use crate::hosts::{Hosts, command_on};

/// An etcd with a folder for each member. Dropping it ends the processes and removes the folders.
#[derive(Debug)]
pub struct Etcd {
    members: Vec<Member>,
}

#[derive(Debug)]
struct Member {
    name: String,
    addr: IpAddr,
    client: u16,
    peer: u16,
    /// The network namespace of its host; `None` for that of the test.
    namespace: Option<String>,
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
        Self::of_members((0..n_members).map(|nth| Member::new(format!("etcd-{nth}"))).collect())
    }

    /// Starts one process on this host.
    pub fn on(hosts: &Hosts, name: &str) -> Self {
        let mut member = Member::new(name.to_owned());
        (member.addr, member.namespace) = (hosts.addr_of(name).into(), Some(hosts.namespace_of(name)));
        Self::of_members(vec![member])
    }

    fn of_members(members: Vec<Member>) -> Self {
        let mut etcd = Self { members };
        (0..etcd.members.len()).for_each(|nth| etcd.spawn(nth));
        etcd
    }

    /// Returns the `registry.url` of processes in this cluster.
    pub fn url(&self, cluster: &str) -> String {
        format!("etcd://{}/{cluster}", self.endpoints().join(","))
    }

    /// Returns the `host:port` of every member, for clients.
    pub fn endpoints(&self) -> Vec<String> {
        self.members.iter().map(|member| format!("{}:{}", member.addr, member.client)).collect()
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
        let of = |member: &Member| format!("{}={}", member.name, member.url(member.peer));
        let all: Vec<String> = self.members.iter().map(of).collect();
        self.members[nth].spawn(&all.join(","));
    }
}

fn free_port() -> u16 {
    free_addr().port()
}

impl Member {
    fn new(name: String) -> Self {
        let data = tempfile::tempdir().expect("a folder");
        let addr = IpAddr::V4(Ipv4Addr::LOCALHOST);
        Self { name, addr, client: free_port(), peer: free_port(), namespace: None, data, child: None }
    }

    fn url(&self, port: u16) -> String {
        format!("http://{}:{port}", self.addr)
    }

    fn spawn(&mut self, all: &str) {
        let etcd = etcd_bin_vendored::etcd_bin_path().expect("etcd for this platform");
        let namespace = self.namespace.as_deref();
        let mut command = namespace.map_or_else(|| Command::new(etcd), |host| command_on(host, etcd));
        let (client, peer) = (self.url(self.client), self.url(self.peer));
        let child = command
            .args(["--name", &self.name, "--initial-cluster", all, "--unsafe-no-fsync"])
            .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
            .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
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
