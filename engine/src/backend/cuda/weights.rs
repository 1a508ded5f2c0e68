//! A model's weights on the card. Matrices that read the same rows are one matrix there.

use kernels::cpu::{Format, Matrix};
use kernels::cuda::{Bf16, Buffer, Card, View, ViewMut};

use super::heads::Heads;
use super::upload::Upload;
use crate::error::{LoadError, OpenError};
use crate::load::{TensorSource, dummy};
use crate::model::{ModelConfig, Parts};

/// All weights, in the order in which a pass meets them.
#[derive(Debug)]
pub(super) struct CudaWeights {
    pub(super) embed: Buffer<Bf16>,
    pub(super) layers: Vec<LayerWeights>,
    pub(super) norm: Buffer<Bf16>,
    /// `None`: the embedding is the output layer too.
    head: Option<Buffer<Bf16>>,
}

#[derive(Debug)]
pub(super) struct LayerWeights {
    pub(super) attention_norm: Buffer<Bf16>,
    /// Rows of q, then of k, then of v.
    pub(super) qkv: Linear,
    pub(super) head_norms: Option<[Buffer<Bf16>; 2]>,
    pub(super) o: Linear,
    pub(super) mlp_norm: Buffer<Bf16>,
    /// Rows of gate, then of up.
    pub(super) gate_up: Linear,
    pub(super) down: Linear,
}

/// `y = x × weightᵀ + bias`
#[derive(Debug)]
pub(super) struct Linear {
    pub(super) weight: Buffer<Bf16>,
    pub(super) columns: usize,
    pub(super) bias: Option<Buffer<Bf16>>,
}

/// The sizes of a model's matrices on the card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sizes {
    pub(super) hidden: usize,
    pub(super) intermediate: usize,
    pub(super) vocab: usize,
    pub(super) n_layers: usize,
    /// All heads of q, as wide as on the card.
    pub(super) q_width: usize,
    /// All heads of k, or of v.
    pub(super) kv_width: usize,
    pub(super) is_tied: bool,
}

impl Sizes {
    pub(super) fn of(config: &ModelConfig, heads: Heads) -> Result<Self, OpenError> {
        let sizes = Self {
            hidden: config.hidden,
            intermediate: config.intermediate,
            vocab: config.vocab,
            n_layers: config.n_layers,
            q_width: config.n_heads * heads.padded,
            kv_width: config.n_kv_heads * heads.padded,
            is_tied: config.tied,
        };
        sizes.check()
    }

    /// Kernels move 8 numbers at a time.
    fn check(self) -> Result<Self, OpenError> {
        let widths = [
            ("hidden_size", self.hidden),
            ("intermediate_size", self.intermediate),
            ("vocab_size", self.vocab),
        ];
        match widths.into_iter().find(|(_, width)| !width.is_multiple_of(8)) {
            None => Ok(self),
            Some((name, width)) => {
                let wrong = format!("{name} is {width}, and the GPU's kernels need a multiple of 8");
                Err(OpenError::CudaModel(wrong))
            }
        }
    }

    pub(super) fn qkv_width(self) -> usize {
        self.q_width + 2 * self.kv_width
    }

    /// Numbers of all matrices; norms and biases are too small to count.
    pub(super) fn numbers(self) -> usize {
        let attention = (self.qkv_width() + self.q_width) * self.hidden;
        let layer = attention + 3 * self.intermediate * self.hidden;
        let vocabulary = self.vocab * self.hidden * if self.is_tied { 1 } else { 2 };
        self.n_layers * layer + vocabulary
    }

    pub(super) fn bytes(self) -> usize {
        self.numbers() * size_of::<Bf16>()
    }
}

/// Where the numbers come from.
#[derive(Clone, Copy, Debug)]
pub(super) enum Origin<'a> {
    /// From files, or made up by the host.
    Host(&'a dyn TensorSource),
    /// Made up on the card.
    Card { seed: u64 },
}

