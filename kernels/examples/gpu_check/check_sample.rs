//! Checks sampling against plain sorting and summing in f64.

use std::sync::Arc;
use std::time::Duration;

use baton_kernels::cuda::{
    ComputeCard, DrawRow, EDIT_WORDS, LATE, LogitEdit, NOWHERE, Outcome, SampleTokens, StepMasks, TokenMasks,
};
use device::cuda::CudaError;

use super::draw::Draw;
use super::extent::Extent;
use super::verdict::Verdicts;

/// The tolerance at the edge of a token's share of the total weight.
const EDGE: f64 = 1e-5;
/// The number of positions that are sampled with each set of rules.
const N_ROWS: usize = 40;

/// The sampling rules of a draw.
#[derive(Clone, Copy, Debug)]
struct Rules {
    temperature: f32,
    top_k: u32,
    top_p: f32,
    min_p: f32,
    edits: bool,
    masks: bool,
}

const ALL: Rules = Rules { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, edits: false, masks: false };

pub(crate) fn all(card: &ComputeCard, verdicts: &mut Verdicts, extent: Extent) -> Result<(), CudaError> {
    let rules = [
        Rules { temperature: 0.8, top_k: 200, top_p: 0.95, min_p: 0.001, edits: true, masks: true },
        Rules { temperature: 0.0, masks: true, ..ALL },
        Rules { temperature: 0.0, edits: true, ..ALL },
        ALL,
        Rules { temperature: 0.0, ..ALL },
        Rules { temperature: 0.3, ..ALL },
        Rules { temperature: 1.7, edits: true, ..ALL },
        Rules { top_k: 1, ..ALL },
        Rules { top_k: 50, ..ALL },
        Rules { top_p: 0.9, ..ALL },
        Rules { top_p: 0.0, ..ALL },
        Rules { min_p: 0.05, ..ALL },
    ];
    // The last width needs more words of a mask than the kernel reads at a time.
    for width in extent.of(&[1000, 1, 5, 32_003, 128_256, 151_936], 1) {
        for rules in extent.of(&rules, 3) {
            check(card, verdicts, *width, *rules)?;
        }
    }
    late_masks(card, verdicts)?;
    nothing_to_draw(card, verdicts)
}

/// One row's draw, and its logits.
struct Case {
    draw: DrawRow,
    raw: Vec<f32>,
    edits: Vec<LogitEdit>,
    in_flight: u32,
    /// The words of the mask; `None` allows every token.
    mask: Option<Vec<u32>>,
}

fn case(source: &mut Draw, row: usize, width: usize, rules: Rules, first_edit: usize) -> Case {
    // Every fourth row has few different values, so that many of its tokens are equal.
    let raw = (0..width)
        .map(|_| if row % 4 == 3 { source.below(30) as f32 - 20.0 } else { source.number() * 12.0 })
        .collect();
    let mut edits = vec![];
    if rules.edits {
        for nth in 0..width.min(20) {
            edits.push(LogitEdit {
                token: (nth * width / width.min(20)) as u32,
                bias: source.number(),
                n_said: source.below(3) as u32,
                is_forbidden: width > 1 && nth % 7 == 6,
                is_seen: nth % 2 == 0,
            });
        }
    }
    let draw = DrawRow {
        row: row as u32,
        in_flight: rules.edits.then_some(row as u32),
        temperature: rules.temperature,
        top_k: rules.top_k,
        top_p: rules.top_p,
        min_p: rules.min_p,
        seed: source.bits(),
        position: row as u64,
        n_top: Some((row % 21) as u32),
        first_edit: first_edit as u32,
        n_edits: edits.len() as u32,
        repetition: 1.2,
        presence: 0.3,
        frequency: 0.1,
        mask: None,
    };
    let in_flight = source.below(width) as u32;
    // Every third row has no mask. A token without an edit is always allowed, so that a token remains.
    let mask = (rules.masks && row % 3 != 2).then(|| {
        let mut mask: Vec<u32> =
            (0..width.div_ceil(32)).map(|_| source.bits() as u32 & source.bits() as u32).collect();
        let allowed = width - 1;
        mask[allowed / 32] |= 1 << (allowed % 32);
        mask
    });
    Case { draw, raw, edits, in_flight, mask }
}

