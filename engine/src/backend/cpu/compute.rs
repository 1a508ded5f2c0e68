//! Hot path.
//! The thread that computes steps, one after the other: the first rank's, which has the others compute with it.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender};

use kv_cache::FenceSignal;
use types::{BlockIdx, TokenId};

use super::rank::{Helper, Outcomes, Rank, Step};
use crate::error::RowError;
use crate::model::ranks::Written;
use crate::model::{ModelConfig, Scratch, Tensor};
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
    // Fields are dropped in their order: helpers that wait for this rank learn that it is gone before they are waited for.
    rank: Rank,
    helpers: Vec<Helper>,
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

    pub(super) fn start(&self) -> usize {
        self.start
    }

    pub(super) fn tables(&self) -> &[Vec<BlockIdx>] {
        &self.tables
    }

    /// Whether a token is drawn after it.
    pub(super) fn is_wanted(&self) -> bool {
        self.drawing.is_some()
    }

    pub(super) fn tokens(&self) -> &[TokenId] {
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
    /// `ranks` are all of the model's. All but the first get a thread each.
    pub(super) fn new(ranks: Vec<Rank>, config: &ModelConfig) -> io::Result<Self> {
        let mut ranks = ranks.into_iter();
        let rank = ranks.next().expect("a model has a rank");
        let helpers = ranks.map(Helper::start).collect::<Result<_, _>>()?;
        let (vocab, eos_tokens) = (config.vocab, config.eos_tokens.clone());
        Ok(Self { rank, helpers, vocab, eos_tokens, previous: HashMap::new() })
    }

    /// Until no more jobs can come, or a rank is gone. It waits where there is no work, and for the other ranks.
    pub(super) fn run(mut self, jobs: &Receiver<Job>, results: &SyncSender<StepOutput>) {
        let scratch = Scratch::default();
        while let Ok(job) = jobs.recv() {
            let Some(output) = self.step(job, &scratch) else { return };
            if results.send(output).is_err() {
                return;
            }
        }
    }

    fn step(&mut self, job: Job, scratch: &Scratch) -> Option<StepOutput> {
        let step = Arc::new(self.resolved(job));
        let rows = self.outcomes(&step, scratch)?;
        self.previous.clear();
        for (row, outcome) in step.rows.iter().zip(&rows) {
            if let Ok(Some(sampled)) = outcome {
                self.previous.insert(row.slot, sampled.token);
            }
        }
        Some(StepOutput { rows })
    }

    fn resolved(&self, Job { mut rows, signal }: Job) -> Step {
        let resolved = rows.iter_mut().map(|row| row.resolve(&self.previous, self.vocab)).collect();
        Step { rows, resolved, written: Written::new(signal, 1 + self.helpers.len()) }
    }

    /// `None`: a rank is gone.
    fn outcomes(
        &self,
        step: &Arc<Step>,
        scratch: &Scratch,
    ) -> Option<Vec<Result<Option<Sampled>, RowError>>> {
        self.helpers.iter().try_for_each(|helper| helper.begin(step))?;
        let (logits, mut outcomes) = self.rank.forward(step, scratch);
        for helper in &self.helpers {
            outcomes = first_errors(outcomes, helper.finish()?);
        }
        let mut outcomes = outcomes.into_iter();
        let mut outputs = Outputs { compute: self, logits, n_drawn: 0 };
        let draw = |(row, resolved): (&JobRow, &Result<(), RowError>)| {
            resolved.clone()?;
            outputs.draw(row, outcomes.next().expect("every resolved row passed"))
        };
        Some(step.rows.iter().zip(&step.resolved).map(draw).collect())
    }
}

/// A row has failed if it has on any rank.
fn first_errors(ours: Outcomes, theirs: Outcomes) -> Outcomes {
    ours.into_iter().zip(theirs).map(|(ours, theirs)| ours.and(theirs)).collect()
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
        let Compute { rank, eos_tokens, .. } = self.compute;
        drawing.draw(rank.processor(), self.logits.row_mut(nth), row.next_position(), eos_tokens).map(Some)
    }
}
