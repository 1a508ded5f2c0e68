//! Hot path.
//! One rank of a stage on the CPU: its share of the stage's part of each step, with its share of KV.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use bytes::Bytes;
use kernels::cpu::{Processor, Rotation};
use kv_cache::KvMemory;
use types::step::PromptLogprob;

use super::job::{JobRow, OwnedPromptTargets};
use super::loading::LoadedModel;
use crate::backend::remote::StageInput;
use crate::error::RowError;
use crate::model::ActivationFormat;
use crate::model::pass::PassParts;
use crate::model::ranks::{OtherRanks, RankFence, RankHandle};
use crate::model::{Decoder, ModelConfig, Pass, PassRow, Scratch, Tensor};
use crate::sampler::prompt_logprob;

/// The number of tokens whose logits are computed at once for log-probabilities of a prompt. It bounds their memory: each
/// row of logits is as long as the vocabulary.
const LOGITS_ROWS_MAX: usize = 32;

/// The outcomes of the rows that take part in a step.
pub(super) type Outcomes = Vec<Result<(), RowError>>;

/// A step that all ranks of a stage compute. The stages pass it on.
#[derive(Debug)]
pub(super) struct Step {
    pub(super) rows: Vec<JobRow>,
    /// For each row whether it takes part: an error if it was refused before the first layer.
    pub(super) resolved: Outcomes,
    /// A process that computes a share of the step holds a clone until its results are there.
    pub(super) written: Arc<RankFence>,
    /// The outcomes of the rows that take part, after the stages so far.
    pub(super) outcomes: Outcomes,
    /// The rows that the stage before computed: (tokens, hidden). The first stage has none.
    pub(super) hidden: Vec<f32>,
    /// See [`StepOutput::routing_leads`](crate::step::StepOutput::routing_leads). They are those of the stages so far.
    pub(super) routing_leads: Vec<f32>,
}

/// The results of a step's rows that take part.
#[derive(Debug)]
pub(super) struct Forwarded {
    /// (tokens, hidden)
    pub(super) x: Tensor,
    pub(super) outcomes: Outcomes,
    pub(super) routing_leads: Vec<f32>,
    /// What the last stage computes after its layers.
    pub(super) last: Option<AfterLayers>,
}

/// The results after the last layer.
#[derive(Debug)]
pub(super) struct AfterLayers {
    /// (wanted, vocab)
    pub(super) logits: Tensor,
    /// The log-probabilities of each row's prompt tokens; none for a row that does not ask, and on other ranks than the
    /// first.
    pub(super) prompt_logprobs: Vec<Vec<PromptLogprob>>,
}

/// The place of a stage in the model.
#[derive(Clone, Debug)]
pub(super) struct StagePlace {
    pub(super) nth: usize,
    pub(super) layers: Range<usize>,
    pub(super) n_layers: usize,
}

/// The state of a rank's thread.
#[derive(Debug)]
pub(super) struct Rank {
    processor: Processor,
    model: Arc<Decoder>,
    memory: KvMemory,
    frequencies: Arc<[f32]>,
    turn_factor: f32,
    hidden: usize,
    vocab: usize,
    activations: ActivationFormat,
    stage: StagePlace,
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
    /// Creates all ranks of a stage in this process, one for each processor. `others` has the ranks of other processes.
    pub(super) fn all(
        processors: Vec<Processor>,
        model: &LoadedModel,
        memory: &KvMemory,
        config: &ModelConfig,
        stage: &StagePlace,
        others: Option<Box<dyn OtherRanks>>,
    ) -> Vec<Self> {
        let frequencies: Arc<[f32]> = config.rope.frequencies(config.head_dim).into();
        let rank = |(processor, seat)| Self {
            processor,
            model: Arc::clone(&model.decoder),
            memory: memory.clone(),
            frequencies: Arc::clone(&frequencies),
            turn_factor: config.rope.turn_factor(),
            hidden: config.hidden,
            vocab: config.vocab,
            activations: model.activations,
            stage: stage.clone(),
            seat,
        };
        let seats = RankHandle::of_process(memory.n_ranks(), memory.ranks(), others);
        processors.into_iter().zip(seats).map(rank).collect()
    }

