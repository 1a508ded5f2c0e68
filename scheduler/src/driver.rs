//! Turns a worker's crank: the one place that waits.
//!
//! In production a worker has an OS thread of its own, and a runtime on it that knows only timers, so that a step that
//! takes a second delays nobody's sockets. In a simulation it is a task among others; the backend's costs are
//! then waits on the virtual clock. Both run the same loop.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use engine::Backend;
use kv_cache::BlockPool;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use crate::error::SchedulerError;
use crate::handle::WorkerHandle;
use crate::inbox::Inbox;
use crate::worker::{Event, Next, Worker, WorkerParts};

/// How often a worker without sequences says that it is alive.
const IDLE_BEAT: Duration = Duration::from_secs(1);

/// What a runtime's timers tell apart. Shorter waits are a thread's to sleep.
const TIMER_TICK: Duration = Duration::from_millis(1);

/// Whose time a driver waits in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Clock {
    /// A thread's own, which has nothing else to do and may sleep to the microsecond.
    Thread,
    /// The runtime's, which may be a simulation's.
    Runtime,
}

/// A worker that nobody drives yet. Dropping it is the worker's death.
#[derive(Debug)]
pub struct Driver {
    /// Before the worker, so that the door is shut when the worker's sequences end.
    farewell: Farewell,
    worker: Worker,
    inbox: Arc<Inbox>,
    freed: watch::Receiver<u64>,
}

/// A worker's thread.
#[derive(Debug)]
pub struct WorkerThread {
    thread: JoinHandle<Box<dyn Backend>>,
}

/// Makes a worker. It does nothing until it is driven.
pub fn worker(parts: WorkerParts) -> Result<(WorkerHandle, Driver), SchedulerError> {
    let (world, settings) = (parts.world.clone(), parts.settings);
    let pool: BlockPool = parts.pool.clone();
    let worker = Worker::new(parts)?;
    let inbox = Arc::new(Inbox::new(&worker, world, settings));
    let handle = WorkerHandle::new(Arc::clone(&inbox));
    let farewell = Farewell { inbox: Some(Arc::clone(&inbox)) };
    Ok((handle, Driver { farewell, worker, inbox, freed: pool.freed() }))
}

impl Driver {
    /// Drives the worker on a thread of its own, as in production.
    pub fn on_thread(self) -> Result<WorkerThread, SchedulerError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
        let runtime = runtime.map_err(SchedulerError::Thread)?;
        let run = move || runtime.block_on(self.drive(Clock::Thread));
        let thread = std::thread::Builder::new().name("worker".to_owned()).spawn(run);
        Ok(WorkerThread { thread: thread.map_err(SchedulerError::Thread)? })
    }

    /// Drives the worker as a task, as in a simulation: the same loop, on the caller's clock. The backend must be one
    /// that only models its costs, or the caller's thread is blocked for every step. Drained, the worker has no more use
    /// for its backend, which is the answer.
    pub async fn drive_simulated(self) -> Box<dyn Backend> {
        self.drive(Clock::Runtime).await
    }

    async fn drive(mut self, clock: Clock) -> Box<dyn Backend> {
        loop {
            self.linger(clock).await;
            self.turn();
            match self.worker.next() {
                Next::Launch => {}
                Next::Collect(due) => self.collect(due).await,
                Next::Wait(_) if self.is_over() => break,
                Next::Wait(until) => self.wait(until).await,
            }
        }
        self.farewell.said();
        self.worker.into_backend()
    }

    /// Waits as long as the next launch is better for it.
    async fn linger(&mut self, clock: Clock) {
        let Some(until) = self.worker.launch_at() else { return };
        self.report();
        let left = until.saturating_duration_since(Instant::now());
        match clock {
            Clock::Thread => std::thread::sleep(left),
            Clock::Runtime if left > TIMER_TICK => sleep_until(until - TIMER_TICK).await,
            Clock::Runtime => {}
        }
    }

    /// Everything new, then one launch.
    fn turn(&mut self) {
        for event in self.inbox.take() {
            self.worker.apply(event);
        }
        self.worker.apply(Event::Launch);
        self.report();
    }

    async fn collect(&mut self, due: Option<Instant>) {
        match due {
            Some(due) => sleep_until(due).await,
            // A loop that never waits would keep a simulation's other tasks from running.
            None => tokio::task::yield_now().await,
        }
        self.worker.apply(Event::Collect);
    }

    fn is_over(&self) -> bool {
        self.worker.is_idle() && (self.worker.lost().is_some() || self.inbox.stop())
    }

    async fn wait(&mut self, until: Option<Instant>) {
        if self.worker.is_idle() {
            self.worker.apply(Event::Idle);
            self.report();
        }
        let until = until.unwrap_or_else(|| Instant::now() + IDLE_BEAT);
        // What the last launch tried in vain has given blocks back too; that is no news.
        self.freed.mark_unchanged();
        tokio::select! {
            biased;
            () = self.inbox.rings() => {}
            _ = self.freed.changed() => {}
            () = sleep_until(until) => {}
        }
    }

    fn report(&self) {
        self.inbox.report(self.worker.load(), self.worker.costs());
        if let Some(reason) = self.worker.lost() {
            self.inbox.die(reason);
        }
    }
}

impl WorkerThread {
    /// Waits until the thread has ended; after [`WorkerHandle::stopped`] that is at once. The answer is the backend, which
    /// nobody uses any more; `None` if the thread has panicked, and the backend went with it.
    pub fn join(self) -> Option<Box<dyn Backend>> {
        self.thread.join().ok()
    }
}

/// Tells everybody when the loop ends in any way but its own: by a panic, or because its task was dropped.
#[derive(Debug)]
struct Farewell {
    /// `None` once the loop has ended by itself, and has told of it.
    inbox: Option<Arc<Inbox>>,
}

impl Farewell {
    fn said(&mut self) {
        self.inbox = None;
    }
}

impl Drop for Farewell {
    fn drop(&mut self) {
        let Some(inbox) = &self.inbox else { return };
        let reason = if std::thread::panicking() { "the worker panicked" } else { "the worker was aborted" };
        tracing::error!(reason, "worker died");
        inbox.die(reason);
    }
}

#[cfg(test)]
mod tests;
