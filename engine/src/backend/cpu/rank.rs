//! Hot path.
//! One rank of a model on the CPU: its share of each step, with its share of KV.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use kernels::cpu::{Processor, Rotation};
use kv_cache::KvMemory;
use types::step::PromptLogprob;

use super::job::{JobRow, OwnedPromptTargets};
use crate::error::RowError;
use crate::model::ActivationFormat;
use crate::model::pass::PassParts;
use crate::model::ranks::{RankFence, RankHandle};
use crate::model::{Decoder, ModelConfig, Pass, PassRow, Scratch, Tensor};
use crate::sampler::prompt_logprob;

/// The number of tokens whose logits are computed at once for log-probabilities of a prompt. It bounds their memory: each
/// row of logits is as long as the vocabulary.
const LOGITS_ROWS_MAX: usize = 32;

/// The outcomes of the rows that take part in a step.
pub(super) type Outcomes = Vec<Result<(), RowError>>;

/// A step that all ranks compute.
#[derive(Debug)]
pub(super) struct Step {
    pub(super) rows: Vec<JobRow>,
    /// The outcome of each row so far: an error for a row that takes no part.
    pub(super) resolved: Outcomes,
    pub(super) written: RankFence,
}

/// The results of a step's rows that take part.
#[derive(Debug)]
pub(super) struct Forwarded {
    /// (wanted, vocab)
    pub(super) logits: Tensor,
    pub(super) outcomes: Outcomes,
    /// The log-probabilities of each row's prompt tokens; none for a row that does not ask, and on other ranks than the
    /// first.
    pub(super) prompt_logprobs: Vec<Vec<PromptLogprob>>,
    /// See [`StepOutput::routing_leads`](crate::step::StepOutput::routing_leads).
    pub(super) routing_leads: Vec<f32>,
}

/// The state of a rank's thread.
#[derive(Debug)]
pub(super) struct Rank {
    processor: Processor,
    model: Arc<Decoder>,
    memory: KvMemory,
    frequencies: Arc<[f32]>,
    turn_factor: f32,
    vocab: usize,
    activations: ActivationFormat,
    seat: RankHandle,
}

/// A rank with its own thread. Dropping it waits for the thread, which finishes its current step.
#[derive(Debug)]
pub(super) struct Helper {
    /// The queue to the rank's thread; `None` after the thread was told to end.
    steps: Option<SyncSender<Arc<Step>>>,
    outcomes: Receiver<Outcomes>,
    thread: Option<thread::JoinHandle<()>>,
}

// === impl Rank ===

impl Rank {
    /// Creates all ranks of a model, one for each processor.
    pub(super) fn all(
        processors: Vec<Processor>,
        model: &Arc<Decoder>,
        memory: &KvMemory,
        config: &ModelConfig,
        activations: ActivationFormat,
    ) -> Vec<Self> {
        let frequencies: Arc<[f32]> = config.rope.frequencies(config.head_dim).into();
        let rank = |(processor, seat)| Self {
            processor,
            model: Arc::clone(model),
            memory: memory.clone(),
            frequencies: Arc::clone(&frequencies),
            turn_factor: config.rope.turn_factor(),
            vocab: config.vocab,
            activations,
            seat,
        };
        let seats = RankHandle::all(memory.n_ranks());
        processors.into_iter().zip(seats).map(rank).collect()
    }

    pub(super) fn processor(&self) -> &Processor {
        &self.processor
    }

