//! How the two ends of a pair find each other: with the first bytes of their link's stream.

use std::io;
use std::sync::Arc;

use async_trait::async_trait;
use chassis::{Listener, Stream};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::Semaphore;
use types::KvLayout;
use types::layout::Shard;

use super::cable::Terms;
use super::cables::{Cables, Stages};
use super::fabric::{End, Fabric, ID_BYTES, PairId};
use super::receiving::Receiving;
use crate::connector::ConnectorParts;
use crate::connectors::link::frame::FrameError;
use crate::connectors::link::medium::Apart;
use crate::connectors::link::receiver::{Arriving, Door, Incoming};
use crate::error::TransferError;
use crate::lanes::Lanes;

/// What a stream begins with. How many ranks the sender has follows, and how many queues a pair of its may have; the
/// receiver says how many ranks it has, and how many queues a pair has then, which are no more; and then come the ids of all
/// queues of the pairs, one pair for each lane between them, in their order.
const GREETING: u8 = b'Q';
const GREETING_BYTES: usize = 4;
const ANSWER_BYTES: usize = 3;

/// Strangers at one time that have slots on a GPU and a thread of NCCL's here, which a greeting is enough for.
const AT_THE_DOOR_MAX: usize = 8;

/// Learns which lanes there are, takes their slots, and says who the other ends of their pairs are.
pub(super) async fn greet(
    stream: &mut Stream,
    layout: &KvLayout,
    fabric: &dyn Fabric,
) -> io::Result<(Stages, Vec<PairId>)> {
    let (ours, offered) = (layout.shard.tp_size, fabric.n_queues() as u8);
    let [low, high] = ours.to_le_bytes();
    stream.write_all(&[GREETING, low, high, offered]).await?;
    let mut answer = [0; ANSWER_BYTES];
    stream.read_exact(&mut answer).await?;
    let [low, high, n_queues] = answer;
    if !(1..=offered).contains(&n_queues) {
        return Err(io::Error::other("the answer is pairs of more queues than were offered, or of none"));
    }
    let shard = Shard { tp_size: u16::from_le_bytes([low, high]), ..layout.shard };
    let lanes = Lanes::between(ours, &KvLayout { shard, ..layout.clone() }).map_err(io::Error::other)?;
    let stages = Stages::take(fabric, &lanes, End::Sender).map_err(io::Error::other)?;
    let pair = |_| (0..n_queues).map(|_| fabric.id().map_err(io::Error::other)).collect();
    let ids: Vec<PairId> = (0..stages.len()).map(pair).collect::<io::Result<_>>()?;
    stream.write_all(ids.concat().as_flattened()).await?;
    Ok((stages, ids))
}

/// Where streams come in.
#[derive(Debug)]
pub(super) struct PairDoor {
    listener: Box<dyn Listener>,
    fabric: Arc<dyn Fabric>,
    layout: KvLayout,
    terms: Terms,
    room: Arc<Semaphore>,
}

impl PairDoor {
    pub(super) fn new(listener: Box<dyn Listener>, fabric: Arc<dyn Fabric>, parts: &ConnectorParts) -> Self {
        let layout = parts.memory.layout().clone();
        let room = Arc::new(Semaphore::new(AT_THE_DOOR_MAX));
        Self { listener, fabric, layout, terms: Terms::of(parts), room }
    }
}

#[async_trait]
impl Door for PairDoor {
    async fn accept(&mut self) -> io::Result<(String, Arriving)> {
        let (stream, from) = self.listener.accept().await?;
        let (fabric, room) = (Arc::clone(&self.fabric), Arc::clone(&self.room));
        Ok((
            from.to_string(),
            Box::pin(greeted(stream, fabric, self.layout.clone(), self.terms.clone(), room)),
        ))
    }
}

