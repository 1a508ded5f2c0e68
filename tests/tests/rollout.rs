//! Weights of a model change while it serves, beside nodes with wrong weights. No answer mixes weights or
//! comes from the wrong ones, and every node reports correctly whether it gets work. Two models share a
//! cluster.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use baton_tests::check::prompts;
use baton_tests::logs::{A_NODE_DIES, THE_REGISTRY_IS_AWAY};
use baton_tests::{Answer, Ask, Client, Etcd, Process, Stopwatch, eventually, free_addr, in_time};
use futures::future::join_all;
use serde_json::Value;
use tempfile::TempDir;
use tokio::time::Instant;

const TOKENS: u32 = 40;
/// The number of requests at one time.
const CLIENTS: usize = 6;
/// The number of router restarts, and the number of clusters that share them.
const RESTARTS: usize = 20;
const CLUSTERS: usize = 4;

/// A cluster whose nodes can change their model between two lives.
struct Cluster {
    folder: TempDir,
    router: Process,
    http: SocketAddr,
    registry: String,
    nodes: Vec<Node>,
    _etcd: Option<Etcd>,
}

struct Node {
    name: String,
    process: Process,
    model: PathBuf,
    admin: SocketAddr,
}

impl Cluster {
    /// Starts a router without nodes. Its registry is embedded or in an etcd.
    async fn start(etcd: Option<Etcd>) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let (http, grpc) = (free_addr(), free_addr());
        let mut settings =
            vec![("BATON_ROUTER__HTTP", http.to_string()), ("BATON_ROUTER__GRPC", grpc.to_string())];
        settings.extend(etcd.as_ref().map(|etcd| ("BATON_REGISTRY__URL", etcd.url("rollout"))));
        let registry = etcd.as_ref().map_or(format!("embedded://{grpc}"), |etcd| etcd.url("rollout"));
        let router = Process::start(folder.path(), "router", "router", settings);
        router.expect_log(A_NODE_DIES);
        router.expect_log(THE_REGISTRY_IS_AWAY);
        eventually("the router to listen", async || tokio::net::TcpStream::connect(http).await.ok()).await;
        Self { folder, router, http, registry, nodes: Vec::new(), _etcd: etcd }
    }

    /// Starts a node. Returns when the router lists it.
    async fn add(&mut self, role: &'static str, name: &str, model: &str) {
        let (path, admin) = (self.folder.path().join(format!("{name}.toml")), free_addr());
        std::fs::write(&path, mock(model)).expect("written");
        let settings = vec![
            ("BATON_NODE__ID", name.to_owned()),
            ("BATON_NODE__LISTEN", free_addr().to_string()),
            ("BATON_NODE__ADMIN", admin.to_string()),
            ("BATON_MODEL__PATH", format!("mock:{}", path.display())),
            ("BATON_TRANSFER__CONNECTORS", "[\"tcp\"]".to_owned()),
            ("BATON_REGISTRY__URL", self.registry.clone()),
        ];
        let process = Process::start(self.folder.path(), name, role, settings);
        process.expect_log(A_NODE_DIES);
        process.expect_log(THE_REGISTRY_IS_AWAY);
        self.nodes.push(Node { name: name.to_owned(), process, model: path, admin });
        let node = &self.nodes[self.nodes.len() - 1];
        self.state(node, &["ready", "superseded"]).await;
    }

    /// Stops a node. Returns when it has ended.
    async fn remove(&mut self, name: &str) {
        let at = self.nodes.iter().position(|node| node.name == name).expect("it was added");
        let mut node = self.nodes.remove(at);
        node.process.signal(rustix::process::Signal::TERM);
        eventually("the node to stop", async || (!node.process.is_alive()).then_some(())).await;
    }

    /// Restarts a node with another model. Returns when the router lists its new life.
    async fn change(&mut self, nth: usize, model: &str) {
        std::fs::write(&self.nodes[nth].model, mock(model)).expect("written");
        self.nodes[nth].process.restart().await;
        self.state(&self.nodes[nth], &["ready", "superseded"]).await;
    }

    fn client(&self) -> Client {
        Client::new(self.http)
    }

    /// Waits until the router shows the current life of a node in one of these states.
    async fn state(&self, node: &Node, states: &[&str]) {
        let what = format!("{} to be {states:?}", node.name);
        eventually(&what, async || {
            let nodes = self.client().get_json("/debug/cluster").await["nodes"].clone();
            let pid = u64::from(node.process.pid());
            let known = nodes.as_array().expect("a list").iter().find(|known| known["pid"] == pid)?.clone();
            states.iter().any(|state| known["state"] == *state).then_some(())
        })
        .await;
    }

    /// Returns the node with this name.
    fn node(&self, name: &str) -> &Node {
        self.nodes.iter().find(|node| node.name == name).expect("it was added")
    }

    /// Waits until every node's model has run.
    async fn all_are_used(&self) {
        let used = async || self.steps().await.iter().all(|steps| *steps > 0).then_some(());
        eventually("all nodes to be used", used).await;
    }

    /// Returns the number of steps that each node's model has run.
    async fn steps(&self) -> Vec<u64> {
        join_all(self.nodes.iter().map(async |node| {
            let role = node.name.split('-').next().expect("a role");
            Client::new(node.admin).counter(&format!("baton_node_steps_total{{role=\"{role}\"}}")).await
        }))
        .await
    }
}

