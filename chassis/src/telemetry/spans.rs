//! Ended spans as log lines, so that a trace can be assembled from the logs of several processes.

use std::fmt;
use std::future::{Future, ready};
use std::io::Write;

use opentelemetry::trace::Status;
use opentelemetry_sdk::error::{OTelSdkError, OTelSdkResult};
use opentelemetry_sdk::trace::{SpanData, SpanExporter};
use serde_json::{Map, Value, json};
use tracing_subscriber::fmt::MakeWriter;

/// An exporter that writes one JSON object per ended span: `span` (its name), `process`, `trace_id`,
/// `span_id`, `parent_span_id` (absent for a root), `duration_ms`, `status` (`error`, or absent), and its fields.
pub(super) struct SpanLines<W> {
    process: &'static str,
    writer: W,
}

impl<W> SpanLines<W> {
    pub(super) fn new(process: &'static str, writer: W) -> Self {
        Self { process, writer }
    }
}

impl<W> SpanExporter for SpanLines<W>
where
    W: for<'w> MakeWriter<'w> + Send + Sync,
{
    fn export(&self, batch: Vec<SpanData>) -> impl Future<Output = OTelSdkResult> + Send {
        let lines: String = batch.iter().map(|span| format!("{}\n", line(self.process, span))).collect();
        let written = self.writer.make_writer().write_all(lines.as_bytes());
        ready(written.map_err(|error| OTelSdkError::InternalFailure(error.to_string())))
    }
}

fn line(process: &str, span: &SpanData) -> Value {
    let duration = span.end_time.duration_since(span.start_time).unwrap_or_default();
    let mut line = json!({
        "span": span.name,
        "process": process,
        "trace_id": span.span_context.trace_id().to_string(),
        "span_id": span.span_context.span_id().to_string(),
        "duration_ms": duration.as_secs_f64() * 1e3,
    });
    if span.parent_span_id != opentelemetry::SpanId::INVALID {
        line["parent_span_id"] = span.parent_span_id.to_string().into();
    }
    if matches!(span.status, Status::Error { .. }) {
        line["status"] = "error".into();
    }
    let fields: Map<String, Value> = span
        .attributes
        .iter()
        .map(|field| (field.key.to_string(), Value::String(field.value.to_string())))
        .collect();
    line["fields"] = Value::Object(fields);
    line
}

impl<W> fmt::Debug for SpanLines<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SpanLines").field("process", &self.process).finish_non_exhaustive()
    }
}
