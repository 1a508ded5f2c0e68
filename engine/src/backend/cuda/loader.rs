//! Loads a rank's share of a model's weights onto its GPU.

mod latents;
mod matrices;

use std::ops::Range;

use device::cuda::{Arena, Bf16, Buffer, ViewMut};
use kernels::cuda::{ComputeCard, ExpertSizes, Fp8Rows};

use super::fp8::{FeedForwardFormats, LayerFormats, WeightFormat};
use super::heads::Heads;
use super::latent::LatentHeads;
use super::upload::Upload;
use super::weights::{
    CudaWeights, DenseWeights, ExpertWeights, FeedForward, LayerWeights, Linear, Rows, Sizes, Weight,
};
use crate::error::{LoadError, OpenError};
use crate::load::{Quantize, TensorSource, dummy};
use crate::model::{Mixture, ModelConfig};

/// The bytes of FP8 matrices that are loaded in one call: a piece of the upload, so that a batch of tensors that are
/// converted on the host takes little memory.
const BATCH_BYTES: usize = 64 << 20;

/// The source of the weights.
#[derive(Clone, Copy, Debug)]
pub(super) enum Origin<'a> {
    /// The host reads the weights from files, or generates them.
    Host(&'a dyn TensorSource),
    /// The GPU generates the weights.
    Card { seed: u64 },
}

/// Loads weights by name and writes them to the GPU.
#[derive(Debug)]
pub(super) struct Loader<'a> {
    pub(super) origin: Origin<'a>,
    pub(super) config: &'a ModelConfig,
    pub(super) heads: Heads,
    pub(super) latent: Option<LatentHeads>,
    pub(super) sizes: Sizes,
    /// Which matrices are in FP8, one entry for each layer.
    pub(super) formats: &'a [LayerFormats],
    pub(super) quantize: Quantize,
    /// The memory of the weights. Every load takes buffers from it in the same order.
    pub(super) arena: &'a mut Arena,
    pub(super) upload: Upload<'a>,
}

/// Which dimension of a matrix consists of heads, which may be padded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PaddedDimension {
    Neither,
    Rows,
    Columns,
}

/// The size of a whole matrix.
#[derive(Clone, Copy, Debug)]
struct MatrixShape {
    rows: usize,
    cols: usize,
}

/// The rank's part of a matrix, and where it is padded on the GPU.
#[derive(Clone, Debug)]
struct MatrixPart {
    range: ShardRange,
    padded: PaddedDimension,
}

/// The rank's part of a matrix, in the checkpoint's row or column numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
enum ShardRange {
    Rows(Range<usize>),
    Columns(Range<usize>),
}

