//! `x-baton-explain`: the parts of each request's time add up, and the largest part is the cause of its delay.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;

use baton_tests::check::prompts;
use baton_tests::fleet::{PACED, Settings};
use baton_tests::wire::Wire;
use baton_tests::{Ask, Client, Fleet, Up, executable, free_addr, in_time};
use proto::v1;
use proto::v1::generate_event::Event;
use proto::v1::generate_request::Input;
use proto::v1::inference_client::InferenceClient;
use serde_json::{Value, json};

/// The rounding of times in JSON, in milliseconds, for a sum of all parts.
const ROUNDING_MS: f64 = 0.1;

fn sum(parts: &Value) -> f64 {
    parts.as_object().expect("parts").values().filter_map(Value::as_f64).sum()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("not a number: {value}"))
}

/// Checks that the parts of an explanation add up.
fn check(explained: &Value) {
    let near = |a: f64, b: f64| assert!((a - b).abs() < ROUNDING_MS, "{a} is not {b} ms: {explained}");
    let before = sum(&explained["before_first_token_ms"]);
    near(before, number(&explained["first_token_ms"]));
    near(before + sum(&explained["after_first_token_ms"]), number(&explained["total_ms"]));
    if let Some(gap) = explained["worst_gap"].as_object() {
        near(sum(&gap["parts_ms"]), number(&gap["ms"]));
    }
}

/// Posts a request that is not streamed, and returns its explanations.
async fn whole(client: &Client, path: &str, body: Value) -> Vec<Value> {
    let headers = [("x-baton-explain", "1".to_owned())];
    let (status, _, answer) = client.post_with(path, &headers, body.to_string()).await;
    assert_eq!(status.as_u16(), 200, "{answer}");
    let answer: Value = serde_json::from_str(&answer).expect("JSON");
    answer["explanations"].as_array().unwrap_or_else(|| panic!("no explanations: {answer}")).clone()
}

/// Streams a request, and returns its only explanation: it comes with the last token.
async fn streamed(client: &Client, ask: Ask) -> Value {
    let ask = ask.header("x-baton-explain", "1").with("ignore_eos", true.into());
    let mut stream = client.stream(&ask).await.expect("an answer");
    let mut found = Vec::new();
    while let Some(event) = in_time("an event", stream.next()).await.expect("a good stream") {
        if event["explanations"].is_array() {
            assert!(event["choices"][0]["finish_reason"].is_string(), "{event}");
            found.extend(event["explanations"].as_array().cloned().unwrap_or_default());
        }
    }
    assert_eq!(found.len(), 1, "{found:?}");
    found.remove(0)
}

async fn over_grpc(up: &Up) -> v1::Explanation {
    let request = v1::GenerateRequest {
        model: "mock".to_owned(),
        input: Some(Input::Tokens(v1::Tokens { ids: (0..70).collect() })),
        stop: Some(v1::StopParams { max_tokens: Some(9), ignore_eos: true, ..v1::StopParams::default() }),
        explain: true,
        ..v1::GenerateRequest::default()
    };
    let mut client = InferenceClient::connect(format!("http://{}", up.grpc)).await.expect("it listens");
    let mut events = client.generate(request).await.expect("accepted").into_inner();
    while let Some(event) = in_time("an event", events.message()).await.expect("a good stream") {
        if let Some(Event::End(end)) = event.event {
            return end.explanation.expect("an explanation");
        }
    }
    panic!("the stream has no end");
}

