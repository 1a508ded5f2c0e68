//! The output of a decoding sequence: its steps, on the stream to the router.

use std::sync::Arc;

use kv_cache::{BlockLease, LayerFence};
use scheduler::{SINK_SLACK, SequenceEnd, Sink, StepTiming};
use tokio::sync::{mpsc, oneshot};
use types::{KvSpan, Refusal, Step};

/// The number of steps that may wait for the router. A slow reader stops only its own sequence.
pub(crate) const STEPS_MAX: usize = 128;

/// The scheduler's end of the stream of steps.
#[derive(Debug)]
pub(crate) struct StepSender {
    steps: mpsc::Sender<(Step, StepTiming)>,
    end: oneshot::Sender<Result<(), Refusal>>,
}

/// The reader's end of a stream of steps.
pub(crate) type StepReceiver = mpsc::Receiver<(Step, StepTiming)>;

/// Makes a sink, the receiver of its steps, and the receiver of the sequence's end.
pub(crate) fn steps() -> (StepSender, StepReceiver, oneshot::Receiver<Result<(), Refusal>>) {
    let (steps, received) = mpsc::channel(STEPS_MAX);
    let (end, ended) = oneshot::channel();
    (StepSender { steps, end }, received, ended)
}

impl Sink for StepSender {
    fn has_room(&self) -> bool {
        self.steps.capacity() > SINK_SLACK
    }

    /// Ignores the KV, which is already on the node that uses it.
    fn kv(&mut self, _span: KvSpan, _lease: Arc<BlockLease>, _ready: LayerFence) {}

    fn step(&mut self, step: Step, timing: StepTiming) {
        // Without a reader the step is dropped: the sequence's ticket is dropped too, which cancels it.
        let _ = self.steps.try_send((step, timing));
    }

    fn end(self: Box<Self>, end: SequenceEnd) {
        let _ = self.end.send(match end {
            SequenceEnd::Finished { .. } => Ok(()),
            SequenceEnd::Failed(refusal) => Err(refusal),
        });
    }
}
