//! The GPU backend, on one GPU or several: weights and KV are on the GPUs, and whole steps are launched before
//! the GPUs run them.
//!
//! Suggested reading order: settings ([`settings`]), opening (`description`, `opening`), GPU memory (`heads`,
//! `latent`, `share`, `weights`, `loader`, `fp8`, `upload`, `budget`, `workspace`), the description of a step (`plan`),
//! its execution (`tools`, `decoder`, `forward`, `layer`, `attention`, `latent_pass`), recorded steps (`graph_sizes`,
//! `recorded`), sampling (`draws`, `masks`, `targets`), several GPUs (`rank`, `rank_links`, `lockstep`), pipeline stages
//! (`stage`, `links`, `previous`), several processes (`elsewhere`, [`process`]), results of a step (`launched_step`, `watch`), sleep
//! (`asleep`), measurements (`timing`, `tuning`, `limits`, `profile`).
//!
//! Sums in bf16 depend on the number of rows that are multiplied together. So a row's numbers differ in their
//! last bits from one batch to another. `docs/specification.md` bounds the difference and says what is
//! compared. With [`CudaSettings::deterministic`] they do not differ: every matrix is multiplied by one
//! method for any number of rows, and each token's attention is computed as a row of one token, in chunks
//! from the start of the sequence.

mod asleep;
mod attention;
mod blocks;
mod budget;
mod decoder;
mod description;
mod draws;
mod elsewhere;
mod launched_step;
mod forward;
mod fp8;
mod heads;
mod latent;
mod latent_pass;
mod graph_sizes;
mod layer;
mod limits;
mod links;
mod loader;
mod lockstep;
mod masks;
mod opening;
mod plan;
mod previous;
pub mod process;
mod profile;
mod rank;
mod rank_links;
mod recorded;
pub mod settings;
mod share;
mod spread_experts;
mod stage;
mod targets;
mod timing;
mod tools;
mod tuning;
mod upload;
mod watch;
mod weights;
mod workspace;

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use device::cuda::{CudaError, PinnedNumbers};
use kernels::cuda::{ComputeCard, Outcome, TOP_MAX, TokenMasks};
use kv_cache::{FenceSignal, KvMemory};
use serde::Serialize;
use tracing::{Level, enabled};
use types::{ModelInfo, in_full};

pub use limits::{CudaLimits, ProductRate};
pub use profile::DecodeProfile;
pub use settings::CudaSettings;

use super::{Asleep, Backend, EngineSettings, SleepFailed, StepLimits};
use crate::error::{BackendError, OpenError, RowError};
use crate::step::{PendingStep, Row, SlotId, StepBatch, StepOutput};
use asleep::CudaAsleep;
use description::ModelDescription;
use draws::{Draws, SampledBy};
use elsewhere::Elsewhere;
use launched_step::{HostSampler, LaunchedStep, LostFlags, Phase, Readback};
use links::{StepPlaces, TokenRing};
use lockstep::Helpers;
use masks::PendingMasks;
use plan::{Dims, InputToken, Plan};
use previous::PreviousTokens;
use rank::{LaunchedOnAll, Rank, Step, launch_on_all};
use targets::{TargetReadback, Targets};
use watch::{Watch, WatchedStep};

/// A model on one GPU, or divided over several GPUs. The first rank of the last stage works on the caller's thread, because
/// the host reads its results.
// Fields are dropped in this order: values that use the memory before the memory.
#[derive(Debug)]
pub struct CudaBackend {
    model: ModelInfo,
    limits: StepLimits,
    watch: Watch,
    flights: VecDeque<LaunchedStep>,
    previous: PreviousTokens,
    steps_in_flight_max: usize,
    ring: TokenRing,
    n_launched: u64,
    sampler: HostSampler,
    spare_readbacks: SpareReadbacks,
    helpers: Helpers<Rank>,
    lost: LostFlags,
    /// The stages that other processes compute; `None`: this process computes all.
    elsewhere: Option<Elsewhere>,
    rank: Rank,
    masks: Arc<TokenMasks>,
    memory: KvMemory,
    /// The number of clones of the memory that the backend and its ranks hold.
    n_holders: usize,
    loaded: LoadReport,
    /// The settings and sizes that the backend was opened with.
    described: Arc<ModelDescription>,
}

/// The size of the weights on one GPU, and the loading time.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct LoadReport {
    pub bytes: usize,
    pub seconds: f64,
}

