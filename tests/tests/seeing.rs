//! Tests of observability: one tree of spans per request, metrics that the code increments, and the live page.

#[path = "seeing/page.rs"]
mod page;

use std::collections::{BTreeMap, BTreeSet};

use baton_tests::check::prompts;
use baton_tests::fleet::PACED;
use baton_tests::logs::{A_NODE_DIES, A_NODE_STANDS_STILL};
use baton_tests::{Ask, Up, eventually};
use rustix::process::Signal;
use serde_json::Value;

/// Returns the spans of one request, by id.
fn spans(log: &str, request_id: &str) -> BTreeMap<String, Value> {
    let spans: Vec<Value> = log
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .filter(|line| line["span"].is_string())
        .collect();
    let trace = spans
        .iter()
        .find(|span| span["fields"]["request_id"] == request_id)
        .map(|span| span["trace_id"].clone());
    let of_trace = spans.into_iter().filter(|span| Some(&span["trace_id"]) == trace.as_ref());
    of_trace.map(|span| (span["span_id"].as_str().expect("an id").to_owned(), span)).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_tree_of_spans_goes_through_all_processes() {
    let up =
        Up::start_with(&[], &[("BATON_LOG__FORMAT", "json"), ("BATON_EXPERT__LOG__SPANS", "true")]).await;
    let ask = Ask::new((0..100).collect(), 8).header("x-request-id", "follow-me");
    up.client().ask(&ask).await.expect("an answer");
    let wanted: BTreeSet<&str> = [
        "/v1/completions",
        "/baton.v1.Decode/Run",
        "decode",
        "arrive",
        "/baton.v1.Prefill/Run",
        "prefill",
        "deliver",
    ]
    .into_iter()
    .collect();
    let tree = eventually("all spans to end", async || {
        let tree = spans(&up.log(), "follow-me");
        let names: BTreeSet<&str> = tree.values().filter_map(|span| span["span"].as_str()).collect();
        wanted.is_subset(&names).then(|| tree.clone())
    })
    .await;
    let roots: Vec<&Value> = tree.values().filter(|span| span["parent_span_id"].is_null()).collect();
    assert_eq!(roots.len(), 1, "{roots:?}");
    assert_eq!(roots[0]["span"], "/v1/completions");
    for span in tree.values().filter(|span| !span["parent_span_id"].is_null()) {
        let parent = span["parent_span_id"].as_str().expect("an id");
        assert!(tree.contains_key(parent), "{span} has an unknown parent");
    }
    let processes: BTreeSet<&str> = tree.values().filter_map(|span| span["process"].as_str()).collect();
    assert_eq!(processes.into_iter().collect::<Vec<_>>(), ["decode", "prefill", "router"]);
}

/// Returns the names of the metrics on a page.
fn names(page: &str) -> BTreeSet<String> {
    page.lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next().map(str::to_owned))
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_stage_is_measured_and_every_metric_documented() {
    let up = Up::start(&["--prefill", "1", "--decode", "1"]).await;
    let mut prompt_tokens = 0;
    for prompt in prompts(3, 8, 300) {
        prompt_tokens += prompt.len() as u64;
        let ask = Ask::new(prompt, 10).with("ignore_eos", true.into());
        up.client().ask(&ask).await.expect("an answer");
    }
    // The last answer may come before it is counted.
    let finished = "baton_router_requests_total{model=\"mock\",outcome=\"finished\"}";
    eventually("all requests to be counted", async || {
        (up.client().counter(finished).await == 8).then_some(())
    })
    .await;
    let page = up.client().get("/metrics").await.1;
    let stages = ["reserve", "prefill_queue", "prefill", "transfer", "handover_gap"];
    let stages = stages.map(|stage| format!("baton_router_stage_seconds_count{{stage=\"{stage}\"}}"));
    for line in stages {
        assert!(value(&page, &line) > 0, "{line} in\n{page}");
    }
    let of_model = |name: &str| value(&page, &format!("baton_router_{name}{{model=\"mock\"}}"));
    assert_eq!(of_model("first_token_seconds_count"), 8);
    assert_eq!(of_model("request_seconds_count"), 8);
    assert_eq!(of_model("token_gap_seconds_count"), 8 * 9);
    assert_eq!(of_model("output_tokens_total"), 8 * 10);
    assert_eq!(of_model("prompt_tokens_total"), prompt_tokens);
    let mut seen = names(&page);
    seen.extend(of_nodes(&up).await);
    let pooled = Up::start(&["--prefill", "1", "--decode", "1", "--pool", "1"]).await;
    for prompt in prompts(3, 4, 300) {
        pooled.client().ask(&Ask::new(prompt, 10)).await.expect("an answer");
    }
    seen.extend(names(&pooled.client().get("/metrics").await.1));
    seen.extend(of_nodes(&pooled).await);
    let documented = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/metrics.md"))
        .expect("the page");
    for name in seen {
        assert!(documented.contains(&format!("`{name}`")), "docs/metrics.md lacks {name}");
    }
}

/// Returns the value of a line of a page; 0 if it is absent.
fn value(page: &str, line: &str) -> u64 {
    page.lines().find_map(|text| text.strip_prefix(line)?.trim().parse().ok()).unwrap_or(0)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_refusal_is_counted_and_no_probe() {
    let up = Up::start(&["--colocated"]).await;
    let client = up.client();
    let counted =
        async |code: &str| client.counter(&format!("baton_router_refusals_total{{code=\"{code}\"}}")).await;
    client.post("/v1/completions", "{").await;
    client.post("/v1/completions", r#"{"model": "mock", "prompt": [1], "max_tokens": 0}"#).await;
    // A router that has just started does not know all nodes, and answers 503.
    eventually("an unknown model to be refused", async || {
        let (status, _, _) = client.post("/v1/completions", r#"{"model": "none", "prompt": [1]}"#).await;
        (status.as_u16() == 404).then_some(())
    })
    .await;
    client.get("/v1/nothing").await;
    client.get("/v1/completions").await;
    for code in ["invalid_json", "invalid_value", "model_not_found", "not_found", "method_not_allowed"] {
        assert_eq!(counted(code).await, 1, "{code}");
    }
    let before = counted("no_nodes").await;
    up.expect_log(A_NODE_DIES);
    up.expect_log(A_NODE_STANDS_STILL);
    for node in up.nodes().await {
        up.signal(node.pid, Signal::STOP);
    }
    eventually("the router to be unready", async || {
        (client.get("/ready").await.0.as_u16() == 503).then_some(())
    })
    .await;
    assert_eq!(counted("no_nodes").await, before, "a probe is no request");
    let failed = client.ask(&Ask::new(vec![1, 2, 3], 3)).await.expect_err("there is no node");
    assert_eq!((failed.code.as_str(), counted("no_nodes").await), ("no_nodes", before + 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_under_way_are_shown_by_place_also_under_vllms_names() {
    let env = [("BATON_ROUTER__VLLM_METRICS", "true")];
    let up = Up::start_with(&["--model", PACED, "--colocated"], &env).await;
    let client = up.client();
    let ask = Ask::new(vec![1, 2, 3], 4_000).with("ignore_eos", true.into());
    let mut streams = Vec::new();
    for _ in 0..3 {
        let mut stream = client.stream(&ask).await.expect("an answer");
        stream.next().await.expect("a token");
        streams.push(stream);
    }
    let page = client.get("/metrics").await.1;
    let running: u64 = ["prefill", "decode", "client"]
        .map(|place| {
            let line = format!("baton_router_requests_running{{model=\"mock\",place=\"{place}\"}}");
            value(&page, &line)
        })
        .iter()
        .sum();
    assert_eq!(running, 3, "{page}");
    assert_eq!(value(&page, "vllm:num_requests_running{model_name=\"mock\"}"), 3, "{page}");
    assert_eq!(value(&page, "vllm:prompt_tokens_total{model_name=\"mock\"}"), 9, "{page}");
    assert!(value(&page, "vllm:generation_tokens_total{model_name=\"mock\"}") >= 3, "{page}");
    for name in
        ["time_to_first_token_seconds", "inter_token_latency_seconds", "time_per_output_token_seconds"]
    {
        assert!(value(&page, &format!("vllm:{name}_count{{model_name=\"mock\"}}")) >= 3, "{name}:\n{page}");
    }
    drop(streams);
    eventually("no request to be under way", async || {
        let name = "vllm:num_requests_running{model_name=\"mock\"}";
        (value(&client.get("/metrics").await.1, name) == 0).then_some(())
    })
    .await;
}

/// Returns the names of the metrics of all nodes.
async fn of_nodes(up: &Up) -> BTreeSet<String> {
    let mut seen = BTreeSet::new();
    for node in up.client().get_json("/debug/cluster").await["nodes"].as_array().expect("nodes") {
        let admin = node["admin"].as_str().expect("an address").parse().expect("an address");
        seen.extend(names(&baton_tests::Client::new(admin).get("/metrics").await.1));
    }
    seen
}
