//! The handle of a worker, for the rest of a node.

use std::sync::Arc;

use tokio::sync::watch;
use types::{Refusal, RefusalKind};

use crate::arrivals::ExpectedArrival;
use crate::inbox::{Inbox, RoomAnswer, WorkerState};
use crate::landing_room::{GrantedRoom, RoomRequest};
use crate::load::WorkerLoad;
use crate::precedence::SequenceId;
use crate::submission::NewSequence;

/// Submits work to a worker. Cheap to clone. When the last clone is dropped, the worker finishes its
/// sequences and stops.
#[derive(Clone, Debug)]
pub struct WorkerHandle {
    shared: Arc<DrainOnDrop>,
}

/// The claim to a submitted sequence. Dropping it cancels the sequence at any stage; after the sequence's end
/// it has no effect.
#[derive(Debug)]
#[must_use = "a ticket that is dropped cancels its sequence"]
pub struct Ticket {
    inbox: Arc<Inbox>,
    id: SequenceId,
}

/// Drains the worker when the last handle that can submit is dropped.
#[derive(Debug)]
struct DrainOnDrop {
    inbox: Arc<Inbox>,
}

// === impl WorkerHandle ===

impl WorkerHandle {
    pub(crate) fn new(inbox: Arc<Inbox>) -> Self {
        Self { shared: Arc::new(DrainOnDrop { inbox }) }
    }

    /// Submits a sequence. If it is accepted, its sink is ended exactly once, in every case. If it is
    /// refused, the sink is dropped without a call.
    pub fn submit(&self, new: NewSequence) -> Result<Ticket, Refusal> {
        let id = self.shared.inbox.submit(new)?;
        Ok(Ticket { inbox: Arc::clone(&self.shared.inbox), id })
    }

    /// Requests room for KV that another node sends. Waits until it is the request's turn and all of the room
    /// is available. Refused if too many wait, the deadline passes, or the worker drains or dies. Dropping
    /// the future withdraws the request.
    pub async fn room(&self, request: RoomRequest) -> Result<GrantedRoom, Refusal> {
        let inbox = &self.shared.inbox;
        let (id, answered) = match inbox.ask_room(request)? {
            RoomAnswer::Granted(room) => return Ok(room),
            RoomAnswer::Waits(id, answered) => (id, answered),
        };
        let _place = Ticket { inbox: Arc::clone(inbox), id };
        let closed = || inbox.check_open().err();
        let gone = || Refusal::new(RefusalKind::Failed, "the worker is gone");
        let mut state = self.state();
        tokio::select! {
            biased;
            answer = answered => answer.unwrap_or_else(|_| Err(closed().unwrap_or_else(gone))),
            _ = state.wait_for(|state| *state != WorkerState::Running) => Err(closed().unwrap_or_else(gone)),
        }
    }

    /// Begins to follow KV that arrives from another node. The worker then plans for the end of the transfer. Returns `None`
    /// if it does not bound gaps: then it plans for no arrival.
    pub fn expect_arrival(&self) -> Option<ExpectedArrival> {
        self.shared.inbox.expect_arrival()
    }

    /// Returns a receiver of the worker's load. The load changes on every turn, so a reader that forwards it
    /// must limit its rate.
    pub fn load(&self) -> watch::Receiver<WorkerLoad> {
        self.shared.inbox.load()
    }

    /// Returns a receiver of the worker's state, which decides the node's readiness.
    pub fn state(&self) -> watch::Receiver<WorkerState> {
        self.shared.inbox.state()
    }

    /// Stops accepting new work; running sequences continue. [`stopped`](Self::stopped) waits for the end.
    pub fn drain(&self) {
        self.shared.inbox.drain();
    }

    /// Waits until the worker is drained or dead, without a deadline. Cancel-safe.
    pub async fn stopped(&self) -> WorkerState {
        let mut state = self.state();
        let is_over = |state: &WorkerState| matches!(state, WorkerState::Stopped | WorkerState::Dead(_));
        let last = state.wait_for(is_over).await.map(|state| state.clone());
        last.unwrap_or(WorkerState::Stopped)
    }

    /// Wakes the worker. Call it when a sink has room again.
    pub fn nudge(&self) {
        self.shared.inbox.nudge();
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.inbox.cancel(self.id);
    }
}

impl Drop for DrainOnDrop {
    fn drop(&mut self) {
        self.inbox.drain();
    }
}
