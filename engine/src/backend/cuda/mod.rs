//! A GPU as a backend, or several: weights and KV on cards, whole steps launched ahead of the cards' work.
//!
//! Suggested reading order: what it is told ([`settings`]), what is put onto the card (`heads`, `share`, `weights`,
//! `fp8`, `upload`, `budget`, `workspace`), how a step is described to it (`plan`), what it then does (`rank`, `decoder`, `layer`),
//! which steps are recorded (`ladder`, `recorded`), how tokens are drawn (`draws`), how several cards go on together
//! (`lockstep`), what becomes of a step (`flight`, `watch`), and how all of it sleeps (`asleep`).
//!
//! Sums in bf16 depend on how many rows are multiplied together, so a row's numbers differ in their last bits from one
//! batch to another; how far that may go, and what is compared, is in `docs/specification.md`. Where
//! [`CudaSettings::deterministic`] is set they do not: every matrix is multiplied in one way whatever the number of rows,
//! and a token's attention is that of a row of one token in chunks that begin where the sequence does.

mod asleep;
mod budget;
mod decoder;
mod draws;
mod flight;
mod fp8;
mod heads;
mod ladder;
mod layer;
mod limits;
mod lockstep;
mod opening;
mod plan;
mod rank;
mod recorded;
pub mod settings;
mod share;
mod tuning;
mod upload;
mod watch;
mod weights;
mod workspace;

use std::collections::{HashMap, VecDeque};
use std::path::Path;
use std::sync::Arc;

use kernels::cuda::{Card, CudaError, LostFlag, Outcome, Pinned};
use kv_cache::{FenceSignal, KvMemory};
use serde::Serialize;
use tracing::{Level, enabled};
use types::{ModelInfo, TokenId, in_full};

pub use limits::{CudaLimits, DecodeProfile, ProductRate};
pub use settings::CudaSettings;

use super::{Asleep, Backend, EngineSettings, STEPS_IN_FLIGHT_MAX, Sleepless, StepLimits};
use crate::error::{BackendError, OpenError, RowError};
use crate::step::{Launched, Row, SlotId, StepBatch, StepOutput};
use asleep::CudaAsleep;
use draws::{Drawer, Draws};
use flight::{Arrival, Flight, HostSampler, Phase};
use lockstep::Helpers;
use opening::Described;
use plan::{Bounds, Dims, Fed, Plan};
use rank::{Done, LAUNCH_WITHIN, Order, Rank, Step};
use watch::{Watch, WatchedStep};

/// A model on a card, or on several that share it. The first one's work is done on the caller's thread.
// Fields are dropped in their order: what works on memory goes before the memory.
#[derive(Debug)]
pub struct CudaBackend {
    model: ModelInfo,
    limits: StepLimits,
    watch: Watch,
    flights: VecDeque<Flight>,
    /// The tokens of the step that was finished last.
    previous: HashMap<SlotId, TokenId>,
    n_launched: u64,
    sampler: HostSampler,
    arrivals: Arrivals,
    helpers: Helpers<Rank>,
    lost: Option<LostFlag>,
    rank: Rank,
    memory: KvMemory,
    /// Clones of the memory that are its own and its ranks'.
    n_holders: usize,
    loaded: Loaded,
    /// What it was opened with.
    described: Arc<Described>,
}

/// Weights that were put onto a card, and how long that took.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Loaded {
    pub bytes: usize,
    pub seconds: f64,
}

/// What steps take turns with on their way back.
#[derive(Debug)]
struct Arrivals {
    drawn: Vec<Pinned<u32>>,
    outcomes: Vec<Pinned<u32>>,
}

/// The line in the table of backends: `name` is a model's folder.
pub(super) fn open(engine: &EngineSettings, name: Option<&str>) -> Result<Box<dyn Backend>, OpenError> {
    let folder = name.unwrap_or_default();
    Ok(Box::new(CudaBackend::open(Path::new(folder), engine.kv, &engine.cuda())?))
}

