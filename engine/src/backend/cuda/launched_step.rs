//! A launched step and its results: a token or an error for each row.

use std::sync::{Arc, OnceLock};

use device::cuda::nccl::EndOfSums;
use device::cuda::{CudaError, Event, PinnedNumbers, View};
use kernels::cpu::Processor;
use kernels::cuda::{ComputeCard, LostFlag, Outcome};
use kv_cache::FenceSignal;
use types::TokenId;
use types::step::PromptLogprob;

use super::draws::{self, SampledBy};
use super::masks::PendingMasks;
use super::previous::PreviousTokens;
use super::targets::TargetReadback;
use super::workspace::PATIENCE;
use crate::error::{RowError, StageLost};
use crate::sampler::OwnedSampleSpec;
use crate::step::{Row, RowInput, SampledToken, SlotId, StepOutput};

/// A step that was launched and is not collected yet.
#[derive(Debug)]
pub(super) struct LaunchedStep {
    pub(super) number: u64,
    rows: Vec<LaunchedRow>,
    /// The masks that are not written yet. The GPUs wait for them.
    masks: Option<PendingMasks>,
    readback: Readback,
    pub(super) signal: Arc<FenceSignal>,
    pub(super) phase: Phase,
}

/// Pinned buffers for the results of a step, and the events of their copies.
#[derive(Debug)]
pub(super) struct Readback {
    pub(super) drawn: PinnedNumbers<u32>,
    /// The outcomes of draws; `None` if no log-probabilities are requested.
    pub(super) outcomes: Option<PinnedNumbers<u32>>,
    /// The results of prompt tokens; `None` if no log-probabilities of a prompt are requested.
    pub(super) targets: Option<TargetReadback>,
    /// The event at which all buffers are copied.
    pub(super) end: Event,
    /// The events at which the other ranks have finished.
    pub(super) others: Vec<Event>,
}

/// Logits on the GPU, for sampling by the host, and the flag that makes them invalid.
#[derive(Debug)]
pub(super) struct Source<'a> {
    pub(super) card: &'a ComputeCard,
    pub(super) logits: View<'a, f32>,
    pub(super) lost: &'a LostFlags,
}

/// The signs of invalid results: the flags of the stages whose ranks wait for each other, and the reason why a stage
/// in another process is lost.
#[derive(Clone, Debug, Default)]
pub(super) struct LostFlags {
    pub(super) of_ranks: Arc<[LostFlag]>,
    /// The handles that end the sums with ranks of other processes.
    pub(super) sums: Arc<[EndOfSums]>,
    pub(super) elsewhere: Arc<OnceLock<StageLost>>,
}

#[derive(Debug)]
pub(super) enum Phase {
    OnCard,
    Done(Result<StepOutput, CudaError>),
}

/// A row of a launched step.
#[derive(Debug)]
struct LaunchedRow {
    slot: SlotId,
    /// The index of the row's token among the sampled ones.
    place: Result<Option<u32>, RowError>,
    /// The index of the row's outcome; `None` if no log-probabilities are requested.
    outcome: Option<usize>,
    /// The parameters of the host's draw, if the GPU does not support the request.
    by_host: Option<HostDraw>,
}

#[derive(Debug)]
struct HostDraw {
    spec: OwnedSampleSpec,
    follows_previous: bool,
    /// The position of the token in its sequence.
    position: usize,
}

/// The host's sampling state.
#[derive(Debug)]
pub(super) struct HostSampler {
    pub(super) processor: Processor,
    pub(super) eos_tokens: Vec<TokenId>,
    pub(super) vocab: usize,
}

