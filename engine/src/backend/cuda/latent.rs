//! Latent attention on a GPU: its widths, the places of its numbers, and its memory.
//!
//! Kernels are compiled for one set of widths, those of DeepSeek's models. Narrower ones are padded with zeroes.

use device::cuda::{Bf16, Buffer, CudaError};
use kernels::cuda::ops::{
    LATENT_Q_HEAD, LATENT_RANK, LATENT_ROTATED, LATENT_UNROTATED, LATENT_VALUE, LATENT_WIDTH,
};
use kernels::cuda::{ComputeCard, ExpandedAttention};

use super::heads::Heads;
use super::share::Share;
use crate::error::OpenError;
use crate::model::{LatentShape, ModelConfig, RotatedPairs};

/// Limit of the numbers of keys and values that are made of latents at a time: 512 MiB. It has room for 16 heads of
/// 65,536 tokens.
const EXPANDED_MAX: usize = 1 << 28;

/// The latent attention of a model.
#[derive(Clone, Copy, Debug)]
pub(super) struct LatentHeads {
    pub(super) shape: LatentShape,
    /// The rotated part of a head.
    pub(super) rotated: Heads,
    /// The factor for scores.
    pub(super) scale: f32,
}

/// The sizes of a rank's latent attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LatentSizes {
    pub(super) n_heads: usize,
    /// The padded width of the latent of q; 0: there is none.
    pub(super) q_rank: usize,
}

/// Activations of latent attention, one row for each token.
#[derive(Debug)]
pub(super) struct LatentSpace {
    /// The normed latent of q, and the heads of q made of it: empty if there is none.
    pub(super) q_latents: Buffer<Bf16>,
    pub(super) q: Buffer<Bf16>,
    /// The queries for latents: (tokens, heads × width of a latent).
    pub(super) queries: Buffer<Bf16>,
    /// The sums of latents: (tokens, heads × width of the compressed key and value).
    pub(super) sums: Buffer<Bf16>,
    /// Keys and values of heads, made of latents for the chunks of prompts. Empty if this GPU has no kernel for it.
    pub(super) expanded: Buffer<Bf16>,
}

impl LatentSpace {
    /// Returns memory for the output of any product with the latent of q.
    pub(super) fn room(&mut self) -> &mut Buffer<Bf16> {
        &mut self.queries
    }
}

impl LatentHeads {
    /// Returns the latent attention of a model, if it has one. Refuses widths that no kernel supports.
    pub(super) fn of(config: &ModelConfig) -> Result<Option<Self>, OpenError> {
        let Some(shape) = config.latent else { return Ok(None) };
        for (name, width, most) in [
            ("kv_lora_rank", shape.kv_rank, LATENT_RANK),
            ("qk_rope_head_dim", shape.rotated, LATENT_ROTATED),
            ("qk_nope_head_dim", shape.unrotated, LATENT_UNROTATED),
            ("v_head_dim", shape.value, LATENT_VALUE),
        ] {
            if width > most {
                let wrong = format!("{name} is {width}, but the GPU's kernels support at most {most}");
                return Err(OpenError::CudaModel(wrong));
            }
        }
        Ok(Some(Self {
            shape,
            rotated: Heads { real: shape.rotated, padded: LATENT_ROTATED },
            scale: (shape.q_head() as f32).sqrt().recip() * config.rope.score_factor(),
        }))
    }

    /// Returns the heads of the output of attention.
    pub(super) fn values(&self) -> Heads {
        Heads { real: self.shape.value, padded: LATENT_VALUE }
    }

    pub(super) fn sizes(&self, n_heads: usize, share: Share) -> LatentSizes {
        let q_rank = self.shape.q_rank.unwrap_or(0).next_multiple_of(8);
        LatentSizes { n_heads: share.heads(n_heads).len(), q_rank }
    }

    /// Returns the place on the GPU of number `nth` of a latent.
    pub(super) fn place_in_latent(&self, nth: usize) -> usize {
        match nth.checked_sub(self.shape.kv_rank) {
            None => nth,
            Some(nth) => LATENT_RANK + self.place_rotated(nth),
        }
    }

    /// Returns the place on the GPU of number `nth` of a head of q.
    pub(super) fn place_in_head(&self, nth: usize) -> usize {
        match nth.checked_sub(self.shape.unrotated) {
            None => nth,
            Some(nth) => LATENT_UNROTATED + self.place_rotated(nth),
        }
    }

    /// Returns the place of number `nth` of a rotated part. Numbers that are rotated together have the same place in both
    /// halves.
    fn place_rotated(&self, nth: usize) -> usize {
        let in_halves = match self.shape.pairs {
            RotatedPairs::Neighbours => nth % 2 * (self.shape.rotated / 2) + nth / 2,
            RotatedPairs::Halves => nth,
        };
        self.rotated.place(in_halves)
    }
}

impl LatentSizes {
    /// Returns the width of the first product: the latent of q, or the heads of q; then the token's latent.
    pub(super) fn first_width(self) -> usize {
        self.first_of_latent() + LATENT_WIDTH
    }

    /// Returns the place of the token's latent in the first product.
    pub(super) fn first_of_latent(self) -> usize {
        if self.q_rank > 0 { self.q_rank } else { self.q_width() }
    }

    pub(super) fn q_width(self) -> usize {
        self.n_heads * LATENT_Q_HEAD
    }

