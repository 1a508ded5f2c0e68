//! The GPU backend, on one GPU or several: weights and KV are on the GPUs, and whole steps are launched before
//! the GPUs run them.
//!
//! Suggested reading order: settings ([`settings`]), opening (`description`, `opening`), GPU memory (`heads`,
//! `share`, `weights`, `loader`, `fp8`, `upload`, `budget`, `workspace`), the description of a step (`plan`),
//! its execution (`tools`, `decoder`, `forward`, `layer`, `attention`), recorded steps (`graph_sizes`,
//! `recorded`), sampling (`draws`, `masks`, `targets`), several GPUs (`rank`, `lockstep`), results of a step (`launched_step`,
//! `watch`), sleep (`asleep`), measurements (`timing`, `tuning`, `limits`, `profile`).
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
mod launched_step;
mod forward;
mod fp8;
mod heads;
mod graph_sizes;
mod layer;
mod limits;
mod loader;
mod lockstep;
mod masks;
mod opening;
mod plan;
mod profile;
mod rank;
mod recorded;
pub mod settings;
mod share;
mod targets;
mod timing;
mod tools;
mod tuning;
mod upload;
mod watch;
mod weights;
mod workspace;

use std::collections::{HashMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use device::cuda::{Card, CudaError, PinnedNumbers};
use kernels::cuda::{ComputeCard, LostFlag, Outcome, TOP_MAX, TokenMasks};
use kv_cache::{FenceSignal, KvMemory};
use serde::Serialize;
use tracing::{Level, enabled};
use types::{ModelInfo, TokenId, in_full};

pub use limits::{CudaLimits, ProductRate};
pub use profile::DecodeProfile;
pub use settings::CudaSettings;

use super::{Asleep, Backend, Device, EngineSettings, STEPS_IN_FLIGHT_MAX, SleepFailed, StepLimits};
use crate::error::{BackendError, OpenError, RowError};
use crate::step::{PendingStep, Row, SlotId, StepBatch, StepOutput};
use asleep::CudaAsleep;
use description::ModelDescription;
use draws::{Draws, SampledBy};
use launched_step::{HostSampler, LaunchedStep, Phase, Readback};
use lockstep::Helpers;
use masks::PendingMasks;
use plan::{Bounds, Dims, InputToken, Plan};
use rank::{LAUNCH_WITHIN, Order, OrderResult, Rank, Step};
use targets::{TargetReadback, Targets};
use watch::{Watch, WatchedStep};

/// A model on one GPU, or divided over several GPUs. The first rank works on the caller's thread.
// Fields are dropped in this order: values that use the memory before the memory.
#[derive(Debug)]
pub struct CudaBackend {
    model: ModelInfo,
    limits: StepLimits,
    watch: Watch,
    flights: VecDeque<LaunchedStep>,
    /// The sampled tokens of the step that finished last, by slot.
    previous: HashMap<SlotId, TokenId>,
    n_launched: u64,
    sampler: HostSampler,
    spare_readbacks: SpareReadbacks,
    helpers: Helpers<Rank>,
    lost: Option<LostFlag>,
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
    if engine.device == Device::Auto {
        // Without a GPU the CPU computes, which may have several stages.
        Card::count()?;
    }
    engine.check_one_stage("a GPU node")?;
    Ok(Box::new(CudaBackend::open(Path::new(folder), engine.kv, &engine.cuda())?))
}

impl CudaBackend {
    /// Returns the bytes of all weight matrices on one GPU, which every decode step reads.
    pub fn weight_bytes(&self) -> usize {
        self.loaded.bytes
    }

    /// Returns the size and the loading time of the weights.
    pub fn loaded(&self) -> LoadReport {
        self.loaded
    }

    /// Returns the first GPU, for measurements.
    pub fn card(&self) -> &ComputeCard {
        &self.rank.tools.card
    }

    /// Returns the number of GPUs that share the model.
    pub fn n_ranks(&self) -> u16 {
        self.memory.n_ranks()
    }

    /// Returns the number of steps recorded as graphs at the start, and of those recorded later.
    pub fn n_recorded(&self) -> (usize, usize) {
        self.rank.recorded.counts()
    }

    /// Returns where the next step finds a slot's last token.
    fn previous_of(&self, slot: SlotId) -> Result<InputToken, RowError> {
        match self.flights.back() {
            Some(launched_step) if !launched_step.is_done() => {
                launched_step.place_of(slot).map(InputToken::Drawn).ok_or(RowError::NoTokenInFlight)
            }
            _ => self
                .previous
                .get(&slot)
                .map(|token| InputToken::Token(token.0))
                .ok_or(RowError::NoTokenInFlight),
        }
    }

    /// Finishes the steps with rows that the host samples, because the next step overwrites their logits.
    fn finish_what_needs_the_host(&mut self) {
        let Self { rank, lost, sampler, previous, flights, .. } = self;
        if flights.iter().any(|launched_step| !launched_step.is_done() && launched_step.needs_host()) {
            let source = rank.tools.source(lost.as_ref());
            for launched_step in flights.iter_mut() {
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
        let graph_size = if plan.is_recordable() {
            self.rank.recorded.graph_size(rows.len(), plan.length_max())
        } else {
            None
        };
        if let Some(graph_size) = graph_size {
            plan.padded(self.rank.recorded.dims(graph_size), rows);
        }
        let (draws, sampled_by) = Draws::of(rows, &plan.places, &self.sampler.eos_tokens);
        let mut words = Vec::new();
        if self.helpers.are_there() {
            words.resize(plan.dims.n_words(), 0);
            plan.write(&mut words);
        }
        let pending = PendingMasks::of(rows, &sampled_by, &self.masks, self.n_launched);
        let masks = pending.as_ref().map(|pending| pending.masks().clone());
        let step = Step { dims: plan.dims, graph_size, sequences: plan.sequences(), draws, masks, words };
        let step = Arc::new(step);
        let all = self.launch_on_all(&step, plan)?;
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
        let signal = Arc::new(signal);
        let (mut written, mut others) = (Vec::with_capacity(all.len()), Vec::new());
        for done in all {
            written.push(done.written);
            others.extend(done.end);
        }
        if written.iter().all(|of_rank| !of_rank.is_empty()) {
            let lost = self.lost.clone();
            self.watch.watch(WatchedStep { began, written, lost, signal: Arc::clone(&signal) });
        }
        let places = std::mem::take(&mut plan.places);
        let readback = Readback { drawn, outcomes, targets, end, others };
        Ok(LaunchedStep::new(self.n_launched, rows, places, &sampled_by, pending, readback, signal))
    }

    /// Launches a step on all ranks' GPUs at the same time. Returns the ranks' results, this rank's first.
    fn launch_on_all(&mut self, step: &Arc<Step>, plan: &Plan<'_>) -> Result<Vec<OrderResult>, CudaError> {
        self.helpers.begin(&Order::Step(Arc::clone(step)))?;
        let written = self.rank.launch(step, |words| plan.write(words))?;
        let mut all = vec![OrderResult { written, ..OrderResult::default() }];
        all.extend(self.helpers.finish(LAUNCH_WITHIN)?);
        Ok(all)
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
    /// accepts no more work. With several ranks, others may have started what this one could not, so the
    /// device is lost.
    fn launch_failed(&self, error: &CudaError) -> BackendError {
        match (&self.lost, error) {
            (None, CudaError::Argument { .. } | CudaError::NoProduct { .. }) => {
                BackendError::Launch(in_full(error))
            }
            (None, _) => BackendError::DeviceLost(in_full(error)),
            (Some(lost), _) => {
                lost.raise();
                BackendError::DeviceLost(in_full(error))
            }
        }
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
        if self.flights.len() == STEPS_IN_FLIGHT_MAX {
            return Err(BackendError::Order(format!("{STEPS_IN_FLIGHT_MAX} steps are in flight already")));
        }
        if self.lost.as_ref().is_some_and(LostFlag::is_raised) {
            return Err(BackendError::DeviceLost(in_full(&launched_step::peer_lost())));
        }
        self.finish_what_needs_the_host();
        let bounds = Bounds {
            vocab: self.rank.tools.decoder.sizes.vocab,
            n_groups: self.model.layout.groups.len(),
            n_wanted_max: self.limits.rows,
        };
        let mut plan = Plan::of(batch.rows, bounds, |slot| self.previous_of(slot));
        self.check_size(plan.dims)?;
        let (signal, fence) = FenceSignal::new();
        let launched_step = self.start(&mut plan, batch.rows, signal);
        let mut launched_step = launched_step.map_err(|error| self.launch_failed(&error))?;
        if self.flights.back().is_none_or(LaunchedStep::is_done) || !launched_step.needs_previous() {
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
        let source = self.rank.tools.source(self.lost.as_ref());
        launched_step.finish(&source, &self.sampler, &mut self.previous);
        if let Some(next) = self.flights.front_mut() {
            next.write_masks(&self.sampler, &self.previous);
        }
        let phase = std::mem::replace(&mut launched_step.phase, Phase::OnCard);
        let Phase::Done(outcome) = phase else { unreachable!("a step that was finished is done") };
        if outcome.is_ok() {
            launched_step.signal.layers_done(self.rank.tools.decoder.places.len() as u16);
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

    fn runs_by_itself(&self) -> bool {
        true
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
        // more. They need not wait for masks that no one will write.
        self.masks.of_step(self.n_launched, 0).release();
        let others = self.helpers.end();
        for rank in others.iter().chain([&self.rank]) {
            let _ = rank.tools.card.synchronize();
        }
    }
}
