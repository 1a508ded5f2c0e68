//! One end of a pair's queue: its slots, and its messages in order.

use std::sync::Arc;
use std::time::Duration;

use chassis::Gate;
use device::cuda::CopyDone;
use tokio::sync::{mpsc, oneshot, watch};

use super::backend::{End, PairId, Stage};
use super::thread::{Message, PairJob, PairThread};
use crate::connector_parts::ConnectorParts;
use crate::connectors::gpu::free_slots::{FreeSlots, LentSlot};
use crate::connectors::link::stream::within;
use crate::error::TransferError;

/// Limit of queued messages. Each message has a slot, so there are never more.
const JOBS_MAX: usize = 16;

/// The settings of the thread of each pair.
#[derive(Clone, Debug)]
pub(super) struct PairSettings {
    /// The time without progress after which a message has stalled.
    stall: Duration,
    /// The time for which a thread spins for the next message before it sleeps.
    awake: Duration,
    /// The gate that the threads hold.
    gate: Gate,
}

impl PairSettings {
    pub(super) fn of(parts: &ConnectorParts) -> Self {
        Self::with(parts.settings.stall(), parts.settings.awake(), parts.gate.clone())
    }

    pub(super) fn with(stall: Duration, awake: Duration, gate: Gate) -> Self {
        Self { stall, awake, gate }
    }
}

/// The state of a pair of queue ends.
#[derive(Clone, Debug)]
pub(super) enum PairState {
    Joining,
    Ready,
    Lost(TransferError),
}

/// One end of a pair's queue. The drop ends its communicators: in good order if nothing is in progress.
#[derive(Debug)]
pub struct PairQueue {
    stage: Arc<dyn Stage>,
    jobs: mpsc::Sender<PairJob>,
    free: FreeSlots,
    pair_state: watch::Receiver<PairState>,
    stall: Duration,
}

impl PairQueue {
    /// Joins the pair, on a thread of its own.
    pub(super) fn start(
        stage: Arc<dyn Stage>,
        id: PairId,
        end: End,
        PairSettings { stall, awake, gate }: &PairSettings,
    ) -> Result<Self, TransferError> {
        let inside = gate.enter("kv pair thread").map_err(|_| TransferError::Closed)?;
        let (stall, awake) = (*stall, *awake);
        let (jobs, queue) = mpsc::channel(JOBS_MAX);
        let (tell, pair_state) = watch::channel(PairState::Joining);
        let free = FreeSlots::new(stage.n_slots());
        let thread = PairThread { stage: Arc::clone(&stage), id, end, stall, awake, queue };
        std::thread::Builder::new()
            .name("kv pair".to_owned())
            .spawn(move || {
                thread.run(&tell);
                drop(inside);
            })
            .map_err(TransferError::lost)?;
        Ok(Self { stage, jobs, free, pair_state, stall })
    }

    pub(super) fn stage(&self) -> &dyn Stage {
        &*self.stage
    }

    /// Waits until both ends have joined.
    pub(super) async fn ready(&self) -> Result<(), TransferError> {
        self.until(|pair_state| matches!(pair_state, PairState::Ready)).await
    }

    /// Wakes up the thread, because a message follows soon.
    pub(super) fn expect(&self) {
        // If the queue is full, the thread is already awake, so the error is ignored.
        let _ = self.jobs.try_send(PairJob::Wake);
    }

    /// Waits for a free slot, at most for the stall time.
    pub(super) async fn slot(&self) -> Result<LentSlot, TransferError> {
        let free = async {
            tokio::select! {
                biased;
                lost = self.lost() => Err(lost),
                slot = self.free.take() => slot,
            }
        };
        within(self.stall, "waiting for a slot of the pair", free).await
    }

    /// Queues a message of `bytes` from or into this slot, after the copy jobs `before`. Messages go in the order of
    /// the calls. The returned channel reports when the message is done. The slot is in use until then, even if the
    /// channel is dropped.
    pub(super) async fn put(
        &self,
        slot: Arc<LentSlot>,
        bytes: usize,
        before: Vec<CopyDone>,
    ) -> Result<oneshot::Receiver<Result<(), TransferError>>, TransferError> {
        let (done, answer) = oneshot::channel();
        let job = PairJob::Message(Message { slot, bytes, before, done });
        let put = async { self.jobs.send(job).await.map_err(|_| self.why_lost()) };
        within(self.stall, "the queue of the pair", put).await?;
        Ok(answer)
    }

    /// Waits until the pair is lost, and returns the error.
    pub(super) async fn lost(&self) -> TransferError {
        self.until(|_| false).await.err().unwrap_or(TransferError::Closed)
    }

    /// Waits until the state satisfies `is_so`, or the pair is lost.
    async fn until(&self, is_so: impl Fn(&PairState) -> bool) -> Result<(), TransferError> {
        let mut pair_state = self.pair_state.clone();
        let seen = pair_state.wait_for(|now| is_so(now) || matches!(now, PairState::Lost(_))).await;
        match seen.map_err(|_| TransferError::Closed)?.clone() {
            PairState::Lost(error) => Err(error),
            _ => Ok(()),
        }
    }

    fn why_lost(&self) -> TransferError {
        match &*self.pair_state.borrow() {
            PairState::Lost(error) => error.clone(),
            _ => TransferError::Closed,
        }
    }
}
