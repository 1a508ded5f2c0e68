//! The events of a run, and one hash of all of them.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::time::Instant;

/// Limit of lines in the report of a failed run.
const LINES_MAX: usize = 100_000;
/// The variable that, if set, makes the log have a line for every write.
const TRACE: &str = "SIM_TRACE";

/// A run's events, each with its time on the virtual clock. Clones write into the same log.
#[derive(Clone)]
pub struct EventLog {
    start: Instant,
    /// Whether every event is kept as a line, to compare two runs of one seed.
    is_loud: bool,
    state: Arc<Mutex<State>>,
}

struct State {
    hash: u64,
    lines: Vec<String>,
    faults: Vec<String>,
}

impl EventLog {
    /// Makes a log. Must be called inside the run, so that the clock is the run's.
    pub fn new() -> Self {
        let state = State { hash: 0xcbf2_9ce4_8422_2325, lines: Vec::new(), faults: Vec::new() };
        let is_loud = std::env::var_os(TRACE).is_some();
        Self { start: Instant::now(), is_loud, state: Arc::new(Mutex::new(state)) }
    }

    /// Adds an event as a line for readers, and to the hash.
    pub fn say(&self, line: impl fmt::Display) {
        let line = format!("{:>9.3} {line}", self.start.elapsed().as_secs_f64());
        let mut state = self.state();
        state.mix(line.as_bytes());
        if state.lines.len() < LINES_MAX {
            state.lines.push(line);
        }
    }

    /// Adds an event to the hash only.
    pub fn trace(&self, what: &str, which: &str) {
        if self.is_loud {
            return self.say(format_args!("{what} {which} at {} ns", self.start.elapsed().as_nanos()));
        }
        let now = self.start.elapsed().as_nanos() as u64;
        let mut state = self.state();
        state.mix(&now.to_le_bytes());
        state.mix(what.as_bytes());
        state.mix(which.as_bytes());
    }

    pub fn trace_number(&self, what: &str, which: u64) {
        if self.is_loud {
            return self.trace(what, &which.to_string());
        }
        let now = self.start.elapsed().as_nanos() as u64;
        let mut state = self.state();
        state.mix(&now.to_le_bytes());
        state.mix(what.as_bytes());
        state.mix(&which.to_le_bytes());
    }

    /// Records that a check of the run has failed.
    pub fn accuse(&self, what: impl fmt::Display) {
        let what = what.to_string();
        self.say(format_args!("WRONG: {what}"));
        self.state().faults.push(what);
    }

    pub fn hash(&self) -> u64 {
        self.state().hash
    }

    pub fn lines(&self) -> Vec<String> {
        self.state().lines.clone()
    }

    pub fn faults(&self) -> Vec<String> {
        self.state().faults.clone()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for EventLog {
    fn default() -> Self {
        Self::new()
    }
}

impl State {
    fn mix(&mut self, bytes: &[u8]) {
        let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        self.hash = bytes.iter().fold(self.hash, step);
    }
}

impl fmt::Debug for EventLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EventLog").finish_non_exhaustive()
    }
}