impl CudaBackend {
    /// Bytes of all weight matrices on one card: what a decode step reads there.
    pub fn weight_bytes(&self) -> usize {
        self.loaded.bytes
    }

    /// How long it took to put them onto the card.
    pub fn loaded(&self) -> Loaded {
        self.loaded
    }

    /// The first card, to measure what it can do at most.
    pub fn card(&self) -> &Card {
        &self.rank.tools.card
    }

    /// How many cards share the model.
    pub fn n_ranks(&self) -> u16 {
        self.memory.n_ranks()
    }

    /// The steps that are recorded as graphs, and how many had to be recorded after the start.
    pub fn n_recorded(&self) -> (usize, usize) {
        self.rank.recorded.counts()
    }

    /// What stands for a slot's token in flight.
    fn previous_of(&self, slot: SlotId) -> Result<Fed, RowError> {
        match self.flights.back() {
            Some(flight) if !flight.is_done() => {
                flight.place_of(slot).map(Fed::Drawn).ok_or(RowError::NoTokenInFlight)
            }
            _ => self.previous.get(&slot).map(|token| Fed::Token(token.0)).ok_or(RowError::NoTokenInFlight),
        }
    }

    /// Steps whose tokens the host draws are finished before their logits are written over.
    fn finish_what_needs_the_host(&mut self) {
        let Self { rank, lost, sampler, previous, flights, .. } = self;
        if flights.iter().any(|flight| !flight.is_done() && flight.needs_host()) {
            let source = rank.tools.source(lost.as_ref());
            for flight in flights.iter_mut() {
                flight.finish(&source, sampler, previous);
            }
        }
    }

    /// Puts the step onto all cards: how far its KV is, layer by layer, and its tokens on their way back.
    fn start(
        &mut self,
        plan: &mut Plan<'_>,
        rows: &[Row<'_>],
        signal: FenceSignal,
    ) -> Result<Flight, CudaError> {
        let began = enabled!(target: "walk", Level::TRACE).then(|| self.card().mark()).transpose()?;
        let rung =
            if plan.is_decode_only() { self.rank.recorded.rung(rows.len(), plan.length_max()) } else { None };
        if let Some(rung) = rung {
            plan.padded(self.rank.recorded.dims(rung), rows);
        }
        let (draws, drawers) = Draws::of(rows, &plan.places, &self.sampler.eos_tokens);
        let mut words = Vec::new();
        if self.helpers.are_there() {
            words.resize(plan.dims.n_words(), 0);
            plan.write(&mut words);
        }
        let step = Arc::new(Step { dims: plan.dims, rung, sequences: plan.sequences(), draws, words });
        let all = self.launch_on_all(&step, plan)?;
        let outcomes = self.outcomes(&step.draws, &drawers)?;
        let mut drawn = match self.arrivals.drawn.pop() {
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
        let arrival = Arrival { drawn, outcomes, end, others };
        Ok(Flight::new(self.n_launched, rows, places, &drawers, arrival, signal))
    }

    /// On this rank's card while the others put it onto theirs: this one's events first.
    fn launch_on_all(&mut self, step: &Arc<Step>, plan: &Plan<'_>) -> Result<Vec<Done>, CudaError> {
        self.helpers.begin(&Order::Step(Arc::clone(step)))?;
        let written = self.rank.launch(step, |words| plan.write(words))?;
        let mut all = vec![Done { written, ..Done::default() }];
        all.extend(self.helpers.finish(LAUNCH_WITHIN)?);
        Ok(all)
    }

    /// What the card tells of its draws, on its way to the host, if anything is wanted of it.
    fn outcomes(&mut self, draws: &Draws, drawers: &[Drawer]) -> Result<Option<Pinned<u32>>, CudaError> {
        if !drawers.iter().any(|drawer| matches!(drawer, Drawer::Card { is_told: true, .. })) {
            return Ok(None);
        }
        let mut outcomes = match self.arrivals.outcomes.pop() {
            Some(outcomes) => outcomes,
            None => self.card().pinned(self.limits.rows * Outcome::WORDS)?,
        };
        let told = self.rank.tools.space.outcomes.slice(0..draws.n_rows() * Outcome::WORDS);
        self.card().receive(told, &mut outcomes)?;
        Ok(Some(outcomes))
    }

    /// A mistake in a step is that step's; a card that refuses work will refuse all of it. Where ranks share the model the
    /// others may have begun what this one could not, so there nothing goes on.
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
            "{} tokens, of which {} are drawn, with tables and the like of {n_words} words, where the GPU was prepared \
             for {tokens}, {rows} and {words}",
            dims.n_tokens, dims.n_wanted
        )))
    }
}

