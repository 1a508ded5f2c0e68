//! A GPU as a backend: weights and KV on one card, whole steps launched ahead of the card's work.
//!
//! Suggested reading order: what it is told ([`settings`]), what is put onto the card (`heads`, `weights`,
//! `upload`, `budget`, `workspace`), how a step is described to it (`plan`), what it then does (`decoder`),
//! which steps are recorded (`ladder`, `recorded`), how tokens are drawn (`draws`), and what becomes of a step (`flight`,
//! `watch`).
//!
//! Sums in bf16 depend on how many rows are multiplied together, so a row's numbers differ in their last bits from one
//! batch to another; how far that may go, and what is compared, is in `docs/specification.md`.

mod budget;
mod decoder;
mod draws;
mod flight;
mod heads;
mod ladder;
mod limits;
mod opening;
mod plan;
mod recorded;
pub mod settings;
mod tuning;
mod upload;
mod watch;
mod weights;
mod workspace;

use std::collections::{HashMap, VecDeque};
use std::path::Path;
use std::sync::Arc;

use kernels::cuda::{Buffer, Card, CudaError, Event, Outcome, Pinned, Products, SampleTokens};
use kv_cache::{FenceSignal, KvMemory, OnCard};
use tracing::{Level, enabled};
use types::{ModelInfo, TokenId};

pub use limits::{CudaLimits, DecodeProfile, ProductRate};
pub use settings::CudaSettings;

use super::{Backend, EngineSettings, STEPS_IN_FLIGHT_MAX, StepLimits};
use crate::error::{BackendError, OpenError, RowError};
use crate::step::{Launched, Row, SlotId, StepBatch, StepOutput};
use decoder::{Decoder, Pass};
use draws::{Drawer, Draws};
use flight::{Arrival, Flight, HostSampler, Phase};
use plan::{Bounds, Dims, Fed, Plan};
use recorded::Recorded;
use watch::{Watch, WatchedStep};
use workspace::Workspace;

/// A model on a card.
// Fields are dropped in their order: what works on memory goes before the memory.
#[derive(Debug)]
pub struct CudaBackend {
    model: ModelInfo,
    limits: StepLimits,
    watch: Watch,
    flights: VecDeque<Flight>,
    recorded: Recorded,
    /// The tokens of the step that was finished last.
    previous: HashMap<SlotId, TokenId>,
    n_launched: u64,
    sampler: HostSampler,
    staging: Staging,
    products: Products,
    space: Workspace,
    decoder: Decoder,
    memory: KvMemory,
    weight_bytes: usize,
    card: Card,
}

/// What steps take turns with on their way to the card and back.
#[derive(Debug)]
struct Staging {
    words: VecDeque<Pinned<u32>>,
    draws: VecDeque<Pinned<u32>>,
    edits: VecDeque<Pinned<u32>>,
    drawn: Vec<Pinned<u32>>,
    outcomes: Vec<Pinned<u32>>,
}

/// The line in the table of backends: `name` is a model's folder.
pub(super) fn open(engine: &EngineSettings, name: Option<&str>) -> Result<Box<dyn Backend>, OpenError> {
    let folder = name.unwrap_or_default();
    if engine.ranks.get() > 1 {
        return Err(OpenError::Ranks("several GPUs as one node are not implemented: one rank is".to_owned()));
    }
    Ok(Box::new(CudaBackend::open(Path::new(folder), engine.kv_bytes, &engine.cuda())?))
}

impl CudaBackend {
    /// Bytes of all weight matrices: what a decode step reads.
    pub fn weight_bytes(&self) -> usize {
        self.weight_bytes
    }

    /// The card, to measure what it can do at most.
    pub fn card(&self) -> &Card {
        &self.card
    }

    /// The steps that are recorded as graphs, and how many had to be recorded after the start.
    pub fn n_recorded(&self) -> (usize, usize) {
        self.recorded.counts()
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
        let Self { card, sampler, space, previous, flights, .. } = self;
        if flights.iter().any(|flight| !flight.is_done() && flight.needs_host()) {
            for flight in flights.iter_mut() {
                flight.finish(card, sampler, space.logits.view(), previous);
            }
        }
    }

