//! Suspends a process in a simulation, as SIGSTOP suspends a real one.
//!
//! A [`Standstill`] represents one simulated process. While it is stopped, no task that it spawned through
//! [`spawn_guarded`](crate::spawn_guarded) is polled. It sees all timers that fired meanwhile when it
//! continues. Outside of a simulation no task has such a process, and tasks run normally.

use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

tokio::task_local! {
    static PROCESS: Standstill;
}

/// One simulated process, which can be suspended. Clones are handles to the same process.
#[derive(Clone, Debug, Default)]
pub struct Standstill {
    /// The mutex is never held across an await.
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    is_stopped: bool,
    /// The wakers of tasks that became ready while the process was stopped.
    woken: Vec<Waker>,
}

impl Standstill {
    /// Returns the process that the calling task belongs to; `None` outside of a simulation.
    pub(crate) fn current() -> Option<Self> {
        PROCESS.try_with(Clone::clone).ok()
    }

    pub fn is_stopped(&self) -> bool {
        self.state().is_stopped
    }

    pub fn stop(&self) {
        self.state().is_stopped = true;
    }

    /// Continues the process and wakes the tasks that were woken meanwhile.
    pub fn go_on(&self) {
        let mut state = self.state();
        state.is_stopped = false;
        let woken = mem::take(&mut state.woken);
        drop(state);
        woken.into_iter().for_each(Waker::wake);
    }

    /// Runs `future`, and all tasks that it spawns, as part of the process.
    pub fn run<F: Future>(self, future: F) -> impl Future<Output = F::Output> + use<F> {
        let stoppable = Stoppable { process: self.clone(), future: Box::pin(future) };
        PROCESS.scope(self, stoppable)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Stoppable<F> {
    process: Standstill,
    future: Pin<Box<F>>,
}

impl<F: Future> Future for Stoppable<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        {
            let mut state = self.process.state();
            if state.is_stopped {
                state.woken.push(cx.waker().clone());
                return Poll::Pending;
            }
        }
        self.future.as_mut().poll(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::{Instant, sleep};

    use super::*;
    use crate::{Gate, spawn_guarded};

    #[tokio::test(start_paused = true)]
    async fn a_stopped_process_sees_its_timers_when_it_goes_on() {
        let (process, gate) = (Standstill::default(), Gate::new("test"));
        let inner = gate.clone();
        let begun = Instant::now();
        let both = process.clone().run(async move {
            let child = spawn_guarded(&inner, "child", async move {
                sleep(Duration::from_secs(1)).await;
                begun.elapsed()
            });
            sleep(Duration::from_secs(2)).await;
            (begun.elapsed(), child.await.expect("it ends"))
        });
        let running = spawn_guarded(&gate, "process", both);
        sleep(Duration::from_millis(500)).await;
        process.stop();
        sleep(Duration::from_secs(5)).await;
        assert!(!running.is_finished());
        process.go_on();
        let (parent, child) = running.await.expect("it ends");
        assert_eq!((parent, child), (Duration::from_millis(5_500), Duration::from_millis(5_500)));
    }
}
