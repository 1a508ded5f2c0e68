//! Hot path.
//! The thread that computes steps, one after the other.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, SyncSender};

use kernels::cpu::Processor;
use kv_cache::{FenceSignal, KvMemory};
use types::{BlockIdx, TokenId};

use crate::error::RowError;
use crate::model::pass::PassParts;
use crate::model::{Model, ModelConfig, Pass, PassRow, Scratch, Tensor};
use crate::sampler::Drawing;
use crate::step::{Row, RowInput, Sampled, SlotId, StepOutput};

/// A step on its way to the thread.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) rows: Vec<JobRow>,
    pub(super) signal: FenceSignal,
}

/// A row, without a lifetime.
#[derive(Debug)]
pub(super) struct JobRow {
    slot: SlotId,
    input: Input,
    start: usize,
    tables: Vec<Vec<BlockIdx>>,
    drawing: Option<Drawing>,
}

#[derive(Debug)]
enum Input {
    Tokens(Vec<TokenId>),
    Previous,
}

/// What the thread owns.
#[derive(Debug)]
pub(super) struct Compute {
    processor: Processor,
    model: Box<dyn Model>,
    memory: KvMemory,
    frequencies: Vec<f32>,
    vocab: usize,
    eos_tokens: Vec<TokenId>,
    /// What the step before sampled: what [`RowInput::Previous`] means.
    previous: HashMap<SlotId, TokenId>,
}

// === impl JobRow ===

impl JobRow {
    pub(super) fn of(row: &Row<'_>) -> Self {
        Self {
            slot: row.slot,
            input: match row.input {
                RowInput::Tokens(tokens) => Input::Tokens(tokens.to_vec()),
                RowInput::Previous => Input::Previous,
            },
            start: row.start,
            tables: row.tables.iter().map(|table| table.to_vec()).collect(),
            drawing: row.sample.as_ref().map(Drawing::of),
        }
    }

    /// Puts the token in flight in its place.
    fn resolve(&mut self, previous: &HashMap<SlotId, TokenId>, vocab: usize) -> Result<(), RowError> {
        if let Input::Previous = self.input {
            let token = *previous.get(&self.slot).ok_or(RowError::NoTokenInFlight)?;
            self.input = Input::Tokens(vec![token]);
            self.drawing.iter_mut().for_each(|drawing| drawing.remember(token));
        }
        let unknown = self.tokens().iter().find(|token| token.0 as usize >= vocab);
        unknown.map_or(Ok(()), |token| Err(RowError::UnknownToken { token: token.0, vocab }))
    }

    fn tokens(&self) -> &[TokenId] {
        match &self.input {
            Input::Tokens(tokens) => tokens,
            Input::Previous => &[],
        }
    }

    /// Where the token goes that this row draws.
    fn next_position(&self) -> usize {
        self.start + self.tokens().len()
    }
}

// === impl Compute ===

impl Compute {
    pub(super) fn new(
        processor: Processor,
        model: Box<dyn Model>,
        memory: KvMemory,
        config: &ModelConfig,
    ) -> Self {
        Self {
            processor,
            model,
            memory,
            frequencies: config.rope.frequencies(config.head_dim),
            vocab: config.vocab,
            eos_tokens: config.eos_tokens.clone(),
            previous: HashMap::new(),
        }
    }

    /// Until no more jobs can come. It waits where there is no work, and nowhere else.
    pub(super) fn run(mut self, jobs: &Receiver<Job>, results: &SyncSender<StepOutput>) {
        let scratch = Scratch::default();
        while let Ok(job) = jobs.recv() {
            let output = self.step(job, &scratch);
            if results.send(output).is_err() {
                return;
            }
        }
    }

    fn step(&mut self, mut job: Job, scratch: &Scratch) -> StepOutput {
        let rows = self.outcomes(&mut job, scratch);
        self.previous.clear();
        for (row, outcome) in job.rows.iter().zip(&rows) {
            if let Ok(Some(sampled)) = outcome {
                self.previous.insert(row.slot, sampled.token);
            }
        }
        StepOutput { rows }
    }

    fn outcomes(&self, job: &mut Job, scratch: &Scratch) -> Vec<Result<Option<Sampled>, RowError>> {
        let Job { rows, signal } = job;
        let resolved: Vec<Result<(), RowError>> =
            rows.iter_mut().map(|row| row.resolve(&self.previous, self.vocab)).collect();
        let passing = rows.iter().zip(&resolved).filter(|(_, ok)| ok.is_ok()).map(|(row, _)| pass_row(row));
        let (logits, mut outcomes) = self.forward(passing.collect(), signal, scratch);
        let mut outputs = Outputs { compute: self, logits, n_drawn: 0 };
        let draw = |(row, resolved): (&JobRow, Result<(), RowError>)| {
            resolved?;
            outputs.draw(row, outcomes.next().expect("every resolved row passed"))
        };
        rows.iter().zip(resolved).map(draw).collect()
    }

    /// Logits (wanted, vocab), and how each row fared.
    fn forward<'a>(
        &'a self,
        rows: Vec<PassRow<'a>>,
        signal: &'a FenceSignal,
        scratch: &'a Scratch,
    ) -> (Tensor, impl Iterator<Item = Result<(), RowError>> + use<'a>) {
        let parts = PassParts {
            processor: &self.processor,
            scratch,
            memory: &self.memory,
            signal,
            frequencies: &self.frequencies,
        };
        let mut pass = Pass::new(parts, rows);
        let logits = self.model.forward(&mut pass);
        (logits, pass.into_outcomes())
    }
}

fn pass_row(row: &JobRow) -> PassRow<'_> {
    PassRow {
        tokens: row.tokens(),
        start: row.start,
        tables: &row.tables,
        is_wanted: row.drawing.is_some(),
        outcome: Ok(()),
    }
}

/// A pass's logits, drawn from in the order of the rows that wanted them.
struct Outputs<'a> {
    compute: &'a Compute,
    logits: Tensor,
    n_drawn: usize,
}

impl Outputs<'_> {
    fn draw(&mut self, row: &JobRow, outcome: Result<(), RowError>) -> Result<Option<Sampled>, RowError> {
        let Some(drawing) = &row.drawing else { return outcome.map(|()| None) };
        let nth = self.n_drawn;
        self.n_drawn += 1;
        outcome?;
        let Compute { processor, eos_tokens, .. } = self.compute;
        drawing.draw(processor, self.logits.row_mut(nth), row.next_position(), eos_tokens).map(Some)
    }
}
