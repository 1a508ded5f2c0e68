//! A model's weights on the card: a rank's share of them. Matrices that read the same rows are one matrix there.

use std::ops::Range;

use kernels::cpu::{Format, Matrix};
use kernels::cuda::{Arena, Bf16, Buffer, Card, DummyPart, Fp8Rows, View, ViewMut, Weights};

use super::fp8::{InFp8, Packed};
use super::heads::Heads;
use super::share::Share;
use super::upload::Upload;
use crate::error::{LoadError, OpenError};
use crate::load::{TensorSource, dummy};
use crate::model::{ModelConfig, Parts};

/// All weights, in the order in which a pass meets them.
#[derive(Debug)]
pub(super) struct CudaWeights {
    /// All of it, on every rank: a step reads no more than its tokens' rows.
    embed: Buffer<Bf16>,
    pub(super) layers: Vec<LayerWeights>,
    pub(super) norm: Buffer<Bf16>,
    /// `None`: the embedding is the output layer too.
    head: Option<Buffer<Bf16>>,
    sizes: Sizes,
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
    pub(super) weight: Weight,
    pub(super) columns: usize,
    pub(super) bias: Option<Buffer<Bf16>>,
}

#[derive(Debug)]
pub(super) enum Weight {
    Bf16(Buffer<Bf16>),
    Fp8 { numbers: Buffer<u8>, scales: Buffer<f32> },
}

/// Some rows of one, of `k` numbers, as they are put there.
#[derive(Debug)]
enum Rows<'a> {
    Bf16(ViewMut<'a, Bf16>),
    Fp8 { numbers: ViewMut<'a, u8>, scales: ViewMut<'a, f32>, k: usize },
}

impl Weight {
    pub(super) fn view(&self) -> Weights<'_> {
        match self {
            Self::Bf16(numbers) => Weights::Bf16(numbers.view()),
            Self::Fp8 { numbers, scales } => {
                Weights::Fp8(Fp8Rows { numbers: numbers.view(), scales: scales.view() })
            }
        }
    }

    fn rows_mut(&mut self, rows: Range<usize>, k: usize) -> Rows<'_> {
        match self {
            Self::Bf16(numbers) => Rows::Bf16(numbers.view_mut().slice(rows.start * k..rows.end * k)),
            Self::Fp8 { numbers, scales } => {
                let width = Fp8Rows::width(k);
                let numbers = numbers.view_mut().slice(rows.start * width..rows.end * width);
                Rows::Fp8 { numbers, scales: scales.view_mut().slice(rows), k }
            }
        }
    }
}

