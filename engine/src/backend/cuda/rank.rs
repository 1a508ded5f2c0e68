//! Hot path.
//! One GPU of a model: its share of the weights and of KV, and its part of each step.
//!
//! All ranks of all stages get the same orders, and each launches work on its own GPU. Every GPU of the last stage samples
//! the tokens of a step, from the same logits by the same rules, so that the next step finds the tokens in its memory, or
//! the first stage fetches them from there.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use device::cuda::{Bf16, Buffer, CudaError, Event, PinnedNumbers, PinnedRows};
use kernels::cuda::matmul::Choices;
use kernels::cuda::{ComputeCard, PrefillSequence, SampleTokens, StepMasks};

use super::description::ModelDescription;
use super::draws::Draws;
use super::graph_sizes::{GraphSize, GraphSizes};
use super::links::StepPlaces;
use super::lockstep::{Helpers, LAUNCH_WITHIN, Performer};
use super::plan::{Dims, Plan};
use super::recorded::RecordedGraphs;
use super::tools::Tools;
use super::{profile, timing};
use crate::error::OpenError;
use crate::step::Row;

/// The time limit for a rank's preparations. The longest preparation is recording all steps.
pub(super) const PREPARE_WITHIN: Duration = Duration::from_secs(120);

/// One GPU of a model, with all its data.
// Fields are dropped in this order: values that use the memory before the memory.
#[derive(Debug)]
pub(super) struct Rank {
    pub(super) recorded: RecordedGraphs,
    staging: Staging,
    pub(super) tools: Tools,
}

/// Pinned buffers for uploads, which steps use in turn.
#[derive(Debug)]
struct Staging {
    words: VecDeque<PinnedNumbers<u32>>,
    draws: VecDeque<PinnedNumbers<u32>>,
    edits: VecDeque<PinnedNumbers<u32>>,
}

/// A step in the form that is sent to all ranks.
#[derive(Debug)]
pub(super) struct Step {
    pub(super) dims: Dims,
    /// The size of the recorded graph that the step uses, if any.
    pub(super) graph_size: Option<GraphSize>,
    pub(super) sequences: Vec<PrefillSequence>,
    pub(super) draws: Draws,
    /// The masks of the rows that follow a grammar, written after the launch.
    pub(super) masks: Option<StepMasks>,
    /// The words of the plan, for the other ranks.
    pub(super) words: Vec<u32>,
    pub(super) places: StepPlaces,
    /// Where all ranks leave the step's rows, if another process computes the next stage.
    pub(super) rows_out: Option<PinnedRows<Bf16>>,
}

/// An order of the rank on the caller's thread to the others.
#[derive(Clone, Debug)]
pub(super) enum Order {
    Step(Arc<Step>),
    /// Uses these methods for products from now on.
    SetChoices(Choices),
    /// Writes the words of a step for measurements.
    WriteWords(Arc<[u32]>),
    TimeStep(Dims),
    WarmUp(GraphSizes),
    /// Records steps with sequences of up to this number of tokens.
    Record(usize),
    Profile {
        rows: usize,
        length: usize,
    },
    /// Returns memory, for sleep.
    GiveBack,
    /// Allocates memory and loads the weights again, to wake.
    Refill(Arc<ModelDescription>),
}

/// The result of an order on one rank: events of a step, or an error.
#[derive(Debug, Default)]
pub(super) struct OrderResult {
    /// The events at which each layer's KV is written. Empty if the step uses a recorded graph.
    pub(super) written: Vec<Event>,
    /// The event at which the whole step is done; `None` for other orders.
    pub(super) end: Option<Event>,
    /// The error of a rejected sleep or wake, after which the GPU still works.
    pub(super) refused: Option<OpenError>,
}

// === impl Rank ===

impl Rank {
    pub(super) fn new(tools: Tools, recorded: RecordedGraphs) -> Result<Self, CudaError> {
        let Tools { card, space, .. } = &tools;
        // With a buffer for each step in flight, no launch waits for an earlier step's copy.
        let n_buffers = tools.decoder.sizes.stage.steps_in_flight_max();
        let of_len = |len: usize| (0..n_buffers).map(|_| card.pinned(len)).collect::<Result<_, _>>();
        let staging = Staging {
            words: of_len(space.words.len())?,
            draws: of_len(space.draws.len())?,
            edits: of_len(space.edits.len())?,
        };
        Ok(Self { recorded, staging, tools })
    }

