//! A step that was launched and is not collected yet.

use engine::PendingStep;
use tokio::time::Instant;

use crate::precedence::SequenceId;
use crate::room::Room;

#[derive(Debug)]
pub(crate) struct LaunchedStep {
    pub(crate) launched: PendingStep,
    /// The sequences in the step, in the batch's order.
    pub(crate) rows: Vec<StepRow>,
    pub(crate) launched_at: Instant,
    /// The time at which a step ends whose duration is only modelled.
    pub(crate) due: Option<Instant>,
    pub(crate) timing: LaunchTiming,
    /// The blocks of sequences that ended or were preempted while this step was running. The step may still
    /// write into them, so they are released when it is collected.
    pub(crate) held: Vec<Room>,
}

/// When a step is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LaunchTiming {
    /// At once, or with prompts.
    Usual,
    /// Delayed until shortly before the end of the previous step. That end then shows the remaining margin.
    Late,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StepRow {
    pub(crate) id: SequenceId,
    pub(crate) n_tokens: usize,
    /// The number of the sequence's tokens before them.
    pub(crate) n_before: usize,
}

impl StepRow {
    /// Returns whether the row is a chunk of a prompt.
    pub(crate) fn is_chunk(&self) -> bool {
        self.n_tokens != 1
    }
}

impl LaunchedStep {
    /// Makes a launched step. `before` is the step that the device runs before it.
    pub(crate) fn new(
        launched: PendingStep,
        rows: Vec<StepRow>,
        now: Instant,
        before: Option<&Self>,
        timing: LaunchTiming,
    ) -> Self {
        let starts_at = before.and_then(|before| before.due).map_or(now, |free| free.max(now));
        let due = launched.modelled_cost().map(|cost| starts_at + cost);
        Self { launched, rows, launched_at: now, due, timing, held: Vec::new() }
    }
}
