//! All queues of one link: one for each lane.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures::future::{select_all, try_join_all};

use super::cable::{Cable, Terms};
use super::fabric::{End, Fabric, PairId, Stage};
use crate::connectors::link::frame::FrameError;
use crate::error::TransferError;
use crate::lanes::Lanes;
use crate::reshard::Lane;

/// See the module.
#[derive(Debug)]
pub(super) struct Cables(Vec<Line>);

/// One of them, and the messages that have been numbered.
#[derive(Debug)]
pub(super) struct Line {
    lane: Lane,
    pub(super) cable: Arc<Cable>,
    n_messages: AtomicU64,
}

/// The slots of one end, for each lane. Both ends have theirs before there are ids: an id waits for both to join, and one
/// that nobody joins costs NCCL a thread and a port for good.
#[derive(Debug)]
pub(super) struct Stages {
    end: End,
    of_lanes: Vec<(Lane, Arc<dyn Stage>)>,
}

impl Stages {
    pub(super) fn take(fabric: &dyn Fabric, lanes: &Lanes, end: End) -> Result<Self, TransferError> {
        let stage = |lane: &Lane| {
            let rank = match end {
                End::Sender => lane.from,
                End::Receiver => lane.to,
            };
            Ok((*lane, fabric.stage(rank)?))
        };
        Ok(Self { end, of_lanes: lanes.all().iter().map(stage).collect::<Result<_, TransferError>>()? })
    }

    /// How many lanes there are.
    pub(super) fn len(&self) -> usize {
        self.of_lanes.len()
    }
}

impl Cables {
    /// Joins the pairs of these ids, one for each lane in their order.
    pub(super) fn start(stages: Stages, ids: &[PairId], terms: &Terms) -> Result<Self, TransferError> {
        let Stages { end, of_lanes } = stages;
        let start = |((lane, stage), id): ((Lane, Arc<dyn Stage>), &PairId)| {
            let cable = Arc::new(Cable::start(stage, id.clone(), end, terms)?);
            Ok(Line { lane, cable, n_messages: AtomicU64::new(0) })
        };
        Ok(Self(of_lanes.into_iter().zip(ids).map(start).collect::<Result<_, TransferError>>()?))
    }

    pub(super) fn of(&self, lane: Lane) -> Result<&Line, FrameError> {
        let found = self.0.iter().find(|line| line.lane == lane);
        found.ok_or(FrameError::Unexpected("a message between ranks that have none for each other"))
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Waits until both ends of all have joined.
    pub(super) async fn ready(&self) -> Result<(), TransferError> {
        try_join_all(self.0.iter().map(|line| line.cable.ready())).await.map(|_| ())
    }

    /// Ends when one of them is lost: why.
    pub(super) async fn lost(&self) -> TransferError {
        select_all(self.0.iter().map(|line| Box::pin(line.cable.lost()))).await.0
    }

    /// Messages will be put soon.
    pub(super) fn expect(&self) {
        self.0.iter().for_each(|line| line.cable.expect());
    }
}

impl Line {
    /// The next one's.
    pub(super) fn number(&self) -> u64 {
        self.n_messages.fetch_add(1, Ordering::Relaxed)
    }
}
