//! Tests of refusals: status, code and field of each.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use chassis::telemetry::Capture;
use http::Request;
use serde_json::{Value, json};
use types::RefusalKind;

use super::fake_serve::*;
use crate::http::BodyLimits;
use crate::serve::ServeError;
use crate::text::{ChatTemplate, ServedModel};

fn check(answer: &Answer, status: u16, code: &str, param: impl Into<Value>) {
    let error = &answer.json()["error"];
    let seen = (answer.status.as_u16(), &error["code"], &error["param"]);
    assert_eq!(seen, (status, &json!(code), &param.into()), "{}", answer.body);
    assert!(!answer.header("x-request-id").is_empty());
    assert_eq!(answer.header("content-type"), "application/json");
}

#[tokio::test(start_paused = true)]
async fn bad_chats_name_the_field() {
    let fake_serve = FakeServe::saying("x");
    let message = |message: Value| json!({"messages": [message]});
    for (fields, code, param) in [
        (json!({"temperature": 3}), "invalid_value", "temperature"),
        (json!({"temperature": "hot"}), "invalid_value", "temperature"),
        (json!({"top_p": 2}), "invalid_value", "top_p"),
        (json!({"n": 0}), "invalid_value", "n"),
        (json!({"n": 129}), "invalid_value", "n"),
        (json!({"n": -1}), "invalid_value", "n"),
        (json!({"max_tokens": -5}), "invalid_value", "max_tokens"),
        (json!({"max_tokens": 0}), "invalid_value", "max_tokens"),
        (json!({"max_completion_tokens": -5}), "invalid_value", "max_completion_tokens"),
        (json!({"max_tokens": 508}), "context_length_exceeded", "max_tokens"),
        (json!({"max_tokens": 5_000_000_000_u64}), "invalid_value", "max_tokens"),
        (json!({"min_tokens": 600}), "invalid_value", "min_tokens"),
        (json!({"seed": "x"}), "invalid_value", "seed"),
        (json!({"stop": 5}), "invalid_value", "stop"),
        (json!({"stop": [""]}), "invalid_value", "stop"),
        (json!({"stop_token_ids": [261]}), "invalid_value", "stop_token_ids"),
        (json!({"logit_bias": {"x": 1}}), "invalid_value", "logit_bias"),
        (json!({"logit_bias": {"1": "x"}}), "invalid_value", "logit_bias.1"),
        (json!({"logit_bias": {"1": 101}}), "invalid_value", "logit_bias"),
        (json!({"top_logprobs": 3}), "invalid_value", "top_logprobs"),
        (json!({"logprobs": true, "top_logprobs": 21}), "invalid_value", "top_logprobs"),
        (json!({"stream": "yes"}), "invalid_value", "stream"),
        (json!({"stream_options": {"include_usage": 1}}), "invalid_value", "stream_options.include_usage"),
        (
            json!({"stream_options": {"usage_by_mail": true}}),
            "unsupported_parameter",
            "stream_options.usage_by_mail",
        ),
        (json!({"tools": [{"type": "function"}]}), "missing_required_parameter", "tools[0].function.name"),
        (json!({"functions": [{"name": "f"}]}), "unsupported_parameter", "functions"),
        (json!({"structured_outputs": {"json": {}}}), "unsupported_parameter", "structured_outputs.json"),
        (json!({"modalities": ["text", "audio"]}), "unsupported_parameter", "modalities"),
        (json!({"messages": null}), "missing_required_parameter", "messages"),
        (json!({"messages": []}), "invalid_value", "messages"),
        (json!({"messages": "hi"}), "invalid_value", "messages"),
        (json!({"messages": ["hi"]}), "invalid_value", "messages[0]"),
        (message(json!({"content": "a"})), "missing_required_parameter", "messages[0].role"),
        (message(json!({"role": "wizard", "content": "a"})), "invalid_value", "messages[0].role"),
        (message(json!({"role": "user"})), "missing_required_parameter", "messages[0].content"),
        (message(json!({"role": "user", "content": "a".repeat(600)})), "context_length_exceeded", "messages"),
        (json!({"model": "other"}), "model_not_found", "model"),
        (json!({"model": 7}), "invalid_value", "model"),
        (json!({"response_format": {"type": "json_object"}}), "unsupported_parameter", "response_format"),
        (json!({"tool_choice": "required"}), "invalid_value", "tool_choice"),
        (json!({"chat_template": "{{ messages }}"}), "unsupported_parameter", "chat_template"),
        (json!({"use_beam_search": true}), "unsupported_parameter", "use_beam_search"),
    ] {
        let status = if code == "model_not_found" { 404 } else { 400 };
        check(&chat(&fake_serve, fields).await, status, code, param);
    }
    assert!(fake_serve.seen().is_empty(), "the router never received them");
    assert_eq!(chat(&fake_serve, json!({})).await.status, 200, "and the next request works");
}

