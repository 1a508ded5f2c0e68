//! Hosts on one machine: network namespaces on one switch. Each host can be disconnected and connected again.
//!
//! Creating hosts needs root. Dropping [`Hosts`] removes everything, also when a test fails.

use std::ffi::OsStr;
use std::io::{BufRead as _, BufReader};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::python;

/// A switch and the hosts on it. The test's own process is a host, too.
#[derive(Debug)]
pub struct Hosts {
    prefix: String,
    names: Vec<String>,
}

/// Returns whether this process may make hosts.
pub fn possible() -> bool {
    rustix::process::geteuid().is_root() && Command::new("ip").arg("-V").output().is_ok()
}

/// Returns the command that runs a program on the host with this network namespace. The process keeps its pid.
pub fn command_on(namespace: &str, program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new("ip");
    command.args(["netns", "exec", namespace]).arg(program);
    command
}

impl Hosts {
    /// Creates one host for each name; all reach each other.
    pub fn new(names: &[&str]) -> Self {
        remove_hosts_of_ended_processes();
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

    /// Returns the network namespace of a host's processes.
    pub fn namespace_of(&self, name: &str) -> String {
        self.namespace(self.index(name))
    }

    pub fn addr_of(&self, name: &str) -> Ipv4Addr {
        addr(self.index(name))
    }

    /// Returns the `/etc/hosts` of every host.
    pub fn file(&self) -> String {
        let lines = self.names.iter().map(|name| format!("{} {name}\n", self.addr_of(name)));
        std::iter::once("127.0.0.1 localhost\n".to_owned()).chain(lines).collect()
    }

    /// Disconnects the host without notice: packets are lost.
    pub fn cut(&self, name: &str) {
        ip(&format!("-n {} link set port{} down", self.switch(), self.index(name)));
    }

    pub fn mend(&self, name: &str) {
        ip(&format!("-n {} link set port{} up", self.switch(), self.index(name)));
    }

    /// Loses all packets from one host to another without notice, as a firewall between the two does.
    pub fn part(&self, from: &str, to: &str) {
        ip(&format!("-n {} route add blackhole {}", self.namespace_of(from), self.addr_of(to)));
    }

    /// Ends what [`part`](Self::part) has begun.
    pub fn reunite(&self, from: &str, to: &str) {
        ip(&format!("-n {} route del blackhole {}", self.namespace_of(from), self.addr_of(to)));
    }

    /// Returns the bytes that the host has sent.
    pub fn bytes_sent(&self, name: &str) -> u64 {
        let link = self.statistics(&format!("port{}", self.index(name)));
        link["rx"]["bytes"].as_u64().expect("a number")
    }

    /// Returns the counters of one of the switch's interfaces.
    fn statistics(&self, interface: &str) -> serde_json::Value {
        let output = Command::new("ip")
            .args(["-json", "-statistics", "-n", &self.switch(), "link", "show", interface])
            .output()
            .expect("ip runs");
        let links: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        links[0]["stats64"].clone()
    }

    /// Puts a bad cable between a host and the switch, for as long as the value lives.
    pub fn bad_cable(&self, name: &str, flaw: Flaw) -> FaultyLink<'_> {
        let idx = self.index(name);
        self.leave_nothing_to_the_network_card();
        let switch = self.switch();
        ip(&format!("-n {switch} link set port{idx} nomaster"));
        ip(&format!("-n {switch} link add far{idx} type veth peer name plug{idx}"));
        ip(&format!("-n {switch} link set far{idx} up"));
        ip(&format!("-n {switch} link set plug{idx} master switch up"));
        FaultyLink { carrier: self.carry(idx, flaw), idx, hosts: self }
    }

    /// Turns off the network cards' offloading, because frames must be complete before a program can forward
    /// them.
    fn leave_nothing_to_the_network_card(&self) {
        for idx in 0..self.names.len() {
            run(Command::new("ip")
                .args(["netns", "exec", &self.namespace(idx)])
                .arg(python())
                .arg(cable())
                .args(["plain", "net"]));
        }
        run(Command::new(python()).arg(cable()).args(["plain", &self.prefix]));
    }

