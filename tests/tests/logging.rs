//! The reader of the log stops: requests are served, probes are answered, and lost lines are counted.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};

use baton_tests::check::prompts;
use baton_tests::{Ask, Client, eventually, executable};
use futures::future::join_all;

/// A cluster whose standard error is a pipe that no one reads.
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

    async fn admin_ports(&self) -> Vec<Client> {
        let cluster = self.client.get_json("/debug/cluster").await;
        let nodes = cluster["nodes"].as_array().expect("nodes").iter();
        nodes
            .map(|node| Client::new(node["admin"].as_str().expect("text").parse().expect("an address")))
            .collect()
    }
}

impl Drop for Unread {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

async fn lost_lines(client: &Client) -> u64 {
    let page = client.get("/metrics").await.1;
    let count =
        page.lines().find(|line| line.starts_with("baton_router_log_lines_lost_total ")).expect("the metric");
    count.rsplit(' ').next().expect("a count").parse().expect("a number")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_log_reader_that_stops_stops_no_process() {
    let unread = Unread::start();
    let admins = unread.admin_ports().await;
    for prompts in prompts(5, 200, 60).chunks(20) {
        let asks: Vec<Ask> = prompts.iter().map(|prompt| Ask::new(prompt.clone(), 8)).collect();
        let answers = join_all(asks.iter().map(|ask| unread.client.ask(ask))).await;
        answers.into_iter().for_each(|answer| assert!(!answer.expect("an answer").tokens.is_empty()));
    }
    for client in admins.iter().chain([&unread.client]) {
        assert_eq!(client.get("/live").await.0.as_u16(), 200);
        assert_eq!(client.get("/ready").await.0.as_u16(), 200);
    }
    eventually("the router to lose lines", async || {
        let _ = unread.client.ask(&Ask::new(vec![1; 60], 8)).await;
        (lost_lines(&unread.client).await > 0).then_some(())
    })
    .await;
}
