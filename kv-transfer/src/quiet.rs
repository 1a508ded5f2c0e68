//! The proof that a wire can no longer touch a landing's blocks.
//!
//! A block that somebody may still write must not be given to another sequence, however long one has waited. So the
//! end of an unfinished landing asks its wire for proof. Where this process does the writing (loopback, tcp) the proof
//! is a lock: [`OpenLanding`](crate::landing::OpenLanding) lets nobody write once it is closed, and no other proof is
//! needed. Where a peer or a device writes (shm, cuda-ipc, nccl, rdma), the connector hands one of these to
//! [`Arrival::needs_proof`](crate::Arrival::needs_proof), and the blocks stay in quarantine until it holds.

use std::fmt::Debug;

use async_trait::async_trait;

/// What a wire knows about who can still write into a landing.
#[async_trait]
pub trait Quiet: Debug + Send + Sync + 'static {
    /// Shown in the ledger while the proof is awaited: `rdma queue pair`, `peer's exit`.
    fn awaited(&self) -> &'static str;

    /// Takes the peer's access away as far as this side can, without waiting. True: nobody can write any more.
    fn revoke(&self) -> bool;

    /// Ends when nobody can write any more. Never ends on a timer.
    async fn proven(&self);
}
