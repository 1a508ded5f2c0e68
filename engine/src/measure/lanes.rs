//! Sequences under measurement: each with blocks of its own.

use types::{BlockIdx, Sampling, StopRules, TokenId};

use super::{DrawnBy, MeasureError};
use crate::backend::Backend;
use crate::step::{Launched, Row, RowInput, SampleSpec, SlotId, StepBatch};

/// Some sequences, all of one length at most.
#[derive(Debug)]
pub(super) struct Lanes {
    lanes: Vec<Lane>,
    sampling: Sampling,
    stop: StopRules,
}

#[derive(Debug)]
struct Lane {
    prompt: Vec<TokenId>,
    tables: Vec<Vec<BlockIdx>>,
}

/// What of a sequence a step computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// Tokens of the prompt, from one to another; the last ones draw a token.
    Prompt { start: usize, end: usize },
    /// The token in flight, or any token where none is.
    Next { position: usize, is_in_flight: bool },
}

/// Whether there are blocks for so many sequences of so many tokens.
pub(super) fn ensure_room(
    backend: &dyn Backend,
    n_lanes: usize,
    n_tokens: usize,
) -> Result<(), MeasureError> {
    let layout = &backend.model().layout;
    let needed = n_lanes * layout.groups.len() * layout.blocks_for(n_tokens);
    let found = backend.memory().n_blocks() as usize;
    if needed > found { Err(MeasureError::Blocks { needed, found }) } else { Ok(()) }
}

impl Lanes {
    /// `n_tokens` in all for each, `prompt_tokens` of them the prompt, which is another for each sequence.
    pub(super) fn new(
        backend: &dyn Backend,
        n_lanes: usize,
        prompt_tokens: usize,
        n_tokens: usize,
    ) -> Result<Self, MeasureError> {
        ensure_room(backend, n_lanes, n_tokens)?;
        let layout = &backend.model().layout;
        let (n_groups, of_lane) = (layout.groups.len(), layout.blocks_for(n_tokens));
        let vocab = backend.model().vocab;
        let lane = |nth: usize| Lane {
            prompt: (0..prompt_tokens).map(|at| token(vocab, nth, at)).collect(),
            tables: (0..n_groups)
                .map(|group| {
                    let first = (nth * n_groups + group) * of_lane;
                    (first..first + of_lane).map(|block| BlockIdx(block as u32)).collect()
                })
                .collect(),
        };
        let stop = StopRules { ignore_eos: true, ..StopRules::default() };
        Ok(Self { lanes: (0..n_lanes).map(lane).collect(), sampling: Sampling::default(), stop })
    }

    /// Greedy, until this says otherwise.
    pub(super) fn draw_by(&mut self, drawn_by: DrawnBy) {
        self.sampling = drawn_by.sampling();
    }

    pub(super) fn launch(
        &self,
        backend: &mut dyn Backend,
        parts: &[(usize, Part)],
    ) -> Result<Launched, MeasureError> {
        let tables: Vec<Vec<&[BlockIdx]>> =
            parts.iter().map(|(nth, part)| self.tables(*nth, part.end())).collect();
        let rows: Vec<Row<'_>> =
            parts.iter().zip(&tables).map(|((nth, part), tables)| self.row(*nth, *part, tables)).collect();
        Ok(backend.launch(StepBatch { rows: &rows })?)
    }

    /// Blocks as far as the sequence reaches, as a scheduler would hand them over.
    fn tables(&self, nth: usize, end: usize) -> Vec<&[BlockIdx]> {
        let n_blocks = end.div_ceil(BLOCK_TOKENS);
        self.lanes[nth].tables.iter().map(|table| &table[..n_blocks.min(table.len())]).collect()
    }

    fn row<'a>(&'a self, nth: usize, part: Part, tables: &'a [&'a [BlockIdx]]) -> Row<'a> {
        let lane = &self.lanes[nth];
        let (input, start, is_drawn) = match part {
            Part::Prompt { start, end } => {
                (RowInput::Tokens(&lane.prompt[start..end]), start, end == lane.prompt.len())
            }
            Part::Next { position, is_in_flight: true } => (RowInput::Previous, position, true),
            Part::Next { position, .. } => (RowInput::Tokens(&lane.prompt[..1]), position, true),
        };
        let spec = SampleSpec {
            sampling: &self.sampling,
            stop: &self.stop,
            history: &lane.prompt,
            n_prompt: lane.prompt.len(),
            index: 0,
        };
        Row { slot: SlotId(nth as u64), input, start, tables, sample: is_drawn.then_some(spec) }
    }
}

/// Every layout of ours has blocks of so many tokens.
const BLOCK_TOKENS: usize = 16;

impl Part {
    fn end(self) -> usize {
        match self {
            Self::Prompt { end, .. } => end,
            Self::Next { position, .. } => position + 1,
        }
    }

    pub(super) fn n_tokens(self) -> usize {
        match self {
            Self::Prompt { start, end } => end - start,
            Self::Next { .. } => 1,
        }
    }
}

/// Any token, a different run of them for each sequence.
fn token(vocab: u32, lane: usize, at: usize) -> TokenId {
    let mixed = (lane as u64 * 0x9e37_79b9 + at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    TokenId((mixed >> 33) as u32 % vocab)
}

/// Waits for a step, every row of which must have gone well.
pub(super) fn collect(backend: &mut dyn Backend, step: Launched) -> Result<(), MeasureError> {
    let output = backend.collect(step)?;
    output.rows.into_iter().try_for_each(|row| row.map(drop)).map_err(MeasureError::Row)
}
