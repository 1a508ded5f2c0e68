//! The propagation of traces between processes: the W3C `traceparent` header, on HTTP and gRPC.

use http::{HeaderMap, HeaderName, HeaderValue};
use opentelemetry::propagation::{Extractor, Injector, TextMapPropagator};
use opentelemetry::trace::TraceContextExt;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use tracing::{Span, field, info_span};
use tracing_opentelemetry::OpenTelemetrySpanExt;
use types::RequestId;

/// Makes the span of one request in one process, from its headers to the end of its answer.
///
/// The span's parent is the span in the caller's `traceparent`; without that header a new trace begins.
/// `call` names the operation: an HTTP path or the full name of an rpc.
pub fn request_span(call: &str, request_id: Option<&RequestId>, headers: &HeaderMap) -> Span {
    let request_id = request_id.map(field::display);
    let status = field::Empty;
    let span =
        info_span!(parent: None, "request", otel.name = call, otel.status_code = status, call, request_id);
    let caller = TraceContextPropagator::new().extract(&Headers(headers));
    if caller.span().span_context().is_valid() {
        // `set_parent` fails only without telemetry, and then there is no trace to continue.
        let _ = span.set_parent(caller);
    }
    span
}

/// Marks the span of a request as failed. OpenTelemetry's conventions say which errors do: those of the server.
pub fn mark_failed(span: &Span) {
    span.record("otel.status_code", "ERROR");
}

/// Writes `span` into the headers of an outgoing call, as the parent of the callee's spans.
pub fn inject(span: &Span, headers: &mut HeaderMap) {
    TraceContextPropagator::new().inject_context(&span.context(), &mut HeadersMut(headers));
}

struct Headers<'a>(&'a HeaderMap);

impl Extractor for Headers<'_> {
    fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name)?.to_str().ok()
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(HeaderName::as_str).collect()
    }
}

struct HeadersMut<'a>(&'a mut HeaderMap);

impl Injector for HeadersMut<'_> {
    fn set(&mut self, name: &str, value: String) {
        let header = (HeaderName::try_from(name), HeaderValue::try_from(value));
        if let (Ok(name), Ok(value)) = header {
            self.0.insert(name, value);
        }
    }
}
