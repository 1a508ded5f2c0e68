//! The right to some blocks, as a value: its owner may use them, and the drop gives them back.
//! See `docs/decisions/0008-windows-give-back.md`.

use std::fmt;
use std::sync::Arc;

use types::{BlockHash, BlockIdx, GroupIdx};

use crate::hold::{HoldId, Tables};
use crate::holder::Holder;
use crate::shared::SharedPool;

/// The right to the blocks of one sequence, or of a part of it: one table per layer group, all of the same length.
///
/// Not `Clone`: a block is given back once. Blocks from the prefix cache are shared with other leases and must not be
/// written; [`BlockPool::adopt`](crate::BlockPool::adopt) returned them. Dropping the lease gives its blocks back:
/// published ones stay cached, and the others are free at once. So no write to them may be in progress at that time.
/// If that cannot be proved, call [`quarantine`](Self::quarantine) instead of the drop.
#[must_use = "a lease that is not kept gives its blocks back at once"]
pub struct BlockLease {
    pool: SharedPool,
    id: HoldId,
    tables: Arc<Tables>,
}

impl BlockLease {
    pub(crate) fn new(pool: SharedPool, id: HoldId, tables: Arc<Tables>) -> Self {
        Self { pool, id, tables }
    }

    /// Returns the blocks of one group, in the sequence's order.
    ///
    /// # Panics
    /// If the layout has no such group.
    pub fn table(&self, group: GroupIdx) -> &[BlockIdx] {
        self.tables.of_group(group)
    }

    /// Returns the number of blocks in each group.
    pub fn n_blocks(&self) -> usize {
        self.tables.n_blocks()
    }

    pub fn is_empty(&self) -> bool {
        self.n_blocks() == 0
    }

    /// Joins two leases into one over a longer part of the sequence: this lease's blocks, then those of
    /// `later`.
    ///
    /// # Panics
    /// If blocks of `later` were published or adopted and this lease is not empty, because cached blocks must come
    /// first. If the two come from different pools.
    pub fn join(mut self, later: BlockLease) -> BlockLease {
        assert!(self.pool.is_same(&later.pool), "a lease covers blocks of one pool");
        self.tables = self.pool.join(self.id, later.id).expect("blocks that were published come first");
        self
    }

    /// Publishes a block that is full and valid: others may find it by `hash`, now and after the end of the lease.
    ///
    /// Blocks are published in the sequence's order. A block whose predecessor is not published could not be found,
    /// so it is skipped. A published block keeps its hash. If another lease has published the same hash, the two
    /// blocks hold the same KV, and the index keeps one of them.
    ///
    /// # Panics
    /// If the lease has no such block.
    pub fn publish(&self, ordinal: usize, hash: BlockHash) {
        assert!(ordinal < self.n_blocks(), "block {ordinal} of a lease of {}", self.n_blocks());
        self.pool.publish(self.id, ordinal, hash);
    }

    /// Gives back the blocks of one group before block `before`: the sliding window has passed them, and no running
    /// step reads them.
    ///
    /// The tables keep their length; [`BlockIdx::GONE`] marks blocks that are given back. Published blocks stay until
    /// no group needs any of them, because the prefix index offers a place in the sequence with the blocks of all
    /// groups or not at all. After the first block is given back, nothing more is published.
    pub fn give_back(&mut self, group: GroupIdx, before: usize) {
        self.tables = self.pool.give_back(self.id, usize::from(group.0), before);
    }

    /// Changes the purpose of the lease.
    pub fn rename(&mut self, holder: Holder) {
        self.pool.rename(self.id, holder);
    }

    /// Keeps all blocks from being reused, because a wire may still access them.
    ///
    /// `why` is shown in the ledger. Other leases keep the blocks that they share; published blocks can still be
    /// adopted.
    pub fn quarantine(self, why: &'static str) -> Quarantine {
        let id = self.pool.quarantine(self.id, why);
        Quarantine { pool: self.pool.clone(), id, tables: Arc::clone(&self.tables) }
    }
}

#[cfg(test)]
impl BlockLease {
    /// Returns the blocks of all groups at one place in the sequence.
    pub(crate) fn blocks_at(&self, ordinal: usize) -> Vec<u32> {
        self.tables.at(ordinal).iter().map(|block| block.0).collect()
    }
}

impl fmt::Debug for BlockLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockLease").field("id", &self.id).field("n_blocks", &self.n_blocks()).finish()
    }
}

impl Drop for BlockLease {
    /// Releases the hold. A lease that was joined or quarantined has no hold any more, and gives nothing
    /// back.
    fn drop(&mut self) {
        self.pool.release(self.id);
    }
}

/// Blocks that are kept from being reused, because a wire may still access them.
///
/// There is no timer: only the proof of quiet allows [`release`](Self::release), and only the holder of this value
/// can have the proof. If it is dropped without the proof, the blocks stay in quarantine for ever. The ledger and the
/// metrics show them.
#[must_use = "blocks in quarantine come back only by `release`"]
pub struct Quarantine {
    pool: SharedPool,
    id: HoldId,
    tables: Arc<Tables>,
}

impl Quarantine {
    /// Gives the blocks back, after the proof that the wire is quiet.
    pub fn release(self) {
        self.pool.release(self.id);
    }

    /// Returns the blocks of one group, in the sequence's order.
    pub fn table(&self, group: GroupIdx) -> &[BlockIdx] {
        self.tables.of_group(group)
    }

    /// Returns the number of blocks in each group.
    pub fn n_blocks(&self) -> usize {
        self.tables.n_blocks()
    }
}

impl fmt::Debug for Quarantine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Quarantine").field("id", &self.id).field("n_blocks", &self.n_blocks()).finish()
    }
}
