//! A rank's share of a model's weights on the GPU. Matrices with the same input are merged into one matrix.

use std::ops::Range;

use device::cuda::{Bf16, Buffer, View, ViewMut};
use kernels::cuda::{Factors, Fp8Rows, WeightMatrix};

use super::fp8::{LayerFormats, WeightFormat};
use super::heads::Heads;
use super::share::Share;
use crate::error::OpenError;
use crate::model::ModelConfig;

/// All weights, in the order of a pass.
#[derive(Debug)]
pub(super) struct CudaWeights {
    /// The embedding. Every rank has all of it, and a step reads only the rows of its tokens.
    pub(super) embed: Buffer<Bf16>,
    pub(super) layers: Vec<LayerWeights>,
    pub(super) norm: Buffer<Bf16>,
    /// The output layer; `None` if the embedding is also the output layer.
    pub(super) head: Option<Buffer<Bf16>>,
    pub(super) sizes: Sizes,
}

#[derive(Debug)]
pub(super) struct LayerWeights {
    pub(super) attention_norm: Buffer<Bf16>,
    /// The rows of q, then of k, then of v.
    pub(super) qkv: Linear,
    pub(super) head_norms: Option<[Buffer<Bf16>; 2]>,
    pub(super) o: Linear,
    pub(super) mlp_norm: Buffer<Bf16>,
    /// The rows of gate, then of up.
    pub(super) gate_up: Linear,
    pub(super) down: Linear,
}

/// A linear layer: `y = x × weightᵀ + bias`.
#[derive(Debug)]
pub(super) struct Linear {
    pub(super) weight: Weight,
    pub(super) columns: usize,
    pub(super) bias: Option<Buffer<Bf16>>,
}

impl Linear {
    /// Returns the matrix with rows that it multiplies.
    pub(super) fn factors<'a>(&'a self, x: View<'a, Bf16>) -> Factors<'a> {
        Factors { w: self.weight.view(), x, k: self.columns }
    }
}

#[derive(Debug)]
pub(super) enum Weight {
    Bf16(Buffer<Bf16>),
    Fp8 { numbers: Buffer<u8>, scales: Buffer<f32> },
}

/// Rows of a [`Weight`] to be written, each with `k` numbers.
#[derive(Debug)]
pub(super) enum Rows<'a> {
    Bf16(ViewMut<'a, Bf16>),
    Fp8(Fp8RowsMut<'a>),
}

#[derive(Debug)]
pub(super) struct Fp8RowsMut<'a> {
    pub(super) numbers: ViewMut<'a, u8>,
    pub(super) scales: ViewMut<'a, f32>,
    pub(super) k: usize,
}

impl Weight {
    pub(super) fn view(&self) -> WeightMatrix<'_> {
        match self {
            Self::Bf16(numbers) => WeightMatrix::Bf16(numbers.view()),
            Self::Fp8 { numbers, scales } => {
                WeightMatrix::Fp8(Fp8Rows { numbers: numbers.view(), scales: scales.view() })
            }
        }
    }

    pub(super) fn rows_mut(&mut self, rows: Range<usize>, k: usize) -> Rows<'_> {
        match self {
            Self::Bf16(numbers) => Rows::Bf16(numbers.view_mut().slice(rows.start * k..rows.end * k)),
            Self::Fp8 { numbers, scales } => {
                let width = Fp8Rows::width(k);
                let numbers = numbers.view_mut().slice(rows.start * width..rows.end * width);
                Rows::Fp8(Fp8RowsMut { numbers, scales: scales.view_mut().slice(rows), k })
            }
        }
    }
}

/// The sizes of a model's matrices on the GPU. Ranks differ only in `share`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sizes {
    pub(super) share: Share,
    pub(super) hidden: usize,
    /// The rank's share of the width of the feed-forward part.
    pub(super) intermediate: usize,
    /// The number of tokens of the model's whole vocabulary.
    pub(super) vocab: usize,
    /// The number of the rank's rows of the output layer.
    pub(super) head_rows: usize,
    pub(super) n_layers: usize,
    /// The size of the rank's heads of q, padded as on the GPU.
    pub(super) q_width: usize,
    /// The size of the rank's heads of k, which equals that of v.
    pub(super) kv_width: usize,
    pub(super) is_tied: bool,
}

impl Sizes {
    pub(super) fn of(config: &ModelConfig, heads: Heads, share: Share) -> Result<Self, OpenError> {
        Self::check(config)?;
        Ok(Self {
            share,
            hidden: config.hidden,
            intermediate: share.width(config.intermediate),
            vocab: config.vocab,
            head_rows: share.width(config.vocab),
            n_layers: config.n_layers,
            q_width: share.heads(config.n_heads).len() * heads.padded,
            kv_width: share.heads(config.n_kv_heads).len() * heads.padded,
            is_tied: config.tied,
        })
    }