    pub(super) fn forward(&self, step: &Step, scratch: &Scratch) -> Forwarded {
        let parts = PassParts {
            processor: &self.processor,
            scratch,
            memory: &self.memory,
            written: &step.written,
            rank: &self.seat,
            rotation: Rotation { frequencies: &self.frequencies, factor: self.turn_factor },
            activations: self.activations,
        };
        let passing = step.rows.iter().zip(&step.resolved).filter(|(_, ok)| ok.is_ok());
        let mut pass = Pass::new(parts, passing.map(|(row, _)| pass_row(row)).collect());
        let x = self.model.forward(&mut pass);
        let logits = self.logits(&pass.wanted(&x), &pass);
        let mut of_prompts = Vec::with_capacity(step.rows.len());
        let mut end = 0;
        for (row, _) in step.rows.iter().zip(&step.resolved).filter(|(_, ok)| ok.is_ok()) {
            let start = end;
            end += row.tokens().len();
            of_prompts.push(match &row.prompt_logprobs {
                Some(targets) => self.prompt_logprobs(&x, start, targets, &pass),
                None => Ok(Vec::new()),
            });
        }
        let routing_leads = pass.take_routing_leads();
        let (mut outcomes, mut prompt_logprobs) = (Outcomes::new(), Vec::with_capacity(of_prompts.len()));
        for (outcome, of_prompt) in pass.into_outcomes().zip(of_prompts) {
            outcomes.push(outcome.and(of_prompt.as_ref().map(|_| ()).map_err(RowError::clone)));
            prompt_logprobs.push(of_prompt.unwrap_or_default());
        }
        Forwarded { logits, outcomes, prompt_logprobs, routing_leads }
    }

    /// Computes the logits of `rows`, gathered from all ranks.
    fn logits(&self, rows: &Tensor, pass: &Pass<'_>) -> Tensor {
        pass.whole(self.model.logits(rows, pass), self.vocab)
    }

    /// Computes the log-probabilities of the tokens that follow those of one row, which begins at `start` in `x`. All ranks
    /// compute logits, and the first one the log-probabilities.
    fn prompt_logprobs(
        &self,
        x: &Tensor,
        start: usize,
        targets: &OwnedPromptTargets,
        pass: &Pass<'_>,
    ) -> Result<Vec<PromptLogprob>, RowError> {
        let (mut all, mut outcome) = (Vec::new(), Ok(()));
        for (nth, tokens) in targets.tokens.chunks(LOGITS_ROWS_MAX).enumerate() {
            let first = start + nth * LOGITS_ROWS_MAX;
            let logits = self.logits(&pass.neighbours(x, first..first + tokens.len()), pass);
            if self.seat.nth() == 0 {
                for (row, token) in tokens.iter().enumerate() {
                    match prompt_logprob(&self.processor, logits.row(row), *token, targets.n_top) {
                        Ok(logprob) => all.push(logprob),
                        Err(error) => outcome = Err(error),
                    }
                }
            }
        }
        outcome.map(|()| all)
    }

    /// Runs until the sender of steps is dropped.
    fn run(self, steps: &Receiver<Arc<Step>>, outcomes: &SyncSender<Outcomes>) {
        let scratch = Scratch::default();
        while let Ok(step) = steps.recv() {
            let of_rows = self.forward(&step, &scratch).outcomes;
            // `step` is dropped before the answer, because its last holder drops the fence, and that must be
            // the caller of `collect`.
            drop(step);
            if outcomes.send(of_rows).is_err() {
                return;
            }
        }
    }
}

fn pass_row(row: &JobRow) -> PassRow<'_> {
    PassRow {
        tokens: row.tokens(),
        start: row.start(),
        tables: row.tables(),
        is_wanted: row.is_wanted(),
        outcome: Ok(()),
    }
}

// === impl Helper ===

impl Helper {
    pub(super) fn start(rank: Rank) -> io::Result<Self> {
        let (steps, steps_in) = sync_channel(1);
        let (outcomes_out, outcomes) = sync_channel(1);
        let thread = thread::Builder::new().name(format!("rank-{}", rank.seat.nth()));
        let thread = thread.spawn(move || rank.run(&steps_in, &outcomes_out))?;
        Ok(Self { steps: Some(steps), outcomes, thread: Some(thread) })
    }

    /// Starts the rank's share. Returns `None` if the rank has ended.
    pub(super) fn begin(&self, step: &Arc<Step>) -> Option<()> {
        self.steps.as_ref()?.send(Arc::clone(step)).ok()
    }

    /// Returns the outcomes of the rows. Returns `None` if the rank has ended.
    pub(super) fn finish(&self) -> Option<Outcomes> {
        self.outcomes.recv().ok()
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        self.steps = None;
        if let Some(thread) = self.thread.take() {
            // If the thread panicked, the panic is logged and the other ranks have failed, so the result is
            // ignored.
            let _ = thread.join();
        }
    }
}
