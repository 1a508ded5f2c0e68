//! FP8 weights on a GPU: the matrices, and the order of their bytes.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use device::cuda::Bf16;
use kernels::cpu::{FP8_BLOCK, Format, Matrix};
use kernels::cuda::{Fp8Rows, Fp8Scales};

use crate::load::weights::HasBlocks;
use crate::load::{Quantize, TensorSource};
use crate::model::Mixture;

/// The format of a matrix on the GPU. A matrix is in FP8 as a whole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum WeightFormat {
    #[default]
    Bf16,
    Fp8(Fp8Scales),
}

impl WeightFormat {
    pub(super) const OF_ROWS: Self = Self::Fp8(Fp8Scales::OfRows);
}

/// The formats of a layer's matrices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct LayerFormats {
    pub(super) qkv: WeightFormat,
    pub(super) o: WeightFormat,
    pub(super) feed_forward: FeedForwardFormats,
}

/// The formats of a feed-forward part. All matrices of a layer's experts have one format; the router is in bf16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FeedForwardFormats {
    Dense { gate_up: WeightFormat, down: WeightFormat },
    Experts(WeightFormat),
}

impl Default for FeedForwardFormats {
    fn default() -> Self {
        Self::Dense { gate_up: WeightFormat::Bf16, down: WeightFormat::Bf16 }
    }
}

/// Describes the format of the weights, for the fingerprint. A different set of FP8 matrices is another
/// model.
pub(super) fn dtype(layers: &[LayerFormats]) -> String {
    let bits = |is_one: fn(WeightFormat) -> bool| -> String {
        let of_layer = |layer: &LayerFormats| {
            layer.all().into_iter().fold(0_u8, |bits, format| bits << 1 | u8::from(is_one(format)))
        };
        layers.iter().map(|layer| format!("{:x}", of_layer(layer))).collect()
    };
    let is_fp8 = |format| matches!(format, WeightFormat::Fp8(_));
    let has_blocks = |format| format == WeightFormat::Fp8(Fp8Scales::OfBlocks);
    let dtype = match () {
        () if layers.iter().all(|layer| layer.all().into_iter().all(is_fp8)) => "fp8".to_owned(),
        () if layers.iter().any(|layer| layer.has_fp8()) => format!("fp8 in {}", bits(is_fp8)),
        () => "bf16".to_owned(),
    };
    let any_blocks = layers.iter().any(|layer| layer.has_blocks());
    let dtype = HasBlocks(any_blocks).added_to(dtype);
    match any_blocks && bits(has_blocks) != bits(is_fp8) {
        true => format!("{dtype} in {}", bits(has_blocks)),
        false => dtype,
    }
}

impl LayerFormats {
    /// Returns one entry for each layer of a model whose matrices all have one format.
    pub(super) fn all_in(format: WeightFormat, n_layers: usize, mixture: Option<&Mixture>) -> Vec<Self> {
        let of_layer = |nth| Self {
            qkv: format,
            o: format,
            feed_forward: match has_experts(mixture, nth) {
                true => FeedForwardFormats::Experts(format),
                false => FeedForwardFormats::Dense { gate_up: format, down: format },
            },
        };
        (0..n_layers).map(of_layer).collect()
    }

