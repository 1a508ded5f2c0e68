//! Tests of nodes that sleep and wake: under load, in the wrong state, as the last of their kind, and killed
//! while asleep.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use baton_tests::check::prompts;
use baton_tests::fleet::{Fleet, FleetNode, PACED, round_robin};
use baton_tests::logs::A_NODE_DIES;
use baton_tests::{Ask, Client, eventually, executable, undisturbed};
use serde_json::{Value, json};
use tokio::time::Instant;

/// The number of streams at one time.
const CLIENTS: usize = 6;

/// Returns a node as the router sees it: its life and its state.
async fn seen(fleet: &Fleet, node: &FleetNode) -> Option<(String, String)> {
    let cluster = fleet.client().get_json("/debug/cluster").await;
    let nodes = cluster["nodes"].as_array().expect("a list of nodes");
    let known = nodes.iter().find(|known| known["id"] == node.name.as_str())?;
    let text = |field: &str| known[field].as_str().expect("a word").to_owned();
    Some((text("epoch"), text("state")))
}

/// Lets each node sleep and wake, one after the other, some with too short a drain for their work.
async fn nap(fleet: &Fleet, n_answered: &AtomicUsize) {
    for node in &fleet.nodes {
        let (epoch, _) = seen(fleet, node).await.expect("it is awake");
        node.told("sleep").await;
        assert_eq!(node.readiness().await, (503, r#"{"ready":false,"reason":"asleep"}"#.to_owned()));
        eventually("the router to miss it", async || seen(fleet, node).await.is_none().then_some(())).await;
        let before = n_answered.load(Ordering::Relaxed);
        eventually("requests to be served without it", async || {
            (n_answered.load(Ordering::Relaxed) > before + CLIENTS).then_some(())
        })
        .await;
        node.told("wake").await;
        assert_eq!(node.readiness().await.0, 200, "it answers when it is ready");
        let (next, state) = eventually("the router to see it", async || {
            seen(fleet, node).await.filter(|(_, state)| state == "ready")
        })
        .await;
        assert_ne!(next, epoch, "another life, {state}");
        let served = format!("baton_node_steps_total{{role=\"{}\"}}", node.role);
        let page = || async { Client::new(node.admin).counter(&served).await };
        let before = page().await;
        eventually("it to serve again", async || (page().await > before).then_some(())).await;
    }
}

/// Runs streams over these connectors while each node sleeps and wakes.
async fn nodes_nap_over(connectors: &[&str]) {
    let ask = |prompt| Ask::new(prompt, 60).with("ignore_eos", true.into());
    let asks: Vec<Ask> = prompts(47, 20, 300).into_iter().map(ask).collect();
    let expected = undisturbed(&asks).await;
    let wires = ("BATON_TRANSFER__CONNECTORS", format!("{connectors:?}"));
    // Decode nodes get a short drain, so that their running work continues on other nodes when they are asked
    // to sleep.
    let hasty = |role| match role {
        "decode" => vec![wires.clone(), ("BATON_NODE__DRAIN_MS", "40".to_owned())],
        _ => vec![wires.clone()],
    };
    let fleet = Fleet::start_each(PACED, 2, 2, round_robin(), hasty).await;
    fleet.expect_log(A_NODE_DIES);
    fleet.expect_log(&["drain before sleep timed out"]);
    let client = fleet.client();
    client.ask_while(CLIENTS, (&asks, &expected), async |next| nap(&fleet, next).await).await;
    fleet.baseline().await;
    assert!(
        fleet.nodes.iter().any(|node| node.process.log().contains("drain before sleep timed out")),
        "and one was late"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_sleep_under_load_and_no_request_is_lost() {
    nodes_nap_over(&["tcp"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_sleep_whose_memory_others_have_mapped() {
    // Both connectors are enabled, because shared memory may be gone a moment before its node.
    nodes_nap_over(&["shm", "tcp"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_says_what_it_cannot_do_in_the_state_that_it_is_in() {
    let mut fleet = Fleet::start(PACED, 1, 1).await;
    fleet.expect_log(A_NODE_DIES);
    let node = &fleet.nodes[1];
    let code = |body: &Value| body["error"]["code"].as_str().unwrap_or_default().to_owned();

    let (status, body) = node.tell("wake").await;
    assert_eq!((status, code(&body)), (409, "awake_already".to_owned()));
    let router = format!("http://{}", fleet.http);
    let asleep = executable::run(&["sleep", &node.name, "--router", &router]);
    let admin = format!("http://{}", node.admin);
    let said = asleep.stdout;
    assert!(
        said.starts_with("asleep after ") && said.ends_with(&format!("; baton wake {admin}\n")),
        "{said}"
    );
    let (status, body) = node.tell("sleep").await;
    assert_eq!((status, code(&body)), (409, "asleep_already".to_owned()));
    assert_eq!(node.readiness().await.0, 503);
    assert_eq!(Client::new(node.admin).get("/rollout").await.0.as_u16(), 200, "a rollout goes on beyond it");
    assert_eq!(Client::new(node.admin).counter("baton_node_asleep{role=\"decode\"}").await, 1);
    assert_eq!(
        Client::new(node.admin).counter("baton_node_kv_blocks{role=\"decode\",state=\"free\"}").await,
        0
    );
    eventually("the router to miss it", async || seen(&fleet, node).await.is_none().then_some(())).await;
    let unknown = executable::run(&["wake", &node.name, "--router", &router]);
    assert_eq!(unknown.status.code(), Some(1));
    assert!(unknown.stderr.contains("for a sleeping node, use its admin port"));
    assert_eq!(Client::new(node.admin).get("/sleep").await.0.as_u16(), 405, "it is asked by a post");

    let awake = executable::run(&["wake", &admin]);
    assert!(awake.stdout.starts_with("awake after "), "{}", awake.stderr);
    assert_eq!(Client::new(node.admin).counter("baton_node_asleep{role=\"decode\"}").await, 0);
    let again = executable::run(&["wake", &admin]);
    assert_eq!(again.stderr, format!("error: {admin}: the node is awake already (awake_already)\n"));
    fleet.all_ready().await;

    // A sleeping node ends at once when it is stopped, and can be killed.
    node.told("sleep").await;
    let began = Instant::now();
    fleet.nodes[1].process.restart().await;
    assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
    fleet.all_ready().await;
    fleet.nodes[1].told("sleep").await;
    fleet.nodes[1].process.revive();
    fleet.all_ready().await;
    let ask = Ask::new(vec![1, 2, 3], 5).with("ignore_eos", true.into());
    assert_eq!(fleet.client().ask(&ask).await.expect("it serves").tokens.len(), 5);
}

/// Returns the status of a call to the node's gRPC port.
async fn called(node: &FleetNode) -> tonic::Status {
    let channel = tonic::transport::Endpoint::from_shared(format!("http://{}", node.grpc)).expect("a URL");
    let channel = channel.connect().await.expect("it listens");
    let mut status = proto::v1::node_status_client::NodeStatusClient::new(channel);
    status.ledger(proto::v1::LedgerRequest { blocks: false }).await.expect_err("it sleeps")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_last_of_its_kind_may_sleep_too() {
    let fleet = Fleet::start(PACED, 1, 1).await;
    fleet.expect_log(A_NODE_DIES);
    let client = fleet.client();
    let ask = |prompt: u32| Ask::new(vec![prompt; 40], 5).with("ignore_eos", true.into());
    let first = client.ask(&ask(1)).await.expect("both are awake");
    let second = client.ask(&ask(1)).await.expect("and it is cached");
    assert!(second.cached_tokens > 0 && second.tokens == first.tokens, "{second:?}");
    for node in &fleet.nodes {
        node.told("sleep").await;
        let began = Instant::now();
        let answer = client.ask(&ask(2).header("x-baton-timeout-ms", 20_000)).await;
        assert!(began.elapsed() < Duration::from_secs(10), "it waits for no deadline: {:?}", began.elapsed());
        match (node.role, answer) {
            // The request is served without a prefill node, because a decode node computes prompts too.
            ("prefill", answer) => assert_eq!(answer.expect("it is served").tokens.len(), 5),
            (_, Err(refused)) => assert_eq!((refused.status, &*refused.code), (Some(503), "no_nodes")),
            (_, Ok(answer)) => panic!("no node was there: {answer:?}"),
        }
        let refused = called(node).await;
        assert_eq!((refused.code(), refused.message()), (tonic::Code::Unavailable, "the node sleeps"));
        node.told("wake").await;
        fleet.all_ready().await;
        assert_eq!(client.ask(&ask(1)).await.expect("both are awake").tokens, first.tokens);
    }
    let forgotten = client.ask(&ask(2)).await.expect("both are awake");
    assert_eq!(forgotten.cached_tokens, 0, "what the decode node computed alone is gone");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_port_that_is_taken_meanwhile_is_named_and_waited_for() {
    let fleet = Fleet::start(PACED, 1, 1).await;
    fleet.expect_log(A_NODE_DIES);
    fleet.expect_log(&["wake failed, the node stays asleep"]);
    let node = &fleet.nodes[1];
    node.told("sleep").await;
    let squatter = tokio::net::TcpListener::bind(node.kv).await.expect("it is free while the node sleeps");
    let (status, body) = node.tell("wake").await;
    let message = body["error"]["message"].as_str().unwrap_or_default();
    assert_eq!((status, body["error"]["code"].as_str()), (503, Some("cannot_wake")));
    assert!(message.contains(&node.kv.to_string()), "{message}");
    assert_eq!(node.readiness().await, (503, r#"{"ready":false,"reason":"asleep"}"#.to_owned()));
    assert_eq!(Client::new(node.admin).counter("baton_node_asleep{role=\"decode\"}").await, 1);
    assert_eq!(called(node).await.message(), "the node sleeps");
    drop(squatter);
    node.told("wake").await;
    fleet.all_ready().await;
    let ask = Ask::new(vec![1, 2, 3], 5).with("ignore_eos", true.into());
    assert_eq!(fleet.client().ask(&ask).await.expect("it serves").tokens.len(), 5);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_may_wake_in_another_role() {
    let mut fleet = Fleet::start(PACED, 1, 2).await;
    fleet.expect_log(A_NODE_DIES);
    let admin = format!("http://{}", fleet.nodes[2].admin);
    fleet.nodes[2].told("sleep").await;
    let (status, body) = fleet.nodes[2].tell("wake?role=pool").await;
    assert_eq!((status, body["error"]["code"].as_str()), (400, Some("unknown_role")));
    let awake = executable::run(&["wake", &admin, "--role", "prefill"]);
    assert!(awake.status.success(), "{}", awake.stderr);
    fleet.all_ready().await;
    let nodes = fleet.client().get_json("/debug/cluster").await["nodes"].clone();
    let node = nodes.as_array().expect("a list").iter().find(|node| node["id"] == "decode-1").cloned();
    assert_eq!(node.expect("it is there")["role"], "prefill");
    // The other node of its kind is killed, so prompts are computed on it, and decoded by the node that still
    // decodes.
    fleet.nodes[0].process.kill();
    let prefilled = async || {
        let name = "baton_node_prefill_tokens_total{role=\"prefill\"}";
        Client::new(fleet.nodes[2].admin).counter(name).await
    };
    let (before, mut nth) = (prefilled().await, 0);
    eventually("a prompt to be computed there", async || {
        nth += 1;
        // The answer proves that the KV is right, because the mock detects foreign KV.
        let ask = Ask::new((nth..nth + 200).collect(), 20).with("ignore_eos", true.into());
        assert_eq!(fleet.client().ask(&ask).await.expect("an answer").tokens.len(), 20);
        (prefilled().await >= before + 200).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_that_have_changed_are_another_model() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = folder.path().join("m");
    std::fs::create_dir(&model).expect("a folder");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/models/llama");
    for file in std::fs::read_dir(source).expect("the folder is there") {
        let file = file.expect("a file");
        std::fs::copy(file.path(), model.join(file.file_name())).expect("a copy");
    }
    let fleet = Fleet::start(model.to_str().expect("UTF-8"), 1, 1).await;
    fleet.expect_log(A_NODE_DIES);
    fleet.expect_log(&["wake failed, the node stays asleep"]);
    let ask = Ask::new((65..85).collect(), 12).with("model", json!("m")).with("ignore_eos", json!(true));
    let before = fleet.client().ask(&ask).await.expect("an answer");
    let node = &fleet.nodes[0];
    node.told("sleep").await;
    let weights = model.join("model.safetensors");
    let original = std::fs::read(&weights).expect("the weights");
    let mut other = original.clone();
    *other.last_mut().expect("some bytes") ^= 1;
    // Another file is written and renamed over the old one, because the other node has the old one mapped.
    let replace = |bytes: &[u8]| {
        std::fs::write(model.join("new"), bytes).expect("written");
        std::fs::rename(model.join("new"), &weights).expect("renamed");
    };
    replace(&other);
    let (status, body) = node.tell("wake").await;
    let message = body["error"]["message"].as_str().unwrap_or_default();
    assert_eq!((status, body["error"]["code"].as_str()), (503, Some("cannot_wake")));
    assert!(message.contains("files have changed") && message.contains("weights: "), "{message}");
    assert_eq!(node.tell("sleep").await.0, 409, "it sleeps on");
    replace(&original);
    node.told("wake").await;
    fleet.all_ready().await;
    assert_eq!(fleet.client().ask(&ask).await.expect("an answer").tokens, before.tokens);
}
