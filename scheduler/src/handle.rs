//! What the rest of a node has of its worker.

use std::sync::Arc;

use tokio::sync::watch;
use types::Refusal;

use crate::inbox::{Inbox, WorkerState};
use crate::load::WorkerLoad;
use crate::rank::SequenceId;
use crate::submission::NewSequence;

/// The way to a worker. Cheap to clone; when the last clone is dropped, the worker finishes what it has and stops.
#[derive(Clone, Debug)]
pub struct WorkerHandle {
    door: Arc<Door>,
}

/// The right to be computed. Dropping it cancels the sequence, at whatever stage it is; if it has ended, nothing
/// happens.
#[derive(Debug)]
#[must_use = "a ticket that is dropped cancels its sequence"]
pub struct Ticket {
    inbox: Arc<Inbox>,
    id: SequenceId,
}

/// Drains the worker when nobody can submit any more.
#[derive(Debug)]
struct Door {
    inbox: Arc<Inbox>,
}

// === impl WorkerHandle ===

impl WorkerHandle {
    pub(crate) fn new(inbox: Arc<Inbox>) -> Self {
        Self { door: Arc::new(Door { inbox }) }
    }

    /// Hands a sequence in. Once it is accepted, its sink is ended exactly once, whatever happens; if it is refused,
    /// the sink is dropped without a word.
    pub fn submit(&self, new: NewSequence) -> Result<Ticket, Refusal> {
        let id = self.door.inbox.submit(new)?;
        Ok(Ticket { inbox: Arc::clone(&self.door.inbox), id })
    }

    /// The worker's load. It changes every turn: a reader that passes it on sets the pace itself.
    pub fn load(&self) -> watch::Receiver<WorkerLoad> {
        self.door.inbox.load()
    }

    /// Whether the worker works. Readiness is this.
    pub fn state(&self) -> watch::Receiver<WorkerState> {
        self.door.inbox.state()
    }

    /// Takes no new work from now on; what runs goes on. [`stopped`](Self::stopped) says when it is over.
    pub fn drain(&self) {
        self.door.inbox.drain();
    }

    /// Ends when the worker has, drained or dead. Put a deadline around it. Cancel-safe.
    pub async fn stopped(&self) -> WorkerState {
        let mut state = self.state();
        let is_over = |state: &WorkerState| matches!(state, WorkerState::Stopped | WorkerState::Dead(_));
        let last = state.wait_for(is_over).await.map(|state| state.clone());
        last.unwrap_or(WorkerState::Stopped)
    }

    /// Has the worker look again: a sink has room that had none.
    pub fn nudge(&self) {
        self.door.inbox.nudge();
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.inbox.cancel(self.id);
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.inbox.drain();
    }
}
