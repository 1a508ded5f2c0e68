//! Runs a worker. Only this file of the crate waits.
//!
//! In production a worker has its own OS thread, with a runtime that has timers only, so that a long step
//! delays no sockets. In a simulation the worker is a task, and the backend's costs are waits on the virtual
//! clock. The loop is the same.

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
use crate::launched_step::LaunchTiming;
use crate::worker::{Event, NextEvent, Worker, WorkerParts};

/// The interval at which a worker without sequences reports its load.
const IDLE_BEAT: Duration = Duration::from_secs(1);

/// The resolution of a runtime's timers. For shorter waits the thread itself sleeps.
const TIMER_TICK: Duration = Duration::from_millis(1);

/// How a driver waits for a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Clock {
    /// The worker's thread sleeps, exact to the microsecond.
    Thread,
    /// The driver uses the runtime's timers, which a simulation can control.
    Runtime,
}

/// A worker that does not run yet. Dropping it ends the worker as if it had died.
#[derive(Debug)]
pub struct Driver {
    /// Reports an early end. It is declared before the worker, so that nothing can be submitted when the
    /// worker's sequences end.
    death_report: DeathReport,
    worker: Worker,
    inbox: Arc<Inbox>,
    freed: watch::Receiver<u64>,
}

/// The thread of a running worker.
#[derive(Debug)]
pub struct WorkerThread {
    thread: JoinHandle<Box<dyn Backend>>,
}

/// Makes a worker, with a handle for callers. The worker does nothing until its driver runs.
pub fn worker(parts: WorkerParts) -> Result<(WorkerHandle, Driver), SchedulerError> {
    let (world, settings) = (parts.world.clone(), parts.settings);
    let pool: BlockPool = parts.pool.clone();
    let worker = Worker::new(parts)?;
    let inbox = Arc::new(Inbox::new(&worker, pool.clone(), world, settings));
    let handle = WorkerHandle::new(Arc::clone(&inbox));
    let death_report = DeathReport { inbox: Some(Arc::clone(&inbox)) };
    Ok((handle, Driver { death_report, worker, inbox, freed: pool.freed() }))
}

impl Clock {
    /// Waits until shortly before a time.
    async fn sleep_until(self, until: Instant) {
        let left = until.saturating_duration_since(Instant::now());
        match self {
            Self::Thread => std::thread::sleep(left),
            Self::Runtime if left > TIMER_TICK => sleep_until(until - TIMER_TICK).await,
            Self::Runtime => {}
        }
    }
}

impl Driver {
    /// Runs the worker on its own thread, as in production.
    pub fn on_thread(self) -> Result<WorkerThread, SchedulerError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
        let runtime = runtime.map_err(SchedulerError::Thread)?;
        let run = move || runtime.block_on(self.drive(Clock::Thread));
        let thread = std::thread::Builder::new().name("worker".to_owned()).spawn(run);
        Ok(WorkerThread { thread: thread.map_err(SchedulerError::Thread)? })
    }

    /// Runs the worker as a task, as in a simulation: the same loop on the caller's clock. The backend must
    /// only model its costs, otherwise every step blocks the caller's thread. Returns the backend after the
    /// drain.
    pub async fn drive_simulated(self) -> Box<dyn Backend> {
        self.drive(Clock::Runtime).await
    }

    async fn drive(mut self, clock: Clock) -> Box<dyn Backend> {
        loop {
            let timing = self.linger(clock).await;
            self.turn(timing);
            match self.worker.next() {
                NextEvent::Launch => {}
                NextEvent::Collect(due) => self.collect(due).await,
                NextEvent::Wait(_) if self.is_over() => break,
                NextEvent::Wait(until) => self.wait(until).await,
            }
        }
        self.death_report.cancel();
        self.worker.into_backend()
    }

    /// Waits until the best time for the next launch, which is shortly before the running step ends.
    async fn linger(&mut self, clock: Clock) -> LaunchTiming {
        let Some(times) = self.worker.launch_times() else { return LaunchTiming::Usual };
        self.report();
        clock.sleep_until(times.with_prompts).await;
        self.take_in();
        if self.worker.has_prompts() {
            return LaunchTiming::Usual;
        }
        clock.sleep_until(times.without_prompts).await;
        LaunchTiming::Late
    }

    /// Applies all new events, then launches a step.
    fn turn(&mut self, timing: LaunchTiming) {
        self.take_in();
        self.worker.apply(Event::Launch(timing));
        self.report();
    }

    fn take_in(&mut self) {
        for event in self.inbox.take() {
            self.worker.apply(event);
        }
    }

    async fn collect(&mut self, due: Option<Instant>) {
        match due {
            Some(due) => sleep_until(due).await,
            // The loop yields here, because a loop that never waits prevents the other tasks of a simulation
            // from running.
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
        // The last launch may have returned blocks that it could not use. Marking them as seen avoids a
        // useless turn.
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
    /// Waits until the thread has ended; after [`WorkerHandle::stopped`] it returns at once. Returns the
    /// backend, or `None` if the thread has panicked and the backend is lost.
    pub fn join(self) -> Option<Box<dyn Backend>> {
        self.thread.join().ok()
    }
}

/// Reports the worker's death on drop, if the loop ends early: by a panic, or because its task was dropped.
#[derive(Debug)]
struct DeathReport {
    /// The inbox to report to; `None` once the loop has ended normally.
    inbox: Option<Arc<Inbox>>,
}

impl DeathReport {
    fn cancel(&mut self) {
        self.inbox = None;
    }
}

impl Drop for DeathReport {
    fn drop(&mut self) {
        let Some(inbox) = &self.inbox else { return };
        let reason = if std::thread::panicking() { "the worker panicked" } else { "the worker was aborted" };
        tracing::error!(reason, "scheduler worker thread died");
        inbox.die(reason);
    }
}

#[cfg(test)]
mod tests;
