//! The harness watches itself: how late its events are seen, and how much processor it had.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::clock::PreciseTimer;
use crate::metrics::LagSamples;
use crate::record::{FailureKind, RequestRecord};

const TICK: Duration = Duration::from_millis(5);
/// An hour of ticks; later ones are not kept.
const N_TICKS_MAX: usize = 720_000;

/// Runs beside the load on the same thread until it is read or dropped.
#[derive(Debug)]
pub struct Probe {
    ticker: JoinSet<()>,
    late_ms: Arc<Mutex<Vec<f64>>>,
    started: Instant,
    cpu: CpuTimes,
}

/// Nanoseconds of this thread: on a processor, and waiting for one.
#[derive(Clone, Copy, Debug, Default)]
struct CpuTimes {
    running: u64,
    waiting: u64,
}

impl Probe {
    /// Must be called on the load thread.
    pub fn start() -> std::io::Result<Self> {
        let late_ms = Arc::new(Mutex::new(Vec::new()));
        let mut ticker = JoinSet::new();
        ticker.spawn(tick(PreciseTimer::new()?, Arc::clone(&late_ms)));
        Ok(Self { ticker, late_ms, started: Instant::now(), cpu: CpuTimes::of_this_thread() })
    }

    /// Ends the watch.
    pub fn read(mut self, records: &[RequestRecord], interrupted: bool) -> LagSamples {
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
            interrupted,
        }
    }
}

/// A tick that comes late is followed at once by those that were due meanwhile, each with its own lateness: a stall
/// of 100 ms counts as the twenty events that it delayed, and not as one.
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
    /// Zeros where the kernel does not tell.
    fn of_this_thread() -> Self {
        let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
        let mut numbers = text.split_whitespace().map(|word| word.parse().unwrap_or(0));
        Self { running: numbers.next().unwrap_or(0), waiting: numbers.next().unwrap_or(0) }
    }
}

/// Ten thousand streams are ten thousand descriptors: takes as many as the system allows.
pub fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    // Refused only where the limit is as high as it may be; a run that needs more says so by itself.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
}
