//! The right to some blocks, as a value: its owner may use them, and dropping it gives them back.
//! See `docs/decisions/0008-windows-give-back.md`.

use std::fmt;
use std::sync::Arc;

use types::{BlockHash, BlockIdx, GroupIdx};

use crate::hold::{HoldId, Tables};
use crate::holder::Holder;
use crate::shared::SharedPool;

/// The right to the blocks of one sequence, or of a part of it: one table per layer group, all of one length.
///
/// Not `Clone`: a block is given back once. Blocks that came from the prefix cache are shared with other leases and
/// must not be written; which ones these are, the holder knows from [`BlockPool::adopt`](crate::BlockPool::adopt). Dropping the lease gives its
/// blocks back: published ones stay cached, the others are free at once, so no write to them may be under way by then.
/// Where that cannot be proved, [`quarantine`](Self::quarantine) takes the place of the drop.
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

    /// The blocks of one group, in the sequence's order.
    ///
    /// # Panics
    /// If the layout has no such group.
    pub fn table(&self, group: GroupIdx) -> &[BlockIdx] {
        self.tables.of_group(group)
    }

    /// Blocks per group.
    pub fn n_blocks(&self) -> usize {
        self.tables.n_blocks()
    }

    pub fn is_empty(&self) -> bool {
        self.n_blocks() == 0
    }

    /// One lease over a longer piece of the sequence: this one's blocks, then those of `later`.
    ///
    /// # Panics
    /// If blocks of `later` were published or adopted and this lease is not empty: what is cached comes first.
    /// If the two come from different pools.
    pub fn join(mut self, later: BlockLease) -> BlockLease {
        assert!(self.pool.is_same(&later.pool), "a lease covers blocks of one pool");
        self.tables = self.pool.join(self.id, later.id).expect("blocks that were published come first");
        self
    }

    /// This block is full and right: others may find it by `hash`, now and after the lease has ended.
    ///
    /// Blocks are published in the sequence's order: one whose predecessor was not published could not be found, so
    /// it is passed over. A block that is published already keeps its hash. If another lease has published the same
    /// hash, the two blocks hold the same KV; the index keeps one of them.
    ///
    /// # Panics
    /// If the lease has no such block.
    pub fn publish(&self, ordinal: usize, hash: BlockHash) {
        assert!(ordinal < self.n_blocks(), "block {ordinal} of a lease of {}", self.n_blocks());
        self.pool.publish(self.id, ordinal, hash);
    }

    /// Gives back the blocks of one group before block `before`: a sliding window has left them behind, and no step
    /// that is under way looks at them.
    ///
    /// The tables keep their length; what is gone stands in them as [`BlockIdx::GONE`]. Published blocks stay until
    /// all groups have left all of them behind, because the prefix index offers a place in the sequence with the
    /// blocks of all groups or not at all. Once anything is gone, nothing more is published.
    pub fn give_back(&mut self, group: GroupIdx, before: usize) {
        self.tables = self.pool.give_back(self.id, usize::from(group.0), before);
    }

    /// The same blocks, held for something else from now on.
    pub fn rename(&mut self, holder: Holder) {
        self.pool.rename(self.id, holder);
    }

    /// Keeps all blocks from being given to anyone, because a wire may still touch them.
    ///
    /// `why` is shown in the ledger. Blocks that other leases share stay theirs; published ones can still be adopted.
    pub fn quarantine(self, why: &'static str) -> Quarantine {
        let id = self.pool.quarantine(self.id, why);
        Quarantine { pool: self.pool.clone(), id, tables: Arc::clone(&self.tables) }
    }
}

#[cfg(test)]
impl BlockLease {
    /// The blocks of all groups at one place in the sequence.
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
    /// A lease that was joined to another or quarantined has no hold of its own any more, and gives nothing back.
    fn drop(&mut self) {
        self.pool.release(self.id);
    }
}

/// Blocks that a wire may still touch.
///
/// There is no timer: only proof of quiet allows [`release`](Self::release), and only its holder can have that proof.
/// Dropped without it, the blocks stay in quarantine for good, where the ledger and the metrics show them.
#[must_use = "blocks in quarantine come back only by `release`"]
pub struct Quarantine {
    pool: SharedPool,
    id: HoldId,
    tables: Arc<Tables>,
}

impl Quarantine {
    /// The wire is quiet, proven: the blocks go back.
    pub fn release(self) {
        self.pool.release(self.id);
    }

    /// The blocks of one group, in the sequence's order.
    pub fn table(&self, group: GroupIdx) -> &[BlockIdx] {
        self.tables.of_group(group)
    }

    /// Blocks per group.
    pub fn n_blocks(&self) -> usize {
        self.tables.n_blocks()
    }
}

impl fmt::Debug for Quarantine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Quarantine").field("id", &self.id).field("n_blocks", &self.n_blocks()).finish()
    }
}
