//! Where a prefill sequence's results go: its KV onto a wire, its first token to the router.
//!
//! The [`Outbox`] is the scheduler's end and never blocks. What it takes in travels as parcels through a bounded queue to
//! a delivery task; when the queue is full the scheduler computes no further chunk of this sequence.

use std::sync::Arc;

use kv_cache::{BlockLease, LayerFence};
use kv_transfer::{KvConnector, KvSender, TransferError};
use scheduler::{SINK_SLACK, SequenceEnd, Sink, StepTiming, WorkerHandle};
use tokio::sync::{mpsc, oneshot};
use types::{Destination, Handoff, KvSpan, Landing, Refusal, RefusalKind, Step, TransferId};

/// Parcels that may wait for the wire.
const PARCELS_MAX: usize = 24;
/// Parcels that may still come once there is no room: for each step in flight a chunk of every layer group, a cached
/// prefix, and the first token.
const PARCELS_IN_FLIGHT: usize = 4 * SINK_SLACK;

/// What travels from the worker to the delivery.
#[derive(Debug)]
pub(crate) enum Parcel {
    Kv {
        span: KvSpan,
        lease: Arc<BlockLease>,
        ready: LayerFence,
    },
    /// The sequence is computed, and this is its first token.
    First(Step),
}

/// The first token, with how long it took, or why there is none.
pub(crate) type First = Result<(Step, StepTiming), Refusal>;

/// The scheduler's end of a delivery.
#[derive(Debug)]
pub(crate) struct Outbox {
    parcels: mpsc::Sender<Parcel>,
    first: Option<oneshot::Sender<First>>,
}

/// Makes an outbox, the answer that it will give, and the parcels that it will send.
pub(crate) fn outbox() -> (Outbox, oneshot::Receiver<First>, mpsc::Receiver<Parcel>) {
    let (parcels, received) = mpsc::channel(PARCELS_MAX);
    let (first, answer) = oneshot::channel();
    (Outbox { parcels, first: Some(first) }, answer, received)
}

impl Outbox {
    /// A parcel that finds no queue any more belongs to a delivery that has failed: its owner cancels the sequence.
    fn send(&self, parcel: Parcel) {
        let _ = self.parcels.try_send(parcel);
    }

    fn answer(&mut self, first: First) {
        if let Some(answer) = self.first.take() {
            let _ = answer.send(first);
        }
    }
}

impl Sink for Outbox {
    fn has_room(&self) -> bool {
        self.parcels.capacity() >= PARCELS_IN_FLIGHT
    }

    fn kv(&mut self, span: KvSpan, lease: Arc<BlockLease>, ready: LayerFence) {
        self.send(Parcel::Kv { span, lease, ready });
    }

    fn step(&mut self, step: Step, timing: StepTiming) {
        self.send(Parcel::First(step.clone()));
        self.answer(Ok((step, timing)));
    }

    fn end(mut self: Box<Self>, end: SequenceEnd) {
        if let SequenceEnd::Failed(refusal) = end {
            self.answer(Err(refusal));
        }
    }
}

// === delivery ===

/// Sends parcels to `to` as they come. Dropped early, it aborts the transfer.
pub(crate) async fn deliver(
    connector: Arc<dyn KvConnector>,
    to: Landing,
    mut parcels: mpsc::Receiver<Parcel>,
    worker: WorkerHandle,
) -> Result<(), DeliveryError> {
    let (transfer, n_tokens) = (to.transfer, to.n_tokens);
    let mut sender = connector.open(&Destination::Landing(to)).await?;
    while let Some(parcel) = parcels.recv().await {
        match parcel {
            Parcel::Kv { span, lease, ready } => {
                sender.send(span, lease, ready).await?;
                worker.nudge();
            }
            Parcel::First(first) => return finish(sender, transfer, first, n_tokens).await,
        }
    }
    Err(DeliveryError::Unfinished)
}

/// Keeps parcels until the sequence is computed, then until somebody names a landing.
pub(crate) async fn hold(
    mut parcels: mpsc::Receiver<Parcel>,
    landing: oneshot::Receiver<(Arc<dyn KvConnector>, Landing)>,
) -> Result<(), DeliveryError> {
    let (kept, first) = keep(&mut parcels).await?;
    let (connector, to) = landing.await.map_err(|_| DeliveryError::Released)?;
    let (transfer, n_tokens) = (to.transfer, to.n_tokens);
    let mut sender = connector.open(&Destination::Landing(to)).await?;
    for (span, lease, ready) in kept {
        sender.send(span, lease, ready).await?;
    }
    finish(sender, transfer, first, n_tokens).await
}

type KeptKv = (KvSpan, Arc<BlockLease>, LayerFence);

async fn keep(parcels: &mut mpsc::Receiver<Parcel>) -> Result<(Vec<KeptKv>, Step), DeliveryError> {
    let mut kept = Vec::new();
    while let Some(parcel) = parcels.recv().await {
        match parcel {
            Parcel::Kv { span, lease, ready } => kept.push((span, lease, ready)),
            Parcel::First(first) => return Ok((kept, first)),
        }
    }
    Err(DeliveryError::Unfinished)
}

async fn finish(
    sender: Box<dyn KvSender>,
    transfer: TransferId,
    first: Step,
    n_tokens: u32,
) -> Result<(), DeliveryError> {
    Ok(sender.finish(Handoff { transfer, n_tokens, first }).await?)
}

/// Why KV was not delivered.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DeliveryError {
    #[error(transparent)]
    Transfer(#[from] TransferError),
    #[error("the sequence ended before its first token")]
    Unfinished,
    #[error("the held kv was released")]
    Released,
    #[error("the deadline passed")]
    Late,
}

impl From<&DeliveryError> for Refusal {
    fn from(error: &DeliveryError) -> Self {
        match error {
            DeliveryError::Transfer(error) => error.into(),
            DeliveryError::Unfinished | DeliveryError::Released => {
                Self::new(RefusalKind::Failed, error.to_string())
            }
            DeliveryError::Late => Self::new(RefusalKind::Deadline, error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use types::TokenId;

    use super::*;

    #[test]
    fn an_outbox_says_that_it_is_full_while_what_is_in_flight_still_fits() {
        let (outbox, _answer, mut parcels) = outbox();
        let parcel = || Parcel::First(Step { token: TokenId(0), index: 0, logprobs: None, finish: None });
        let mut n_sent = 0;
        while outbox.has_room() {
            assert!(n_sent < PARCELS_MAX, "it has room for more than its queue takes");
            outbox.send(parcel());
            n_sent += 1;
        }
        // The last chunk that was let in is one of those in flight.
        assert_eq!(outbox.parcels.capacity() + 1, PARCELS_IN_FLIGHT);
        parcels.try_recv().expect("the wire takes one");
        assert!(outbox.has_room(), "there is room again");
    }
}
