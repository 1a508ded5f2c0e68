//! Client errors: each is a 400 in OpenAI's form that names the field, and the next request works.

use baton_tests::{Client, Up};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

/// Returns a valid request. Each case changes one field of it.
fn good() -> Value {
    json!({"model": "demo", "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]})
}

fn with(field: &str, value: Value) -> Vec<u8> {
    let mut body = good();
    body[field] = value;
    body.to_string().into_bytes()
}

fn message(role: &str, content: &str) -> Vec<u8> {
    with("messages", json!([{"role": role, "content": content}]))
}

/// Returns the name, the body, the wrong field, the code, and a part of the message of each case.
fn cases() -> Vec<(&'static str, Vec<u8>, &'static str, &'static str, &'static str)> {
    let long = message("user", &"to be or not to be ".repeat(2000));
    let huge = message("user", &"x".repeat(10_000_000));
    let broken = b"{\"messages\": [{\"role\": \"user\", \"content\": \"\xff\xfe\"}]}".to_vec();
    let schema =
        json!({"type": "json_schema", "json_schema": {"name": "a", "schema": {"uniqueItems": true}}});
    vec![
        ("a prompt longer than the model's length", long, "messages", "context_length_exceeded", "2048"),
        (
            "more tokens than there is room for",
            with("max_tokens", json!(5000)),
            "max_tokens",
            "context_length_exceeded",
            "2048",
        ),
        ("an unknown role", message("wizard", "Hi"), "messages[0].role", "invalid_value", "wizard"),
        (
            "a template that raises",
            message("tool", "Hi"),
            "messages",
            "template_refused",
            "unknown role: tool",
        ),
        ("top_p = 2", with("top_p", json!(2)), "top_p", "invalid_value", "at most 1"),
        ("n = 0", with("n", json!(0)), "n", "invalid_value", "from 1"),
        ("a body of 10 MB", huge, "body", "body_too_large", "bytes"),
        ("invalid UTF-8", broken, "body", "invalid_json", "UTF-8"),
        ("negative max_tokens", with("max_tokens", json!(-1)), "max_tokens", "invalid_value", "-1"),
        (
            "a schema for the answer that cannot be enforced",
            with("response_format", schema),
            "response_format",
            "invalid_value",
            "uniqueItems",
        ),
    ]
}

async fn check_refused(client: &Client, what: &str, body: Vec<u8>, param: &str, code: &str, says: &str) {
    let (status, _, answer) = client.post(CHAT, body).await;
    assert_eq!(status, 400, "{what}: {answer}");
    let answer: Value = serde_json::from_str(&answer).expect("JSON");
    let error = answer["error"].as_object().unwrap_or_else(|| panic!("{what}: {answer}"));
    assert_eq!(error["type"], "invalid_request_error", "{what}");
    assert_eq!((&error["param"], &error["code"]), (&json!(param), &json!(code)), "{what}");
    let message = error["message"].as_str().expect("a text");
    assert!(message.contains(says), "{what}: {message}");
}

async fn check_works(client: &Client, after: &str) {
    let (status, _, answer) = client.post(CHAT, good().to_string()).await;
    assert_eq!(status, 200, "after {after}: {answer}");
    let answer: Value = serde_json::from_str(&answer).expect("JSON");
    assert_eq!(answer["usage"]["completion_tokens"], 4, "after {after}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_input_is_a_400_that_names_the_field_and_the_next_request_works() {
    let up = Up::start(&["--model", "demo"]).await;
    let client = up.client();
    for (what, body, param, code, says) in cases() {
        check_refused(&client, what, body, param, code, says).await;
        check_works(&client, what).await;
    }
    up.baseline().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_input_to_a_stream_is_refused_before_the_stream_begins() {
    let up = Up::start(&["--model", "demo"]).await;
    let client = up.client();
    let mut body = good();
    (body["stream"], body["top_p"]) = (json!(true), json!(2));
    check_refused(&client, "top_p = 2", body.to_string().into_bytes(), "top_p", "invalid_value", "at most 1")
        .await;
    check_works(&client, "a refused stream").await;
}