    /// Pads a plan to the size of a recorded graph if there is one for it, and returns that size.
    pub(super) fn pad(&self, plan: &mut Plan<'_>, rows: &[Row<'_>]) -> Option<GraphSize> {
        let graph_size =
            plan.is_recordable().then(|| self.recorded.graph_size(rows.len(), plan.length_max()));
        let graph_size = graph_size.flatten()?;
        plan.padded(self.recorded.dims(graph_size), rows);
        Some(graph_size)
    }

    /// Launches a step. Returns an event for each layer's KV unless the step uses a recorded graph. `write`
    /// writes the step's words.
    pub(super) fn launch(
        &mut self,
        step: &Step,
        write: impl FnOnce(&mut [u32]),
    ) -> Result<Vec<Event>, CudaError> {
        self.tools.ranks.begin();
        let written = if step.dims.n_tokens == 0 { Vec::new() } else { self.run(step, write)? };
        if self.tools.decoder.sizes.stage.is_last() {
            self.draw(&step.draws, step.masks.as_ref(), step.dims)?;
        }
        let Tools { links, card, space, .. } = &mut self.tools;
        links.put(card, space, step.places.here, step.dims)?;
        if let Some(to) = &step.rows_out {
            self.give_rows(step, to)?;
        }
        Ok(written)
    }

    /// Starts the copies of this rank's rows for another process: the residual, and the rows normed for the next stage's
    /// first layer. Padding is left out.
    fn give_rows(&self, step: &Step, to: &PinnedRows<Bf16>) -> Result<(), CudaError> {
        let Tools { card, space, decoder, ranks, .. } = &self.tools;
        let n = step.places.n_tokens * decoder.sizes.hidden;
        // The method of the sums depends on the rows with padding.
        match decoder.rows_given(ranks, step.dims.n_tokens) {
            None => Ok(()),
            Some(share) => {
                card.receive_rows(&[space.residual.slice(0..n), space.normed.slice(0..n)], share, to)
            }
        }
    }

    fn run(&mut self, step: &Step, write: impl FnOnce(&mut [u32])) -> Result<Vec<Event>, CudaError> {
        let Self { recorded, staging, tools } = self;
        // The words go through the buffer whose last use is the oldest, because its copy is the most likely
        // to be done.
        send(&tools.card, &mut staging.words, step.dims.n_words(), write, &mut tools.space.words)?;
        tools.links.fetch(&tools.card, &mut tools.space, &step.places, step.dims)?;
        let mut events = Vec::with_capacity(tools.decoder.places.len());
        match step.graph_size {
            Some(graph_size) => recorded.launch(graph_size, tools)?,
            None => tools.forward(step.dims, &step.sequences, |card, _| {
                events.push(card.event()?);
                Ok(())
            })?,
        }
        Ok(events)
    }

    /// Samples tokens for rows that do not take the likeliest one, into the memory from which the next step
    /// reads its tokens.
    fn draw(&mut self, draws: &Draws, masks: Option<&StepMasks>, dims: Dims) -> Result<(), CudaError> {
        if draws.n_rows() == 0 {
            return Ok(());
        }
        let Self { staging, tools: Tools { card, space, decoder, .. }, .. } = self;
        let Draws { rows, edits, .. } = draws;
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
            masks,
        })
    }
}

/// The events of a step that was launched on all GPUs of this process.
#[derive(Debug)]
pub(super) struct LaunchedOnAll {
    /// For each GPU, ordered by stage and then by rank: see [`OrderResult::written`].
    pub(super) written: Vec<Vec<Event>>,
    /// The ends of the step on the GPUs of other threads.
    pub(super) ends: Vec<Event>,
}

/// Launches a step on all GPUs of this process at the same time. `rank` is number `nth` of them, and works on this thread.
pub(super) fn launch_on_all(
    rank: &mut Rank,
    helpers: &mut Helpers<Rank>,
    nth: usize,
    step: &Arc<Step>,
    plan: &Plan<'_>,
) -> Result<LaunchedOnAll, CudaError> {
    helpers.begin(&Order::Step(Arc::clone(step)))?;
    let written = rank.launch(step, |words| plan.write(words));
    // A stage fails late if the stage before it has failed, so the others' errors come first.
    let (others, written_here) = (helpers.finish(LAUNCH_WITHIN)?, written?);
    let (mut written, ends): (Vec<_>, Vec<_>) =
        others.into_iter().map(|done| (done.written, done.end)).unzip();
    written.insert(nth, written_here);
    Ok(LaunchedOnAll { written, ends: ends.into_iter().flatten().collect() })
}

impl Performer for Rank {
    type Order = Order;
    type Answer = OrderResult;

    fn perform(&mut self, order: Order) -> Result<OrderResult, CudaError> {
        let Self { recorded, tools, .. } = self;
        match order {
            Order::GiveBack => {
                return Ok(OrderResult { refused: tools.give_back().err(), ..OrderResult::default() });
            }
            Order::Refill(described) => {
                return Ok(OrderResult { refused: tools.refill(&described).err(), ..OrderResult::default() });
            }
            Order::Step(step) => {
                let written = self.launch(&step, |words| words.copy_from_slice(&step.words))?;
                return Ok(OrderResult { written, end: Some(self.tools.card.event()?), refused: None });
            }
            Order::SetChoices(choices) => tools.products.adopt(choices),
            Order::WriteWords(words) => tools.write_words(&words)?,
            Order::TimeStep(dims) => timing::time_step(tools, dims).map(drop)?,
            Order::WarmUp(graph_sizes) => tools.warm_up(&graph_sizes)?,
            Order::Record(length) => recorded.record_up_to(length, tools, |_, _| {})?,
            Order::Profile { rows, length } if tools.decoder.sizes.stage.is_last() => {
                profile::profile_decode(tools, rows, length).map(drop)?;
            }
            // Only the last stage is profiled.
            Order::Profile { .. } => {}
        }
        Ok(OrderResult::default())
    }
}

/// Writes words and copies them to the GPU, from the buffer whose last use is the oldest.
fn send(
    card: &ComputeCard,
    by: &mut VecDeque<PinnedNumbers<u32>>,
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