    pub(super) fn processor(&self) -> &Processor {
        &self.processor
    }

    /// Returns whether other processes compute the next stage, and this rank is the one whose rows go there.
    pub(super) fn gives_rows(&self) -> bool {
        self.seat.nth() == 0 && self.stage.layers.end < self.stage.n_layers
    }

    /// Computes the rank's share of the stage's layers, and of the output after the last layer.
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
        let rows = step.passing().zip(&step.outcomes).map(|(row, outcome)| pass_row(row, outcome.clone()));
        let mut pass = Pass::new(parts, rows.collect());
        let mut x = match self.stage.layers.start {
            0 => self.model.embed(&pass),
            _ => pass.received(&step.hidden, self.hidden),
        };
        if !step.routing_leads.is_empty() {
            pass.note_routing_leads(&step.routing_leads);
        }
        self.model.forward(self.stage.layers.clone(), &mut x, &mut pass);
        let is_last = self.stage.layers.end == self.stage.n_layers;
        let (last, of_prompts) =
            if is_last { self.after_layers(step, &x, &pass) } else { (None, Vec::new()) };
        let routing_leads = pass.take_routing_leads();
        let mut outcomes: Outcomes = pass.into_outcomes().collect();
        for (outcome, of_prompt) in outcomes.iter_mut().zip(of_prompts) {
            *outcome = std::mem::replace(outcome, Ok(())).and(of_prompt);
        }
        Forwarded { x, outcomes, routing_leads, last }
    }

    /// Computes logits and the log-probabilities of prompts, with the outcome of each row.
    fn after_layers(&self, step: &Step, x: &Tensor, pass: &Pass<'_>) -> (Option<AfterLayers>, Outcomes) {
        let logits = self.logits(&pass.wanted(x), pass);
        let (mut outcomes, mut prompt_logprobs) = (Outcomes::new(), Vec::with_capacity(step.rows.len()));
        let mut end = 0;
        for row in step.passing() {
            let start = end;
            end += row.tokens().len();
            let of_prompt = match &row.prompt_logprobs {
                Some(targets) => self.prompt_logprobs(x, start, targets, pass),
                None => Ok(Vec::new()),
            };
            outcomes.push(of_prompt.as_ref().map(|_| ()).map_err(RowError::clone));
            prompt_logprobs.push(of_prompt.unwrap_or_default());
        }
        (Some(AfterLayers { logits, prompt_logprobs }), outcomes)
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
            // `step` is dropped before the answer, because the first rank passes it on.
            drop(step);
            if outcomes.send(of_rows).is_err() {
                return;
            }
        }
    }
}

impl Step {
    /// Returns the message with which another process computes a share of the step. `hidden` are the rows of the
    /// stage before.
    pub(super) fn input(&self, hidden: Bytes) -> StageInput {
        let rows =
            self.passing().zip(&self.outcomes).map(|(row, outcome)| row.for_process(outcome)).collect();
        StageInput { rows, hidden, routing_leads: self.routing_leads.clone() }
    }

    /// Returns the rows that take part.
    pub(super) fn passing(&self) -> impl Iterator<Item = &JobRow> {
        self.rows.iter().zip(&self.resolved).filter(|(_, resolved)| resolved.is_ok()).map(|(row, _)| row)
    }
}

fn pass_row(row: &JobRow, outcome: Result<(), RowError>) -> PassRow<'_> {
    PassRow {
        tokens: row.tokens(),
        start: row.start(),
        tables: row.tables(),
        is_wanted: row.is_wanted(),
        outcome,
    }
}

// === impl Helper ===

impl Helper {
    pub(super) fn start(rank: Rank) -> io::Result<Self> {
        let (steps, steps_in) = sync_channel(1);
        let (outcomes_out, outcomes) = sync_channel(1);
        let thread =
            thread::Builder::new().name(format!("stage-{}-rank-{}", rank.stage.nth, rank.seat.nth()));
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
