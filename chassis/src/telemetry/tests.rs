use http::HeaderMap;
use serde_json::Value;
use tracing::dispatcher::with_default;
use tracing::{debug, info, info_span, warn};
use types::RequestId;

use super::*;
use tracing::Span;

/// Runs `work` as the process `name`. Returns its result and its captured log.
fn process<T>(name: &'static str, settings: &LogSettings, work: impl FnOnce() -> T) -> (T, Capture) {
    let capture = Capture::new(name, settings).unwrap();
    let _listening = capture.listen();
    (work(), capture)
}

fn json(level: &str, spans: bool) -> LogSettings {
    LogSettings { format: LogFormat::Json, level: level.to_owned(), spans, ..LogSettings::default() }
}

#[test]
fn json_lines_are_flat_and_carry_their_request() {
    let request_id = RequestId::new("req-1");
    let ((), written) = process("decode", &json("info", false), || {
        info!(n_blocks = 3, "started");
        let span = request_span("/x", Some(&request_id), &HeaderMap::new());
        span.in_scope(|| {
            info_span!("landing", transfer_id = 7).in_scope(|| warn!(transfer_id = 8, ok = true, "late"));
        });
    });
    let [started, late]: [Value; 2] = written.lines().try_into().unwrap();
    assert_eq!((&started["process"], &started["level"]), (&"decode".into(), &"INFO".into()));
    assert_eq!((&started["message"], &started["n_blocks"]), (&"started".into(), &3.into()));
    assert!(started.get("trace_id").is_none());
    assert_eq!((&late["message"], &late["ok"]), (&"late".into(), &true.into()));
    assert_eq!((&late["request_id"], &late["call"]), (&"req-1".into(), &"/x".into()));
    assert_eq!(late["transfer_id"], 8, "the inner one wins");
    assert_eq!(late["trace_id"].as_str().unwrap().len(), 32);
    assert_eq!(late["span_id"].as_str().unwrap().len(), 16);
}

#[test]
fn a_trace_runs_through_processes() {
    let settings = json("info", true);
    let (headers, router) = process("router", &settings, || {
        let mut headers = HeaderMap::new();
        request_span("/v1/completions", None, &HeaderMap::new()).in_scope(|| {
            info_span!("dispatch").in_scope(|| inject(&Span::current(), &mut headers));
        });
        headers
    });
    let ((), decode) = process("decode", &settings, || {
        request_span("Decode/Open", None, &headers).in_scope(|| info!("opened"));
    });
    let [dispatch, request]: [Value; 2] = router.lines().try_into().unwrap();
    let [opened, served]: [Value; 2] = decode.lines().try_into().unwrap();
    assert_eq!((&request["span"], &served["span"]), (&"/v1/completions".into(), &"Decode/Open".into()));
    for line in [&dispatch, &opened, &served] {
        assert_eq!(line["trace_id"], request["trace_id"]);
    }
    assert_eq!(dispatch["parent_span_id"], request["span_id"]);
    assert_eq!(served["parent_span_id"], dispatch["span_id"]);
    assert_eq!(opened["span_id"], served["span_id"]);
    assert!(request.get("parent_span_id").is_none());
}

#[test]
fn a_quiet_process_does_not_end_the_trace() {
    let (injected, written) = process("router", &json("error", false), || {
        let mut headers = HeaderMap::new();
        let span = request_span("/x", None, &HeaderMap::new());
        info!("not written");
        inject(&span, &mut headers);
        headers
    });
    assert!(injected.contains_key("traceparent"));
    assert_eq!(written.text(), "");
}

#[test]
fn levels_are_per_crate() {
    let level = format!("warn,{}=debug", module_path!());
    let ((), written) = process("router", &json(&level, false), || {
        debug!("mine");
        debug!(target: "other", "theirs");
    });
    let [line]: [Value; 1] = written.lines().try_into().unwrap();
    assert_eq!(line["message"], "mine");
    for wrong in ["nonsense=loud", "inof", "info,router"] {
        let error = Capture::new("router", &json(wrong, false)).unwrap_err();
        assert!(error.to_string().starts_with(&format!("`{wrong}` is not a log level: use ")), "{error}");
    }
    for right in ["", "INFO", "off", "3", "warn,walk=trace", "[request{request_id}]=debug,info"] {
        Capture::new("router", &json(right, false)).expect(right);
    }
}

#[test]
fn text_lines_name_their_process() {
    let ((), written) = process("prefill", &LogSettings::default(), || info!(n_blocks = 3, "landed"));
    let text = written.text();
    assert!(text.starts_with("prefill ") && text.ends_with(": landed n_blocks=3\n"), "{text}");
}

#[test]
fn a_collector_that_cannot_be_spoken_to_is_refused() {
    for (endpoint, reason) in [
        ("https://collector:4318", "it must be http://host:port"),
        ("collector", "it must be http://host:port"),
    ] {
        let settings = LogSettings { otlp: endpoint.to_owned(), ..LogSettings::default() };
        let error = Capture::new("router", &settings).unwrap_err().to_string();
        assert!(error.contains(endpoint) && error.contains(reason), "{error}");
    }
}

#[test]
fn a_broken_traceparent_begins_a_new_trace() {
    let headers = HeaderMap::from_iter([(
        http::header::HeaderName::from_static("traceparent"),
        "junk".parse().unwrap(),
    )]);
    let ((), written) = process("decode", &json("info", true), || drop(request_span("/x", None, &headers)));
    let [span]: [Value; 1] = written.lines().try_into().unwrap();
    assert!(span.get("parent_span_id").is_none());
}

#[test]
fn nothing_breaks_without_telemetry() {
    let mut headers = HeaderMap::new();
    with_default(&Dispatch::none(), || inject(&request_span("/x", None, &HeaderMap::new()), &mut headers));
    assert!(headers.is_empty());
}
