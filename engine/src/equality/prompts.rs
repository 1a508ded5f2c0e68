//! Log-probabilities of prompts. A prompt and its continuation by the reference count as one prompt here.

use std::iter;
use std::ops::Range;

use types::TokenId;
use types::step::PromptLogprob;

use super::script::{Piece, Script, best, collect_all, launch};
use super::{CompareError, Comparison, Tolerance, Truth, TruthStep};
use crate::backend::Backend;
use crate::step::{PromptTargets, RowInput, StepOutput};

/// The number of alternatives that are compared at each position.
const N_TOP: u8 = 20;
/// The number of tokens of a prompt in a large batch, at most, and of the batch, at least: more than the logits that a GPU
/// computes together.
const CROWD_TOKENS: usize = 500;

/// The reference's log-probabilities of one prompt.
#[derive(Clone, Debug)]
pub(super) struct PromptTruth {
    tokens: Vec<TokenId>,
    /// One position for each token from the second on.
    places: Vec<TruthPlace>,
}

#[derive(Clone, Debug)]
pub(super) struct TruthPlace {
    pub(super) token: TokenId,
    pub(super) own: PromptLogprob,
    /// The best tokens, and the prompt's token if it is not among them.
    pub(super) step: TruthStep,
}

/// Computes the reference's log-probabilities of the prompts; empty if it has none.
pub(super) fn truths(
    reference: &mut dyn Backend,
    truths: &[Truth],
) -> Result<Vec<PromptTruth>, CompareError> {
    let Some(n_top) = reference.prompt_top_max() else { return Ok(Vec::new()) };
    truths.iter().map(|truth| PromptTruth::of(reference, truth.tokens(), n_top)).collect()
}

impl PromptTruth {
    fn of(reference: &mut dyn Backend, tokens: Vec<TokenId>, n_top: u8) -> Result<Self, CompareError> {
        let launched = launch(reference, 1, &[piece(&tokens, 0, 0..tokens.len(), n_top)])?;
        let StepOutput { prompt_logprobs, routing_leads, .. } =
            collect_all(reference, "the reference", launched)?;
        let leads = routing_leads.into_iter().chain(iter::repeat(f32::INFINITY));
        let of_tokens = prompt_logprobs.into_iter().flatten().zip(leads).zip(&tokens[1..]);
        let place = |((own, routing_lead), token): ((PromptLogprob, f32), &TokenId)| {
            let mut best = own.logprobs.top.clone();
            if best.iter().all(|one| one.0 != *token) {
                best.push((*token, own.logprobs.chosen));
            }
            TruthPlace { token: *token, own, step: TruthStep { best, routing_lead } }
        };
        Ok(Self { places: of_tokens.map(place).collect(), tokens })
    }

    /// Returns the positions of the targets of the row with these tokens.
    fn places(&self, row: Range<usize>) -> &[TruthPlace] {
        &self.places[row.start..row.end.min(self.places.len())]
    }
}

impl Script<'_> {
    pub(super) fn prompts(&mut self, truths: &[PromptTruth]) -> Result<(), CompareError> {
        if self.backend.prompt_top_max().is_none() {
            return Ok(());
        }
        for truth in truths {
            self.prompt_in_chunks("prompt alone", truth, truth.tokens.len())?;
            self.prompt_in_chunks("prompt in chunks", truth, 7)?;
        }
        self.prompts_together(truths)
    }

    /// Computes a prompt in chunks. The next chunk is launched before the previous one is collected.
    fn prompt_in_chunks(
        &mut self,
        company: &'static str,
        truth: &PromptTruth,
        chunk: usize,
    ) -> Result<(), CompareError> {
        let n_tokens = truth.tokens.len();
        let mut in_flight = None;
        for start in (0..n_tokens).step_by(chunk) {
            let row = start..(start + chunk).min(n_tokens);
            let launched = launch(self.backend, 1, &[piece(&truth.tokens, 0, row.clone(), N_TOP)])?;
            if let Some((row, step)) = in_flight.replace((row, launched)) {
                let output = collect_all(self.backend, company, step)?;
                self.see_prompts(company, &[InRow { truth, row, n_top: N_TOP }], output);
            }
        }
        let Some((row, step)) = in_flight else { return Ok(()) };
        let output = collect_all(self.backend, company, step)?;
        self.see_prompts(company, &[InRow { truth, row, n_top: N_TOP }], output);
        Ok(())
    }

    /// Computes many prompts in one step, with different numbers of alternatives. Each prompt's last row also samples a
    /// token, which must be the likeliest one there.
    fn prompts_together(&mut self, truths: &[PromptTruth]) -> Result<(), CompareError> {
        let company = "prompts together";
        let mut rows: Vec<InRow<'_>> = Vec::new();
        let (mut n_tokens, n_tops) = (0, [N_TOP, 0, 3]);
        let short: Vec<&PromptTruth> =
            truths.iter().filter(|truth| truth.tokens.len() <= CROWD_TOKENS).collect();
        let tokens: Vec<Vec<TokenId>> = short.iter().map(|truth| truth.tokens.clone()).collect();
        let n_rows_max = self.crowd(&tokens);
        for (truth, n_top) in short.iter().cycle().zip(n_tops.into_iter().cycle()) {
            if n_tokens >= CROWD_TOKENS || rows.len() == n_rows_max {
                break;
            }
            // The last token is left out, so that the token after the row is known.
            let row = 0..truth.tokens.len() - 1;
            n_tokens += row.len();
            rows.push(InRow { truth, row, n_top });
        }
        let pieces: Vec<Piece<'_>> = rows
            .iter()
            .enumerate()
            .map(|(nth, InRow { truth, row, n_top })| Piece {
                draws: Some(true),
                ..piece(&truth.tokens, nth, row.clone(), *n_top)
            })
            .collect();
        let launched = launch(self.backend, pieces.len(), &pieces)?;
        let output = collect_all(self.backend, company, launched)?;
        for (row, sampled) in rows.iter().zip(&output.rows) {
            let expected = &row.truth.places[row.row.end - 1];
            let (place, sampled) = (row.place(company, row.row.end - 1), sampled.clone().ok().flatten());
            let found = best(sampled);
            let token = found.first().map(|(token, _)| *token);
            self.comparison.see(&place, &expected.step, token, &found, self.tolerance);
        }
        self.see_prompts(company, &rows, output);
        Ok(())
    }

    fn see_prompts(&mut self, company: &str, rows: &[InRow<'_>], output: StepOutput) {
        let mut of_rows = output.prompt_logprobs.into_iter();
        for row in rows {
            let mut found = of_rows.next().unwrap_or_default().into_iter();
            for (nth, expected) in (row.row.start..).zip(row.truth.places(row.row.clone())) {
                let place = row.place(company, nth);
                self.comparison.see_target(
                    &place,
                    expected,
                    found.next().as_ref(),
                    row.n_top,
                    self.tolerance,
                );
            }
            if found.next().is_some() {
                self.comparison.wrong.push(format!("{company}: a log-probability that was not asked for"));
            }
        }
    }
}

