//! Tests of the start and the stop of a router: before it knows a node, and after it was asked to stop.

use std::time::Duration;

use baton_tests::check::prompts;
use baton_tests::fleet::PACED;
use baton_tests::logs::{A_NODE_DIES, THE_REGISTRY_IS_AWAY};
use baton_tests::{Ask, Client, Etcd, Fleet, Process, Stopwatch, eventually, free_addr, in_time};
use hyper::StatusCode;
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::time::Instant;

/// The length of an answer that outlasts any drain of these tests: 2,000 steps of 4 ms.
const TOKENS: u32 = 2_000;
/// The time for which a router that stops accepts new requests.
const NOTICE: Duration = Duration::from_secs(4);

fn ask(tokens: u32) -> Ask {
    let prompt = prompts(31, 1, 50).remove(0);
    Ask::new(prompt, tokens).with("ignore_eos", true.into())
}

/// Sends a request that is refused. Returns the status, the error code, and whether there is a `Retry-After`.
async fn refused(client: &Client, path: &str, body: Value) -> (u16, String, bool) {
    let (status, headers, body) = client.post(path, body.to_string()).await;
    let body: Value = serde_json::from_str(&body).expect("JSON");
    let code = body["error"]["code"].as_str().unwrap_or_default().to_owned();
    (status.as_u16(), code, headers.contains_key("retry-after"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_without_nodes_answers_503() {
    let (folder, http) = (tempfile::tempdir().expect("a folder"), free_addr());
    let settings =
        vec![("BATON_ROUTER__HTTP", http.to_string()), ("BATON_ROUTER__GRPC", free_addr().to_string())];
    let _router = Process::start(folder.path(), "router", "router", settings);
    eventually("the router to listen", async || tokio::net::TcpStream::connect(http).await.ok()).await;
    let client = Client::new(http);
    let unavailable = (503, "no_nodes".to_owned(), true);
    for model in [json!({"model": "anything"}), json!({})] {
        let mut completion = model.clone();
        completion["prompt"] = json!("Hello");
        assert_eq!(refused(&client, "/v1/completions", completion).await, unavailable);
        let mut chat = model;
        chat["messages"] = json!([{"role": "user", "content": "Hello"}]);
        assert_eq!(refused(&client, "/v1/chat/completions", chat).await, unavailable);
    }
    assert_eq!(client.get("/v1/models/anything").await.0, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(client.get("/v1/models").await.0, StatusCode::OK);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unknown_model_is_404_once_the_nodes_are_known() {
    let fleet = Fleet::start(PACED, 1, 1).await;
    let client = fleet.client();
    let answer = eventually("the router to know its nodes", async || {
        let answer = refused(&client, "/v1/completions", json!({"model": "another", "prompt": [1, 2]})).await;
        (answer.0 != 503).then_some(answer)
    });
    assert_eq!(answer.await, (404, "model_not_found".to_owned(), false));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_that_stops_serves_on_and_ends_what_outlasts_its_drain() {
    let settings = vec![
        ("BATON_ROUTER__DRAIN_MS", "6000".to_owned()),
        ("BATON_ROUTER__NOTICE_MS", NOTICE.as_millis().to_string()),
    ];
    let mut fleet = Fleet::start_with(PACED, 1, 1, settings).await;
    let client = fleet.client();
    let mut stream = client.stream(&ask(TOKENS)).await.expect("a stream");
    let whole = ask(TOKENS);
    let whole = json!({"prompt": whole.prompt, "max_tokens": TOKENS, "ignore_eos": true});
    let whole = async {
        // The stream begins first, so that both run when the router is asked to stop.
        refused(&client, "/v1/completions", whole).await
    };
    let stop = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        let asked = Stopwatch::start();
        fleet.router.signal(Signal::TERM);
        eventually("the router to be unready", async || {
            let (status, body) = client.get("/ready").await;
            (status == StatusCode::SERVICE_UNAVAILABLE && body.contains("stopping")).then_some(())
        })
        .await;
        let served = client.ask(&ask(20)).await.expect("balancers have not noticed yet");
        assert!(served.tokens.len() == 20 && asked.elapsed() < NOTICE);
    };
    let streamed = async {
        loop {
            match stream.next().await {
                Ok(Some(_)) => {}
                ended => break ended,
            }
        }
    };
    let (whole, streamed, ()) = in_time("the stop", async { tokio::join!(whole, streamed, stop) }).await;
    assert_eq!(whole, (503, "draining".to_owned(), true));
    let failed = streamed.expect_err("the stream is cut off");
    assert_eq!((failed.status, failed.code.as_str()), (None, "draining"), "{}", failed.message);
    eventually("the router to end", async || (!fleet.router.is_alive()).then_some(())).await;
    fleet.router.expect_log(&["streamed answer to client failed"]);
    // The registry is in the router. A node may renew its lease before the next router listens.
    fleet.expect_log(&THE_REGISTRY_IS_AWAY[..1]);
    fleet.router.revive();
    fleet.all_ready().await;
    fleet.baseline().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_that_ends_at_a_stop_string_is_finished() {
    let fleet = Fleet::start(PACED, 1, 1).await;
    let client = fleet.client();
    let ended = async |outcome: &str| {
        client.counter(&format!("baton_router_requests_total{{model=\"mock\",outcome=\"{outcome}\"}}")).await
    };
    let free = json!({"prompt": "Hello", "max_tokens": 64, "temperature": 0, "ignore_eos": true});
    let (_, _, body) = client.post("/v1/completions", free.to_string()).await;
    let text = serde_json::from_str::<Value>(&body).expect("JSON")["choices"][0]["text"].clone();
    let text: Vec<char> = text.as_str().expect("text").chars().collect();
    let stop: String = text[text.len() / 2..text.len() / 2 + 2].iter().collect();
    let mut stopped = free;
    stopped["stop"] = json!([stop]);
    let (status, _, body) = client.post("/v1/completions", stopped.to_string()).await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!(
        serde_json::from_str::<Value>(&body).expect("JSON")["choices"][0]["finish_reason"],
        json!("stop"),
        "{body}"
    );
    eventually("both to be counted", async || (ended("finished").await == 2).then_some(())).await;
    assert_eq!(ended("cancelled").await, 0);
    assert_eq!(client.counter("baton_router_request_seconds_count{model=\"mock\"}").await, 2);
    fleet.baseline().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_client_gets_more_time_than_the_operator_gives() {
    let settings = vec![("BATON_ROUTER__DEADLINE_MAX_MS", "700".to_owned())];
    let fleet = Fleet::start_with(PACED, 1, 1, settings).await;
    fleet.expect_log(&["streamed answer to client failed"]);
    for ask in [ask(TOKENS), ask(TOKENS).header("x-baton-timeout-ms", 3_600_000)] {
        let began = Instant::now();
        let failed = fleet.client().ask(&ask).await.expect_err("it takes longer than it may");
        assert_eq!(failed.code, "deadline", "{}", failed.message);
        assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
    }
    fleet.baseline().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_that_starts_without_etcd_serves_with_the_members_of_before() {
    let (mut etcd, folder) = (Etcd::start(), tempfile::tempdir().expect("a folder"));
    let file = folder.path().join("members");
    let registry = ("BATON_REGISTRY__URL", etcd.url("old"));
    let settings =
        vec![registry.clone(), ("BATON_REGISTRY__MEMBERS_FILE", file.to_string_lossy().into_owned())];
    let mut fleet = Fleet::start_each(PACED, 1, 2, settings, |_| vec![registry.clone()]).await;
    fleet.expect_log(A_NODE_DIES);
    fleet.expect_log(THE_REGISTRY_IS_AWAY);
    fleet.expect_log(&["registry gives no answer, using the members from the file"]);
    let client = fleet.client();
    let expected = client.ask(&ask(20)).await.expect("served");
    eventually("the members to be written", async || {
        let bytes = std::fs::read(&file).unwrap_or_default();
        let text = String::from_utf8_lossy(&bytes).into_owned();
        fleet.nodes.iter().all(|node| text.contains(&node.name)).then_some(())
    })
    .await;

    etcd.kill();
    fleet.router.kill();
    // A node ends while neither the router nor the registry runs. It is in the members file, and must not be
    // used.
    fleet.nodes[2].process.kill();
    fleet.router.revive();
    eventually("the router to listen", async || tokio::net::TcpStream::connect(fleet.http).await.ok()).await;
    eventually("the router to be ready", async || client.get("/ready").await.0.is_success().then_some(()))
        .await;
    for _ in 0..4 {
        assert_eq!(client.ask(&ask(20)).await.expect("served without etcd"), expected);
    }
    let nodes = client.get_json("/debug/cluster").await["nodes"].clone();
    let nodes = nodes.as_array().expect("a list of nodes");
    assert!(nodes.len() == 3 && nodes.iter().all(|node| node["known_from"] == "file"), "{nodes:?}");
    let dead = nodes.iter().find(|node| node["id"] == "decode-1").expect("it is in the file");
    assert_ne!(dead["state"], "ready");

    etcd.restart();
    eventually("the registry's word", async || {
        let nodes = client.get_json("/debug/cluster").await["nodes"].clone();
        let nodes = nodes.as_array().expect("a list of nodes").clone();
        nodes
            .iter()
            .filter(|node| node["state"] == "ready")
            .all(|node| node["known_from"] == "registry")
            .then_some(())
    })
    .await;
    fleet.nodes[2].process.revive();
    fleet.all_ready().await;
    fleet.baseline().await;
}