/// Takes weights by their names and puts them where they belong.
#[derive(Debug)]
pub(super) struct Loader<'a> {
    pub(super) origin: Origin<'a>,
    pub(super) config: &'a ModelConfig,
    pub(super) parts: Parts,
    pub(super) heads: Heads,
    pub(super) sizes: Sizes,
    pub(super) upload: Upload<'a>,
}

/// Which numbers of a row, or which rows, belong to heads, and move apart where heads are padded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Padded {
    Neither,
    Rows,
    Columns,
}

impl CudaWeights {
    pub(super) fn head(&self) -> &Buffer<Bf16> {
        self.head.as_ref().unwrap_or(&self.embed)
    }
}

impl Loader<'_> {
    pub(super) fn load(mut self) -> Result<CudaWeights, OpenError> {
        let Sizes { hidden, vocab, .. } = self.sizes;
        let layers = 0..self.config.n_layers;
        let embed = self.matrix("model.embed_tokens.weight", vocab, hidden)?;
        let layers =
            layers.map(|nth| self.layer(&format!("model.layers.{nth}"))).collect::<Result<_, _>>()?;
        let norm = self.vector("model.norm.weight", hidden)?;
        let head = match self.config.tied {
            true => None,
            false => Some(self.matrix("lm_head.weight", vocab, hidden)?),
        };
        self.card().synchronize()?;
        Ok(CudaWeights { embed, layers, norm, head })
    }

    fn layer(&mut self, layer: &str) -> Result<LayerWeights, OpenError> {
        let (hidden, parts) = (self.sizes.hidden, self.parts);
        let (attention, mlp) = (format!("{layer}.self_attn"), format!("{layer}.mlp"));
        Ok(LayerWeights {
            attention_norm: self.vector(&format!("{layer}.input_layernorm.weight"), hidden)?,
            qkv: self.qkv(&attention)?,
            head_norms: if parts.head_norms { Some(self.head_norms(&attention)?) } else { None },
            o: self.o(&attention)?,
            mlp_norm: self.vector(&format!("{layer}.post_attention_layernorm.weight"), hidden)?,
            gate_up: self.gate_up(&mlp)?,
            down: self.down(&mlp)?,
        })
    }

    fn qkv(&mut self, attention: &str) -> Result<Linear, OpenError> {
        let Sizes { hidden, q_width, kv_width, .. } = self.sizes;
        let (q, kv) = (self.config.n_heads * self.heads.real, self.config.n_kv_heads * self.heads.real);
        let mut weight = self.card().buffer(self.sizes.qkv_width() * hidden)?;
        let mut bias = self.biases(self.parts.qkv_bias, self.sizes.qkv_width())?;
        let parts = [("q_proj", q, q_width), ("k_proj", kv, kv_width), ("v_proj", kv, kv_width)];
        let mut first = 0;
        for (name, n_rows, n_padded) in parts {
            let name = format!("{attention}.{name}");
            let to = weight.view_mut().slice(first * hidden..(first + n_padded) * hidden);
            self.put_matrix(to, &format!("{name}.weight"), (n_rows, hidden), Padded::Rows)?;
            if let Some(bias) = &mut bias {
                let to = bias.view_mut().slice(first..first + n_padded);
                self.put_vector(to, &format!("{name}.bias"), n_rows, 1.0)?;
            }
            first += n_padded;
        }
        Ok(Linear { weight, columns: hidden, bias })
    }

    fn o(&mut self, attention: &str) -> Result<Linear, OpenError> {
        let Sizes { hidden, q_width, .. } = self.sizes;
        let mut weight = self.card().buffer(hidden * q_width)?;
        let shape = (hidden, self.config.n_heads * self.heads.real);
        let name = format!("{attention}.o_proj");
        self.put_matrix(weight.view_mut(), &format!("{name}.weight"), shape, Padded::Columns)?;
        let bias = self.bias(self.parts.o_bias, &name, hidden)?;
        Ok(Linear { weight, columns: q_width, bias })
    }

    fn gate_up(&mut self, mlp: &str) -> Result<Linear, OpenError> {
        let Sizes { hidden, intermediate, .. } = self.sizes;
        let mut weight = self.card().buffer(2 * intermediate * hidden)?;
        let mut bias = self.biases(self.parts.mlp_bias, 2 * intermediate)?;
        for (nth, name) in ["gate_proj", "up_proj"].into_iter().enumerate() {
            let name = format!("{mlp}.{name}");
            let rows = nth * intermediate..(nth + 1) * intermediate;
            let to = weight.view_mut().slice(rows.start * hidden..rows.end * hidden);
            self.put_matrix(to, &format!("{name}.weight"), (intermediate, hidden), Padded::Neither)?;
            if let Some(bias) = &mut bias {
                self.put_vector(bias.view_mut().slice(rows), &format!("{name}.bias"), intermediate, 1.0)?;
            }
        }
        Ok(Linear { weight, columns: hidden, bias })
    }

    fn down(&mut self, mlp: &str) -> Result<Linear, OpenError> {
        let Sizes { hidden, intermediate, .. } = self.sizes;
        let name = format!("{mlp}.down_proj");
        let weight = self.matrix(&format!("{name}.weight"), hidden, intermediate)?;
        let bias = self.bias(self.parts.mlp_bias, &name, hidden)?;
        Ok(Linear { weight, columns: intermediate, bias })
    }

    fn head_norms(&mut self, attention: &str) -> Result<[Buffer<Bf16>; 2], OpenError> {
        let Heads { real, padded } = self.heads;
        let mut norm = |name: &str| -> Result<Buffer<Bf16>, OpenError> {
            let mut to = self.card().buffer(padded)?;
            let factor = self.heads.norm_factor();
            self.put_vector(to.view_mut(), &format!("{attention}.{name}.weight"), real, factor)?;
            Ok(to)
        };
        Ok([norm("q_norm")?, norm("k_norm")?])
    }

    // === what all of it is made of ===

    fn card(&self) -> &Card {
        self.upload.card()
    }

    fn matrix(&mut self, name: &str, rows: usize, cols: usize) -> Result<Buffer<Bf16>, OpenError> {
        let mut to = self.card().buffer(rows * cols)?;
        self.put_matrix(to.view_mut(), name, (rows, cols), Padded::Neither)?;
        Ok(to)
    }

    fn vector(&mut self, name: &str, len: usize) -> Result<Buffer<Bf16>, OpenError> {
        let mut to = self.card().buffer(len)?;
        let numbers = self.numbers_of(name, len)?;
        self.upload.put(to.view_mut(), &numbers.into_iter().map(Bf16::from).collect::<Vec<_>>())?;
        Ok(to)
    }

    fn biases(&self, are_there: bool, len: usize) -> Result<Option<Buffer<Bf16>>, OpenError> {
        if are_there { Ok(Some(self.card().buffer(len)?)) } else { Ok(None) }
    }

    fn bias(&mut self, is_there: bool, name: &str, len: usize) -> Result<Option<Buffer<Bf16>>, OpenError> {
        if is_there { self.vector(&format!("{name}.bias"), len).map(Some) } else { Ok(None) }
    }

    /// A vector whose numbers belong to heads.
    fn put_vector(
        &mut self,
        to: ViewMut<'_, Bf16>,
        name: &str,
        len: usize,
        factor: f32,
    ) -> Result<(), OpenError> {
        let numbers = self.numbers_of(name, len)?;
        let mut padded = vec![Bf16::default(); to.len()];
        for (nth, number) in numbers.into_iter().enumerate() {
            let place = if to.len() == len { nth } else { self.heads.place(nth) };
            padded[place] = Bf16::from(number * factor);
        }
        Ok(self.upload.put(to, &padded)?)
    }

    fn numbers_of(&self, name: &str, len: usize) -> Result<Vec<f32>, LoadError> {
        match self.origin {
            Origin::Host(source) => source.vector(name, len),
            Origin::Card { .. } => Ok(dummy::vector(name, len)),
        }
    }

    fn put_matrix(
        &mut self,
        to: ViewMut<'_, Bf16>,
        name: &str,
        (rows, cols): (usize, usize),
        padded: Padded,
    ) -> Result<(), OpenError> {
        let is_padded = padded != Padded::Neither && self.heads.are_padded();
        let source = match self.origin {
            Origin::Host(source) => source,
            Origin::Card { seed } => {
                let n_numbers = to.len();
                self.card().dummy_weights(to, dummy::key(seed, name), dummy::scale(cols))?;
                self.upload.count(n_numbers);
                return Ok(());
            }
        };
        let matrix = source.matrix(name, rows, cols)?;
        if !is_padded && matrix.format() == Format::Bf16 {
            return Ok(self.upload.put_bytes(to, matrix.bytes())?);
        }
        let padded = if is_padded { padded } else { Padded::Neither };
        let numbers = self.spread(&matrix, to.len(), padded);
        Ok(self.upload.put(to, &numbers)?)
    }

    /// A matrix in bf16 with its heads filled up, `n_numbers` in all.
    fn spread(&self, matrix: &Matrix, n_numbers: usize, padded: Padded) -> Vec<Bf16> {
        let n_columns = match padded {
            Padded::Columns => n_numbers / matrix.rows(),
            Padded::Neither | Padded::Rows => matrix.cols(),
        };
        let mut numbers = vec![Bf16::default(); n_numbers];
        let mut row = vec![0.0; matrix.cols()];
        for nth in 0..matrix.rows() {
            matrix.read_row(nth, &mut row);
            let first = n_columns * if padded == Padded::Rows { self.heads.place(nth) } else { nth };
            for (column, number) in row.iter().enumerate() {
                let column = if padded == Padded::Columns { self.heads.place(column) } else { column };
                numbers[first + column] = Bf16::from(*number);
            }
        }
        numbers
    }
}

