//! Hot path.
//! A step in the form that the GPU reads: all its inputs, written as one run of words.
//!
//! Rows of one token come first, because their attention differs from that of chunks. The sections are:
//!
//! | section | words |
//! |---|---|
//! | `known` | one token for each token of the step; undefined if the previous step samples it |
//! | `from` | for each row of one token: its index among the tokens that steps in flight sample, or NOWHERE |
//! | `positions` | for each token |
//! | `slots` | by group, for each token: the slot of its KV in the pages |
//! | `lengths` | for each token: tokens of its sequence up to it, with itself |
//! | `decode_tables` | by group, for each row of one token: blocks |
//! | `wanted` | for each sampled token: its row of activations |
//! | `sequences` | for each chunk: its first row, its tokens, tokens of its sequence |
//! | `chunk_tables` | by group, for each chunk: blocks |
//! | `target_rows` | for each prompt token whose log-probability is wanted: the row of activations that predicts it |
//! | `targets` | for each of them: the token |
//! | `target_draws` | for each of them: its words for the sampling kernel |

use std::ops::Range;

use kernels::cuda::{DrawRow, NOWHERE, PrefillSequence};
use types::BlockIdx;

use super::targets::Targets;
use crate::error::RowError;
use crate::step::{Row, RowInput, SlotId};

/// The number of tokens of a block, as in the kernels.
pub(super) const BLOCK_TOKENS: usize = kernels::cuda::ops::BLOCK_TOKENS;

/// The numbers of rows, tokens and blocks of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub(super) struct Dims {
    pub(super) n_groups: usize,
    /// The number of rows of one token, with padding rows.
    pub(super) n_decodes: usize,
    pub(super) n_tokens: usize,
    /// The number of sampled tokens.
    pub(super) n_wanted: usize,
    pub(super) n_chunks: usize,
    /// The number of blocks of the longest sequence among rows of one token.
    pub(super) decode_blocks: usize,
    /// The number of blocks of the longest sequence among chunks.
    pub(super) chunk_blocks: usize,
    /// The number of prompt tokens whose log-probabilities are wanted.
    pub(super) n_targets: usize,
}

/// The range of words of each section of a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Sections {
    pub(super) known: Range<usize>,
    pub(super) from: Range<usize>,
    pub(super) positions: Range<usize>,
    slots: Range<usize>,
    pub(super) lengths: Range<usize>,
    decode_tables: Range<usize>,
    pub(super) wanted: Range<usize>,
    pub(super) sequences: Range<usize>,
    chunk_tables: Range<usize>,
    pub(super) target_rows: Range<usize>,
    pub(super) targets: Range<usize>,
    pub(super) target_draws: Range<usize>,
    n_groups: usize,
}

impl Dims {
    /// Describes a step of rows with one token each; each row samples a token.
    pub(super) fn of_decodes(n_groups: usize, n_rows: usize, length: usize) -> Self {
        Self {
            n_groups,
            n_decodes: n_rows,
            n_tokens: n_rows,
            n_wanted: n_rows,
            decode_blocks: length.div_ceil(BLOCK_TOKENS),
            ..Self::default()
        }
    }

    pub(super) fn sections(&self) -> Sections {
        let mut end = 0;
        let mut next = |len: usize| {
            let start = end;
            end += len;
            start..end
        };
        Sections {
            known: next(self.n_tokens),
            from: next(self.n_decodes),
            positions: next(self.n_tokens),
            slots: next(self.n_groups * self.n_tokens),
            lengths: next(self.n_tokens),
            decode_tables: next(self.n_groups * self.n_decodes * self.decode_blocks),
            wanted: next(self.n_wanted),
            sequences: next(3 * self.n_chunks),
            chunk_tables: next(self.n_groups * self.n_chunks * self.chunk_blocks),
            target_rows: next(self.n_targets),
            targets: next(self.n_targets),
            target_draws: next(self.n_targets * DrawRow::WORDS),
            n_groups: self.n_groups,
        }
    }

    pub(super) fn n_words(&self) -> usize {
        self.sections().target_draws.end
    }

