//! One hold: some blocks, their holder, and the published part of them.

use std::fmt;
use std::mem;
use std::ops::Range;
use std::sync::Arc;

use types::{BlockHash, BlockIdx, GroupIdx};

use crate::holder::Holder;

/// The id of one hold; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct HoldId(pub(crate) u64);

/// A hold's blocks: one table per layer group, all of the same length.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tables {
    by_group: Vec<Vec<BlockIdx>>,
    n_blocks: usize,
}

/// The blocks of one lease or one quarantine.
#[derive(Debug)]
pub(crate) struct Hold {
    pub(crate) holder: Holder,
    pub(crate) tables: Arc<Tables>,
    /// The hashes of the adopted or published blocks, from the first block on.
    pub(crate) hashes: Vec<BlockHash>,
    /// The number of leading blocks that the index refers to. Later blocks with a hash are duplicates of blocks that
    /// another hold published first, or follow such a duplicate.
    pub(crate) n_claimed: usize,
    /// For each group, the number of blocks at the start that are given back.
    pub(crate) n_gone: Vec<usize>,
    /// The reason for the quarantine; `None` for a lease.
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

    /// Returns the first group's table, which stands for those of all groups; empty for a model without
    /// attention.
    pub(crate) fn first(&self) -> &[BlockIdx] {
        self.by_group.first().map_or(&[], Vec::as_slice)
    }

    /// Returns the blocks of all groups at one place in the sequence.
    pub(crate) fn at(&self, ordinal: usize) -> Box<[BlockIdx]> {
        self.by_group.iter().map(|table| table[ordinal]).collect()
    }

    pub(crate) fn n_blocks(&self) -> usize {
        self.n_blocks
    }

    /// Returns the blocks of all groups, group by group, without those that are given back.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = BlockIdx> {
        self.by_group.iter().flatten().copied().filter(|block| *block != BlockIdx::GONE)
    }

    /// Removes some of a group's blocks and returns them, except those that are already given back.
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

    /// Removes a group's blocks before block `before` and returns them. No step reads them any more.
    ///
    /// Blocks with a hash stay, because the prefix index has the blocks of all groups at one place in the sequence,
    /// or none.
    pub(crate) fn take_gone(&mut self, group: usize, before: usize) -> Vec<BlockIdx> {
        let first = self.n_gone[group].max(self.hashes.len());
        if first >= before {
            return Vec::new();
        }
        self.n_gone[group] = before;
        Arc::make_mut(&mut self.tables).take(group, first..before)
    }

    /// Removes the blocks that have a hash, once no group needs any of them. Returns them with the hashes that the
    /// index claims for this hold.
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

    /// Returns whether the block at this place may be published: all earlier ones are published, and none is
    /// given back.
    pub(crate) fn may_publish(&self, ordinal: usize) -> bool {
        ordinal == self.hashes.len() && self.n_gone.iter().all(|n_gone| *n_gone == 0)
    }

    /// Appends the blocks of a hold that comes later in the sequence. The later hold's hashes follow this
    /// hold's, or it has none.
    pub(crate) fn append(&mut self, later: Self) {
        debug_assert!(
            later.n_gone.iter().all(|n_gone| *n_gone == 0),
            "no block of the later hold is given back yet"
        );
        Arc::make_mut(&mut self.tables).append(&later.tables);
        self.hashes.extend(later.hashes);
        self.n_claimed += later.n_claimed;
    }

    /// Returns the first block that has a hash but is not in the index.
    pub(crate) fn next_claim(&self) -> Option<(usize, BlockHash)> {
        self.hashes.get(self.n_claimed).map(|hash| (self.n_claimed, *hash))
    }

    /// Returns the hash of the block before block `ordinal`; `None` for the first block.
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
