//! The digests of stored blocks. Each block is verified against them before it is delivered.

use std::sync::{Mutex, MutexGuard, PoisonError};

use kv_cache::{BlockLease, KvMemory};
use kv_transfer::digest::{Digest, PageShape};
use types::GroupIdx;

/// The digests of a pool's blocks, one entry for each block.
///
/// An entry is written when new KV has arrived in its block, before the KV is published. So an entry always describes
/// the block's current contents.
#[derive(Debug)]
pub struct BlockDigests {
    memory: KvMemory,
    /// The entries by the block's index in the first group. The mutex is held for one look-up, never across
    /// an await.
    by_index: Mutex<Vec<Option<BlockEntry>>>,
}

#[derive(Clone, Debug)]
struct BlockEntry {
    /// The number of tokens in the block. Only the last block of a sequence can be partly filled.
    n_tokens: u16,
    digests: Vec<Digest>,
    /// Whether the block was found to differ from the KV that was stored.
    is_spoilt: bool,
}

impl BlockDigests {
    pub fn new(memory: KvMemory) -> Self {
        let by_index = Mutex::new(vec![None; memory.n_blocks() as usize]);
        Self { memory, by_index }
    }

    /// Records the digests of a block of `lease` with `n_tokens` tokens. The connector has just verified the
    /// block.
    pub fn note(&self, lease: &BlockLease, ordinal: usize, n_tokens: u16) {
        let Some(digests) = self.digests(lease, ordinal, n_tokens) else { return };
        self.by_index()[index(lease, ordinal)] = Some(BlockEntry { n_tokens, digests, is_spoilt: false });
    }

    /// Returns whether a block of `lease` still matches its digests. A block that does not match is marked
    /// corrupt.
    pub fn is_whole(&self, lease: &BlockLease, ordinal: usize) -> bool {
        let index = index(lease, ordinal);
        let Some(noted) = self.by_index()[index].clone() else { return false };
        let is_whole =
            !noted.is_spoilt && self.digests(lease, ordinal, noted.n_tokens) == Some(noted.digests);
        if !is_whole && let Some(entry) = &mut self.by_index()[index] {
            entry.is_spoilt = true;
        }
        is_whole
    }

    /// Returns the number of leading blocks of `lease` that are not marked corrupt. It reads no KV.
    pub fn n_sound(&self, lease: &BlockLease) -> usize {
        let by_index = self.by_index();
        let is_sound =
            |ordinal: &usize| by_index[index(lease, *ordinal)].as_ref().is_some_and(|entry| !entry.is_spoilt);
        (0..lease.n_blocks()).take_while(is_sound).count()
    }

    /// Computes a block's digests. Returns `None` if the block is being written, which callers exclude.
    fn digests(&self, lease: &BlockLease, ordinal: usize, n_tokens: u16) -> Option<Vec<Digest>> {
        let layout = self.memory.layout();
        let mut digests = Vec::new();
        for group in layout.group_indices() {
            let block = lease.table(group)[ordinal].0;
            for layer_pos in 0..layout.group(group).layers.len() as u16 {
                let page = self.memory.read(group, layer_pos, block..block + 1).ok()?;
                PageShape::new(layout, group, layer_pos).digest_page(&page, n_tokens, &mut digests);
            }
        }
        Some(digests)
    }

    fn by_index(&self) -> MutexGuard<'_, Vec<Option<BlockEntry>>> {
        self.by_index.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn index(lease: &BlockLease, ordinal: usize) -> usize {
    lease.table(GroupIdx(0))[ordinal].0 as usize
}
