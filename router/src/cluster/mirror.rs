//! A mirror of one node's prefix cache in the index, built from its block events.

use std::sync::Arc;

use types::{BlockChange, BlockEvent};

use super::index::IndexedNode;

/// A mirror of one node's prefix cache. The task that reads the node's status stream owns it. After lost events
/// the index does not know the cache.
#[derive(Debug)]
pub(super) struct CacheMirror {
    node: Arc<IndexedNode>,
    /// The number of the last event; `None` before the first snapshot, and after a gap.
    seen: Option<u64>,
    /// Whether blocks did not fit into the index.
    is_cut: bool,
}

/// The error of a block event that does not follow the previous one: events were lost, repeated or reordered,
/// or the node restarted its count. A snapshot repairs the mirror.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("block event {found} instead of {expected:?}")]
pub struct Gap {
    pub expected: Option<u64>,
    pub found: u64,
}

impl CacheMirror {
    pub(super) fn new(node: Arc<IndexedNode>) -> Self {
        Self { node, seen: None, is_cut: false }
    }

    /// Applies an event. After a gap, the cached blocks are unknown until the next snapshot.
    pub(super) fn apply(&mut self, number: u64, event: &BlockEvent) -> Result<(), Gap> {
        let expected = self.seen.map(|seen| seen + 1);
        if !matches!(event.change, BlockChange::Snapshot(_)) && expected != Some(number) {
            self.forget();
            return Err(Gap { expected, found: number });
        }
        match &event.change {
            BlockChange::Snapshot(hashes) => {
                self.node.begin();
                self.is_cut = !self.node.store(hashes);
            }
            BlockChange::Stored(hashes) => self.is_cut |= !self.node.store(hashes),
            BlockChange::Evicted(hashes) => self.node.evict(hashes),
        }
        match self.is_cut || !event.is_complete {
            true => self.node.set_partial(),
            false => self.node.set_complete(),
        }
        self.seen = Some(number);
        Ok(())
    }

    pub(super) fn forget(&mut self) {
        self.seen = None;
        self.node.forget();
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;
    use types::BlockHash;

    use super::*;
    use crate::cluster::index::{CacheKnowledge, PrefixIndex};

    fn hash(of: u8) -> BlockHash {
        BlockHash(of.into())
    }

    fn hashes(of: &[u8]) -> Vec<BlockHash> {
        of.iter().map(|of| hash(*of)).collect()
    }

    fn mirror() -> CacheMirror {
        CacheMirror::new(Arc::new(PrefixIndex::default().node()))
    }

    impl CacheMirror {
        fn tell(&mut self, number: u64, change: BlockChange) -> Result<(), Gap> {
            self.apply(number, &BlockEvent::complete(change))
        }
    }

    #[test]
    fn events_that_do_not_follow_are_a_gap_until_the_next_snapshot() {
        use BlockChange::{Evicted, Snapshot, Stored};
        let begun = || {
            let mut mirror = mirror();
            mirror.tell(7, Snapshot(hashes(&[1, 2]))).expect("a snapshot is a beginning");
            mirror.tell(8, Stored(hashes(&[3]))).expect("it follows");
            mirror
        };
        for (what, number) in [("lost", 10), ("doubled", 8), ("late", 6), ("counted anew", 0)] {
            for event in [Stored(hashes(&[4])), Evicted(hashes(&[1]))] {
                let mut mirror = begun();
                let gap = mirror.tell(number, event.clone()).expect_err(what);
                assert_eq!(gap, Gap { expected: Some(9), found: number });
                assert_eq!(mirror.node.knowledge(), CacheKnowledge::Blind, "{what}");
                mirror.tell(9, event).expect_err("nothing follows a gap");
                mirror.tell(3, Snapshot(hashes(&[5]))).expect("a snapshot is a beginning");
                assert!(mirror.node.has_exactly(&hashes(&[5])), "{what}");
            }
        }
        mirror().tell(1, Stored(hashes(&[1]))).expect_err("before the first snapshot");
    }

    #[test]
    fn a_snapshot_in_parts_is_approximate_until_it_is_complete() {
        let mut mirror = mirror();
        assert_eq!((mirror.node.knowledge(), mirror.node.n_cached()), (CacheKnowledge::Blind, None));
        let part = |change, is_complete| BlockEvent { change, is_complete };
        mirror.apply(1, &part(BlockChange::Snapshot(hashes(&[1])), false)).expect("a beginning");
        assert_eq!((mirror.node.knowledge(), mirror.node.n_cached()), (CacheKnowledge::Approximate, Some(1)));
        mirror.apply(2, &part(BlockChange::Stored(hashes(&[2])), true)).expect("it follows");
        assert!(mirror.node.has_exactly(&hashes(&[1, 2])));
    }

    proptest! {
        /// Loses, repeats and swaps events at random. The hashes that the mirror reports must still be
        /// correct.
        #[test]
        fn a_mirror_is_right_or_says_that_it_is_not(
            changes in prop::collection::vec((0_u8..8, any::<bool>()), 1..40),
            mishaps in prop::collection::vec((0_usize..40, 0_u8..4), 0..6),
        ) {
            let mut truth = BTreeSet::new();
            let mut told = vec![(0, BlockChange::Snapshot(vec![]), truth.clone())];
            for (nth, (of, is_stored)) in changes.into_iter().enumerate() {
                let change = if is_stored {
                    truth.insert(hash(of));
                    BlockChange::Stored(hashes(&[of]))
                } else {
                    truth.remove(&hash(of));
                    BlockChange::Evicted(hashes(&[of]))
                };
                told.push((nth as u64 + 1, change, truth.clone()));
            }
            for (at, mishap) in mishaps {
                let at = at % told.len();
                match mishap {
                    0 => drop(told.remove(at)),
                    1 => told.insert(at, told[at].clone()),
                    2 => { let last = told.len() - 1; told.swap(at, last) }
                    _ => told[at].1 = BlockChange::Snapshot(told[at].2.iter().copied().collect()),
                }
                if told.is_empty() { break; }
            }
            let mut mirror = mirror();
            for (number, change, truth) in told {
                let _ = mirror.tell(number, change);
                let truth: Vec<BlockHash> = truth.into_iter().collect();
                let is_silent = mirror.node.knowledge() == CacheKnowledge::Blind;
                prop_assert!(is_silent || mirror.node.has_exactly(&truth));
            }
        }
    }
}
