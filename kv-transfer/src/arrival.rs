//! Waiting for a landing to be filled.

use std::fmt;
use std::sync::Arc;

use chassis::Task;
use types::TransferId;

use crate::arrived::ArrivedKv;
use crate::error::TransferError;
use crate::landing::{OpenLanding, Outcome};
use crate::quiet::Quiet;

/// One landing's future, on the node that granted it. Dropped before the KV has arrived, it cancels the transfer.
///
/// The drop does not wait, even if the other end stands still: the sender is told, and the blocks are back in the
/// pool when the drop returns. Only where the wire cannot prove that it is quiet they are in quarantine instead.
pub struct Arrival {
    landing: Arc<OpenLanding>,
    /// Fails the landing when its deadline passes. Ends with the arrival.
    #[expect(dead_code, reason = "held for its Drop")]
    deadline: Task<()>,
}

/// What a decode loop sees on each turn.
#[derive(Debug)]
pub enum ArrivalStatus {
    /// Pages in place and verified, and pages wanted.
    Waiting { received: usize, total: usize },
    /// All of it is there. Said once.
    Arrived(ArrivedKv),
    /// It will not come. The lease is gone.
    Failed(TransferError),
}

impl Arrival {
    pub(crate) fn new(landing: Arc<OpenLanding>, deadline: Task<()>) -> Self {
        Self { landing, deadline }
    }

    pub fn transfer(&self) -> TransferId {
        self.landing.landing().transfer
    }

    /// Where the transfer stands. Never waits. After `Arrived` there is nothing more to say: it answers `Closed`.
    pub fn poll(&mut self) -> ArrivalStatus {
        match self.landing.take_outcome() {
            None => {
                let (received, total) = self.landing.received();
                ArrivalStatus::Waiting { received, total }
            }
            Some(Outcome::Arrived(kv)) => ArrivalStatus::Arrived(kv),
            Some(Outcome::Taken) => ArrivalStatus::Failed(TransferError::Closed),
            Some(Outcome::Failed(error)) => ArrivalStatus::Failed(error),
        }
    }

    /// Waits until [`poll`](Self::poll) says something other than `Waiting`. Cancel-safe.
    ///
    /// It ends by the landing's deadline at the latest.
    pub async fn ended(&self) {
        self.landing.changed_since(OpenLanding::is_over).await;
    }

    /// Waits until more than `seen` pages are in place, or the end has come. Cancel-safe.
    pub async fn progress(&self, seen: usize) {
        self.landing.changed_since(|landing| landing.is_over() || landing.received().0 > seen).await;
    }

    /// Waits for the end, and returns it. Dropping the future cancels the transfer.
    pub async fn settle(mut self) -> Result<ArrivedKv, TransferError> {
        self.ended().await;
        match self.poll() {
            ArrivalStatus::Arrived(kv) => Ok(kv),
            ArrivalStatus::Failed(error) => Err(error),
            ArrivalStatus::Waiting { .. } => unreachable!("an end is final"),
        }
    }

    /// For wires that do not do the writing themselves: if the landing fails, its blocks come back only once `quiet`
    /// says that no write is left.
    ///
    /// # Panics
    /// If it was called before: a landing has one wire.
    pub fn needs_proof(&self, quiet: Arc<dyn Quiet>) {
        self.landing.needs_proof(quiet);
    }
}

impl Drop for Arrival {
    fn drop(&mut self) {
        self.landing.leave();
    }
}

impl fmt::Debug for Arrival {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (received, total) = self.landing.received();
        f.debug_struct("Arrival")
            .field("transfer", &self.transfer())
            .field("received", &received)
            .field("total", &total)
            .finish()
    }
}
