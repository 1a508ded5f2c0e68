//! Hot path.
//! Attention of a step, for its decode rows and its prompt chunks.

use std::ops::Range;

use device::cuda::CudaError;
use kernels::cuda::{ComputeCard, DecodeAttention, PrefillAttention, PrefillSequence};

use super::decoder::{Decoder, LayerPlace, Pass};
use super::layer::reads_by_registers;
use super::plan::BLOCK_TOKENS;
use super::weights::LayerWeights;
use super::workspace::Workspace;

/// Queries of one kind, and the KV blocks of the tokens that they see.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Queries {
    /// The queries' rows of activations.
    rows: Range<usize>,
    tables: Tables,
    /// An upper bound of the tokens that the last query sees.
    length_max: usize,
}

/// Where the queries' block tables are in the step's words.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Tables {
    /// The queries have a table each, all of the same length.
    Each(Range<usize>),
    /// The queries are consecutive tokens of one sequence and share its table.
    One(Range<usize>),
}

/// Queries that are computed at the same time, each alone.
#[derive(Debug)]
pub(super) struct QueryRows {
    pub(super) rows: Range<usize>,
    pub(super) tables: Range<usize>,
    /// The number of consecutive rows that share a table.
    pub(super) rows_of_table: usize,
    /// Whether only the last page of each sequence was written in this step.
    pub(super) last_is_new: bool,
    pub(super) length_max: usize,
    pub(super) chunk_tokens: usize,
}

impl Queries {
    /// Returns some of the queries, by their index.
    fn part(&self, of: Range<usize>) -> Self {
        let rows = self.rows.start + of.start..self.rows.start + of.end;
        match &self.tables {
            Tables::Each(tables) => {
                let width = tables.len() / self.rows.len();
                let tables = tables.start + of.start * width..tables.start + of.end * width;
                Self { rows, tables: Tables::Each(tables), ..*self }
            }
            Tables::One(table) => {
                let length_max = self.length_max - (self.rows.len() - of.end);
                Self { rows, tables: Tables::One(table.clone()), length_max }
            }
        }
    }
}

impl Decoder {
    /// Computes attention of rows with one token each.
    pub(super) fn attend_decodes(&self, pass: &mut Pass<'_>, place: LayerPlace) -> Result<(), CudaError> {
        let tables = pass.sections.decode_tables(usize::from(place.group.0));
        let queries = Queries {
            rows: 0..pass.dims.n_decodes,
            tables: Tables::Each(tables),
            length_max: pass.dims.decode_blocks * BLOCK_TOKENS,
        };
        self.attend_one_by_one(pass, place, &queries)
    }

    /// Computes attention of queries with one token each. The memory for partial results limits the number of
    /// concurrent queries.
    fn attend_one_by_one(
        &self,
        pass: &mut Pass<'_>,
        place: LayerPlace,
        queries: &Queries,
    ) -> Result<(), CudaError> {
        let (n, n_parts_max) = (queries.rows.len(), pass.space.part_sums.len());
        let n_at_once = match self.chunk_tokens {
            Some(chunk_tokens) if queries.length_max > chunk_tokens => {
                n_parts_max / (self.n_q_heads() * queries.length_max.div_ceil(chunk_tokens))
            }
            _ => n,
        };
        for first in (0..n).step_by(n_at_once.max(1)) {
            let part = queries.part(first..(first + n_at_once.max(1)).min(n));
            self.attend_at_once(pass, place, part)?;
        }
        Ok(())
    }

    fn attend_at_once(
        &self,
        pass: &mut Pass<'_>,
        place: LayerPlace,
        queries: Queries,
    ) -> Result<(), CudaError> {
        let Queries { rows, tables, length_max } = queries;
        let chunk_tokens = self.chunk_tokens(pass.card, rows.len(), length_max, pass.space.part_sums.len());
        // Tokens of a chunk see the chunk's earlier tokens, which were just written, so more than the last
        // page is new.
        let (tables, rows_of_table, last_is_new) = match tables {
            Tables::Each(tables) => (tables, 1, true),
            Tables::One(table) => (table, rows.len(), false),
        };
        let queries = QueryRows { rows, tables, rows_of_table, last_is_new, length_max, chunk_tokens };
        match self.latent {
            None => self.attend_heads(pass, place, queries),
            Some(_) => self.attend_latents(pass, place, queries),
        }
    }

