//! One end of a pair's queue: its slots, and messages in the order in which they are put there.

use std::sync::Arc;
use std::time::Duration;

use chassis::Gate;
use device::cuda::CopyDone;
use tokio::sync::{mpsc, oneshot, watch};

use super::backend::{End, PairId, Stage};
use super::thread::{Job, Message, PairThread};
use crate::connector::ConnectorParts;
use crate::connectors::link::stream::within;
use crate::error::TransferError;

/// Messages that wait for their turn. Each has a slot, so there are never more.
const JOBS_MAX: usize = 16;

/// What the connector says of its pairs' threads.
#[derive(Clone, Debug)]
pub(super) struct PairSettings {
    /// How long a message may stand still.
    stall: Duration,
    /// How long a thread looks for the next one before it sleeps.
    awake: Duration,
    /// They are in it.
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

/// How a pair stands.
#[derive(Clone, Debug)]
pub(super) enum PairState {
    Joining,
    Ready,
    Lost(TransferError),
}

/// See the module. Dropped, its communicators end: in good order where nothing is under way.
#[derive(Debug)]
pub struct PairQueue {
    stage: Arc<dyn Stage>,
    jobs: mpsc::Sender<Job>,
    free: async_channel::Receiver<usize>,
    give_back: async_channel::Sender<usize>,
    pair_state: watch::Receiver<PairState>,
    stall: Duration,
}

/// The right to one slot. Dropped, it is free for the next message.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) nth: usize,
    give_back: async_channel::Sender<usize>,
}

impl Drop for Slot {
    fn drop(&mut self) {
        // The channel has room for all slots; if it is closed, the slots are not needed.
        let _ = self.give_back.try_send(self.nth);
    }
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
        let n_slots = stage.n_slots();
        let (give_back, free) = async_channel::bounded(n_slots);
        (0..n_slots).for_each(|nth| give_back.try_send(nth).expect("there is room for all slots"));
        let thread = PairThread { stage: Arc::clone(&stage), id, end, stall, awake, queue };
        std::thread::Builder::new()
            .name("kv pair".to_owned())
            .spawn(move || {
                thread.run(&tell);
                drop(inside);
            })
            .map_err(TransferError::lost)?;
        Ok(Self { stage, jobs, free, give_back, pair_state, stall })
    }

    pub(super) fn stage(&self) -> &dyn Stage {
        &*self.stage
    }

    /// Waits until both ends have joined.
    pub(super) async fn ready(&self) -> Result<(), TransferError> {
        self.until(|pair_state| matches!(pair_state, PairState::Ready)).await
    }

    /// A message will be put soon: the thread wakes up for it.
    pub(super) fn expect(&self) {
        // Where there is no room it has enough to do already.
        let _ = self.jobs.try_send(Job::Wake);
    }

    /// Waits for a free slot, not longer than a message may stand still.
    pub(super) async fn slot(&self) -> Result<Slot, TransferError> {
        let free = async {
            tokio::select! {
                biased;
                lost = self.lost() => Err(lost),
                nth = self.free.recv() => nth.map_err(|_| TransferError::Closed),
            }
        };
        let nth = within(self.stall, "waiting for a slot of the pair", free).await?;
        Ok(Slot { nth, give_back: self.give_back.clone() })
    }

    /// Puts a message into the queue: `bytes`, from or into this slot, behind these copy jobs. Calls count in their
    /// order. The answer comes when the message is done; the slot is taken until then, whether anyone waits or not.
    pub(super) async fn put(
        &self,
        slot: Arc<Slot>,
        bytes: usize,
        before: Vec<CopyDone>,
    ) -> Result<oneshot::Receiver<Result<(), TransferError>>, TransferError> {
        let (done, answer) = oneshot::channel();
        let job = Job::Message(Message { slot, bytes, before, done });
        let put = async { self.jobs.send(job).await.map_err(|_| self.why_lost()) };
        within(self.stall, "the queue of the pair", put).await?;
        Ok(answer)
    }

    /// Ends when the pair is lost: why.
    pub(super) async fn lost(&self) -> TransferError {
        self.until(|_| false).await.err().unwrap_or(TransferError::Closed)
    }

    /// Ends when the pair stands so, or is lost.
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
