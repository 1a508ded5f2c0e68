//! Hot path. The prefix index: which nodes have which KV blocks.
//!
//! Nodes' block events fill it (`super::mirror`), and routes add blocks that a node is about to have. Routing reads
//! it without any other lock. The index is divided into shards, each with a lock of its own, that is held for one
//! block, or for one pass over the shard when a node leaves.
//!
//! A block is known by 64 bits of its hash. Block hashes are keyed, so two prompts cannot be made to share them.

mod expected;
mod holders;

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use tokio::time::Instant;
use types::BlockHash;

use expected::ExpectedBlocks;
use holders::Holders;

const N_SHARDS: usize = 1024;

/// The largest number of nodes in the index. The blocks of further nodes are not known.
const NODES_MAX: u16 = 4096;

/// The largest number of blocks per node. Further blocks are left out, because routing by cache is advice.
const BLOCKS_MAX: u64 = 1 << 22;

/// The number of a node in the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Slot(u16);

/// The blocks of all nodes. Cheap to clone; clones share it.
#[derive(Clone, Debug)]
pub struct PrefixIndex {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    cached: Blocks,
    expected: ExpectedBlocks,
    nodes: Box<[NodeState]>,
    free_slots: Mutex<Vec<Slot>>,
}

#[derive(Debug, Default)]
struct NodeState {
    /// Whether the node's cached blocks in the index are right. Otherwise look-ups ignore them.
    is_known: AtomicBool,
    /// Whether blocks of the node are missing in the index.
    is_partial: AtomicBool,
    n_blocks: AtomicU64,
}

/// The completeness of the router's list of a node's cached blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheKnowledge {
    /// All cached blocks.
    Exact,
    /// Some of them: the list is being read, or is too long.
    Approximate,
    /// None: the node has not sent its list, or events were lost.
    Blind,
}

/// One node's place in the index. Dropping it removes the node's blocks.
#[derive(Debug)]
pub struct IndexedNode {
    index: PrefixIndex,
    /// `None` if the index is full of nodes.
    slot: Option<Slot>,
}

/// The number of leading blocks of one prompt that each node has. A node that has none is absent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PrefixMatches(Vec<(Slot, u32)>);

impl CacheKnowledge {
    pub const ALL: [Self; 3] = [Self::Exact, Self::Approximate, Self::Blind];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Approximate => "approximate",
            Self::Blind => "blind",
        }
    }
}

// === impl PrefixIndex ===

impl Default for PrefixIndex {
    fn default() -> Self {
        let shared = Shared {
            cached: Blocks::default(),
            expected: ExpectedBlocks::default(),
            nodes: (0..NODES_MAX).map(|_| NodeState::default()).collect(),
            free_slots: Mutex::new((0..NODES_MAX).rev().map(Slot).collect()),
        };
        Self { shared: Arc::new(shared) }
    }
}

impl PrefixIndex {
    /// Adds a node without blocks. Its cache is unknown until a list begins.
    pub fn node(&self) -> IndexedNode {
        let slot = self.shared.free_slots.lock().unwrap_or_else(PoisonError::into_inner).pop();
        IndexedNode { index: self.clone(), slot }
    }

    /// Returns how many leading blocks of a prompt each node has, or is about to have.
    ///
    /// A node that has a block has the blocks before it, because caches evict the last ones first. So a binary
    /// search finds the number, and nodes with equal numbers share its look-ups. It is a guess while a node's list
    /// is not complete.
    pub fn matches(&self, hashes: &[BlockHash], now: Instant) -> PrefixMatches {
        let Some(first) = hashes.first() else { return PrefixMatches::default() };
        let expected = self.shared.expected.at(now);
        let mut found = Vec::new();
        // Nodes that have block `low` and lack block `high`.
        let mut open = vec![(0, hashes.len(), self.holders(*first, &expected))];
        while let Some((low, high, nodes)) = open.pop() {
            if nodes.is_empty() {
                continue;
            }
            if high - low == 1 {
                found.extend(nodes.into_iter().map(|slot| (slot, high as u32)));
                continue;
            }
            let middle = low + (high - low) / 2;
            let here = self.holders(hashes[middle], &expected);
            let (with, without) = nodes.into_iter().partition(|slot| here.binary_search(slot).is_ok());
            open.push((middle, high, with));
            open.push((low, middle, without));
        }
        found.sort_unstable();
        PrefixMatches(found)
    }

