//! Loads the weights of latent attention, all in bf16. The host puts their numbers in the kernels' places.

use std::ops::Range;

use device::cuda::{Bf16, Buffer};
use kernels::cpu::Matrix;
use kernels::cuda::ops::{LATENT_Q_HEAD, LATENT_RANK, LATENT_UNROTATED, LATENT_VALUE};

use super::{Loader, MatrixShape, Origin, Weight};
use crate::backend::cuda::latent::{LatentHeads, LatentSizes};
use crate::backend::cuda::weights::{LatentWeights, Linear};
use crate::error::{LoadError, OpenError};
use crate::load::{Dummy, Quantize, TensorSource};

/// A matrix on the GPU while the host fills it.
struct Filling {
    numbers: Vec<Bf16>,
    columns: usize,
}

impl Filling {
    fn new(rows: usize, columns: usize) -> Self {
        Self { numbers: vec![Bf16::default(); rows * columns], columns }
    }

    /// Puts rows of a matrix into their places.
    fn put(&mut self, matrix: &Matrix, rows: Range<usize>, place: impl Fn(usize) -> usize) {
        let mut row = vec![0.0; matrix.cols()];
        for from in rows {
            matrix.read_row(from, &mut row);
            let first = place(from) * self.columns;
            for (to, number) in self.numbers[first..].iter_mut().zip(&row) {
                *to = Bf16::from(*number);
            }
        }
    }
}

