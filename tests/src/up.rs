//! A running `baton up` in a test.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _, Seek as _};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use futures::future::join_all;
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use serde_json::Value;
use tempfile::NamedTempFile;

use crate::client::{Answer, Ask, Client};
use crate::logs::ExpectedPeer;
use crate::{eventually, executable, in_time};

/// A running cluster of `baton up`. Dropping it stops every process; a failing test prints their logs.
#[derive(Debug)]
pub struct Up {
    child: Child,
    log: NamedTempFile,
    pub http: SocketAddr,
    pub grpc: SocketAddr,
    pids: Vec<u32>,
    expected: ExpectedPeer,
}

/// Settings for models that are computed here: on a slow machine a step takes longer than the watchdogs' limits.
pub const LONG_STEPS: [(&str, &str); 2] =
    [("BATON_EXPERT__NODE__STUCK_MS", "60000"), ("BATON_EXPERT__ROUTER__STUCK_MS", "60000")];

/// Returns the answers of a cluster of one node, without faults.
pub async fn undisturbed(asks: &[Ask]) -> Vec<Answer> {
    let up = Up::start(&["--colocated"]).await;
    let client = up.client();
    let all = join_all(asks.iter().map(|ask| client.ask(ask)));
    in_time("the undisturbed run", all).await.into_iter().map(|answer| answer.expect("an answer")).collect()
}

/// A node as `/debug/cluster` shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    pub id: String,
    pub epoch: String,
    pub role: String,
    pub pid: u32,
    pub address: String,
    pub admin: String,
    pub state: String,
}

impl Up {
    /// Starts `baton up` with `args` on free ports and waits until it serves.
    pub async fn start(args: &[&str]) -> Self {
        Self::start_with(args, &[]).await
    }

    /// Starts `baton up` like [`start`](Self::start), with only this connector.
    pub async fn start_over(connector: &str, args: &[&str]) -> Self {
        Self::start(&[args, &["--connector", connector]].concat()).await
    }

    /// Starts `baton up` like [`start`](Self::start), with environment variables. Without `--model` it serves
    /// the mock, which detects wrong KV.
    pub async fn start_with(args: &[&str], env: &[(&str, &str)]) -> Self {
        let model: &[&str] = if args.contains(&"--model") { &[] } else { &["--model", "mock"] };
        let http: &[&str] = if args.contains(&"--http") { &[] } else { &["--http", "127.0.0.1:0"] };
        let log = NamedTempFile::new().expect("a temporary file");
        let mut child = Command::new(executable::baton())
            .arg("up")
            .args(http)
            .args(["--grpc", "127.0.0.1:0"])
            .args(model)
            .args(args)
            .envs(env.iter().copied())
            .stdout(Stdio::piped())
            .stderr(log.reopen().expect("the file is there"))
            .spawn()
            .expect("baton starts");
        let mut line = String::new();
        let stdout = child.stdout.take().expect("it is piped");
        let read = tokio::task::spawn_blocking(move || {
            BufReader::new(stdout).read_line(&mut line).expect("standard output is text");
            line
        });
        let line = crate::in_time("the ready line", read).await.expect("the line was read");
        let Some((http, grpc)) = parse_ready(&line) else {
            let _ = child.kill();
            panic!("baton up {args:?} said {line:?} and logged:\n{}", text_of(log.as_file()));
        };
        let mut up = Self { child, log, http, grpc, pids: Vec::new(), expected: ExpectedPeer::default() };
        up.pids = up.nodes().await.iter().map(|node| node.pid).collect();
        up
    }

    pub fn client(&self) -> Client {
        Client::new(self.http)
    }

