//! The bundled model, served by `baton up`: a real engine, a real tokenizer, the same answers on every path.

#[path = "demo/constrained.rs"]
mod constrained;

use baton_tests::up::LONG_STEPS;
use baton_tests::{Ask, Client, Up, in_time};
use futures::future::join_all;
use serde_json::{Value, json};

/// The smallest lead of the best token for which tokens are compared: with less, KV in bf16 may choose
/// another token than the reference in f32.
const LEAD_MIN: f64 = 0.05;

fn golden() -> Vec<Value> {
    let text = include_str!("../../models/demo/golden.json");
    let golden: Value = serde_json::from_str(text).expect("JSON");
    golden["prompts"].as_array().expect("prompts").clone()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().expect("ids").iter().map(|id| id.as_u64().expect("an id") as u32).collect()
}

fn ask(prompt: &Value) -> Ask {
    Ask::new(ids(&prompt["prompt_ids"]), 48).with("model", json!("demo"))
}

/// Returns the tokens of all answers. The number of cached tokens is left out, because it depends on which
/// request came first.
async fn tokens(up: &Up, asks: &[Ask]) -> Vec<Vec<u32>> {
    let client = up.client();
    let all = join_all(asks.iter().map(|ask| client.ask(ask)));
    in_time("all answers", all).await.into_iter().map(|answer| answer.expect("an answer").tokens).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_command_answers() {
    let up = Up::start_with(&["--model", "demo"], &LONG_STEPS).await;
    let question = json!({
        "model": "demo",
        "temperature": 0,
        "messages": [{ "role": "user", "content": "What is prefill?" }],
    });
    let (status, _, body) = up.client().post("/v1/chat/completions", question.to_string()).await;
    assert_eq!(status, 200, "{body}");
    let answer: Value = serde_json::from_str(&body).expect("JSON");
    let said = answer["choices"][0]["message"]["content"].as_str().expect("a text");
    assert!(said.starts_with("Prefill is the first phase of a request."), "{said}");
    up.baseline().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_demo_model_answers_alike_from_one_node_and_from_two() {
    let golden = golden();
    let asks: Vec<Ask> = golden.iter().map(ask).collect();
    let alone = tokens(&Up::start_with(&["--model", "demo", "--colocated"], &LONG_STEPS).await, &asks).await;
    let up = Up::start_with(&["--model", "demo", "--prefill", "1", "--decode", "1"], &LONG_STEPS).await;
    assert_eq!(tokens(&up, &asks).await, alone);
    // The requests are sent again, because prefixes are now cached on both nodes.
    assert_eq!(tokens(&up, &asks).await, alone);
    for (prompt, tokens) in golden.iter().zip(&alone) {
        if prompt["smallest_lead"].as_f64().expect("a number") > LEAD_MIN {
            assert_eq!(*tokens, ids(&prompt["continuation_ids"]), "{}", prompt["name"]);
        }
    }
    up.baseline().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_answers_to_one_prompt_cost_one_prefill() {
    let up = Up::start_with(&["--model", "demo", "--prefill", "1", "--decode", "1"], &LONG_STEPS).await;
    let golden = golden();
    let longest = golden.iter().max_by_key(|prompt| ids(&prompt["prompt_ids"]).len()).expect("prompts");
    let prompt = ids(&longest["prompt_ids"]);
    let body = json!({
        "model": "demo", "prompt": prompt, "n": 4, "max_tokens": 16, "temperature": 1.0, "seed": 5,
        "return_token_ids": true,
    });
    let (status, _, answer) = up.client().post("/v1/completions", body.to_string()).await;
    assert_eq!(status, 200, "{answer}");
    let answer: Value = serde_json::from_str(&answer).expect("JSON");
    let choices = answer["choices"].as_array().expect("choices");
    assert_eq!(choices.len(), 4);
    assert!(
        choices.iter().any(|choice| choice["token_ids"] != choices[0]["token_ids"]),
        "each draws its own"
    );
    // Only one choice computes the whole prompt; the others compute only the rest of its last block.
    let computed = computed_tokens(&up).await;
    assert!(prompt.len() >= 512, "{} tokens would show little", prompt.len());
    assert!((prompt.len()..=prompt.len() + 3 * 16).contains(&computed), "{computed} of {}", prompt.len());
    // Each choice must equal the answer to a request for it alone.
    for (nth, choice) in choices.iter().enumerate() {
        let mut alone = body.clone();
        (alone["n"], alone["seed"]) = (json!(1), json!(5 + nth));
        let (_, _, answer) = up.client().post("/v1/completions", alone.to_string()).await;
        let answer: Value = serde_json::from_str(&answer).expect("JSON");
        assert_eq!(answer["choices"][0]["token_ids"], choice["token_ids"], "answer {nth}");
    }
    up.baseline().await;
}

/// Returns the number of prompt tokens that all nodes have computed so far.
async fn computed_tokens(up: &Up) -> usize {
    let cluster = up.client().get_json("/debug/cluster").await;
    let mut sum = 0;
    for node in cluster["nodes"].as_array().expect("nodes") {
        let admin = node["admin"].as_str().expect("an address").parse().expect("an address");
        let (_, page) = Client::new(admin).get("/metrics").await;
        let mut counts = page.lines().filter(|line| !line.starts_with('#'));
        let line = counts.find(|line| line.contains("_prefill_tokens_total{"));
        let count = line.and_then(|line| line.rsplit_once(' ')).expect("every node counts them").1;
        sum += count.parse::<usize>().expect("a count");
    }
    sum
}
