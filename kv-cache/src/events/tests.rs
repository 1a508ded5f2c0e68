use std::collections::BTreeSet;
use std::time::Duration;

use tokio::time::timeout;

use super::*;
use crate::BlockPool;
use crate::event_log::EventLog;

fn hashes(numbers: impl IntoIterator<Item = u128>) -> Vec<BlockHash> {
    numbers.into_iter().map(BlockHash).collect()
}

/// Returns the parts of a change, and checks that only the last one completes it.
fn parts(events: VecDeque<BlockEvent>) -> Vec<BlockChange> {
    let n_events = events.len();
    let part = |(nth, event): (usize, BlockEvent)| {
        assert_eq!(event.is_complete, nth + 1 == n_events, "part {nth} of {n_events}");
        event.change
    };
    events.into_iter().enumerate().map(part).collect()
}

#[test]
fn reading_table() {
    use BlockChange::{Evicted, Snapshot, Stored};
    let mut log = EventLog::new(2);
    log.stored(hashes([1]));
    log.stored(hashes([]));
    log.evicted(hashes([1]));
    log.stored(hashes([3, 7]));
    let read = |after| match log.read(after, || hashes([7, 3])) {
        Reading::UpToDate => None,
        Reading::Events { number, changes } => Some((number, changes)),
        Reading::Snapshot { number, hashes } => Some((number, parts(snapshot(hashes)))),
    };
    for (name, after, expected) in [
        ("nothing was read", None, Some((3, vec![Snapshot(hashes([3, 7]))]))),
        ("1 is not kept any more", Some(0), Some((3, vec![Snapshot(hashes([3, 7]))]))),
        ("2 is", Some(1), Some((3, vec![Evicted(hashes([1])), Stored(hashes([3, 7]))]))),
        ("and 3", Some(2), Some((3, vec![Stored(hashes([3, 7]))]))),
        ("all was read", Some(3), None),
    ] {
        assert_eq!(read(after), expected, "{name}");
    }
}

#[test]
fn changes_that_were_not_read_are_merged() {
    use BlockChange::{Evicted, Stored};
    for (name, changes, expected) in [
        ("one", vec![Stored(hashes([1]))], vec![Stored(hashes([1]))]),
        ("two of a kind", vec![Stored(hashes([1])), Stored(hashes([2]))], vec![Stored(hashes([1, 2]))]),
        ("stored and evicted", vec![Stored(hashes([1])), Evicted(hashes([1]))], vec![]),
        ("evicted and stored", vec![Evicted(hashes([1])), Stored(hashes([1]))], vec![]),
        (
            "a full pool evicts one block for each new one",
            vec![Evicted(hashes([1])), Stored(hashes([3])), Evicted(hashes([2])), Stored(hashes([4]))],
            vec![Evicted(hashes([1, 2])), Stored(hashes([3, 4]))],
        ),
    ] {
        assert_eq!(parts(merged(changes)), expected, "{name}");
    }
}

/// A message has a limit of 16 MiB. A snapshot of a million blocks, in one message, would exceed it.
#[test]
fn a_large_snapshot_comes_in_parts() {
    let all = hashes((0..1_000_000).rev());
    let mut found = Vec::new();
    for (nth, part) in parts(snapshot(all)).into_iter().enumerate() {
        let hashes = match part {
            BlockChange::Snapshot(hashes) if nth == 0 => hashes,
            BlockChange::Stored(hashes) if nth > 0 => hashes,
            other => panic!("part {nth} is {other:?}"),
        };
        assert!(hashes.len() * 16 <= 64 << 10, "{} hashes", hashes.len());
        found.extend(hashes);
    }
    assert!(found.iter().copied().eq((0..1_000_000).map(BlockHash)));
    assert_eq!(parts(snapshot(vec![])), [BlockChange::Snapshot(vec![])], "an empty cache is a snapshot too");
}

#[tokio::test(start_paused = true)]
async fn a_reader_is_woken() {
    let pool = BlockPool::new(&crate::pool::tests::layout(1), 4);
    let mut events = pool.events();
    let event = |number, change| NumberedEvent { number, event: BlockEvent::complete(change) };
    assert_eq!(events.next().await, event(1, BlockChange::Snapshot(vec![])));
    assert!(timeout(Duration::from_secs(1), events.next()).await.is_err(), "nothing has happened");
    let lease = pool.reserve(1, crate::pool::tests::holder()).expect("there is room");
    let (found, ()) = tokio::join!(events.next(), async { lease.publish(0, BlockHash(5)) });
    assert_eq!(found, event(2, BlockChange::Stored(hashes([5]))));
}

/// A mirror of the index that applies the events. It also checks that no event is missing, and that no hash
/// is stored or evicted twice.
#[derive(Debug, Default)]
pub(crate) struct Mirror {
    pub(crate) hashes: BTreeSet<BlockHash>,
    number: Option<u64>,
}

impl Mirror {
    pub(crate) fn catch_up(&mut self, events: &mut BlockEvents) {
        while let Some(next) = events.try_next() {
            self.apply(next);
        }
    }

    fn apply(&mut self, next: NumberedEvent) {
        let follows = self.number.is_some_and(|number| next.number == number + 1);
        match next.event.change {
            BlockChange::Snapshot(hashes) => self.hashes = hashes.into_iter().collect(),
            BlockChange::Stored(hashes) => {
                assert!(follows, "event {} after {:?}", next.number, self.number);
                hashes
                    .into_iter()
                    .for_each(|hash| assert!(self.hashes.insert(hash), "{hash:?} is stored twice"));
            }
            BlockChange::Evicted(hashes) => {
                assert!(follows, "event {} after {:?}", next.number, self.number);
                hashes
                    .into_iter()
                    .for_each(|hash| assert!(self.hashes.remove(&hash), "{hash:?} was not stored"));
            }
        }
        self.number = Some(next.number);
    }
}
