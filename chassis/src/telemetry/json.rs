//! Log lines as JSON: one flat object per event.

use std::fmt;
use std::sync::{Arc, OnceLock};

use opentelemetry::trace::TraceContextExt;
use serde_json::{Map, Value};
use tracing::dispatcher::WeakDispatch;
use tracing::field::{Field, Visit};
use tracing::{Dispatch, Event, Subscriber};
use tracing_subscriber::Registry;
use tracing_subscriber::fmt::format::{FormatEvent, FormatFields, JsonFields, Writer};
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{self as lines, FmtContext, FormattedFields, MakeWriter};
use tracing_subscriber::layer::Layer;
use tracing_subscriber::registry::{LookupSpan, SpanRef};

use super::BoxedLayer;

pub(super) fn layer<W>(process: &'static str, writer: W) -> BoxedLayer<Registry>
where
    W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    let own = OwnDispatch::default();
    let format = JsonLines { process, own: own.clone() };
    lines::layer()
        .with_writer(writer)
        .fmt_fields(JsonFields::new())
        .event_format(format)
        .and_then(own)
        .boxed()
}

/// The format of JSON lines: `ts`, `level`, `process`, `target`, `message`, the event's fields, `trace_id`
/// and `span_id` of its span, and the fields of all enclosing spans (such as `request_id`). On a name clash
/// the innermost field wins.
struct JsonLines {
    process: &'static str,
    own: OwnDispatch,
}

impl<S, N> FormatEvent<S, N> for JsonLines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut line = Line(self.head(event)?);
        event.record(&mut line);
        let scope = context.event_scope();
        for span in scope.into_iter().flatten() {
            self.add_ids(&span, &mut line);
            add_fields::<S, N>(&span, &mut line);
        }
        let text = serde_json::to_string(&line.0).map_err(|_| fmt::Error)?;
        writeln!(writer, "{text}")
    }
}

impl JsonLines {
    fn head(&self, event: &Event<'_>) -> Result<Map<String, Value>, fmt::Error> {
        let mut time = String::new();
        SystemTime.format_time(&mut Writer::new(&mut time))?;
        let metadata = event.metadata();
        let entries = [
            ("ts", time),
            ("level", metadata.level().to_string()),
            ("process", self.process.to_owned()),
            ("target", metadata.target().to_owned()),
        ];
        Ok(entries.into_iter().map(|(name, value)| (name.to_owned(), Value::String(value))).collect())
    }

    /// Adds trace id and span id to the line, unless a span further inside has added them.
    fn add_ids<'a, S: LookupSpan<'a>>(&self, span: &SpanRef<'a, S>, line: &mut Line) {
        if line.0.contains_key("trace_id") {
            return;
        }
        let Some(dispatch) = self.own.upgrade() else { return };
        let Some(context) = tracing_opentelemetry::get_otel_context(&span.id(), &dispatch) else { return };
        let span = context.span();
        let ids = span.span_context();
        line.add("trace_id", ids.trace_id().to_string());
        line.add("span_id", ids.span_id().to_string());
    }
}

fn add_fields<'a, S, N>(span: &SpanRef<'a, S>, line: &mut Line)
where
    S: LookupSpan<'a>,
    N: for<'w> FormatFields<'w> + 'static,
{
    let extensions = span.extensions();
    let Some(fields) = extensions.get::<FormattedFields<N>>() else { return };
    let Ok(fields) = serde_json::from_str::<Map<String, Value>>(fields) else { return };
    for (name, value) in fields {
        line.add(&name, value);
    }
}

/// A JSON line being built. The first value of a name is kept.
struct Line(Map<String, Value>);

impl Line {
    fn add(&mut self, name: &str, value: impl Into<Value>) {
        if !self.0.contains_key(name) {
            self.0.insert(name.to_owned(), value.into());
        }
    }
}

impl Visit for Line {
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.add(field.name(), value);
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add(field.name(), value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.add(field.name(), value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.add(field.name(), value);
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field.name(), value);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.add(field.name(), format!("{value:?}"));
    }
}

/// The dispatch that the layer belongs to, stored when the dispatch is made.
///
/// The layer cannot look its dispatch up later, because tracing hides the current dispatch while it handles
/// an event.
#[derive(Clone, Default)]
struct OwnDispatch(Arc<OnceLock<WeakDispatch>>);

impl OwnDispatch {
    fn upgrade(&self) -> Option<Dispatch> {
        self.0.get()?.upgrade()
    }
}

impl<S: Subscriber> Layer<S> for OwnDispatch {
    fn on_register_dispatch(&self, dispatch: &Dispatch) {
        // A layer belongs to one dispatch, so `set` is called once.
        let _ = self.0.set(dispatch.downgrade());
    }
}