    /// Returns the rows and columns of the matrices beside the first product and the last one.
    pub(super) fn matrices(self) -> impl Iterator<Item = (usize, usize)> {
        let q = (self.q_rank > 0).then_some((self.q_width(), self.q_rank));
        let of_heads =
            [(self.n_heads * LATENT_RANK, LATENT_UNROTATED), (self.n_heads * LATENT_VALUE, LATENT_RANK)];
        q.into_iter().chain(of_heads)
    }

    /// Returns the numbers of a token in a [`LatentSpace`].
    pub(super) fn space_width(self) -> usize {
        let q = if self.q_rank > 0 { self.q_rank + self.q_width() } else { 0 };
        q + self.n_heads * (LATENT_WIDTH + LATENT_RANK)
    }

    /// Returns the numbers of keys and values that are made of latents at a time, for sequences of up to this length: at
    /// least those of one head.
    pub(super) fn n_expanded(self, tokens_max: usize) -> usize {
        let of_head = ExpandedAttention::numbers_of_head(tokens_max);
        (self.n_heads * of_head).min(EXPANDED_MAX).max(of_head)
    }

    pub(super) fn space(
        self,
        card: &ComputeCard,
        n_tokens: usize,
        n_expanded: usize,
    ) -> Result<LatentSpace, CudaError> {
        let q = if self.q_rank > 0 { self.q_width() } else { 0 };
        Ok(LatentSpace {
            q_latents: card.buffer(n_tokens * self.q_rank)?,
            q: card.buffer(n_tokens * q)?,
            queries: card.buffer(n_tokens * self.n_heads * LATENT_WIDTH)?,
            sums: card.buffer(n_tokens * self.n_heads * LATENT_RANK)?,
            expanded: card.buffer(n_expanded)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::fp8::{LayerFormats, WeightFormat};
    use super::super::weights::Sizes;
    use super::*;
    use crate::load::ModelFolder;
    use crate::load::tensors::tensors;

    fn config(folder: &str) -> ModelConfig {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
        ModelFolder::open(&folder).expect("it opens").config
    }

    fn heads(config: &ModelConfig) -> LatentHeads {
        LatentHeads::of(config).expect("narrow enough").expect("it has latents")
    }

    #[test]
    fn numbers_that_are_rotated_together_have_the_same_place_in_both_halves() {
        let mut config = config("tests/models/deepseek-v3");
        let shape = LatentShape { unrotated: 2, rotated: 4, kv_rank: 3, ..config.latent.expect("latents") };
        for (pairs, rotated) in
            [(RotatedPairs::Halves, [0, 1, 32, 33]), (RotatedPairs::Neighbours, [0, 32, 1, 33])]
        {
            config.latent = Some(LatentShape { pairs, ..shape });
            let heads = heads(&config);
            let in_head: Vec<usize> = (0..6).map(|nth| heads.place_in_head(nth)).collect();
            assert_eq!(in_head, [vec![0, 1], rotated.map(|nth| 128 + nth).to_vec()].concat(), "{pairs:?}");
            let in_latent: Vec<usize> = (0..7).map(|nth| heads.place_in_latent(nth)).collect();
            assert_eq!(
                in_latent,
                [vec![0, 1, 2], rotated.map(|nth| 512 + nth).to_vec()].concat(),
                "{pairs:?}"
            );
        }
    }

    #[test]
    fn widths_that_no_kernel_supports_are_refused_by_name() {
        let config = config("tests/models/deepseek-v2");
        for (change, expected) in [
            ((|shape| shape.kv_rank = 513) as fn(&mut LatentShape), "kv_lora_rank is 513"),
            (|shape| shape.rotated = 66, "qk_rope_head_dim is 66"),
            (|shape| shape.unrotated = 192, "qk_nope_head_dim is 192"),
            (|shape| shape.value = 256, "v_head_dim is 256"),
        ] {
            let mut changed = config.clone();
            changed.latent.as_mut().map(change).expect("it has latents");
            let sentence = LatentHeads::of(&changed).expect_err(expected).to_string();
            assert!(sentence.contains(expected) && sentence.contains("at most"), "{sentence}");
        }
    }

    #[test]
    fn the_bytes_of_a_model_with_latents_are_those_of_its_matrices() {
        let config = config("../bench/shapes/deepseek-v2-lite");
        let matrices = tensors(&config).into_iter().filter(|tensor| tensor.name.contains("proj"));
        let numbers: usize = matrices.map(|tensor| tensor.rows.unwrap_or(0) * tensor.cols).sum();
        let routers = 26 * 64 * 2048;
        let vocabulary = 2 * 102_400 * 2048;
        let formats = LayerFormats::all_in(WeightFormat::Bf16, config.n_layers, config.mixture.as_ref());
        for (n_ranks, n_whole) in [(1, 0), (2, 1)] {
            let all: usize = Share::of_all(n_ranks)
                .map(|share| {
                    Sizes::of(&config, heads(&config).values(), share).expect("it fits").bytes(&formats)
                })
                .sum();
            // Each rank has the whole embedding, the routers, and the matrix that makes latents.
            let latents = 27 * 576 * 2048;
            let again = n_whole * (routers + vocabulary / 2 + latents);
            assert_eq!(all, 2 * (numbers + routers + vocabulary + again), "{n_ranks} ranks");
        }
    }
}
