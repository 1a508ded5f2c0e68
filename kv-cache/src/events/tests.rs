use std::collections::BTreeSet;
use std::time::Duration;

use tokio::time::timeout;

use super::*;
use crate::BlockPool;
use crate::event_log::EventLog;

fn hashes(numbers: impl IntoIterator<Item = u128>) -> Vec<BlockHash> {
    numbers.into_iter().map(BlockHash).collect()
}

fn read(log: &EventLog, after: Option<u64>) -> Option<NumberedEvent> {
    match log.read(after, || hashes([7, 3])) {
        Reading::UpToDate => None,
        Reading::Event(event) => Some(event),
        Reading::Snapshot { number, hashes } => Some(snapshot(number, hashes)),
    }
}

#[test]
fn reading_table() {
    let mut log = EventLog::new(2);
    log.stored(hashes([1]));
    log.stored(hashes([]));
    log.evicted(hashes([1]));
    log.stored(hashes([3, 7]));
    let snapshot = Some(NumberedEvent { number: 3, event: BlockEvent::Snapshot(hashes([3, 7])) });
    for (name, after, expected) in [
        ("nothing was read", None, snapshot.clone()),
        ("1 is not kept any more", Some(0), snapshot),
        ("2 is", Some(1), Some(NumberedEvent { number: 2, event: BlockEvent::Evicted(hashes([1])) })),
        ("and 3", Some(2), Some(NumberedEvent { number: 3, event: BlockEvent::Stored(hashes([3, 7])) })),
        ("all was read", Some(3), None),
    ] {
        assert_eq!(read(&log, after), expected, "{name}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_reader_is_woken() {
    let pool = BlockPool::new(&crate::pool::tests::layout(1), 4);
    let mut events = pool.events();
    assert_eq!(events.next().await, NumberedEvent { number: 0, event: BlockEvent::Snapshot(vec![]) });
    assert!(timeout(Duration::from_secs(1), events.next()).await.is_err(), "nothing has happened");
    let lease = pool.reserve(1, crate::pool::tests::holder()).expect("there is room");
    let (event, ()) = tokio::join!(events.next(), async { lease.publish(0, BlockHash(5)) });
    assert_eq!(event, NumberedEvent { number: 1, event: BlockEvent::Stored(hashes([5])) });
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
        match next.event {
            BlockEvent::Snapshot(hashes) => self.hashes = hashes.into_iter().collect(),
            BlockEvent::Stored(hashes) => {
                assert!(follows, "event {} after {:?}", next.number, self.number);
                hashes
                    .into_iter()
                    .for_each(|hash| assert!(self.hashes.insert(hash), "{hash:?} is stored twice"));
            }
            BlockEvent::Evicted(hashes) => {
                assert!(follows, "event {} after {:?}", next.number, self.number);
                hashes
                    .into_iter()
                    .for_each(|hash| assert!(self.hashes.remove(&hash), "{hash:?} was not stored"));
            }
        }
        self.number = Some(next.number);
    }
}