/// Checks the sums of an explanation over gRPC: each part is rounded down to a microsecond.
fn check_wire(explained: &v1::Explanation) {
    let sum = |parts: &[v1::PartTime]| parts.iter().map(|part| part.us).sum::<u64>();
    let before = sum(&explained.before_first_token);
    assert!(explained.first_token_us - before < 20, "{explained:?}");
    assert!(explained.total_us - before - sum(&explained.after_first_token) < 40, "{explained:?}");
    let gap = explained.worst_gap.as_ref().expect("nine tokens");
    assert!(gap.us - sum(&gap.parts) < 20 && gap.engine_steps > 0, "{explained:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_parts_of_requests_of_all_kinds_add_up() {
    for flags in [&["--prefill", "1", "--decode", "1"][..], &["--colocated"]] {
        let up = Up::start(flags).await;
        let client = up.client();
        let usual =
            client.post("/v1/completions", r#"{"model": "mock", "prompt": [1, 2], "max_tokens": 2}"#).await;
        assert!(!usual.2.contains("explanations"), "it was not asked: {}", usual.2);
        for prompt in prompts(5, 6, 300).into_iter().chain([vec![1, 2, 3]]) {
            check(&streamed(&client, Ask::new(prompt, 12)).await);
        }
        let body = json!({ "model": "mock", "prompt": ["one text", "and another"], "n": 2, "max_tokens": 8 });
        let all = whole(&client, "/v1/completions", body).await;
        assert_eq!(all.iter().map(|one| number(&one["index"]) as usize).collect::<Vec<_>>(), [0, 1, 2, 3]);
        all.iter().for_each(check);
        let messages = json!([{ "role": "user", "content": "a longer text ".repeat(20) }]);
        let body = json!({ "model": "mock", "messages": messages, "max_tokens": 8 });
        whole(&client, "/v1/chat/completions", body).await.iter().for_each(check);
        check_wire(&over_grpc(&up).await);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_parts_add_up_through_the_pool_and_the_bench_draws_them() {
    let fleet = Fleet::start_pooled(PACED, 1, 1, 1).await;
    for prompt in prompts(9, 4, 300) {
        let explained = streamed(&fleet.client(), Ask::new(prompt, 12)).await;
        check(&explained);
        let is_stored = explained["before_first_token_ms"]["store"].is_number();
        // The pool does not keep prompts that fill no block.
        assert_eq!(is_stored, number(&explained["prompt_tokens"]) >= 16.0, "{explained}");
    }
    let folder = tempfile::tempdir().expect("a folder");
    let (report, svg) = (folder.path().join("run.json"), folder.path().join("bars.svg"));
    let url = format!("http://{}", fleet.http);
    let path = |path: &Path| path.to_str().expect("text").to_owned();
    let (report, svg) = (path(&report), path(&svg));
    let serve = [
        "bench",
        "serve",
        "--url",
        &url,
        "--explain",
        "--quiet",
        "--concurrency",
        "2",
        "--requests",
        "8",
        "--input-tokens",
        "60",
        "--output-tokens",
        "6",
        "--lag-limit",
        "1h",
        "--out",
        &report,
    ];
    let ran = executable::run(&serve);
    assert!(ran.status.success(), "{}", ran.stderr);
    let ran = executable::run(&["bench", "explain", &report, "--svg", &svg]);
    let table = ran.stdout;
    assert!(ran.status.success(), "{}", ran.stderr);
    assert!(table.contains("| prefill_compute") && table.contains("Worst gap"), "{table}");
    assert!(std::fs::read_to_string(&svg).expect("the bars").contains("prefill_compute:"));
}

/// Writes the settings of a mock, paced like the others, with these costs besides.
fn mock(folder: &Path, name: &str, costs: &str) -> String {
    let file = folder.join(name);
    let text = format!("[cost]\ndecode_row_ms = 0.05\nprefill_token_ms = 0.1\n{costs}\n");
    std::fs::write(&file, text).expect("written");
    format!("mock:{}", file.display())
}

/// Starts one prefill and one decode node with models of their own, and 64 blocks each.
async fn fleet(prefill: String, decode: String) -> Fleet {
    let of_role = |role| -> Settings {
        let model = if role == "prefill" { prefill.clone() } else { decode.clone() };
        vec![("BATON_MODEL__PATH", model), ("BATON_MODEL__KV_MEMORY", "512KiB".to_owned())]
    };
    Fleet::start_each(PACED, 1, 1, Vec::new(), of_role).await
}

fn long_prompt() -> Vec<u32> {
    (0..400).map(|at| at % 250).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_throttled_wire_and_a_full_pool_are_the_largest_parts() {
    let folder = tempfile::tempdir().expect("a folder");
    let throttled = mock(folder.path(), "throttled.toml", "step_ms = 5.0\nsent_byte_ns = 5000.0");
    let fleet = fleet(throttled, mock(folder.path(), "usual.toml", "step_ms = 5.0")).await;
    let client = fleet.client();
    let explained = streamed(&client, Ask::new(long_prompt(), 8)).await;
    check(&explained);
    assert_eq!(explained["largest"], "transfer", "{explained}");
    assert_eq!(explained["worst_gap"]["largest"], "transfer", "{explained}");
    let transfer = &explained["transfers"][0];
    assert_eq!(transfer["connector"], "tcp", "{explained}");
    assert!(number(&transfer["bytes"]) > 200_000.0, "{explained}");

    // The running request needs up to 56 blocks of 64, and runs for some seconds.
    let running = Ask::new((0..96).collect(), 800).with("ignore_eos", true.into());
    let mut stream = client.stream(&running).await.expect("there is room");
    stream.next().await.expect("a token");
    let other: Vec<u32> = long_prompt().into_iter().rev().collect();
    let waiting = streamed(&client, Ask::new(other, 8));
    let ended = async { while stream.next().await.expect("the stream goes on").is_some() {} };
    let (explained, ()) = in_time("both answers", async { tokio::join!(waiting, ended) }).await;
    check(&explained);
    assert_eq!(explained["largest_before_first_token"], "reserve", "{explained}");
    assert_eq!(explained["largest"], "reserve", "{explained}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slowed_decode_node_is_the_largest_part() {
    let folder = tempfile::tempdir().expect("a folder");
    let usual = mock(folder.path(), "usual.toml", "step_ms = 5.0");
    let fleet = fleet(usual, mock(folder.path(), "slow.toml", "step_ms = 100.0")).await;
    let explained = streamed(&fleet.client(), Ask::new(long_prompt(), 20)).await;
    check(&explained);
    assert_eq!(explained["largest"], "decode", "{explained}");
    assert_eq!(explained["decode_node"], "decode-0", "{explained}");
    let step = &explained["worst_gap"]["step"];
    assert!(number(&step["ms"]) >= 100.0 && number(&step["rows"]) == 1.0, "{explained}");
}

/// The speed of a slow network, in bytes per second. The KV of `long_prompt` takes more than half a second.
const SLOW_BYTES_PER_S: u64 = 400_000;

/// Starts a prefill node with these connectors, and a decode node with shm and tcp whose KV port is behind a slow
/// network. Returns the explanation of one request, and the log of the decode node, which chooses the connector.
async fn over_a_slow_network(of_prefill: &str) -> (Value, String) {
    let [grpc, admin, kv] = [free_addr(), free_addr(), free_addr()];
    // The decode node is advertised at another address of this machine, where the network is.
    let network = Ipv4Addr::new(127, 0, 0, 2);
    let mut wires = Vec::new();
    for (server, bytes_per_s) in [(grpc, None), (admin, None), (kv, Some(SLOW_BYTES_PER_S))] {
        wires.push(Wire::between(SocketAddr::from((network, server.port())), server, bytes_per_s).await);
    }
    let of_role = |role| -> Settings {
        match role {
            "decode" => vec![
                ("BATON_NODE__LISTEN", grpc.to_string()),
                ("BATON_NODE__ADMIN", admin.to_string()),
                ("BATON_NODE__ADVERTISE", network.to_string()),
                ("BATON_TRANSFER__LISTEN", kv.to_string()),
                ("BATON_TRANSFER__CONNECTORS", r#"["shm", "tcp"]"#.to_owned()),
            ],
            _ => vec![("BATON_TRANSFER__CONNECTORS", of_prefill.to_owned())],
        }
    };
    let fleet = Fleet::start_each(PACED, 1, 1, Vec::new(), of_role).await;
    fleet.expect_log(&["connector cannot be used with the peer, falling back"]);
    let explained = streamed(&fleet.client(), Ask::new(long_prompt(), 8)).await;
    check(&explained);
    (explained, fleet.nodes[1].process.log())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fall_back_to_a_slow_tcp_is_the_largest_part() {
    let (explained, log) = over_a_slow_network(r#"["shm", "tcp"]"#).await;
    assert_eq!(explained["transfers"][0]["connector"], "shm", "{explained}");
    assert_ne!(explained["largest"], "transfer", "{explained}");
    assert!(!log.contains("falling back"), "{log}");

    let (explained, log) = over_a_slow_network(r#"["tcp"]"#).await;
    assert_eq!(explained["largest"], "transfer", "{explained}");
    assert_eq!(explained["worst_gap"]["largest"], "transfer", "{explained}");
    let transfers = explained["transfers"].as_array().expect("a list");
    assert_eq!((transfers.len(), &transfers[0]["connector"]), (1, &"tcp".into()), "{explained}");
    let transfer_ms = number(&transfers[0]["ms"]);
    let least_ms = number(&transfers[0]["bytes"]) / SLOW_BYTES_PER_S as f64 * 1e3;
    assert!(transfer_ms > 0.9 * least_ms, "{transfer_ms} ms: {explained}");
    assert!(log.contains("falling back") && log.contains("connector=shm"), "{log}");
}
