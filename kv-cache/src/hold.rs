//! One entry of the pool's state: some blocks, who holds them, and what of them is published.

use std::fmt;
use std::mem;
use std::ops::Range;
use std::sync::Arc;

use types::{BlockHash, BlockIdx, GroupIdx};

use crate::holder::Holder;

/// Names one hold in the state; never used again.
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
    /// Per group, the first block that was not given back yet, if any was.
    pub(crate) n_gone: Vec<usize>,
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

    /// The blocks of all groups, group by group, but for those that were given back.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = BlockIdx> {
        self.by_group.iter().flatten().copied().filter(|block| *block != BlockIdx::GONE)
    }

    /// Takes some of a group's blocks out, those excepted that are gone already.
    fn take(&mut self, group: usize, ordinals: Range<usize>) -> Vec<BlockIdx> {
        let taken = self.by_group[group][ordinals].iter_mut();
        let taken = taken.map(|block| mem::replace(block, BlockIdx::GONE));
        taken.filter(|block| *block != BlockIdx::GONE).collect()
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
        let n_gone = vec![0; tables.by_group.len()];
        let tables = Arc::new(tables);
        Self { holder, tables, hashes: Vec::new(), n_claimed: 0, n_gone, quarantined: None }
    }

    /// Takes out the blocks of a group before block `before`, which nothing looks back at any more.
    ///
    /// Blocks that have a hash stay: the prefix index has those of all groups at one place in the sequence, or none.
    pub(crate) fn take_gone(&mut self, group: usize, before: usize) -> Vec<BlockIdx> {
        let first = self.n_gone[group].max(self.hashes.len());
        if first >= before {
            return Vec::new();
        }
        self.n_gone[group] = before;
        Arc::make_mut(&mut self.tables).take(group, first..before)
    }

    /// Takes out the blocks that have a hash, once every group has left all of them behind, with those hashes of them
    /// that the index knows this hold for.
    pub(crate) fn take_head(&mut self) -> Option<(Vec<BlockIdx>, Vec<BlockHash>)> {
        let n_head = self.hashes.len();
        if n_head == 0 || self.n_gone.iter().any(|n_gone| *n_gone < n_head) {
            return None;
        }
        let tables = Arc::make_mut(&mut self.tables);
        let blocks = (0..self.n_gone.len()).flat_map(|group| tables.take(group, 0..n_head)).collect();
        self.hashes.truncate(self.n_claimed);
        self.n_claimed = 0;
        Some((blocks, mem::take(&mut self.hashes)))
    }

    /// Whether the block at this place could be offered to others: all before it were, and none is gone.
    pub(crate) fn may_publish(&self, ordinal: usize) -> bool {
        ordinal == self.hashes.len() && self.n_gone.iter().all(|n_gone| *n_gone == 0)
    }

    /// Takes over the blocks of a hold that comes later in the sequence. Its hashes follow on ours, or it has none.
    pub(crate) fn append(&mut self, later: Self) {
        debug_assert!(later.n_gone.iter().all(|n_gone| *n_gone == 0), "what comes later is seen for longer");
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
