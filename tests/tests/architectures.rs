//! Serves a tiny random model of every architecture, through prefill → tcp → decode, and compares it with
//! `transformers` in float32.

use std::path::{Path, PathBuf};

use baton_tests::logs::NO_TOKENIZER;
use baton_tests::{Client, Up};
use serde_json::{Value, json};

/// The largest relative error of a logit that sums in another order explain.
const TOLERANCE: f64 = 1e-4;

fn folder(model: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/models").join(model)
}

fn golden(model: &str) -> Value {
    let path = folder(model).join("golden.json");
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_str(&text).expect("JSON")
}

async fn completion(client: &Client, model: &str, golden: &Value) -> Value {
    let n_tokens = golden["continuation"].as_array().expect("tokens").len();
    let body = json!({
        "model": model, "prompt": golden["prompt"], "max_tokens": n_tokens, "temperature": 0, "ignore_eos": true,
        "logprobs": 20, "return_token_ids": true,
    });
    let (status, _, body) = client.post("/v1/completions", body.to_string()).await;
    assert_eq!(status, 200, "{body}");
    let answer: Value = serde_json::from_str(&body).expect("JSON");
    answer["choices"][0].clone()
}

/// Checks the differences to the best token, because log-probabilities differ from logits by a constant.
fn check_logits(what: &str, found: &Value, expected: &Value) {
    let found: Vec<(usize, f64)> = found.as_object().expect("alternatives").iter().map(alternative).collect();
    assert_eq!(found.len(), 20, "{what}");
    let logit = |token: usize| expected[token].as_f64().expect("a logit");
    let (best, best_logprob) = found.iter().copied().max_by(|a, b| a.1.total_cmp(&b.1)).expect("some");
    for (token, logprob) in found {
        let (found, expected) = (best_logprob - logprob, logit(best) - logit(token));
        let size = logit(best).abs().max(expected.abs()).max(1.0);
        assert!(
            (found - expected).abs() <= TOLERANCE * size,
            "{what}: token {token}: {found}, not {expected}"
        );
    }
}

fn alternative((name, logprob): (&String, &Value)) -> (usize, f64) {
    let id = name.strip_prefix("token_id:").unwrap_or_else(|| panic!("{name} is no token id"));
    (id.parse().expect("a number"), logprob.as_f64().expect("a number"))
}

async fn check(model: &str) {
    check_over("tcp", model, &["--prefill", "1", "--decode", "1"]).await;
}

async fn check_over(connector: &str, model: &str, args: &[&str]) {
    let path = folder(model);
    let which = ["--model", path.to_str().expect("UTF-8"), "--connector", connector];
    let up = Up::start_with(&[&which, args].concat(), &[("BATON_MODEL__KV_DTYPE", "f32")]).await;
    up.expect_log(NO_TOKENIZER);
    let golden = golden(model);
    // The requests are sent twice, because the second time prefixes are cached on both nodes.
    for time in ["first", "second"] {
        let choice = completion(&up.client(), model, &golden).await;
        assert_eq!(choice["token_ids"], golden["continuation"], "{model}, the {time} time");
        let top = choice["logprobs"]["top_logprobs"].as_array().expect("a list");
        check_logits(&format!("{model}, first step"), &top[0], &golden["first_logits"]);
        check_logits(&format!("{model}, last step"), &top[top.len() - 1], &golden["last_logits"]);
    }
    assert!(up.client().kv_arrived(connector).await > 0, "{model}: no KV travelled over {connector}");
    up.baseline().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn llama_through_two_nodes_is_as_in_transformers() {
    check("llama").await;
    check("llama3").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mistral_through_two_nodes_is_as_in_transformers() {
    check("mistral").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn qwen2_through_two_nodes_is_as_in_transformers() {
    check("qwen2").await;
    check("qwen2-window").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn qwen3_through_two_nodes_is_as_in_transformers() {
    check("qwen3").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn experts_through_two_nodes_are_as_in_transformers() {
    check("mixtral").await;
    check("qwen3-moe").await;
    check("qwen3-moe-stacked").await;
}

/// Each token has one latent vector, which every rank holds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn latent_attention_through_nodes_is_as_in_transformers() {
    check("deepseek-v2").await;
    check("deepseek-v3").await;
    check_over("shm", "deepseek-v3", &["--prefill-tp", "1", "--decode-tp", "2"]).await;
    check_over("tcp", "deepseek-v2", &["--prefill-tp", "2", "--decode-tp", "1"]).await;
    check_over("tcp", "deepseek-v3", &["--pool", "1"]).await;
}
