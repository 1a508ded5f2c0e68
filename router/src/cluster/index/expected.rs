//! Blocks that nodes are about to have, because prompts were routed to them.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use tokio::time::Instant;
use types::BlockHash;

use super::{Blocks, Slot};

/// The time for which blocks are expected at least; twice this time at most. By then the node has computed the
/// prompt and reported its blocks, or has failed.
const EXPECTED_FOR: Duration = Duration::from_secs(10);

/// The largest number of additions per generation. A full generation ends early.
const ADDITIONS_MAX: usize = 1 << 20;

/// Two generations of blocks: additions go to the newer one, and the older one is dropped as a whole.
#[derive(Debug, Default)]
pub(super) struct ExpectedBlocks {
    generations: RwLock<[Option<Generation>; 2]>,
}

#[derive(Clone, Debug)]
struct Generation {
    began: Instant,
    n_added: usize,
    blocks: Arc<Blocks>,
}

impl ExpectedBlocks {
    pub(super) fn add(&self, hashes: &[BlockHash], slot: Slot, now: Instant) {
        let blocks = self.newest(hashes.len(), now);
        for hash in hashes {
            blocks.add(*hash, slot);
        }
    }

    /// Returns the generations that count at `now`.
    pub(super) fn at(&self, now: Instant) -> [Option<Arc<Blocks>>; 2] {
        let generations = self.generations.read().unwrap_or_else(PoisonError::into_inner);
        let counts = |it: &&Generation| now < it.began + 2 * EXPECTED_FOR;
        [0, 1].map(|nth| generations[nth].as_ref().filter(counts).map(|it| Arc::clone(&it.blocks)))
    }

    /// Removes a node's blocks, because its number may become another node's.
    pub(super) fn remove_all(&self, slot: Slot) {
        let generations = self.generations.read().unwrap_or_else(PoisonError::into_inner).clone();
        generations.iter().flatten().for_each(|generation| generation.blocks.remove_all(slot));
    }

    /// Returns the newer generation, with room for `n_added` additions. Begins one if the last has ended.
    fn newest(&self, n_added: usize, now: Instant) -> Arc<Blocks> {
        let mut generations = self.generations.write().unwrap_or_else(PoisonError::into_inner);
        let has_room = |it: &Generation| now < it.began + EXPECTED_FOR && it.n_added < ADDITIONS_MAX;
        if !generations[0].as_ref().is_some_and(has_room) {
            generations[1] = generations[0].take();
        }
        let fresh = || Generation { began: now, n_added: 0, blocks: Arc::default() };
        let generation = generations[0].get_or_insert_with(fresh);
        generation.n_added += n_added;
        Arc::clone(&generation.blocks)
    }
}
