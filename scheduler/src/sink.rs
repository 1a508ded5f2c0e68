//! The receiver of a sequence's results.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use kv_cache::{BlockLease, LayerFence};
use types::{FinishReason, KvSpan, Refusal, RefusalKind, Step, Usage};

/// Steps, or chunks of KV, that may still come after [`Sink::has_room`] last said yes: those of the steps in flight.
pub const SINK_SLACK: usize = 2;

/// Takes a sequence's results: a stream of tokens to a client, or an outbox of KV to another node.
///
/// **Who calls it.** The worker, on its own thread, between two steps. No call may wait: a sink hands over to a
/// bounded queue and says by [`has_room`](Self::has_room) when that is full.
///
/// **In which order.** `kv` for the cached prefix, if there is one; `kv` for each chunk of the prompt as it is
/// launched; `step` for each token; last, and exactly once, `end`. Between them `has_room`, at any time.
/// After `end` nothing comes. A sink is also ended, with a refusal, when the worker dies.
///
/// **Who owns what.** The lease in `kv` is shared: its blocks are kept until the last clone is dropped, also when the
/// sequence has ended. It is to be dropped as soon as the KV has been read, for other sequences may need the blocks.
/// Only a sink whose sequence wants one step may keep it past `step`: a sequence that goes on writes into the last,
/// partial block.
pub trait Sink: Debug + Send {
    /// Whether it takes what another step brings. It must have room for [`SINK_SLACK`] more when it says so.
    ///
    /// While it has no room, nothing of the sequence is computed. The caller that makes room again calls
    /// [`WorkerHandle::nudge`](crate::WorkerHandle::nudge).
    fn has_room(&self) -> bool;

    /// Whole blocks of the prompt, and with its last chunk the partial one, are computed as `ready` opens.
    ///
    /// Blocks come in order, each once, all layers together; a cached prefix comes first, with an open fence.
    /// `lease.table(span.group)` covers the sequence from its first block, `span.blocks` are ordinals in it.
    fn kv(&mut self, span: KvSpan, lease: Arc<BlockLease>, ready: LayerFence);

    /// One more token.
    fn step(&mut self, step: Step, timing: StepTiming);

    /// The sequence is over. Blocks that only steps in flight still use come back a moment later.
    fn end(self: Box<Self>, end: SequenceEnd);
}

/// The times of a sequence so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepTiming {
    pub usage: Usage,
    /// From its submission to the launch of its first step.
    pub queued: Duration,
    /// From there to this token.
    pub computed: Duration,
}

/// How a sequence ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SequenceEnd {
    /// All tokens that were wanted were sent. `finish` is the last one's: `None` if the sequence is to go on elsewhere.
    Finished {
        finish: Option<FinishReason>,
        usage: Usage,
    },
    Failed(Refusal),
}

/// Holds a sink, and ends it exactly once, on drop at the latest.
#[derive(Debug)]
pub(crate) struct SinkGuard {
    /// `None` once it was ended.
    sink: Option<Box<dyn Sink>>,
}

impl SinkGuard {
    pub(crate) fn new(sink: Box<dyn Sink>) -> Self {
        Self { sink: Some(sink) }
    }

    pub(crate) fn has_room(&self) -> bool {
        self.sink.as_ref().is_some_and(|sink| sink.has_room())
    }

    pub(crate) fn kv(&mut self, span: KvSpan, lease: &Arc<BlockLease>, ready: &LayerFence) {
        if let Some(sink) = &mut self.sink {
            sink.kv(span, Arc::clone(lease), ready.clone());
        }
    }

    pub(crate) fn step(&mut self, step: Step, timing: StepTiming) {
        if let Some(sink) = &mut self.sink {
            sink.step(step, timing);
        }
    }

    pub(crate) fn end(mut self, end: SequenceEnd) {
        if let Some(sink) = self.sink.take() {
            sink.end(end);
        }
    }
}

impl Drop for SinkGuard {
    fn drop(&mut self) {
        if let Some(sink) = self.sink.take() {
            sink.end(SequenceEnd::Failed(Refusal::new(RefusalKind::Failed, "the worker stopped")));
        }
    }
}
