//! The bundled model, served by the first command: a real engine, a real tokenizer, the same answers on every path.

use baton_tests::{Ask, Up, in_time};
use futures::future::join_all;
use serde_json::{Value, json};

/// Below this lead between the two best tokens, KV in bf16 may make another token win than the reference in f32.
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

/// The tokens of all answers. How many of a prompt's tokens were cached depends on which request came first.
async fn tokens(up: &Up, asks: &[Ask]) -> Vec<Vec<u32>> {
    let client = up.client();
    let all = join_all(asks.iter().map(|ask| client.ask(ask)));
    in_time("all answers", all).await.into_iter().map(|answer| answer.expect("an answer").tokens).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_command_answers() {
    let up = Up::start(&["--model", "demo"]).await;
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
    let alone = tokens(&Up::start(&["--model", "demo", "--colocated"]).await, &asks).await;
    let up = Up::start(&["--model", "demo", "--prefill", "1", "--decode", "1"]).await;
    assert_eq!(tokens(&up, &asks).await, alone);
    // Again, now that prefixes are cached on both nodes.
    assert_eq!(tokens(&up, &asks).await, alone);
    for (prompt, tokens) in golden.iter().zip(&alone) {
        if prompt["smallest_lead"].as_f64().expect("a number") > LEAD_MIN {
            assert_eq!(*tokens, ids(&prompt["continuation_ids"]), "{}", prompt["name"]);
        }
    }
    up.baseline().await;
}