impl LaunchedStep {
    pub(super) fn new(
        number: u64,
        rows: &[Row<'_>],
        places: Vec<Result<Option<u32>, RowError>>,
        sampled_by: &[SampledBy],
        masks: Option<PendingMasks>,
        readback: Readback,
        signal: Arc<FenceSignal>,
    ) -> Self {
        let rows = rows.iter().zip(places).zip(sampled_by);
        let rows = rows.map(|((row, place), sampled_by)| LaunchedRow::of(row, place, *sampled_by)).collect();
        Self { number, rows, masks, readback, signal, phase: Phase::OnCard }
    }

    pub(super) fn is_done(&self) -> bool {
        matches!(self.phase, Phase::Done(_))
    }

    /// Returns whether the host samples a row. If so, the step must be finished before the next one
    /// overwrites its logits.
    pub(super) fn needs_host(&self) -> bool {
        self.rows.iter().any(|row| row.by_host.is_some())
    }

    /// Returns whether the masks of this step depend on tokens of the previous one.
    pub(super) fn needs_previous(&self) -> bool {
        self.masks.as_ref().is_some_and(PendingMasks::need_previous)
    }

    /// Writes the step's masks, if they are not written yet. `previous` holds the tokens of the previous step.
    pub(super) fn write_masks(&mut self, sampler: &HostSampler, previous: &PreviousTokens) {
        let Some(masks) = self.masks.take() else { return };
        for (nth, error) in masks.write(&sampler.processor, previous) {
            self.rows[nth].place = Err(error);
        }
    }

    /// Returns the index of a slot's token among the tokens that the GPU samples.
    pub(super) fn place_of(&self, slot: SlotId) -> Option<u32> {
        let row = self.rows.iter().find(|row| row.slot == slot)?;
        row.place.clone().ok().flatten()
    }

    /// Waits for the GPUs and samples the host's rows. Adds this step's tokens to `previous`.
    pub(super) fn finish(
        &mut self,
        source: &Source<'_>,
        sampler: &HostSampler,
        previous: &mut PreviousTokens,
    ) {
        if self.is_done() {
            return;
        }
        let rows = self.outcomes(source, sampler, previous);
        let outcomes = rows.iter().flat_map(|output| &output.rows);
        let sampled = self.rows.iter().zip(outcomes).filter_map(|(row, outcome)| match outcome {
            Ok(Some(sampled)) => Some((row.slot, Some(sampled.token))),
            Ok(None) => None,
            Err(_) => Some((row.slot, None)),
        });
        previous.note(self.number, sampled);
        self.phase = Phase::Done(rows);
    }

    fn outcomes(
        &mut self,
        source: &Source<'_>,
        sampler: &HostSampler,
        previous: &PreviousTokens,
    ) -> Result<StepOutput, CudaError> {
        let Readback { drawn, outcomes, targets, end, others } = &mut self.readback;
        end.wait()?;
        source.check()?;
        others.iter().try_for_each(Event::wait)?;
        source.check()?;
        let drawn = drawn.numbers()?;
        let outcomes = outcomes.as_mut().map(PinnedNumbers::numbers).transpose()?;
        let of_prompts = targets.as_mut().map(TargetReadback::of_rows).transpose()?.unwrap_or_default();
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
                    Some(SampledToken { token, logprobs })
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
        let prompt_logprobs = take_prompt_logprobs(&mut rows, of_prompts);
        Ok(StepOutput { rows, prompt_logprobs, routing_leads: Vec::new() })
    }

    /// Returns the step's buffers for reuse.
    pub(super) fn into_readback(self) -> Readback {
        self.readback
    }
}

/// Returns the log-probabilities of each row's prompt, in order. A row without them fails.
fn take_prompt_logprobs<T>(
    rows: &mut [Result<T, RowError>],
    of_prompts: Vec<Result<Vec<PromptLogprob>, RowError>>,
) -> Vec<Vec<PromptLogprob>> {
    let take = |(row, of_prompt): (&mut Result<T, RowError>, Result<_, RowError>)| match of_prompt {
        Ok(of_prompt) => of_prompt,
        Err(error) => {
            *row = Err(error);
            Vec::new()
        }
    };
    rows.iter_mut().zip(of_prompts).map(take).collect()
}

impl Source<'_> {
    /// Rejects the results if a rank was lost before they were computed.
    fn check(&self) -> Result<(), CudaError> {
        if self.lost.is_raised() { Err(self.lost.error()) } else { Ok(()) }
    }
}

impl LostFlags {
    pub(super) fn is_raised(&self) -> bool {
        self.elsewhere.get().is_some() || self.of_ranks.iter().any(LostFlag::is_raised)
    }

    /// Signals all GPUs that one is lost, so that they stop waiting.
    pub(super) fn raise(&self) {
        self.of_ranks.iter().for_each(LostFlag::raise);
        self.end_sums();
    }

    /// Releases the GPUs that wait for GPUs of other processes.
    pub(super) fn end_sums(&self) {
        self.sums.iter().for_each(EndOfSums::end);
    }

    /// Makes the error for raised flags.
    pub(super) fn error(&self) -> CudaError {
        match self.elsewhere.get() {
            Some(lost) => CudaError::PeerLost { why: lost.to_string() },
            None => peer_lost(),
        }
    }
}

fn peer_lost() -> CudaError {
    let why = format!("a GPU waited {} s for another GPU, which did not respond", PATIENCE.as_secs());
    CudaError::PeerLost { why }
}

impl LaunchedRow {
    fn of(row: &Row<'_>, place: Result<Option<u32>, RowError>, sampled_by: SampledBy) -> Self {
        let host_draws = row.sample.as_ref().filter(|_| sampled_by == SampledBy::Host);
        let by_host = host_draws.map(|spec| HostDraw {
            spec: OwnedSampleSpec::of(spec),
            follows_previous: row.input == RowInput::Previous,
            position: row.start + row.input.n_tokens(),
        });
        let outcome = if let SampledBy::Card { nth, is_told: true } = sampled_by { Some(nth) } else { None };
        Self { slot: row.slot, place, outcome, by_host }
    }
}

impl HostDraw {
    fn draw(
        &mut self,
        slot: SlotId,
        sampler: &HostSampler,
        logits: &mut [f32],
        previous: &PreviousTokens,
    ) -> Result<SampledToken, RowError> {
        if self.follows_previous {
            let token = previous.get(&slot).ok_or(RowError::NoTokenInFlight)?;
            self.spec.remember(*token);
        }
        self.spec.draw(&sampler.processor, logits, self.position, &sampler.eos_tokens)
    }
}

#[cfg(test)]
mod tests {
    use types::step::Logprobs;

    use super::*;

    #[test]
    fn a_row_without_the_log_probabilities_of_its_prompt_fails_alone() {
        let one = PromptLogprob { logprobs: Logprobs { chosen: -1.0, top: Vec::new() }, rank: 2 };
        let failed = RowError::NoTokenInFlight;
        let mut rows = [Ok(Some(1)), Ok(Some(2)), Ok(None), Err(RowError::LateMask)];
        let of_prompts = vec![Ok(vec![one.clone()]), Err(failed.clone()), Ok(Vec::new()), Ok(Vec::new())];
        let taken = take_prompt_logprobs(&mut rows, of_prompts);
        assert_eq!(taken, [vec![one], Vec::new(), Vec::new(), Vec::new()]);
        assert_eq!(rows, [Ok(Some(1)), Err(failed), Ok(None), Err(RowError::LateMask)]);
        assert_eq!(take_prompt_logprobs(&mut rows, Vec::new()), Vec::<Vec<PromptLogprob>>::new());
        assert_eq!(rows[0], Ok(Some(1)), "a step without targets");
    }
}
