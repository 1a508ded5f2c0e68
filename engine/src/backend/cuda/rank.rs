//! Hot path.
//! One GPU of a model: its share of the weights and of the KV, and what it does of each step.
//!
//! All ranks are told the same, and each tells its own card. What a step draws is drawn on every card, from the same
//! logits by the same rules, so that the next step finds it there.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use kernels::cuda::matmul::Choices;
use kernels::cuda::{
    Buffer, Card, CudaError, Event, LostFlag, Peers, Pinned, PrefillSequence, Products, SampleTokens,
};
use kv_cache::{KvMemory, OnCard};

use super::decoder::{Decoder, Pass};
use super::draws::Draws;
use super::flight::Source;
use super::ladder::{Ladder, Rung};
use super::lockstep::Performer;
use super::opening::Described;
use super::plan::Dims;
use super::recorded::Recorded;
use super::workspace::Workspace;
use super::{limits, tuning};
use crate::error::OpenError;

/// How long a rank may take to prepare something: the longest is to record all steps.
pub(super) const PREPARE_WITHIN: Duration = Duration::from_secs(120);
/// How long it may take to put a step onto its card, which it does not wait for.
pub(super) const LAUNCH_WITHIN: Duration = Duration::from_secs(30);

/// A card with all that is on it.
// Fields are dropped in their order: what works on memory goes before the memory.
#[derive(Debug)]
pub(super) struct Rank {
    pub(super) recorded: Recorded,
    staging: Staging,
    pub(super) tools: Tools,
}

/// What a pass works with.
#[derive(Debug)]
pub(super) struct Tools {
    pub(super) products: Products,
    /// The other ranks' cards, if there are others.
    pub(super) peers: Option<Peers>,
    pub(super) space: Workspace,
    pub(super) decoder: Decoder,
    pub(super) memory: KvMemory,
    pub(super) card: Card,
}

/// What steps take turns with on their way to the card.
#[derive(Debug)]
struct Staging {
    words: VecDeque<Pinned<u32>>,
    draws: VecDeque<Pinned<u32>>,
    edits: VecDeque<Pinned<u32>>,
}

/// A step, as all ranks are told of it.
#[derive(Debug)]
pub(super) struct Step {
    pub(super) dims: Dims,
    /// Its size, if it is one that is recorded.
    pub(super) rung: Option<Rung>,
    pub(super) sequences: Vec<PrefillSequence>,
    pub(super) draws: Draws,
    /// The plan, for ranks that do not have it.
    pub(super) words: Vec<u32>,
}

/// What the first rank has the others do.
#[derive(Clone, Debug)]
pub(super) enum Order {
    Step(Arc<Step>),
    /// Products are done in these ways from now on.
    Choose(Choices),
    /// A step that is only measured lies ready.
    Lay(Arc<[u32]>),
    TimeStep(Dims),
    WarmUp(Ladder),
    /// Steps of sequences of up to so many tokens are recorded.
    Record(usize),
    Profile {
        rows: usize,
        length: usize,
    },
    /// The node sleeps.
    GiveBack,
    /// It wakes, and weights are loaded as they were at first.
    Refill(Arc<Described>),
}

/// What a step has left in a card's stream.
#[derive(Debug, Default)]
pub(super) struct Done {
    /// Reached as each layer's KV is written; none where a step is recorded.
    pub(super) written: Vec<Event>,
    /// Reached when all of it is done.
    pub(super) end: Option<Event>,
    /// Why memory did not go or come, which is no mistake of the card's.
    pub(super) refused: Option<OpenError>,
}

// === impl Rank ===

impl Rank {
    pub(super) fn new(tools: Tools, recorded: Recorded) -> Result<Self, CudaError> {
        let Tools { card, space, .. } = &tools;
        let two = |len: usize| Ok::<_, CudaError>([card.pinned(len)?, card.pinned(len)?].into());
        let staging = Staging {
            words: two(space.words.len())?,
            draws: two(space.draws.len())?,
            edits: two(space.edits.len())?,
        };
        Ok(Self { recorded, staging, tools })
    }

    /// Puts a step onto the card: events for each layer's KV, where they are known. `write` writes the step's words.
    pub(super) fn launch(
        &mut self,
        step: &Step,
        write: impl FnOnce(&mut [u32]),
    ) -> Result<Vec<Event>, CudaError> {
        let written = if step.dims.n_tokens == 0 { Vec::new() } else { self.run(step, write)? };
        self.draw(&step.draws, step.dims)?;
        Ok(written)
    }

