//! The threads of a connector's tasks: the process's runtime, or threads of the connector's own.
//!
//! Between GPUs a gigabyte takes three milliseconds, and a sleeping thread takes some ten microseconds to
//! wake up, several times in a transfer. So a connector can have threads of its own, which run its tasks and
//! poll their sockets. After each event such a thread spins for a bounded time before it sleeps. This costs
//! one core for that time, and no thread that computes waits for it. Each GPU of a node has two such threads:
//! one is enough for a wire between two GPUs, but not where ranks share pages.
//! See `docs/decisions/0017-a-thread-that-stays-awake.md`.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use chassis::{Gate, spawn_guarded};
use tokio::runtime::{Builder, Handle};
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::error::TransferError;
use crate::landing::bad_request;

/// The number of threads for each GPU.
const THREADS: u16 = 2;
/// The longest permitted spin. A sleeping thread wakes up in far less time.
const AWAKE_MAX: Duration = Duration::from_secs(1);

/// The threads of a connector's tasks. Cheap to clone; the threads end when the last clone is dropped.
#[derive(Clone, Debug)]
pub(crate) struct WireThreads {
    /// The connector's own threads. If there are none, tasks run on the caller's runtime.
    threads: Arc<[WireThread]>,
    /// The index of the thread that runs new tasks.
    nth: usize,
}

struct WireThread {
    runtime: Handle,
    spin: Arc<SpinWindow>,
    #[expect(dead_code, reason = "held for its Drop, which ends the thread")]
    ended: DropGuard,
}

/// The time until which the thread spins.
#[derive(Debug)]
struct SpinWindow {
    began: Instant,
    length: Duration,
    /// The end of the window, in nanoseconds since `began`.
    until: AtomicU64,
    woken: Notify,
}

impl WireThreads {
    /// Uses the caller's runtime, without threads of the connector's own.
    pub(crate) fn shared() -> Self {
        Self { threads: [].into(), nth: 0 }
    }

    /// Starts the threads for `n_gpus` GPUs, which hold the gate. They spin for `awake` after each event; if
    /// it is zero, this is `shared`.
    pub(crate) fn start(n_gpus: u16, awake: Duration, gate: &Gate) -> Result<Self, TransferError> {
        if awake.is_zero() {
            return Ok(Self::shared());
        }
        if awake > AWAKE_MAX {
            return Err(bad_request("spin_us is more than a second"));
        }
        let threads = (0..n_gpus.max(1) * THREADS).map(|_| WireThread::start(awake, gate));
        Ok(Self { threads: threads.collect::<Result<_, _>>()?, nth: 0 })
    }

    /// Returns a handle whose new tasks run on thread `nth`, modulo the number of threads.
    pub(crate) fn nth(&self, nth: usize) -> Self {
        Self { threads: Arc::clone(&self.threads), nth: nth % self.threads.len().max(1) }
    }

    /// Runs `start`. The tasks and sockets that it creates belong to the thread of this handle.
    pub(crate) fn at<T>(&self, start: impl FnOnce() -> T) -> T {
        let _entered = self.threads.get(self.nth).map(|own| own.runtime.enter());
        start()
    }

    /// Runs a future on the thread of this handle and waits for its result.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        gate: &Gate,
        name: &'static str,
        future: impl Future<Output = Result<T, TransferError>> + Send + 'static,
    ) -> Result<T, TransferError> {
        if self.threads.is_empty() {
            return future.await;
        }
        let task = self.at(|| spawn_guarded(gate, name, future));
        task.await.map_err(|_| TransferError::Closed)?
    }

    /// Called after each event: the threads spin for the next event before they sleep.
    pub(crate) fn keep_awake(&self) {
        self.threads.iter().for_each(|own| own.spin.prolong());
    }
}