    /// Makes the words of a step for measurements only: sequences of that length, whose blocks are spread
    /// over the whole KV memory.
    pub(super) fn measured_words(&self, length: usize, n_blocks: u32) -> Vec<u32> {
        let sections = self.sections();
        let mut words = vec![0_u32; self.n_words()];
        words[sections.from.clone()].fill(NOWHERE);
        words[sections.lengths.clone()].fill(length as u32);
        words[sections.positions.clone()].fill(length as u32 - 1);
        for group in 0..self.n_groups {
            for (nth, word) in words[sections.decode_tables(group)].iter_mut().enumerate() {
                *word = nth as u32 % n_blocks;
            }
            let last = |row: usize| ((row + 1) * self.decode_blocks - 1) as u32 % n_blocks;
            for (row, word) in words[sections.slots(group)].iter_mut().enumerate() {
                *word = last(row) * BLOCK_TOKENS as u32 + (length as u32 - 1) % BLOCK_TOKENS as u32;
            }
        }
        words
    }
}

impl Sections {
    pub(super) fn slots(&self, group: usize) -> Range<usize> {
        part(&self.slots, self.n_groups, group)
    }

    pub(super) fn decode_tables(&self, group: usize) -> Range<usize> {
        part(&self.decode_tables, self.n_groups, group)
    }

    pub(super) fn chunk_tables(&self, group: usize) -> Range<usize> {
        part(&self.chunk_tables, self.n_groups, group)
    }
}

fn part(all: &Range<usize>, n_parts: usize, nth: usize) -> Range<usize> {
    let len = all.len() / n_parts.max(1);
    all.start + nth * len..all.start + (nth + 1) * len
}

/// The token that replaces [`RowInput::Previous`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum InputToken {
    /// The token, which the host knows.
    Token(u32),
    /// The token's index among the tokens that the steps in flight sample.
    Drawn(u32),
}

/// The rows of a batch, sorted for the GPU.
#[derive(Debug, Default)]
pub(super) struct Plan<'a> {
    decodes: Vec<(&'a Row<'a>, InputToken)>,
    chunks: Vec<&'a Row<'a>>,
    /// The index of each row's token among the sampled ones, if it samples one. In the batch's order.
    pub(super) places: Vec<Result<Option<u32>, RowError>>,
    pub(super) targets: Targets<'a>,
    pub(super) dims: Dims,
}

/// The limits that rows are checked against.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    pub(super) vocab: usize,
    pub(super) n_groups: usize,
    /// The most tokens that a step samples.
    pub(super) n_wanted_max: usize,
}