/// The sizes of a model's matrices on the card, the same on all ranks but for which share it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sizes {
    pub(super) share: Share,
    pub(super) hidden: usize,
    /// The rank's.
    pub(super) intermediate: usize,
    /// The model's.
    pub(super) vocab: usize,
    /// Rows of the output layer, the rank's.
    pub(super) head_rows: usize,
    pub(super) n_layers: usize,
    /// The rank's heads of q, as wide as on the card.
    pub(super) q_width: usize,
    /// The rank's heads of k, or of v.
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

    /// Kernels move 8 numbers at a time.
    fn check(config: &ModelConfig) -> Result<(), OpenError> {
        let widths = [
            ("hidden_size", config.hidden),
            ("intermediate_size", config.intermediate),
            ("vocab_size", config.vocab),
        ];
        match widths.into_iter().find(|(_, width)| !width.is_multiple_of(8)) {
            None => Ok(()),
            Some((name, width)) => {
                let wrong = format!("{name} is {width}, and the GPU's kernels need a multiple of 8");
                Err(OpenError::CudaModel(wrong))
            }
        }
    }

    pub(super) fn qkv_width(self) -> usize {
        self.q_width + 2 * self.kv_width
    }

    /// Rows and columns of a layer's matrices, and whether they are in FP8.
    fn matrices(self, in_fp8: InFp8) -> [(usize, usize, bool); 4] {
        let Self { hidden, intermediate, q_width, .. } = self;
        [
            (self.qkv_width(), hidden, in_fp8.qkv),
            (hidden, q_width, in_fp8.o),
            (2 * intermediate, hidden, in_fp8.gate_up),
            (hidden, intermediate, in_fp8.down),
        ]
    }

    /// Rows of the embedding, and zeroes up to the end of the last rank's output layer where that is the same.
    fn embed_rows(self) -> usize {
        if self.is_tied { self.head_rows * self.share.n_ranks } else { self.vocab }
    }

    /// Bytes of all matrices; norms and biases are too small to count.
    pub(super) fn bytes(self, in_fp8: &[InFp8]) -> usize {
        let bytes = |(rows, columns, is_fp8)| match is_fp8 {
            true => rows * (Fp8Rows::width(columns) + size_of::<f32>()),
            false => rows * columns * size_of::<Bf16>(),
        };
        let layers: usize = in_fp8.iter().flat_map(|layer| self.matrices(*layer)).map(bytes).sum();
        let head_rows = if self.is_tied { 0 } else { self.head_rows };
        layers + (self.embed_rows() + head_rows) * self.hidden * size_of::<Bf16>()
    }

    /// Numbers of the largest matrix that is in FP8: what it takes to widen one.
    pub(super) fn widened(self, in_fp8: &[InFp8]) -> usize {
        let matrices = in_fp8.iter().flat_map(|layer| self.matrices(*layer));
        matrices.filter(|(.., is_fp8)| *is_fp8).map(|(rows, columns, _)| rows * columns).max().unwrap_or(0)
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
    /// Layer by layer.
    pub(super) in_fp8: &'a [InFp8],
    /// Where they lie. Asked in the same order every time.
    pub(super) arena: &'a mut Arena,
    pub(super) upload: Upload<'a>,
}

/// Which numbers of a row, or which rows, belong to heads, and move apart where heads are padded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Padded {
    Neither,
    Rows,
    Columns,
}

/// Which part of a matrix the rank has, as the checkpoint counts.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    Rows(Range<usize>),
    Columns(Range<usize>),
}

impl CudaWeights {
    /// A row for each token.
    pub(super) fn embedding(&self) -> View<'_, Bf16> {
        self.embed.slice(0..self.sizes.vocab * self.sizes.hidden)
    }

    /// The rank's rows of the output layer.
    pub(super) fn head(&self) -> View<'_, Bf16> {
        let Sizes { head_rows, hidden, share, .. } = self.sizes;
        match &self.head {
            Some(head) => head.view(),
            None => self.embed.slice(share.nth * head_rows * hidden..(share.nth + 1) * head_rows * hidden),
        }
    }
}