#[tokio::test(start_paused = true)]
async fn bad_completions_name_the_field() {
    let fake_serve = FakeServe::saying("x");
    for (fields, code, param) in [
        (json!({"prompt": null}), "missing_required_parameter", "prompt"),
        (json!({"prompt": ""}), "invalid_value", "prompt"),
        (json!({"prompt": []}), "invalid_value", "prompt"),
        (json!({"prompt": [261]}), "invalid_value", "prompt"),
        (json!({"prompt": [-1]}), "invalid_value", "prompt[0]"),
        (json!({"prompt": {"text": "a"}}), "invalid_value", "prompt"),
        (json!({"prompt": vec!["a"; 33]}), "invalid_value", "prompt"),
        (json!({"prompt": vec![97; 512]}), "context_length_exceeded", "prompt"),
        (json!({"prompt": vec!["a"; 32], "n": 5}), "invalid_value", "n"),
        (json!({"suffix": "z"}), "unsupported_parameter", "suffix"),
        (json!({"guided_regex": "a+"}), "unsupported_parameter", "guided_regex"),
        (json!({"temprature": 1}), "unsupported_parameter", "temprature"),
        (json!({"best_of": 2}), "unsupported_parameter", "best_of"),
        (json!({"echo": true, "logprobs": 21}), "invalid_value", "logprobs"),
        (json!({"prompt_logprobs": 21}), "invalid_value", "prompt_logprobs"),
        (json!({"prompt_logprobs": -1}), "invalid_value", "prompt_logprobs"),
        (json!({"prompt_logprobs": 1, "stream": true}), "unsupported_parameter", "prompt_logprobs"),
        (
            json!({"prompt": vec![vec![97; 500]; 32], "prompt_logprobs": 20}),
            "invalid_value",
            "prompt_logprobs",
        ),
        (json!({"max_tokens": 0}), "invalid_value", "max_tokens"),
        (json!({"logprobs": 300}), "invalid_value", "logprobs"),
    ] {
        check(&complete(&fake_serve, fields).await, 400, code, param);
    }
    assert!(fake_serve.seen().is_empty());
}

#[tokio::test(start_paused = true)]
async fn bad_bodies() {
    let fake_serve = FakeServe::saying("x");
    for body in [&b"{"[..], b"", b"no json", b"{\"messages\": \"\xff\xfe\"}", b"{} x"] {
        check(&post(&fake_serve, "/v1/chat/completions", body).await, 400, "invalid_json", "body");
    }
    check(&post(&fake_serve, "/v1/chat/completions", "[1]").await, 400, "invalid_value", "body");
    let large = format!("{{\"prompt\": \"{}\"}}", "a".repeat(10_000_000));
    check(&post(&fake_serve, "/v1/completions", large).await, 400, "body_too_large", "body");
    let slow = Body::from_stream(futures::stream::pending::<Result<bytes::Bytes, std::io::Error>>());
    check(&post(&fake_serve, "/v1/completions", slow).await, 408, "body_timeout", "body");
}