    fn run(&mut self, plan: &mut Plan<'_>, rows: &[Row<'_>]) -> Result<Vec<Event>, CudaError> {
        if plan.is_decode_only()
            && let Some(rung) = self.recorded.rung(rows.len(), plan.length_max())
        {
            plan.padded(self.recorded.dims(rung), rows);
            self.send(plan)?;
            let work = Work::of(&self.card, &self.decoder, &mut self.products, &mut self.space, &self.memory);
            self.recorded.launch(rung, work)?;
            return Ok(Vec::new());
        }
        self.send(plan)?;
        let mut events = Vec::with_capacity(self.decoder.places.len());
        let card = &self.card;
        Work::of(card, &self.decoder, &mut self.products, &mut self.space, &self.memory).forward(
            plan.dims,
            &plan.sequences(),
            |_| {
                events.push(card.event()?);
                Ok(())
            },
        )?;
        Ok(events)
    }

    /// The step's words, by the buffer that was used longest ago.
    fn send(&mut self, plan: &Plan<'_>) -> Result<(), CudaError> {
        let Self { card, staging, space, .. } = self;
        send(card, &mut staging.words, plan.dims.n_words(), |words| plan.write(words), &mut space.words)
    }

    /// Puts the step onto the card: how far its KV is, layer by layer, and its tokens on their way back.
    fn start(
        &mut self,
        plan: &mut Plan<'_>,
        rows: &[Row<'_>],
        signal: FenceSignal,
    ) -> Result<Flight, CudaError> {
        let began = enabled!(target: "walk", Level::TRACE).then(|| self.card.mark()).transpose()?;
        let written = if plan.dims.n_tokens == 0 { Vec::new() } else { self.run(plan, rows)? };
        let (draws, drawers) = Draws::of(rows, &plan.places, &self.sampler.eos_tokens);
        self.draw(&draws, plan.dims)?;
        let outcomes = self.outcomes(&draws, &drawers)?;
        let mut drawn = match self.staging.drawn.pop() {
            Some(drawn) => drawn,
            None => self.card.pinned(self.limits.rows)?,
        };
        if plan.dims.n_wanted > 0 {
            self.card.receive(self.space.drawn.slice(0..plan.dims.n_wanted), &mut drawn)?;
        }
        let end = self.card.event()?;
        let signal = Arc::new(signal);
        if !written.is_empty() {
            self.watch.watch(WatchedStep { began, written, signal: Arc::clone(&signal) });
        }
        let places = std::mem::take(&mut plan.places);
        Ok(Flight::new(self.n_launched, rows, places, &drawers, Arrival { drawn, outcomes, end }, signal))
    }

    /// Has tokens drawn where the likeliest will not do: the next step reads them on the card as it reads the others.
    fn draw(&mut self, draws: &Draws, dims: Dims) -> Result<(), CudaError> {
        if draws.n_rows() == 0 {
            return Ok(());
        }
        let Self { card, space, staging, decoder, .. } = self;
        let Draws { rows, edits } = draws;
        send(card, &mut staging.draws, rows.len(), |to| to.copy_from_slice(rows), &mut space.draws)?;
        send(card, &mut staging.edits, edits.len(), |to| to.copy_from_slice(edits), &mut space.edits)?;
        let (n, vocab) = (dims.n_wanted, decoder.sizes.vocab);
        card.sample_tokens(SampleTokens {
            drawn: space.drawn.view_mut().slice(0..n),
            outcomes: space.outcomes.view_mut(),
            logits: space.logits.view_mut().slice(0..n * vocab),
            best: space.best.slice(0..n),
            tokens: space.tokens.slice(0..dims.n_tokens),
            draws: space.draws.slice(0..draws.rows.len()),
            edits: space.edits.view_mut().slice(0..draws.edits.len()),
        })
    }

    /// What the card tells of its draws, on its way to the host, if anything is wanted of it.
    fn outcomes(&mut self, draws: &Draws, drawers: &[Drawer]) -> Result<Option<Pinned<u32>>, CudaError> {
        if !drawers.iter().any(|drawer| matches!(drawer, Drawer::Card { is_told: true, .. })) {
            return Ok(None);
        }
        let mut outcomes = match self.staging.outcomes.pop() {
            Some(outcomes) => outcomes,
            None => self.card.pinned(self.limits.rows * Outcome::WORDS)?,
        };
        let told = self.space.outcomes.slice(0..draws.n_rows() * Outcome::WORDS);
        self.card.receive(told, &mut outcomes)?;
        Ok(Some(outcomes))
    }

    fn check_size(&self, dims: Dims) -> Result<(), BackendError> {
        let StepLimits { tokens, rows } = self.limits;
        if dims.n_tokens <= tokens && dims.n_wanted <= rows && dims.n_words() <= self.space.words.len() {
            return Ok(());
        }
        Err(BackendError::Launch(format!(
            "{} tokens, of which {} are drawn, where the GPU was prepared for {tokens} and {rows}",
            dims.n_tokens, dims.n_wanted
        )))
    }
}

