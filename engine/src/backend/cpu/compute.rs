//! Hot path.
//! The first rank's thread. It computes steps one after the other, and starts the other ranks for each step.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender};

use types::TokenId;

use super::job::{JobRow, StepJob};
use super::rank::{Forwarded, Helper, Outcomes, Rank, Step};
use crate::error::RowError;
use crate::model::ranks::RankFence;
use crate::model::{ModelConfig, Scratch, Tensor};
use crate::step::{SampledToken, SlotId, StepOutput};

/// The state of the compute thread, with the helper threads of the other ranks.
#[derive(Debug)]
pub(super) struct Compute {
    // Fields are dropped in this order, so that helpers that wait for this rank see that it has ended before
    // they are waited for.
    rank: Rank,
    helpers: Vec<Helper>,
    vocab: usize,
    eos_tokens: Vec<TokenId>,
    /// The tokens that the previous step sampled, by slot, for [`crate::step::RowInput::Previous`].
    previous: HashMap<SlotId, TokenId>,
}

impl Compute {
    /// Makes the compute thread's state. `ranks` are all ranks of the model; all except the first get their
    /// own threads.
    pub(super) fn new(ranks: Vec<Rank>, config: &ModelConfig) -> io::Result<Self> {
        let mut ranks = ranks.into_iter();
        let rank = ranks.next().expect("a model has a rank");
        let helpers = ranks.map(Helper::start).collect::<Result<_, _>>()?;
        let (vocab, eos_tokens) = (config.vocab, config.eos_tokens.clone());
        Ok(Self { rank, helpers, vocab, eos_tokens, previous: HashMap::new() })
    }

    /// Runs until the sender of jobs is dropped or a rank has ended. Waits for jobs and for the other ranks.
    pub(super) fn run(mut self, jobs: &Receiver<StepJob>, results: &SyncSender<StepOutput>) {
        let scratch = Scratch::default();
        while let Ok(job) = jobs.recv() {
            let Some(output) = self.step(job, &scratch) else { return };
            if results.send(output).is_err() {
                return;
            }
        }
    }

    fn step(&mut self, job: StepJob, scratch: &Scratch) -> Option<StepOutput> {
        let step = Arc::new(self.resolved(job));
        let output = self.computed(&step, scratch)?;
        self.previous.clear();
        for (row, outcome) in step.rows.iter().zip(&output.rows) {
            if let Ok(Some(sampled)) = outcome {
                self.previous.insert(row.slot, sampled.token);
            }
        }
        Some(output)
    }

    fn resolved(&self, StepJob { mut rows, signal }: StepJob) -> Step {
        let resolved = rows.iter_mut().map(|row| row.resolve(&self.previous, self.vocab)).collect();
        Step { rows, resolved, written: RankFence::new(signal, 1 + self.helpers.len()) }
    }

    /// Runs a step on all ranks. Returns `None` if a rank has ended.
    fn computed(&self, step: &Arc<Step>, scratch: &Scratch) -> Option<StepOutput> {
        self.helpers.iter().try_for_each(|helper| helper.begin(step))?;
        let Forwarded { logits, mut outcomes, prompt_logprobs, routing_leads } =
            self.rank.forward(step, scratch);
        for helper in &self.helpers {
            outcomes = first_errors(outcomes, helper.finish()?);
        }
        let mut outcomes = outcomes.into_iter();
        let mut of_prompts = prompt_logprobs.into_iter();
        let mut outputs = Outputs { compute: self, logits, n_drawn: 0 };
        let draw = |(row, resolved): (&JobRow, &Result<(), RowError>)| {
            resolved.clone()?;
            outputs.draw(row, outcomes.next().expect("every resolved row has an outcome"))
        };
        let rows = step.rows.iter().zip(&step.resolved).map(draw).collect();
        let prompt_logprobs = match step.rows.iter().any(|row| row.prompt_logprobs.is_some()) {
            true => step
                .resolved
                .iter()
                .map(|row| row.as_ref().ok().and_then(|()| of_prompts.next()).unwrap_or_default())
                .collect(),
            false => Vec::new(),
        };
        Some(StepOutput { rows, prompt_logprobs, routing_leads })
    }
}

/// Merges the outcomes of two ranks: a row fails if it fails on any rank.
fn first_errors(ours: Outcomes, theirs: Outcomes) -> Outcomes {
    ours.into_iter().zip(theirs).map(|(ours, theirs)| ours.and(theirs)).collect()
}

/// The logits of a pass. Tokens are sampled from them in the order of the rows that need one.
struct Outputs<'a> {
    compute: &'a Compute,
    logits: Tensor,
    n_drawn: usize,
}

impl Outputs<'_> {
    fn draw(
        &mut self,
        row: &JobRow,
        outcome: Result<(), RowError>,
    ) -> Result<Option<SampledToken>, RowError> {
        let Some(spec) = &row.spec else { return outcome.map(|()| None) };
        let nth = self.n_drawn;
        self.n_drawn += 1;
        outcome?;
        let Compute { rank, eos_tokens, .. } = self.compute;
        spec.draw(rank.processor(), self.logits.row_mut(nth), row.next_position(), eos_tokens).map(Some)
    }
}