    /// Returns the process id of the router.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub async fn nodes(&self) -> Vec<Node> {
        let cluster = self.client().get_json("/debug/cluster").await;
        cluster["nodes"].as_array().expect("a list of nodes").iter().map(node).collect()
    }

    /// Returns the nodes of one role.
    pub async fn of_role(&self, role: &str) -> Vec<Node> {
        self.nodes().await.into_iter().filter(|node| node.role == role).collect()
    }

    /// Returns the block counts of all nodes that answer: id, free + cached, total.
    pub async fn kv(&self) -> Vec<Value> {
        let kv = self.client().get_json("/debug/kv").await;
        kv["nodes"].as_array().expect("a list of nodes").clone()
    }

    /// Waits until no block of any node is leased or quarantined.
    pub async fn baseline(&self) {
        let mut last = Vec::new();
        let quiet = eventually("the pools' baseline", async || {
            last = self.kv().await;
            let held =
                |node: &Value| node["leased"].as_u64() == Some(0) && node["quarantined"].as_u64() == Some(0);
            let answering: Vec<&Value> = last.iter().filter(|node| node["error"].is_null()).collect();
            answering.iter().all(|node| held(node)).then_some(())
        });
        quiet.await;
        for node in last.iter().filter(|node| node["error"].is_null()) {
            let count = |name: &str| node[name].as_u64().expect("a count");
            assert_eq!(count("free") + count("cached"), count("total"), "{node}");
        }
    }

    pub fn signal(&self, pid: u32, signal: Signal) {
        kill_process(pid_of(pid), signal).expect("the process is there");
    }

    /// Names parts of warnings that the test is about to cause. Other warnings fail the test.
    pub fn expect_log(&self, parts: &[&'static str]) {
        self.expected.add(parts);
    }

    /// Returns the log of all processes so far.
    pub fn log(&self) -> String {
        text_of(self.log.as_file())
    }

    /// Stops the cluster and waits for its end. Returns the exit code.
    pub async fn stop(&mut self) -> Option<i32> {
        self.signal(self.child.id(), Signal::TERM);
        eventually("baton up to stop", async || self.child.try_wait().expect("it is our child")).await.code()
    }

    /// Waits until `baton up` has ended by itself, and returns the exit code.
    pub fn stop_code(&mut self) -> Option<i32> {
        self.child.wait().ok().and_then(|status| status.code())
    }

    /// Returns the process ids of the nodes that are alive.
    pub fn alive(&self) -> Vec<u32> {
        self.pids.iter().copied().filter(|pid| is_alive(*pid)).collect()
    }
}

/// Returns whether a process is alive. A zombie is not.
pub fn is_alive(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit(") ").next().and_then(|rest| rest.chars().next());
    test_kill_process(pid_of(pid)).is_ok() && !matches!(state, None | Some('Z' | 'X'))
}

fn pid_of(pid: u32) -> Pid {
    Pid::from_raw(pid as i32).expect("a pid is not zero")
}

fn parse_ready(line: &str) -> Option<(SocketAddr, SocketAddr)> {
    let (http, grpc) = line.trim().strip_prefix("ready http=http://")?.split_once(" grpc=http://")?;
    Some((http.parse().ok()?, grpc.parse().ok()?))
}

fn node(node: &Value) -> Node {
    let text = |name: &str| node[name].as_str().expect("a text").to_owned();
    Node {
        id: text("id"),
        epoch: text("epoch"),
        role: text("role"),
        pid: node["pid"].as_u64().expect("a pid") as u32,
        address: text("address"),
        admin: text("admin"),
        state: text("state"),
    }
}

fn text_of(mut file: &File) -> String {
    let mut text = Vec::new();
    let _ = file.rewind();
    let _ = file.read_to_end(&mut text);
    String::from_utf8_lossy(&text).into_owned()
}

impl Drop for Up {
    fn drop(&mut self) {
        for pid in &self.pids {
            let _ = kill_process(pid_of(*pid), Signal::CONT);
        }
        let _ = kill_process(pid_of(self.child.id()), Signal::TERM);
        for _ in 0..200 {
            if matches!(self.child.try_wait(), Ok(Some(_))) {
                break;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
        for pid in self.pids.iter().filter(|pid| is_alive(**pid)) {
            let _ = kill_process(pid_of(*pid), Signal::KILL);
        }
        if std::thread::panicking() {
            eprintln!("--- log of baton up ---\n{}", text_of(self.log.as_file()));
        }
        self.expected.check(&self.log());
    }
}