/// A row of one prompt, in a step.
#[derive(Clone, Debug)]
struct InRow<'a> {
    truth: &'a PromptTruth,
    row: Range<usize>,
    n_top: u8,
}

impl InRow<'_> {
    fn place(&self, company: &str, nth: usize) -> String {
        format!("{company}, token {} of a prompt of {}", nth + 1, self.truth.tokens.len())
    }
}

/// Makes the row with these tokens of a prompt, and the tokens after them as its targets.
fn piece(tokens: &[TokenId], sequence: usize, row: Range<usize>, n_top: u8) -> Piece<'_> {
    let targets = &tokens[row.start + 1..(row.end + 1).min(tokens.len())];
    let targets = (!targets.is_empty()).then_some(PromptTargets { tokens: targets, n_top });
    Piece { targets, ..Piece::of(sequence, RowInput::Tokens(&tokens[row.clone()]), row.start) }
}

impl Comparison {
    /// Compares the log-probabilities of one token of a prompt.
    pub(super) fn see_target(
        &mut self,
        place: &str,
        truth: &TruthPlace,
        found: Option<&PromptLogprob>,
        n_top: u8,
        tolerance: Tolerance,
    ) {
        let mut of_token = Self { n_tokens: 1, ..Self::default() };
        let Some(found) = found else {
            of_token.wrong.push(format!("{place}: no log-probability"));
            return self.merge(of_token);
        };
        let own = (truth.token, found.logprobs.chosen);
        let top = &found.logprobs.top;
        if let Some((token, _)) = top.first() {
            of_token.check_token(place, &truth.step, *token, tolerance);
        }
        of_token.check_logprobs(place, &truth.step, &[&top[..], &[own]].concat(), tolerance);
        of_token.check_top(place, truth, top, usize::from(n_top), tolerance);
        of_token.check_rank(place, truth, found.rank, tolerance);
        self.merge(of_token.or_routing_tie(&truth.step, tolerance));
    }

    /// Checks that the alternatives are the best tokens, best first. Tokens that rounding may exchange count as equal.
    fn check_top(
        &mut self,
        place: &str,
        truth: &TruthPlace,
        top: &[(TokenId, f32)],
        n_top: usize,
        tolerance: Tolerance,
    ) {
        let listed = &truth.own.logprobs.top;
        let (n_expected, is_sorted) = (n_top.min(listed.len()), top.is_sorted_by(|a, b| a.1 >= b.1));
        if top.len() != n_expected || !is_sorted {
            self.wrong.push(format!("{place}: not the {n_expected} best, best first: {top:?}"));
        }
        let Some((_, last)) = n_expected.checked_sub(1).map(|last| listed[last]) else { return };
        let lowest = last - 2.0 * tolerance.bound(last);
        for (token, _) in top {
            let expected = truth.step.logprob(*token);
            if expected.is_none_or(|logprob| logprob < lowest) {
                self.wrong.push(format!(
                    "{place}: {token:?} is among the {n_top} best, and has {expected:?} in the reference, where the last one \
                     has {last}"
                ));
            }
        }
    }

    /// Checks the rank of the prompt's token. Better tokens that rounding may exchange with it count on both sides.
    fn check_rank(&mut self, place: &str, truth: &TruthPlace, rank: u32, tolerance: Tolerance) {
        let PromptLogprob { logprobs, rank: expected } = &truth.own;
        let (own, by) = (logprobs.chosen, 2.0 * tolerance.bound(logprobs.chosen));
        let count =
            |is_in: &dyn Fn(f32) -> bool| logprobs.top.iter().filter(|one| is_in(one.1)).count() as u32;
        let least = count(&|logprob| logprob > own + by);
        // The number of tokens that are better or near is known only if the reference lists worse ones too.
        let is_listed = logprobs.top.last().is_some_and(|last| last.1 < own - by);
        let most = if is_listed { count(&|logprob| logprob >= own - by) } else { u32::MAX };
        let is_right = if by == 0.0 { rank == *expected } else { (least + 1..=most.max(1)).contains(&rank) };
        if !is_right {
            self.wrong.push(format!("{place}: rank {rank}, and {expected} in the reference, with {own}"));
        }
    }
}
