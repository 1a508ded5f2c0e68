//! The gate over a landing's blocks: open for writers until the landing ends.
//!
//! A writer passes it for one attempt. Closing it waits for the attempts in progress and takes the blocks out, so no
//! page of a closed landing is borrowed. Copies of devices and of other processes continue outside of the gate and are counted.

use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

use chassis::guards::{Guard, stands};
use kv_cache::BlockLease;

use crate::pending_copies::{PendingCopies, PendingCopy};
use crate::processes::QuietReport;
use crate::quiet::Quiet;

/// The blocks that a landing fills.
#[derive(Debug)]
pub(super) enum LandingBlocks {
    Leased(BlockLease),
    /// Another process of this node has the lease. It waits for the report.
    OfHead(QuietReport),
}

/// The gate over a landing's blocks: open for writers until the landing ends.
#[derive(Debug)]
pub(super) struct LeaseGate {
    /// Writers hold it shared, and check that the blocks are in it. The code that ends the landing takes them out.
    /// The lock is held for one attempt to copy, never across an await.
    blocks: RwLock<Option<LandingBlocks>>,
    /// The lock is held for one attempt to copy if several lanes write into the same pages, because a page is
    /// borrowed as a whole.
    turn: Mutex<()>,
    /// Counts the copies that a GPU or another process of this node makes outside of the lock.
    pending_copies: Arc<PendingCopies>,
    /// The proof of quiet, for a wire where the peer's device writes.
    quiet: OnceLock<Arc<dyn Quiet>>,
}

impl LeaseGate {
    pub(super) fn new(blocks: LandingBlocks) -> Self {
        Self {
            blocks: RwLock::new(Some(blocks)),
            turn: Mutex::default(),
            pending_copies: Arc::default(),
            quiet: OnceLock::new(),
        }
    }

    /// Runs `attempt` while the gate is open; returns `None` once it is closed.
    pub(super) fn while_open<T>(&self, attempt: impl FnOnce() -> T) -> Option<T> {
        let blocks = self.blocks.read().unwrap_or_else(PoisonError::into_inner);
        (blocks.is_some() || !stands(Guard::Quiet)).then(attempt)
    }

    /// Like [`while_open`](Self::while_open), but one attempt at a time.
    pub(super) fn in_turn<T>(&self, attempt: impl FnOnce() -> T) -> Option<T> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.while_open(attempt)
    }

    /// Counts a copy until the returned value is dropped, because it continues after its attempt.
    pub(super) fn begin_copy(&self) -> PendingCopy {
        self.pending_copies.begin()
    }

    /// Closes the gate to writers, after the attempts in progress have ended. The first call returns the blocks.
    pub(super) fn close(&self) -> Option<LandingBlocks> {
        self.blocks.write().unwrap_or_else(PoisonError::into_inner).take()
    }

    pub(super) fn needs_proof(&self, quiet: Arc<dyn Quiet>) {
        assert!(self.quiet.set(quiet).is_ok(), "a landing has one proof of quiet");
    }

    /// Returns the proof that is outstanding, if any: for writes of the peer's device, or for copies by this node's
    /// GPUs and other processes.
    pub(super) fn unproven(&self) -> Option<Arc<dyn Quiet>> {
        let ours: Arc<dyn Quiet> = Arc::clone(&self.pending_copies) as _;
        let of_wire = self.quiet.get().map_or(ours, Arc::clone);
        (!of_wire.revoke()).then_some(of_wire)
    }
}