    fn run(&mut self, step: &Step, write: impl FnOnce(&mut [u32])) -> Result<Vec<Event>, CudaError> {
        let Self { recorded, staging, tools } = self;
        // The step's words, by the buffer that was used longest ago.
        send(&tools.card, &mut staging.words, step.dims.n_words(), write, &mut tools.space.words)?;
        if let Some(rung) = step.rung {
            recorded.launch(rung, tools)?;
            return Ok(Vec::new());
        }
        let mut events = Vec::with_capacity(tools.decoder.places.len());
        tools.forward(step.dims, &step.sequences, |card, _| {
            events.push(card.event()?);
            Ok(())
        })?;
        Ok(events)
    }

    /// Has tokens drawn where the likeliest will not do: the next step reads them on the card as it reads the others.
    fn draw(&mut self, draws: &Draws, dims: Dims) -> Result<(), CudaError> {
        if draws.n_rows() == 0 {
            return Ok(());
        }
        let Self { staging, tools: Tools { card, space, decoder, .. }, .. } = self;
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
}

impl Performer for Rank {
    type Order = Order;
    type Answer = Done;

    fn perform(&mut self, order: Order) -> Result<Done, CudaError> {
        let Self { recorded, tools, .. } = self;
        match order {
            Order::GiveBack => return Ok(Done { refused: self.give_back().err(), ..Done::default() }),
            Order::Refill(described) => {
                return Ok(Done { refused: self.refill(&described).err(), ..Done::default() });
            }
            Order::Step(step) => {
                let written = self.launch(&step, |words| words.copy_from_slice(&step.words))?;
                return Ok(Done { written, end: Some(self.tools.card.event()?), refused: None });
            }
            Order::Choose(choices) => tools.products.adopt(choices),
            Order::Lay(words) => tools.lay(&words)?,
            Order::TimeStep(dims) => tuning::time_step(tools, dims).map(drop)?,
            Order::WarmUp(ladder) => tools.warm_up(&ladder)?,
            Order::Record(length) => recorded.record_up_to(length, tools, |_, _| {})?,
            Order::Profile { rows, length } => limits::profile_decode(tools, rows, length).map(drop)?,
        }
        Ok(Done::default())
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

// === impl Tools ===

impl Tools {
    /// `written` is called as each layer's KV has been asked for.
    pub(super) fn forward(
        &mut self,
        dims: Dims,
        sequences: &[PrefillSequence],
        mut written: impl FnMut(&Card, usize) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        self.pass(dims, sequences, |decoder, pass| {
            let card = pass.card;
            decoder.forward(pass, |nth| written(card, nth))
        })
    }

    /// Does something with the decoder, of a step of this size.
    pub(super) fn pass<T>(
        &mut self,
        dims: Dims,
        sequences: &[PrefillSequence],
        work: impl FnOnce(&Decoder, &mut Pass<'_>) -> Result<T, CudaError>,
    ) -> Result<T, CudaError> {
        let Self { products, peers, space, decoder, memory, card } = self;
        let (kv, sections, peers) = (kv_of(memory, decoder), dims.sections(), peers.as_mut());
        work(decoder, &mut Pass { card, products, peers, space, kv, dims, sections, sequences })
    }

    /// Where the host finds logits.
    pub(super) fn source<'a>(&'a self, lost: Option<&'a LostFlag>) -> Source<'a> {
        Source { card: &self.card, logits: self.space.logits.view(), lost }
    }

    /// A step's words, where it reads them.
    pub(super) fn lay(&mut self, words: &[u32]) -> Result<(), CudaError> {
        self.card.write(self.space.words.view_mut().slice(0..words.len()), words)
    }

    /// Runs each number of rows once: code is loaded when it first runs, which cannot be recorded.
    pub(super) fn warm_up(&mut self, ladder: &Ladder) -> Result<(), CudaError> {
        let n_groups = self.memory.layout().groups.len();
        // All words are nowhere: tokens and slots that do not exist, sequences of no length.
        self.card.fill(self.space.words.view_mut(), 0xff)?;
        for rows in ladder.rows() {
            let dims = Dims::of_decodes(n_groups, *rows, super::plan::BLOCK_TOKENS);
            let lengths = dims.sections().lengths;
            self.card.fill(self.space.words.view_mut().slice(lengths), 0)?;
            self.forward(dims, &[], |_, _| Ok(()))?;
            self.card.fill(self.space.words.view_mut(), 0xff)?;
        }
        self.card.synchronize()
    }
}

pub(super) fn kv_of<'a>(memory: &'a KvMemory, decoder: &Decoder) -> OnCard<'a> {
    let rank = memory.rank(decoder.sizes.share.nth as u16);
    rank.on_card().expect("the backend's memory was taken on its cards")
}

impl Drop for Tools {
    fn drop(&mut self) {
        // What nobody waited for may still be at work. Where waiting fails, the card writes nothing any more.
        let _ = self.card.synchronize();
    }
}
