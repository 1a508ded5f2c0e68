//! Attention in which all heads share one latent vector for each token.
//!
//! A head's keys and values are products of the latent. They are never computed. Each head's query is multiplied by the
//! matrix of its keys, so that its product with a latent is its score. The weighted sum of latents is multiplied by the
//! matrix of the head's values. Prompts and single tokens are computed in this one way, so bits do not depend on chunks.

use kernels::cpu::number::{f32_to_bf16, f32s_mut, u16s_mut};
use kernels::cpu::{Format, Matrix, SharedBytes};

use super::config::ModelConfig;
use super::latent::{LatentShape, NORM_EPSILON, RotatedPairs};
use super::nn::{HasBias, Linear, RmsNorm};
use super::pass::{AttentionInput, HeadProduct, Pass};
use super::tensor::Tensor;
use crate::error::LoadError;
use crate::load::Weights;

#[derive(Debug)]
pub(super) struct LatentAttention {
    layer: usize,
    shape: LatentShape,
    n_heads: usize,
    /// The factor for scores.
    scale: f32,
    q: QueryProjection,
    kv_a: Linear,
    kv_a_norm: RmsNorm,
    /// For each head, the transposed matrix of its keys: `kv_rank` rows.
    keys: Matrix,
    /// For each head, the matrices of its keys and values.
    kv_b: Matrix,
    o: Linear,
}

#[derive(Debug)]
enum QueryProjection {
    Direct(Linear),
    Latent { a: Linear, norm: RmsNorm, b: Linear },
}

impl LatentAttention {
    pub(super) fn load(
        config: &ModelConfig,
        shape: LatentShape,
        weights: &Weights<'_>,
        layer: usize,
    ) -> Result<Self, LoadError> {
        let ModelConfig { hidden, n_heads, optional, .. } = *config;
        let kv_b = weights.under("kv_b_proj").matrix("weight", n_heads * shape.kv_head(), shape.kv_rank)?;
        let linear = |name: &str, rows: usize, cols: usize, bias: bool| {
            Linear::load(&weights.under(name), rows, cols, HasBias(bias))
        };
        Ok(Self {
            layer,
            shape,
            n_heads,
            scale: (shape.q_head() as f32).sqrt().recip() * config.rope.score_factor(),
            q: QueryProjection::load(config, shape, weights)?,
            kv_a: linear("kv_a_proj_with_mqa", shape.width(), hidden, optional.qkv_bias)?,
            kv_a_norm: RmsNorm::load(&weights.under("kv_a_layernorm"), shape.kv_rank, NORM_EPSILON)?,
            keys: keys_transposed(&kv_b, shape).map_err(LoadError::Memory)?,
            kv_b,
            o: linear("o_proj", hidden, n_heads * shape.value, optional.o_bias)?,
        })
    }

    /// Computes attention: (tokens, hidden) to (tokens, hidden).
    pub(super) fn forward(&self, x: &Tensor, pass: &mut Pass<'_>) -> Tensor {
        let q = self.queries(x, pass); // (tokens, heads * width)
        let latents = self.latents(x, pass); // (tokens, width)
        let n_heads = q.width() / latents.width();
        let (layer, scale) = (self.layer, self.scale);
        let attended = pass.attend(AttentionInput { layer, scale, q: &q, k: &latents, v: None }); // (tokens, heads * width)
        let attended = attended.parts(n_heads, 0..self.shape.kv_rank); // (tokens, heads * kv_rank)
        let product = HeadProduct {
            matrix: &self.kv_b,
            n_heads: self.n_heads,
            rows: self.shape.unrotated..self.shape.kv_head(),
        };
        let values = pass.multiply_heads(&attended, &product); // (tokens, heads * value)
        pass.linear(&values, &self.o)
    }

    /// Computes the query of each of this rank's heads, for latents as keys: (tokens, heads * width).
    fn queries(&self, x: &Tensor, pass: &Pass<'_>) -> Tensor {
        let q = self.q.forward(x, self.shape.q_head(), pass); // (tokens, heads * q_head)
        let n_heads = q.width() / self.shape.q_head();
        let unrotated = q.parts(n_heads, 0..self.shape.unrotated);
        let product = HeadProduct { matrix: &self.keys, n_heads: self.n_heads, rows: 0..self.shape.kv_rank };
        let absorbed = pass.multiply_heads(&unrotated, &product); // (tokens, heads * kv_rank)
        let rotated = self.rotated(q.parts(n_heads, self.shape.unrotated..self.shape.q_head()), pass);
        absorbed.joined(&rotated, n_heads)
    }