    /// Returns one entry for each layer. A matrix whose parts all have block scales keeps them. The others are in
    /// FP8 if matrices are quantized during loading, or if all their parts are in FP8.
    pub(super) fn of_layers(
        n_layers: usize,
        mixture: Option<&Mixture>,
        quantize: Quantize,
        source: &dyn TensorSource,
    ) -> Vec<Self> {
        let of_layer = |nth: usize| {
            let of_all = |parts: &[String]| {
                let all_are = |format: Format| {
                    let name = |part: &String| format!("model.layers.{nth}.{part}.weight");
                    parts.iter().map(name).all(|name| source.fp8_format(&name) == Some(format))
                };
                match () {
                    () if all_are(Format::Fp8Blocks) => WeightFormat::Fp8(Fp8Scales::OfBlocks),
                    () if quantize == Quantize::Fp8 || all_are(Format::Fp8) => WeightFormat::OF_ROWS,
                    () => WeightFormat::Bf16,
                }
            };
            let of =
                |parts: &[&str]| of_all(&parts.iter().map(|part| (*part).to_owned()).collect::<Vec<_>>());
            Self {
                qkv: of(&["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
                o: of(&["self_attn.o_proj"]),
                feed_forward: match mixture.filter(|_| has_experts(mixture, nth)) {
                    Some(mixture) => FeedForwardFormats::Experts(of_all(&matrices(mixture))),
                    None => FeedForwardFormats::Dense {
                        gate_up: of(&["mlp.gate_proj", "mlp.up_proj"]),
                        down: of(&["mlp.down_proj"]),
                    },
                },
            }
        };
        (0..n_layers).map(of_layer).collect()
    }

    /// Returns the formats of q with k and v, of o, of gate with up, and of down.
    fn all(self) -> [WeightFormat; 4] {
        let Self { qkv, o, feed_forward } = self;
        let [gate_up, down] = match feed_forward {
            FeedForwardFormats::Dense { gate_up, down } => [gate_up, down],
            FeedForwardFormats::Experts(format) => [format; 2],
        };
        [qkv, o, gate_up, down]
    }

    /// Returns whether any matrix of the layer is in FP8.
    pub(super) fn has_fp8(self) -> bool {
        self.all().into_iter().any(|format| format != WeightFormat::Bf16)
    }

    /// Returns whether the layer has experts in FP8.
    pub(super) fn has_fp8_experts(self) -> bool {
        matches!(self.feed_forward, FeedForwardFormats::Experts(WeightFormat::Fp8(_)))
    }

    /// Returns whether any matrix of the layer has block scales.
    pub(super) fn has_blocks(self) -> bool {
        self.all().contains(&WeightFormat::Fp8(Fp8Scales::OfBlocks))
    }
}

fn has_experts(mixture: Option<&Mixture>, layer: usize) -> bool {
    mixture.is_some_and(|mixture| mixture.layers[layer])
}

/// Returns the names of the matrices of a layer's experts.
fn matrices(mixture: &Mixture) -> Vec<String> {
    let of_expert = |nth| mixture.style.matrices.map(|matrix| mixture.expert(nth, matrix));
    (0..mixture.n_experts).flat_map(of_expert).collect()
}

/// Returns the number of the checkpoint at each of `n` places on the GPU: `place` has the place of each number of
/// `numbers`, counted from 0. The other places have zeroes.
pub(super) fn spread(numbers: Range<usize>, n: usize, place: impl Fn(usize) -> usize) -> Vec<Option<usize>> {
    let mut places = vec![None; n];
    for (nth, number) in numbers.enumerate() {
        places[place(nth)] = Some(number);
    }
    places
}

/// Returns the block of each group of `group` places on the GPU, each with its row or column of the whole matrix;
/// `None` for a group of zeroes. The error is the first group with numbers of two blocks.
pub(super) fn blocks_of(places: &[Option<usize>], group: usize) -> Result<Vec<Option<usize>>, usize> {
    let of_group = |(nth, places): (usize, &[Option<usize>])| {
        let mut blocks = places.iter().flatten().map(|place| place / FP8_BLOCK);
        let first = blocks.next();
        blocks.all(|block| Some(block) == first).then_some(first).ok_or(nth)
    };
    places.chunks(group).enumerate().map(of_group).collect()
}

/// Part of an FP8 matrix, in the GPU's order.
#[derive(Debug)]
pub(super) struct PackedPart<'a> {
    matrix: &'a Matrix,
    /// The matrix's row for each row on the GPU; `None` means zeroes.
    rows: Vec<Option<usize>>,
    /// The matrix's column for each byte of a row on the GPU; `None` means zero.
    columns: Vec<Option<usize>>,
    has_nan: AtomicBool,
}

impl<'a> PackedPart<'a> {
    /// Describes a part of `matrix`. `columns` are the columns of a row before they are reordered for the
    /// GPU.
    pub(super) fn new(matrix: &'a Matrix, rows: Vec<Option<usize>>, columns: &[Option<usize>]) -> Self {
        let mut places = vec![None; Fp8Rows::width(columns.len())];
        for (nth, column) in columns.iter().enumerate() {
            places[Fp8Rows::place(nth)] = *column;
        }
        Self { matrix, rows, columns: places, has_nan: AtomicBool::new(false) }
    }

