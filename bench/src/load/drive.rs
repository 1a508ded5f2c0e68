//! The load loop: a closed set of events, one method that waits, one that acts.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::client::exchange::{Client, ClientOptions};
use crate::client::target::TargetServer;
use crate::clock::PreciseTimer;
use crate::load::compose::{Composer, PreparedSession};
use crate::load::live::Live;
use crate::load::probe::{Probe, RunEnd};
use crate::load::session_runner::SessionRunner;
use crate::metrics::LagSamples;
use crate::record::RequestRecord;
use crate::workload::Arrivals;
use crate::workload::session::Sessions;

/// The time from the call to the first request, so that bodies are ready when the first one is due.
const LEAD: Duration = Duration::from_millis(100);

/// When sessions start.
#[allow(missing_debug_implementations, reason = "it holds a supply, which is a closure")]
pub enum Pacing {
    /// Sessions start at these times, independent of the answers.
    Open(Arrivals),
    /// Sessions start at the times that they contain.
    Timed,
    /// A session starts when another ends. The number of concurrent sessions grows linearly during the ramp.
    Closed { concurrency: usize, ramp: Duration },
}

/// The inputs of one run of the load loop.
#[allow(missing_debug_implementations, reason = "it holds a supply, which is a closure")]
pub struct Drive {
    pub target: Arc<TargetServer>,
    pub composer: Arc<Composer>,
    pub sessions: Sessions,
    pub pacing: Pacing,
    /// The time after the first session from which no session starts.
    pub duration: Option<Duration>,
    pub client: ClientOptions,
    /// Time zero of the records; `None`: the start of this run.
    pub epoch: Option<Instant>,
    /// The number of the slice, for the records.
    pub slice: u32,
}

/// The results of one run of the load loop.
#[derive(Debug)]
pub struct LoadResult {
    /// The records, in the order of intended times.
    pub records: Vec<RequestRecord>,
    pub lag: LagSamples,
    /// Time zero of the records.
    pub epoch: Instant,
}

enum Event {
    Prepared(Option<Box<PreparedSession>>),
    Due,
    Ended(Vec<RequestRecord>),
    Interrupted,
    Over,
}

struct Loop {
    runner: Arc<SessionRunner>,
    prepared: mpsc::Receiver<PreparedSession>,
    /// The next session and its due time. In a closed loop it starts once a running session has ended.
    next: Option<(Box<PreparedSession>, Instant)>,
    is_exhausted: bool,
    running: JoinSet<Vec<RequestRecord>>,
    pacing: Pacing,
    starts: Instant,
    ends: Option<Instant>,
    timer: PreciseTimer,
    interrupt: Signal,
    records: Vec<RequestRecord>,
}

/// Runs the load until every started session has ended, or the user interrupts.
pub async fn drive(job: Drive, live: Arc<Live>) -> io::Result<LoadResult> {
    let starts = Instant::now() + LEAD;
    let epoch = job.epoch.unwrap_or(starts);
    let client = Client::new(job.target, live, epoch, job.client);
    let runner = SessionRunner {
        client,
        composer: Arc::clone(&job.composer),
        n_begun: AtomicU32::new(0),
        slice: job.slice,
    };
    let mut state = Loop {
        runner: Arc::new(runner),
        prepared: job.composer.start(job.sessions)?,
        next: None,
        is_exhausted: false,
        running: JoinSet::new(),
        pacing: job.pacing,
        starts,
        ends: job.duration.map(|duration| starts + duration),
        timer: PreciseTimer::new()?,
        interrupt: signal(SignalKind::interrupt())?,
        records: Vec::new(),
    };
    let probe = Probe::start()?;
    let end = state.run().await;
    state.records.sort_by_key(|record| (record.intended_us, record.index));
    let lag = probe.read(&state.records, end);
    Ok(LoadResult { records: state.records, lag, epoch })
}

impl Loop {
    /// Runs the load loop.
    async fn run(&mut self) -> RunEnd {
        loop {
            match self.next_event().await {
                Event::Over => return RunEnd::Over,
                Event::Interrupted => return RunEnd::Interrupted,
                event => self.apply(event),
            }
        }
    }

    /// Waits for the next event; no other method waits. Due sessions come first: an answer may be read late,
    /// but a request may not be sent late.
    async fn next_event(&mut self) -> Event {
        let due = self.next.as_ref().and_then(|(_, due)| self.place_opens(*due));
        let wants_next = self.next.is_none() && !self.is_exhausted;
        let is_over = self.next.is_none() && self.is_exhausted && self.running.is_empty();
        tokio::select! {
            biased;
            () = std::future::ready(()), if is_over => Event::Over,
            () = self.timer.until(due.unwrap_or(self.starts)), if due.is_some() => Event::Due,
            prepared = self.prepared.recv(), if wants_next => Event::Prepared(prepared.map(Box::new)),
            Some(ended) = self.running.join_next() => Event::Ended(ended.unwrap_or_default()),
            _ = self.interrupt.recv() => Event::Interrupted,
        }
    }

    fn apply(&mut self, event: Event) {
        match event {
            Event::Prepared(prepared) => self.schedule(prepared),
            Event::Due => self.start_next(),
            Event::Ended(records) => self.records.extend(records),
            Event::Interrupted | Event::Over => {}
        }
    }

    /// Sets the due time of the next session. A session after the end of the run ends the supply.
    fn schedule(&mut self, prepared: Option<Box<PreparedSession>>) {
        let due = prepared.as_ref().and_then(|prepared| match &mut self.pacing {
            Pacing::Open(arrivals) => arrivals.next().map(|at| self.starts + at),
            Pacing::Timed => prepared.session.starts.map(|at| self.starts + at),
            Pacing::Closed { .. } => Some(self.starts),
        });
        match (prepared, due) {
            (Some(prepared), Some(due)) if self.ends.is_none_or(|ends| due < ends) => {
                self.next = Some((prepared, due))
            }
            _ => self.is_exhausted = true,
        }
    }

    fn start_next(&mut self) {
        let Some((prepared, due)) = self.next.take() else { return };
        let intended = match self.pacing {
            // A closed loop has no schedule, so the session is due now.
            Pacing::Closed { .. } => Instant::now().max(due),
            _ => due,
        };
        if self.ends.is_some_and(|ends| intended >= ends) {
            self.is_exhausted = true;
            return;
        }
        let session = Arc::clone(&self.runner).run(*prepared, intended);
        self.running.spawn(session);
    }

    /// Returns when the next session may start; `None` while the largest number of sessions runs.
    fn place_opens(&self, due: Instant) -> Option<Instant> {
        match self.pacing {
            Pacing::Open(_) | Pacing::Timed => Some(due),
            Pacing::Closed { concurrency, .. } if self.running.len() >= concurrency => None,
            Pacing::Closed { concurrency, ramp } => {
                Some(due + ramp.mul_f64(self.running.len() as f64 / concurrency as f64))
            }
        }
    }
}
