//! FP8 weights on a GPU: the matrices, and the order of their bytes.

mod packed;

use std::ops::Range;

use kernels::cpu::{FP8_BLOCK, Format};
use kernels::cuda::Fp8Scales;

use crate::load::weights::HasBlocks;
use crate::load::{Quantize, TensorSource};
use crate::model::Mixture;

pub(super) use packed::PackedRows;

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

/// The formats of a feed-forward part. All matrices of a layer's routed experts have one format, and so have those of its
/// shared ones; without shared ones it is the same. The router is in bf16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FeedForwardFormats {
    Dense { gate_up: WeightFormat, down: WeightFormat },
    Experts { routed: WeightFormat, shared: WeightFormat },
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
                true => FeedForwardFormats::Experts { routed: format, shared: format },
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
                    Some(mixture) => {
                        let routed = of_all(&matrices(mixture));
                        let shared = shared_matrices(mixture).map_or(routed, |names| of_all(&names));
                        FeedForwardFormats::Experts { routed, shared }
                    }
                    None => FeedForwardFormats::Dense {
                        gate_up: of(&["mlp.gate_proj", "mlp.up_proj"]),
                        down: of(&["mlp.down_proj"]),
                    },
                },
            }
        };
        (0..n_layers).map(of_layer).collect()
    }

    /// Returns the formats of q with k and v, of o, and of gate with up and of down, or of routed and of shared experts.
    fn all(self) -> [WeightFormat; 4] {
        let Self { qkv, o, feed_forward } = self;
        let [gate_up, down] = match feed_forward {
            FeedForwardFormats::Dense { gate_up, down } => [gate_up, down],
            FeedForwardFormats::Experts { routed, shared } => [routed, shared],
        };
        [qkv, o, gate_up, down]
    }

    /// Returns whether any matrix of the layer is in FP8.
    pub(super) fn has_fp8(self) -> bool {
        self.all().into_iter().any(|format| format != WeightFormat::Bf16)
    }

    /// Returns whether the layer has experts in FP8.
    pub(super) fn has_fp8_experts(self) -> bool {
        matches!(self.feed_forward, FeedForwardFormats::Experts { routed: WeightFormat::Fp8(_), .. })
    }

    /// Returns whether any matrix of the layer has block scales.
    pub(super) fn has_blocks(self) -> bool {
        self.all().contains(&WeightFormat::Fp8(Fp8Scales::OfBlocks))
    }
}

fn has_experts(mixture: Option<&Mixture>, layer: usize) -> bool {
    mixture.is_some_and(|mixture| mixture.layers[layer])
}

/// Returns the names of the matrices of a layer's shared experts, if there are some.
fn shared_matrices(mixture: &Mixture) -> Option<Vec<String>> {
    let name = |matrix: &str| format!("{}.{matrix}", mixture.shared_part());
    mixture.shared.map(|_| ["gate_proj", "up_proj", "down_proj"].map(name).to_vec())
}

/// Returns the names of the matrices of a layer's routed experts.
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

#[cfg(test)]
mod tests {
    use std::path::Path;

    use kernels::cpu::Matrix;

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
                FeedForwardFormats::Experts { routed, shared } => {
                    assert_eq!(shared, routed, "there are no shared experts");
                    Some(routed)
                }
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

    #[test]
    fn shared_experts_have_a_format_of_their_own() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models/deepseek-v3");
        let config = ModelFolder::open(&folder).expect("it opens").config;
        let mixture = config.mixture.as_ref().expect("it has experts");
        let names = ["gate_proj", "up_proj", "down_proj"]
            .map(|matrix| &*format!("2.mlp.shared_experts.{matrix}").leak());
        let source = Named(Vec::from(names).leak(), Format::Fp8);
        let formats = LayerFormats::of_layers(3, Some(mixture), Quantize::No, &source);
        let (routed, shared) = (WeightFormat::Bf16, WeightFormat::OF_ROWS);
        assert_eq!(formats[2].feed_forward, FeedForwardFormats::Experts { routed, shared });
        assert_eq!(dtype(&formats), "fp8 in 001");
        assert!(formats[2].has_fp8() && !formats[2].has_fp8_experts());
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
}
