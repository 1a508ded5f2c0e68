//! Tests of streams, event by event.

use serde_json::{Value, json};
use types::{RefusalKind, TokenId};

use super::fake_serve::*;
use crate::serve::ServeError;

fn chunk(choices: Value) -> Value {
    json!({
        "id": "chatcmpl-r1", "object": "chat.completion.chunk", "created": 1_700_000_000, "model": "org/mock",
        "choices": choices,
    })
}

fn with(mut chunk: Value, name: &str, value: Value) -> Value {
    chunk[name] = value;
    chunk
}

fn delta(delta: Value, finish: Value) -> Value {
    json!([{"index": 0, "delta": delta, "logprobs": null, "finish_reason": finish}])
}

#[tokio::test(start_paused = true)]
async fn a_chat() {
    let answer = chat(&FakeServe::saying("Hé"), json!({"stream": true})).await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.header("content-type"), "text/event-stream");
    assert_eq!(answer.header("x-request-id"), "r1");
    assert_eq!(
        answer.events(),
        [
            chunk(delta(json!({"role": "assistant", "content": ""}), json!(null))),
            chunk(delta(json!({"content": "H"}), json!(null))),
            chunk(delta(json!({"content": "é"}), json!(null))),
            chunk(delta(json!({}), json!("stop"))),
            json!("[DONE]"),
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn the_last_chunk_has_the_usage() {
    let options = json!({"stream": true, "stream_options": {"include_usage": true}});
    let events = chat(&FakeServe::saying("H"), options).await.events();
    let usage = json!({
        "prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 1},
    });
    assert_eq!(events[0]["usage"], json!(null));
    assert!(events[0].as_object().unwrap().contains_key("usage"), "null, and not absent");
    assert_eq!(events[events.len() - 2], with(chunk(json!([])), "usage", usage));
    assert_eq!(events[events.len() - 1], "[DONE]");
}

#[tokio::test(start_paused = true)]
async fn every_chunk_has_the_usage_so_far_where_it_is_wanted() {
    let wanted = json!({"include_usage": true, "continuous_usage_stats": true});
    let events =
        chat(&FakeServe::saying("Hi"), json!({"stream": true, "stream_options": wanted})).await.events();
    let tokens: Vec<&Value> = events.iter().map(|event| &event["usage"]["completion_tokens"]).collect();
    assert_eq!(tokens, [&json!(1), &json!(1), &json!(2), &json!(3), &json!(3), &json!(null)]);
    assert_eq!(events[0]["usage"]["prompt_tokens"], 5);
    let alone = json!({"stream": true, "stream_options": {"continuous_usage_stats": true}});
    let events = chat(&FakeServe::saying("Hi"), alone).await.events();
    assert!(events.iter().all(|event| event.get("usage").is_none()), "as vLLM: not without include_usage");
}

#[tokio::test(start_paused = true)]
async fn token_ids_come_with_every_step() {
    let fields = json!({"stream": true, "return_token_ids": true});
    let events = chat(&FakeServe::saying("é"), fields.clone()).await.events();
    assert_eq!(events[0]["prompt_token_ids"], json!([258, 72, 105, 256, 259]));
    let ids: Vec<&Value> = events[1..4].iter().map(|event| &event["choices"][0]["token_ids"]).collect();
    assert_eq!(ids, [&json!([195]), &json!([169]), &json!([256])]);
    let events = complete(&FakeServe::saying("A"), fields).await.events();
    let choice = |event: usize| events[event]["choices"][0].clone();
    assert_eq!(choice(0)["prompt_token_ids"], json!([72, 105]));
    assert_eq!((&choice(0)["token_ids"], &choice(1)["token_ids"]), (&json!([65]), &json!([256])));
    assert_eq!(choice(1).get("prompt_token_ids"), None, "once is enough");
}

#[tokio::test(start_paused = true)]
async fn a_completion() {
    let answer = complete(&FakeServe::saying("A"), json!({"stream": true, "echo": true})).await;
    let choice = |text: &str, finish: Value| {
        json!({
            "id": "cmpl-r1", "object": "text_completion", "created": 1_700_000_000, "model": "org/mock",
            "choices": [{"index": 0, "text": text, "logprobs": null, "finish_reason": finish}],
        })
    };
    assert_eq!(
        answer.events(),
        [choice("Hi", json!(null)), choice("A", json!(null)), choice("", json!("stop")), json!("[DONE]")]
    );
}

#[tokio::test(start_paused = true)]
async fn several_answers_are_told_apart_by_their_index() {
    let fake_serve = FakeServe::new(|prompt| says(&format!("seed {}", prompt.sampling.seed)));
    let events = chat(&fake_serve, json!({"stream": true, "n": 3, "seed": 7})).await.events();
    let (done, events) = events.split_last().unwrap();
    assert_eq!(done, "[DONE]");
    let mut texts = vec![String::new(); 3];
    let (mut n_roles, mut n_finished) = (0, 0);
    for event in events {
        let choice = &event["choices"][0];
        let text = &mut texts[choice["index"].as_u64().unwrap() as usize];
        text.push_str(choice["delta"]["content"].as_str().unwrap_or(""));
        n_roles += usize::from(choice["delta"]["role"] == "assistant");
        n_finished += usize::from(choice["finish_reason"] == "stop");
    }
    assert_eq!(texts, ["seed 7", "seed 8", "seed 9"]);
    assert_eq!((n_roles, n_finished), (3, 3));
}

#[tokio::test(start_paused = true)]
async fn a_stop_string_ends_the_stream_and_the_generation() {
    let fake_serve = FakeServe::new(|_| begins("one two three"));
    let events = chat(&fake_serve, json!({"stream": true, "stop": ["two"]})).await.events();
    let text: String =
        events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(text, "one ");
    assert_eq!(events[events.len() - 1], "[DONE]");
    fake_serve.holds(0).await;
}

#[tokio::test(start_paused = true)]
async fn a_failure_in_mid_stream_is_the_last_event() {
    let lost = || ServeError::Refused { kind: RefusalKind::Failed, reason: "all nodes died".to_owned() };
    let events = chat(&FakeServe::new(move |_| breaks("ab", lost())), json!({"stream": true})).await.events();
    let error = json!({"error": {"error": {
        "message": "failed: all nodes died", "type": "server_error", "param": null, "code": "failed",
    }}});
    assert_eq!(events.last(), Some(&error));
    assert!(!events.contains(&json!("[DONE]")));
    assert_eq!(events.len(), 4, "the role, two characters, the error");
}

#[tokio::test(start_paused = true)]
async fn steps_that_are_lost_or_doubled_never_reach_a_client() {
    for (indices, n_told) in [(vec![0, 2], 1), (vec![0, 0], 1), (vec![1], 0), (vec![0, 1], 2)] {
        let fake_serve = FakeServe::new(move |_| {
            plays(indices.iter().map(|index| step(*index, TokenId(97), None)).collect())
        });
        let events = chat(&fake_serve, json!({"stream": true})).await.events();
        let n_roles = usize::from(n_told > 0);
        assert_eq!(events.len(), n_roles + n_told + 1);
        assert_eq!(events.last().unwrap()["error"]["error"]["code"], "internal");
    }
}

#[tokio::test(start_paused = true)]
async fn the_door_keeps_the_deadline_by_itself() {
    for (play, stream) in
        [(begins as fn(&str) -> ScriptedEvent, true), (begins, false), (|_| ScriptedEvent::silence(), true)]
    {
        let fake_serve = FakeServe::new(move |_| play("ab"));
        let body = json!({"messages": [{"role": "user", "content": "Hi"}], "stream": stream}).to_string();
        let request = http::Request::post("/v1/chat/completions").header("x-baton-timeout-ms", "2000");
        let began = tokio::time::Instant::now();
        let answer = send(app(&fake_serve), request.body(body.into()).unwrap()).await;
        assert_eq!(began.elapsed().as_millis(), 2000);
        assert!(answer.body.contains(r#""code":"deadline""#), "{}", answer.body);
        fake_serve.holds(0).await;
    }
}

#[tokio::test(start_paused = true)]
async fn silence_is_filled_with_comments() {
    let fake_serve = FakeServe::new(|_| begins("a"));
    let body = json!({"messages": [{"role": "user", "content": "Hi"}], "stream": true}).to_string();
    let request = http::Request::post("/v1/chat/completions").header("x-baton-timeout-ms", "40000");
    let answer = send(app(&fake_serve), request.body(body.into()).unwrap()).await;
    assert_eq!(answer.body.matches(": keep-alive\n\n").count(), 2);
}
