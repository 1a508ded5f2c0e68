//! The virtual clock. It stands still while a thread computes.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use tokio::time::{Instant, advance};

/// The clock moves by this at once.
const TICK: Duration = Duration::from_millis(5);
/// How long the runtime pauses for threads that compute.
const PAUSE: Duration = Duration::from_micros(20);
/// Limit of pauses without a change. Then the clock moves although a thread should compute.
const PAUSES_MAX: u32 = 3_000;

/// The progress of the processes. The clock reads it to detect whether a thread computes. Clones are handles to the
/// same one.
#[derive(Clone, Debug)]
pub struct Progress {
    /// Never held across an await.
    seen: Arc<Mutex<Seen>>,
}

/// The observed progress of a run.
#[derive(Clone, Debug)]
pub struct Seen {
    pub connections: Vec<ConnectionSeen>,
    /// Whether the head has opened the model, or has failed to.
    pub is_gathered: bool,
    pub n_launched: u64,
    pub n_collected: u64,
    /// The waves that the worker's thread has not computed yet.
    pub n_waves: u32,
    /// Whether the head stands still. Its threads launch no step meanwhile.
    pub is_head_stopped: bool,
    /// When the last fault happened.
    pub last_fault: Option<Instant>,
    n_pauses: u32,
    is_clock_stopped: bool,
}

/// Stops the clock until it is dropped.
#[derive(Debug)]
pub struct StoppedClock(Progress);

/// The observed progress of the connection of one follower.
#[derive(Clone, Debug, Default)]
pub struct ConnectionSeen {
    /// The head's steps that have entered the relay, and those that have left it.
    pub steps_sent: u64,
    pub steps_arrived: u64,
    /// The follower's results that have entered the relay, and those that have left it.
    pub results_sent: u64,
    pub results_arrived: u64,
    pub is_accepted: bool,
    /// Whether the follower has sent that it has loaded its weights, and whether that has arrived.
    pub has_loaded: bool,
    pub is_known_to_be_loaded: bool,
    /// Whether the head has noticed that the connection has ended.
    pub is_closed: bool,
    /// The number of directions that stand still. What was sent there is not seen.
    pub n_held: u32,
    /// Whether a message arrived that was not the next one, or the connection was broken or silent for too long. Then
    /// the node must end.
    pub must_end: bool,
}

impl Progress {
    pub fn new(n_followers: usize) -> Self {
        let seen = Seen {
            connections: vec![ConnectionSeen::default(); n_followers],
            is_gathered: false,
            n_launched: 0,
            n_collected: 0,
            n_waves: 0,
            is_head_stopped: false,
            last_fault: None,
            n_pauses: 0,
            is_clock_stopped: false,
        };
        Self { seen: Arc::new(Mutex::new(seen)) }
    }

    pub fn note(&self, change: impl FnOnce(&mut Seen)) {
        let mut seen = self.locked();
        change(&mut seen);
        seen.n_pauses = 0;
    }

    pub fn seen(&self) -> Seen {
        self.locked().clone()
    }

    /// Moves the clock forever.
    pub async fn run_clock(&self) {
        loop {
            while self.locked().is_clock_stopped {
                tokio::task::yield_now().await;
            }
            while self.must_pause() {
                thread::sleep(PAUSE);
                tokio::task::yield_now().await;
            }
            if !self.locked().is_gathered {
                thread::sleep(PAUSE);
            }
            advance(TICK).await;
        }
    }

    pub fn stop_clock(&self) -> StoppedClock {
        self.locked().is_clock_stopped = true;
        StoppedClock(self.clone())
    }

    fn must_pause(&self) -> bool {
        let mut seen = self.locked();
        let must = seen.n_pauses < PAUSES_MAX && seen.is_computing();
        seen.n_pauses += u32::from(must);
        must
    }

    fn locked(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for StoppedClock {
    fn drop(&mut self) {
        self.0.locked().is_clock_stopped = false;
    }
}

impl Seen {
    /// Returns whether a thread computes, or should.
    fn is_computing(&self) -> bool {
        let all = || self.connections.iter();
        if self.is_head_stopped {
            return false;
        }
        if !self.is_gathered {
            let is_loading =
                |of: &ConnectionSeen| of.is_accepted && !of.has_loaded && !of.is_closed && of.n_held == 0;
            return all().any(is_loading) || all().all(|of| of.is_known_to_be_loaded);
        }
        let is_launching = self.n_launched == self.n_collected;
        if is_launching || all().any(|of| of.is_closed) {
            return self.n_waves > 0;
        }
        let mut n_given = self.n_launched;
        for of in all() {
            if of.n_held > 0 {
                return false;
            }
            if n_given > of.steps_sent || of.steps_arrived > of.results_sent {
                return true;
            }
            n_given = of.results_arrived;
        }
        n_given > self.n_collected
    }
}
