//! The different ways to compute a continuation.

use types::{BlockIdx, Sampling, StopRules, TokenId};

use super::{CompareError, Comparison, Tolerance, Truth, TruthStep};
use crate::backend::Backend;
use crate::step::{
    PendingStep, PromptTargets, Row, RowInput, SampleSpec, SampledToken, SlotId, StepBatch, StepOutput,
};

/// The number of log-probabilities that are compared at each position.
const N_TOP: u8 = 20;
/// The number of rows of a large batch: more than kernels for few rows support, and not a multiple of a tile.
const CROWD: usize = 141;
/// The number of tokens at a prompt's end that every second sequence of a crowd computes one by one.
const ONE_BY_ONE: usize = 40;

/// The backend under comparison, with the bounds.
#[derive(Debug)]
pub(super) struct Script<'a> {
    pub(super) backend: &'a mut dyn Backend,
    pub(super) tolerance: Tolerance,
    pub(super) comparison: &'a mut Comparison,
}

/// One row of a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece<'a> {
    pub(super) sequence: usize,
    pub(super) input: RowInput<'a>,
    pub(super) start: usize,
    /// `None` if the row samples no token; else whether its alternatives are compared.
    pub(super) draws: Option<bool>,
    pub(super) targets: Option<PromptTargets<'a>>,
}

/// Computes the reference's continuation of `prompt`, token by token.
pub(super) fn truth(
    reference: &mut dyn Backend,
    prompt: &[TokenId],
    n_steps: usize,
) -> Result<Truth, CompareError> {
    let mut tokens = prompt.to_vec();
    let mut steps = Vec::with_capacity(n_steps);
    let mut start = 0;
    for _ in 0..n_steps {
        let piece = Piece { draws: Some(true), ..Piece::of(0, RowInput::Tokens(&tokens[start..]), start) };
        let launched = launch(reference, 1, &[piece])?;
        let (drawn, routing_leads) = collect_with_leads(reference, "the reference", launched)?;
        let best = best(drawn.into_iter().next().flatten());
        start = tokens.len();
        tokens.push(best[0].0);
        let routing_lead = routing_leads.last().copied().unwrap_or(f32::INFINITY);
        steps.push(TruthStep { best, routing_lead });
    }
    Ok(Truth { prompt: prompt.to_vec(), steps })
}

impl<'a> Piece<'a> {
    /// Makes a row that samples no token and has no targets.
    pub(super) fn of(sequence: usize, input: RowInput<'a>, start: usize) -> Self {
        Self { sequence, input, start, draws: None, targets: None }
    }
}

impl Truth {
    /// Returns the prompt and its continuation as one list.
    pub(super) fn tokens(&self) -> Vec<TokenId> {
        let drawn = self.steps.iter().map(TruthStep::token);
        self.prompt.iter().copied().chain(drawn).collect()
    }
}

