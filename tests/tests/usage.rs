//! The usage of an answer is the same from two nodes as from one.

use baton_tests::{Client, Up};
use serde_json::{Value, json};

/// The lengths of the prompts in tokens. A block has 16 tokens.
const LENGTHS: [usize; 8] = [1, 15, 16, 17, 80, 81, 400, 1_024];

/// Returns the usage of one answer. Whole and streamed answers must report the same.
async fn usage(client: &Client, nth: usize, length: usize, is_streamed: bool) -> Value {
    let prompt: Vec<usize> = (0..length).map(|at| (at * 7 + nth * 31 + 1) % 256).collect();
    let mut body = json!({
        "model": "mock", "prompt": prompt, "max_tokens": 10 + nth, "temperature": 0, "stream": is_streamed,
        "ignore_eos": nth.is_multiple_of(2),
    });
    if is_streamed {
        body["stream_options"] = json!({ "include_usage": true });
    }
    let (status, _, answer) = client.post("/v1/completions", body.to_string()).await;
    assert_eq!(status, 200, "{answer}");
    let events = answer.lines().map(|line| line.strip_prefix("data: ").unwrap_or(line));
    let values = events.filter_map(|event| serde_json::from_str::<Value>(event).ok());
    let usages: Vec<Value> = values.map(|value| value["usage"].clone()).filter(Value::is_object).collect();
    usages.into_iter().last().expect("a usage")
}

/// Returns the usages of two answers to each prompt: a computed one, and a streamed one from the cache.
async fn usages(args: &[&str]) -> Vec<[Value; 2]> {
    let up = Up::start(args).await;
    let mut all = Vec::new();
    for (nth, length) in LENGTHS.into_iter().enumerate() {
        let fresh = usage(&up.client(), nth, length, false).await;
        all.push([fresh, usage(&up.client(), nth, length, true).await]);
    }
    all
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn usage_from_two_nodes_is_that_from_one() {
    let alone = usages(&["--colocated"]).await;
    for (nth, [fresh, cached]) in alone.iter().enumerate() {
        let length = LENGTHS[nth];
        let cached_tokens = |usage: &Value| usage["prompt_tokens_details"]["cached_tokens"].as_u64();
        assert_eq!((fresh["prompt_tokens"].as_u64(), cached_tokens(fresh)), (Some(length as u64), Some(0)));
        assert_eq!(cached_tokens(cached), Some(((length - 1) / 16 * 16) as u64), "{length} tokens");
        assert_eq!(fresh["completion_tokens"], cached["completion_tokens"]);
    }
    for order in ["decode-first", "prefill-first"] {
        let pair = usages(&["--order", order]).await;
        for ((pair, alone), length) in pair.iter().zip(&alone).zip(LENGTHS) {
            assert_eq!(pair, alone, "{order}, {length} tokens");
        }
    }
}
