//! Captures the log output of a process in memory, for tests.

use std::io::{self, Write};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use serde_json::Value;
use tracing::Dispatch;
use tracing::dispatcher::DefaultGuard;
use tracing::subscriber::NoSubscriber;

use super::{LogFormat, LogSettings, Telemetry, dispatch};
use crate::error::StartError;

/// A second dispatch that is never dropped. While tracing knows only one dispatch, the thread that reaches a
/// new callsite first decides whether it is enabled; a test thread without a subscriber would disable it for
/// all.
static SECOND_DISPATCH: LazyLock<Dispatch> = LazyLock::new(|| Dispatch::new(NoSubscriber::new()));

/// The telemetry of a process under test.
///
/// A capture records what runs on one thread, as a `#[tokio::test]` does:
///
/// ```
/// # use baton_chassis as chassis;
/// let capture = chassis::telemetry::Capture::spans("decode");
/// {
///     let _listening = capture.listen();
///     tracing::info!(n_blocks = 3, "blocks arrived");
/// }
/// assert_eq!(capture.lines()[0]["n_blocks"], 3);
/// ```
#[derive(Debug)]
pub struct Capture {
    dispatch: Dispatch,
    written: CapturedBytes,
    /// Kept so that the trace pipeline is shut down with the capture.
    _telemetry: Telemetry,
}

impl Capture {
    pub fn new(process: &'static str, settings: &LogSettings) -> Result<Self, StartError> {
        LazyLock::force(&SECOND_DISPATCH);
        let written = CapturedBytes::default();
        let writer = written.clone();
        let (dispatch, telemetry) = dispatch(process, settings, move || writer.clone())?;
        Ok(Self { dispatch, written, _telemetry: telemetry })
    }

    /// Makes a capture of JSON lines of level INFO, and one line for every span that ends.
    pub fn spans(process: &'static str) -> Self {
        let settings = LogSettings { format: LogFormat::Json, spans: true, ..LogSettings::default() };
        Self::new(process, &settings).expect("`info` is a log level")
    }

    /// Captures this thread's telemetry until the guard is dropped.
    pub fn listen(&self) -> DefaultGuard {
        tracing::dispatcher::set_default(&self.dispatch)
    }

    /// Returns the text written so far.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.written.bytes()).into_owned()
    }

    /// Returns the lines written so far; a line that is not JSON is `null`.
    pub fn lines(&self) -> Vec<Value> {
        self.text().lines().map(|line| serde_json::from_str(line).unwrap_or_default()).collect()
    }
}

#[derive(Clone, Debug, Default)]
struct CapturedBytes(Arc<Mutex<Vec<u8>>>);

impl CapturedBytes {
    fn bytes(&self) -> Vec<u8> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Write for CapturedBytes {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
