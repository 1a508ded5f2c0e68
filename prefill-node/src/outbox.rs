//! The output of a prefill sequence: KV to a connector, the first token to the router.
//!
//! The [`Outbox`] is the scheduler's end and never blocks. A bounded queue passes its items to a delivery task. When
//! the queue is full, the scheduler computes no further chunk of this sequence.

use std::sync::Arc;

use kv_cache::{BlockLease, LayerFence};
use kv_transfer::{KvConnector, KvSender, TransferError};
use scheduler::{SINK_SLACK, SequenceEnd, Sink, StepTiming, WorkerHandle};
use tokio::sync::{mpsc, oneshot};
use types::{Destination, Handoff, KvSpan, Landing, PromptDigest, Refusal, RefusalKind, Step, TransferId};

/// The length of the queue to the delivery task.
const ITEMS_MAX: usize = 24;
/// Queue slots that stay free for steps in flight. Each of them may add a chunk per layer group, a cached prefix, and
/// the first token.
const ITEMS_IN_FLIGHT: usize = 4 * SINK_SLACK;

/// One item on its way from the worker to the delivery task.
#[derive(Debug)]
pub(crate) enum OutboxItem {
    Kv {
        span: KvSpan,
        lease: Arc<BlockLease>,
        ready: LayerFence,
    },
    /// The first token; the sequence is fully computed.
    First(Step),
}

/// The first token with its timing, or the reason why there is none.
pub(crate) type First = Result<(Step, StepTiming), Refusal>;

/// The scheduler's end of a delivery.
#[derive(Debug)]
pub(crate) struct Outbox {
    items: mpsc::Sender<OutboxItem>,
    first: Option<oneshot::Sender<First>>,
}

/// Makes an outbox, the receiver of its first token, and the receiver of its items.
pub(crate) fn outbox() -> (Outbox, oneshot::Receiver<First>, mpsc::Receiver<OutboxItem>) {
    let (items, received) = mpsc::channel(ITEMS_MAX);
    let (first, answer) = oneshot::channel();
    (Outbox { items, first: Some(first) }, answer, received)
}

impl Outbox {
    /// Queues an item. Without a receiver it is dropped: the transfer has failed, and its owner cancels the sequence.
    fn send(&self, item: OutboxItem) {
        let _ = self.items.try_send(item);
    }

    fn answer(&mut self, first: First) {
        if let Some(answer) = self.first.take() {
            let _ = answer.send(first);
        }
    }
}

impl Sink for Outbox {
    fn has_room(&self) -> bool {
        self.items.capacity() >= ITEMS_IN_FLIGHT
    }

    fn kv(&mut self, span: KvSpan, lease: Arc<BlockLease>, ready: LayerFence) {
        self.send(OutboxItem::Kv { span, lease, ready });
    }

    fn step(&mut self, step: Step, timing: StepTiming) {
        // The answer goes first: the delivery may be complete as soon as it has the token.
        self.answer(Ok((step.clone(), timing)));
        self.send(OutboxItem::First(step));
    }

    fn end(mut self: Box<Self>, end: SequenceEnd) {
        if let SequenceEnd::Failed(refusal) = end {
            self.answer(Err(refusal));
        }
    }
}

// === delivery ===

/// Sends items to `to` as they come. Dropping the future aborts the transfer.
pub(crate) async fn deliver(
    connector: Arc<dyn KvConnector>,
    to: Landing,
    mut items: mpsc::Receiver<OutboxItem>,
    worker: WorkerHandle,
) -> Result<(), DeliveryError> {
    let (transfer, n_tokens) = (to.transfer, to.n_tokens);
    let mut sender = connector.open(&Destination::Landing(to)).await?;
    while let Some(item) = items.recv().await {
        match item {
            OutboxItem::Kv { span, lease, ready } => {
                sender.send(span, lease, ready).await?;
                worker.nudge();
            }
            OutboxItem::First(first) => return finish(sender, transfer, first, n_tokens).await,
        }
    }
    Err(DeliveryError::Unfinished)
}

/// Keeps items until the sequence is computed and a landing is named, then sends them.
pub(crate) async fn hold(
    mut items: mpsc::Receiver<OutboxItem>,
    landing: oneshot::Receiver<(Arc<dyn KvConnector>, Landing)>,
    prompt: PromptDigest,
) -> Result<(), DeliveryError> {
    let (kept, first) = keep(&mut items).await?;
    let (connector, to) = landing.await.map_err(|_| DeliveryError::Released)?;
    let (transfer, n_tokens) = (to.transfer, to.n_tokens);
    let mut sender = connector.open(&Destination::Landing(to.opened_with(prompt))).await?;
    for (span, lease, ready) in kept {
        sender.send(span, lease, ready).await?;
    }
    finish(sender, transfer, first, n_tokens).await
}

type KeptKv = (KvSpan, Arc<BlockLease>, LayerFence);

async fn keep(items: &mut mpsc::Receiver<OutboxItem>) -> Result<(Vec<KeptKv>, Step), DeliveryError> {
    let mut kept = Vec::new();
    while let Some(item) = items.recv().await {
        match item {
            OutboxItem::Kv { span, lease, ready } => kept.push((span, lease, ready)),
            OutboxItem::First(first) => return Ok((kept, first)),
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

/// The reason why KV was not delivered.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DeliveryError {
    #[error(transparent)]
    Transfer(#[from] TransferError),
    #[error("the sequence ended before its first token")]
    Unfinished,
    #[error("the held KV was released")]
    Released,
    #[error("the request's deadline passed")]
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
        let (outbox, _answer, mut items) = outbox();
        let item = || OutboxItem::First(Step { token: TokenId(0), index: 0, logprobs: None, finish: None });
        let mut n_sent = 0;
        while outbox.has_room() {
            assert!(n_sent < ITEMS_MAX, "it has room for more than its queue takes");
            outbox.send(item());
            n_sent += 1;
        }
        // The last accepted chunk counts as one of those in flight.
        assert_eq!(outbox.items.capacity() + 1, ITEMS_IN_FLIGHT);
        items.try_recv().expect("the wire takes one");
        assert!(outbox.has_room(), "there is room again");
    }
}