impl WireThread {
    fn start(awake: Duration, gate: &Gate) -> Result<Self, TransferError> {
        let inside = gate.enter("kv wire thread").map_err(|_| TransferError::Closed)?;
        let runtime = Builder::new_current_thread().enable_all().build().map_err(TransferError::lost)?;
        let (handle, ended) = (runtime.handle().clone(), CancellationToken::new());
        let spin = Arc::new(SpinWindow::of(awake));
        let (keeps, until) = (Arc::clone(&spin), ended.clone());
        let serve = move || {
            #[allow(clippy::disallowed_methods, reason = "this task belongs to the thread and ends with it")]
            let keeping = runtime.spawn(async move { keeps.keep().await });
            runtime.block_on(until.cancelled());
            keeping.abort();
            // The remaining tasks belong to connections that are already dropped, so they are not awaited.
            runtime.shutdown_background();
            drop(inside);
        };
        std::thread::Builder::new().name("kv wire".to_owned()).spawn(serve).map_err(TransferError::lost)?;
        Ok(Self { runtime: handle, spin, ended: ended.drop_guard() })
    }
}

impl SpinWindow {
    fn of(length: Duration) -> Self {
        Self { began: Instant::now(), length, until: AtomicU64::new(0), woken: Notify::new() }
    }

    fn now(&self) -> u64 {
        self.began.elapsed().as_nanos() as u64
    }

    fn prolong(&self) {
        let now = self.now();
        let before = self.until.fetch_max(now + self.length.as_nanos() as u64, Ordering::AcqRel);
        if before <= now {
            self.woken.notify_one();
        }
    }

    /// Yields in a loop while the window is open, so that the thread does not sleep and polls its sockets
    /// between two yields.
    async fn keep(&self) {
        loop {
            self.woken.notified().await;
            while self.now() < self.until.load(Ordering::Acquire) {
                tokio::task::yield_now().await;
            }
        }
    }
}

impl fmt::Debug for WireThread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WireThread").field("spin", &self.spin).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::thread::ThreadId;

    use super::*;

    const AWAKE: Duration = Duration::from_micros(200);

    async fn thread_of(wire_threads: &WireThreads) -> ThreadId {
        let gate = Gate::new("g");
        wire_threads.run(&gate, "look", async { Ok(std::thread::current().id()) }).await.expect("it looks")
    }

    #[tokio::test]
    async fn tasks_are_at_home_where_they_were_started() {
        let (gate, here) = (Gate::new("g"), std::thread::current().id());
        assert_eq!(thread_of(&WireThreads::shared()).await, here);
        assert_eq!(thread_of(&WireThreads::start(1, Duration::ZERO, &gate).expect("no thread")).await, here);
        let own = WireThreads::start(1, AWAKE, &gate).expect("threads");
        let there = thread_of(&own).await;
        assert_ne!(there, here);
        own.keep_awake();
        assert_eq!(thread_of(&own.clone()).await, there);
        assert_eq!(thread_of(&own.nth(2)).await, there);
        assert_ne!(thread_of(&own.nth(1)).await, there);
        assert_eq!(thread_of(&WireThreads::shared().nth(1)).await, here);
        let error = WireThreads::start(1, 2 * AWAKE_MAX, &gate).expect_err("a core for ever");
        assert!(error.to_string().contains("spin_us is more than a second"), "{error}");
    }

    #[tokio::test]
    async fn a_vigil_ends_by_itself_and_begins_again() {
        let spin = Arc::new(SpinWindow::of(AWAKE));
        for _ in 0..3 {
            spin.prolong();
            let keeping = tokio::time::timeout(10 * AWAKE, spin.keep());
            keeping.await.expect_err("it waits for the next event");
            assert!(spin.now() >= spin.until.load(Ordering::Acquire));
        }
    }

    #[tokio::test]
    async fn what_runs_there_ends_with_the_last_that_has_it() {
        let gate = Gate::new("g");
        let own = WireThreads::start(1, AWAKE, &gate).expect("a thread");
        own.at(|| spawn_guarded(&gate, "for ever", std::future::pending::<()>())).detach();
        assert_eq!(gate.holders().len(), 3, "the task and two threads");
        drop(own);
        gate.close(Duration::from_secs(20)).await.expect("the thread has ended, and its tasks with it");
    }
}