    /// Computes the latent vector of each token: (tokens, width). Every rank has all of them.
    fn latents(&self, x: &Tensor, pass: &Pass<'_>) -> Tensor {
        let (kv_rank, width) = (self.shape.kv_rank, self.shape.width());
        let all = pass.whole(pass.linear(x, &self.kv_a), width);
        let compressed = pass.norm(&all.parts(1, 0..kv_rank), &self.kv_a_norm);
        compressed.joined(&self.rotated(all.parts(1, kv_rank..width), pass), 1)
    }

    /// Rotates heads by their token's position. Numbers that are rotated together end in the two halves of a head, of q
    /// and of k alike, so their products do not change.
    fn rotated(&self, mut x: Tensor, pass: &Pass<'_>) -> Tensor {
        if self.shape.pairs == RotatedPairs::Neighbours {
            x.pairs_to_halves(self.shape.rotated);
        }
        pass.rotate(&mut x, self.shape.rotated);
        x
    }
}

impl QueryProjection {
    fn load(config: &ModelConfig, shape: LatentShape, weights: &Weights<'_>) -> Result<Self, LoadError> {
        let (hidden, width) = (config.hidden, config.n_heads * shape.q_head());
        let linear = |name: &str, rows: usize, cols: usize, bias: bool| {
            Linear::load(&weights.under(name), rows, cols, HasBias(bias))
        };
        let Some(rank) = shape.q_rank else {
            return Ok(Self::Direct(linear("q_proj", width, hidden, false)?));
        };
        Ok(Self::Latent {
            a: linear("q_a_proj", rank, hidden, config.optional.qkv_bias)?,
            norm: RmsNorm::load(&weights.under("q_a_layernorm"), rank, NORM_EPSILON)?,
            b: linear("q_b_proj", width, rank, false)?,
        })
    }

    /// Computes this rank's heads of q: (tokens, heads * head).
    fn forward(&self, x: &Tensor, head: usize, pass: &Pass<'_>) -> Tensor {
        let [q] = match self {
            Self::Direct(q) => pass.heads(x, [q], head),
            Self::Latent { a, norm, b } => {
                let latents = pass.whole(pass.linear(x, a), norm.weight.len());
                pass.heads(&pass.norm(&latents, norm), [b], head)
            }
        };
        q
    }
}

/// Returns the matrix that multiplies queries: for each head, the transposed rows of its keys. Numbers in bf16 stay so;
/// others are in f32.
fn keys_transposed(kv_b: &Matrix, shape: LatentShape) -> std::io::Result<Matrix> {
    let n_heads = kv_b.rows() / shape.kv_head();
    let (rows, cols) = (n_heads * shape.kv_rank, shape.unrotated);
    let format = if kv_b.format() == Format::Bf16 { Format::Bf16 } else { Format::F32 };
    let mut row = vec![0.0; kv_b.cols()];
    let mut each = |set: &mut dyn FnMut(usize, f32)| {
        for head in 0..n_heads {
            for col in 0..cols {
                kv_b.read_row(head * shape.kv_head() + col, &mut row);
                for (nth, number) in row.iter().enumerate() {
                    set((head * shape.kv_rank + nth) * cols + col, *number);
                }
            }
        }
    };
    let bytes = format.bytes(rows, cols).expect("not larger than the matrix in memory");
    let bytes = SharedBytes::filled(bytes, |bytes| match format {
        Format::Bf16 => {
            let numbers = u16s_mut(bytes).expect("the memory is aligned");
            each(&mut |at, number| numbers[at] = f32_to_bf16(number));
        }
        _ => {
            let numbers = f32s_mut(bytes).expect("the memory is aligned");
            each(&mut |at, number| numbers[at] = number);
        }
    })?;
    Ok(Matrix::new(bytes, rows, cols, format).expect("the bytes have the size of the matrix"))
}
