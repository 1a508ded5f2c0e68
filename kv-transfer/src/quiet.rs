//! The proof that a wire can no longer write into a landing's blocks.
//!
//! A block that may still be written must not be given to another sequence, however long that takes. So the end of an
//! incomplete landing asks its wire for proof. If this process does the writing (loopback, tcp, shm), the proof is a
//! lock: [`OpenLanding`](crate::landing::OpenLanding) starts no write once it is closed. If a GPU of this node copies
//! (cuda-ipc, nccl), or another process of it receives, that is counted. If the sender's device writes (rdma), the connector passes a [`Quiet`]
//! to [`Arrival::needs_proof`](crate::Arrival::needs_proof). The blocks stay in quarantine until the proof.

use std::fmt::Debug;

use async_trait::async_trait;

/// The proof of quiet of one wire.
#[async_trait]
pub trait Quiet: Debug + Send + Sync + 'static {
    /// Returns the name of the outstanding proof, shown in the ledger: `rdma queue pair`, `peer's exit`.
    fn awaited(&self) -> &'static str;

    /// Revokes the peer's access as far as this side can, without waiting. Returns true if no writer is left.
    fn revoke(&self) -> bool;

    /// Waits until no writer is left. Never ends on a timer.
    async fn proven(&self);
}
