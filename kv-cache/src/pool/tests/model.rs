//! A model of the pool in the simplest form: sets, scans, and no redundant state.

use std::collections::{BTreeMap, BTreeSet};

use types::{BlockCounts, BlockHash};

use crate::record::BlockState;

/// One lease or quarantine: the block numbers of all groups, place by place, and the hashes published so far.
#[derive(Clone, Debug, Default)]
pub(super) struct ModelHold {
    pub(super) blocks: Vec<Vec<u32>>,
    pub(super) hashes: Vec<BlockHash>,
    pub(super) quarantined: bool,
}

#[derive(Debug)]
pub(super) struct ModelEntry {
    parent: Option<BlockHash>,
    blocks: Vec<u32>,
    last_used: u64,
}

#[derive(Debug, Default)]
pub(super) struct Model {
    n_blocks: u32,
    n_groups: usize,
    clock: u64,
    pub(super) index: BTreeMap<BlockHash, ModelEntry>,
    pub(super) holds: Vec<ModelHold>,
}

impl Model {
    pub(super) fn new(n_blocks: u32, n_groups: usize) -> Self {
        Self { n_blocks, n_groups, ..Self::default() }
    }

    pub(super) fn state(&self, block: u32) -> BlockState {
        let held =
            |quarantined| self.holds.iter().any(|hold| hold.quarantined == quarantined && hold.has(block));
        if held(false) {
            BlockState::Leased
        } else if held(true) {
            BlockState::Quarantined
        } else if self.index.values().any(|entry| entry.blocks.contains(&block)) {
            BlockState::Cached
        } else {
            BlockState::Free
        }
    }

    pub(super) fn counts(&self) -> BlockCounts {
        let count = |state| (0..self.n_blocks).filter(|block| self.state(*block) == state).count() as u32;
        BlockCounts {
            total: self.n_blocks,
            free: count(BlockState::Free),
            leased: count(BlockState::Leased),
            cached: count(BlockState::Cached),
            quarantined: count(BlockState::Quarantined),
        }
    }

    /// Returns the cached prefix, as a hold that is not yet in the state.
    pub(super) fn cached_prefix(&self, hashes: &[BlockHash]) -> ModelHold {
        let found = hashes.iter().map_while(|hash| Some((*hash, self.index.get(hash)?.blocks.clone())));
        let (hashes, blocks) = found.unzip();
        ModelHold { blocks, hashes, quarantined: false }
    }

    /// Makes room as a reservation would. Returns false if there is not enough.
    pub(super) fn make_room(&mut self, n_blocks: usize) -> bool {
        let wanted = (n_blocks * self.n_groups) as u32;
        if wanted > self.counts().available() {
            return false;
        }
        while self.counts().free < wanted {
            let leaf = self.leaves_without_holders().min_by_key(|hash| self.index[hash].last_used);
            self.index.remove(&leaf.expect("every cached block can be evicted"));
        }
        true
    }

    pub(super) fn publish(&mut self, nth: usize, hash: BlockHash) {
        self.holds[nth].hashes.push(hash);
        let hold = self.holds[nth].clone();
        for (ordinal, hash) in hold.hashes.iter().enumerate() {
            match self.index.get(hash) {
                Some(entry) if entry.blocks == hold.blocks[ordinal] => {}
                Some(entry) if self.is_held(entry) => return,
                _ => self.refer_to(&hold, ordinal),
            }
        }
    }

    pub(super) fn quarantine(&mut self, nth: usize) {
        let n_claimed = self.claimed(&self.holds[nth]).count();
        self.holds[nth].hashes.truncate(n_claimed);
        self.holds[nth].quarantined = true;
    }

    pub(super) fn release(&mut self, nth: usize) {
        let hold = self.holds.remove(nth);
        for ordinal in 0..hold.hashes.len() {
            if !self.index.contains_key(&hold.hashes[ordinal]) {
                self.refer_to(&hold, ordinal);
            }
        }
        let claimed: Vec<usize> = self.claimed(&hold).collect();
        for ordinal in claimed {
            self.clock += 1;
            self.index.get_mut(&hold.hashes[ordinal]).expect("it is claimed").last_used = self.clock;
        }
    }

    fn refer_to(&mut self, hold: &ModelHold, ordinal: usize) {
        let parent = ordinal.checked_sub(1).map(|before| hold.hashes[before]);
        let last_used = self.index.get(&hold.hashes[ordinal]).map_or(0, |entry| entry.last_used);
        let entry = ModelEntry { parent, blocks: hold.blocks[ordinal].clone(), last_used };
        self.index.insert(hold.hashes[ordinal], entry);
    }

    /// Returns the places whose blocks the index refers to.
    fn claimed(&self, hold: &ModelHold) -> impl Iterator<Item = usize> {
        let entry = |ordinal: usize| self.index.get(&hold.hashes[ordinal]);
        let is_ours =
            move |ordinal: &usize| entry(*ordinal).is_some_and(|entry| entry.blocks == hold.blocks[*ordinal]);
        (0..hold.hashes.len()).filter(is_ours)
    }

    fn is_held(&self, entry: &ModelEntry) -> bool {
        self.holds.iter().any(|hold| hold.has(entry.blocks[0]))
    }

    fn leaves_without_holders(&self) -> impl Iterator<Item = BlockHash> {
        let parents: BTreeSet<BlockHash> = self.index.values().filter_map(|entry| entry.parent).collect();
        let leaves = self.index.iter().filter(move |(hash, _)| !parents.contains(hash));
        leaves.filter(|(_, entry)| !self.is_held(entry)).map(|(hash, _)| *hash)
    }
}

impl ModelHold {
    fn has(&self, block: u32) -> bool {
        self.blocks.iter().flatten().any(|held| *held == block)
    }
}