    /// Checks that widths are multiples of 8, the number that kernels load at a time.
    fn check(config: &ModelConfig) -> Result<(), OpenError> {
        let widths = [
            ("hidden_size", config.hidden),
            ("intermediate_size", config.intermediate),
            ("vocab_size", config.vocab),
        ];
        match widths.into_iter().find(|(_, width)| !width.is_multiple_of(8)) {
            None => Ok(()),
            Some((name, width)) => {
                let wrong = format!("{name} is {width}, but the GPU's kernels need a multiple of 8");
                Err(OpenError::CudaModel(wrong))
            }
        }
    }

    pub(super) fn qkv_width(self) -> usize {
        self.q_width + 2 * self.kv_width
    }

    /// Returns the rows, the columns and the format of a layer's matrices.
    fn matrices(self, formats: LayerFormats) -> [(usize, usize, WeightFormat); 4] {
        let Self { hidden, intermediate, q_width, .. } = self;
        [
            (self.qkv_width(), hidden, formats.qkv),
            (hidden, q_width, formats.o),
            (2 * intermediate, hidden, formats.gate_up),
            (hidden, intermediate, formats.down),
        ]
    }

    /// Returns the number of rows of the embedding. If it is also the output layer, zeroes follow up to the
    /// end of the last rank's share.
    pub(super) fn embed_rows(self) -> usize {
        if self.is_tied { self.head_rows * self.share.n_ranks } else { self.vocab }
    }

    /// Returns the bytes of all matrices. Norms and biases are too small to count.
    pub(super) fn bytes(self, formats: &[LayerFormats]) -> usize {
        let bytes = |(rows, columns, format)| match format {
            WeightFormat::Fp8 => rows * (Fp8Rows::width(columns) + size_of::<f32>()),
            WeightFormat::Bf16 => rows * columns * size_of::<Bf16>(),
        };
        let layers: usize = formats.iter().flat_map(|layer| self.matrices(*layer)).map(bytes).sum();
        let head_rows = if self.is_tied { 0 } else { self.head_rows };
        layers + (self.embed_rows() + head_rows) * self.hidden * size_of::<Bf16>()
    }

    /// Returns the number of numbers of the largest FP8 matrix, for the memory that widens one matrix at a
    /// time.
    pub(super) fn widened(self, formats: &[LayerFormats]) -> usize {
        let matrices = formats.iter().flat_map(|layer| self.matrices(*layer));
        let in_fp8 = matrices.filter(|(.., format)| *format == WeightFormat::Fp8);
        in_fp8.map(|(rows, columns, _)| rows * columns).max().unwrap_or(0)
    }
}

impl CudaWeights {
    /// Returns the embedding, with one row for each token.
    pub(super) fn embedding(&self) -> View<'_, Bf16> {
        self.embed.slice(0..self.sizes.vocab * self.sizes.hidden)
    }

    /// Returns the rank's rows of the output layer.
    pub(super) fn head(&self) -> View<'_, Bf16> {
        let Sizes { head_rows, hidden, share, .. } = self.sizes;
        match &self.head {
            Some(head) => head.view(),
            None => self.embed.slice(share.nth * head_rows * hidden..(share.nth + 1) * head_rows * hidden),
        }
    }
}

/// Returns the matrices of one kind in all layers. Measuring over all of them keeps them out of the caches.
pub(super) fn all_of(layers: &[LayerWeights], which: fn(&LayerWeights) -> &Linear) -> Vec<WeightMatrix<'_>> {
    layers.iter().map(|layer| which(layer).weight.view()).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::load::ModelFolder;

    #[test]
    fn the_bytes_of_an_8b_model_and_of_its_ranks_are_right() {
        let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("../bench/shapes/llama-3.1-8b");
        let config = ModelFolder::open(&config).expect("it opens").config;
        let sizes = |share| {
            Sizes::of(&config, Heads::of(config.head_dim).expect("128"), share).expect("multiples of 8")
        };
        let norms = (2 * 32 + 1) * 4096;
        let (plain, in_fp8) = (vec![LayerFormats::default(); 32], vec![LayerFormats::FP8; 32]);
        assert_eq!(sizes(Share::WHOLE).bytes(&plain), 2 * (8_030_261_248 - norms), "all but the norms");
        assert_eq!(sizes(Share::WHOLE).widened(&plain), 0);
        // A matrix in FP8 has a byte for each number, and 4 bytes for each row.
        let (vocabulary, rows) = (2 * 128_256 * 4096, 6144 + 4096 + 2 * 14_336 + 4096);
        let numbers = 8_030_261_248 - norms - vocabulary;
        assert_eq!(sizes(Share::WHOLE).bytes(&in_fp8), numbers + 2 * vocabulary + 4 * 32 * rows);
        assert_eq!(sizes(Share::WHOLE).widened(&in_fp8), 2 * 14_336 * 4096);
        let embedding = 128_256 * 4096;
        for share in Share::of_all(2) {
            // The embedding counts in full, because both ranks have all of it.
            assert_eq!(sizes(share).bytes(&plain), 8_030_261_248 - norms + embedding);
        }
    }
}
