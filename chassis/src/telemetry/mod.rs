//! Logs on stderr, and spans with trace ids that cross all processes.
//!
//! Logs and spans are independent. The log level selects which *events* are written. Spans of level INFO, with their
//! events, exist at every log level, because a trace must not end at a process that logs little, and a warning needs
//! its `request_id`.

mod capture;
mod json;
mod lines;
mod otlp;
mod propagate;
mod rare;
mod spans;
#[cfg(test)]
mod tests;
mod text;

use std::io::{self, IsTerminal};

use opentelemetry::trace::TracerProvider;
use opentelemetry_sdk::trace::SdkTracerProvider;
use serde::{Deserialize, Serialize};
use tracing::level_filters::LevelFilter;
use tracing::{Dispatch, Level, Metadata, error};
use tracing_appender::non_blocking::WorkerGuard;
use tracing_subscriber::filter::{EnvFilter, FilterExt, filter_fn};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, Registry, fmt};

use crate::error::StartError;
pub use capture::Capture;
pub use lines::lost_lines;
pub use otlp::ENDPOINT_VARIABLE;
pub use propagate::{inject, mark_failed, request_span};
pub use rare::RareLines;

/// The variable that overrides [`LogSettings::level`] before any configuration is read.
pub const LEVEL_VARIABLE: &str = "BATON_LOG";

/// A process's `[log]` section.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LogSection {
    /// `text` for people, `json` for machines: one object per line, with `trace_id` and `span_id`.
    pub format: LogFormat,
    /// `info`, or a list such as `info,baton_kv_transfer=debug`. The variable `BATON_LOG` overrides it.
    pub level: String,
    /// `http://host:4318`: the collector that every span is sent to, by OTLP over HTTP. Empty: the address in
    /// `OTEL_EXPORTER_OTLP_ENDPOINT`, or none.
    pub otlp: String,
}

impl Default for LogSection {
    fn default() -> Self {
        Self { format: LogFormat::Text, level: "info".to_owned(), otlp: String::new() }
    }
}

/// A process's `[expert.log]` section.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LogExpertSettings {
    /// Writes one JSON line for every span that ends, with its ids, parent and duration. Off by default,
    /// because every request adds lines.
    pub spans: bool,
}

/// The settings of [`init`]: `[log]` and `[expert.log]` together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogSettings {
    pub format: LogFormat,
    pub level: String,
    pub spans: bool,
    pub otlp: String,
}

impl Default for LogSettings {
    fn default() -> Self {
        LogSection::default().settings(&LogExpertSettings::default())
    }
}

impl LogSection {
    pub fn settings(self, expert: &LogExpertSettings) -> LogSettings {
        LogSettings { format: self.format, level: self.level, spans: expert.spans, otlp: self.otlp }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    #[default]
    Text,
    Json,
}

/// The trace pipeline and the log writer of a process. Dropping it writes buffered spans and log lines.
#[derive(Debug)]
#[must_use = "spans are lost once this is dropped"]
pub struct Telemetry {
    provider: SdkTracerProvider,
    /// The guard of the log writer, dropped after the provider has written its last spans.
    _lines: Option<WorkerGuard>,
}

impl Drop for Telemetry {
    fn drop(&mut self) {
        if let Err(error) = self.provider.shutdown() {
            error!(%error, "flushing trace spans failed");
        }
    }
}

/// Logs to stderr from now on, including panics. `process` is `router`, `prefill`, …, and is part of every
/// line.
///
/// Logging never blocks: lines wait in a bounded queue for a writer thread. When the queue is full, lines are lost and
/// counted by [`lost_lines`]. Dropping the result writes the queued lines, for at most about a second.
pub fn init(process: &'static str, settings: &LogSettings) -> Result<Telemetry, StartError> {
    let level = std::env::var(LEVEL_VARIABLE).unwrap_or_else(|_| settings.level.clone());
    let settings = LogSettings { level, ..settings.clone() };
    let (writer, guard) = lines::to(io::stderr());
    let (dispatch, mut telemetry) = dispatch(process, &settings, writer)?;
    telemetry._lines = Some(guard);
    dispatch.try_init().map_err(StartError::Telemetry)?;
    std::panic::set_hook(Box::new(|panic| error!(%panic, "thread panicked")));
    Ok(telemetry)
}

/// Makes the log subscriber and the trace pipeline of [`init`], without installing them.
fn dispatch<W>(
    process: &'static str,
    settings: &LogSettings,
    writer: W,
) -> Result<(Dispatch, Telemetry), StartError>
where
    W: for<'w> MakeWriter<'w> + Clone + Send + Sync + 'static,
{
    let provider = provider(process, settings, writer.clone())?;
    let tracer = provider.tracer("baton");
    let traces = tracing_opentelemetry::layer()
        .with_tracer(tracer)
        .with_context_activation(false)
        .with_location(false)
        .with_threads(false)
        .with_target(false)
        .with_tracked_inactivity(false)
        .with_filter(LevelFilter::INFO);
    let filter = level_filter(&settings.level)?.or(filter_fn(is_lasting_span));
    let lines = lines(process, settings.format, writer).with_filter(filter);
    let dispatch = Dispatch::new(tracing_subscriber::registry().with(lines).with(traces));
    Ok((dispatch, Telemetry { provider, _lines: None }))
}

/// Makes the trace pipeline: ended spans go to log lines, to a collector, to both, or to neither.
fn provider<W>(
    process: &'static str,
    settings: &LogSettings,
    writer: W,
) -> Result<SdkTracerProvider, StartError>
where
    W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    let mut provider = SdkTracerProvider::builder().with_resource(otlp::resource(process));
    if settings.spans {
        provider = provider.with_simple_exporter(spans::SpanLines::new(process, writer));
    }
    if let Some(endpoint) = otlp::endpoint(&settings.otlp) {
        provider = provider.with_batch_exporter(otlp::exporter(&endpoint)?);
    }
    Ok(provider.build())
}

type BoxedLayer<S> = Box<dyn Layer<S> + Send + Sync>;

fn lines<W>(process: &'static str, format: LogFormat, writer: W) -> BoxedLayer<Registry>
where
    W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    match format {
        LogFormat::Text => {
            let ansi = io::stderr().is_terminal();
            fmt::layer()
                .with_ansi(ansi)
                .with_writer(writer)
                .event_format(text::TextLines::new(process))
                .boxed()
        }
        LogFormat::Json => json::layer(process, writer),
    }
}

/// Parses the log level. A word alone must be a level: `EnvFilter` reads a misspelled one as a target, and then writes
/// no line of any other.
fn level_filter(filter: &str) -> Result<EnvFilter, StartError> {
    let refused = || StartError::LogLevel(filter.to_owned());
    let mut words =
        filter.split(',').map(str::trim).filter(|part| !part.is_empty() && !part.contains(['=', '[']));
    if !words.all(|word| word.parse::<LevelFilter>().is_ok()) {
        return Err(refused());
    }
    let builder = EnvFilter::builder().with_default_directive(LevelFilter::INFO.into());
    builder.parse(filter).map_err(|_| refused())
}

fn is_lasting_span(metadata: &Metadata<'_>) -> bool {
    metadata.is_span() && *metadata.level() <= Level::INFO
}