    /// Returns the scales in the GPU's order: for each row, or for each block row by row.
    ///
    /// # Panics
    /// If the GPU's blocks have numbers of several of the matrix's.
    pub(super) fn scales(&self) -> Vec<f32> {
        let of_matrix = self.matrix.scales();
        if self.matrix.format() == Format::Fp8 {
            return self.rows.iter().map(|row| row.map_or(0.0, |row| of_matrix[row])).collect();
        }
        let checked = "the blocks were checked before memory was taken";
        let rows = blocks_of(&self.rows, Fp8Scales::BLOCK_ROWS).expect(checked);
        let columns = blocks_of(&self.columns, Fp8Scales::BLOCK_COLUMNS).expect(checked);
        let of_row = self.matrix.cols().div_ceil(FP8_BLOCK);
        let scale = |(row, column): (Option<usize>, Option<usize>)| {
            row.zip(column).map_or(0.0, |(row, column)| of_matrix[row * of_row + column])
        };
        rows.iter().flat_map(|row| columns.iter().map(|column| (*row, *column))).map(scale).collect()
    }

    /// Writes pairs of bytes, from pair `start` on.
    pub(super) fn fill(&self, start: usize, pairs: &mut [Bf16]) {
        let (width, cols, bytes) = (self.columns.len(), self.matrix.cols(), self.matrix.bytes());
        let (mut row, mut first, mut rest) = (2 * start / width, 2 * start % width, pairs);
        while !rest.is_empty() {
            let (here, after) = rest.split_at_mut(((width - first) / 2).min(rest.len()));
            match self.rows[row] {
                None => here.fill(Bf16::default()),
                Some(from) => self.fill_row(&bytes[from * cols..(from + 1) * cols], first, here),
            }
            (row, first, rest) = (row + 1, 0, after);
        }
    }

    fn fill_row(&self, from: &[u8], first: usize, pairs: &mut [Bf16]) {
        let mut has_nan = false;
        for (pair, columns) in pairs.iter_mut().zip(self.columns[first..].as_chunks::<2>().0) {
            let bytes = columns.map(|column| column.map_or(0, |column| from[column]));
            has_nan |= bytes.iter().any(|byte| byte & 0x7F == 0x7F);
            *pair = Bf16(u16::from_le_bytes(bytes));
        }
        if has_nan {
            self.has_nan.store(true, Ordering::Relaxed);
        }
    }

    /// Returns whether any byte that `fill` has written was NaN.
    pub(super) fn has_nan(&self) -> bool {
        self.has_nan.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use kernels::cpu::SharedBytes;

    use super::*;
    use crate::error::LoadError;
    use crate::load::ModelFolder;

    /// A checkpoint that only knows which tensors are in FP8, and in which format.
    #[derive(Debug)]
    struct Named(&'static [&'static str], Format);

    impl TensorSource for Named {
        fn matrix(&self, _name: &str, _rows: usize, _cols: usize) -> Result<Matrix, LoadError> {
            unreachable!("nothing is loaded")
        }

        fn vector(&self, _name: &str, _len: usize) -> Result<Vec<f32>, LoadError> {
            unreachable!("nothing is loaded")
        }

        fn fp8_format(&self, name: &str) -> Option<Format> {
            let is_known = self.0.iter().any(|known| name == format!("model.layers.{known}.weight"));
            is_known.then_some(self.1)
        }
    }

