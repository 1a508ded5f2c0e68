//! The digests of blocks for as long as they are kept: what is given out is what was put, days later too.

use std::sync::{Mutex, MutexGuard, PoisonError};

use kv_cache::{BlockLease, KvMemory};
use kv_transfer::digest::{Digest, PageShape};
use types::{BlockHash, GroupIdx};

/// See the module. One entry for each place in the pool, so it is as bounded as the pool.
#[derive(Debug)]
pub struct Kept {
    memory: KvMemory,
    /// By the block's place in the first group. Held for a look-up, never across an await.
    by_place: Mutex<Vec<Option<Entry>>>,
}

#[derive(Clone, Debug)]
struct Entry {
    hash: BlockHash,
    digests: Vec<Digest>,
}

impl Kept {
    pub fn new(memory: KvMemory) -> Self {
        let by_place = Mutex::new(vec![None; memory.n_blocks() as usize]);
        Self { memory, by_place }
    }

    /// Notes what a block of `lease` holds now, which has just been verified.
    pub fn note(&self, lease: &BlockLease, ordinal: usize, hash: BlockHash) {
        let Some(digests) = self.digests(lease, ordinal) else { return };
        let place = lease.table(GroupIdx(0))[ordinal].0 as usize;
        self.by_place()[place] = Some(Entry { hash, digests });
    }

    /// Whether a block of `lease` still holds what was noted.
    pub fn is_whole(&self, lease: &BlockLease, ordinal: usize, hash: BlockHash) -> bool {
        let place = lease.table(GroupIdx(0))[ordinal].0 as usize;
        let noted = self.by_place()[place].clone().filter(|entry| entry.hash == hash);
        noted.is_some_and(|entry| self.digests(lease, ordinal) == Some(entry.digests))
    }

    /// `None` if somebody writes the block, who must not.
    fn digests(&self, lease: &BlockLease, ordinal: usize) -> Option<Vec<Digest>> {
        let layout = self.memory.layout();
        let mut digests = Vec::new();
        for group in layout.group_indices() {
            let place = lease.table(group)[ordinal].0;
            for layer_pos in 0..layout.group(group).layers.len() as u16 {
                let page = self.memory.read(group, layer_pos, place..place + 1).ok()?;
                PageShape::new(layout, group, layer_pos).digest_page(
                    &page,
                    layout.block_tokens,
                    &mut digests,
                );
            }
        }
        Some(digests)
    }

    fn by_place(&self) -> MutexGuard<'_, Vec<Option<Entry>>> {
        self.by_place.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