impl Loader<'_> {
    pub(super) fn load(mut self) -> Result<CudaWeights, OpenError> {
        let sizes = self.sizes;
        let embed = match sizes.has_embedding() {
            true => Some(self.vocabulary("model.embed_tokens.weight", sizes.embed_rows(), 0..sizes.vocab)?),
            false => None,
        };
        let layers = sizes.stage.layers();
        let layers = layers
            .map(|nth| self.layer(&format!("model.layers.{nth}"), self.formats[nth]))
            .collect::<Result<_, _>>()?;
        let norm = match sizes.stage.next_layer() {
            Some(next) => {
                self.vector(&format!("model.layers.{next}.input_layernorm.weight"), sizes.hidden)?
            }
            None => self.vector("model.norm.weight", sizes.hidden)?,
        };
        let head = match sizes.has_head() {
            false => None,
            true => {
                Some(self.vocabulary("lm_head.weight", sizes.head_rows, sizes.share.range(sizes.vocab))?)
            }
        };
        self.card().synchronize()?;
        Ok(CudaWeights { embed, layers, norm, head, sizes })
    }

    fn layer(&mut self, layer: &str, formats: LayerFormats) -> Result<LayerWeights, OpenError> {
        let hidden = self.sizes.hidden;
        let (attention, mlp) = (format!("{layer}.self_attn"), format!("{layer}.mlp"));
        Ok(LayerWeights {
            attention_norm: self.vector(&format!("{layer}.input_layernorm.weight"), hidden)?,
            qkv: match self.latent {
                None => self.qkv(&attention, formats.qkv)?,
                Some(latent) => self.first_of_latents(&attention, latent)?,
            },
            latent: self.latent.map(|latent| self.latents(&attention, latent)).transpose()?,
            head_norms: if self.config.optional.head_norms {
                Some(self.head_norms(&attention)?)
            } else {
                None
            },
            o: self.o(&attention, formats.o)?,
            mlp_norm: self.vector(&format!("{layer}.post_attention_layernorm.weight"), hidden)?,
            feed_forward: match (formats.feed_forward, &self.config.mixture, self.sizes.experts) {
                (FeedForwardFormats::Dense { gate_up, down }, ..) => FeedForward::Dense(DenseWeights {
                    gate_up: self.gate_up(&mlp, self.config.intermediate, gate_up)?,
                    down: self.down(&mlp, self.config.intermediate, down)?,
                }),
                (FeedForwardFormats::Experts { routed, shared }, Some(mixture), Some(sizes)) => {
                    FeedForward::Experts(ExpertWeights {
                        shared: self.shared_experts(layer, mixture, shared)?,
                        ..self.experts(layer, mixture, sizes, routed)?
                    })
                }
                (FeedForwardFormats::Experts { .. }, ..) => {
                    unreachable!("a layer of experts is in a mixture")
                }
            },
        })
    }

    /// Loads the router, which all ranks have, and the rank's columns of each expert's inner layer, or the rank's experts.
    fn experts(
        &mut self,
        layer: &str,
        mixture: &Mixture,
        sizes: ExpertSizes,
        format: WeightFormat,
    ) -> Result<ExpertWeights, OpenError> {
        let ExpertSizes { hidden, width, n_experts, held, .. } = sizes;
        let range = self.sizes.expert_columns(mixture);
        let mut router = self.arena.buffer(n_experts * hidden)?;
        let mut gate_up = self.weight(sizes.n_all() * 2 * width, hidden, format)?;
        let mut down = self.weight(sizes.n_all() * hidden, width, format)?;
        let part = |range| MatrixPart { range, padded: PaddedDimension::Neither };
        self.put_matrix(
            Rows::Bf16(router.view_mut()),
            &format!("{layer}.{}.weight", mixture.router()),
            MatrixShape { rows: n_experts, cols: hidden },
            part(ShardRange::Rows(0..n_experts)),
        )?;
        for nth in batches(sizes.n_held(), 2 * width * Fp8Rows::width(hidden)) {
            let named = |matrix: usize, nth: usize| {
                let expert = held.first + nth * held.every;
                format!("{layer}.{}.weight", mixture.expert(expert, mixture.style.matrices[matrix]))
            };
            let to = gate_up.rows_mut(2 * nth.start * width..2 * nth.end * width, hidden);
            let names: Vec<String> = nth.clone().flat_map(|nth| [named(0, nth), named(1, nth)]).collect();
            let shape = MatrixShape { rows: mixture.intermediate, cols: hidden };
            self.put_matrices(to, &names, shape, part(ShardRange::Rows(range.clone())))?;
            let to = down.rows_mut(nth.start * hidden..nth.end * hidden, width);
            let names: Vec<String> = nth.map(|nth| named(2, nth)).collect();
            let shape = MatrixShape { rows: hidden, cols: mixture.intermediate };
            self.put_matrices(to, &names, shape, part(ShardRange::Columns(range.clone())))?;
        }
        let named = |matrix: &str| format!("{layer}.{}.{matrix}.weight", mixture.shared_part());
        let n_rows = sizes.n_shared * mixture.intermediate;
        for nth in 0..sizes.n_shared {
            let (expert, first) = (sizes.n_held() + nth, nth * mixture.intermediate);
            let range = first + range.start..first + range.end;
            for (half, matrix) in ["gate_proj", "up_proj"].into_iter().enumerate() {
                let first = (2 * expert + half) * width;
                let to = gate_up.rows_mut(first..first + width, hidden);
                let shape = MatrixShape { rows: n_rows, cols: hidden };
                self.put_matrix(to, &named(matrix), shape, part(ShardRange::Rows(range.clone())))?;
            }
            let to = down.rows_mut(expert * hidden..(expert + 1) * hidden, width);
            let shape = MatrixShape { rows: hidden, cols: n_rows };
            self.put_matrix(to, &named("down_proj"), shape, part(ShardRange::Columns(range)))?;
        }
        let correction = match mixture.correction() {
            None => None,
            Some(name) => {
                let numbers = self.numbers_of(&format!("{layer}.{name}"), n_experts)?;
                let mut to = self.arena.buffer(n_experts)?;
                let in_halves: Vec<Bf16> = halves(&numbers).collect();
                self.upload.put(to.view_mut().halves(), &in_halves)?;
                Some(to)
            }
        };
        let Mixture { groups, scaling, .. } = *mixture;
        Ok(ExpertWeights { router, correction, groups, scaling, gate_up, down, sizes, shared: None })
    }

    fn shared_experts(
        &mut self,
        layer: &str,
        mixture: &Mixture,
        format: WeightFormat,
    ) -> Result<Option<Box<DenseWeights>>, OpenError> {
        let Some(width) = mixture.shared.filter(|_| self.sizes.shared > 0) else { return Ok(None) };
        let part = format!("{layer}.{}", mixture.shared_part());
        Ok(Some(Box::new(DenseWeights {
            gate_up: self.gate_up(&part, width, format)?,
            down: self.down(&part, width, format)?,
        })))
    }

    fn qkv(&mut self, attention: &str, format: WeightFormat) -> Result<Linear, OpenError> {
        let Sizes { hidden, q_width, kv_width, .. } = self.sizes;
        let (n_heads, n_kv_heads) = (self.config.n_heads, self.config.n_kv_heads);
        let mut weight = self.weight(self.sizes.qkv_width(), hidden, format)?;
        let n_rows = self.sizes.qkv_width();
        let mut bias = self.config.optional.qkv_bias.then(|| self.arena.buffer(n_rows)).transpose()?;
        let parts = [
            ("q_proj", n_heads, q_width),
            ("k_proj", n_kv_heads, kv_width),
            ("v_proj", n_kv_heads, kv_width),
        ];
        let mut first = 0;
        for (name, n_heads, n_padded) in parts {
            let (name, n_rows, rows) =
                (format!("{attention}.{name}"), self.of_heads(n_heads), self.heads_here(n_heads));
            let to = weight.rows_mut(first..first + n_padded, hidden);
            let part = MatrixPart { range: ShardRange::Rows(rows.clone()), padded: PaddedDimension::Rows };
            let shape = MatrixShape { rows: n_rows, cols: hidden };
            self.put_matrix(to, &format!("{name}.weight"), shape, part)?;
            if let Some(bias) = &mut bias {
                let to = bias.view_mut().slice(first..first + n_padded);
                let numbers = &self.numbers_of(&format!("{name}.bias"), n_rows)?[rows];
                self.put_heads(to, numbers, 1.0)?;
            }
            first += n_padded;
        }
        Ok(Linear { weight, columns: hidden, bias })
    }

    fn o(&mut self, attention: &str, format: WeightFormat) -> Result<Linear, OpenError> {
        let Sizes { hidden, q_width, .. } = self.sizes;
        let mut weight = self.weight(hidden, q_width, format)?;
        let n_heads = self.config.n_heads;
        let shape = MatrixShape { rows: hidden, cols: self.of_heads(n_heads) };
        let range = ShardRange::Columns(self.heads_here(n_heads));
        let name = format!("{attention}.o_proj");
        let to = weight.rows_mut(0..hidden, q_width);
        self.put_matrix(
            to,
            &format!("{name}.weight"),
            shape,
            MatrixPart { range, padded: PaddedDimension::Columns },
        )?;
        let bias = if self.config.optional.o_bias { self.shared_bias(&name, hidden)? } else { None };
        Ok(Linear { weight, columns: q_width, bias })
    }

    /// Loads gate and up of a feed-forward part whose inner layer has `n_rows` numbers on all ranks together.
    fn gate_up(&mut self, mlp: &str, n_rows: usize, format: WeightFormat) -> Result<Linear, OpenError> {
        let Sizes { hidden, share, .. } = self.sizes;
        let (intermediate, rows) = (share.width(n_rows), share.range(n_rows));
        let mut weight = self.weight(2 * intermediate, hidden, format)?;
        let has_bias = self.config.optional.mlp_bias;
        let mut bias = has_bias.then(|| self.arena.buffer(2 * intermediate)).transpose()?;
        for (nth, name) in ["gate_proj", "up_proj"].into_iter().enumerate() {
            let name = format!("{mlp}.{name}");
            let here = nth * intermediate..(nth + 1) * intermediate;
            let to = weight.rows_mut(here.clone(), hidden);
            let part = MatrixPart { range: ShardRange::Rows(rows.clone()), padded: PaddedDimension::Neither };
            let shape = MatrixShape { rows: n_rows, cols: hidden };
            self.put_matrix(to, &format!("{name}.weight"), shape, part)?;
            if let Some(bias) = &mut bias {
                let mut numbers = self.numbers_of(&format!("{name}.bias"), n_rows)?[rows.clone()].to_vec();
                numbers.resize(intermediate, 0.0);
                self.put_numbers(bias.view_mut().slice(here), &numbers)?;
            }
        }
        Ok(Linear { weight, columns: hidden, bias })
    }

    fn down(&mut self, mlp: &str, n_columns: usize, format: WeightFormat) -> Result<Linear, OpenError> {
        let Sizes { hidden, share, .. } = self.sizes;
        let intermediate = share.width(n_columns);
        let name = format!("{mlp}.down_proj");
        let mut weight = self.weight(hidden, intermediate, format)?;
        let part = MatrixPart {
            range: ShardRange::Columns(share.range(n_columns)),
            padded: PaddedDimension::Neither,
        };
        let to = weight.rows_mut(0..hidden, intermediate);
        self.put_matrix(to, &format!("{name}.weight"), MatrixShape { rows: hidden, cols: n_columns }, part)?;
        let bias = if self.config.optional.mlp_bias { self.shared_bias(&name, hidden)? } else { None };
        Ok(Linear { weight, columns: intermediate, bias })
    }

    fn head_norms(&mut self, attention: &str) -> Result<[Buffer<Bf16>; 2], OpenError> {
        let Heads { real, padded } = self.heads;
        let mut norm = |name: &str| -> Result<Buffer<Bf16>, OpenError> {
            let mut to = self.arena.buffer(padded)?;
            let numbers = self.numbers_of(&format!("{attention}.{name}.weight"), real)?;
            self.put_heads(to.view_mut(), &numbers, self.heads.norm_factor())?;
            Ok(to)
        };
        Ok([norm("q_norm")?, norm("k_norm")?])
    }

    // === parts of matrices and vectors ===

    fn card(&self) -> &ComputeCard {
        self.upload.card()
    }

    fn weight(&mut self, rows: usize, columns: usize, format: WeightFormat) -> Result<Weight, OpenError> {
        Ok(match format {
            WeightFormat::Bf16 => Weight::Bf16(self.arena.buffer(rows * columns)?),
            WeightFormat::Fp8(scaling) => Weight::Fp8 {
                numbers: self.arena.buffer(rows * Fp8Rows::width(columns))?,
                scales: self.arena.buffer(scaling.count(rows, columns))?,
                scaling,
            },
        })
    }

    /// Returns the number of numbers in `n_heads` heads, without padding.
    fn of_heads(&self, n_heads: usize) -> usize {
        n_heads * self.heads.real
    }

    /// Returns the range of the rank's heads, in numbers.
    fn heads_here(&self, n_heads: usize) -> Range<usize> {
        let heads = self.sizes.share.heads(n_heads);
        heads.start * self.heads.real..heads.end * self.heads.real
    }

    /// Loads a matrix with one row for each token, followed by zeroes up to `n_rows`.
    fn vocabulary(
        &mut self,
        name: &str,
        n_rows: usize,
        tokens: Range<usize>,
    ) -> Result<Buffer<Bf16>, OpenError> {
        let Sizes { hidden, vocab, .. } = self.sizes;
        let mut to = self.arena.buffer(n_rows * hidden)?;
        let rows = Rows::Bf16(to.view_mut());
        let part = MatrixPart { range: ShardRange::Rows(tokens), padded: PaddedDimension::Neither };
        self.put_matrix(rows, name, MatrixShape { rows: vocab, cols: hidden }, part)?;
        Ok(to)
    }

    fn vector(&mut self, name: &str, len: usize) -> Result<Buffer<Bf16>, OpenError> {
        let mut to = self.arena.buffer(len)?;
        let numbers = self.numbers_of(name, len)?;
        self.put_numbers(to.view_mut(), &numbers)?;
        Ok(to)
    }

    /// Loads a bias of a sum over all ranks. Only the first rank loads and adds it, so that it is added once.
    fn shared_bias(&mut self, name: &str, len: usize) -> Result<Option<Buffer<Bf16>>, OpenError> {
        let is_here = self.sizes.share.is_first();
        if is_here { self.vector(&format!("{name}.bias"), len).map(Some) } else { Ok(None) }
    }

    fn put_numbers(&mut self, to: ViewMut<'_, Bf16>, numbers: &[f32]) -> Result<(), OpenError> {
        let narrow: Vec<Bf16> = numbers.iter().map(|number| Bf16::from(*number)).collect();
        Ok(self.upload.put(to, &narrow)?)
    }

    /// Writes numbers of heads to `to`, with padding, each times `factor`.
    fn put_heads(&mut self, to: ViewMut<'_, Bf16>, numbers: &[f32], factor: f32) -> Result<(), OpenError> {
        let mut padded = vec![Bf16::default(); to.len()];
        for (nth, number) in numbers.iter().enumerate() {
            padded[self.heads.place(nth)] = Bf16::from(number * factor);
        }
        Ok(self.upload.put(to, &padded)?)
    }

    fn numbers_of(&self, name: &str, len: usize) -> Result<Vec<f32>, LoadError> {
        match self.origin {
            Origin::Host(source) => source.vector(name, len),
            Origin::Card { .. } => Ok(dummy::vector(name, len)),
        }
    }
}

