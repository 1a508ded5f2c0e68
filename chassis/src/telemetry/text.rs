//! Log lines as text.

use std::fmt;

use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::FmtContext;
use tracing_subscriber::fmt::format::{Format, FormatEvent, FormatFields, Full, Writer};
use tracing_subscriber::registry::LookupSpan;

/// The format of text lines: tracing's own with the process's name in front, because several processes may
/// share one terminal.
pub(super) struct TextLines {
    process: &'static str,
    format: Format<Full>,
}

impl TextLines {
    pub(super) fn new(process: &'static str) -> Self {
        Self { process, format: Format::default() }
    }
}

impl<S, N> FormatEvent<S, N> for TextLines
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
        write!(writer, "{:<7} ", self.process)?;
        self.format.format_event(context, writer, event)
    }
}
