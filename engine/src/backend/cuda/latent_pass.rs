//! Hot path.
//! The part of latent attention in a pass: latents and queries, their attention, and the output of heads.

use device::cuda::CudaError;
use kernels::cuda::ops::{LATENT_RANK, LATENT_VALUE, LATENT_WIDTH};
use kernels::cuda::{
    ExpandedAttention, LatentAttention, LatentQueries, LatentRows, NormedLatents, TurnedHeads, WriteLatents,
};

use super::attention::QueryRows;
use super::decoder::{Decoder, LayerPlace, Pass};
use super::latent::LatentSpace;
use super::layer::{NormState, linear};
use super::weights::{LatentWeights, Linear};
use super::workspace::Workspace;
use crate::model::LATENT_EPSILON;

impl Decoder {
    /// Computes the latents of tokens and writes them to their pages. Computes the queries for latents, or rotates those of
    /// rows for which keys are made of latents.
    pub(super) fn project_latents(
        &self,
        pass: &mut Pass<'_>,
        first: &Linear,
        weights: &LatentWeights,
        place: LayerPlace,
        normed: NormState,
    ) -> Result<(), CudaError> {
        normed.ensure_whole()?;
        let (latent, sizes) = self.latent.zip(self.sizes.latent).ok_or(no_latents())?;
        let (n, stride) = (pass.dims.n_tokens, sizes.first_width());
        let n_for_latents = pass.latent_rows;
        let Workspace { normed: x, qkv, words, latent: space, .. } = &mut *pass.space;
        let space = space.as_mut().ok_or(no_latents())?;
        let x = x.slice(0..n * self.sizes.hidden);
        linear(pass.card, pass.products, &mut qkv.view_mut().slice(0..n * stride), first, x)?;
        let positions = words.slice(pass.sections.positions.clone());
        pass.card.write_latents(WriteLatents {
            rows: qkv.slice(0..n * stride),
            stride,
            q: weights.q.as_ref().map(|(norm, _)| NormedLatents {
                out: space.q_latents.view_mut().slice(0..n * sizes.q_rank),
                weight: norm.view(),
                width: latent.shape.q_rank.unwrap_or(0),
            }),
            pages: pass.kv.layer_mut(place.group, place.layer_pos),
            number: self.kv_number,
            n_blocks: self.n_blocks,
            positions,
            slots: words.slice(pass.sections.slots(usize::from(place.group.0))),
            turns: self.turns.view(),
            weight: weights.kv_norm.view(),
            width: latent.shape.kv_rank,
            epsilon: LATENT_EPSILON,
        })?;
        let (mut q, stride) = match &weights.q {
            None => (qkv.view_mut(), stride),
            Some((_, heads)) => {
                let latents = space.q_latents.slice(0..n * sizes.q_rank);
                let mut q = space.q.view_mut().slice(0..n * sizes.q_width());
                linear(pass.card, pass.products, &mut q, heads, latents)?;
                (q, sizes.q_width())
            }
        };
        pass.card.make_queries(LatentQueries {
            out: space.queries.view_mut().slice(0..n_for_latents * sizes.n_heads * LATENT_WIDTH),
            q: q.view(),
            stride,
            n_heads: sizes.n_heads,
            positions: positions.slice(0..n_for_latents),
            turns: self.turns.view(),
            keys: weights.keys.view(),
        })?;
        pass.card.turn_heads(TurnedHeads {
            q: q.reborrow().slice(n_for_latents * stride..n * stride),
            stride,
            n_heads: sizes.n_heads,
            positions: positions.slice(n_for_latents..n),
            turns: self.turns.view(),
        })
    }

