//! The thread that reads a connection and acts on its messages.

use std::thread;

use chassis::{Gate, Task, spawn_guarded};
use tokio::runtime::{Builder, Handle, RuntimeFlavor};
use tokio::sync::oneshot;

use super::error::GroupError;

/// A thread with a runtime of its own. The socket wakes its tasks without another thread, if the connection was made there.
/// Its tasks may block for the time of a launch. Dropping it ends the thread and its tasks.
#[derive(Debug)]
pub(super) struct ConnectionThread {
    runtime: Handle,
    _running: oneshot::Sender<()>,
}

impl ConnectionThread {
    /// Starts the thread. A simulation has one thread, so its tasks stay there.
    pub(super) fn start() -> Result<Self, GroupError> {
        let (running, ended) = oneshot::channel();
        let current = Handle::current();
        if current.runtime_flavor() == RuntimeFlavor::CurrentThread {
            return Ok(Self { runtime: current, _running: running });
        }
        let runtime = Builder::new_current_thread().enable_all().build().map_err(GroupError::Thread)?;
        let started = Self { runtime: runtime.handle().clone(), _running: running };
        spawn_thread("connection", move || drop(runtime.block_on(ended)))?;
        Ok(started)
    }

    /// Runs `future` as a task on this thread, as [`spawn_guarded`] does.
    pub(super) fn spawn<F>(&self, gate: &Gate, name: &'static str, future: F) -> Task<F::Output>
    where
        F: Future<Output: Send> + Send + 'static,
    {
        let _entered = self.runtime.enter();
        spawn_guarded(gate, name, future)
    }
}

pub(super) fn spawn_thread(name: &str, run: impl FnOnce() + Send + 'static) -> Result<(), GroupError> {
    thread::Builder::new().name(name.to_owned()).spawn(run).map(drop).map_err(GroupError::Thread)
}
