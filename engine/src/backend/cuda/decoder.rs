//! Hot path.
//! A decoder on the card: one plan for all architectures, which differ in their [`Parts`](crate::model::Parts) only.

use std::ops::Range;

use kernels::cuda::{
    Answer, Arena, Buffer, Card, CudaError, DecodeAttention, FeedTokens, KvNumber, KvPages, Peers,
    PrefillAttention, PrefillSequence, Products, Weights,
};
use kv_cache::OnCard;
use types::GroupIdx;

use super::heads::Heads;
use super::layer::{Normed, reads_by_registers};
use super::plan::{BLOCK_TOKENS, Dims, Sections};
use super::weights::{CudaWeights, Sizes};
use super::workspace::Workspace;

/// A model, and where its KV lies.
#[derive(Debug)]
pub(super) struct Decoder {
    pub(super) weights: CudaWeights,
    /// The memory that they lie in.
    pub(super) arena: Arena,
    pub(super) sizes: Sizes,
    pub(super) heads: Heads,
    pub(super) epsilon: f32,
    /// Cosine and sine by position.
    pub(super) turns: Buffer<[f32; 2]>,
    /// Layer by layer.
    pub(super) places: Vec<LayerPlace>,
    pub(super) n_blocks: usize,
    pub(super) kv_number: KvNumber,
    /// Tokens of a chunk of attention, where a row must be the same in any company.
    pub(super) chunk_tokens: Option<usize>,
}

/// Where a layer's KV lies, and what the layer sees of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LayerPlace {
    pub(super) group: GroupIdx,
    pub(super) layer_pos: u16,
    /// The last tokens that are seen.
    pub(super) window: usize,
}

/// One step on its way through a decoder.
#[derive(Debug)]
pub(super) struct Pass<'a> {
    pub(super) card: &'a Card,
    pub(super) products: &'a mut Products,
    /// The other ranks' cards, if there are others.
    pub(super) peers: Option<&'a mut Peers>,
    pub(super) space: &'a mut Workspace,
    pub(super) kv: OnCard<'a>,
    pub(super) dims: Dims,
    pub(super) sections: Sections,
    pub(super) sequences: &'a [PrefillSequence],
}

/// Queries, and where the tokens that they see lie.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Queries {
    /// Of activations.
    rows: Range<usize>,
    tables: Tables,
    /// What the last of them sees at most.
    length_max: usize,
}

/// Words that name blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Tables {
    /// A table for each query, all of one length.
    Each(Range<usize>),
    /// The queries are tokens of one sequence, one after the other.
    One(Range<usize>),
}

impl Queries {
    /// Some of them.
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
    /// From the step's words to the tokens that it draws. `written` is called as each layer's KV has been asked for.
    pub(super) fn forward(
        &self,
        pass: &mut Pass<'_>,
        mut written: impl FnMut(usize) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        self.embed(pass)?;
        let mut normed = Normed::Whole;
        for (nth, layer) in self.weights.layers.iter().enumerate() {
            let place = self.places[nth];
            self.project(pass, layer, place, normed)?;
            written(nth)?;
            self.attend_decodes(pass, place)?;
            self.attend_chunks(pass, place)?;
            normed = self.give_attended(pass, layer)?;
            self.gate(pass, layer, normed)?;
            normed = self.give_gated(pass, layer, self.weights.layers.get(nth + 1))?;
        }
        self.draw(pass)
    }

    /// Tokens to rows, and the first layer's norm of them.
    fn embed(&self, pass: &mut Pass<'_>) -> Result<(), CudaError> {
        let (n, hidden) = (pass.dims.n_tokens, self.sizes.hidden);
        let Workspace { tokens, words, drawn, residual, normed, .. } = &mut *pass.space;
        pass.card.feed_tokens(FeedTokens {
            tokens: tokens.view_mut().slice(0..n),
            known: words.slice(pass.sections.known.clone()),
            from: words.slice(pass.sections.from.clone()),
            drawn: drawn.view(),
        })?;
        let rows = residual.view_mut().slice(0..n * hidden);
        pass.card.embedding(rows, self.weights.embedding(), tokens.slice(0..n))?;
        let first = self.weights.layers.first().map_or(&self.weights.norm, |layer| &layer.attention_norm);
        let normed = normed.view_mut().slice(0..n * hidden);
        pass.card.rms_norm(normed, residual.slice(0..n * hidden), first.view(), self.epsilon)
    }