impl Loader<'_> {
    pub(super) fn load(mut self) -> Result<CudaWeights, OpenError> {
        let sizes = self.sizes;
        let layers = 0..self.config.n_layers;
        let embed = self.vocabulary("model.embed_tokens.weight", sizes.embed_rows(), 0..sizes.vocab)?;
        let layers = layers
            .map(|nth| self.layer(&format!("model.layers.{nth}"), self.in_fp8[nth]))
            .collect::<Result<_, _>>()?;
        let norm = self.vector("model.norm.weight", sizes.hidden)?;
        let head = match self.config.tied {
            true => None,
            false => {
                Some(self.vocabulary("lm_head.weight", sizes.head_rows, sizes.share.range(sizes.vocab))?)
            }
        };
        self.card().synchronize()?;
        Ok(CudaWeights { embed, layers, norm, head, sizes })
    }

    fn layer(&mut self, layer: &str, in_fp8: InFp8) -> Result<LayerWeights, OpenError> {
        let (hidden, parts) = (self.sizes.hidden, self.parts);
        let (attention, mlp) = (format!("{layer}.self_attn"), format!("{layer}.mlp"));
        Ok(LayerWeights {
            attention_norm: self.vector(&format!("{layer}.input_layernorm.weight"), hidden)?,
            qkv: self.qkv(&attention, in_fp8.qkv)?,
            head_norms: if parts.head_norms { Some(self.head_norms(&attention)?) } else { None },
            o: self.o(&attention, in_fp8.o)?,
            mlp_norm: self.vector(&format!("{layer}.post_attention_layernorm.weight"), hidden)?,
            gate_up: self.gate_up(&mlp, in_fp8.gate_up)?,
            down: self.down(&mlp, in_fp8.down)?,
        })
    }

    fn qkv(&mut self, attention: &str, is_fp8: bool) -> Result<Linear, OpenError> {
        let Sizes { hidden, q_width, kv_width, .. } = self.sizes;
        let (n_heads, n_kv_heads) = (self.config.n_heads, self.config.n_kv_heads);
        let mut weight = self.weight(self.sizes.qkv_width(), hidden, is_fp8)?;
        let mut bias = self.biases(self.parts.qkv_bias, self.sizes.qkv_width())?;
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
            let part = Part::Rows(rows.clone());
            self.put_matrix(to, &format!("{name}.weight"), (n_rows, hidden), (Padded::Rows, part))?;
            if let Some(bias) = &mut bias {
                let to = bias.view_mut().slice(first..first + n_padded);
                let numbers = &self.numbers_of(&format!("{name}.bias"), n_rows)?[rows];
                self.put_heads(to, numbers, 1.0)?;
            }
            first += n_padded;
        }
        Ok(Linear { weight, columns: hidden, bias })
    }

    fn o(&mut self, attention: &str, is_fp8: bool) -> Result<Linear, OpenError> {
        let Sizes { hidden, q_width, .. } = self.sizes;
        let mut weight = self.weight(hidden, q_width, is_fp8)?;
        let n_heads = self.config.n_heads;
        let (shape, part) = ((hidden, self.of_heads(n_heads)), Part::Columns(self.heads_here(n_heads)));
        let name = format!("{attention}.o_proj");
        let to = weight.rows_mut(0..hidden, q_width);
        self.put_matrix(to, &format!("{name}.weight"), shape, (Padded::Columns, part))?;
        let bias = self.bias(self.parts.o_bias, &name, hidden)?;
        Ok(Linear { weight, columns: q_width, bias })
    }

    fn gate_up(&mut self, mlp: &str, is_fp8: bool) -> Result<Linear, OpenError> {
        let Sizes { hidden, intermediate, share, .. } = self.sizes;
        let (n_rows, rows) = (self.config.intermediate, share.range(self.config.intermediate));
        let mut weight = self.weight(2 * intermediate, hidden, is_fp8)?;
        let mut bias = self.biases(self.parts.mlp_bias, 2 * intermediate)?;
        for (nth, name) in ["gate_proj", "up_proj"].into_iter().enumerate() {
            let name = format!("{mlp}.{name}");
            let here = nth * intermediate..(nth + 1) * intermediate;
            let to = weight.rows_mut(here.clone(), hidden);
            let part = Part::Rows(rows.clone());
            self.put_matrix(to, &format!("{name}.weight"), (n_rows, hidden), (Padded::Neither, part))?;
            if let Some(bias) = &mut bias {
                let mut numbers = self.numbers_of(&format!("{name}.bias"), n_rows)?[rows.clone()].to_vec();
                numbers.resize(intermediate, 0.0);
                self.put_numbers(bias.view_mut().slice(here), &numbers)?;
            }
        }
        Ok(Linear { weight, columns: hidden, bias })
    }

    fn down(&mut self, mlp: &str, is_fp8: bool) -> Result<Linear, OpenError> {
        let Sizes { hidden, intermediate, share, .. } = self.sizes;
        let name = format!("{mlp}.down_proj");
        let mut weight = self.weight(hidden, intermediate, is_fp8)?;
        let n_columns = self.config.intermediate;
        let part = Part::Columns(share.range(n_columns));
        let to = weight.rows_mut(0..hidden, intermediate);
        self.put_matrix(to, &format!("{name}.weight"), (hidden, n_columns), (Padded::Neither, part))?;
        let bias = self.bias(self.parts.mlp_bias, &name, hidden)?;
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

    // === what all of it is made of ===

    fn card(&self) -> &Card {
        self.upload.card()
    }

    fn weight(&mut self, rows: usize, columns: usize, is_fp8: bool) -> Result<Weight, OpenError> {
        Ok(match is_fp8 {
            false => Weight::Bf16(self.arena.buffer(rows * columns)?),
            true => Weight::Fp8 {
                numbers: self.arena.buffer(rows * Fp8Rows::width(columns))?,
                scales: self.arena.buffer(rows)?,
            },
        })
    }

    /// Numbers of so many heads, one after the other, as the checkpoint has them.
    fn of_heads(&self, n_heads: usize) -> usize {
        n_heads * self.heads.real
    }

    /// Those of the rank's.
    fn heads_here(&self, n_heads: usize) -> Range<usize> {
        let heads = self.sizes.share.heads(n_heads);
        heads.start * self.heads.real..heads.end * self.heads.real
    }

    /// Rows of tokens, and zeroes up to `n_rows`.
    fn vocabulary(
        &mut self,
        name: &str,
        n_rows: usize,
        tokens: Range<usize>,
    ) -> Result<Buffer<Bf16>, OpenError> {
        let Sizes { hidden, vocab, .. } = self.sizes;
        let mut to = self.arena.buffer(n_rows * hidden)?;
        let rows = Rows::Bf16(to.view_mut());
        self.put_matrix(rows, name, (vocab, hidden), (Padded::Neither, Part::Rows(tokens)))?;
        Ok(to)
    }

    fn vector(&mut self, name: &str, len: usize) -> Result<Buffer<Bf16>, OpenError> {
        let mut to = self.arena.buffer(len)?;
        let numbers = self.numbers_of(name, len)?;
        self.put_numbers(to.view_mut(), &numbers)?;
        Ok(to)
    }

    fn biases(&mut self, are_there: bool, len: usize) -> Result<Option<Buffer<Bf16>>, OpenError> {
        if are_there { Ok(Some(self.arena.buffer(len)?)) } else { Ok(None) }
    }

    /// A bias of sums over all ranks: one of them adds it.
    fn bias(&mut self, is_there: bool, name: &str, len: usize) -> Result<Option<Buffer<Bf16>>, OpenError> {
        let is_here = is_there && self.sizes.share.is_first();
        if is_here { self.vector(&format!("{name}.bias"), len).map(Some) } else { Ok(None) }
    }

    fn put_numbers(&mut self, to: ViewMut<'_, Bf16>, numbers: &[f32]) -> Result<(), OpenError> {
        let narrow: Vec<Bf16> = numbers.iter().map(|number| Bf16::from(*number)).collect();
        Ok(self.upload.put(to, &narrow)?)
    }

    /// Numbers that belong to heads.
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

    /// The part of a matrix of `shape` that is the rank's. What `to` has room for beyond it is filled with zeroes.
    fn put_matrix(
        &mut self,
        to: Rows<'_>,
        name: &str,
        shape: (usize, usize),
        (padded, part): (Padded, Part),
    ) -> Result<(), OpenError> {
        let padded = if self.heads.are_padded() { padded } else { Padded::Neither };
        let to = match to {
            Rows::Bf16(to) => to,
            Rows::Fp8 { numbers, scales, k } => {
                return self.put_fp8((numbers, scales, k), name, shape, (padded, part));
            }
        };
        let (rows, cols) = shape;
        let source = match self.origin {
            Origin::Host(source) => source,
            Origin::Card { seed } => {
                let (n_numbers, key) = (to.len(), dummy::key(seed, name));
                self.card().dummy_part(to, key, dummy::scale(cols), part.made_up(shape, n_numbers))?;
                self.upload.count(n_numbers);
                return Ok(());
            }
        };
        let matrix = source.matrix(name, rows, cols)?;
        if padded == Padded::Neither && matrix.format() == Format::Bf16 {
            match part {
                Part::Rows(rows) => {
                    self.upload.put_bytes(to, &matrix.bytes()[2 * rows.start * cols..2 * rows.end * cols])?;
                }
                Part::Columns(columns) => {
                    let width = to.len() / rows;
                    self.upload.put_columns(to, matrix.bytes(), cols, columns, width)?;
                }
            }
            return Ok(());
        }
        let numbers = self.spread(&matrix, to.len(), padded, &part);
        Ok(self.upload.put(to, &numbers)?)
    }

    /// The same in FP8. What is not is quantized, whole rows of it, whichever part of them is the rank's.
    fn put_fp8(
        &mut self,
        (numbers, scales, k): (ViewMut<'_, u8>, ViewMut<'_, f32>, usize),
        name: &str,
        (rows, cols): (usize, usize),
        (padded, part): (Padded, Part),
    ) -> Result<(), OpenError> {
        let Origin::Host(source) = self.origin else { unreachable!("what the card makes up is in bf16") };
        let matrix = source.matrix(name, rows, cols)?;
        let matrix = match matrix.format() {
            Format::Fp8 => matrix,
            _ => self.upload.host().quantize_fp8(&matrix).map_err(LoadError::Memory)?,
        };
        let (mut from_rows, mut from_columns) = (vec![None; scales.len()], vec![None; k]);
        let (here_rows, here_columns) = match part {
            Part::Rows(rows) => (rows, 0..cols),
            Part::Columns(columns) => (0..rows, columns),
        };
        for (nth, row) in here_rows.enumerate() {
            from_rows[if padded == Padded::Rows { self.heads.place(nth) } else { nth }] = Some(row);
        }
        for (nth, column) in here_columns.enumerate() {
            from_columns[if padded == Padded::Columns { self.heads.place(nth) } else { nth }] = Some(column);
        }
        let packed = Packed::new(&matrix, from_rows, &from_columns);
        self.upload.put_with(numbers.halves(), |start, pairs| packed.fill(start, pairs))?;
        let of_rows: Vec<Bf16> = halves(&packed.scales()).collect();
        self.upload.put(scales.halves(), &of_rows)?;
        match packed.has_nan() {
            true => Err(LoadError::NoNumber { tensor: name.to_owned() }.into()),
            false => Ok(()),
        }
    }

    /// Part of a matrix in bf16 with its heads filled up, `n_numbers` in all.
    fn spread(&self, matrix: &Matrix, n_numbers: usize, padded: Padded, part: &Part) -> Vec<Bf16> {
        let (rows, columns, width) = match part {
            Part::Rows(rows) => (rows.clone(), 0..matrix.cols(), matrix.cols()),
            Part::Columns(columns) => (0..matrix.rows(), columns.clone(), n_numbers / matrix.rows()),
        };
        let mut numbers = vec![Bf16::default(); n_numbers];
        let mut row = vec![0.0; matrix.cols()];
        for (nth, from) in rows.enumerate() {
            matrix.read_row(from, &mut row);
            let first = width * if padded == Padded::Rows { self.heads.place(nth) } else { nth };
            for (column, number) in row[columns.clone()].iter().enumerate() {
                let column = if padded == Padded::Columns { self.heads.place(column) } else { column };
                numbers[first + column] = Bf16::from(*number);
            }
        }
        numbers
    }
}

