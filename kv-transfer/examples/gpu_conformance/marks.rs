//! Records when each step of one transfer happens: the events of target `walk`, by the host's clock.

use std::collections::BTreeMap;
use std::fmt::{Debug, Write as _};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use serde_json::{Value, json};
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::layer::{Context, Layer};

use crate::now;

/// One event: its time, its message, and its fields.
type Mark = (Instant, String, String);

/// The events since the last [`begin`]; `None` if events are not recorded. The lock is held to add one event.
static MARKS: Mutex<Option<Vec<Mark>>> = Mutex::new(None);

fn marks() -> MutexGuard<'static, Option<Vec<Mark>>> {
    MARKS.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn begin() {
    *marks() = Some(Vec::with_capacity(4096));
}

/// Ends the recording, and returns all events.
pub(crate) fn end() -> Vec<Mark> {
    marks().take().unwrap_or_default()
}

/// The tracing layer that records the events of target `walk`.
pub(crate) struct Keeper;

impl<S: Subscriber> Layer<S> for Keeper {
    fn on_event(&self, event: &Event<'_>, _ctx: Context<'_, S>) {
        let at = now();
        let mut marks = marks();
        let Some(marks) = marks.as_mut() else { return };
        let mut words = QuietProofs::default();
        event.record(&mut words);
        marks.push((at, words.message, words.fields));
    }
}

#[derive(Default)]
struct QuietProofs {
    message: String,
    fields: String,
}

impl Visit for QuietProofs {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let written = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            "transfer" => Ok(()),
            name => write!(self.fields, "{name}={value:?} "),
        };
        written.expect("a string takes all");
    }
}

/// Returns the number of events of each kind, and the times of the first and the last one, in microseconds
/// since `start`.
pub(crate) fn told(start: Instant, marks: &[Mark]) -> Value {
    let mut kinds: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for (at, message, fields) in marks {
        let us = at.saturating_duration_since(start).as_secs_f64() * 1e6;
        let kind = match fields.split_once("end=").or(fields.split_once("writes=")) {
            Some((_, end)) => format!("{message}, {}", end.split(' ').next().unwrap_or_default()),
            None => message.clone(),
        };
        kinds.entry(kind).or_default().push(us);
    }
    let mut lines: Vec<_> = kinds.into_iter().collect();
    lines.sort_by(|one, other| one.1[0].total_cmp(&other.1[0]));
    let line = |(kind, all): (String, Vec<f64>)| {
        let us = |us: f64| (us * 10.0).round() / 10.0;
        json!([kind, all.len(), us(all[0]), us(all[all.len() - 1])])
    };
    json!(lines.into_iter().map(line).collect::<Vec<_>>())
}

/// Returns all events, one per line.
pub(crate) fn whole(start: Instant, marks: &[Mark]) -> Value {
    let line = |(at, message, fields): &Mark| {
        let us = at.saturating_duration_since(start).as_secs_f64() * 1e6;
        format!("{us:8.1} {message} {}", fields.trim_end())
    };
    json!(marks.iter().map(line).collect::<Vec<_>>())
}