impl Case {
    fn edited(&self) -> Vec<f32> {
        let mut logits = self.raw.clone();
        let mut edits = self.edits.clone();
        if self.draw.in_flight.is_some() {
            match edits.iter_mut().find(|edit| edit.token == self.in_flight) {
                Some(edit) => (edit.n_said, edit.is_seen) = (edit.n_said + 1, true),
                None => edits.push(LogitEdit {
                    token: self.in_flight,
                    n_said: 1,
                    is_seen: true,
                    ..LogitEdit::default()
                }),
            }
        }
        for edit in edits {
            let logit = &mut logits[edit.token as usize];
            *logit += edit.bias;
            if edit.is_forbidden {
                *logit = f32::NEG_INFINITY;
            }
            if edit.is_seen {
                let by = self.draw.repetition;
                *logit = if *logit > 0.0 { *logit / by } else { *logit * by };
            }
            if edit.n_said > 0 {
                *logit -= self.draw.frequency * edit.n_said as f32 + self.draw.presence;
            }
        }
        if let Some(mask) = &self.mask {
            let is_allowed = |token: usize| mask[token / 32] >> (token % 32) & 1 == 1;
            let forbidden = logits.iter_mut().enumerate().filter(|(token, _)| !is_allowed(*token));
            forbidden.for_each(|(_, logit)| *logit = f32::NEG_INFINITY);
        }
        logits
    }

    /// Returns the kept tokens in order, with their weights.
    fn kept(&self) -> Vec<(u32, f64)> {
        let logits = self.edited();
        let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let by = 1.0 / f64::from(self.draw.temperature);
        let weight = |logit: f32| ((f64::from(logit) - f64::from(best)) * by).exp();
        let mut kept: Vec<(u32, f64)> = (0..).zip(logits.iter().map(|logit| weight(*logit))).collect();
        let DrawRow { top_k, top_p, min_p, .. } = self.draw;
        if top_k == 0 && top_p >= 1.0 && min_p <= 0.0 {
            return kept;
        }
        kept.retain(|one| one.1 >= f64::from(min_p));
        kept.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        if top_k > 0 {
            kept.truncate(top_k as usize);
        }
        if top_p < 1.0 {
            let wanted = kept.iter().map(|one| one.1).sum::<f64>() * f64::from(top_p);
            let mut sum = 0.0;
            let is_last = |one: &(u32, f64)| {
                sum += one.1;
                sum >= wanted
            };
            let end = kept.iter().position(is_last).unwrap_or(kept.len() - 1);
            kept.truncate(end + 1);
        }
        kept
    }

    /// Returns whether `token` is the one that `uniform` selects, within the tolerance.
    fn is_right(&self, token: u32, uniform: f64) -> bool {
        if self.draw.temperature == 0.0 {
            let logits = self.edited();
            let best = (0..logits.len()).rev().max_by(|a, b| logits[*a].total_cmp(&logits[*b]));
            return best == Some(token as usize);
        }
        let kept = self.kept();
        let total: f64 = kept.iter().map(|one| one.1).sum();
        let Some(nth) = kept.iter().position(|one| one.0 == token) else { return false };
        let before: f64 = kept[..nth].iter().map(|one| one.1).sum::<f64>() / total;
        let after = before + kept[nth].1 / total;
        (before - EDGE..after + EDGE).contains(&uniform)
    }

