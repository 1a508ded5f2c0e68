//! Hosts on one machine: network namespaces on one switch, each of which can be cut off and put back.
//!
//! It takes root. Everything is gone with the value, also when a test fails.

use std::net::Ipv4Addr;
use std::process::Command;

/// A switch and the hosts on it. The test's own process is a host, too.
#[derive(Debug)]
pub struct Hosts {
    prefix: String,
    names: Vec<String>,
}

/// Whether this process may make hosts.
pub fn possible() -> bool {
    rustix::process::geteuid().is_root() && Command::new("ip").arg("-V").output().is_ok()
}

impl Hosts {
    /// One host for each name; all reach each other.
    pub fn new(names: &[&str]) -> Self {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let hosts = Self { prefix: format!("b{}", std::process::id()), names };
        let switch = hosts.switch();
        ip(&format!("netns add {switch}"));
        ip(&format!("-n {switch} link add switch type bridge"));
        ip(&format!("-n {switch} link set switch up"));
        for idx in 0..hosts.names.len() {
            let namespace = hosts.namespace(idx);
            ip(&format!("netns add {namespace}"));
            ip(&format!("-n {namespace} link set lo up"));
            ip(&format!("link add port{idx} netns {switch} type veth peer name net netns {namespace}"));
            hosts.plug(idx);
            ip(&format!("-n {namespace} addr add {}/24 dev net", addr(idx)));
            ip(&format!("-n {namespace} link set net up"));
        }
        hosts.plug_in_the_test();
        hosts
    }

    fn plug_in_the_test(&self) {
        let (own, at) = (&self.prefix, self.names.len());
        ip(&format!("link add port{at} netns {} type veth peer name {own}", self.switch()));
        self.plug(at);
        ip(&format!("addr add {}/24 dev {own}", addr(at)));
        ip(&format!("link set {own} up"));
    }

    fn plug(&self, idx: usize) {
        ip(&format!("-n {} link set port{idx} master switch up", self.switch()));
    }

    /// The network namespace in which a host's processes run.
    pub fn namespace_of(&self, name: &str) -> String {
        self.namespace(self.index(name))
    }

    pub fn addr_of(&self, name: &str) -> Ipv4Addr {
        addr(self.index(name))
    }

    /// What each host has as `/etc/hosts`.
    pub fn file(&self) -> String {
        let lines = self.names.iter().map(|name| format!("{} {name}\n", self.addr_of(name)));
        std::iter::once("127.0.0.1 localhost\n".to_owned()).chain(lines).collect()
    }

    /// Pulls the cable: nobody is told, packets are just lost.
    pub fn cut(&self, name: &str) {
        ip(&format!("-n {} link set port{} down", self.switch(), self.index(name)));
    }

    pub fn mend(&self, name: &str) {
        ip(&format!("-n {} link set port{} up", self.switch(), self.index(name)));
    }

    fn index(&self, name: &str) -> usize {
        self.names
            .iter()
            .position(|known| known == name)
            .unwrap_or_else(|| panic!("no host is called {name}"))
    }

    fn namespace(&self, idx: usize) -> String {
        format!("{}-{}", self.prefix, self.names[idx])
    }

    fn switch(&self) -> String {
        format!("{}-switch", self.prefix)
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        // The test's own end of a pair goes with the switch's.
        let namespaces = (0..self.names.len()).map(|idx| self.namespace(idx));
        for namespace in namespaces.chain([self.switch()]) {
            let _ = Command::new("ip").args(["netns", "del", &namespace]).output();
        }
    }
}

/// From the range that is kept for tests of networks.
fn addr(idx: usize) -> Ipv4Addr {
    Ipv4Addr::new(198, 18, 77, 10 + idx as u8)
}

fn ip(args: &str) {
    let output = Command::new("ip").args(args.split(' ')).output().expect("ip runs");
    assert!(output.status.success(), "ip {args}: {}", String::from_utf8_lossy(&output.stderr));
}
