//! The proof that a wire can no longer touch a landing's blocks.
//!
//! A block that may still be written must not be given to another sequence, however long the wait was. So the
//! end of an unfinished landing asks its wire for proof. Where this process does the writing (loopback, tcp) the proof
//! is a lock: [`OpenLanding`](crate::landing::OpenLanding) lets no write begin once it is closed, and no other proof is
//! needed. Where a peer or a device writes (shm, cuda-ipc, nccl, rdma), the connector hands one of these to
//! [`Arrival::needs_proof`](crate::Arrival::needs_proof), and the blocks stay in quarantine until it holds.

use std::fmt::Debug;

use async_trait::async_trait;

/// What a wire knows about who can still write into a landing.
#[async_trait]
pub trait Quiet: Debug + Send + Sync + 'static {
    /// Shown in the ledger while the proof is awaited: `rdma queue pair`, `peer's exit`.
    fn awaited(&self) -> &'static str;

    /// Takes the peer's access away as far as this side can, without waiting. True: no writer is left.
    fn revoke(&self) -> bool;

    /// Ends when no writer is left. Never ends on a timer.
    async fn proven(&self);
}