impl Node {
    /// Waits until `/ready` has this status. Returns its text.
    async fn readiness(&self, status: u16) -> String {
        self.page("/ready", status, "").await
    }

    /// Waits until a page has this status and text. Returns its text.
    async fn page(&self, path: &str, status: u16, says: &str) -> String {
        let what = format!("{path} of {} to be {status}", self.name);
        eventually(&what, async || {
            let (found, body) = Client::new(self.admin).get(path).await;
            (found.as_u16() == status && body.contains(says)).then_some(body)
        })
        .await
    }
}

/// Returns the settings of a paced mock. `model` is its name and its weights: `name weights`.
fn mock(model: &str) -> String {
    let (name, weights) = model.split_once(' ').expect("a name and weights");
    format!(
        "name = \"{name}\"\nweights = {weights}\n[cost]\nstep_ms = 4.0\ndecode_row_ms = 0.05\nprefill_token_ms = 0.05\n"
    )
}

fn asks(model: &str) -> Vec<Ask> {
    let ask = |prompt| {
        let ask = Ask::new(prompt, TOKENS).with("ignore_eos", true.into());
        ask.with("model", Value::from(model))
    };
    prompts(19, 12, 150).into_iter().map(ask).collect()
}

async fn answers(client: &Client, asks: &[Ask]) -> Vec<Answer> {
    let all = join_all(asks.iter().map(|ask| client.ask(ask)));
    in_time("all answers", all).await.into_iter().map(|answer| answer.expect("an answer")).collect()
}

/// Sends requests until `enough` is set. Returns every answer with the number of its question. A failed
/// request fails the test.
async fn load(client: &Client, asks: &[Ask], enough: &AtomicBool) -> Vec<(usize, Vec<u32>)> {
    let next = AtomicUsize::new(0);
    let one = async || {
        let mut answers = Vec::new();
        while !enough.load(Ordering::Relaxed) {
            let idx = next.fetch_add(1, Ordering::Relaxed) % asks.len();
            answers.push((idx, client.ask(&asks[idx]).await.expect("no request fails").tokens));
        }
        answers
    };
    join_all((0..CLIENTS).map(|_| one())).await.concat()
}

