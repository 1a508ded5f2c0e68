//! The blocks of the node, and the check that none is used again while a process may write it.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kv_cache::{BlockLease, BlockPool, Holder, Holding, KvMemory};
use tokio::time::sleep;
use types::{BlockHash, BlockIdx, RequestId, TransferId};

use super::super::reference::Reference;
use super::super::reports::LandingReports;
use super::super::waits::Waits;
use super::plan::CacheUse;

const TRY_EVERY: Duration = Duration::from_millis(10);

/// The head's memory, and its pool.
#[derive(Debug)]
pub struct NodeMemory {
    pub memory: KvMemory,
    pub pool: BlockPool,
    pub reference: &'static Reference,
    pub waits: Waits,
    pub reports: LandingReports,
    /// The blocks of every landing so far. Never held across an await.
    landed_in: Mutex<Vec<(TransferId, BTreeSet<BlockIdx>)>>,
}

/// Blocks for a landing.
#[derive(Debug)]
pub struct Room {
    pub lease: BlockLease,
    /// The number of blocks at the start that have their KV already.
    pub n_held: usize,
}

impl NodeMemory {
    /// Makes the pool, with at most `blocks_max` of the memory's blocks.
    pub fn new(
        memory: KvMemory,
        blocks_max: u32,
        reference: &'static Reference,
        waits: Waits,
        reports: LandingReports,
    ) -> Self {
        let pool = BlockPool::new(memory.layout(), blocks_max.min(memory.n_blocks()));
        Self { memory, pool, reference, waits, reports, landed_in: Mutex::default() }
    }

    /// Waits for the blocks of a prompt and its answer.
    pub async fn room(&self, transfer: TransferId, prompt: usize, cache: CacheUse) -> Room {
        loop {
            if let Some(room) = self.try_room(prompt, cache) {
                self.check_reuse(transfer, &room);
                return room;
            }
            // Each attempt notifies of the blocks that it gives back, so a notification says nothing.
            sleep(TRY_EVERY).await;
        }
    }

    fn try_room(&self, prompt: usize, cache: CacheUse) -> Option<Room> {
        let n_blocks = self.n_blocks(prompt);
        let hashes = match cache {
            CacheUse::IfThere => self.hashes(prompt),
            CacheUse::Never => Vec::new(),
        };
        let held = self.pool.adopt(&hashes, holder());
        let n_held = held.n_blocks();
        let new = self.pool.reserve(n_blocks + 1 - n_held, holder()).ok()?;
        Some(Room { lease: held.join(new), n_held })
    }

    /// Checks that no process may write the new blocks for an earlier landing.
    fn check_reuse(&self, transfer: TransferId, room: &Room) {
        let groups = self.memory.layout().group_indices();
        let blocks = groups.flat_map(|group| room.lease.table(group)[room.n_held..].iter().copied());
        let blocks: BTreeSet<BlockIdx> = blocks.collect();
        let mut landed_in = self.landed_in();
        for (earlier, of_earlier) in landed_in.iter().filter(|(_, of)| !of.is_disjoint(&blocks)) {
            for (follower, seen) in self.waits.progress.seen().connections.iter().enumerate() {
                let may_write = self.reports.may_write(*earlier, follower);
                if may_write && !seen.is_closed && !seen.must_end {
                    let shared = of_earlier.intersection(&blocks).count();
                    self.waits.log.accuse(format_args!(
                        "{shared} blocks are used again, and follower {follower} may write them for {earlier}"
                    ));
                }
            }
        }
        landed_in.push((transfer, blocks));
    }

    /// Compares the pages of this process's layers with those of one process, and offers the blocks to later sequences.
    pub fn check_arrived(&self, prompt: usize, lease: &BlockLease) {
        let layout = self.memory.layout();
        let mut expected = self.reference.prompts[prompt].pages.iter();
        for group in layout.group_indices() {
            for layer_pos in 0..layout.group(group).layers.len() as u16 {
                let expected = expected.next().expect("a layer has pages");
                if !self.memory.has_layer(group, layer_pos) {
                    continue;
                }
                let page = |block: &BlockIdx| {
                    let page = self.memory.read(group, layer_pos, block.0..block.0 + 1);
                    page.expect("nothing writes what has arrived").to_vec()
                };
                let table = &lease.table(group)[..self.n_blocks(prompt)];
                if table.iter().flat_map(page).ne(expected.iter().copied()) {
                    self.waits.log.accuse(format_args!("prompt {prompt} arrives with other KV"));
                }
            }
        }
        for (ordinal, hash) in self.hashes(prompt).into_iter().enumerate() {
            lease.publish(ordinal, hash);
        }
    }

    /// Waits until nothing holds blocks but the cache.
    pub async fn is_empty(&self) {
        let mut freed = self.pool.freed();
        while self.pool.counts().available() != self.pool.counts().total {
            freed.changed().await.expect("the pool lives");
        }
    }

    pub fn n_blocks(&self, prompt: usize) -> usize {
        self.memory.layout().blocks_for(self.reference.prompts[prompt].tokens.len())
    }

    fn hashes(&self, prompt: usize) -> Vec<BlockHash> {
        (0..self.n_blocks(prompt)).map(|ordinal| BlockHash((prompt * 100 + ordinal + 1) as u128)).collect()
    }

    fn landed_in(&self) -> MutexGuard<'_, Vec<(TransferId, BTreeSet<BlockIdx>)>> {
        self.landed_in.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn holder() -> Holder {
    Holder { what: Holding::Sequence, request: RequestId::new("simulated") }
}
