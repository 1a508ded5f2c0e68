//! The blocks of one running sequence.

use std::sync::Arc;

use kv_cache::BlockLease;
use types::{BlockHash, BlockIdx, GroupIdx};

/// A sequence's blocks, from its first token on. Dropping it gives them back, unless a wire still reads them.
#[derive(Debug)]
pub(crate) struct Room {
    /// What sinks share. While they do, it cannot be made longer.
    lease: Arc<BlockLease>,
    /// What was added meanwhile.
    grown: Option<BlockLease>,
    /// Per group, the blocks of both.
    tables: Vec<Vec<BlockIdx>>,
    /// Blocks that others can find. They are written no more.
    n_published: usize,
}

impl Room {
    pub(crate) fn new(lease: BlockLease, n_groups: usize) -> Self {
        let tables = (0..n_groups as u16).map(|group| lease.table(GroupIdx(group)).to_vec()).collect();
        Self { lease: Arc::new(lease), grown: None, tables, n_published: 0 }
    }

    /// Blocks per group.
    pub(crate) fn n_blocks(&self) -> usize {
        self.lease.n_blocks() + self.grown.as_ref().map_or(0, BlockLease::n_blocks)
    }

    /// Per group, all blocks.
    pub(crate) fn tables(&self) -> impl Iterator<Item = &[BlockIdx]> {
        self.tables.iter().map(Vec::as_slice)
    }

    /// What a sink is given: the blocks that were there at first.
    pub(crate) fn lease(&self) -> &Arc<BlockLease> {
        &self.lease
    }

    /// Whether a sink holds on to the blocks, so that dropping this would free none.
    pub(crate) fn is_shared(&self) -> bool {
        Arc::strong_count(&self.lease) > 1
    }

    /// The same room with more blocks behind.
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

    /// Gives back the blocks that a sliding window has left behind: those before `first_seen`.
    ///
    /// A wire may be reading the blocks that a sink shares, so those of a shared room stay until it is not.
    pub(crate) fn give_back(&mut self, first_seen: impl Fn(GroupIdx) -> usize) {
        let Some(lease) = Arc::get_mut(&mut self.lease) else { return };
        for (group, table) in (0..).map(GroupIdx).zip(&mut self.tables) {
            let before = first_seen(group).min(lease.n_blocks());
            lease.give_back(group, before);
            table[..before].copy_from_slice(&lease.table(group)[..before]);
        }
    }

    /// The first `hashes.len()` blocks are full and right: others may find them.
    ///
    /// Blocks that were added while a sink held the others wait for the room to grow again without one.
    pub(crate) fn publish(&mut self, hashes: &[BlockHash]) {
        let n_full = hashes.len().min(self.lease.n_blocks());
        for (ordinal, hash) in hashes.iter().enumerate().take(n_full).skip(self.n_published) {
            self.lease.publish(ordinal, *hash);
        }
        self.n_published = self.n_published.max(n_full);
    }
}