/// Pinned buffers for results, which steps use in turn.
#[derive(Debug)]
struct SpareReadbacks {
    drawn: Vec<PinnedNumbers<u32>>,
    outcomes: Vec<PinnedNumbers<u32>>,
    targets: Vec<TargetReadback>,
}

/// Returns the GPU's constructor in the table of backends. `name` is a model's folder.
pub(super) fn open(engine: &EngineSettings, name: Option<&str>) -> Result<Box<dyn Backend>, OpenError> {
    let folder = name.unwrap_or_default();
    Ok(Box::new(CudaBackend::open(Path::new(folder), engine.kv, &engine.cuda())?))
}

impl CudaBackend {
    /// Returns the bytes of all weight matrices on the GPU with the most, which reads them in every decode step.
    pub fn weight_bytes(&self) -> usize {
        self.loaded.bytes
    }

    /// Returns the size and the loading time of the weights.
    pub fn loaded(&self) -> LoadReport {
        self.loaded
    }

    /// Returns the GPU that samples, for measurements.
    pub fn card(&self) -> &ComputeCard {
        &self.rank.tools.card
    }

    /// Returns the number of GPUs that share the model.
    pub fn n_ranks(&self) -> u16 {
        self.memory.n_ranks()
    }

    /// Returns the number of this process's pipeline stages, each with as many GPUs as there are ranks.
    pub fn n_stages(&self) -> usize {
        self.memory.n_stages()
    }

    /// Returns the number of steps recorded as graphs at the start, and of those recorded later.
    pub fn n_recorded(&self) -> (usize, usize) {
        self.rank.recorded.counts()
    }

    /// Returns where the next step finds a slot's last token.
    fn previous_of(&self, slot: SlotId) -> Result<InputToken, RowError> {
        let drawn = |step: &LaunchedStep| {
            step.place_of(slot).map(|nth| (step.is_done(), self.ring.index(step.number, nth)))
        };
        let token = || self.previous.get(&slot).map(|token| InputToken::Token(token.0));
        let found = match self.flights.iter().rev().find_map(drawn) {
            Some((false, index)) => Some(InputToken::Drawn(index)),
            Some((true, _)) => token(),
            // Without a running step, the tokens of the last step are known.
            None if self.flights.iter().all(LaunchedStep::is_done) => token(),
            None => None,
        };
        found.ok_or(RowError::NoTokenInFlight)
    }

    /// Returns whether a step's masks can be written at its launch. Masks are written in the order of steps, so those of the
    /// last step must be written, and its tokens known if they are needed. Otherwise the masks are written when the step
    /// before is collected.
    fn can_write_masks(&self, launched_step: &LaunchedStep) -> bool {
        let n_running = self.flights.iter().filter(|launched_step| !launched_step.is_done()).count();
        n_running == 0 || (n_running == 1 && !launched_step.needs_previous())
    }

    /// Finishes the steps with rows that the host samples, because the next step overwrites their logits.
    fn finish_what_needs_the_host(&mut self) {
        let Self { rank, lost, sampler, previous, flights, .. } = self;
        if flights.iter().any(|launched_step| !launched_step.is_done() && launched_step.needs_host()) {
            let source = rank.tools.source(lost);
            for launched_step in flights.iter_mut() {
                // The steps before are finished, so the tokens that the masks depend on are known.
                launched_step.write_masks(sampler, previous);
                launched_step.finish(&source, sampler, previous);
            }
        }
    }