    fn has_right_thoughts(&self, outcome: &Outcome) -> bool {
        let total: f64 = self.raw.iter().map(|logit| f64::from(*logit).exp()).sum();
        let logprob = |token: u32| (f64::from(self.raw[token as usize]).exp() / total).ln();
        let is_near =
            |token: u32, logit: f32| (f64::from(outcome.logprob(logit)) - logprob(token)).abs() < 1e-3;
        let mut order: Vec<u32> = (0..self.raw.len() as u32).collect();
        order.sort_by(|a, b| self.raw[*b as usize].total_cmp(&self.raw[*a as usize]).then(a.cmp(b)));
        order.truncate(self.draw.n_top.unwrap_or(0) as usize);
        let mut told: Vec<u32> = outcome.top.iter().map(|one| one.0).collect();
        told.sort_unstable();
        order.sort_unstable();
        told == order
            && is_near(outcome.token, outcome.chosen)
            && outcome.top.iter().all(|(token, logit)| is_near(*token, *logit))
    }
}

/// Draws the same numbers as the CPU does (`engine/src/sampler/draw.rs`).
fn uniform(seed: u64, position: u64) -> f64 {
    let (low, high) = (|wide: u64| wide as u32, |wide: u64| (wide >> 32) as u32);
    let (mut counter, mut key) = ([low(position), high(position), 0, 0], [low(seed), high(seed)]);
    for _ in 0..10 {
        let left = 0xD251_1F53_u64 * u64::from(counter[0]);
        let right = 0xCD9E_8D57_u64 * u64::from(counter[2]);
        counter =
            [high(right) ^ counter[1] ^ key[0], low(right), high(left) ^ counter[3] ^ key[1], low(left)];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    let bits = (u64::from(counter[0]) << 32 | u64::from(counter[1])) >> 11;
    bits as f64 / (1_u64 << 53) as f64
}

fn check(card: &ComputeCard, verdicts: &mut Verdicts, width: usize, rules: Rules) -> Result<(), CudaError> {
    let mut source = Draw::new(6);
    let mut cases: Vec<Case> = vec![];
    for row in 0..N_ROWS {
        let first_edit = cases.iter().map(|case| case.edits.len()).sum();
        cases.push(case(&mut source, row, width, rules, first_edit));
    }
    let outcomes = run(card, width, &cases)?;
    let is_drawn = cases.iter().zip(&outcomes).all(|(case, outcome)| {
        (outcome.token as usize) < width
            && case.is_right(outcome.token, uniform(case.draw.seed, case.draw.position))
    });
    verdicts.holds(format!("sample_tokens {width}, {rules:?}"), is_drawn);
    let are_told = cases.iter().zip(&outcomes).all(|(case, outcome)| case.has_right_thoughts(outcome));
    verdicts.holds(format!("log-probabilities {width}, {rules:?}"), are_told);
    // The result of a case alone must equal its result with the other rows.
    let alone = run(card, width, &cases[N_ROWS - 1..])?;
    if alone.last() != outcomes.last() {
        eprintln!("{:?}\n{:?}", alone.last(), outcomes.last());
    }
    verdicts.holds(format!("sample_tokens alone {width}, {rules:?}"), alone.last() == outcomes.last());
    Ok(())
}

/// Masks that the host does not write in time make their rows fail, and no others.
fn late_masks(card: &ComputeCard, verdicts: &mut Verdicts) -> Result<(), CudaError> {
    let mut source = Draw::new(8);
    let cases: Vec<Case> =
        (0..3).map(|row| case(&mut source, row, 100, Rules { masks: true, ..ALL }, 0)).collect();
    let masks = Arc::new(TokenMasks::new(card, N_ROWS, 100, Duration::from_millis(20))?);
    let outcomes = run_with(card, 100, &cases, &masks.of_step(0, 2), false)?;
    let tokens: Vec<bool> = outcomes.iter().map(|outcome| outcome.token == LATE).collect();
    verdicts.holds("masks that are never written".to_owned(), tokens == [true, true, false]);
    Ok(())
}

fn run(card: &ComputeCard, width: usize, cases: &[Case]) -> Result<Vec<Outcome>, CudaError> {
    let masks = Arc::new(TokenMasks::new(card, N_ROWS, width, Duration::from_secs(10))?);
    let n_masks = cases.iter().filter(|case| case.mask.is_some()).count();
    run_with(card, width, cases, &masks.of_step(7, n_masks), true)
}

/// Samples the cases on the GPU. The masks are written after the launch, if they `are_written`. Rows without a draw are
/// between rows with one, and must not change.
fn run_with(
    card: &ComputeCard,
    width: usize,
    cases: &[Case],
    masks: &StepMasks,
    are_written: bool,
) -> Result<Vec<Outcome>, CudaError> {
    let n_rows = N_ROWS;
    let mut logits = vec![f32::NAN; n_rows * width];
    let (mut draws, mut edits, mut tokens) = (vec![], vec![], vec![NOWHERE; n_rows]);
    let mut written: Vec<&[u32]> = vec![];
    for case in cases {
        let (row, first) = (case.draw.row as usize, edits.len() / EDIT_WORDS);
        logits[row * width..(row + 1) * width].copy_from_slice(&case.raw);
        let mask = case.mask.as_ref().map(|_| written.len() as u32);
        written.extend(case.mask.as_deref());
        draws.extend(DrawRow { first_edit: first as u32, mask, ..case.draw }.to_words());
        edits.extend(case.edits.iter().flat_map(|edit| edit.to_words()));
        tokens[row] = case.in_flight;
    }
    let mut logits = card.upload(&logits)?;
    let mut keys = card.buffer::<u64>(card.argmax_keys(n_rows, width))?;
    let (mut best, mut drawn) = (card.buffer::<u32>(n_rows)?, card.upload(&vec![7; n_rows])?);
    let mut outcomes = card.upload(&vec![u32::MAX; cases.len() * Outcome::WORDS])?;
    card.argmax(best.view_mut(), keys.view_mut(), logits.view())?;
    let (tokens, draws, mut edits) = (card.upload(&tokens)?, card.upload(&draws)?, card.upload(&edits)?);
    card.sample_tokens(SampleTokens {
        drawn: drawn.view_mut(),
        outcomes: outcomes.view_mut(),
        logits: logits.view_mut(),
        best: best.view(),
        tokens: tokens.view(),
        draws: draws.view(),
        edits: edits.view_mut(),
        masks: Some(masks),
    })?;
    if are_written {
        written.iter().enumerate().for_each(|(nth, mask)| masks.write(nth, mask));
        masks.release();
    }
    let (drawn, words) = (card.download(drawn.view())?, card.download(outcomes.view())?);
    let outcomes: Vec<Outcome> = words.chunks(Outcome::WORDS).map(Outcome::of_words).collect();
    let fits = (0..n_rows as u32).all(|row| {
        let case = cases.iter().position(|case| case.draw.row == row);
        drawn[row as usize] == case.map_or(7, |nth| outcomes[nth].token)
    });
    // A mismatch becomes a missing token, which the caller detects.
    Ok(if fits { outcomes } else { vec![Outcome { token: NOWHERE, ..outcomes[0].clone() }; cases.len()] })
}

fn nothing_to_draw(card: &ComputeCard, verdicts: &mut Verdicts) -> Result<(), CudaError> {
    for logit in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut case = case(&mut Draw::new(7), 0, 100, ALL, 0);
        case.raw.fill(logit);
        let token = run(card, 100, &[case])?[0].token;
        verdicts.holds(format!("sample_tokens of {logit}"), token == NOWHERE);
    }
    // One invalid logit among many, even of a forbidden token, must make the row fail.
    for logit in [f32::NAN, -f32::NAN, f32::INFINITY] {
        let mut case = case(&mut Draw::new(7), 0, 100, Rules { edits: true, ..ALL }, 0);
        let forbidden = case.edits.iter().find(|edit| edit.is_forbidden).expect("one is").token;
        case.raw[forbidden as usize] = logit;
        let token = run(card, 100, &[case])?[0].token;
        verdicts.holds(format!("sample_tokens of {logit} among others"), token == NOWHERE);
    }
    Ok(())
}