#[tokio::test(start_paused = true)]
async fn a_template_may_refuse_and_a_model_may_have_none() {
    let raising = ChatTemplate::new("{{ raise_exception('roles must alternate') }}", vec![]).unwrap();
    for (template, code) in [(Some(raising), "template_refused"), (None, "unsupported_parameter")] {
        let model = ServedModel { template, ..ServedModel::mock("org/mock", 512) };
        let app = app_of(&FakeServe::saying("x"), BodyLimits::default(), model);
        let body = json!({"messages": [{"role": "user", "content": "Hi"}]}).to_string();
        let answer = send(app, Request::post("/v1/chat/completions").body(body.into()).unwrap()).await;
        check(&answer, 400, code, "messages");
    }
}

#[tokio::test(start_paused = true)]
async fn content_types_do_not_matter() {
    for content_type in ["text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-8"]
    {
        let request = Request::post("/v1/completions").header("content-type", content_type);
        let request = request.body(Body::from(r#"{"prompt": "a"}"#)).unwrap();
        assert_eq!(send(app(&FakeServe::saying("x")), request).await.status, 200);
    }
}

#[tokio::test(start_paused = true)]
async fn bad_headers_name_themselves() {
    for (name, value, code) in [
        ("x-baton-timeout-ms", "0", "invalid_value"),
        ("x-baton-timeout-ms", "1e3", "invalid_value"),
        ("x-baton-tenant", "a/b", "invalid_value"),
        ("content-encoding", "gzip", "unsupported_parameter"),
    ] {
        let request = Request::post("/v1/completions").header(name, value);
        let answer =
            send(app(&FakeServe::saying("x")), request.body(Body::from(r#"{"prompt": "a"}"#)).unwrap()).await;
        check(&answer, 400, code, name);
    }
}

#[tokio::test(start_paused = true)]
async fn unknown_paths_and_methods() {
    let fake_serve = FakeServe::saying("x");
    let ask = async |request: http::request::Builder| {
        send(app(&fake_serve), request.body(Body::empty()).unwrap()).await
    };
    check(&ask(Request::get("/v2/nothing")).await, 404, "not_found", Value::Null);
    check(&ask(Request::get("/v1/chat/completions")).await, 405, "method_not_allowed", Value::Null);
    check(&ask(Request::post("/v1/models")).await, 405, "method_not_allowed", Value::Null);
}

#[tokio::test(start_paused = true)]
async fn what_the_house_says_is_a_status() {
    let reason = || "because".to_owned();
    let refused = |kind| ServeError::Refused { kind, reason: reason() };
    let overloaded = ServeError::Overloaded { retry_after: Duration::from_millis(1500), reason: reason() };
    for (error, status, code, retry_after) in [
        (overloaded, 429, "overloaded", "2"),
        (refused(RefusalKind::Full), 429, "full", "1"),
        (ServeError::NoNodes { reason: reason() }, 503, "no_nodes", "1"),
        (ServeError::DeadlinePassed { reason: reason() }, 504, "deadline", ""),
        (refused(RefusalKind::TooLong), 400, "too_long", ""),
        (refused(RefusalKind::Wire), 502, "wire", "1"),
        (ServeError::Failed { reason: reason() }, 500, "internal", ""),
    ] {
        for stream in [false, true] {
            let error = error.clone();
            let fake_serve = FakeServe::new(move |_| ScriptedEvent::Refuse(error.clone()));
            let answer = chat(&fake_serve, json!({"stream": stream})).await;
            check(&answer, status, code, Value::Null);
            assert_eq!(answer.header("retry-after"), retry_after, "{code}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn one_refused_answer_of_several_refuses_all() {
    let fake_serve = FakeServe::new(|prompt| match prompt.id.as_str() {
        "r1-2" => ScriptedEvent::Refuse(ServeError::NoNodes { reason: String::new() }),
        _ => begins("ab"),
    });
    check(&chat(&fake_serve, json!({"n": 3, "stream": true})).await, 503, "no_nodes", Value::Null);
    fake_serve.holds(0).await;
}

#[tokio::test(start_paused = true)]
async fn readiness_gives_its_reason() {
    let request = Request::get("/ready").body(Body::empty()).unwrap();
    let answer = send(app(&FakeServe::unready("no decode node")), request).await;
    check(&answer, 503, "no_nodes", Value::Null);
    assert_eq!(answer.json()["error"]["message"], "no decode node");
}

#[tokio::test(start_paused = true)]
async fn body_limits_are_settings() {
    let app = app_with(&FakeServe::saying("x"), BodyLimits { bytes_max: 10, ..BodyLimits::default() });
    let request = Request::post("/v1/completions").body(Body::from(r#"{"prompt": "a"}"#)).unwrap();
    check(&send(app, request).await, 400, "body_too_large", "body");
}

#[tokio::test(start_paused = true)]
async fn insane_ids_are_replaced() {
    for (id, kept) in [("abc-1", true), ("a b", false)] {
        let request = Request::get("/v1/models").header("x-request-id", id).body(Body::empty()).unwrap();
        let answer = send(app(&FakeServe::saying("x")), request).await;
        assert_eq!(answer.header("x-request-id") == id, kept);
        assert!(kept || answer.header("x-request-id").starts_with("req-"));
    }
}

/// Returns the status of the request's span: `error` or none.
async fn status_of_span(serve: Arc<FakeServe>, fields: Value) -> Option<String> {
    let capture = Capture::spans("router");
    {
        let _listening = capture.listen();
        chat(&serve, fields).await;
    }
    let lines = capture.lines();
    let span = lines.iter().find(|line| line["span"] == "/v1/chat/completions").expect("a span");
    span["status"].as_str().map(str::to_owned)
}

/// Returns the level of the log line about a streamed answer that ends with `error`.
async fn level_of_line(error: ServeError) -> String {
    let capture = Capture::spans("router");
    {
        let _listening = capture.listen();
        chat(&FakeServe::new(move |_| breaks("ab", error.clone())), json!({"stream": true})).await;
    }
    let lines = capture.lines();
    let line = lines.iter().find(|line| line["message"] == "streamed answer to client failed");
    line.expect("a line")["level"].as_str().expect("a level").to_owned()
}

#[tokio::test(start_paused = true)]
async fn only_streams_that_end_by_a_fault_are_warnings() {
    let reason = || "because".to_owned();
    let refused = |kind| ServeError::Refused { kind, reason: reason() };
    for (error, expected) in [
        (ServeError::DeadlinePassed { reason: reason() }, "INFO"),
        (refused(RefusalKind::Full), "INFO"),
        (refused(RefusalKind::Cancelled), "INFO"),
        (refused(RefusalKind::Wire), "WARN"),
        (ServeError::Failed { reason: reason() }, "WARN"),
        (ServeError::Draining, "WARN"),
    ] {
        assert_eq!(level_of_line(error.clone()).await, expected, "{error}");
    }
}

#[tokio::test(start_paused = true)]
async fn only_errors_of_the_server_mark_the_span() {
    let reason = || "because".to_owned();
    let wire = move || ServeError::Refused { kind: RefusalKind::Wire, reason: reason() };
    let overloaded = ServeError::Overloaded { retry_after: Duration::from_secs(1), reason: reason() };
    for (error, expected) in [
        (wire(), Some("error")),
        (ServeError::NoNodes { reason: reason() }, Some("error")),
        (overloaded, None),
        (ServeError::Refused { kind: RefusalKind::TooLong, reason: reason() }, None),
    ] {
        let serve = FakeServe::new(move |_| ScriptedEvent::Refuse(error.clone()));
        assert_eq!(status_of_span(serve, json!({})).await.as_deref(), expected);
    }
    let broken = FakeServe::new(move |_| breaks("ab", wire()));
    assert_eq!(status_of_span(broken, json!({"stream": true})).await.as_deref(), Some("error"));
    assert_eq!(status_of_span(FakeServe::saying("a"), json!({"stream": true})).await, None);
}