    fn attend_heads(
        &self,
        pass: &mut Pass<'_>,
        place: LayerPlace,
        queries: QueryRows,
    ) -> Result<(), CudaError> {
        let QueryRows { rows, tables, rows_of_table, last_is_new, length_max, chunk_tokens } = queries;
        let leaves_cache = self.weights.layers.first().is_some_and(|layer| reads_by_registers(pass, layer));
        let (q_width, q_stride) = (self.sizes.q_width, self.sizes.qkv_width());
        let Workspace { qkv, attended, parts, part_sums, words, .. } = &mut *pass.space;
        let lengths = pass.sections.lengths.start;
        pass.card.decode_attention(DecodeAttention {
            out: attended.view_mut().slice(rows.start * q_width..rows.end * q_width),
            parts: parts.view_mut(),
            part_sums: part_sums.view_mut(),
            q: qkv.slice(rows.start * q_stride..rows.end * q_stride),
            q_stride,
            n_q_heads: self.n_q_heads(),
            pages: pass.kv.layer(place.group, place.layer_pos),
            kv: self.kv_pages(),
            tables: words.slice(tables),
            rows_of_table,
            last_is_new,
            lengths: words.slice(lengths + rows.start..lengths + rows.end),
            length_max,
            chunk_tokens,
            window: place.window,
            scale: self.scale(),
            leaves_cache,
        })
    }

    pub(super) fn attend_chunks(
        &self,
        pass: &mut Pass<'_>,
        layer: &LayerWeights,
        place: LayerPlace,
    ) -> Result<(), CudaError> {
        if pass.sequences.is_empty() {
            return Ok(());
        }
        if self.chunk_tokens.is_some() {
            return self.attend_chunks_alike(pass, place);
        }
        if let Some(weights) = &layer.latent {
            return self.attend_latents_of_chunks(pass, place, weights);
        }
        let Workspace { qkv, attended, words, widened, .. } = &mut *pass.space;
        pass.card.prefill_attention(PrefillAttention {
            out: attended.view_mut().slice(0..pass.dims.n_tokens * self.sizes.q_width),
            q: qkv.view(),
            q_stride: self.sizes.qkv_width(),
            n_q_heads: self.n_q_heads(),
            pages: pass.kv.layer(place.group, place.layer_pos),
            kv: self.kv_pages(),
            tables: words.slice(pass.sections.chunk_tables(usize::from(place.group.0))),
            sequences: pass.sequences,
            on_card: words.slice(pass.sections.sequences.clone()).triples(),
            window: place.window,
            scale: self.scale(),
            widened: widened.as_mut(),
        })
    }

    /// Computes attention of a chunk in which each token is a row of its own, so that results do not depend
    /// on the chunk.
    fn attend_chunks_alike(&self, pass: &mut Pass<'_>, place: LayerPlace) -> Result<(), CudaError> {
        let tables = pass.sections.chunk_tables(usize::from(place.group.0));
        let n_blocks = pass.dims.chunk_blocks;
        for (nth, sequence) in pass.sequences.iter().enumerate() {
            let table = tables.start + nth * n_blocks..tables.start + (nth + 1) * n_blocks;
            let PrefillSequence { first_row, n_queries, length } = *sequence;
            let rows = first_row..first_row + n_queries;
            let queries = Queries { rows, tables: Tables::One(table), length_max: length };
            self.attend_one_by_one(pass, place, &queries)?;
        }
        Ok(())
    }

    /// Returns the number of tokens of a chunk: the fastest number, or more if the memory for partial results
    /// is too small.
    fn chunk_tokens(
        &self,
        card: &ComputeCard,
        n_rows: usize,
        length_max: usize,
        n_parts_max: usize,
    ) -> usize {
        if let Some(chunk_tokens) = self.chunk_tokens {
            return chunk_tokens;
        }
        let wanted = DecodeAttention::chunk_tokens_for(
            card,
            n_rows,
            self.sizes.attention_tiles(card, self.heads.padded),
            length_max,
        );
        let n_chunks_max = (n_parts_max / (n_rows * self.n_q_heads())).max(1);
        wanted.max(length_max.div_ceil(BLOCK_TOKENS).div_ceil(n_chunks_max) * BLOCK_TOKENS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_take_turns_with_their_own_tables_or_the_one_that_they_share() {
        let each = Queries { rows: 0..6, tables: Tables::Each(100..130), length_max: 80 };
        let expected = Queries { rows: 2..4, tables: Tables::Each(110..120), length_max: 80 };
        assert_eq!(each.part(2..4), expected);
        let one = Queries { rows: 10..16, tables: Tables::One(100..105), length_max: 80 };
        let expected = Queries { rows: 12..14, tables: Tables::One(100..105), length_max: 78 };
        assert_eq!(one.part(2..4), expected);
        assert_eq!(one.part(0..6), one);
    }
}