    /// Rows of one token each.
    pub(super) fn attend_decodes(&self, pass: &mut Pass<'_>, place: LayerPlace) -> Result<(), CudaError> {
        let tables = pass.sections.decode_tables(usize::from(place.group.0));
        let queries = Queries {
            rows: 0..pass.dims.n_decodes,
            tables: Tables::Each(tables),
            length_max: pass.dims.decode_blocks * BLOCK_TOKENS,
        };
        self.attend_one_by_one(pass, place, &queries)
    }

    /// Queries that each go along their sequence by themselves, as many at once as there is room for parts.
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
        let leaves_cache = self.weights.layers.first().is_some_and(|layer| reads_by_registers(pass, layer));
        let (q_width, q_stride) = (self.sizes.q_width, self.sizes.qkv_width());
        let Workspace { qkv, attended, parts, part_sums, words, .. } = &mut *pass.space;
        let chunk_tokens = self.chunk_tokens(pass.card, rows.len(), length_max, part_sums.len());
        let lengths = pass.sections.lengths.start;
        // Tokens of a chunk see those before them, which were written just now.
        let (tables, rows_of_table, last_is_new) = match tables {
            Tables::Each(tables) => (tables, 1, true),
            Tables::One(table) => (table, rows.len(), false),
        };
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

    fn attend_chunks(&self, pass: &mut Pass<'_>, place: LayerPlace) -> Result<(), CudaError> {
        if pass.sequences.is_empty() {
            return Ok(());
        }
        if self.chunk_tokens.is_some() {
            return self.attend_chunks_alike(pass, place);
        }
        let Workspace { qkv, attended, words, .. } = &mut *pass.space;
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
        })
    }

    /// Every token of a chunk as a row of one token: the same, whichever way it is computed.
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

    /// The rows that are wanted to logits, and the likeliest token of each.
    pub(super) fn draw(&self, pass: &mut Pass<'_>) -> Result<(), CudaError> {
        let (n, Sizes { hidden, vocab, head_rows, .. }) = (pass.dims.n_wanted, self.sizes);
        if n == 0 {
            return Ok(());
        }
        let Workspace { normed, wanted, logits, own_logits, keys, best, drawn, words, .. } = &mut *pass.space;
        let rows = if n == pass.dims.n_tokens {
            normed.slice(0..n * hidden)
        } else {
            // Rows are gathered as tokens are embedded.
            let from = normed.slice(0..pass.dims.n_tokens * hidden);
            let indices = words.slice(pass.sections.wanted.clone());
            pass.card.embedding(wanted.view_mut().slice(0..n * hidden), from, indices)?;
            wanted.slice(0..n * hidden)
        };
        // Each rank has the logits of some tokens, and all draw from all.
        let own = if pass.peers.is_some() { &mut *own_logits } else { &mut *logits };
        let answer = Answer::Wide(own.view_mut().slice(0..n * head_rows));
        pass.products.multiply(pass.card, answer, Weights::Bf16(self.weights.head()), rows, hidden)?;
        if let Some(peers) = pass.peers.as_deref_mut() {
            let (whole, part) = (logits.view_mut().slice(0..n * vocab), own_logits.slice(0..n * head_rows));
            pass.card.gather_columns(peers, whole, part, n)?;
        }
        let logits = logits.slice(0..n * vocab);
        pass.card.argmax(best.view_mut().slice(0..n), keys.view_mut(), logits)?;
        pass.card.keep_tokens(drawn.view_mut().slice(0..n), best.slice(0..n), logits)
    }

    /// A good number of tokens for a chunk, or as many more as there is too little room for parts.
    fn chunk_tokens(&self, card: &Card, n_rows: usize, length_max: usize, n_parts_max: usize) -> usize {
        if let Some(chunk_tokens) = self.chunk_tokens {
            return chunk_tokens;
        }
        let wanted = DecodeAttention::chunk_tokens_for(card, n_rows, self.kv_pages().n_kv_heads, length_max);
        let n_chunks_max = (n_parts_max / (n_rows * self.n_q_heads())).max(1);
        wanted.max(length_max.div_ceil(BLOCK_TOKENS).div_ceil(n_chunks_max) * BLOCK_TOKENS)
    }

    pub(super) fn n_q_heads(&self) -> usize {
        self.sizes.q_width / self.heads.padded
    }

    pub(super) fn kv_pages(&self) -> KvPages {
        let head_dim = self.heads.padded;
        let n_kv_heads = self.sizes.kv_width / head_dim;
        KvPages { n_kv_heads, head_dim, n_blocks: self.n_blocks, number: self.kv_number }
    }

    fn scale(&self) -> f32 {
        (self.heads.real as f32).sqrt().recip()
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
