//! The output of a prefill sequence: KV to a connector, the first token to the router.
//!
//! The [`Outbox`] is the scheduler's end and never blocks. It fills a bounded queue that the transfer's sender
//! empties. When the queue is full, the scheduler computes no further chunk of this sequence.

use std::sync::Arc;

use kv_cache::{BlockLease, LayerFence};
use kv_transfer::{Chunk, ChunkQueue, KvConnector, TransferError};
use scheduler::{SINK_SLACK, SequenceEnd, Sink, StepTiming};
use tokio::sync::{mpsc, oneshot};
use types::step::PromptLogprob;
use types::{Destination, Handoff, KvSpan, Landing, PromptDigest, Refusal, RefusalKind, Step, TransferId};

/// The number of chunks that may wait for the connector.
const CHUNKS_MAX: usize = 40;
/// The number of chunks that may still come once the queue is full: for each step in flight a chunk of every
/// layer group, a cached prefix, and the handoff.
const CHUNKS_IN_FLIGHT: usize = 4 * SINK_SLACK;

/// The first token with its timing, and the log-probabilities of the prompt.
#[derive(Debug)]
pub(crate) struct FirstToken {
    pub(crate) step: Step,
    pub(crate) timing: StepTiming,
    /// See [`types::ComputedPrompt`].
    pub(crate) prompt_logprobs: Vec<PromptLogprob>,
}

/// The first token, or the reason for its absence.
pub(crate) type FirstTokenResult = Result<FirstToken, Refusal>;

/// The scheduler's end of one KV delivery: it queues chunks for the connector and answers with the first
/// token.
#[derive(Debug)]
pub(crate) struct Outbox {
    transfer: TransferId,
    n_tokens: u32,
    chunks: mpsc::Sender<Chunk>,
    first: Option<oneshot::Sender<FirstTokenResult>>,
    /// The log-probabilities of the prompt, until the first token.
    prompt_logprobs: Vec<PromptLogprob>,
}

/// Makes the outbox of a prompt of `n_tokens`, a receiver of its answer, and the queue that it fills.
/// `on_taken` is called when the queue has room again.
pub(crate) fn outbox(
    transfer: TransferId,
    n_tokens: u32,
    on_taken: impl Fn() + Send + 'static,
) -> (Outbox, oneshot::Receiver<FirstTokenResult>, ChunkQueue) {
    let (chunks, received) = mpsc::channel(CHUNKS_MAX);
    let (first, answer) = oneshot::channel();
    let queue = ChunkQueue::new(received, on_taken);
    let prompt_logprobs = Vec::new();
    (Outbox { transfer, n_tokens, chunks, first: Some(first), prompt_logprobs }, answer, queue)
}

impl Outbox {
    /// Queues a chunk. Without a receiver the chunk is dropped: the transfer has failed, and its owner
    /// cancels the sequence.
    fn send(&self, chunk: Chunk) {
        let _ = self.chunks.try_send(chunk);
    }

    fn answer(&mut self, first: FirstTokenResult) {
        if let Some(answer) = self.first.take() {
            let _ = answer.send(first);
        }
    }
}

impl Sink for Outbox {
    fn has_room(&self) -> bool {
        self.chunks.capacity() >= CHUNKS_IN_FLIGHT
    }

    fn kv(&mut self, span: KvSpan, lease: Arc<BlockLease>, ready: LayerFence) {
        self.send(Chunk::Kv { span, from: lease, ready });
    }

    fn prompt_logprobs(&mut self, logprobs: Vec<PromptLogprob>) {
        self.prompt_logprobs = logprobs;
    }

    fn step(&mut self, step: Step, timing: StepTiming) {
        // The answer is sent before the handoff, because the delivery may be complete as soon as it has the
        // token.
        let prompt_logprobs = std::mem::take(&mut self.prompt_logprobs);
        self.answer(Ok(FirstToken { step: step.clone(), timing, prompt_logprobs }));
        self.send(Chunk::Handoff(Handoff { transfer: self.transfer, n_tokens: self.n_tokens, first: step }));
    }

    fn end(mut self: Box<Self>, end: SequenceEnd) {
        if let SequenceEnd::Failed(refusal) = end {
            self.answer(Err(refusal));
        }
    }
}

// === delivery ===

/// Sends the queue's chunks to `to` as they come. Dropping the future before its end aborts the transfer.
pub(crate) async fn deliver(
    connector: Arc<dyn KvConnector>,
    to: Landing,
    queue: ChunkQueue,
) -> Result<(), DeliveryError> {
    Ok(connector.open(&Destination::Landing(to)).await?.feed(queue).await?)
}

/// Keeps chunks until the sequence is computed, then until a landing is named, and sends them there.
pub(crate) async fn hold(
    queue: ChunkQueue,
    landing: oneshot::Receiver<(Arc<dyn KvConnector>, Landing)>,
    prompt: PromptDigest,
) -> Result<(), DeliveryError> {
    let (mut chunks, handoff) = keep(queue).await?;
    let (connector, to) = landing.await.map_err(|_| DeliveryError::Released)?;
    chunks.push(Chunk::Handoff(Handoff { transfer: to.transfer, n_tokens: to.n_tokens, ..handoff }));
    deliver(connector, to.opened_with(prompt), ChunkQueue::of(chunks)).await
}

/// Returns all KV of a sequence, and its handoff. The sequence's blocks bound the number of chunks.
async fn keep(mut queue: ChunkQueue) -> Result<(Vec<Chunk>, Handoff), TransferError> {
    let mut kept = Vec::new();
    while let Some(chunk) = queue.next().await {
        match chunk {
            Chunk::Kv { .. } => kept.push(chunk),
            Chunk::Handoff(handoff) => return Ok((kept, handoff)),
        }
    }
    Err(TransferError::Unfinished)
}

/// The reason for a failed delivery of KV.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DeliveryError {
    #[error(transparent)]
    Transfer(#[from] TransferError),
    #[error("the held KV was released")]
    Released,
    #[error("the request's deadline passed")]
    Late,
}

impl From<&DeliveryError> for Refusal {
    fn from(error: &DeliveryError) -> Self {
        match error {
            DeliveryError::Transfer(error) => error.into(),
            DeliveryError::Released => Self::new(RefusalKind::Failed, error.to_string()),
            DeliveryError::Late => Self::new(RefusalKind::Deadline, error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures::FutureExt as _;
    use types::TokenId;

    use super::*;

    #[test]
    fn an_outbox_says_that_it_is_full_while_what_is_in_flight_still_fits() {
        let n_taken = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&n_taken);
        let taken = move || {
            count.fetch_add(1, Ordering::Relaxed);
        };
        let (outbox, _answer, mut queue) = outbox(TransferId(1), 1, taken);
        let first = Step { token: TokenId(0), index: 0, logprobs: None, finish: None };
        let mut n_sent = 0;
        while outbox.has_room() {
            assert!(n_sent < CHUNKS_MAX, "it has room for more than its queue takes");
            outbox.send(Chunk::Handoff(Handoff {
                transfer: TransferId(1),
                n_tokens: 1,
                first: first.clone(),
            }));
            n_sent += 1;
        }
        // The last chunk that was accepted counts as one in flight, so the rest of the capacity is one less.
        assert_eq!(outbox.chunks.capacity() + 1, CHUNKS_IN_FLIGHT);
        queue.next().now_or_never().flatten().expect("the wire takes one");
        assert_eq!(n_taken.load(Ordering::Relaxed), 1, "the worker learns of the room");
        assert!(outbox.has_room(), "there is room again");
    }
}
