//! Tests of observability: one tree of spans per request, and metrics that the code increments.

use std::collections::{BTreeMap, BTreeSet};

use baton_tests::check::prompts;
use baton_tests::{Ask, Up, eventually};
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
    for prompt in prompts(3, 8, 300) {
        up.client().ask(&Ask::new(prompt, 10)).await.expect("an answer");
    }
    let page = up.client().get("/metrics").await.1;
    for stage in
        ["reserve", "prefill_queue", "prefill", "transfer", "first_token", "handover_gap", "step", "whole"]
    {
        let line = format!("baton_router_stage_seconds_count{{stage=\"{stage}\"}} ");
        let count = page.lines().find_map(|text| text.strip_prefix(&line)).unwrap_or("0");
        assert_ne!(count, "0", "{stage} in\n{page}");
    }
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
        let generic = ["prefill", "decode", "pool"]
            .iter()
            .fold(name.clone(), |name, role| name.replacen(&format!("baton_{role}_"), "baton_<role>_", 1));
        let is_there = [generic, name.clone()].iter().any(|name| documented.contains(&format!("`{name}`")));
        assert!(is_there, "docs/metrics.md lacks {name}");
    }
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