/// Checks until `enough` is set that `/ready` of the router is 200.
async fn stays_ready(client: &Client, enough: &AtomicBool) {
    while !enough.load(Ordering::Relaxed) {
        let (status, body) = client.get("/ready").await;
        assert_eq!(status.as_u16(), 200, "{body}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Gives the nodes of two prefill and two decode nodes new weights, one after the other, under load.
async fn roll(etcd: Option<Etcd>, order: [usize; 4]) {
    let mut cluster = Cluster::start(etcd).await;
    for (role, name) in
        [("prefill", "prefill-0"), ("prefill", "prefill-1"), ("decode", "decode-0"), ("decode", "decode-1")]
    {
        cluster.add(role, name, "mock 1").await;
    }
    let (client, asks) = (cluster.client(), asks("mock"));
    let before = answers(&client, &asks).await;
    let enough = AtomicBool::new(false);
    let rolling = async {
        for nth in order {
            cluster.change(nth, "mock 2").await;
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
        let groups = cluster.client().get_json("/debug/cluster").await["models"][0]["groups"].clone();
        assert_eq!(groups.as_array().map(Vec::len), Some(1), "{groups}");
        cluster.all_are_used().await;
        enough.store(true, Ordering::Relaxed);
    };
    let all = async { tokio::join!(load(&client, &asks, &enough), stays_ready(&client, &enough), rolling).0 };
    let given = in_time("the rollout", all).await;
    let after = answers(&client, &asks).await;
    assert!(before.iter().zip(&after).all(|(before, after)| before.tokens != after.tokens));
    let of =
        |answers: &[Answer]| given.iter().filter(|(idx, tokens)| answers[*idx].tokens == *tokens).count();
    let (n_before, n_after) = (of(&before), of(&after));
    assert_eq!(n_before + n_after, given.len(), "no answer mixes weights");
    assert!(n_before > CLIENTS && n_after > 0, "{n_before} and {n_after} answers");
    for node in &cluster.nodes {
        node.readiness(200).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rolling_change_of_weights_loses_and_mixes_no_request() {
    roll(None, [0, 1, 2, 3]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rolling_change_of_weights_in_etcd_loses_and_mixes_no_request() {
    roll(Some(Etcd::start()), [2, 0, 3, 1]).await;
}

/// Plays the steps of two Deployments with `maxSurge: 1` and `maxUnavailable: 0`: one new node of each kind
/// at a time. One old node of that kind is stopped when `/rollout` of the new one says yes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deployments_that_wait_for_the_rollout_page_lose_no_request() {
    let mut cluster = Cluster::start(None).await;
    for nth in 0..2 {
        for role in ["prefill", "decode"] {
            cluster.add(role, &format!("{role}-old-{nth}"), "mock 1").await;
        }
    }
    for node in &cluster.nodes {
        node.page("/rollout", 200, "").await;
    }
    let (client, asks) = (cluster.client(), asks("mock"));
    let before = answers(&client, &asks).await;
    let enough = AtomicBool::new(false);
    let rolling = async {
        for nth in 0..2 {
            cluster.add("prefill", &format!("prefill-new-{nth}"), "mock 2").await;
            if nth == 0 {
                // A change of prefill nodes alone stalls, and reports the reason.
                let new = cluster.node("prefill-new-0");
                new.page("/rollout", 503, "no usable decode node agrees with it").await;
                tokio::time::sleep(Duration::from_secs(1)).await;
                new.page("/rollout", 503, "no usable decode node agrees with it").await;
            }
            cluster.add("decode", &format!("decode-new-{nth}"), "mock 2").await;
            for role in ["prefill", "decode"] {
                cluster.node(&format!("{role}-new-{nth}")).page("/rollout", 200, "").await;
            }
            if nth == 0 {
                // The new node is not ready, because the old nodes still serve. A rollout that waits for
                // `/ready` never ends.
                cluster.node("decode-new-0").page("/ready", 503, "is served by 4 nodes").await;
            }
            for role in ["prefill", "decode"] {
                cluster.remove(&format!("{role}-old-{nth}")).await;
            }
        }
        cluster.all_are_used().await;
        enough.store(true, Ordering::Relaxed);
    };
    let all = async { tokio::join!(load(&client, &asks, &enough), stays_ready(&client, &enough), rolling).0 };
    let given = in_time("the rollout", all).await;
    let after = answers(&client, &asks).await;
    let of =
        |answers: &[Answer]| given.iter().filter(|(idx, tokens)| answers[*idx].tokens == *tokens).count();
    assert_eq!(of(&before) + of(&after), given.len(), "no answer mixes weights");
    assert!(of(&before) > CLIENTS && of(&after) > 0, "{} and {}", of(&before), of(&after));
    assert_eq!(cluster.nodes.len(), 4);
    for node in &cluster.nodes {
        node.readiness(200).await;
    }
}

/// Restarts the router and sends requests. Returns the number of answers. Each must equal the expected one.
async fn restarted(cluster: &mut Cluster, (asks, expected): (&[Ask], &[Answer])) -> usize {
    cluster.router.revive();
    let http = cluster.http;
    eventually("the router to listen", async || tokio::net::TcpStream::connect(http).await.ok()).await;
    let (client, mut n_answers) = (cluster.client(), 0);
    // Requests run during the router's first decision, and while further nodes come back.
    let until = Instant::now() + Duration::from_secs(5);
    while Instant::now() < until || n_answers == 0 {
        assert!(until.elapsed() < Duration::from_secs(30), "the router serves nothing");
        let idx = n_answers % asks.len();
        match client.ask(&asks[idx]).await {
            Ok(answer) => {
                assert_eq!(answer.tokens, expected[idx].tokens, "request {idx}");
                n_answers += 1;
            }
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    }
    n_answers
}

/// The node with wrong weights comes first. If the right nodes are present, no router ever serves its
/// answers, whichever node it sees first.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restarted_router_never_serves_a_minority() {
    let asks: Vec<Ask> = asks("mock").into_iter().take(3).map(|ask| Ask { max_tokens: 4, ..ask }).collect();
    let one_cluster = async || {
        let mut cluster = Cluster::start(None).await;
        cluster.add("decode", "decode-wrong", "mock 9").await;
        let wrong = answers(&cluster.client(), &asks).await;
        for (role, name) in [("prefill", "prefill-0"), ("decode", "decode-0"), ("decode", "decode-1")] {
            cluster.add(role, name, "mock 1").await;
        }
        let reason = cluster.node("decode-wrong").readiness(503).await;
        assert!(reason.contains("weights: mock 1") && reason.contains("mock 9"), "{reason}");
        let right = answers(&cluster.client(), &asks).await;
        assert!(wrong.iter().zip(&right).all(|(wrong, right)| wrong.tokens != right.tokens));
        for _ in 0..RESTARTS / CLUSTERS {
            restarted(&mut cluster, (&asks, &right)).await;
        }
        cluster.node("decode-wrong").readiness(503).await;
    };
    in_time("all restarts", join_all((0..CLUSTERS).map(|_| one_cluster()))).await;
}

/// A right node that lost a tie against a wrong one is used soon after the wrong one has stopped or died.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn right_nodes_are_used_within_seconds_of_the_wrong_ones_end() {
    for dies in [false, true] {
        let mut cluster = Cluster::start(None).await;
        cluster.add("decode", "decode-wrong", "mock 9").await;
        cluster.add("decode", "decode-0", "mock 1").await;
        // The reason is checked too, because a node that still starts is not ready either.
        eventually("decode-0 learns that it is superseded", async || {
            let reason = cluster.node("decode-0").readiness(503).await;
            reason.contains("is served by 1 nodes").then_some(())
        })
        .await;
        let (client, ask) = (cluster.client(), asks("mock").remove(0));
        let wrong = client.ask(&ask).await.expect("an answer");
        let ended = Stopwatch::start();
        let mut removed = cluster.nodes.remove(0);
        if dies {
            removed.process.kill();
        } else {
            removed.process.signal(rustix::process::Signal::TERM);
        }
        let right = eventually("a right answer", async || {
            client.ask(&ask).await.ok().filter(|answer| answer.tokens != wrong.tokens)
        })
        .await;
        let took = ended.elapsed();
        assert!(took < Duration::from_secs(5), "{took:?}");
        assert_eq!(right.tokens.len(), TOKENS as usize);
        cluster.node("decode-0").readiness(200).await;
    }
}

/// Two models in one cluster under load. Each is answered by its own nodes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_models_share_a_cluster_and_no_node() {
    let mut cluster = Cluster::start(None).await;
    cluster.add("prefill", "prefill-a", "a 1").await;
    cluster.add("decode", "decode-a", "a 1").await;
    let (client, of_a, of_b) = (cluster.client(), asks("a"), asks("b"));
    let answers_a = answers(&client, &of_a).await;
    let failed = client.ask(&of_b[0]).await.expect_err("no node serves `b`");
    assert!(failed.status.is_some_and(|status| status == 404 || status == 503), "{failed:?}");
    cluster.add("prefill", "prefill-b", "b 2").await;
    cluster.add("decode", "decode-b", "b 2").await;
    for _ in 0..3 {
        let again = answers(&client, &of_a).await;
        assert!(again.iter().zip(&answers_a).all(|(again, first)| again.tokens == first.tokens));
    }
    assert_eq!(cluster.steps().await[2..], [0, 0], "nodes of `b` have seen nothing of `a`");
    let answers_b = answers(&client, &of_b).await;
    assert_ne!(answers_a, answers_b);
    let models = client.get_json("/v1/models").await["data"].clone();
    assert_eq!((&models[0]["id"], &models[1]["id"]), (&Value::from("a"), &Value::from("b")));
    for _ in 0..3 {
        let (again_a, again_b) = tokio::join!(answers(&client, &of_a), answers(&client, &of_b));
        let tokens = |answers: &[Answer]| answers.iter().map(|it| it.tokens.clone()).collect::<Vec<_>>();
        assert_eq!((tokens(&again_a), tokens(&again_b)), (tokens(&answers_a), tokens(&answers_b)));
    }
}