impl Arrivals {
    fn keep(&mut self, arrival: Arrival) {
        self.drawn.push(arrival.drawn);
        self.outcomes.extend(arrival.outcomes);
    }
}

impl Backend for CudaBackend {
    fn model(&self) -> &ModelInfo {
        &self.model
    }

    fn memory(&self) -> &KvMemory {
        &self.memory
    }

    fn launch(&mut self, batch: StepBatch<'_>) -> Result<Launched, BackendError> {
        if self.flights.len() == STEPS_IN_FLIGHT_MAX {
            return Err(BackendError::Order(format!("{STEPS_IN_FLIGHT_MAX} steps are in flight already")));
        }
        if self.lost.as_ref().is_some_and(LostFlag::is_raised) {
            return Err(BackendError::DeviceLost(in_full(&flight::peer_lost())));
        }
        self.finish_what_needs_the_host();
        let bounds =
            Bounds { vocab: self.rank.tools.decoder.sizes.vocab, n_groups: self.model.layout.groups.len() };
        let mut plan = Plan::of(batch.rows, bounds, |slot| self.previous_of(slot));
        self.check_size(plan.dims)?;
        let (signal, fence) = FenceSignal::new();
        let flight = self.start(&mut plan, batch.rows, signal);
        let flight = flight.map_err(|error| self.launch_failed(&error))?;
        let number = flight.number;
        self.flights.push_back(flight);
        self.n_launched += 1;
        Ok(Launched::new(number, fence, None))
    }

    fn collect(&mut self, step: Launched) -> Result<StepOutput, BackendError> {
        match self.flights.front() {
            None => return Err(BackendError::Order(format!("step {} is not in flight", step.step()))),
            Some(oldest) if oldest.number != step.step() => {
                let order = format!("step {} was collected before step {}", step.step(), oldest.number);
                return Err(BackendError::Order(order));
            }
            Some(_) => {}
        }
        let mut flight = self.flights.pop_front().expect("it was just looked at");
        let source = self.rank.tools.source(self.lost.as_ref());
        flight.finish(&source, &self.sampler, &mut self.previous);
        let phase = std::mem::replace(&mut flight.phase, Phase::OnCard);
        let Phase::Done(outcome) = phase else { unreachable!("a step that was finished is done") };
        if outcome.is_ok() {
            flight.signal.layers_done(self.rank.tools.decoder.places.len() as u16);
        }
        self.arrivals.keep(flight.into_arrival());
        outcome.map_err(|error| BackendError::DeviceLost(in_full(&error)))
    }

    fn runs_by_itself(&self) -> bool {
        true
    }

    fn sleep(self: Box<Self>) -> Result<Box<dyn Asleep>, Sleepless> {
        CudaAsleep::from(self)
    }

    fn used_bytes(&self) -> Option<u64> {
        self.used_on_cards()
    }
}

impl Drop for CudaBackend {
    fn drop(&mut self) {
        // Cards reach each other's memory, so none gives its own back before all have done what they were told. Steps that
        // nobody collected may still write. Where waiting fails, the card writes nothing any more.
        let others = self.helpers.end();
        for rank in others.iter().chain([&self.rank]) {
            let _ = rank.tools.card.synchronize();
        }
    }
}