/// The matrices of one kind, layer by layer: what is measured over is never in a cache.
pub(super) fn all_of(layers: &[LayerWeights], which: fn(&LayerWeights) -> &Linear) -> Vec<View<'_, Bf16>> {
    layers.iter().map(|layer| which(layer).weight.view()).collect()
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::num::NonZero;
    use std::path::Path;

    use kernels::cpu::{Arithmetic, Processor};

    use super::*;
    use crate::load::weights::Seen;
    use crate::load::{Checkpoint, ModelFolder, Quantize, Weights};
    use crate::model;

    /// Remembers what was asked for.
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
    }

    #[test]
    fn the_card_is_given_what_the_processor_loads() {
        for name in ["llama", "llama3", "mistral", "qwen2", "qwen3"] {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models").join(name);
            let config = ModelFolder::open(&folder).expect("it opens").config;
            let architecture = model::architecture(&config.architecture).expect("it is known");
            let source = Recording(Checkpoint::open(&folder).expect("it opens"), RefCell::default());
            let processor = Processor::new(Arithmetic::F32, NonZero::<usize>::MIN).expect("a thread");
            let seen = Seen::default();
            (architecture.load)(&config, &Weights::new(&source, &processor, Quantize::No, &seen))
                .expect("it loads");
            let asked = source.1.into_inner();
            let is_asked = |end: &str| asked.iter().any(|name| name.ends_with(end));
            let found = Parts {
                qkv_bias: is_asked("q_proj.bias"),
                o_bias: is_asked("o_proj.bias"),
                mlp_bias: is_asked("down_proj.bias"),
                head_norms: is_asked("q_norm.weight"),
            };
            assert_eq!((architecture.parts)(&config), found, "{name}");
        }
    }

    #[test]
    fn an_8b_model_is_as_large_as_it_is() {
        let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("../bench/shapes/llama-3.1-8b");
        let config = ModelFolder::open(&config).expect("it opens").config;
        let sizes = Sizes::of(&config, Heads::of(config.head_dim).expect("128")).expect("multiples of 8");
        assert_eq!(sizes.numbers(), 8_030_261_248 - (2 * 32 + 1) * 4096, "all but the norms");
    }
}