    fn carry(&self, idx: usize, flaw: Flaw) -> Child {
        let mut carrier = Command::new("ip")
            .args(["netns", "exec", &self.switch()])
            .arg(python())
            .arg(cable())
            .args(["carry", &format!("port{idx}"), &format!("far{idx}")])
            .args([flaw.delay_ms.to_string(), flaw.loss.to_string(), flaw.bytes_per_second.to_string()])
            .args(["1", if flaw.deaf { "out" } else { "both" }])
            .stdout(Stdio::piped())
            .spawn()
            .expect("ip runs");
        let mut line = String::new();
        let output = carrier.stdout.take().expect("it was piped");
        BufReader::new(output).read_line(&mut line).expect("it says when it carries");
        assert_eq!(line.trim(), "carrying");
        carrier
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

/// The faults of a cable, in both directions.
#[derive(Clone, Copy, Debug, Default)]
pub struct Flaw {
    pub delay_ms: u32,
    /// The share of frames that are lost, from 0 to 1.
    pub loss: f64,
    /// The bandwidth; zero means no limit.
    pub bytes_per_second: u32,
    /// Whether the host sends but receives nothing, so that its connections are half open.
    pub deaf: bool,
}

/// A host behind a faulty cable. Dropping it puts the host on the switch again without faults.
#[derive(Debug)]
pub struct FaultyLink<'a> {
    hosts: &'a Hosts,
    idx: usize,
    carrier: Child,
}

impl FaultyLink<'_> {
    /// Returns the number of frames that have reached the switch from the host.
    pub fn n_carried(&self) -> u64 {
        let link = self.hosts.statistics(&format!("far{}", self.idx));
        link["tx"]["packets"].as_u64().expect("a number")
    }
}

impl Drop for FaultyLink<'_> {
    fn drop(&mut self) {
        let _ = self.carrier.kill();
        let _ = self.carrier.wait();
        let (switch, idx) = (self.hosts.switch(), self.idx);
        let _ = Command::new("ip").args(["-n", &switch, "link", "del", &format!("far{idx}")]).output();
        self.hosts.plug(idx);
    }
}

fn cable() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("hosts/cable.py")
}

impl Drop for Hosts {
    fn drop(&mut self) {
        // Deleting the switch also deletes the test's own end of the link to it.
        let namespaces = (0..self.names.len()).map(|idx| self.namespace(idx));
        for namespace in namespaces.chain([self.switch()]) {
            let _ = Command::new("ip").args(["netns", "del", &namespace]).output();
        }
    }
}

/// Removes what tests have left that were killed: their links have the addresses of every test's hosts.
fn remove_hosts_of_ended_processes() {
    let output = Command::new("ip").args(["netns", "list"]).output().expect("ip runs");
    let namespaces = String::from_utf8_lossy(&output.stdout).into_owned();
    for namespace in namespaces.lines().filter_map(|line| line.split(' ').next()) {
        let Some((prefix, pid)) = namespace
            .split_once('-')
            .and_then(|(prefix, _)| Some((prefix, prefix.strip_prefix('b')?.parse::<u32>().ok()?)))
        else {
            continue;
        };
        if !Path::new(&format!("/proc/{pid}")).exists() {
            let _ = Command::new("ip").args(["link", "del", prefix]).output();
            let _ = Command::new("ip").args(["netns", "del", namespace]).output();
        }
    }
}

/// Returns the address of a host, from the range reserved for network tests.
fn addr(idx: usize) -> Ipv4Addr {
    Ipv4Addr::new(198, 18, 77, 10 + idx as u8)
}

fn ip(args: &str) {
    run(Command::new("ip").args(args.split(' ')));
}

fn run(command: &mut Command) {
    let output = command.output().expect("it can be started");
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}
