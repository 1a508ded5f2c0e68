//! The receiver's handle on one landing: waits until the landing is filled.

use std::fmt;
use std::sync::Arc;

use types::{Landing, TransferId};

use crate::arrived::ArrivedKv;
use crate::error::TransferError;
use crate::landing::{OpenLanding, Outcome};
use crate::landings::{GrantedLanding, LandRequest, Landings};
use crate::quiet::Quiet;

/// The receiver's handle on one landing, on the node that granted it. Dropping it before the KV has arrived cancels
/// the transfer.
///
/// The drop does not wait, even if the sender stalls. It notifies the sender, and when it returns the blocks
/// are back in the pool. If the wire cannot prove that no write is left, the blocks are in quarantine
/// instead.
pub struct Arrival {
    granted: GrantedLanding,
}

/// The state of a landing, as a decode loop polls it.
#[derive(Debug)]
pub enum ArrivalStatus {
    /// The KV is on its way: `received` of `total` wanted pages are in place and verified.
    Waiting { received: usize, total: usize },
    /// All KV has arrived. `poll` returns it once.
    Arrived(ArrivedKv),
    /// The transfer has failed. The landing no longer has its lease.
    Failed(TransferError),
}

impl Arrival {
    /// Grants a landing, for [`KvConnector::land`](crate::KvConnector::land).
    pub(crate) fn of(landings: &Landings, request: LandRequest) -> Result<(Landing, Self), TransferError> {
        let granted = landings.grant(request)?;
        Ok((granted.open.landing().clone(), Self { granted }))
    }

    fn landing(&self) -> &OpenLanding {
        &self.granted.open
    }

    pub fn transfer(&self) -> TransferId {
        self.landing().landing().transfer
    }

    /// Returns the state of the transfer and never waits. Calls after `Arrived` return `Failed(Closed)`.
    pub fn poll(&mut self) -> ArrivalStatus {
        match self.landing().take_outcome() {
            None => {
                let (received, total) = self.landing().received();
                ArrivalStatus::Waiting { received, total }
            }
            Some(Outcome::Arrived(kv)) => ArrivalStatus::Arrived(kv),
            Some(Outcome::Taken) => ArrivalStatus::Failed(TransferError::Closed),
            Some(Outcome::Failed(error)) => ArrivalStatus::Failed(error),
        }
    }

    /// Waits until [`poll`](Self::poll) returns something other than `Waiting`. Cancel-safe.
    ///
    /// The wait is bounded by the landing's deadline.
    pub async fn ended(&self) {
        self.landing().changed_since(OpenLanding::is_over).await;
    }

    /// Waits until more than `seen` pages are in place, or the landing has ended. Cancel-safe.
    pub async fn progress(&self, seen: usize) {
        self.landing().changed_since(|landing| landing.is_over() || landing.received().0 > seen).await;
    }

    /// Waits for the end of the landing and returns the result. Dropping the future cancels the transfer.
    pub async fn settle(mut self) -> Result<ArrivedKv, TransferError> {
        self.ended().await;
        match self.poll() {
            ArrivalStatus::Arrived(kv) => Ok(kv),
            ArrivalStatus::Failed(error) => Err(error),
            ArrivalStatus::Waiting { .. } => unreachable!("an end is final"),
        }
    }

    /// Sets the proof of quiet of a wire that does not write in this process. If the landing fails, its blocks return
    /// to the pool only after `quiet` reports that no write is left.
    ///
    /// # Panics
    /// If it was called before: a landing has one wire.
    pub fn needs_proof(&self, quiet: Arc<dyn Quiet>) {
        self.landing().needs_proof(quiet);
    }
}

impl Drop for Arrival {
    fn drop(&mut self) {
        self.landing().leave();
    }
}

impl fmt::Debug for Arrival {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (received, total) = self.landing().received();
        f.debug_struct("Arrival")
            .field("transfer", &self.transfer())
            .field("received", &received)
            .field("total", &total)
            .finish()
    }
}
