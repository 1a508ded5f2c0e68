//! The prefix index: a tree of published blocks. A block's parent is the block before it in the sequence.
//!
//! Hashes are chained, so a hash identifies a whole prefix and a tenant. One map from hash to entry holds the tree,
//! and the edges matter only for eviction. Only leaves without readers are evicted, so a prefix is never cut in two.

use std::collections::{BTreeMap, HashMap};

use types::{BlockHash, BlockIdx};

#[derive(Debug, Default)]
pub(crate) struct PrefixIndex {
    entries: HashMap<BlockHash, Entry>,
    /// Leaves without readers, the least recently used first.
    evictable: BTreeMap<u64, BlockHash>,
    /// The number of the last use. Every use has a unique number.
    clock: u64,
}

/// One place of a sequence: the blocks that hold its KV, one per layer group.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) parent: Option<BlockHash>,
    pub(crate) blocks: Box<[BlockIdx]>,
    /// The number of leases and quarantines that hold these blocks.
    pub(crate) readers: u32,
    n_children: u32,
    /// The number of the last use that ended; zero before the first one.
    last_used: u64,
}

impl Entry {
    fn is_evictable(&self) -> bool {
        self.readers == 0 && self.n_children == 0
    }
}

impl PrefixIndex {
    pub(crate) fn get(&self, hash: BlockHash) -> Option<&Entry> {
        self.entries.get(&hash)
    }

    /// Returns the number of leading hashes that the index knows.
    pub(crate) fn longest(&self, hashes: &[BlockHash]) -> usize {
        hashes.iter().take_while(|hash| self.entries.contains_key(hash)).count()
    }

    /// Adds an entry with one reader, below its parent.
    ///
    /// # Panics
    /// If the hash is known already, or the parent is not.
    pub(crate) fn insert(&mut self, hash: BlockHash, parent: Option<BlockHash>, blocks: Box<[BlockIdx]>) {
        if let Some(parent) = parent {
            let entry = self.entries.get_mut(&parent).expect("a parent is published before its child");
            entry.n_children += 1;
            self.evictable.remove(&entry.last_used);
        }
        let entry = Entry { parent, blocks, readers: 1, n_children: 0, last_used: 0 };
        assert!(self.entries.insert(hash, entry).is_none(), "a hash is inserted once");
    }

    /// Adds a reader to the entry.
    pub(crate) fn pin(&mut self, hash: BlockHash) {
        let entry = self.entry(hash);
        entry.readers += 1;
        let last_used = entry.last_used;
        self.evictable.remove(&last_used);
    }

    /// Removes a reader from the entry, and counts this as a use.
    pub(crate) fn unpin(&mut self, hash: BlockHash) {
        self.clock += 1;
        let now = self.clock;
        let entry = self.entry(hash);
        entry.readers -= 1;
        entry.last_used = now;
        self.mark_if_evictable(hash);
    }

    /// Replaces the blocks of an entry without readers by others with the same KV, and adds one reader.
    /// Returns the old blocks.
    pub(crate) fn replace(&mut self, hash: BlockHash, blocks: Box<[BlockIdx]>) -> Box<[BlockIdx]> {
        self.pin(hash);
        std::mem::replace(&mut self.entry(hash).blocks, blocks)
    }

    /// Removes the least recently used leaf, and returns its blocks.
    pub(crate) fn evict(&mut self) -> Option<(BlockHash, Box<[BlockIdx]>)> {
        let (_, hash) = self.evictable.pop_first()?;
        let entry = self.entries.remove(&hash).expect("an evictable hash has an entry");
        if let Some(parent) = entry.parent {
            self.entry(parent).n_children -= 1;
            self.mark_if_evictable(parent);
        }
        Some((hash, entry.blocks))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (BlockHash, &Entry)> {
        self.entries.iter().map(|(hash, entry)| (*hash, entry))
    }

    /// Returns an entry whose place in the tree or in the eviction order is wrong, with the error.
    pub(crate) fn fault(&self) -> Option<(BlockHash, &'static str)> {
        let mut n_children: HashMap<BlockHash, u32> = HashMap::new();
        for (hash, entry) in &self.entries {
            let Some(parent) = entry.parent else { continue };
            let Some(above) = self.entries.get(&parent) else {
                return Some((*hash, "its parent is unknown"));
            };
            if entry.readers > above.readers {
                return Some((*hash, "it has more readers than its parent"));
            }
            *n_children.entry(parent).or_default() += 1;
        }
        self.entries.iter().find_map(|(hash, entry)| {
            let counted = n_children.get(hash).copied().unwrap_or(0);
            self.entry_fault(*hash, entry, counted).map(|what| (*hash, what))
        })
    }

    fn entry_fault(&self, hash: BlockHash, entry: &Entry, n_children: u32) -> Option<&'static str> {
        if entry.n_children != n_children {
            return Some("its number of children is wrong");
        }
        let marked = self.evictable.get(&entry.last_used) == Some(&hash);
        (marked != entry.is_evictable()).then_some("its place in the eviction order is wrong")
    }

    fn mark_if_evictable(&mut self, hash: BlockHash) {
        let entry = &self.entries[&hash];
        if entry.is_evictable() {
            self.evictable.insert(entry.last_used, hash);
        }
    }

    fn entry(&mut self, hash: BlockHash) -> &mut Entry {
        self.entries.get_mut(&hash).expect("the pool only asks for hashes that it has inserted")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(number: u128) -> BlockHash {
        BlockHash(number)
    }

    /// Inserts a chain of blocks without readers. The last one is the least recently used.
    fn chain(index: &mut PrefixIndex, hashes: &[u128]) {
        let mut parent = None;
        for number in hashes {
            if index.get(hash(*number)).is_none() {
                index.insert(hash(*number), parent, Box::new([BlockIdx(*number as u32)]));
            } else {
                index.pin(hash(*number));
            }
            parent = Some(hash(*number));
        }
        for number in hashes.iter().rev() {
            index.unpin(hash(*number));
        }
        assert_eq!(index.fault(), None);
    }

    fn evict_all(index: &mut PrefixIndex) -> Vec<u128> {
        std::iter::from_fn(|| index.evict()).map(|(hash, _)| hash.0).collect()
    }

    #[test]
    fn leaves_go_first_and_the_longest_unused_of_them() {
        let mut index = PrefixIndex::default();
        chain(&mut index, &[1, 2, 3]);
        chain(&mut index, &[7]);
        chain(&mut index, &[1, 2, 4]);
        assert_eq!(evict_all(&mut index), [3, 7, 4, 2, 1]);
        assert_eq!(index.iter().count(), 0);
    }

    #[test]
    fn what_is_read_stays_with_all_before_it() {
        let mut index = PrefixIndex::default();
        chain(&mut index, &[1, 2, 3]);
        index.pin(hash(1));
        index.pin(hash(2));
        assert_eq!(evict_all(&mut index), [3]);
        index.unpin(hash(2));
        assert_eq!(evict_all(&mut index), [2]);
        index.unpin(hash(1));
        assert_eq!(evict_all(&mut index), [1]);
    }

    #[test]
    fn a_prefix_is_found_up_to_the_first_unknown_hash() {
        let mut index = PrefixIndex::default();
        chain(&mut index, &[1, 2, 3]);
        for (asked, found) in [(vec![1, 2, 3, 4], 3), (vec![1, 9, 3], 1), (vec![9], 0), (vec![], 0)] {
            let asked: Vec<BlockHash> = asked.into_iter().map(hash).collect();
            assert_eq!(index.longest(&asked), found, "{asked:?}");
        }
    }
}
