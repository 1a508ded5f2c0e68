//! The runtime of a run, and its waits, which name the tasks that have not ended in time.

use std::pin::pin;
use std::thread;
use std::time::Duration;

use chassis::Gate;
use futures::FutureExt as _;
use tokio::time::{Instant, sleep};

use super::super::log::EventLog;
use super::super::run::Report;
use super::super::witness::Witness;
use super::clock::Progress;
use super::reference::JOIN_MS;

/// The time after the last fault within which everything ends.
pub const ENDS_WITHIN: Duration = Duration::from_secs(10);
/// The time within which everything ends without a fault that stops progress.
const DONE_WITHIN: Duration = Duration::from_secs(60);
/// The interval of checks of a state without notifications.
pub const LOOK_EVERY: Duration = Duration::from_millis(50);
/// How long threads may wait for a core, in milliseconds of the real clock.
pub const THREADS_RUN_WITHIN_MS: u32 = 2_000;

/// Runs `play` on a clock that the progress of a node with these followers moves, and returns its log.
pub fn on_virtual_clock(seed: u64, n_followers: usize, play: impl AsyncFnOnce(Waits)) -> Report {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    let runtime = runtime.expect("a runtime without sockets");
    let log = runtime.block_on(async {
        let log = EventLog::new();
        let _witness = Witness::of(&log);
        let waits = Waits { log: log.clone(), progress: Progress::new(n_followers) };
        let progress = waits.progress.clone();
        tokio::select! {
            biased;
            () = play(waits) => {}
            () = progress.run_clock() => {}
        }
        log
    });
    // A thread that waits for a lost message must not keep the next seed waiting.
    runtime.shutdown_background();
    Report { seed, hash: log.hash(), lines: log.lines(), faults: log.faults(), tally: Default::default() }
}

/// The waits of one run.
#[derive(Clone, Debug)]
pub struct Waits {
    pub log: EventLog,
    pub progress: Progress,
}

impl Waits {
    /// Waits for something that must end by itself. Returns `None` if it is late.
    pub async fn in_time<T>(&self, what: &str, future: impl Future<Output = T>) -> Option<T> {
        self.before(self.late_since(Instant::now()), what, future).await
    }

    /// Like [`in_time`](Self::in_time), for what must end soon after now.
    pub async fn soon<T>(&self, what: &str, future: impl Future<Output = T>) -> Option<T> {
        self.before(self.late_soon(), what, future).await
    }

    /// Waits until `future` ends, or until `late` does.
    async fn before<T>(
        &self,
        late: impl Future<Output = ()>,
        what: &str,
        future: impl Future<Output = T>,
    ) -> Option<T> {
        let mut future = pin!(future);
        tokio::select! {
            biased;
            value = &mut future => return Some(value),
            () = late => {}
        }
        // A thread may have waited for a core of this machine, so the clock stands still meanwhile.
        let _stopped = self.progress.stop_clock();
        for _ in 0..THREADS_RUN_WITHIN_MS {
            if let Some(value) = (&mut future).now_or_never() {
                return Some(value);
            }
            thread::sleep(Duration::from_millis(1));
            tokio::task::yield_now().await;
        }
        self.log.accuse(format_args!("late: {what}"));
        None
    }

    async fn late_since(&self, begun: Instant) {
        loop {
            sleep(LOOK_EVERY).await;
            let seen = self.progress.seen();
            let is_joining = !self.all_have_joined();
            let can_end = !is_joining && !seen.is_head_stopped;
            let fault = seen.last_fault.filter(|_| self.must_end() && can_end);
            let within = DONE_WITHIN + Duration::from_millis(if is_joining { JOIN_MS } else { 0 });
            if begun.elapsed() > within || fault.is_some_and(|fault| fault.elapsed() > ENDS_WITHIN) {
                return;
            }
        }
    }

    /// Waits for the time in which everything ends. The time in which the head stands still does not count.
    async fn late_soon(&self) {
        let mut since = Instant::now();
        while since.elapsed() < ENDS_WITHIN {
            sleep(LOOK_EVERY).await;
            if self.progress.seen().is_head_stopped {
                since = Instant::now();
            }
        }
    }

    /// Waits until all tasks of a gate have ended.
    pub async fn all_end(&self, gate: &Gate) {
        if self.soon("all tasks end", gate.close(4 * ENDS_WITHIN)).await.is_none() {
            self.log.say(format_args!("{gate:?}: {:?}", gate.holders()));
        }
    }

    pub fn all_have_joined(&self) -> bool {
        self.progress.seen().connections.iter().all(|of| of.is_accepted)
    }

    /// Returns whether a fault has happened after which the node must end.
    pub fn must_end(&self) -> bool {
        self.progress.seen().connections.iter().any(|of| of.must_end)
    }

    pub fn expect_failure(&self, what: &str, error: impl std::fmt::Display) {
        match self.must_end() {
            true => self.log.say(format_args!("{what} fails: {error}")),
            false => self.log.accuse(format_args!("{what} fails without a fault: {error}")),
        }
    }
}
