//! Records panics in tasks, and log lines at `ERROR`.

use std::cell::RefCell;
use std::fmt::Write as _;
use std::sync::Once;

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};
use tracing_subscriber::registry::LookupSpan;

use super::log::EventLog;

thread_local! {
    /// The log of the run on this thread; `None` outside of a run.
    static LISTENING: RefCell<Option<EventLog>> = const { RefCell::new(None) };
}

/// The variable that, if set, makes the whole log go to stderr.
pub const LOUD: &str = "SIM_LOG";

/// A worker's log line if a sequence's KV is not the KV that was written or received. It always fails the
/// run: every transfer is verified, so no network fault explains it.
const WRONG_KV: &str = "message=sequence failed in an engine step";

/// Makes panics and errors on this thread fail the run, until it is dropped.
#[derive(Debug)]
pub struct Witness(());

impl Witness {
    pub fn of(log: &EventLog) -> Self {
        static ONCE: Once = Once::new();
        ONCE.call_once(install);
        LISTENING.set(Some(log.clone()));
        Self(())
    }
}

impl Drop for Witness {
    fn drop(&mut self) {
        LISTENING.set(None);
    }
}

fn install() {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        accuse(format!("panic: {panic}"));
        before(panic);
    }));
    let errors = Errors.with_filter(LevelFilter::WARN);
    let loud = std::env::var(LOUD).ok().map(|filter| {
        let filter = tracing_subscriber::EnvFilter::new(filter);
        tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_filter(filter)
    });
    let all = tracing_subscriber::registry().with(errors).with(loud);
    tracing::subscriber::set_global_default(all).expect("no other subscriber in this process");
}

fn accuse(what: String) {
    LISTENING.with_borrow(|log| {
        if let Some(log) = log {
            log.accuse(what);
        }
    });
}

struct Errors;

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Errors {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut text = Text(String::new());
        event.record(&mut text);
        if *event.metadata().level() == Level::ERROR {
            accuse(format!("logged as an error:{}", text.0));
        } else if text.0.contains(WRONG_KV) {
            accuse(format!("KV was read that is not its sequence's:{}", text.0));
        }
    }
}

struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        let _ = write!(self.0, " {field}={value:?}");
    }
}
