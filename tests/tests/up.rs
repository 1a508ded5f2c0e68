//! Tests of `baton up`: it starts a cluster with one command, and leaves no process behind.

use std::time::Duration;

use baton_tests::logs::{A_NODE_DIES, THE_REGISTRY_IS_AWAY};
use baton_tests::up::is_alive;
use baton_tests::{Ask, Up, eventually, executable};
use rustix::process::Signal;
use serde_json::{Value, json};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_stops_when_asked_and_leaves_no_process() {
    let mut up = Up::start(&["--prefill", "2", "--decode", "2"]).await;
    let nodes = up.nodes().await;
    assert_eq!(nodes.len(), 4);
    assert!(nodes.iter().all(|node| node.state == "ready" && is_alive(node.pid)), "{nodes:?}");
    assert_eq!(up.alive().len(), 4);
    assert_eq!(up.stop().await, Some(0), "{}", up.log());
    assert_eq!(up.alive(), Vec::<u32>::new());
}

/// Only the router has a setting for the format of tool calls, and a node refuses settings that it does not have.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_process_gets_the_settings_of_the_model_that_it_has() {
    let env = [("BATON_MODEL__TOOL_FORMAT", "hermes"), ("BATON_MODEL__KV_MEMORY", "64MiB")];
    let up = Up::start_with(&["--pool", "1", "--pool-memory", "64MiB"], &env).await;
    assert!(up.nodes().await.iter().all(|node| node.state == "ready"), "{}", up.log());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn its_nodes_do_not_outlive_it() {
    let up = Up::start(&["--prefill", "1", "--decode", "1"]).await;
    up.expect_log(THE_REGISTRY_IS_AWAY);
    up.signal(up.pid(), Signal::KILL);
    eventually("the nodes to notice", async || up.alive().is_empty().then_some(())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_drains_before_it_stops() {
    let mut up = Up::start(&["--model", "mock:slow"]).await;
    let client = up.client();
    let ask = Ask::new(vec![5; 40], 60).with("ignore_eos", true.into());
    let mut stream = client.stream(&ask).await.expect("a stream");
    stream.next().await.expect("a first event");
    up.signal(up.pid(), Signal::INT);
    let mut n_events = 1;
    while stream.next().await.expect("the stream goes on").is_some() {
        n_events += 1;
    }
    assert!(n_events >= 60, "{n_events} events");
    let code = eventually("baton up to stop", async || (!is_alive(up.pid())).then_some(())).await;
    assert_eq!(code, ());
    assert_eq!(up.stop_code(), Some(0));
    assert!(up.alive().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_tells_the_truth() {
    let up = Up::start(&["--prefill", "1", "--decode", "1"]).await;
    let client = up.client();
    for path in ["/live", "/ready", "/health"] {
        assert_eq!(client.get(path).await.0, 200, "{path}");
    }
    let victim = up.of_role("decode").await.swap_remove(0);
    up.expect_log(A_NODE_DIES);
    up.signal(victim.pid, Signal::KILL);
    eventually("unreadiness", async || (client.get("/ready").await.0 == 503).then_some(())).await;
    assert_eq!(client.get("/live").await.0, 200);
    // The cluster becomes ready again, because `up` restarts the node.
    eventually("readiness", async || (client.get("/ready").await.0 == 200).then_some(())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_is_lost_comes_back() {
    let mut up = Up::start(&["--prefill", "1", "--decode", "1"]).await;
    up.expect_log(A_NODE_DIES);
    let victim = up.of_role("decode").await.swap_remove(0);
    up.signal(victim.pid, Signal::KILL);
    let back = eventually("the node to come back", async || {
        let nodes = up.of_role("decode").await;
        nodes.into_iter().find(|node| node.pid != victim.pid && node.state == "ready")
    })
    .await;
    assert_eq!((&back.id, back.epoch == victim.epoch), (&victim.id, false));
    let answer = up.client().ask(&Ask::new(vec![1, 2, 3], 4)).await.expect("requests are served again");
    assert!(!answer.tokens.is_empty());
    let log = up.log();
    assert!(log.contains("decode-0 ended with signal: 9 (SIGKILL); it starts again in 1 s"), "{log}");
    assert_eq!(up.stop().await, Some(0), "{}", up.log());
    assert!(!is_alive(back.pid), "the new process is stopped too");
}

/// A model file is damaged while the cluster runs, so that the node fails at each start.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_fails_again_and_again_waits_longer_each_time() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = folder.path().join("mock.toml");
    std::fs::write(&model, "name = \"mock\"\n").expect("written");
    let path = format!("mock:{}", model.display());
    let mut up = Up::start(&["--prefill", "1", "--decode", "1", "--model", &path]).await;
    up.expect_log(A_NODE_DIES);
    std::fs::write(&model, "name = 7\n").expect("written");
    let victim = up.of_role("decode").await.swap_remove(0);
    up.signal(victim.pid, Signal::KILL);
    for seconds in [1, 2, 4] {
        let said = format!("it starts again in {seconds} s\n");
        eventually(&said, async || up.log().contains(&said).then_some(())).await;
    }
    let log = up.log();
    let last_lines = log.split("it starts again in 2 s\n").nth(1).expect("it was said");
    let last_line = last_lines.lines().next().expect("a line");
    assert!(last_line.starts_with("  ") && last_line.contains("mock.toml"), "{log}");
    // `up` must stop even in the middle of a pause.
    assert_eq!(up.stop().await, Some(0), "{}", up.log());
    assert!(up.alive().is_empty());
}

fn run(args: &[&str], env: &[(&str, &str)]) -> (i32, String, String) {
    let ended = executable::finish(executable::command().args(args).envs(env.iter().copied()));
    (ended.status.code().expect("an exit code"), ended.stdout, ended.stderr)
}

#[test]
fn wrong_input_is_refused_with_what_would_be_right() {
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("node.toml");
    std::fs::write(&file, "[node]\nlissen = \"127.0.0.1:0\"\n").expect("written");
    let file = file.to_str().expect("a path");
    let (code, _, stderr) = run(&["prefill", "--check", "--config", file], &[]);
    assert_eq!(code, 2, "{stderr}");
    assert!(stderr.contains("node.lissen") && stderr.contains("did you mean `node.listen`"), "{stderr}");

    let (code, _, stderr) = run(&["router", "--check"], &[("BATON_ROUTER__POLICY", "best")]);
    assert_eq!(code, 2, "{stderr}");
    assert!(stderr.contains("random, round-robin, least-loaded"), "{stderr}");

    let (code, _, stderr) = run(&["decode", "--check"], &[("BATON_EXPERT__DECODE__LANDING_MAX", "3")]);
    assert_eq!(code, 2, "{stderr}");
    assert!(stderr.contains("decode.landings_max"), "{stderr}");

    let (code, _, stderr) = run(&["up", "--model", "nonsense"], &[]);
    assert_eq!(code, 2, "{stderr}");
    assert!(stderr.contains("nonsense"), "{stderr}");

    let (code, _, stderr) = run(&["up"], &[("BATON_MODEL__TOOL_FORMAT", "hermez")]);
    assert_eq!(code, 2, "{stderr}");
    assert!(stderr.contains("\"hermez\" is not one of hermes, "), "{stderr}");

    let (code, _, stderr) = run(&["up", "--http", "127.0.0.1:99999"], &[]);
    assert_eq!(code, 2, "{stderr}");

    let (code, _, stderr) = run(&["up", "--kv-memory", "300%"], &[]);
    assert_eq!(code, 2, "{stderr}");
    assert!(stderr.contains("not an amount of memory"), "{stderr}");

    for role in ["prefill", "pool"] {
        let (code, _, stderr) = run(&[role, "--check"], &[("BATON_TRANSFER__CONNECTORS", "[\"pigeon\"]")]);
        assert_eq!(code, 2, "{stderr}");
        assert!(stderr.contains("\"pigeon\" is not one of auto, "), "{stderr}");
        let (code, _, stderr) = run(&[role, "--check"], &[("BATON_REGISTRY__URL", "paper://wall")]);
        assert_eq!(code, 2, "{stderr}");
        assert!(stderr.contains("paper"), "{stderr}");
    }

    let gpu = [("BATON_MODEL__DEVICE", "cuda:0"), ("BATON_MODEL__KV_MEMORY", "50%")];
    let (code, _, stderr) = run(&["decode", "--check"], &gpu);
    assert_eq!(code, 2, "{stderr}");
    assert!(stderr.contains("give an amount for a GPU"), "{stderr}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_for_kv_is_what_is_asked_for() {
    let blocks = async |size: &str| {
        let up = Up::start(&["--colocated", "--kv-memory", size]).await;
        up.kv().await[0]["total"].as_u64().expect("a number")
    };
    // The sizes follow from the mock's blocks of 8 KiB.
    assert_eq!(blocks("4MiB").await, 512);
    assert!(blocks("2%").await > 512, "of what is free here");
}

/// The node has memory for 512 tokens of a model with a context of 2,048. A request without a number of
/// tokens gets as many as there is room for. A request for too many gets an error that names the setting.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn little_memory_makes_sequences_shorter() {
    let up = Up::start(&["--model", "demo", "--kv-memory", "768KiB"]).await;
    let ask = async |more: Value| {
        let mut body =
            json!({"model": "demo", "messages": [{"role": "user", "content": "What is prefill?"}]});
        body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        let (status, _, body) = up.client().post("/v1/chat/completions", body.to_string()).await;
        (status.as_u16(), serde_json::from_str::<Value>(&body).expect("JSON"))
    };
    let (status, answer) = ask(json!({})).await;
    assert_eq!((status, &answer["choices"][0]["finish_reason"]), (200, &json!("stop")), "{answer}");
    let (status, answer) = ask(json!({"ignore_eos": true})).await;
    assert_eq!((status, &answer["choices"][0]["finish_reason"]), (200, &json!("length")), "{answer}");
    assert_eq!(answer["usage"]["total_tokens"], 512);
    let (status, refusal) = ask(json!({"max_tokens": 600})).await;
    assert_eq!((status, &refusal["error"]["code"]), (400, &json!("context_length_exceeded")), "{refusal}");
    let says = refusal["error"]["message"].as_str().expect("a sentence");
    assert!(says.contains("the 512 tokens") && says.contains("`model.kv_memory`"), "{says}");
}

#[test]
fn help_and_version_read_well() {
    let (code, stdout, _) = run(&["--version"], &[]);
    assert_eq!((code, stdout.trim()), (0, concat!("baton ", env!("CARGO_PKG_VERSION"))));
    let (code, stdout, _) = run(&["--help"], &[]);
    assert_eq!(code, 0);
    for command in ["up", "router", "prefill", "decode", "chat", "bench"] {
        assert!(stdout.lines().any(|line| line.trim_start().starts_with(command)), "{command} in\n{stdout}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chat_answers() {
    let up = Up::start(&[]).await;
    let url = format!("http://{}", up.http);
    let asked = tokio::task::spawn_blocking(move || {
        run(&["chat", "--url", &url, "--max-tokens", "20", "hello"], &[])
    });
    let (code, stdout, stderr) =
        tokio::time::timeout(Duration::from_secs(30), asked).await.expect("in time").expect("it ran");
    assert_eq!(code, 0, "{stderr}");
    assert!(!stdout.trim().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_log_level_reaches_router_and_nodes() {
    let up = Up::start_with(&[], &[("BATON_LOG__LEVEL", "info"), ("BATON_LOG__FORMAT", "json")]).await;
    let log = up.log();
    for process in ["router", "prefill", "decode"] {
        let own = format!("\"process\":\"{process}\"");
        let told = log.lines().any(|line| line.contains("\"INFO\"") && line.contains(&own));
        assert!(told, "an INFO line of the {process} in\n{log}");
    }
}
