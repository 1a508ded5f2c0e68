//! The queues of one link: one for each lane.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures::future::{select_all, try_join_all};

use super::backend::{End, NcclBackend, PairId, Stage};
use super::pair_queue::{PairQueue, PairSettings};
use crate::connectors::link::frame::FrameError;
use crate::error::TransferError;
use crate::lanes::Lanes;
use crate::reshard::Lane;

/// The queues of one link, one for each lane.
#[derive(Debug)]
pub(super) struct PairQueues(Vec<LaneQueue>);

/// The queue of one lane, and the number of messages that have got a number.
#[derive(Debug)]
pub(super) struct LaneQueue {
    lane: Lane,
    pub(super) pair_queue: Arc<PairQueue>,
    n_messages: AtomicU64,
}

/// The slots of one end, for each lane. Both ends take their slots before ids are made: an id waits for both ends to
/// join, and an id that is not joined costs NCCL a thread and a port for ever.
#[derive(Debug)]
pub(super) struct Stages {
    end: End,
    of_lanes: Vec<(Lane, Arc<dyn Stage>)>,
}

impl Stages {
    pub(super) fn take(backend: &dyn NcclBackend, lanes: &Lanes, end: End) -> Result<Self, TransferError> {
        let stage = |lane: &Lane| {
            let rank = match end {
                End::Sender => lane.from,
                End::Receiver => lane.to,
            };
            Ok((*lane, backend.stage(rank)?))
        };
        Ok(Self { end, of_lanes: lanes.all().iter().map(stage).collect::<Result<_, TransferError>>()? })
    }

    /// Returns the number of lanes.
    pub(super) fn len(&self) -> usize {
        self.of_lanes.len()
    }
}

impl PairQueues {
    /// Joins the pairs of these ids, one for each lane, in the order of the lanes.
    pub(super) fn start(
        stages: Stages,
        ids: &[PairId],
        pair_settings: &PairSettings,
    ) -> Result<Self, TransferError> {
        let Stages { end, of_lanes } = stages;
        let start = |((lane, stage), id): ((Lane, Arc<dyn Stage>), &PairId)| {
            let pair_queue = Arc::new(PairQueue::start(stage, id.clone(), end, pair_settings)?);
            Ok(LaneQueue { lane, pair_queue, n_messages: AtomicU64::new(0) })
        };
        Ok(Self(of_lanes.into_iter().zip(ids).map(start).collect::<Result<_, TransferError>>()?))
    }

    pub(super) fn of(&self, lane: Lane) -> Result<&LaneQueue, FrameError> {
        let found = self.0.iter().find(|line| line.lane == lane);
        found.ok_or(FrameError::Unexpected("a message on an unknown lane"))
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Waits until both ends of all queues have joined.
    pub(super) async fn ready(&self) -> Result<(), TransferError> {
        try_join_all(self.0.iter().map(|line| line.pair_queue.ready())).await.map(|_| ())
    }

    /// Waits until one queue is lost, and returns the error.
    pub(super) async fn lost(&self) -> TransferError {
        select_all(self.0.iter().map(|line| Box::pin(line.pair_queue.lost()))).await.0
    }

    /// Wakes up the threads, because messages follow soon.
    pub(super) fn expect(&self) {
        self.0.iter().for_each(|line| line.pair_queue.expect());
    }
}

impl LaneQueue {
    /// Returns the number of the lane's next message.
    pub(super) fn number(&self) -> u64 {
        self.n_messages.fetch_add(1, Ordering::Relaxed)
    }
}