    #[test]
    fn a_matrix_of_several_parts_is_in_fp8_if_all_of_them_are() {
        let names: &[&str] = &[
            "0.self_attn.q_proj",
            "0.mlp.gate_proj",
            "0.mlp.up_proj",
            "0.mlp.down_proj",
            "1.self_attn.q_proj",
            "1.self_attn.k_proj",
            "1.self_attn.v_proj",
            "1.self_attn.o_proj",
        ];
        let (source, of_blocks) = (Named(names, Format::Fp8), Named(names, Format::Fp8Blocks));
        let (none, all) = (LayerFormats::default(), LayerFormats::all_in(WeightFormat::OF_ROWS, 3, None));
        let feed_forward = all[0].feed_forward;
        let of_file = LayerFormats::of_layers(3, None, Quantize::No, &source);
        let first = LayerFormats { feed_forward, ..none };
        let second = LayerFormats { qkv: WeightFormat::OF_ROWS, o: WeightFormat::OF_ROWS, ..none };
        assert_eq!(of_file, [first, second, none]);
        assert_eq!(dtype(&of_file), "fp8 in 3c0", "another choice of matrices is another model");
        assert_eq!((dtype(&all).as_str(), dtype(&[none; 3]).as_str()), ("fp8", "bf16"));
        assert!(first.has_fp8() && !none.has_fp8() && !first.has_blocks());
        let quantized = LayerFormats::of_layers(3, None, Quantize::Fp8, &source);
        assert_eq!(quantized, all, "the rest is quantized");

        let blocks = WeightFormat::Fp8(Fp8Scales::OfBlocks);
        let in_blocks = LayerFormats { qkv: blocks, o: blocks, ..none };
        let of_file = LayerFormats::of_layers(3, None, Quantize::No, &of_blocks);
        assert_eq!(of_file[1], in_blocks);
        assert_eq!(dtype(&of_file), "fp8 in 3c0, scales by 128x128");
        let quantized = LayerFormats::of_layers(3, None, Quantize::Fp8, &of_blocks);
        assert_eq!(quantized[1], LayerFormats { feed_forward, ..in_blocks });
        assert_eq!(dtype(&quantized), "fp8, scales by 128x128 in 3c0");
    }