impl<'a> Plan<'a> {
    /// Sorts the rows, and marks rows that cannot be computed. `previous` returns a slot's token in flight.
    pub(super) fn of(
        rows: &'a [Row<'a>],
        bounds: Bounds,
        previous: impl Fn(SlotId) -> Result<InputToken, RowError>,
    ) -> Self {
        let mut plan = Self::default();
        let fed: Vec<Result<Option<InputToken>, RowError>> =
            rows.iter().map(|row| fed(row, bounds.vocab, &previous)).collect();
        for (row, fed) in rows.iter().zip(&fed) {
            match fed {
                Ok(Some(fed)) => plan.decodes.push((row, *fed)),
                Ok(None) => plan.chunks.push(row),
                Err(_) => {}
            }
        }
        plan.dims = plan.exact_dims(bounds.n_groups);
        plan.targets = Targets::of(rows, plan.first_rows(&fed), bounds.n_wanted_max);
        plan.dims.n_targets = plan.targets.len();
        plan.places = plan.drawn_places(rows, fed);
        plan
    }

    /// Returns whether the step can use a recorded graph: all rows have one token, and no log-probabilities of a prompt
    /// are wanted.
    pub(super) fn is_recordable(&self) -> bool {
        self.chunks.is_empty() && !self.decodes.is_empty() && self.targets.is_empty()
    }

    /// Returns the tokens of the longest sequence among rows of one token.
    pub(super) fn length_max(&self) -> usize {
        self.decodes.iter().map(|(row, _)| row.start + 1).max().unwrap_or(0)
    }

    /// Pads the plan to the size of a recorded step: padding rows follow, and every row samples at its own
    /// index.
    pub(super) fn padded(&mut self, dims: Dims, rows: &[Row<'_>]) {
        self.dims = dims;
        let mut nth = 0;
        for (row, place) in rows.iter().zip(&mut self.places) {
            if let Ok(place) = place {
                *place = row.sample.is_some().then_some(nth);
                nth += 1;
            }
        }
    }

    /// Returns the rows that take part, in the batch's order, each with its input if it has one token.
    pub(super) fn passing<'b>(
        &'b self,
        rows: &'b [Row<'a>],
    ) -> impl Iterator<Item = (&'b Row<'a>, Option<InputToken>)> {
        let mut decodes = self.decodes.iter().map(|(_, input)| *input);
        let passing = rows.iter().zip(&self.places).filter(|(_, place)| place.is_ok());
        passing.map(move |(row, _)| (row, (row.input.n_tokens() == 1).then(|| decodes.next()).flatten()))
    }

    /// Returns all sections as words.
    pub(super) fn words(&self) -> Vec<u32> {
        let mut words = vec![0; self.dims.n_words()];
        self.write(&mut words);
        words
    }

    /// Returns the indices of the tokens that rows continue and that steps in flight sample.
    pub(super) fn drawn_indices(&self) -> impl Iterator<Item = u32> {
        self.decodes.iter().filter_map(|(_, input)| match input {
            InputToken::Drawn(index) => Some(*index),
            InputToken::Token(_) => None,
        })
    }

    fn exact_dims(&self, n_groups: usize) -> Dims {
        let n_chunk_tokens: usize = self.chunks.iter().map(|row| row.input.n_tokens()).sum();
        let is_wanted = |row: &&Row<'_>| row.sample.is_some();
        let decoded = self.decodes.iter().map(|(row, _)| *row);
        let end = |row: &&Row<'_>| (row.start + row.input.n_tokens()).div_ceil(BLOCK_TOKENS);
        Dims {
            n_groups,
            n_decodes: self.decodes.len(),
            n_tokens: self.decodes.len() + n_chunk_tokens,
            n_wanted: decoded.clone().chain(self.chunks.iter().copied()).filter(is_wanted).count(),
            n_chunks: self.chunks.len(),
            decode_blocks: decoded.map(|row| end(&row)).max().unwrap_or(0),
            chunk_blocks: self.chunks.iter().map(end).max().unwrap_or(0),
            n_targets: 0,
        }
    }

    /// Returns each row's first row of activations, in the batch's order; `None` for a row that takes no part.
    fn first_rows(
        &self,
        fed: &[Result<Option<InputToken>, RowError>],
    ) -> impl Iterator<Item = Option<usize>> {
        let mut of_decodes = 0..self.dims.n_decodes;
        let mut of_chunks = self.sequences().into_iter().map(|sequence| sequence.first_row);
        fed.iter().map(move |fed| match fed {
            Ok(Some(_)) => of_decodes.next(),
            Ok(None) => of_chunks.next(),
            Err(_) => None,
        })
    }

    /// Assigns indices to sampled tokens in the order of activations: rows of one token first.
    fn drawn_places(
        &self,
        rows: &[Row<'_>],
        fed: Vec<Result<Option<InputToken>, RowError>>,
    ) -> Vec<Result<Option<u32>, RowError>> {
        let mut of_decodes = 0;
        let mut of_chunks = self.decodes.iter().filter(|(row, _)| row.sample.is_some()).count() as u32;
        let place = |(row, fed): (&Row<'_>, Result<Option<InputToken>, RowError>)| {
            let next = if fed?.is_some() { &mut of_decodes } else { &mut of_chunks };
            Ok(row.sample.is_some().then(|| {
                *next += 1;
                *next - 1
            }))
        };
        rows.iter().zip(fed).map(place).collect()
    }

    /// Returns the chunks in the form that attention takes.
    pub(super) fn sequences(&self) -> Vec<PrefillSequence> {
        let mut first_row = self.dims.n_decodes;
        let sequence = |row: &&Row<'_>| {
            let n_queries = row.input.n_tokens();
            let sequence = PrefillSequence { first_row, n_queries, length: row.start + n_queries };
            first_row += n_queries;
            sequence
        };
        self.chunks.iter().map(sequence).collect()
    }

    /// Writes all sections. `words` has the length [`Dims::n_words`].
    pub(super) fn write(&self, words: &mut [u32]) {
        let sections = self.dims.sections();
        let n_padding = self.dims.n_decodes - self.decodes.len();
        self.write_tokens(&sections, n_padding, words);
        for (nth, (row, fed)) in self.decodes.iter().enumerate() {
            words[sections.from.start + nth] = match fed {
                InputToken::Drawn(place) => *place,
                InputToken::Token(_) => NOWHERE,
            };
            self.write_table(
                row,
                |group| {
                    let start = sections.decode_tables(group).start + nth * self.dims.decode_blocks;
                    start..start + self.dims.decode_blocks
                },
                words,
            );
        }
        for nth in self.decodes.len()..self.dims.n_decodes {
            words[sections.from.start + nth] = NOWHERE;
            words[sections.lengths.start + nth] = 0;
        }
        self.write_wanted(&sections, words);
        self.targets.write(&mut words[sections.target_rows.start..sections.target_draws.end]);
        for (nth, (row, sequence)) in self.chunks.iter().zip(self.sequences()).enumerate() {
            let PrefillSequence { first_row, n_queries, length } = sequence;
            let at = sections.sequences.start + 3 * nth;
            words[at..at + 3].copy_from_slice(&[first_row as u32, n_queries as u32, length as u32]);
            self.write_table(
                row,
                |group| {
                    let start = sections.chunk_tables(group).start + nth * self.dims.chunk_blocks;
                    start..start + self.dims.chunk_blocks
                },
                words,
            );
        }
    }

    /// Writes tokens, positions and slots of rows of one token, of padding, and of chunks.
    fn write_tokens(&self, sections: &Sections, n_padding: usize, words: &mut [u32]) {
        let mut nth = 0;
        let mut put = |token: u32, position: usize, tables: &[&[BlockIdx]]| {
            words[sections.known.start + nth] = token;
            words[sections.positions.start + nth] = position as u32;
            words[sections.lengths.start + nth] = position as u32 + 1;
            for group in 0..self.dims.n_groups {
                words[sections.slots(group).start + nth] = slot(tables.get(group).copied(), position);
            }
            nth += 1;
        };
        for (row, fed) in &self.decodes {
            let token = if let InputToken::Token(token) = fed { *token } else { 0 };
            put(token, row.start, row.tables);
        }
        (0..n_padding).for_each(|_| put(0, 0, &[]));
        for row in &self.chunks {
            let RowInput::Tokens(tokens) = row.input else { continue };
            for (nth, token) in tokens.iter().enumerate() {
                put(token.0, row.start + nth, row.tables);
            }
        }
    }

    fn write_table(&self, row: &Row<'_>, place: impl Fn(usize) -> Range<usize>, words: &mut [u32]) {
        let n_blocks = (row.start + row.input.n_tokens()).div_ceil(BLOCK_TOKENS);
        for group in 0..self.dims.n_groups {
            let to = &mut words[place(group)][..n_blocks];
            let blocks = row.tables.get(group).map_or(&[][..], |table| table);
            for (nth, word) in to.iter_mut().enumerate() {
                *word = blocks.get(nth).map_or(NOWHERE, |block| block.0);
            }
        }
    }

    fn write_wanted(&self, sections: &Sections, words: &mut [u32]) {
        if self.dims.n_wanted == self.dims.n_tokens {
            // Each row samples at its own index, so no rows are gathered.
            return (0..self.dims.n_wanted).for_each(|nth| words[sections.wanted.start + nth] = nth as u32);
        }
        let of_decodes = self.decodes.iter().enumerate().map(|(nth, (row, _))| (*row, nth));
        let of_chunks = self.chunks.iter().zip(self.sequences());
        let of_chunks = of_chunks.map(|(row, sequence)| (*row, sequence.first_row + sequence.n_queries - 1));
        let wanted = of_decodes.chain(of_chunks).filter(|(row, _)| row.sample.is_some());
        for (word, (_, last)) in words[sections.wanted.clone()].iter_mut().zip(wanted) {
            *word = last as u32;
        }
    }
}

/// Returns the input token of a row of one token; `None` for a chunk.
fn fed(
    row: &Row<'_>,
    vocab: usize,
    previous: &impl Fn(SlotId) -> Result<InputToken, RowError>,
) -> Result<Option<InputToken>, RowError> {
    match row.input {
        RowInput::Previous => previous(row.slot).map(Some),
        RowInput::Tokens(tokens) => {
            let targets = row.prompt_logprobs.iter().flat_map(|targets| targets.tokens);
            let unknown = tokens.iter().chain(targets).find(|token| token.0 as usize >= vocab);
            if let Some(token) = unknown {
                return Err(RowError::UnknownToken { token: token.0, vocab });
            }
            Ok(if let [token] = tokens { Some(InputToken::Token(token.0)) } else { None })
        }
    }
}

/// Returns the slot of a token's KV in the pages; NOWHERE for a token without a block.
fn slot(table: Option<&[BlockIdx]>, position: usize) -> u32 {
    let block = table.and_then(|table| table.get(position / BLOCK_TOKENS));
    block.map_or(NOWHERE, |block| block.0 * BLOCK_TOKENS as u32 + (position % BLOCK_TOKENS) as u32)
}

#[cfg(test)]
mod tests;