    /// Launches the step on all GPUs: its work, the events of each layer's KV, and the copies of its results.
    fn start(
        &mut self,
        plan: &mut Plan<'_>,
        rows: &[Row<'_>],
        signal: FenceSignal,
    ) -> Result<LaunchedStep, CudaError> {
        let began = enabled!(target: "walk", Level::TRACE).then(|| self.card().mark()).transpose()?;
        let n_tokens = plan.dims.n_tokens;
        let graph_size = self.rank.pad(plan, rows);
        let (draws, sampled_by) = Draws::of(rows, &plan.places, &self.sampler.eos_tokens);
        let words = if self.helpers.are_there() { plan.words() } else { Vec::new() };
        let pending = PendingMasks::of(rows, &sampled_by, &self.masks, self.n_launched);
        let masks = pending.as_ref().map(|pending| pending.masks().clone());
        let here = self.ring.place(self.n_launched);
        let places = match self.described.all_stages.n_stages() {
            1 => StepPlaces::default(),
            _ => StepPlaces { here, n_tokens, earlier: self.ring.places_of(plan.drawn_indices()) },
        };
        let signal = Arc::new(signal);
        if let Some(elsewhere) = self.elsewhere.as_ref().filter(|_| n_tokens > 0) {
            elsewhere.begin(plan, rows, here, &signal)?;
        }
        let (dims, sequences) = (plan.dims, plan.sequences());
        let step = Step { dims, graph_size, sequences, draws, masks, words, places, rows_out: None };
        let step = Arc::new(step);
        let nth = self.described.nth_of_sampler();
        let LaunchedOnAll { written, ends } =
            launch_on_all(&mut self.rank, &mut self.helpers, nth, &step, plan)?;
        if let Some(elsewhere) = self.elsewhere.as_mut().filter(|_| n_tokens > 0) {
            let drawn = self.rank.tools.space.drawn.slice(0..plan.dims.n_wanted);
            elsewhere.sampled(&self.rank.tools.card, here, drawn)?;
        }
        let outcomes = self.outcomes(&step.draws, &sampled_by)?;
        let targets = self.receive_targets(&plan.targets)?;
        let mut drawn = match self.spare_readbacks.drawn.pop() {
            Some(drawn) => drawn,
            None => self.card().pinned(self.limits.rows)?,
        };
        let (card, space) = (self.card(), &self.rank.tools.space);
        if plan.dims.n_wanted > 0 {
            card.receive(space.drawn.slice(0..plan.dims.n_wanted), &mut drawn)?;
        }
        let end = card.event()?;
        let mut ranks = written.into_iter();
        let stage = |_| ranks.by_ref().take(self.memory.ranks().len()).collect();
        let written = (0..self.n_stages()).map(stage).collect();
        let (first_layer, lost) = (self.first_layer(), self.lost.clone());
        self.watch.watch(WatchedStep { began, first_layer, written, lost, signal: Arc::clone(&signal) });
        let places = std::mem::take(&mut plan.places);
        let readback = Readback { drawn, outcomes, targets, end, others: ends };
        Ok(LaunchedStep::new(self.n_launched, rows, places, &sampled_by, pending, readback, signal))
    }

    /// Returns the first layer that this process computes.
    fn first_layer(&self) -> u16 {
        self.described.stages.iter().next().map_or(0, |layers| layers.start)
    }

    /// Starts the copy of the draws' outcomes to the host, if any are requested.
    fn outcomes(
        &mut self,
        draws: &Draws,
        sampled_by: &[SampledBy],
    ) -> Result<Option<PinnedNumbers<u32>>, CudaError> {
        if !sampled_by.iter().any(|sampled_by| matches!(sampled_by, SampledBy::Card { is_told: true, .. })) {
            return Ok(None);
        }
        let mut outcomes = match self.spare_readbacks.outcomes.pop() {
            Some(outcomes) => outcomes,
            None => self.card().pinned(self.limits.rows * Outcome::WORDS)?,
        };
        let told = self.rank.tools.space.outcomes.slice(0..draws.n_rows() * Outcome::WORDS);
        self.card().receive(told, &mut outcomes)?;
        Ok(Some(outcomes))
    }

    /// Starts the copy of the prompt's log-probabilities to the host, if any are requested.
    fn receive_targets(&mut self, targets: &Targets<'_>) -> Result<Option<TargetReadback>, CudaError> {
        if targets.is_empty() {
            return Ok(None);
        }
        let mut readback = match self.spare_readbacks.targets.pop() {
            Some(readback) => readback,
            None => TargetReadback::new(self.card(), self.limits.tokens)?,
        };
        readback.receive(self.card(), &self.rank.tools.space, targets)?;
        Ok(Some(readback))
    }

    /// Returns the error of a failed launch. An invalid step fails alone; after any other error the GPU
    /// accepts no more work. With several GPUs, others may have started what this one could not, so the
    /// device is lost.
    fn launch_failed(&self, error: &CudaError) -> BackendError {
        let is_of_the_step = matches!(error, CudaError::Argument { .. } | CudaError::NoProduct { .. });
        if is_of_the_step && !self.helpers.are_there() && self.elsewhere.is_none() {
            return BackendError::Launch(in_full(error));
        }
        self.lost.raise();
        BackendError::DeviceLost(in_full(error))
    }

    fn check_size(&self, dims: Dims) -> Result<(), BackendError> {
        let StepLimits { tokens, rows } = self.limits;
        let (n_words, words) = (dims.n_words(), self.rank.tools.space.words.len());
        if dims.n_tokens <= tokens && dims.n_wanted <= rows && n_words <= words {
            return Ok(());
        }
        Err(BackendError::Launch(format!(
            "step too large: {} tokens, {} drawn tokens and {n_words} words of tables; the GPU was prepared for at most \
             {tokens}, {rows} and {words}",
            dims.n_tokens, dims.n_wanted
        )))
    }
}

impl SpareReadbacks {
    fn keep(&mut self, readback: Readback) {
        self.drawn.push(readback.drawn);
        self.outcomes.extend(readback.outcomes);
        self.targets.extend(readback.targets);
    }
}

impl Backend for CudaBackend {
    fn model(&self) -> &ModelInfo {
        &self.model
    }