    #[test]
    fn experts_are_in_fp8_if_all_matrices_of_a_layer_are() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models/qwen3-moe");
        let config = ModelFolder::open(&folder).expect("it opens").config;
        let mixture = config.mixture.as_ref().expect("it has experts");
        let of_layer =
            |layer: usize| matrices(mixture).into_iter().map(move |name| format!("{layer}.{name}"));
        let known = |names: Vec<String>| -> &'static [&'static str] {
            names.into_iter().map(|name| &*name.leak()).collect::<Vec<_>>().leak()
        };
        let of_file = |names: Vec<String>, format: Format, quantize: Quantize| {
            LayerFormats::of_layers(4, Some(mixture), quantize, &Named(known(names), format))
        };
        let experts = |formats: &[LayerFormats]| -> Vec<Option<WeightFormat>> {
            let of = |layer: &LayerFormats| match layer.feed_forward {
                FeedForwardFormats::Dense { .. } => None,
                FeedForwardFormats::Experts(format) => Some(format),
            };
            formats.iter().map(of).collect()
        };
        let (plain, rows) = (Some(WeightFormat::Bf16), Some(WeightFormat::OF_ROWS));
        let blocks = Some(WeightFormat::Fp8(Fp8Scales::OfBlocks));
        // Layer 1 is dense. One matrix of layer 2 is missing.
        let (whole, part) = (of_layer(0).collect::<Vec<_>>(), of_layer(2).skip(1).collect::<Vec<_>>());
        let names = [whole, part].concat();
        let in_rows = of_file(names.clone(), Format::Fp8, Quantize::No);
        assert_eq!(experts(&in_rows), [rows, None, plain, plain]);
        assert_eq!(dtype(&in_rows), "fp8 in 3000", "both products of layer 0");
        let in_blocks = of_file(names.clone(), Format::Fp8Blocks, Quantize::No);
        assert_eq!(experts(&in_blocks), [blocks, None, plain, plain]);
        let quantized = of_file(names, Format::Fp8Blocks, Quantize::Fp8);
        assert_eq!(experts(&quantized), [blocks, None, rows, rows], "the rest is quantized");
        assert!(in_rows[0].has_fp8_experts() && !in_rows[2].has_fp8_experts());
        let none = of_file(Vec::new(), Format::Fp8, Quantize::No);
        assert_eq!(none, LayerFormats::all_in(WeightFormat::Bf16, 4, Some(mixture)));
        assert!(dtype(&none) == "bf16" && !none.iter().any(|layer| layer.has_fp8()));
    }

    fn matrix(rows: usize, cols: usize) -> Matrix {
        let bytes = SharedBytes::filled(rows * cols, |bytes| {
            bytes.iter_mut().enumerate().for_each(|(nth, byte)| *byte = (nth % 100) as u8);
        });
        let scales: Vec<f32> = (0..rows).map(|row| row as f32 + 0.5).collect();
        Matrix::scaled(bytes.expect("memory"), cols, scales.into()).expect("a byte for each number")
    }

    #[test]
    fn bytes_go_where_the_card_looks_for_them() {
        let matrix = matrix(3, 90);
        // The rows are the second row, zeroes, and the first row. Each has the columns from 5 on, with two
        // zero columns in between.
        let columns: Vec<Option<usize>> =
            (5..40).map(Some).chain([None, None]).chain((40..83).map(Some)).collect();
        let packed = PackedPart::new(&matrix, vec![Some(1), None, Some(0)], &columns);
        assert_eq!(packed.scales(), [1.5, 0.0, 0.5]);
        let mut pairs = vec![Bf16(9); 3 * 64];
        // The two parts meet in the middle of a row.
        let (head, tail) = pairs.split_at_mut(50);
        packed.fill(0, head);
        packed.fill(50, tail);
        let bytes: Vec<u8> = pairs.iter().flat_map(|pair| pair.0.to_le_bytes()).collect();
        for (row, from) in [(0, Some(1)), (1, None), (2, Some(0))] {
            for nth in 0..128 {
                let column = columns.get(nth).copied().flatten();
                let expected = from.zip(column).map_or(0, |(row, column)| ((row * 90 + column) % 100) as u8);
                assert_eq!(bytes[row * 128 + Fp8Rows::place(nth)], expected, "row {row}, number {nth}");
            }
        }
        assert!(!packed.has_nan());
    }

    #[test]
    fn a_group_has_one_block() {
        let places = |range: Range<usize>| -> Vec<Option<usize>> { range.map(Some).collect() };
        assert_eq!(blocks_of(&places(64..300), 64), Ok(vec![Some(0), Some(1), Some(1), Some(2)]));
        assert_eq!(
            blocks_of(&places(96..300), 64),
            Err(0),
            "32 numbers of the first block, 32 of the second"
        );
        assert_eq!(blocks_of(&spread(128..130, 192, |nth| nth), 64), Ok(vec![Some(1), None, None]));
        assert_eq!(blocks_of(&[], 64), Ok(vec![]));
    }

    #[test]
    fn blocks_of_a_matrix_are_halved_and_stay_with_their_rows() {
        let bytes = SharedBytes::filled(300 * 200, |_| {}).expect("memory");
        let scales: Vec<f32> = (1..=6).map(|nth| nth as f32).collect();
        let matrix =
            Matrix::scaled_by_blocks(bytes, 300, 200, scales.into()).expect("a byte for each number");
        // Rows 128 to 299, followed by zeroes, and all columns.
        let rows = (128..300).map(Some).chain([None; 84]).collect();
        let columns: Vec<Option<usize>> = (0..200).map(Some).collect();
        let scales = PackedPart::new(&matrix, rows, &columns).scales();
        assert_eq!(scales, [3.0, 4.0, 3.0, 4.0, 5.0, 6.0, 0.0, 0.0]);
        assert_eq!(Fp8Scales::OfBlocks.count(256, 200), scales.len());
    }

    #[test]
    fn what_is_no_number_is_noticed() {
        for byte in [0x7F, 0xFF] {
            let bytes = SharedBytes::filled(128, |bytes| bytes[70] = byte).expect("memory");
            let matrix = Matrix::scaled(bytes, 64, vec![1.0; 2].into()).expect("a byte for each number");
            let columns: Vec<Option<usize>> = (0..64).map(Some).collect();
            for (row, has_nan) in [(0, false), (1, true)] {
                let packed = PackedPart::new(&matrix, vec![Some(row)], &columns);
                packed.fill(0, &mut [Bf16(0); 32]);
                assert_eq!(packed.has_nan(), has_nan);
            }
        }
    }
}