impl Script<'_> {
    pub(super) fn every_way(&mut self, truths: &[Truth]) -> Result<(), CompareError> {
        for truth in truths {
            self.alone(truth)?;
            self.in_chunks(truth, 16)?;
            self.in_chunks(truth, 7)?;
            self.after_a_cached_prefix(truth)?;
            self.recomputed(truth)?;
            self.unseen(truth)?;
        }
        self.together(truths)
    }

    /// Computes the prompt at once, then token by token.
    fn alone(&mut self, truth: &Truth) -> Result<(), CompareError> {
        self.in_chunks(truth, truth.prompt.len())
    }

    /// Computes the prompt in chunks.
    fn in_chunks(&mut self, truth: &Truth, chunk: usize) -> Result<(), CompareError> {
        let company = if chunk >= truth.prompt.len() { "alone" } else { "in chunks" };
        self.prefill(company, 0, truth, 0, chunk)?;
        self.go_on(company, truth, 1)
    }

    /// Computes with the first blocks of the prompt cached.
    fn after_a_cached_prefix(&mut self, truth: &Truth) -> Result<(), CompareError> {
        let company = "after a cached prefix";
        let cached = truth.prompt.len().saturating_sub(1) / 16 * 16;
        self.prefill(company, 0, truth, cached, truth.prompt.len())?;
        self.go_on(company, truth, 1)
    }

    /// Preempts the sequence half-way and recomputes it, over blocks with other contents.
    fn recomputed(&mut self, truth: &Truth) -> Result<(), CompareError> {
        let (company, tokens) = ("recomputed", truth.tokens());
        let half = truth.steps.len() / 2;
        let n_known = truth.prompt.len() + half;
        let other: Vec<TokenId> = tokens[..n_known].iter().rev().copied().collect();
        self.one(company, Piece::of(0, RowInput::Tokens(&other), 0))?;
        let again = Piece { draws: Some(true), ..Piece::of(0, RowInput::Tokens(&tokens[..n_known]), 0) };
        let drawn = self.one(company, again)?;
        self.see(company, truth, half, drawn);
        self.go_on(company, truth, half + 1)
    }

    /// Compares sampled tokens only: the GPU samples, and each token is the input of the next step before the
    /// host knows it. After the first token that differs near a tie, the two continuations diverge.
    fn unseen(&mut self, truth: &Truth) -> Result<(), CompareError> {
        let company = "in flight";
        let prompt = Piece { draws: Some(false), ..Piece::of(0, RowInput::Tokens(&truth.prompt), 0) };
        let mut in_flight = launch(self.backend, 1, &[prompt])?;
        for (nth, expected) in truth.steps.iter().enumerate() {
            let position = truth.prompt.len() + nth;
            let piece = Piece { draws: Some(false), ..Piece::of(0, RowInput::Previous, position) };
            let is_last = nth + 1 == truth.steps.len();
            let next = if is_last { None } else { Some(launch(self.backend, 1, &[piece])?) };
            let drawn = collect(self.backend, company, in_flight)?.into_iter().next().flatten();
            let token = drawn.map(|sampled| sampled.token);
            self.comparison.see(&place(company, truth, nth), expected, token, &[], self.tolerance);
            let Some(step) = next else { return Ok(()) };
            if token != Some(expected.token()) {
                return collect(self.backend, company, step).map(drop);
            }
            in_flight = step;
        }
        Ok(())
    }

    /// Computes all sequences in each step: chunks of some beside single tokens of others.
    fn together(&mut self, truths: &[Truth]) -> Result<(), CompareError> {
        let company = "together";
        let tokens: Vec<Vec<TokenId>> = truths.iter().map(Truth::tokens).collect();
        let mut n_computed = vec![0; truths.len()];
        let last = |truth: &Truth| truth.prompt.len() + truth.steps.len() - 1;
        for turn in 0.. {
            let mut pieces = Vec::new();
            for (sequence, truth) in truths.iter().enumerate() {
                // Each sequence starts one turn after the previous one, with another chunk size, so that
                // steps mix chunks and single tokens.
                if turn < sequence || n_computed[sequence] >= last(truth) {
                    continue;
                }
                let start = n_computed[sequence];
                let end = (start + 5 + 9 * sequence).min(truth.prompt.len()).max(start + 1);
                let draws = (end >= truth.prompt.len()).then_some(true);
                let input = RowInput::Tokens(&tokens[sequence][start..end]);
                pieces.push(Piece { draws, ..Piece::of(sequence, input, start) });
                n_computed[sequence] = end;
            }
            if pieces.is_empty() && turn >= truths.len() {
                return Ok(());
            }
            let drawn = step(self.backend, company, truths.len(), &pieces)?;
            for (piece, drawn) in pieces.iter().zip(drawn) {
                let truth = &truths[piece.sequence];
                if piece.draws.is_some() {
                    self.see(company, truth, n_computed[piece.sequence] - truth.prompt.len(), drawn);
                }
            }
        }
        Ok(())
    }

    /// Runs each prompt many times, with all single tokens in one step: more rows than one kernel call
    /// supports. Every second sequence also computes the end of the prompt token by token.
    pub(super) fn in_a_crowd(&mut self, truths: &[Truth]) -> Result<(), CompareError> {
        let company = "in a crowd";
        let tokens: Vec<Vec<TokenId>> = truths.iter().map(Truth::tokens).collect();
        let n_sequences = self.crowd(&tokens);
        let nth = |sequence: usize| sequence % truths.len();
        let mut n_computed = Vec::with_capacity(n_sequences);
        for sequence in 0..n_sequences {
            let one_by_one = if sequence % 2 == 0 { 1 } else { ONE_BY_ONE };
            let at_once = truths[nth(sequence)].prompt.len().saturating_sub(one_by_one);
            let input = RowInput::Tokens(&tokens[nth(sequence)][..at_once]);
            if at_once > 0 {
                step(self.backend, company, n_sequences, &[Piece::of(sequence, input, 0)])?;
            }
            n_computed.push(at_once);
        }
        loop {
            let going =
                (0..n_sequences).filter(|sequence| n_computed[*sequence] + 1 < tokens[nth(*sequence)].len());
            let pieces: Vec<Piece<'_>> = going
                .map(|sequence| {
                    let start = n_computed[sequence];
                    let draws = (start + 1 >= truths[nth(sequence)].prompt.len()).then_some(true);
                    let input = RowInput::Tokens(&tokens[nth(sequence)][start..=start]);
                    Piece { draws, ..Piece::of(sequence, input, start) }
                })
                .collect();
            if pieces.is_empty() {
                return Ok(());
            }
            let drawn = step(self.backend, company, n_sequences, &pieces)?;
            for (piece, drawn) in pieces.iter().zip(drawn) {
                n_computed[piece.sequence] += 1;
                let truth = &truths[nth(piece.sequence)];
                if piece.draws.is_some() {
                    self.see(company, truth, n_computed[piece.sequence] - truth.prompt.len(), drawn);
                }
            }
        }
    }

    /// Returns the number of sequences of a crowd, bounded by the number of blocks.
    pub(super) fn crowd(&self, tokens: &[Vec<TokenId>]) -> usize {
        let longest = tokens.iter().map(Vec::len).max().unwrap_or(0);
        let layout = &self.backend.model().layout;
        // Two blocks more are counted, because blocks of a sequence are taken in pairs.
        let of_sequence = layout.groups.len() * (layout.blocks_for(longest) + 2);
        CROWD.min(self.backend.memory().n_blocks() as usize / of_sequence)
    }

    fn prefill(
        &mut self,
        company: &'static str,
        sequence: usize,
        truth: &Truth,
        first: usize,
        chunk: usize,
    ) -> Result<(), CompareError> {
        for start in (first..truth.prompt.len()).step_by(chunk.max(1)) {
            let end = (start + chunk).min(truth.prompt.len());
            let draws = (end == truth.prompt.len()).then_some(true);
            let input = RowInput::Tokens(&truth.prompt[start..end]);
            let piece = Piece { draws, ..Piece::of(sequence, input, start) };
            let drawn = self.one(company, piece)?;
            if draws.is_some() {
                self.see(company, truth, 0, drawn);
            }
        }
        Ok(())
    }

    /// Continues token by token with the reference's tokens, from index `first`.
    fn go_on(&mut self, company: &'static str, truth: &Truth, first: usize) -> Result<(), CompareError> {
        for nth in first..truth.steps.len() {
            let token = [truth.steps[nth - 1].token()];
            let start = truth.prompt.len() + nth - 1;
            let piece = Piece { draws: Some(true), ..Piece::of(0, RowInput::Tokens(&token), start) };
            let drawn = self.one(company, piece)?;
            self.see(company, truth, nth, drawn);
        }
        Ok(())
    }

    fn one(&mut self, company: &'static str, piece: Piece<'_>) -> Result<Option<SampledToken>, CompareError> {
        Ok(step(self.backend, company, 1, &[piece])?.into_iter().next().flatten())
    }

    pub(super) fn see(&mut self, company: &str, truth: &Truth, nth: usize, drawn: Option<SampledToken>) {
        let found = best(drawn);
        let (token, expected) = (found.first().map(|(token, _)| *token), &truth.steps[nth]);
        self.comparison.see(&place(company, truth, nth), expected, token, &found, self.tolerance);
    }
}

