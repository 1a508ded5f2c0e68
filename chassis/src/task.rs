//! Spawns tasks. No other module may: every task gets a name, a span and a gate here.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::task::{JoinError, JoinHandle};
use tracing::Instrument;

use crate::gate::{Gate, GateClosed};
use crate::standstill::Standstill;

/// Runs `future` as a task in the caller's span, inside `gate` under `name`.
///
/// The task holds its guard until it ends, so a drain waits for it and names it if it is late.
/// If the gate is closed, the future is dropped, and the task ends with [`TaskError::Refused`].
pub fn spawn_guarded<F>(gate: &Gate, name: &'static str, future: F) -> Task<F::Output>
where
    F: Future<Output: Send> + Send + 'static,
{
    let run = match gate.enter(name) {
        Err(closed) => Run::Refused(closed),
        Ok(guard) => {
            let guarded = async move {
                let _guard = guard;
                future.in_current_span().await
            };
            Run::Started(match Standstill::current() {
                None => spawn(guarded),
                Some(process) => spawn(process.run(guarded)),
            })
        }
    };
    Task { name, run }
}

#[allow(clippy::disallowed_methods, reason = "spawn_guarded is what the ban refers to")]
fn spawn<F>(future: F) -> JoinHandle<F::Output>
where
    F: Future<Output: Send> + Send + 'static,
{
    tokio::spawn(future)
}

/// A spawned task. Dropping it aborts the task at its next await; [`Task::detach`] lets it continue.
#[derive(Debug)]
#[must_use = "a task that is dropped is aborted"]
pub struct Task<T> {
    name: &'static str,
    run: Run<T>,
}

#[derive(Debug)]
enum Run<T> {
    Started(JoinHandle<T>),
    Refused(GateClosed),
    Detached,
}

impl<T> Task<T> {
    pub fn name(&self) -> &'static str {
        self.name
    }

    pub fn is_finished(&self) -> bool {
        match &self.run {
            Run::Started(handle) => handle.is_finished(),
            Run::Refused(_) | Run::Detached => true,
        }
    }

    /// Lets the task continue without an owner. Its gate still waits for it.
    pub fn detach(mut self) {
        self.run = Run::Detached;
    }

    /// Aborts the task at its next await. Await the task afterwards to wait for its end.
    pub fn abort(&self) {
        if let Run::Started(handle) = &self.run {
            handle.abort();
        }
    }
}

impl<T> Future for Task<T> {
    type Output = Result<T, TaskError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let name = self.name;
        match &mut self.run {
            Run::Started(handle) => Pin::new(handle).poll(cx).map_err(|ended| TaskError::ended(name, &ended)),
            Run::Refused(closed) => Poll::Ready(Err(TaskError::Refused { name, closed: *closed })),
            Run::Detached => Poll::Pending,
        }
    }
}

impl<T> Drop for Task<T> {
    fn drop(&mut self) {
        self.abort();
    }
}

/// The reason why a task has no result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TaskError {
    #[error("task `{name}` was not started")]
    Refused {
        name: &'static str,
        #[source]
        closed: GateClosed,
    },
    #[error("task `{name}` was aborted")]
    Aborted { name: &'static str },
    #[error("task `{name}` panicked")]
    Panicked { name: &'static str },
}

impl TaskError {
    fn ended(name: &'static str, error: &JoinError) -> Self {
        if error.is_panic() { Self::Panicked { name } } else { Self::Aborted { name } }
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;
    use std::time::Duration;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[tokio::test(start_paused = true)]
    async fn a_task_answers() {
        let gate = Gate::new("g");
        assert_eq!(spawn_guarded(&gate, "answer", async { 42 }).await, Ok(42));
        gate.close(SECOND).await.expect("the task is over");
    }

    #[tokio::test(start_paused = true)]
    async fn a_dropped_task_is_aborted() {
        let gate = Gate::new("g");
        let task = spawn_guarded(&gate, "forever", pending::<()>());
        tokio::task::yield_now().await;
        assert_eq!(gate.holders()[0].what, "forever");
        drop(task);
        gate.close(SECOND).await.expect("the guard went with the task");
    }

    #[tokio::test(start_paused = true)]
    async fn a_detached_task_is_waited_for() {
        let gate = Gate::new("g");
        spawn_guarded(&gate, "slow", tokio::time::sleep(SECOND * 2)).detach();
        gate.close(SECOND).await.expect_err("it takes two seconds");
        gate.close(SECOND * 2).await.expect("it had two seconds");
    }

    #[tokio::test(start_paused = true)]
    async fn a_closed_gate_starts_nothing() {
        let gate = Gate::new("g");
        gate.close(SECOND).await.expect("no guard is held");
        let refused = spawn_guarded(&gate, "late", async {}).await.expect_err("the gate is closed");
        assert_eq!(refused, TaskError::Refused { name: "late", closed: GateClosed { gate: "g" } });
    }

    #[tokio::test(start_paused = true)]
    async fn an_end_without_a_result_has_a_reason() {
        let gate = Gate::new("g");
        let task = spawn_guarded(&gate, "forever", pending::<()>());
        task.abort();
        assert_eq!(task.await, Err(TaskError::Aborted { name: "forever" }));
        let task = spawn_guarded(&gate, "bad", async { panic!("on purpose") });
        assert_eq!(task.await, Err(TaskError::Panicked { name: "bad" }));
        gate.close(SECOND).await.expect("both guards are back");
    }
}