    /// Computes attention of queries with one token each.
    pub(super) fn attend_latents(
        &self,
        pass: &mut Pass<'_>,
        place: LayerPlace,
        queries: QueryRows,
    ) -> Result<(), CudaError> {
        let QueryRows { rows, tables, rows_of_table, last_is_new, length_max, chunk_tokens } = queries;
        let n_heads = self.n_q_heads();
        let scale = self.scale();
        let Workspace { latent: space, parts, part_sums, words, .. } = &mut *pass.space;
        let LatentSpace { queries, sums, .. } = space.as_mut().ok_or(no_latents())?;
        let of_rows = |width: usize| rows.start * n_heads * width..rows.end * n_heads * width;
        let lengths = pass.sections.lengths.start;
        pass.card.attend_latents(
            LatentAttention {
                out: sums.view_mut().slice(of_rows(LATENT_RANK)),
                q: queries.slice(of_rows(LATENT_WIDTH)),
                n_heads,
                pages: pass.kv.layer(place.group, place.layer_pos),
                number: self.kv_number,
                n_blocks: self.n_blocks,
                tables: words.slice(tables),
                scale,
            },
            LatentRows {
                parts: parts.view_mut(),
                part_sums: part_sums.view_mut(),
                lengths: words.slice(lengths + rows.start..lengths + rows.end),
                length_max,
                rows_of_table,
                last_is_new,
                chunk_tokens,
            },
        )
    }

    /// Computes attention of the chunks of prompts.
    pub(super) fn attend_latents_of_chunks(
        &self,
        pass: &mut Pass<'_>,
        place: LayerPlace,
        weights: &LatentWeights,
    ) -> Result<(), CudaError> {
        if pass.latent_rows < pass.dims.n_tokens {
            return self.attend_expanded(pass, place, weights);
        }
        let (n, n_heads, scale) = (pass.dims.n_tokens, self.n_q_heads(), self.scale());
        let Workspace { latent: space, words, .. } = &mut *pass.space;
        let LatentSpace { queries, sums, .. } = space.as_mut().ok_or(no_latents())?;
        let attention = LatentAttention {
            out: sums.view_mut().slice(0..n * n_heads * LATENT_RANK),
            q: queries.slice(0..n * n_heads * LATENT_WIDTH),
            n_heads,
            pages: pass.kv.layer(place.group, place.layer_pos),
            number: self.kv_number,
            n_blocks: self.n_blocks,
            tables: words.slice(pass.sections.chunk_tables(usize::from(place.group.0))),
            scale,
        };
        let on_card = words.slice(pass.sections.sequences.clone()).triples();
        pass.card.attend_latents_of_chunks(attention, pass.sequences, on_card)
    }

    /// Computes attention of the chunks of prompts with keys and values that are made of latents.
    fn attend_expanded(
        &self,
        pass: &mut Pass<'_>,
        place: LayerPlace,
        weights: &LatentWeights,
    ) -> Result<(), CudaError> {
        let sizes = self.sizes.latent.ok_or(no_latents())?;
        let (n, n_heads, scale) = (pass.dims.n_tokens, sizes.n_heads, self.scale());
        let Workspace { latent: space, qkv, attended, words, widened, .. } = &mut *pass.space;
        let LatentSpace { q, expanded, .. } = space.as_mut().ok_or(no_latents())?;
        let (q, q_stride) = match &weights.q {
            None => (qkv.view(), sizes.first_width()),
            Some(_) => (q.view(), sizes.q_width()),
        };
        pass.card.attend_expanded(ExpandedAttention {
            out: attended.view_mut().slice(0..n * n_heads * LATENT_VALUE),
            q,
            q_stride,
            n_heads,
            pages: pass.kv.layer(place.group, place.layer_pos),
            number: self.kv_number,
            widened: widened.as_mut(),
            n_blocks: self.n_blocks,
            tables: words.slice(pass.sections.chunk_tables(usize::from(place.group.0))),
            sequences: pass.sequences,
            on_card: words.slice(pass.sections.sequences.clone()).triples(),
            keys: weights.keys.view(),
            values: weights.values.view(),
            room: expanded.view_mut(),
            scale,
        })
    }

    /// Computes the output of each head of its sum of latents.
    pub(super) fn multiply_values(
        &self,
        pass: &mut Pass<'_>,
        weights: &LatentWeights,
    ) -> Result<(), CudaError> {
        let n_rows = pass.latent_rows * self.n_q_heads();
        let Workspace { latent: space, attended, .. } = &mut *pass.space;
        let LatentSpace { sums, .. } = space.as_mut().ok_or(no_latents())?;
        let out = attended.view_mut().slice(0..n_rows * LATENT_VALUE);
        pass.card.multiply_values(out, sums.slice(0..n_rows * LATENT_RANK), weights.values.view())
    }
}

/// An error that never occurs: a model with latent attention has its sizes, weights and memory.
fn no_latents() -> CudaError {
    CudaError::Argument { kernel: "latents", wrong: "a model without latent attention" }
}
