//! The handshake of a pair: the first bytes of its link's stream.

use std::io;
use std::sync::Arc;

use async_trait::async_trait;
use chassis::identity::link;
use chassis::{Listener, Stream, World};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::Semaphore;
use types::KvLayout;
use types::layout::Shard;

use super::backend::{End, ID_BYTES, NcclBackend, PairId};
use super::pair_queue::PairSettings;
use super::pair_queues::{PairQueues, Stages};
use super::receive::NcclPath;
use crate::connector_parts::ConnectorParts;
use crate::connectors::link::accept::{Handshake, Incoming, StreamAcceptor};
use crate::connectors::link::frame::FrameError;
use crate::error::TransferError;
use crate::lanes::Lanes;

/// The first byte of a stream. After it the sender names its number of ranks and its limit of queues for a
/// pair. The receiver answers with its number of ranks and a number of queues within that limit. Then the
/// sender sends the ids of all queues, for one pair per lane, in the order of the lanes.
const GREETING: u8 = b'Q';
const GREETING_BYTES: usize = 4;
const ANSWER_BYTES: usize = 3;

/// Limit of unfinished handshakes. Each holds slots on a GPU and a thread of NCCL, and a peer gets them with
/// a greeting.
const HANDSHAKES_MAX: usize = 8;

/// Runs the sender's handshake: determines the lanes, takes their slots, and sends the ids of their queues.
pub(super) async fn greet(
    stream: &mut Stream,
    layout: &KvLayout,
    backend: &dyn NcclBackend,
) -> io::Result<(Stages, Vec<PairId>)> {
    let (ours, offered) = (layout.shard.tp_size, backend.n_queues() as u8);
    let [low, high] = ours.to_le_bytes();
    stream.write_all(&[GREETING, low, high, offered]).await?;
    let mut answer = [0; ANSWER_BYTES];
    stream.read_exact(&mut answer).await?;
    let [low, high, n_queues] = answer;
    if !(1..=offered).contains(&n_queues) {
        return Err(io::Error::other("the peer answered with an invalid number of queues"));
    }
    let shard = Shard { tp_size: u16::from_le_bytes([low, high]), ..layout.shard };
    let lanes = Lanes::between(ours, &KvLayout { shard, ..layout.clone() }).map_err(io::Error::other)?;
    let stages = Stages::take(backend, &lanes, End::Sender).map_err(io::Error::other)?;
    let pair = |_| (0..n_queues).map(|_| backend.id().map_err(io::Error::other)).collect();
    let ids: Vec<PairId> = (0..stages.len()).map(pair).collect::<io::Result<_>>()?;
    stream.write_all(ids.concat().as_flattened()).await?;
    Ok((stages, ids))
}

/// Accepts the streams of nccl links.
#[derive(Debug)]
pub(super) struct PairAcceptor {
    listener: Box<dyn Listener>,
    world: World,
    backend: Arc<dyn NcclBackend>,
    layout: KvLayout,
    pair_settings: PairSettings,
    room: Arc<Semaphore>,
}

impl PairAcceptor {
    pub(super) fn new(
        listener: Box<dyn Listener>,
        backend: Arc<dyn NcclBackend>,
        parts: &ConnectorParts,
    ) -> Self {
        let layout = parts.memory.layout().clone();
        let room = Arc::new(Semaphore::new(HANDSHAKES_MAX));
        Self {
            listener,
            world: parts.world.clone(),
            backend,
            layout,
            pair_settings: PairSettings::of(parts),
            room,
        }
    }
}

#[async_trait]
impl StreamAcceptor for PairAcceptor {
    async fn accept(&mut self) -> io::Result<(String, Handshake)> {
        let (stream, from) = self.listener.accept().await?;
        let (backend, room) = (Arc::clone(&self.backend), Arc::clone(&self.room));
        let (layout, settings, world) = (self.layout.clone(), self.pair_settings.clone(), self.world.clone());
        let admitted = async move {
            let stream = link::admit(&world, stream).await.map_err(TransferError::lost)?;
            greeted(stream, backend, layout, settings, room).await
        };
        Ok((from.to_string(), Box::pin(admitted)))
    }
}