impl Part {
    /// The same part of a matrix that is made up.
    fn made_up(&self, (rows, cols): (usize, usize), n_numbers: usize) -> DummyPart {
        match self {
            Self::Rows(range) => DummyPart {
                first: range.start * cols,
                width: n_numbers,
                n_real: range.len() * cols,
                stride: n_numbers,
            },
            Self::Columns(range) => {
                DummyPart { first: range.start, width: n_numbers / rows, n_real: range.len(), stride: cols }
            }
        }
    }
}

/// Numbers as 16 bits twice, low ones first: how they are moved.
fn halves(numbers: &[f32]) -> impl Iterator<Item = Bf16> {
    numbers.iter().flat_map(|number| {
        let bits = number.to_bits();
        [Bf16(bits as u16), Bf16((bits >> 16) as u16)]
    })
}

/// The matrices of one kind, layer by layer: what is measured over is never in a cache.
pub(super) fn all_of(layers: &[LayerWeights], which: fn(&LayerWeights) -> &Linear) -> Vec<Weights<'_>> {
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

        fn is_fp8(&self, name: &str) -> bool {
            self.0.is_fp8(name)
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
    fn an_8b_model_is_as_large_as_it_is_and_ranks_have_their_shares() {
        let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("../bench/shapes/llama-3.1-8b");
        let config = ModelFolder::open(&config).expect("it opens").config;
        let sizes = |share| {
            Sizes::of(&config, Heads::of(config.head_dim).expect("128"), share).expect("multiples of 8")
        };
        let norms = (2 * 32 + 1) * 4096;
        let (plain, in_fp8) = (vec![InFp8::default(); 32], vec![InFp8::ALL; 32]);
        assert_eq!(sizes(Share::WHOLE).bytes(&plain), 2 * (8_030_261_248 - norms), "all but the norms");
        assert_eq!(sizes(Share::WHOLE).widened(&plain), 0);
        // A byte for each number of the layers, and 4 for each row.
        let (vocabulary, rows) = (2 * 128_256 * 4096, 6144 + 4096 + 2 * 14_336 + 4096);
        let numbers = 8_030_261_248 - norms - vocabulary;
        assert_eq!(sizes(Share::WHOLE).bytes(&in_fp8), numbers + 2 * vocabulary + 4 * 32 * rows);
        assert_eq!(sizes(Share::WHOLE).widened(&in_fp8), 2 * 14_336 * 4096);
        let embedding = 128_256 * 4096;
        for share in Share::of_all(2) {
            // The embedding is whole on both.
            assert_eq!(sizes(share).bytes(&plain), 8_030_261_248 - norms + embedding);
        }
    }

    /// Which number of the whole matrix each number is that the card makes up, as `dummy.cu` counts; `None` for zeroes.
    fn made_up(part: &Part, shape: (usize, usize), n_numbers: usize) -> Vec<Option<usize>> {
        let DummyPart { first, width, n_real, stride } = part.made_up(shape, n_numbers);
        let number = |at: usize| (at % width < n_real).then(|| first + at / width * stride + at % width);
        (0..n_numbers).map(number).collect()
    }

    #[test]
    fn ranks_make_up_the_numbers_that_one_rank_would() {
        let (rows, cols) = (40, 16);
        for share in Share::of_all(2) {
            let (range, width) = (share.range(40), share.width(40));
            let of_rows = made_up(&Part::Rows(range.clone()), (rows, cols), width * cols);
            for (at, number) in of_rows.into_iter().enumerate() {
                let row = range.start + at / cols;
                assert_eq!(number, (row < range.end).then_some(row * cols + at % cols), "{share:?}");
            }
            // The same of columns, where the matrix lies on its side.
            let of_columns = made_up(&Part::Columns(range.clone()), (cols, rows), cols * width);
            for (at, number) in of_columns.into_iter().enumerate() {
                let (row, column) = (at / width, range.start + at % width);
                assert_eq!(number, (column < range.end).then_some(row * rows + column), "{share:?}");
            }
        }
    }
}