async fn greeted(
    mut stream: Stream,
    fabric: Arc<dyn Fabric>,
    layout: KvLayout,
    terms: Terms,
    room: Arc<Semaphore>,
) -> Result<Incoming, TransferError> {
    let mut greeting = [0; GREETING_BYTES];
    stream.read_exact(&mut greeting).await.map_err(TransferError::lost)?;
    let [GREETING, low, high, n_queues] = greeting else {
        return Err(FrameError::Unexpected("another greeting").into());
    };
    if n_queues == 0 {
        return Err(FrameError::Unexpected("pairs without a queue").into());
    }
    let n_queues = usize::from(n_queues).min(fabric.n_queues());
    let lanes = Lanes::between(u16::from_le_bytes([low, high]), &layout)
        .map_err(|error| TransferError::Layout(error.to_string()))?;
    let at_the_door = room.acquire_owned().await.ok();
    let stages = Stages::take(&*fabric, &lanes, End::Receiver)?;
    let [low, high] = layout.shard.tp_size.to_le_bytes();
    stream.write_all(&[low, high, n_queues as u8]).await.map_err(TransferError::lost)?;
    let mut ids: Vec<PairId> = vec![vec![[0; ID_BYTES]; n_queues]; stages.len()];
    for id in ids.iter_mut().flatten() {
        stream.read_exact(id).await.map_err(TransferError::lost)?;
    }
    let cables = Cables::start(stages, &ids, &terms)?;
    Ok(Incoming { stream, elsewhere: Some(Apart::Queue(Box::new(Receiving(cables)))), at_the_door })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use chassis::Gate;
    use kv_cache::KvMemory;
    use types::KvDtype;

    use super::super::double::Double;
    use super::super::fabric::{QueueId, Stage};
    use super::*;

    /// A node without memory for slots, which counts the ids that it made.
    #[derive(Debug, Default)]
    struct Full {
        n_ids: AtomicUsize,
    }

    impl Fabric for Full {
        fn n_queues(&self) -> usize {
            1
        }

        fn id(&self) -> Result<QueueId, TransferError> {
            self.n_ids.fetch_add(1, Ordering::Relaxed);
            Ok([0; ID_BYTES])
        }

        fn stage(&self, _rank: u16) -> Result<Arc<dyn Stage>, TransferError> {
            Err(TransferError::lost_because("no memory for slots"))
        }
    }

    /// Slots in host memory, and how often they were taken.
    #[derive(Debug)]
    struct Counted {
        fabric: Box<dyn Fabric>,
        n_taken: AtomicUsize,
    }

    impl Fabric for Counted {
        fn n_queues(&self) -> usize {
            self.fabric.n_queues()
        }

        fn id(&self) -> Result<QueueId, TransferError> {
            self.fabric.id()
        }

        fn stage(&self, rank: u16) -> Result<Arc<dyn Stage>, TransferError> {
            self.n_taken.fetch_add(1, Ordering::Relaxed);
            self.fabric.stage(rank)
        }
    }

    fn terms() -> Terms {
        Terms::with(Duration::from_secs(1), Duration::ZERO, Gate::new("test"))
    }

    #[tokio::test]
    async fn strangers_wait_until_those_before_them_have_said_who_they_are_or_are_gone() {
        let layout = KvLayout::uniform(16, KvDtype::Bf16, 1, 1, 4);
        let memory = KvMemory::host(layout.clone(), 4).expect("a few pages");
        let fabric = Box::new(Double::default().fabric(&memory, 1 << 12, 1));
        let fabric = Arc::new(Counted { fabric, n_taken: AtomicUsize::new(0) });
        let room = Arc::new(Semaphore::new(1));
        let stranger = || {
            let (near, far) = tokio::io::duplex(1 << 12);
            let greeted = greeted(
                Stream::other(far),
                Arc::clone(&fabric) as Arc<dyn Fabric>,
                layout.clone(),
                terms(),
                Arc::clone(&room),
            );
            (near, Box::pin(greeted))
        };
        // Neither says more than the first bytes.
        let ((mut near, mut first), (mut other, mut second)) = (stranger(), stranger());
        for near in [&mut near, &mut other] {
            near.write_all(&[GREETING, 1, 0, 1]).await.expect("the other end is here");
        }
        for stranger in [&mut first, &mut second] {
            assert!(futures::poll!(stranger).is_pending());
        }
        assert_eq!(fabric.n_taken.load(Ordering::Relaxed), 1);
        drop(first);
        assert!(futures::poll!(&mut second).is_pending(), "it waits for ids now");
        assert_eq!(fabric.n_taken.load(Ordering::Relaxed), 2);
        assert_eq!(room.available_permits(), 0);
        drop((second, other));
        assert_eq!(room.available_permits(), 1);
    }

    #[tokio::test]
    async fn an_end_without_memory_for_slots_makes_nobody_wait_for_an_id() {
        let layout = KvLayout::uniform(16, KvDtype::Bf16, 1, 1, 4);
        let (near, far) = tokio::io::duplex(1 << 12);
        let (mut near, far) = (Stream::other(near), Stream::other(far));
        let (sender, receiver) = (Full::default(), Arc::new(Full::default()));
        let (terms, room) = (terms(), Arc::new(Semaphore::new(1)));
        let (greeted, refused) = tokio::join!(
            greet(&mut near, &layout, &sender),
            greeted(far, receiver, layout.clone(), terms, room)
        );
        let error = refused.expect_err("it has no memory");
        assert!(types::in_full(&error).contains("no memory for slots"), "{error:?}");
        assert!(greeted.is_err());
        assert_eq!(sender.n_ids.load(Ordering::Relaxed), 0);
    }
}
