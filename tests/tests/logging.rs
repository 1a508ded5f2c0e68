//! If the reader of the log stops, requests are served, probes are answered, and lost lines are counted.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use baton_tests::check::prompts;
use baton_tests::probe::{Probed, serves_another, while_probed};
use baton_tests::{Ask, Client, eventually, executable};
use futures::future::join_all;
use serde_json::Value;
use tokio::time::Instant;

/// A cluster whose standard error is a pipe without a reader.
struct Unread {
    child: Child,
    client: Client,
}

impl Unread {
    fn start() -> Self {
        let mut child = Command::new(executable::baton())
            .args(["up", "--model", "mock", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"])
            .env("BATON_LOG", "trace")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("baton starts");
        let mut ready = String::new();
        let stdout = child.stdout.as_mut().expect("it is piped");
        BufReader::new(stdout).read_line(&mut ready).expect("text");
        let http = ready.split_once("http=http://").expect("the ready line").1;
        let address = http.split_whitespace().next().expect("an address").parse().expect("an address");
        Self { child, client: Client::new(address) }
    }

    /// Returns the router's HTTP port, and every node's admin port.
    async fn health_ports(&self) -> Vec<Probed> {
        let cluster = self.client.get_json("/debug/cluster").await;
        let node = |node: &Value| {
            let admin = node["admin"].as_str().expect("text").parse().expect("an address");
            Probed { client: Client::new(admin), pid: node["pid"].as_u64().expect("a pid") as u32 }
        };
        let nodes = cluster["nodes"].as_array().expect("nodes").iter().map(node);
        let router = Probed { client: self.client.clone(), pid: self.child.id() };
        std::iter::once(router).chain(nodes).collect()
    }
}

impl Drop for Unread {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The time for which the processes are probed after the first lost line.
const AFTER: Duration = Duration::from_secs(2);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_log_reader_that_stops_stops_no_process() {
    let unread = Unread::start();
    let probed = unread.health_ports().await;
    assert!(probed.len() > 2, "{probed:?}");
    let asked = async {
        for prompts in prompts(5, 200, 60).chunks(20) {
            let asks: Vec<Ask> = prompts.iter().map(|prompt| Ask::new(prompt.clone(), 8)).collect();
            let answers = join_all(asks.iter().map(|ask| unread.client.ask(ask))).await;
            answers.into_iter().for_each(|answer| assert!(!answer.expect("an answer").tokens.is_empty()));
        }
        eventually("the router to lose lines", async || {
            serves_another(&unread.client).await;
            (unread.client.counter("baton_router_log_lines_lost_total").await > 0).then_some(())
        })
        .await;
        let until = Instant::now() + AFTER;
        while Instant::now() < until {
            serves_another(&unread.client).await;
        }
    };
    while_probed(&probed, "an unread log", asked).await;
}
