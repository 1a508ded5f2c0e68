//! Constrained answers of the bundled model: valid, and equal on every path.

use baton_tests::logs::A_NODE_DIES;
use baton_tests::up::LONG_STEPS;
use baton_tests::{Client, Up, eventually, in_time};
use futures::StreamExt as _;
use futures::stream::iter;
use rustix::process::Signal;
use serde_json::{Value, json};

const AT_ONCE: usize = 48;

/// The number of requests in a run; `TEST_CONSTRAINED` overrides it.
fn n_requests() -> usize {
    std::env::var("TEST_CONSTRAINED").map_or(64, |text| text.parse().expect("a number"))
}

/// Returns the fields of the nth request's grammar.
fn grammar(nth: usize) -> Value {
    let part = json!({
        "type": "object",
        "properties": { "phase": { "enum": ["prefill", "decode"] }, "steps": { "type": "integer", "minimum": 0, "maximum": 99 } },
        "required": ["phase", "steps"],
        "additionalProperties": false,
    });
    let parts = json!({ "type": "array", "items": part, "minItems": 2, "maxItems": 3 });
    match nth % 4 {
        0 => json!({ "guided_json": part }),
        1 => {
            json!({ "response_format": { "type": "json_schema", "json_schema": { "name": "parts", "schema": parts } } })
        }
        2 => json!({ "guided_regex": "([a-f0-9]{4}-){3}[a-f0-9]{4}" }),
        _ => {
            json!({ "structured_outputs": { "grammar": "start: pair\npair: \"(\" (pair | /[a-z]{1,3}/) \" \" (pair | /[0-9]{1,3}/) \")\"" } })
        }
    }
}

/// Returns whether the answer is one of the grammar. A nested pair may be as deep as `max_tokens` allows.
fn is_valid(nth: usize, text: &str) -> bool {
    let is_part = |part: &Value| {
        let fields = part.as_object().is_some_and(|fields| fields.len() == 2);
        let phase = part["phase"] == "prefill" || part["phase"] == "decode";
        fields && phase && part["steps"].as_u64().is_some_and(|steps| steps <= 99)
    };
    let json = || serde_json::from_str::<Value>(text).unwrap_or_default();
    match nth % 4 {
        0 => is_part(&json()),
        1 => {
            json().as_array().is_some_and(|parts| (2..=3).contains(&parts.len()) && parts.iter().all(is_part))
        }
        2 => {
            text.len() == 19
                && text
                    .split('-')
                    .all(|four| four.len() == 4 && four.bytes().all(|byte| byte.is_ascii_hexdigit()))
        }
        _ => pair(text) == Some(""),
    }
}

/// Reads a pair, and returns the text after it.
fn pair(text: &str) -> Option<&str> {
    let rest = text.strip_prefix('(')?;
    let rest = pair(rest).or_else(|| word(rest, |byte| byte.is_ascii_lowercase()))?;
    let rest = rest.strip_prefix(' ')?;
    let rest = pair(rest).or_else(|| word(rest, |byte| byte.is_ascii_digit()))?;
    rest.strip_prefix(')')
}

fn word(text: &str, fits: impl Fn(u8) -> bool) -> Option<&str> {
    let end = text.bytes().position(|byte| !fits(byte)).unwrap_or(text.len());
    (1..=3).contains(&end).then(|| &text[end..])
}

async fn answer(client: &Client, nth: usize) -> (Value, Value) {
    let prompt: Vec<usize> = (0..8 + nth % 40).map(|at| 300 + (nth * 31 + at * 17) % 1500).collect();
    // Nested pairs have no longest text, and are cut. Where white space is allowed this model prefers it to all else, so
    // the tokens of a line break and a space are biased.
    let max_tokens = if nth % 4 == 3 { 60 } else { 600 };
    let mut body = json!({
        "model": "demo", "prompt": prompt, "max_tokens": max_tokens, "temperature": 1, "seed": nth,
        "return_token_ids": true, "logit_bias": { "204": -100, "226": -100 },
    });
    for (field, value) in grammar(nth).as_object().expect("fields") {
        body[field] = value.clone();
    }
    let (status, _, text) = client.post("/v1/completions", body.to_string()).await;
    assert_eq!(status, 200, "request {nth}: {text}");
    let answer: Value = serde_json::from_str(&text).expect("JSON");
    let choice = answer["choices"][0].clone();
    let text = choice["text"].as_str().expect("a text");
    // A grammar of nested pairs may be cut.
    let is_cut = nth % 4 == 3 && choice["finish_reason"] == "length";
    assert!(is_cut || (choice["finish_reason"] == "stop" && is_valid(nth, text)), "request {nth}: {choice}");
    (choice["token_ids"].clone(), choice["finish_reason"].clone())
}

async fn answers(up: &Up) -> Vec<(Value, Value)> {
    let client = up.client();
    let all = iter(0..n_requests()).map(|nth| in_time("an answer", answer(&client, nth))).buffered(AT_ONCE);
    all.collect().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn constrained_answers_are_valid_and_equal_one_nodes() {
    let alone = answers(&Up::start_with(&["--model", "demo", "--colocated"], &LONG_STEPS).await).await;
    let up = Up::start_with(&["--model", "demo", "--prefill", "1", "--decode", "2"], &LONG_STEPS).await;
    assert_eq!(answers(&up).await, alone);
    up.expect_log(A_NODE_DIES);
    let (disturbed, ()) = tokio::join!(answers(&up), kill(&up));
    assert_eq!(disturbed, alone);
    assert_ne!(
        up.client().counter("baton_router_continuations_total").await,
        0,
        "some answers went on elsewhere"
    );
    up.baseline().await;
}

/// Kills a decode node once several answers are under way.
async fn kill(up: &Up) {
    let victim = up.of_role("decode").await.swap_remove(0);
    let client = up.client();
    let busy = async || {
        let page = client.get_json("/debug/requests").await;
        let under_way = page["under_way"].as_array().expect("a list");
        let has_begun = |request: &&Value| request["output_tokens"].as_u64().is_some_and(|tokens| tokens > 1);
        (under_way.iter().filter(has_begun).count() > AT_ONCE / 4).then_some(())
    };
    eventually("answers to be under way", busy).await;
    up.signal(victim.pid, Signal::KILL);
}