impl Loader<'_> {
    /// Loads the first product: the latent of q, or the rank's heads of q; then the token's latent.
    pub(super) fn first_of_latents(
        &mut self,
        attention: &str,
        latent: LatentHeads,
    ) -> Result<Linear, OpenError> {
        let (hidden, sizes) = (self.sizes.hidden, self.latent_sizes());
        let (n_rows, offset) = (sizes.first_width(), sizes.first_of_latent());
        let mut filling = Filling::new(n_rows, hidden);
        let mut biases = vec![0.0; n_rows];
        let name = format!("{attention}.kv_a_proj_with_mqa");
        let place = |nth| offset + latent.place_in_latent(nth);
        let shape = MatrixShape { rows: latent.shape.width(), cols: hidden };
        filling.put(&self.matrix_on_host(&name, shape)?, 0..shape.rows, place);
        let has_bias = self.config.optional.qkv_bias;
        if has_bias {
            let numbers = self.numbers_of(&format!("{name}.bias"), shape.rows)?;
            numbers.iter().enumerate().for_each(|(nth, number)| biases[place(nth)] = *number);
        }
        match latent.shape.q_rank {
            None => self.put_heads_of_q(&mut filling, &format!("{attention}.q_proj"), latent)?,
            Some(rank) => {
                let name = format!("{attention}.q_a_proj");
                let matrix = self.matrix_on_host(&name, MatrixShape { rows: rank, cols: hidden })?;
                filling.put(&matrix, 0..rank, |nth| nth);
                if has_bias {
                    biases[..rank].copy_from_slice(&self.numbers_of(&format!("{name}.bias"), rank)?);
                }
            }
        }
        let bias = match has_bias {
            false => None,
            true => {
                let mut bias = self.arena.buffer(n_rows)?;
                self.put_numbers(bias.view_mut(), &biases)?;
                Some(bias)
            }
        };
        Ok(Linear { weight: Weight::Bf16(self.filled(&filling)?), columns: hidden, bias })
    }

    /// Loads the other weights of a layer's latent attention.
    pub(super) fn latents(
        &mut self,
        attention: &str,
        latent: LatentHeads,
    ) -> Result<LatentWeights, OpenError> {
        let sizes = self.latent_sizes();
        let q = match latent.shape.q_rank {
            None => None,
            Some(rank) => {
                let norm =
                    self.padded_vector(&format!("{attention}.q_a_layernorm.weight"), rank, sizes.q_rank)?;
                let mut filling = Filling::new(sizes.q_width(), sizes.q_rank);
                self.put_heads_of_q(&mut filling, &format!("{attention}.q_b_proj"), latent)?;
                let weight = Weight::Bf16(self.filled(&filling)?);
                Some((norm, Linear { weight, columns: sizes.q_rank, bias: None }))
            }
        };
        let kv_rank = latent.shape.kv_rank;
        let kv_norm =
            self.padded_vector(&format!("{attention}.kv_a_layernorm.weight"), kv_rank, LATENT_RANK)?;
        let shape = MatrixShape { rows: self.config.n_heads * latent.shape.kv_head(), cols: kv_rank };
        let kv_b = self.matrix_on_host(&format!("{attention}.kv_b_proj"), shape)?;
        let mut keys = Filling::new(sizes.n_heads * LATENT_RANK, LATENT_UNROTATED);
        let mut values = Filling::new(sizes.n_heads * LATENT_VALUE, LATENT_RANK);
        let mut row = vec![0.0; kv_rank];
        for (nth, head) in self.sizes.share.heads(self.config.n_heads).enumerate() {
            let first = head * latent.shape.kv_head();
            for column in 0..latent.shape.unrotated {
                kv_b.read_row(first + column, &mut row);
                for (key, number) in row.iter().enumerate() {
                    keys.numbers[(nth * LATENT_RANK + key) * LATENT_UNROTATED + column] = Bf16::from(*number);
                }
            }
            let of_values = first + latent.shape.unrotated..first + latent.shape.kv_head();
            let start = of_values.start;
            let place = |from| nth * LATENT_VALUE + self.heads.place(from - start);
            values.put(&kv_b, of_values, place);
        }
        Ok(LatentWeights { q, kv_norm, keys: self.filled(&keys)?, values: self.filled(&values)? })
    }

    fn latent_sizes(&self) -> LatentSizes {
        self.sizes.latent.expect("a model with latent attention has its sizes")
    }

    /// Puts the rank's heads of q into the first rows of a matrix.
    fn put_heads_of_q(
        &self,
        filling: &mut Filling,
        name: &str,
        latent: LatentHeads,
    ) -> Result<(), LoadError> {
        let (n_heads, width) = (self.config.n_heads, latent.shape.q_head());
        let cols = latent.shape.q_rank.unwrap_or(self.sizes.hidden);
        let matrix = self.matrix_on_host(name, MatrixShape { rows: n_heads * width, cols })?;
        let here = self.sizes.share.heads(n_heads);
        let place =
            |row: usize| (row / width - here.start) * LATENT_Q_HEAD + latent.place_in_head(row % width);
        filling.put(&matrix, here.start * width..here.end * width, place);
        Ok(())
    }

    /// Reads a matrix, or generates it on the host also if the GPU generates others. If matrices are quantized, it has the
    /// numbers of the quantized one.
    fn matrix_on_host(&self, name: &str, shape: MatrixShape) -> Result<Matrix, LoadError> {
        let (name, MatrixShape { rows, cols }) = (format!("{name}.weight"), shape);
        let processor = self.upload.host();
        let matrix = match self.origin {
            Origin::Host(source) => source.matrix(&name, rows, cols)?,
            Origin::Card { seed } => Dummy { seed, processor }.matrix(&name, rows, cols)?,
        };
        match self.quantize == Quantize::Fp8 && !matrix.format().is_fp8() {
            true => processor.quantize_fp8(&matrix).map_err(LoadError::Memory),
            false => Ok(matrix),
        }
    }

    fn padded_vector(&mut self, name: &str, len: usize, padded: usize) -> Result<Buffer<Bf16>, OpenError> {
        let mut numbers = self.numbers_of(name, len)?;
        numbers.resize(padded, 0.0);
        let mut to = self.arena.buffer(padded)?;
        self.put_numbers(to.view_mut(), &numbers)?;
        Ok(to)
    }

    fn filled(&mut self, filling: &Filling) -> Result<Buffer<Bf16>, OpenError> {
        let mut to = self.arena.buffer(filling.numbers.len())?;
        self.upload.put(to.view_mut(), &filling.numbers)?;
        Ok(to)
    }
}
