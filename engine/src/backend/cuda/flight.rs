//! Steps on the card, and what becomes of them: tokens, or an error for a row.

use std::collections::HashMap;
use std::sync::Arc;

use kernels::cpu::Processor;
use kernels::cuda::{Card, CudaError, Event, LostFlag, Outcome, Pinned, View};
use kv_cache::FenceSignal;
use types::TokenId;

use super::draws::{self, Drawer};
use super::workspace::PATIENCE;
use crate::error::RowError;
use crate::sampler::Drawing;
use crate::step::{Row, RowInput, Sampled, SlotId, StepOutput};

/// A step that was launched.
#[derive(Debug)]
pub(super) struct Flight {
    pub(super) number: u64,
    rows: Vec<FlightRow>,
    arrival: Arrival,
    pub(super) signal: Arc<FenceSignal>,
    pub(super) phase: Phase,
}

/// What the card draws, on its way to the host.
#[derive(Debug)]
pub(super) struct Arrival {
    pub(super) drawn: Pinned<u32>,
    /// Where log-probabilities are wanted.
    pub(super) outcomes: Option<Pinned<u32>>,
    /// Reached when both are there.
    pub(super) end: Event,
    /// Reached when the other ranks are through.
    pub(super) others: Vec<Event>,
}

/// Where logits lie, for what the host draws, and who says that they are nothing.
#[derive(Debug)]
pub(super) struct Source<'a> {
    pub(super) card: &'a Card,
    pub(super) logits: View<'a, f32>,
    pub(super) lost: Option<&'a LostFlag>,
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
    /// Which of the outcomes is the row's, where log-probabilities are wanted.
    outcome: Option<usize>,
    /// How the host draws what the card cannot.
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
        drawers: &[Drawer],
        arrival: Arrival,
        signal: Arc<FenceSignal>,
    ) -> Self {
        let rows = rows.iter().zip(places).zip(drawers);
        let rows = rows.map(|((row, place), drawer)| FlightRow::of(row, place, *drawer)).collect();
        Self { number, rows, arrival, signal, phase: Phase::OnCard }
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
        source: &Source<'_>,
        sampler: &HostSampler,
        previous: &mut HashMap<SlotId, TokenId>,
    ) {
        if self.is_done() {
            return;
        }
        let rows = self.outcomes(source, sampler, previous);
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
        source: &Source<'_>,
        sampler: &HostSampler,
        previous: &HashMap<SlotId, TokenId>,
    ) -> Result<StepOutput, CudaError> {
        let Arrival { drawn, outcomes, end, others } = &mut self.arrival;
        end.wait()?;
        source.check()?;
        others.iter().try_for_each(Event::wait)?;
        source.check()?;
        let drawn = drawn.numbers()?;
        let outcomes = outcomes.as_mut().map(Pinned::numbers).transpose()?;
        let mut rows = Vec::with_capacity(self.rows.len());
        for row in &mut self.rows {
            let outcome = match (&row.place, &mut row.by_host) {
                (Err(error), _) => Err(error.clone()),
                (Ok(None), _) => Ok(None),
                (Ok(Some(place)), None) => draws::token(drawn[*place as usize]).map(|token| {
                    let words = row.outcome.zip(outcomes.as_deref());
                    let logprobs = words.map(|(nth, words)| {
                        draws::logprobs(&Outcome::of_words(&words[nth * Outcome::WORDS..]))
                    });
                    Some(Sampled { token, logprobs })
                }),
                (Ok(Some(place)), Some(draw)) => {
                    let first = *place as usize * sampler.vocab;
                    let mut logits =
                        source.card.download(source.logits.slice(first..first + sampler.vocab))?;
                    draw.draw(row.slot, sampler, &mut logits, previous).map(Some)
                }
            };
            rows.push(outcome);
        }
        Ok(StepOutput { rows })
    }

    /// What it was launched with, to be used again.
    pub(super) fn into_arrival(self) -> Arrival {
        self.arrival
    }
}

impl Source<'_> {
    /// Refuses what was computed while a rank was away.
    fn check(&self) -> Result<(), CudaError> {
        match self.lost {
            Some(lost) if lost.is_raised() => Err(peer_lost()),
            _ => Ok(()),
        }
    }
}

/// What a raised flag means.
pub(super) fn peer_lost() -> CudaError {
    let why = format!("a GPU waited for another for {} s in vain", PATIENCE.as_secs());
    CudaError::PeerLost { why }
}

impl FlightRow {
    fn of(row: &Row<'_>, place: Result<Option<u32>, RowError>, drawer: Drawer) -> Self {
        let host_draws = row.sample.as_ref().filter(|_| drawer == Drawer::Host);
        let by_host = host_draws.map(|spec| HostDraw {
            drawing: Drawing::of(spec),
            follows_previous: row.input == RowInput::Previous,
            position: row.start + row.input.n_tokens(),
        });
        let outcome = if let Drawer::Card { nth, is_told: true } = drawer { Some(nth) } else { None };
        Self { slot: row.slot, place, outcome, by_host }
    }
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