impl Staging {
    fn keep(&mut self, arrival: Arrival) {
        self.drawn.push(arrival.drawn);
        self.outcomes.extend(arrival.outcomes);
    }
}

/// Writes words and copies them to the card, by the buffer that was used longest ago.
fn send(
    card: &Card,
    by: &mut VecDeque<Pinned<u32>>,
    n_words: usize,
    write: impl FnOnce(&mut [u32]),
    to: &mut Buffer<u32>,
) -> Result<(), CudaError> {
    if n_words == 0 {
        return Ok(());
    }
    let staged = by.front_mut().expect("there are always two");
    write(&mut staged.numbers()?[..n_words]);
    card.send(staged, to.view_mut().slice(0..n_words))?;
    by.rotate_left(1);
    Ok(())
}

/// What a pass works with.
#[derive(Debug)]
struct Work<'a> {
    card: &'a Card,
    decoder: &'a Decoder,
    products: &'a mut Products,
    space: &'a mut Workspace,
    kv: OnCard<'a>,
}

impl<'a> Work<'a> {
    fn of(
        card: &'a Card,
        decoder: &'a Decoder,
        products: &'a mut Products,
        space: &'a mut Workspace,
        memory: &'a KvMemory,
    ) -> Self {
        let kv = memory.on_card().expect("the backend's memory was taken on its card");
        Self { card, decoder, products, space, kv }
    }

    fn forward(
        &mut self,
        dims: Dims,
        sequences: &[kernels::cuda::PrefillSequence],
        written: impl FnMut(usize) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let Self { card, decoder, products, space, kv } = self;
        let sections = dims.sections();
        decoder.forward(&mut Pass { card, products, space, kv: *kv, dims, sections, sequences }, written)
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
        self.finish_what_needs_the_host();
        let bounds = Bounds { vocab: self.decoder.sizes.vocab, n_groups: self.model.layout.groups.len() };
        let mut plan = Plan::of(batch.rows, bounds, |slot| self.previous_of(slot));
        self.check_size(plan.dims)?;
        let (signal, fence) = FenceSignal::new();
        let flight = self.start(&mut plan, batch.rows, signal).map_err(launch_failed)?;
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
        flight.finish(&self.card, &self.sampler, self.space.logits.view(), &mut self.previous);
        let phase = std::mem::replace(&mut flight.phase, Phase::OnCard);
        let Phase::Done(outcome) = phase else { unreachable!("a step that was finished is done") };
        if outcome.is_ok() {
            flight.signal.layers_done(self.decoder.places.len() as u16);
        }
        self.staging.keep(flight.into_arrival());
        outcome.map_err(|error| BackendError::DeviceLost(in_full(&error)))
    }

    fn runs_by_itself(&self) -> bool {
        true
    }
}

impl Drop for CudaBackend {
    fn drop(&mut self) {
        // Steps that nobody collected may still write. Where waiting fails, the card writes nothing any more.
        let _ = self.card.synchronize();
    }
}

/// A mistake in a step is that step's; a card that refuses work will refuse all of it.
fn launch_failed(error: CudaError) -> BackendError {
    match error {
        CudaError::Argument { .. } | CudaError::NoProduct { .. } => BackendError::Launch(in_full(&error)),
        _ => BackendError::DeviceLost(in_full(&error)),
    }
}

/// An error with what caused it.
fn in_full(error: &CudaError) -> String {
    match std::error::Error::source(error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}
