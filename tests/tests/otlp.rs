//! Spans reach a collector. Those of one request form one trace through all processes.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::routing::post;
use baton_tests::{Ask, Up, eventually, free_addr};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message as _;

/// A collector that keeps every received span, with the service that sent it.
#[derive(Clone, Debug, Default)]
struct Collector(Arc<Mutex<Vec<(String, Span)>>>);

impl Collector {
    /// Starts the collector, and returns its address.
    async fn start(&self) -> SocketAddr {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let addr = listener.local_addr().expect("bound");
        let pages = Router::new().route("/v1/traces", post(take)).with_state(self.clone());
        #[allow(clippy::disallowed_methods, reason = "it ends with the test")]
        tokio::spawn(async move { axum::serve(listener, pages).await });
        addr
    }

    fn spans(&self) -> Vec<(String, Span)> {
        self.0.lock().expect("no panic while it was held").clone()
    }
}

async fn take(State(collector): State<Collector>, body: Bytes) {
    let request = ExportTraceServiceRequest::decode(body).expect("OTLP");
    for of_process in request.resource_spans {
        let resource = of_process.resource.expect("it says who it is");
        let service = text(&resource.attributes, "service.name").expect("a service has a name");
        let spans = of_process.scope_spans.into_iter().flat_map(|scope| scope.spans);
        collector
            .0
            .lock()
            .expect("no panic while it was held")
            .extend(spans.map(|span| (service.clone(), span)));
    }
}

fn text(attributes: &[KeyValue], key: &str) -> Option<String> {
    let value = attributes.iter().find(|one| one.key == key)?.value.clone()?.value?;
    match value {
        Value::StringValue(text) => Some(text),
        _ => None,
    }
}

/// Returns the spans of the trace that the request began, by id.
fn trace(spans: &[(String, Span)], request_id: &str) -> BTreeMap<Vec<u8>, (String, Span)> {
    let is_its = |span: &Span| text(&span.attributes, "request_id").as_deref() == Some(request_id);
    let trace = spans.iter().find(|(_, span)| is_its(span)).map(|(_, span)| span.trace_id.clone());
    let of_trace = spans.iter().filter(|(_, span)| Some(&span.trace_id) == trace.as_ref());
    of_trace.map(|(service, span)| (span.span_id.clone(), (service.clone(), span.clone()))).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_trace_goes_through_all_processes_to_a_collector() {
    let collector = Collector::default();
    let endpoint = format!("http://{}", collector.start().await);
    let env = [("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.as_str()), ("OTEL_BSP_SCHEDULE_DELAY", "200")];
    let up = Up::start_with(&["--prefill", "1", "--decode", "1"], &env).await;
    let ask =
        Ask::new((0..100).collect(), 8).header("x-request-id", "follow-me").header("x-baton-explain", "1");
    up.client().ask(&ask).await.expect("an answer");

    // The spans are those of the router, the decode node, its wait for the KV, the prefill node, its
    // sequence, and its transfer.
    let wanted: BTreeSet<&str> = [
        "/v1/completions",
        "/baton.v1.Decode/Run",
        "decode",
        "arrive",
        "/baton.v1.Prefill/Run",
        "prefill",
        "deliver",
    ]
    .into();
    let tree = eventually("all spans", async || {
        let tree = trace(&collector.spans(), "follow-me");
        let names: BTreeSet<&str> = tree.values().map(|(_, span)| span.name.as_str()).collect();
        wanted.is_subset(&names).then(|| tree.clone())
    })
    .await;
    let roots: Vec<&Span> =
        tree.values().map(|(_, span)| span).filter(|span| span.parent_span_id.is_empty()).collect();
    assert_eq!(roots.iter().map(|span| span.name.as_str()).collect::<Vec<_>>(), ["/v1/completions"]);
    assert!(roots[0].events.iter().any(|event| event.name == "request explained"), "{:?}", roots[0].events);
    for (_, span) in tree.values().filter(|(_, span)| !span.parent_span_id.is_empty()) {
        assert!(tree.contains_key(&span.parent_span_id), "{} has an unknown parent", span.name);
        assert!(span.end_time_unix_nano >= span.start_time_unix_nano, "{}", span.name);
    }
    let services: BTreeSet<&str> = tree.values().map(|(service, _)| service.as_str()).collect();
    assert_eq!(services.into_iter().collect::<Vec<_>>(), ["baton-decode", "baton-prefill", "baton-router"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_collector_that_is_away_costs_a_line_and_nothing_else() {
    let endpoint = format!("http://{}", free_addr());
    let env = [("BATON_LOG__OTLP", endpoint.as_str()), ("OTEL_BSP_SCHEDULE_DELAY", "100")];
    let up = Up::start_with(&["--prefill", "1", "--decode", "1"], &env).await;
    for nth in 0..5 {
        up.client().ask(&Ask::new(vec![nth; 60], 8)).await.expect("an answer");
    }
    let line = "sending trace spans to the collector failed";
    up.expect_log(&[line]);
    eventually("a line of each process", async || (up.log().matches(line).count() >= 3).then_some(())).await;
    up.client().ask(&Ask::new(vec![9; 60], 8)).await.expect("an answer");
    assert_eq!(up.log().matches(line).count(), 3, "one line of each process:\n{}", up.log());
}