    /// Returns the nodes that have a block, or are about to have it, in order.
    fn holders(&self, hash: BlockHash, expected: &[Option<Arc<Blocks>>; 2]) -> Vec<Slot> {
        let Shared { cached, nodes, .. } = &*self.shared;
        let mut holders = Vec::new();
        cached.read(hash, &mut holders);
        holders.retain(|slot| nodes[usize::from(slot.0)].is_known.load(Ordering::Relaxed));
        let n_known = holders.len();
        expected.iter().flatten().for_each(|blocks| blocks.read(hash, &mut holders));
        if holders.len() > n_known {
            holders.sort_unstable();
            holders.dedup();
        }
        holders
    }

    /// Returns the number of different blocks, for measurements.
    pub fn n_blocks(&self) -> usize {
        self.shared.cached.shards.iter().map(|shard| read(shard).blocks.len()).sum()
    }
}

// === impl IndexedNode ===

impl IndexedNode {
    /// Begins a new list of the node's blocks: forgets the old one.
    pub fn begin(&self) {
        self.forget();
        self.set_partial();
        self.set(|node| node.is_known.store(true, Ordering::Relaxed));
    }

    /// Forgets all blocks: the cache is unknown until the next list begins.
    pub(super) fn forget(&self) {
        let Some(slot) = self.slot else { return };
        self.set(|node| {
            node.is_known.store(false, Ordering::Relaxed);
            node.is_partial.store(false, Ordering::Relaxed);
            if node.n_blocks.swap(0, Ordering::Relaxed) > 0 {
                self.index.shared.cached.remove_all(slot);
            }
        });
    }

    /// Adds blocks to the node's list. Returns false if the list is full, and blocks were left out.
    pub fn store(&self, hashes: &[BlockHash]) -> bool {
        let Some(slot) = self.slot else { return false };
        let (node, cached) = (&self.index.shared.nodes[usize::from(slot.0)], &self.index.shared.cached);
        let room = BLOCKS_MAX.saturating_sub(node.n_blocks.load(Ordering::Relaxed)) as usize;
        let n_added = hashes.iter().take(room).filter(|hash| cached.add(**hash, slot)).count();
        node.n_blocks.fetch_add(n_added as u64, Ordering::Relaxed);
        hashes.len() <= room
    }

    pub fn evict(&self, hashes: &[BlockHash]) {
        let Some(slot) = self.slot else { return };
        let (node, cached) = (&self.index.shared.nodes[usize::from(slot.0)], &self.index.shared.cached);
        let n_removed = hashes.iter().filter(|hash| cached.remove(**hash, slot)).count();
        node.n_blocks.fetch_sub(n_removed as u64, Ordering::Relaxed);
    }

    /// Records that blocks of the node are missing in the index.
    pub fn set_partial(&self) {
        self.set(|node| node.is_partial.store(true, Ordering::Relaxed));
    }

    /// Records that the index has all blocks of the node.
    pub fn set_complete(&self) {
        self.set(|node| node.is_partial.store(false, Ordering::Relaxed));
    }

    /// Adds blocks that the node is about to have, because a prompt was routed to it. They count for a short
    /// time.
    pub(super) fn expect(&self, hashes: &[BlockHash], now: Instant) {
        if let Some(slot) = self.slot {
            self.index.shared.expected.add(hashes, slot, now);
        }
    }

    /// Returns the number of leading blocks that the node has.
    pub fn n_matched(&self, matches: &PrefixMatches) -> u32 {
        let nth = self.slot.and_then(|slot| matches.0.binary_search_by_key(&slot, |(slot, _)| *slot).ok());
        nth.map_or(0, |nth| matches.0[nth].1)
    }

    /// Returns the completeness of the list of the node's cached blocks.
    pub fn knowledge(&self) -> CacheKnowledge {
        let Some(slot) = self.slot else { return CacheKnowledge::Blind };
        let node = &self.index.shared.nodes[usize::from(slot.0)];
        match (node.is_known.load(Ordering::Relaxed), node.is_partial.load(Ordering::Relaxed)) {
            (false, _) => CacheKnowledge::Blind,
            (true, true) => CacheKnowledge::Approximate,
            (true, false) => CacheKnowledge::Exact,
        }
    }