/// Divides experts into batches for the upload. `expert_bytes` are the bytes of an expert's gate and up in FP8.
fn batches(n_experts: usize, expert_bytes: usize) -> impl Iterator<Item = Range<usize>> {
    let at_once = (BATCH_BYTES / expert_bytes.max(1)).max(1);
    (0..n_experts).step_by(at_once).map(move |first| first..(first + at_once).min(n_experts))
}

/// Splits each number into two 16-bit halves, low half first, for the upload.
fn halves(numbers: &[f32]) -> impl Iterator<Item = Bf16> {
    numbers.iter().flat_map(|number| {
        let bits = number.to_bits();
        [Bf16(bits as u16), Bf16((bits >> 16) as u16)]
    })
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::BTreeSet;
    use std::num::NonZero;
    use std::path::Path;

    use kernels::cpu::{Arithmetic, Format, Matrix, Processor};
    use kernels::cuda::DummyRows;

    use super::super::share::Share;
    use super::*;
    use crate::load::tensors::tensors;
    use crate::load::weights::LoadedFormats;
    use crate::load::{Checkpoint, ModelFolder, Quantize, Weights};
    use crate::model::{Decoder, OptionalTensors};

    /// A checkpoint that records the names of the tensors that are read.
    #[derive(Debug)]
    struct Recording(Checkpoint, RefCell<Vec<String>>);

    impl TensorSource for Recording {
        fn matrix(&self, name: &str, rows: usize, cols: usize) -> Result<Matrix, LoadError> {
            self.1.borrow_mut().push(name.to_owned());
            self.0.matrix(name, rows, cols)
        }

        fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, LoadError> {
            self.1.borrow_mut().push(name.to_owned());
            self.0.vector(name, len)
        }

        fn fp8_format(&self, name: &str) -> Option<Format> {
            self.0.fp8_format(name)
        }
    }

    #[test]
    fn the_config_says_which_tensors_the_decoder_reads() {
        for name in ["llama", "llama3", "mistral", "qwen2", "qwen3"] {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models").join(name);
            let config = ModelFolder::open(&folder).expect("it opens").config;
            let source = Recording(Checkpoint::open(&folder).expect("it opens"), RefCell::default());
            let processor = Processor::new(Arithmetic::F32, NonZero::<usize>::MIN).expect("a thread");
            let seen = LoadedFormats::default();
            Decoder::load(&config, &Weights::new(&source, &processor, Quantize::No, &seen))
                .expect("it loads");
            let asked = source.1.into_inner();
            let specs = tensors(&config);
            let all: BTreeSet<&str> = specs.iter().map(|tensor| tensor.name.as_str()).collect();
            assert_eq!(asked.iter().map(String::as_str).collect::<BTreeSet<_>>(), all, "{name}");
            let is_asked = |end: &str| asked.iter().any(|name| name.ends_with(end));
            let found = OptionalTensors {
                qkv_bias: is_asked("q_proj.bias"),
                o_bias: is_asked("o_proj.bias"),
                mlp_bias: is_asked("down_proj.bias"),
                head_norms: is_asked("q_norm.weight"),
            };
            assert_eq!(config.optional, found, "{name}");
        }
    }

    #[test]
    fn batches_have_all_experts_once_and_fill_a_piece() {
        for (n_experts, expert_bytes, at_once) in
            [(128, 2 * 768 * 2048, 21), (8, 1 << 30, 1), (3, 5, 3), (0, 0, 1)]
        {
            let batches: Vec<_> = batches(n_experts, expert_bytes).collect();
            assert_eq!(
                batches.iter().cloned().flatten().collect::<Vec<_>>(),
                (0..n_experts).collect::<Vec<_>>()
            );
            assert!(batches.first().is_none_or(|first| first.len() == at_once), "{batches:?}");
        }
    }

    #[test]
    fn ranks_have_all_rows_or_all_columns_of_a_matrix_once() {
        let shape = MatrixShape { rows: 40, cols: 40 };
        let (mut rows, mut columns) = (Vec::new(), Vec::new());
        for share in Share::of_all(3) {
            let range = share.range(40);
            let of_rows = ShardRange::Rows(range.clone()).rows_of(shape);
            assert_eq!(of_rows, DummyRows { cols: 40, rows: range.clone(), columns: 0..40 });
            let of_columns = ShardRange::Columns(range.clone()).rows_of(shape);
            assert_eq!(of_columns, DummyRows { cols: 40, rows: 0..40, columns: range });
            rows.extend(of_rows.rows);
            columns.extend(of_columns.columns);
        }
        assert_eq!((rows, columns), ((0..40).collect(), (0..40).collect()));
    }
}
