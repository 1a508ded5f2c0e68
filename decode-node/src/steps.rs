//! The output of a decoding sequence: its steps, on the stream to the router.

use std::sync::Arc;

use kv_cache::{BlockLease, LayerFence};
use scheduler::{SINK_SLACK, SequenceEnd, Sink, StepTiming};
use tokio::sync::{mpsc, oneshot};
use types::step::PromptLogprob;
use types::{KvSpan, Refusal, Step};

/// The number of steps that may wait for the router. A slow reader stops only its own sequence.
pub(crate) const STEPS_MAX: usize = 128;

/// A step with its timing. The first one has the log-probabilities of a prompt that asks for them.
#[derive(Debug)]
pub(crate) struct SentStep {
    pub(crate) step: Step,
    pub(crate) timing: StepTiming,
    pub(crate) prompt_logprobs: Vec<PromptLogprob>,
}

/// The scheduler's end of the stream of steps.
#[derive(Debug)]
pub(crate) struct StepSender {
    steps: mpsc::Sender<SentStep>,
    /// The log-probabilities of the prompt, until the first step.
    prompt_logprobs: Vec<PromptLogprob>,
    end: oneshot::Sender<Result<(), Refusal>>,
}

/// The reader's end of a stream of steps.
pub(crate) type StepReceiver = mpsc::Receiver<SentStep>;

/// Makes a sink, the receiver of its steps, and the receiver of the sequence's end.
pub(crate) fn steps() -> (StepSender, StepReceiver, oneshot::Receiver<Result<(), Refusal>>) {
    let (steps, received) = mpsc::channel(STEPS_MAX);
    let (end, ended) = oneshot::channel();
    (StepSender { steps, prompt_logprobs: Vec::new(), end }, received, ended)
}

impl Sink for StepSender {
    fn has_room(&self) -> bool {
        self.steps.capacity() > SINK_SLACK
    }

    /// Ignores the KV, which is already on the node that uses it.
    fn kv(&mut self, _span: KvSpan, _lease: Arc<BlockLease>, _ready: LayerFence) {}

    fn prompt_logprobs(&mut self, logprobs: Vec<PromptLogprob>) {
        self.prompt_logprobs = logprobs;
    }

    fn step(&mut self, step: Step, timing: StepTiming) {
        // Without a reader the step is dropped: the sequence's ticket is dropped too, which cancels it.
        let prompt_logprobs = std::mem::take(&mut self.prompt_logprobs);
        let _ = self.steps.try_send(SentStep { step, timing, prompt_logprobs });
    }

    fn end(self: Box<Self>, end: SequenceEnd) {
        let _ = self.end.send(match end {
            SequenceEnd::Finished { .. } => Ok(()),
            SequenceEnd::Failed(refusal) => Err(refusal),
        });
    }
}