    /// Returns the number of the node's cached blocks; `None` while they are not known.
    pub fn n_cached(&self) -> Option<u64> {
        let slot = self.slot.filter(|_| self.knowledge() != CacheKnowledge::Blind)?;
        Some(self.index.shared.nodes[usize::from(slot.0)].n_blocks.load(Ordering::Relaxed))
    }

    /// Returns whether exactly these blocks are known to be cached. For tests.
    pub fn has_exactly(&self, hashes: &[BlockHash]) -> bool {
        let has = |hash: &BlockHash| {
            let mut holders = Vec::new();
            self.index.shared.cached.read(*hash, &mut holders);
            self.slot.is_some_and(|slot| holders.contains(&slot))
        };
        let is_exact = self.knowledge() == CacheKnowledge::Exact;
        is_exact && self.n_cached() == Some(hashes.len() as u64) && hashes.iter().all(has)
    }

    fn set(&self, change: impl FnOnce(&NodeState)) {
        if let Some(slot) = self.slot {
            change(&self.index.shared.nodes[usize::from(slot.0)]);
        }
    }
}

impl Drop for IndexedNode {
    fn drop(&mut self) {
        self.forget();
        if let Some(slot) = self.slot {
            self.index.shared.expected.remove_all(slot);
            self.index.shared.free_slots.lock().unwrap_or_else(PoisonError::into_inner).push(slot);
        }
    }
}

// === blocks ===

/// A map from blocks to the nodes that have them, in shards.
#[derive(Debug)]
struct Blocks {
    shards: Box<[RwLock<Shard>]>,
}

#[derive(Debug, Default)]
struct Shard {
    blocks: HashMap<u64, Holders, BuildHasherDefault<KeyItself>>,
}

/// A hasher for keys that are hashes already.
#[derive(Clone, Copy, Debug, Default)]
struct KeyItself(u64);

impl Hasher for KeyItself {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.0 = self.0.rotate_left(8) ^ u64::from(*byte));
    }

    fn write_u64(&mut self, key: u64) {
        self.0 = key;
    }
}

impl Default for Blocks {
    fn default() -> Self {
        Self { shards: (0..N_SHARDS).map(|_| RwLock::default()).collect() }
    }
}

impl Blocks {
    fn add(&self, hash: BlockHash, slot: Slot) -> bool {
        let mut shard = write(self.shard(hash));
        shard.blocks.entry(key(hash)).or_default().add(slot)
    }

    fn remove(&self, hash: BlockHash, slot: Slot) -> bool {
        let mut shard = write(self.shard(hash));
        let Some(holders) = shard.blocks.get_mut(&key(hash)) else { return false };
        let is_removed = holders.remove(slot);
        if holders.as_slice().is_empty() {
            shard.blocks.remove(&key(hash));
        }
        is_removed
    }

    /// Removes a node from all blocks, one shard after the other.
    fn remove_all(&self, slot: Slot) {
        for shard in &self.shards {
            let mut shard = write(shard);
            shard.blocks.retain(|_, holders| {
                holders.remove(slot);
                !holders.as_slice().is_empty()
            });
            if shard.blocks.len() < shard.blocks.capacity() / 4 {
                shard.blocks.shrink_to_fit();
            }
        }
    }

    /// Appends the nodes that have a block, in order.
    fn read(&self, hash: BlockHash, into: &mut Vec<Slot>) {
        let shard = read(self.shard(hash));
        into.extend_from_slice(shard.blocks.get(&key(hash)).map(Holders::as_slice).unwrap_or_default());
    }

    fn shard(&self, hash: BlockHash) -> &RwLock<Shard> {
        &self.shards[(hash.0 >> 64) as usize % N_SHARDS]
    }
}

fn key(hash: BlockHash) -> u64 {
    hash.0 as u64
}

fn read(shard: &RwLock<Shard>) -> RwLockReadGuard<'_, Shard> {
    shard.read().unwrap_or_else(PoisonError::into_inner)
}

fn write(shard: &RwLock<Shard>) -> RwLockWriteGuard<'_, Shard> {
    shard.write().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