    fn memory(&self) -> &KvMemory {
        &self.memory
    }

    fn launch(&mut self, batch: StepBatch<'_>) -> Result<PendingStep, BackendError> {
        if self.flights.len() == self.steps_in_flight_max {
            return Err(BackendError::Order(format!(
                "{} steps are in flight already",
                self.steps_in_flight_max
            )));
        }
        if self.lost.is_raised() {
            return Err(BackendError::DeviceLost(in_full(&self.lost.error())));
        }
        self.finish_what_needs_the_host();
        let bounds = self.rank.tools.bounds(self.limits);
        let mut plan = Plan::of(batch.rows, bounds, |slot| self.previous_of(slot));
        self.check_size(plan.dims)?;
        let (signal, fence) = FenceSignal::new();
        let launched_step = self.start(&mut plan, batch.rows, signal);
        let mut launched_step = launched_step.map_err(|error| self.launch_failed(&error))?;
        if self.can_write_masks(&launched_step) {
            launched_step.write_masks(&self.sampler, &self.previous);
        }
        let number = launched_step.number;
        self.flights.push_back(launched_step);
        self.n_launched += 1;
        Ok(PendingStep::new(number, fence, None))
    }

    fn collect(&mut self, step: PendingStep) -> Result<StepOutput, BackendError> {
        match self.flights.front() {
            None => {
                return Err(BackendError::Order(format!("step {} is not in flight", step.step())));
            }
            Some(oldest) if oldest.number != step.step() => {
                let order = format!("step {} was collected before step {}", step.step(), oldest.number);
                return Err(BackendError::Order(order));
            }
            Some(_) => {}
        }
        let mut launched_step = self.flights.pop_front().expect("the oldest step was found above");
        let source = self.rank.tools.source(&self.lost);
        launched_step.finish(&source, &self.sampler, &mut self.previous);
        if let Some(next) = self.flights.front_mut() {
            next.write_masks(&self.sampler, &self.previous);
        }
        let phase = std::mem::replace(&mut launched_step.phase, Phase::OnCard);
        let Phase::Done(outcome) = phase else { unreachable!("a step that was finished is done") };
        if outcome.is_ok() {
            launched_step.signal.layers_done(self.described.folder.config.n_layers as u16);
        }
        self.spare_readbacks.keep(launched_step.into_readback());
        outcome.map_err(|error| BackendError::DeviceLost(in_full(&error)))
    }

    fn tokenizer_file(&self) -> Option<PathBuf> {
        Some(self.described.folder.path().join("tokenizer.json"))
    }

    fn prompt_top_max(&self) -> Option<u8> {
        Some(TOP_MAX as u8)
    }

    fn steps_in_flight_max(&self) -> usize {
        self.steps_in_flight_max
    }

    fn rows_together(&self) -> usize {
        self.rank.tools.card.rows_together()
    }

    fn runs_by_itself(&self) -> bool {
        // With several stages, a step that is launched late leaves stages without work. Other processes begin a step when this
        // host sends them its tokens.
        self.described.all_stages.n_stages() == 1 && self.elsewhere.is_none()
    }

    fn sleep(self: Box<Self>) -> Result<Box<dyn Asleep>, SleepFailed> {
        CudaAsleep::from(self)
    }

    fn used_bytes(&self) -> Option<u64> {
        self.used_on_cards()
    }
}

impl Drop for CudaBackend {
    fn drop(&mut self) {
        // Waits for all GPUs before any of them returns its memory, because they write into each other's
        // memory. Steps that were not collected may still write. If waiting fails, the GPU writes nothing
        // more. They need not wait for masks that will not be written.
        self.masks.of_step(self.n_launched, 0).release();
        self.rank.tools.links.release();
        self.lost.end_sums();
        let others = self.helpers.end();
        for rank in others.iter().chain([&self.rank]) {
            let _ = rank.tools.card.synchronize();
        }
    }
}
