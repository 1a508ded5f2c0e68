//! A mirror of one node's prefix cache, built from its block events.

use std::collections::HashSet;

use types::{BlockEvent, BlockHash};

/// The largest number of hashes per node. Further cached blocks are ignored, because routing by cache is advice.
const HASHES_MAX: usize = 1 << 22;

/// A mirror of one node's prefix cache. After lost events it reports that it does not know the cache.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CachedBlocks {
    /// The number of the last event; `None` before the first snapshot, and after a gap.
    seen: Option<u64>,
    hashes: HashSet<BlockHash>,
}

/// The error of a block event that does not follow the previous one: events were lost, repeated or reordered,
/// or the node restarted its count. A snapshot repairs the mirror.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("block event {found} instead of {expected:?}")]
pub struct Gap {
    pub expected: Option<u64>,
    pub found: u64,
}

impl CachedBlocks {
    /// Applies an event. After a gap, the cached blocks are unknown until the next snapshot.
    pub fn apply(&mut self, number: u64, event: BlockEvent) -> Result<(), Gap> {
        let expected = self.seen.map(|seen| seen + 1);
        if !matches!(event, BlockEvent::Snapshot(_)) && expected != Some(number) {
            self.forget();
            return Err(Gap { expected, found: number });
        }
        match event {
            BlockEvent::Snapshot(hashes) => self.hashes = hashes.into_iter().take(HASHES_MAX).collect(),
            BlockEvent::Stored(hashes) => {
                let room = HASHES_MAX - self.hashes.len();
                self.hashes.extend(hashes.into_iter().take(room));
            }
            BlockEvent::Evicted(hashes) => {
                for hash in &hashes {
                    self.hashes.remove(hash);
                }
            }
        }
        self.seen = Some(number);
        Ok(())
    }

    pub fn forget(&mut self) {
        *self = Self::default();
    }

    /// Returns all cached hashes; `None` while they are not known.
    pub fn hashes(&self) -> Option<&HashSet<BlockHash>> {
        self.seen.map(|_| &self.hashes)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn hash(of: u8) -> BlockHash {
        BlockHash(of.into())
    }

    fn hashes(of: &[u8]) -> Vec<BlockHash> {
        of.iter().map(|of| hash(*of)).collect()
    }

    #[test]
    fn events_that_do_not_follow_are_a_gap_until_the_next_snapshot() {
        use BlockEvent::{Evicted, Snapshot, Stored};
        let begun = || {
            let mut cached = CachedBlocks::default();
            cached.apply(7, Snapshot(hashes(&[1, 2]))).expect("a snapshot is a beginning");
            cached.apply(8, Stored(hashes(&[3]))).expect("it follows");
            cached
        };
        for (what, number) in [("lost", 10), ("doubled", 8), ("late", 6), ("counted anew", 0)] {
            for event in [Stored(hashes(&[4])), Evicted(hashes(&[1]))] {
                let mut cached = begun();
                let gap = cached.apply(number, event.clone()).expect_err(what);
                assert_eq!(gap, Gap { expected: Some(9), found: number });
                assert_eq!(cached.hashes(), None, "{what}");
                cached.apply(9, event).expect_err("nothing follows a gap");
                cached.apply(3, Snapshot(hashes(&[5]))).expect("a snapshot is a beginning");
                assert_eq!(cached.hashes(), Some(&HashSet::from([hash(5)])));
            }
        }
        CachedBlocks::default().apply(1, Stored(hashes(&[1]))).expect_err("before the first snapshot");
    }

    proptest! {
        /// Loses, repeats and swaps events at random. The hashes that the mirror reports must still be
        /// correct.
        #[test]
        fn a_mirror_is_right_or_says_that_it_is_not(
            changes in prop::collection::vec((0_u8..8, any::<bool>()), 1..40),
            mishaps in prop::collection::vec((0_usize..40, 0_u8..4), 0..6),
        ) {
            let mut truth = HashSet::new();
            let mut told = vec![(0, BlockEvent::Snapshot(vec![]), truth.clone())];
            for (nth, (of, is_stored)) in changes.into_iter().enumerate() {
                let event = if is_stored {
                    truth.insert(hash(of));
                    BlockEvent::Stored(hashes(&[of]))
                } else {
                    truth.remove(&hash(of));
                    BlockEvent::Evicted(hashes(&[of]))
                };
                told.push((nth as u64 + 1, event, truth.clone()));
            }
            for (at, mishap) in mishaps {
                let at = at % told.len();
                match mishap {
                    0 => drop(told.remove(at)),
                    1 => told.insert(at, told[at].clone()),
                    2 => { let last = told.len() - 1; told.swap(at, last) }
                    _ => told[at].1 = BlockEvent::Snapshot(told[at].2.iter().copied().collect()),
                }
                if told.is_empty() { break; }
            }
            let mut cached = CachedBlocks::default();
            for (number, event, truth) in told {
                let _ = cached.apply(number, event);
                if let Some(known) = cached.hashes() {
                    prop_assert_eq!(known, &truth);
                }
            }
        }
    }
}