fn place(company: &str, truth: &Truth, nth: usize) -> String {
    format!("{company}, token {nth} after a prompt of {}", truth.prompt.len())
}

/// Returns the sampled token's alternatives, itself included, with their log-probabilities.
pub(super) fn best(drawn: Option<SampledToken>) -> Vec<(TokenId, f32)> {
    let Some(SampledToken { token, logprobs }) = drawn else { return Vec::new() };
    match logprobs {
        Some(logprobs) if !logprobs.top.is_empty() => logprobs.top,
        Some(logprobs) => vec![(token, logprobs.chosen)],
        None => vec![(token, f32::NAN)],
    }
}

fn step(
    backend: &mut dyn Backend,
    company: &'static str,
    n_sequences: usize,
    pieces: &[Piece<'_>],
) -> Result<Vec<Option<SampledToken>>, CompareError> {
    let launched = launch(backend, n_sequences, pieces)?;
    collect(backend, company, launched)
}

pub(super) fn launch(
    backend: &mut dyn Backend,
    n_sequences: usize,
    pieces: &[Piece<'_>],
) -> Result<PendingStep, CompareError> {
    let n_groups = backend.model().layout.groups.len();
    // The blocks have the largest possible distances, and are not in order.
    let stride = backend.memory().n_blocks() as usize / (n_sequences * n_groups).max(1);
    let table = |sequence: usize, group: usize| -> Vec<BlockIdx> {
        let first = (sequence * n_groups + group) * stride;
        (0..stride).map(|nth| BlockIdx((first + (nth ^ 1).min(stride - 1)) as u32)).collect()
    };
    let tables: Vec<Vec<Vec<BlockIdx>>> = pieces
        .iter()
        .map(|piece| (0..n_groups).map(|group| table(piece.sequence, group)).collect())
        .collect();
    let tables: Vec<Vec<&[BlockIdx]>> =
        tables.iter().map(|groups| groups.iter().map(Vec::as_slice).collect()).collect();
    let seen = Sampling { logprobs: Some(N_TOP), ..Sampling::default() };
    let (unseen, stop) = (Sampling::default(), StopRules { ignore_eos: true, ..StopRules::default() });
    let spec = |is_seen: bool| SampleSpec {
        sampling: if is_seen { &seen } else { &unseen },
        stop: &stop,
        history: &[],
        n_prompt: 0,
        index: 0,
        constraint: None,
    };
    let rows: Vec<Row<'_>> = pieces
        .iter()
        .zip(&tables)
        .map(|(piece, tables)| Row {
            slot: SlotId(piece.sequence as u64),
            input: piece.input,
            start: piece.start,
            tables,
            prompt_logprobs: piece.targets,
            sample: piece.draws.map(spec),
        })
        .collect();
    Ok(backend.launch(StepBatch { rows: &rows })?)
}

fn collect(
    backend: &mut dyn Backend,
    company: &'static str,
    step: PendingStep,
) -> Result<Vec<Option<SampledToken>>, CompareError> {
    Ok(collect_with_leads(backend, company, step)?.0)
}

/// Returns the sampled token of each row, and the routing leads of all tokens.
fn collect_with_leads(
    backend: &mut dyn Backend,
    company: &'static str,
    step: PendingStep,
) -> Result<(Vec<Option<SampledToken>>, Vec<f32>), CompareError> {
    let StepOutput { rows, routing_leads, .. } = collect_all(backend, company, step)?;
    Ok((rows.into_iter().flatten().collect(), routing_leads))
}

/// Returns a step's whole output. No row of it has failed.
pub(super) fn collect_all(
    backend: &mut dyn Backend,
    company: &'static str,
    step: PendingStep,
) -> Result<StepOutput, CompareError> {
    let output = backend.collect(step)?;
    match output.rows.iter().find_map(|row| row.as_ref().err()) {
        Some(source) => Err(CompareError::Row { company, source: source.clone() }),
        None => Ok(output),
    }
}
