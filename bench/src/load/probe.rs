//! Measures the harness itself during a run: the delay of its events, and its CPU time.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::clock::PreciseTimer;
use crate::metrics::LagSamples;
use crate::record::{FailureKind, RequestRecord};

const TICK: Duration = Duration::from_millis(5);
/// The largest number of ticks that are kept, one hour's.
const N_TICKS_MAX: usize = 720_000;

/// The measurement of the load thread, from its start until it is read or dropped.
#[derive(Debug)]
pub struct Probe {
    ticker: JoinSet<()>,
    late_ms: Arc<Mutex<Vec<f64>>>,
    started: Instant,
    cpu: CpuTimes,
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunEnd {
    Over,
    /// By the user.
    Interrupted,
}

/// CPU times of a thread in nanoseconds: running, and waiting for a processor.
#[derive(Clone, Copy, Debug, Default)]
struct CpuTimes {
    running: u64,
    waiting: u64,
}

impl Probe {
    /// Starts the measurement. Must be called on the load thread.
    pub fn start() -> std::io::Result<Self> {
        let late_ms = Arc::new(Mutex::new(Vec::new()));
        let mut ticker = JoinSet::new();
        ticker.spawn(tick(PreciseTimer::new()?, Arc::clone(&late_ms)));
        Ok(Self { ticker, late_ms, started: Instant::now(), cpu: CpuTimes::of_this_thread() })
    }

    /// Ends the measurement. Returns its samples.
    pub fn read(mut self, records: &[RequestRecord], end: RunEnd) -> LagSamples {
        self.ticker.abort_all();
        let now = CpuTimes::of_this_thread();
        let ours = |record: &&RequestRecord| record.failure().is_some_and(|f| f.kind == FailureKind::Harness);
        LagSamples {
            send_ms: records.iter().map(|record| f64::from(record.lag_us) / 1e3).collect(),
            event_loop_ms: std::mem::take(&mut *self.late_ms.lock().unwrap_or_else(PoisonError::into_inner)),
            running: Duration::from_nanos(now.running.saturating_sub(self.cpu.running)),
            waiting: Duration::from_nanos(now.waiting.saturating_sub(self.cpu.waiting)),
            elapsed: self.started.elapsed(),
            harness_failures: records.iter().filter(ours).count(),
            interrupted: end == RunEnd::Interrupted,
        }
    }
}

/// Records how late each tick of a timer is. After a late tick, the ticks that were due meanwhile follow at
/// once, each with its own delay: a stall of 100 ms counts as the twenty events that it delayed.
async fn tick(mut timer: PreciseTimer, late_ms: Arc<Mutex<Vec<f64>>>) {
    let mut due = Instant::now();
    loop {
        due += TICK;
        timer.until(due).await;
        let late = Instant::now().saturating_duration_since(due);
        let mut seen = late_ms.lock().unwrap_or_else(PoisonError::into_inner);
        if seen.len() == N_TICKS_MAX {
            return;
        }
        seen.push(late.as_secs_f64() * 1e3);
    }
}

impl CpuTimes {
    /// Reads the CPU times of the calling thread; zeros if the kernel does not report them.
    fn of_this_thread() -> Self {
        let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
        let mut numbers = text.split_whitespace().map(|word| word.parse().unwrap_or(0));
        Self { running: numbers.next().unwrap_or(0), waiting: numbers.next().unwrap_or(0) }
    }
}

/// Raises the limit of open files to the system's maximum: ten thousand streams need ten thousand
/// descriptors.
pub fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    // A failure is ignored: it means that the limit is at its maximum. A run that needs a higher limit reports that.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
}
