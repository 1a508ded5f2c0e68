//! The digests of blocks for as long as they are kept: what is given out is what was put, days later too.

use std::sync::{Mutex, MutexGuard, PoisonError};

use kv_cache::{BlockLease, KvMemory};
use kv_transfer::digest::{Digest, PageShape};
use types::GroupIdx;

/// See the module. One entry for each place in the pool, so it is as bounded as the pool.
///
/// A place is noted anew whenever other KV has arrived in it, before anybody can find that KV: an entry is about what
/// the place holds now, or nobody asks for it.
#[derive(Debug)]
pub struct Kept {
    memory: KvMemory,
    /// By the block's place in the first group. Held for a look-up, never across an await.
    by_place: Mutex<Vec<Option<Entry>>>,
}

#[derive(Clone, Debug)]
struct Entry {
    /// The block's tokens that count: all of them, but for the last block of a sequence.
    n_tokens: u16,
    digests: Vec<Digest>,
    /// It was found to be something else than was put.
    is_spoilt: bool,
}

impl Kept {
    pub fn new(memory: KvMemory) -> Self {
        let by_place = Mutex::new(vec![None; memory.n_blocks() as usize]);
        Self { memory, by_place }
    }

    /// Notes what the first tokens of a block of `lease` are now, which has just been verified.
    pub fn note(&self, lease: &BlockLease, ordinal: usize, n_tokens: u16) {
        let Some(digests) = self.digests(lease, ordinal, n_tokens) else { return };
        self.by_place()[place(lease, ordinal)] = Some(Entry { n_tokens, digests, is_spoilt: false });
    }

    /// Whether a block of `lease` still holds what was noted. One that does not is not [`sound`](Self::n_sound) from
    /// then on.
    pub fn is_whole(&self, lease: &BlockLease, ordinal: usize) -> bool {
        let place = place(lease, ordinal);
        let Some(noted) = self.by_place()[place].clone() else { return false };
        let is_whole =
            !noted.is_spoilt && self.digests(lease, ordinal, noted.n_tokens) == Some(noted.digests);
        if !is_whole && let Some(entry) = &mut self.by_place()[place] {
            entry.is_spoilt = true;
        }
        is_whole
    }

    /// How many blocks of `lease`, from the first one on, are not known to be spoilt. Nothing is read.
    pub fn n_sound(&self, lease: &BlockLease) -> usize {
        let by_place = self.by_place();
        let is_sound =
            |ordinal: &usize| by_place[place(lease, *ordinal)].as_ref().is_some_and(|entry| !entry.is_spoilt);
        (0..lease.n_blocks()).take_while(is_sound).count()
    }

    /// `None` if somebody writes the block, who must not.
    fn digests(&self, lease: &BlockLease, ordinal: usize, n_tokens: u16) -> Option<Vec<Digest>> {
        let layout = self.memory.layout();
        let mut digests = Vec::new();
        for group in layout.group_indices() {
            let place = lease.table(group)[ordinal].0;
            for layer_pos in 0..layout.group(group).layers.len() as u16 {
                let page = self.memory.read(group, layer_pos, place..place + 1).ok()?;
                PageShape::new(layout, group, layer_pos).digest_page(&page, n_tokens, &mut digests);
            }
        }
        Some(digests)
    }

    fn by_place(&self) -> MutexGuard<'_, Vec<Option<Entry>>> {
        self.by_place.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn place(lease: &BlockLease, ordinal: usize) -> usize {
    lease.table(GroupIdx(0))[ordinal].0 as usize
}
