//! Steps on the card, and what becomes of them: tokens, or an error for a row.

use std::collections::HashMap;
use std::sync::Arc;

use kernels::cpu::Processor;
use kernels::cuda::{Card, CudaError, Event, NOWHERE, Pinned, View};
use kv_cache::FenceSignal;
use types::{Sampling, TokenId};

use crate::error::RowError;
use crate::sampler::Drawing;
use crate::step::{Row, RowInput, SampleSpec, Sampled, SlotId, StepOutput};

/// A step that was launched.
#[derive(Debug)]
pub(super) struct Flight {
    pub(super) number: u64,
    rows: Vec<FlightRow>,
    /// What the card draws, on its way to the host.
    drawn: Pinned<u32>,
    end: Event,
    pub(super) signal: Arc<FenceSignal>,
    pub(super) phase: Phase,
}

#[derive(Debug)]
pub(super) enum Phase {
    OnCard,
    Done(Result<StepOutput, CudaError>),
}

/// A row of it.
#[derive(Debug)]
struct FlightRow {
    slot: SlotId,
    /// Where its token stands among the drawn.
    place: Result<Option<u32>, RowError>,
    /// How the host draws, where the card's likeliest token will not do.
    by_host: Option<HostDraw>,
}

#[derive(Debug)]
struct HostDraw {
    drawing: Drawing,
    follows_previous: bool,
    /// Where the token goes.
    position: usize,
}

/// What the host draws with.
#[derive(Debug)]
pub(super) struct HostSampler {
    pub(super) processor: Processor,
    pub(super) eos_tokens: Vec<TokenId>,
    pub(super) vocab: usize,
}

impl Flight {
    pub(super) fn new(
        number: u64,
        rows: &[Row<'_>],
        places: Vec<Result<Option<u32>, RowError>>,
        (drawn, end): (Pinned<u32>, Event),
        signal: Arc<FenceSignal>,
    ) -> Self {
        let rows = rows.iter().zip(places).map(|(row, place)| FlightRow::of(row, place)).collect();
        Self { number, rows, drawn, end, signal, phase: Phase::OnCard }
    }

    pub(super) fn is_done(&self) -> bool {
        matches!(self.phase, Phase::Done(_))
    }

    /// Whether the host draws for a row of it: then it is finished before the next step takes its logits' place.
    pub(super) fn needs_host(&self) -> bool {
        self.rows.iter().any(|row| row.by_host.is_some())
    }

    /// Where the card draws a slot's token, while it is under way.
    pub(super) fn place_of(&self, slot: SlotId) -> Option<u32> {
        let row = self.rows.iter().find(|row| row.slot == slot)?;
        row.place.clone().ok().flatten()
    }

    /// Waits for the card and draws what is the host's to draw. `previous` holds the tokens of the step before, and then
    /// those of this one.
    pub(super) fn finish(
        &mut self,
        card: &Card,
        sampler: &HostSampler,
        logits: View<'_, f32>,
        previous: &mut HashMap<SlotId, TokenId>,
    ) {
        if self.is_done() {
            return;
        }
        let rows = self.outcomes(card, sampler, logits, previous);
        previous.clear();
        if let Ok(output) = &rows {
            for (row, outcome) in self.rows.iter().zip(&output.rows) {
                if let Ok(Some(sampled)) = outcome {
                    previous.insert(row.slot, sampled.token);
                }
            }
        }
        self.phase = Phase::Done(rows);
    }

    fn outcomes(
        &mut self,
        card: &Card,
        sampler: &HostSampler,
        logits: View<'_, f32>,
        previous: &HashMap<SlotId, TokenId>,
    ) -> Result<StepOutput, CudaError> {
        self.end.wait()?;
        let drawn = self.drawn.numbers()?;
        let mut rows = Vec::with_capacity(self.rows.len());
        for row in &mut self.rows {
            let outcome = match (&row.place, &mut row.by_host) {
                (Err(error), _) => Err(error.clone()),
                (Ok(None), _) => Ok(None),
                (Ok(Some(place)), None) => token(drawn[*place as usize]).map(Some),
                (Ok(Some(place)), Some(draw)) => {
                    let first = *place as usize * sampler.vocab;
                    let mut logits = card.download(logits.slice(first..first + sampler.vocab))?;
                    draw.draw(row.slot, sampler, &mut logits, previous).map(Some)
                }
            };
            rows.push(outcome);
        }
        Ok(StepOutput { rows })
    }

    /// What it was launched with, to be used again.
    pub(super) fn into_drawn(self) -> Pinned<u32> {
        self.drawn
    }
}

fn token(drawn: u32) -> Result<Sampled, RowError> {
    match drawn {
        NOWHERE => Err(RowError::Sample("no logit is finite".to_owned())),
        token => Ok(Sampled { token: TokenId(token), logprobs: None }),
    }
}

impl FlightRow {
    fn of(row: &Row<'_>, place: Result<Option<u32>, RowError>) -> Self {
        let needs_host = |spec: &&SampleSpec<'_>| !is_likeliest(spec);
        let by_host = row.sample.as_ref().filter(needs_host).map(|spec| HostDraw {
            drawing: Drawing::of(spec),
            follows_previous: row.input == RowInput::Previous,
            position: row.start + row.input.n_tokens(),
        });
        Self { slot: row.slot, place, by_host }
    }
}

/// Whether the likeliest token is the one to draw, and nothing else is asked for.
fn is_likeliest(spec: &SampleSpec<'_>) -> bool {
    let Sampling { temperature, logprobs, logit_bias, .. } = spec.sampling;
    let Sampling { repetition_penalty, presence_penalty, frequency_penalty, .. } = spec.sampling;
    let is_plain = *temperature == 0.0 && logprobs.is_none() && logit_bias.is_empty();
    let looks_back = *repetition_penalty != 1.0 || *presence_penalty != 0.0 || *frequency_penalty != 0.0;
    is_plain && !looks_back && spec.index >= spec.stop.min_tokens
}

impl HostDraw {
    fn draw(
        &mut self,
        slot: SlotId,
        sampler: &HostSampler,
        logits: &mut [f32],
        previous: &HashMap<SlotId, TokenId>,
    ) -> Result<Sampled, RowError> {
        if self.follows_previous {
            let token = previous.get(&slot).ok_or(RowError::NoTokenInFlight)?;
            self.drawing.remember(*token);
        }
        self.drawing.draw(&sampler.processor, logits, self.position, &sampler.eos_tokens)
    }
}

#[cfg(test)]
mod tests {
    use types::StopRules;

    use super::*;

    #[test]
    fn the_card_draws_what_is_plainly_the_likeliest() {
        let plain = Sampling::default();
        for (sampling, min_tokens, expected) in [
            (plain.clone(), 0, true),
            (plain.clone(), 5, false),
            (Sampling { temperature: 0.5, ..plain.clone() }, 0, false),
            (Sampling { logprobs: Some(0), ..plain.clone() }, 0, false),
            (Sampling { logit_bias: vec![(TokenId(1), 1.0)], ..plain.clone() }, 0, false),
            (Sampling { presence_penalty: 0.5, ..plain.clone() }, 0, false),
            (Sampling { top_p: 0.5, seed: 7, ..plain }, 0, true),
        ] {
            let stop = StopRules { min_tokens, ..StopRules::default() };
            let spec = SampleSpec { sampling: &sampling, stop: &stop, history: &[], n_prompt: 0, index: 4 };
            assert_eq!(is_likeliest(&spec), expected, "{sampling:?}, {min_tokens}");
        }
    }
}
