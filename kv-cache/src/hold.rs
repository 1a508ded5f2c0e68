//! One entry of the pool's books: some blocks, who holds them, and what of them is published.

use std::fmt;
use std::sync::Arc;

use types::{BlockHash, BlockIdx, GroupIdx};

use crate::lease::Holder;

/// Names one hold in the books; never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct HoldId(pub(crate) u64);

/// A hold's blocks: one table per layer group, all of one length.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tables {
    by_group: Vec<Vec<BlockIdx>>,
    n_blocks: usize,
}

/// One lease or quarantine.
#[derive(Debug)]
pub(crate) struct Hold {
    pub(crate) holder: Holder,
    pub(crate) tables: Arc<Tables>,
    /// The hashes of the blocks that were adopted or published, from the first block on.
    pub(crate) hashes: Vec<BlockHash>,
    /// How many blocks, from the first one on, the index refers to. The blocks after them that have a hash are
    /// duplicates of what another hold published before, or follow such a duplicate.
    pub(crate) n_claimed: usize,
    /// Why it is in quarantine, if it is.
    pub(crate) quarantined: Option<&'static str>,
}

// === impl Tables ===

impl Tables {
    pub(crate) fn new(by_group: Vec<Vec<BlockIdx>>, n_blocks: usize) -> Self {
        debug_assert!(by_group.iter().all(|table| table.len() == n_blocks), "tables are of one length");
        Self { by_group, n_blocks }
    }

    pub(crate) fn of_group(&self, group: GroupIdx) -> &[BlockIdx] {
        &self.by_group[usize::from(group.0)]
    }

    /// The first group's table, by which the others can be told; empty for a model without attention.
    pub(crate) fn first(&self) -> &[BlockIdx] {
        self.by_group.first().map_or(&[], Vec::as_slice)
    }

    /// The blocks of all groups at one place in the sequence.
    pub(crate) fn at(&self, ordinal: usize) -> Box<[BlockIdx]> {
        self.by_group.iter().map(|table| table[ordinal]).collect()
    }

    pub(crate) fn n_blocks(&self) -> usize {
        self.n_blocks
    }

    /// The blocks of all groups, group by group.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = BlockIdx> {
        self.by_group.iter().flatten().copied()
    }

    fn append(&mut self, later: &Self) {
        for (table, more) in self.by_group.iter_mut().zip(&later.by_group) {
            table.extend_from_slice(more);
        }
        self.n_blocks += later.n_blocks;
    }
}

// === impl Hold ===

impl Hold {
    pub(crate) fn fresh(holder: Holder, tables: Tables) -> Self {
        Self { holder, tables: Arc::new(tables), hashes: Vec::new(), n_claimed: 0, quarantined: None }
    }

    /// Takes over the blocks of a hold that comes later in the sequence. Its hashes follow on ours, or it has none.
    pub(crate) fn append(&mut self, later: Self) {
        Arc::make_mut(&mut self.tables).append(&later.tables);
        self.hashes.extend(later.hashes);
        self.n_claimed += later.n_claimed;
    }

    /// The first block that has a hash but is not in the index.
    pub(crate) fn next_claim(&self) -> Option<(usize, BlockHash)> {
        self.hashes.get(self.n_claimed).map(|hash| (self.n_claimed, *hash))
    }

    /// The hash of the block before this one.
    pub(crate) fn parent_of(&self, ordinal: usize) -> Option<BlockHash> {
        ordinal.checked_sub(1).map(|before| self.hashes[before])
    }

    pub(crate) fn is_quarantined(&self) -> bool {
        self.quarantined.is_some()
    }
}

impl fmt::Display for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.quarantined {
            Some(why) => write!(f, "{}: {why}", self.holder),
            None => write!(f, "{}", self.holder),
        }
    }
}
