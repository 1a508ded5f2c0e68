//! Requests through real processes get the same answers as from one node.

use baton_tests::check::prompts;
use baton_tests::{Answer, Ask, Up, in_time};
use futures::future::join_all;

/// Returns 200 requests of mixed lengths.
fn asks() -> Vec<Ask> {
    let lengths = [1, 2, 5, 16, 33, 64, 100];
    prompts(7, 200, 600)
        .into_iter()
        .enumerate()
        .map(|(idx, prompt)| Ask::new(prompt, lengths[idx % lengths.len()]))
        .collect()
}

async fn answers(up: &Up, asks: &[Ask]) -> Vec<Answer> {
    let client = up.client();
    let all = join_all(asks.iter().map(|ask| client.ask(ask)));
    in_time("all answers", all).await.into_iter().map(|answer| answer.expect("an answer")).collect()
}

/// Checks that the answers equal those of one node, and that exactly these connectors carry the KV.
async fn equals_colocated(args: &[&str], connectors: &[&str]) {
    let asks = asks();
    let colocated = Up::start(&["--colocated"]).await;
    let expected = answers(&colocated, &asks).await;
    colocated.baseline().await;
    drop(colocated);
    for (answer, ask) in expected.iter().zip(&asks) {
        assert!(answer.finish == "stop" || answer.tokens.len() == ask.max_tokens as usize, "{answer:?}");
    }

    for connector in connectors {
        equals(&expected, &asks, args, connector).await;
    }
}

async fn equals(expected: &[Answer], asks: &[Ask], args: &[&str], connector: &str) {
    let up = Up::start_over(connector, args).await;
    let seen = answers(&up, asks).await;
    for (idx, (seen, expected)) in seen.iter().zip(expected).enumerate() {
        assert_eq!((&seen.tokens, &seen.finish), (&expected.tokens, &expected.finish), "request {idx}");
    }
    up.baseline().await;
    assert!(up.client().kv_arrived(connector).await > 0, "no KV travelled by {connector}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_and_two_equal_one_node() {
    equals_colocated(&["--prefill", "2", "--decode", "2"], &["tcp", "shm"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prefill_first_equals_one_node() {
    let args = ["--prefill", "2", "--decode", "2", "--order", "prefill-first"];
    equals_colocated(&args, &["tcp", "shm"]).await;
}

/// No connector is configured, so the nodes choose. On one host they use shared memory.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn auto_is_the_fastest_that_both_ends_have() {
    let up = Up::start(&["--prefill", "1", "--decode", "1"]).await;
    answers(&up, &asks()[..20]).await;
    up.baseline().await;
    let metrics = up.client().get("/metrics").await.1;
    assert!(metrics.contains("baton_router_kv_arrived_bytes_total{connector=\"shm\"}"), "{metrics}");
    assert!(!metrics.contains("baton_router_kv_arrived_bytes_total{connector=\"tcp\"}"), "{metrics}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_policy_serves() {
    for policy in router::policy::NAMES {
        let up = Up::start(&["--prefill", "2", "--decode", "2", "--policy", policy]).await;
        answers(&up, &asks()[..40]).await;
        up.baseline().await;
    }
}