async fn greeted(
    mut stream: Stream,
    backend: Arc<dyn NcclBackend>,
    layout: KvLayout,
    pair_settings: PairSettings,
    room: Arc<Semaphore>,
) -> Result<Incoming, TransferError> {
    let mut greeting = [0; GREETING_BYTES];
    stream.read_exact(&mut greeting).await.map_err(TransferError::lost)?;
    let [GREETING, low, high, n_queues] = greeting else {
        return Err(FrameError::Unexpected("a greeting of another wire").into());
    };
    if n_queues == 0 {
        return Err(FrameError::Unexpected("pairs without a queue").into());
    }
    let n_queues = usize::from(n_queues).min(backend.n_queues());
    let lanes = Lanes::between(u16::from_le_bytes([low, high]), &layout)
        .map_err(|error| TransferError::Layout(error.to_string()))?;
    let handshake_permit = room.acquire_owned().await.ok();
    let stages = Stages::take(&*backend, &lanes, End::Receiver)?;
    let [low, high] = layout.shard.tp_size.to_le_bytes();
    stream.write_all(&[low, high, n_queues as u8]).await.map_err(TransferError::lost)?;
    let mut ids: Vec<PairId> = vec![vec![[0; ID_BYTES]; n_queues]; stages.len()];
    for id in ids.iter_mut().flatten() {
        stream.read_exact(id).await.map_err(TransferError::lost)?;
    }
    let pair_queues = PairQueues::start(stages, &ids, &pair_settings)?;
    Ok(Incoming { stream, kv_path: Some(Arc::new(NcclPath(pair_queues))), handshake_permit })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use chassis::Gate;
    use kv_cache::KvMemory;
    use types::KvDtype;

    use super::super::backend::{QueueId, Stage};
    use super::super::double::Double;
    use super::*;

    /// The backend of a node without memory for slots. It counts the ids that it made.
    #[derive(Debug, Default)]
    struct Full {
        n_ids: AtomicUsize,
    }

    impl NcclBackend for Full {
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

    /// A backend with slots in host memory. It counts the stages that it made.
    #[derive(Debug)]
    struct Counted {
        backend: Box<dyn NcclBackend>,
        n_taken: AtomicUsize,
    }

    impl NcclBackend for Counted {
        fn n_queues(&self) -> usize {
            self.backend.n_queues()
        }

        fn id(&self) -> Result<QueueId, TransferError> {
            self.backend.id()
        }

        fn stage(&self, rank: u16) -> Result<Arc<dyn Stage>, TransferError> {
            self.n_taken.fetch_add(1, Ordering::Relaxed);
            self.backend.stage(rank)
        }
    }

    fn pair_settings() -> PairSettings {
        PairSettings::with(Duration::from_secs(1), Duration::ZERO, Gate::new("test"))
    }

    #[tokio::test]
    async fn strangers_wait_until_those_before_them_have_said_who_they_are_or_are_gone() {
        let layout = KvLayout::uniform(16, KvDtype::Bf16, 1, 1, 4);
        let memory = KvMemory::host(layout.clone(), 4).expect("a few pages");
        let backend = Box::new(Double::default().backend(&memory, 1 << 12, 1));
        let backend = Arc::new(Counted { backend, n_taken: AtomicUsize::new(0) });
        let room = Arc::new(Semaphore::new(1));
        let stranger = || {
            let (near, far) = tokio::io::duplex(1 << 12);
            let greeted = greeted(
                Stream::other(far),
                Arc::clone(&backend) as Arc<dyn NcclBackend>,
                layout.clone(),
                pair_settings(),
                Arc::clone(&room),
            );
            (near, Box::pin(greeted))
        };
        // Each stranger sends its first bytes only, so its handshake stays unfinished.
        let ((mut near, mut first), (mut other, mut second)) = (stranger(), stranger());
        for near in [&mut near, &mut other] {
            near.write_all(&[GREETING, 1, 0, 1]).await.expect("the other end is here");
        }
        for stranger in [&mut first, &mut second] {
            assert!(futures::poll!(stranger).is_pending());
        }
        assert_eq!(backend.n_taken.load(Ordering::Relaxed), 1);
        drop(first);
        assert!(futures::poll!(&mut second).is_pending(), "it waits for ids now");
        assert_eq!(backend.n_taken.load(Ordering::Relaxed), 2);
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
        let (pair_settings, room) = (pair_settings(), Arc::new(Semaphore::new(1)));
        let (greeted, refused) = tokio::join!(
            greet(&mut near, &layout, &sender),
            greeted(far, receiver, layout.clone(), pair_settings, room)
        );
        let error = refused.expect_err("it has no memory");
        assert!(types::in_full(&error).contains("no memory for slots"), "{error:?}");
        assert!(greeted.is_err());
        assert_eq!(sender.n_ids.load(Ordering::Relaxed), 0);
    }
}
