//! Where a decoding sequence's steps go: onto the stream to the router.

use std::sync::Arc;

use kv_cache::{BlockLease, LayerFence};
use scheduler::{SINK_SLACK, SequenceEnd, Sink, StepTiming};
use tokio::sync::{mpsc, oneshot};
use types::{KvSpan, Refusal, Step};

/// Steps that may wait for the router. A stream that is not read makes its own sequence wait, and no other.
pub(crate) const STEPS_MAX: usize = 128;

/// The scheduler's end of a stream.
#[derive(Debug)]
pub(crate) struct Steps {
    steps: mpsc::Sender<Step>,
    end: oneshot::Sender<Result<(), Refusal>>,
}

/// Makes a sink, its steps, and the word on how the sequence ended.
pub(crate) fn steps() -> (Steps, mpsc::Receiver<Step>, oneshot::Receiver<Result<(), Refusal>>) {
    let (steps, received) = mpsc::channel(STEPS_MAX);
    let (end, ended) = oneshot::channel();
    (Steps { steps, end }, received, ended)
}

impl Sink for Steps {
    fn has_room(&self) -> bool {
        self.steps.capacity() > SINK_SLACK
    }

    /// The KV is where it will be used: it goes nowhere.
    fn kv(&mut self, _span: KvSpan, _lease: Arc<BlockLease>, _ready: LayerFence) {}

    fn step(&mut self, step: Step, _timing: StepTiming) {
        // Without a reader the ticket is being dropped, and the sequence cancelled.
        let _ = self.steps.try_send(step);
    }

    fn end(self: Box<Self>, end: SequenceEnd) {
        let _ = self.end.send(match end {
            SequenceEnd::Finished { .. } => Ok(()),
            SequenceEnd::Failed(refusal) => Err(refusal),
        });
    }
}
