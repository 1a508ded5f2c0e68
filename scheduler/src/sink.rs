//! The receiver of a sequence's results.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use kv_cache::{BlockLease, LayerFence};
use types::step::PromptLogprob;
use types::{FinishReason, KvSpan, Refusal, RefusalKind, Step, Usage};

/// The number of steps, or chunks of KV per group, that may come after [`Sink::has_room`] last returned true:
/// those of the launched steps.
pub const SINK_SLACK: usize = 2;

/// The receiver of a sequence's results: a stream of tokens to a client, or an outbox of KV to another node.
///
/// **Caller.** The worker, on its own thread, between two steps. No call may wait: a sink passes results to a
/// bounded queue, and [`has_room`](Self::has_room) reports whether the queue has room.
///
/// **Order.** `kv` for the cached prefix, if there is one; `kv` for each chunk of the prompt when it is
/// launched; `step` for each token; last, and exactly once, `end`. `has_room` may be called at any time
/// before `end`. No call comes after `end`. When the worker dies, a sink is ended with a refusal.
///
/// **Ownership.** The lease in `kv` is shared: its blocks are kept until the last clone is dropped, even if
/// the sequence has ended. Drop it as soon as the KV has been read, because other sequences may need the
/// blocks. A sink may keep it past `step` only if its sequence wants one step: a sequence that continues
/// writes into the last, partial block.
pub trait Sink: Debug + Send {
    /// Returns whether the sink accepts the results of another step. If it returns true, the sink must have
    /// room for [`SINK_SLACK`] more steps.
    ///
    /// While the sink has no room, no step of the sequence is computed. When there is room again, the sink's
    /// owner calls [`WorkerHandle::nudge`](crate::WorkerHandle::nudge).
    fn has_room(&self) -> bool;

    /// Takes whole blocks of the prompt, and with its last chunk the partial one. Their KV is computed when
    /// `ready` opens.
    ///
    /// Blocks come in order, each once, with all layers. A cached prefix comes first, with an open fence.
    /// `lease.table(span.group)` covers the sequence from its first block; `span.blocks` are ordinals in it.
    fn kv(&mut self, span: KvSpan, lease: Arc<BlockLease>, ready: LayerFence);

    /// Takes the log-probabilities of a prompt that asks for them, just before its first `step`.
    fn prompt_logprobs(&mut self, logprobs: Vec<PromptLogprob>);

    /// Takes one more token, with the times up to it.
    fn step(&mut self, step: Step, timing: StepTiming);

    /// Receives the end of the sequence. If launched steps still use some of its blocks, these are released when the
    /// steps are collected.
    fn end(self: Box<Self>, end: SequenceEnd);
}

/// The times of a sequence up to one of its tokens, and its usage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepTiming {
    pub usage: Usage,
    /// The time from the submission until the sequence first had KV room.
    pub room: Duration,
    /// The time from the submission to the launch of the first step.
    pub queued: Duration,
    /// The time from the launch of the first step to this token.
    pub computed: Duration,
    pub work: StepWork,
}

/// The work of a worker between two tokens of a sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepWork {
    /// The number of steps, the token's own included.
    pub steps: u32,
    /// The number of prompt tokens in these steps, of all sequences.
    pub prefill_tokens: u32,
    /// The number of sequences that decoded in the last of these steps.
    pub rows: u32,
    /// The duration of the last of these steps.
    pub took: Duration,
    /// How often the sequence lost its blocks, so that its KV was computed again.
    pub preemptions: u32,
}

/// How a sequence ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SequenceEnd {
    /// All wanted tokens were sent. `finish` is the finish reason of the last one: `None` if the sequence
    /// continues on another node.
    Finished {
        finish: Option<FinishReason>,
        usage: Usage,
    },
    Failed(Refusal),
}

/// The owner of a sink. It ends the sink exactly once, at the latest when it is dropped.
#[derive(Debug)]
pub(crate) struct SinkGuard {
    /// The sink; `None` once it was ended.
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

    pub(crate) fn prompt_logprobs(&mut self, logprobs: Vec<PromptLogprob>) {
        if let Some(sink) = &mut self.sink {
            sink.prompt_logprobs(logprobs);
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
