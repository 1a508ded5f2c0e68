//! The blocks of one running sequence.

use std::sync::Arc;

use kv_cache::BlockLease;
use types::{BlockHash, BlockIdx, GroupIdx};

/// A sequence's blocks, from its first token on. Dropping the value releases them, unless a connector still
/// reads them.
#[derive(Debug)]
pub(crate) struct Room {
    /// The lease that sinks share. While a sink holds it, it cannot be extended.
    lease: Arc<BlockLease>,
    /// The blocks that were added while the lease was shared.
    grown: Option<BlockLease>,
    /// The blocks of both leases, one table per group.
    tables: Vec<Vec<BlockIdx>>,
    /// The number of leading blocks that other sequences can find in the cache. They are no longer written.
    n_published: usize,
}

impl Room {
    pub(crate) fn new(lease: BlockLease, n_groups: usize) -> Self {
        let tables = (0..n_groups as u16).map(|group| lease.table(GroupIdx(group)).to_vec()).collect();
        Self { lease: Arc::new(lease), grown: None, tables, n_published: 0 }
    }

    /// Returns the number of blocks per group.
    pub(crate) fn n_blocks(&self) -> usize {
        self.lease.n_blocks() + self.grown.as_ref().map_or(0, BlockLease::n_blocks)
    }

    /// Returns all blocks, one table per group.
    pub(crate) fn tables(&self) -> impl Iterator<Item = &[BlockIdx]> {
        self.tables.iter().map(Vec::as_slice)
    }

    /// Returns the lease for a sink, without the blocks that were added while it was shared.
    pub(crate) fn lease(&self) -> &Arc<BlockLease> {
        &self.lease
    }

    /// Returns whether a sink holds the lease, so that dropping this value would free no blocks.
    pub(crate) fn is_shared(&self) -> bool {
        Arc::strong_count(&self.lease) > 1
    }

    /// Adds the blocks of a second lease at the end of the tables.
    pub(crate) fn grow(mut self, more: BlockLease) -> Self {
        for (group, table) in (0..).map(GroupIdx).zip(&mut self.tables) {
            table.extend_from_slice(more.table(group));
        }
        let grown = match self.grown.take() {
            Some(grown) => grown.join(more),
            None => more,
        };
        match Arc::try_unwrap(self.lease) {
            Ok(lease) => Self { lease: Arc::new(lease.join(grown)), ..self },
            Err(shared) => Self { lease: shared, grown: Some(grown), ..self },
        }
    }

    /// Returns to the pool the blocks before `first_seen`, which a sliding window has passed.
    ///
    /// The blocks of a shared lease stay for now, because a connector may be reading them.
    pub(crate) fn give_back(&mut self, first_seen: impl Fn(GroupIdx) -> usize) {
        let Some(lease) = Arc::get_mut(&mut self.lease) else { return };
        for (group, table) in (0..).map(GroupIdx).zip(&mut self.tables) {
            let before = first_seen(group).min(lease.n_blocks());
            lease.give_back(group, before);
            table[..before].copy_from_slice(&lease.table(group)[..before]);
        }
    }

    /// Publishes the first `hashes.len()` blocks, which are full and valid, in the prefix cache.
    ///
    /// Blocks that were added while the lease was shared are published later, when no sink holds the lease.
    pub(crate) fn publish(&mut self, hashes: &[BlockHash]) {
        let n_full = hashes.len().min(self.lease.n_blocks());
        for (ordinal, hash) in hashes.iter().enumerate().take(n_full).skip(self.n_published) {
            self.lease.publish(ordinal, *hash);
        }
        self.n_published = self.n_published.max(n_full);
    }
}
