//! A rank's share of a model's weights on the GPU. Matrices with the same input are merged into one matrix.

use std::ops::Range;

use device::cuda::{Bf16, Buffer, View, ViewMut};
use kernels::cuda::ops::{EXPERT_GROUPS_MAX, EXPERTS_MAX, EXPERTS_OF_ROW_MAX};
use kernels::cuda::{
    ComputeCard, ExpertChoice, ExpertLayer, ExpertSizes, Factors, Fp8Rows, Fp8RowsMut, Fp8Scales,
    HeldExperts, WeightMatrix,
};

use super::fp8::{FeedForwardFormats, LayerFormats, WeightFormat};
use super::heads::Heads;
use super::latent::{LatentHeads, LatentSizes};
use super::share::Share;
use super::stage::StageShare;
use crate::error::OpenError;
use crate::model::{ActivationFormat, GroupLimit, Mixture, ModelConfig};

/// All weights of a stage, in the order of a pass.
#[derive(Debug)]
pub(super) struct CudaWeights {
    /// The embedding; `None` if the stage neither embeds nor has it as its output layer. Every rank has all of it, and a
    /// step reads only the rows of its tokens.
    pub(super) embed: Option<Buffer<Bf16>>,
    pub(super) layers: Vec<LayerWeights>,
    /// The norm after the stage's layers: the last one, or that of the next stage's first layer.
    pub(super) norm: Buffer<Bf16>,
    /// The output layer; `None` if the embedding is also the output layer, or if the stage is not the last one.
    pub(super) head: Option<Buffer<Bf16>>,
    pub(super) sizes: Sizes,
}

#[derive(Debug)]
pub(super) struct LayerWeights {
    pub(super) attention_norm: Buffer<Bf16>,
    /// The rows of q, then of k, then of v. With latent attention: see [`LatentSizes::first_width`].
    pub(super) qkv: Linear,
    /// The other weights of latent attention; `None`: heads have keys and values of their own.
    pub(super) latent: Option<LatentWeights>,
    pub(super) head_norms: Option<[Buffer<Bf16>; 2]>,
    pub(super) o: Linear,
    pub(super) mlp_norm: Buffer<Bf16>,
    pub(super) feed_forward: FeedForward,
}

/// The weights of a layer's latent attention, beside the first product.
#[derive(Debug)]
pub(super) struct LatentWeights {
    /// The norm of the latent of q, and the matrix that makes heads of it.
    pub(super) q: Option<(Buffer<Bf16>, Linear)>,
    pub(super) kv_norm: Buffer<Bf16>,
    /// The transposed keys of each head.
    pub(super) keys: Buffer<Bf16>,
    pub(super) values: Buffer<Bf16>,
}

#[derive(Debug)]
pub(super) enum FeedForward {
    Dense(DenseWeights),
    Experts(ExpertWeights),
}

#[derive(Debug)]
pub(super) struct DenseWeights {
    /// The rows of gate, then of up.
    pub(super) gate_up: Linear,
    pub(super) down: Linear,
}

#[derive(Debug)]
pub(super) struct ExpertWeights {
    /// One row for each expert.
    pub(super) router: Buffer<Bf16>,
    /// The correction that is added to scores for the choice, if the model has one.
    pub(super) correction: Option<Buffer<f32>>,
    pub(super) groups: Option<GroupLimit>,
    pub(super) scaling: f32,
    /// For each expert the rows of gate, then of up.
    pub(super) gate_up: Weight,
    /// For each expert the rows of down.
    pub(super) down: Weight,
    pub(super) sizes: ExpertSizes,
    /// The experts that compute every row, as one, if they are not among the others.
    pub(super) shared: Option<Box<DenseWeights>>,
}

impl LayerWeights {
    /// Returns the matrices of a dense feed-forward part; `None` for experts.
    pub(super) fn dense(&self) -> Option<&DenseWeights> {
        match &self.feed_forward {
            FeedForward::Dense(dense) => Some(dense),
            FeedForward::Experts(_) => None,
        }
    }

    /// Returns the experts that compute every row, as one.
    fn shared(&self) -> Option<&DenseWeights> {
        match &self.feed_forward {
            FeedForward::Dense(_) => None,
            FeedForward::Experts(experts) => experts.shared.as_deref(),
        }
    }
}

impl ExpertWeights {
    pub(super) fn layer(&self) -> ExpertLayer<'_> {
        let [gate_up, down] = [&self.gate_up, &self.down].map(Weight::view);
        let choice = ExpertChoice {
            correction: self.correction.as_ref().map(Buffer::view),
            groups: self.groups.map(|limit| [limit.n_groups, limit.per_token]),
            scaling: self.scaling,
        };
        ExpertLayer { router: self.router.view(), choice, gate_up, down, sizes: self.sizes }
    }
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
    Fp8 { numbers: Buffer<u8>, scales: Buffer<f32>, scaling: Fp8Scales },
}

/// Rows of a [`Weight`] to be written, each with `k` numbers.
#[derive(Debug)]
pub(super) enum Rows<'a> {
    Bf16(ViewMut<'a, Bf16>),
    Fp8(Fp8RowsMut<'a>),
}

impl Weight {
    pub(super) fn view(&self) -> WeightMatrix<'_> {
        match self {
            Self::Bf16(numbers) => WeightMatrix::Bf16(numbers.view()),
            Self::Fp8 { numbers, scales, scaling } => WeightMatrix::Fp8(Fp8Rows {
                numbers: numbers.view(),
                scales: scales.view(),
                scaling: *scaling,
            }),
        }
    }

    pub(super) fn rows_mut(&mut self, rows: Range<usize>, k: usize) -> Rows<'_> {
        match self {
            Self::Bf16(numbers) => Rows::Bf16(numbers.view_mut().slice(rows.start * k..rows.end * k)),
            Self::Fp8 { numbers, scales, scaling } => {
                let width = Fp8Rows::width(k);
                let numbers = numbers.view_mut().slice(rows.start * width..rows.end * width);
                let here = scaling.count(rows.start, k)..scaling.count(rows.end, k);
                Rows::Fp8(Fp8RowsMut { numbers, scales: scales.view_mut().slice(here), scaling: *scaling, k })
            }
        }
    }
}

/// The sizes of a model's matrices on the GPU. Ranks differ only in `share`, and stages in `stage`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sizes {
    pub(super) share: Share,
    pub(super) stage: StageShare,
    pub(super) hidden: usize,
    /// The rank's share of the width of dense feed-forward parts; 0 if all layers have experts.
    pub(super) intermediate: usize,
    /// The rank's share of the width of shared experts that are matrices of their own; 0 without them.
    pub(super) shared: usize,
    /// The rank's share of each layer of experts.
    pub(super) experts: Option<ExpertSizes>,
    /// The number of tokens of the model's whole vocabulary.
    pub(super) vocab: usize,
    /// The number of the rank's rows of the output layer.
    pub(super) head_rows: usize,
    /// The size of the rank's heads of q, padded as on the GPU.
    pub(super) q_width: usize,
    /// The size of the rank's heads of k, which equals that of v. With latent attention there is one.
    pub(super) kv_width: usize,
    pub(super) latent: Option<LatentSizes>,
    pub(super) is_tied: bool,
}

impl Sizes {
    /// Returns the sizes of a rank with all layers.
    pub(super) fn of(config: &ModelConfig, heads: Heads, share: Share) -> Result<Self, OpenError> {
        Self::check(config)?;
        let latent = LatentHeads::of(config)?;
        let shared = config.mixture.as_ref().and_then(|mixture| mixture.shared);
        Ok(Self {
            share,
            stage: StageShare::whole(config.n_layers),
            hidden: config.hidden,
            intermediate: if has_dense(config) { share.width(config.intermediate) } else { 0 },
            shared: shared.map_or(0, |width| share.width(width)),
            experts: config.mixture.as_ref().map(|mixture| ExpertSizes {
                hidden: config.hidden,
                width: share.width(mixture.intermediate),
                n_experts: mixture.n_experts,
                held: HeldExperts::ALL,
                per_row: mixture.per_token,
                n_shared: 0,
                is_normalized: mixture.is_normalized,
            }),
            vocab: config.vocab,
            head_rows: share.width(config.vocab),
            q_width: share.heads(config.n_heads).len() * heads.padded,
            kv_width: match latent {
                None => share.heads(config.n_kv_heads).len() * heads.padded,
                Some(_) => heads.padded,
            },
            latent: latent.map(|latent| latent.sizes(config.n_heads, share)),
            is_tied: config.tied,
        })
    }

    /// Returns the sizes for layers of these formats. Shared experts become experts that compute every row, if they can.
    /// Kernels for experts in FP8 need an inner layer whose width is a multiple of 64. The rest is zeroes.
    pub(super) fn for_formats(self, config: &ModelConfig, formats: &[LayerFormats]) -> Self {
        let is_padded = formats.iter().any(|layer| layer.has_fp8_experts());
        let n_shared = config.mixture.as_ref().map_or(0, |mixture| n_joined(mixture, formats));
        let shared = if n_shared > 0 { 0 } else { self.shared };
        let experts = self.experts.map(|experts| ExpertSizes {
            width: if is_padded { Fp8Rows::width(experts.width) } else { experts.width },
            n_shared,
            ..experts
        });
        Self { experts, shared, ..self }
    }

    /// Checks that widths are multiples of 8, the number that kernels load at a time, and that kernels take
    /// these numbers of experts.
    fn check(config: &ModelConfig) -> Result<(), OpenError> {
        if let Some(mixture) = &config.mixture {
            let wrong = match mixture {
                Mixture { n_experts, .. } if *n_experts > EXPERTS_MAX => {
                    format!("num_experts is {n_experts}, but the GPU's kernels take up to {EXPERTS_MAX}")
                }
                Mixture { per_token, .. } if *per_token > EXPERTS_OF_ROW_MAX => {
                    format!(
                        "num_experts_per_tok is {per_token}, but the GPU's kernels take up to {EXPERTS_OF_ROW_MAX}"
                    )
                }
                Mixture { groups: Some(limit), .. } if limit.n_groups > EXPERT_GROUPS_MAX => {
                    let n_groups = limit.n_groups;
                    format!("n_group is {n_groups}, but the GPU's kernels take up to {EXPERT_GROUPS_MAX}")
                }
                Mixture { intermediate, .. } if !intermediate.is_multiple_of(4) => {
                    format!(
                        "moe_intermediate_size is {intermediate}, but the GPU's kernels need a multiple of 4"
                    )
                }
                _ => String::new(),
            };
            if !wrong.is_empty() {
                return Err(OpenError::CudaModel(wrong));
            }
        }
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

    /// Returns the number of blocks of threads that read the same KV for a token.
    pub(super) fn attention_tiles(self, card: &ComputeCard, head_dim: usize) -> usize {
        match self.latent {
            None => self.kv_width / head_dim,
            Some(latent) => card.latent_tiles(latent.n_heads),
        }
    }

    pub(super) fn qkv_width(self) -> usize {
        self.latent.map_or(self.q_width + 2 * self.kv_width, LatentSizes::first_width)
    }

    /// Returns the rows, the columns and the format of a layer's matrices. Those of all experts count as one.
    fn matrices(self, formats: LayerFormats) -> Vec<(usize, usize, WeightFormat)> {
        let Self { hidden, intermediate, q_width, .. } = self;
        let mut all = vec![(self.qkv_width(), hidden, formats.qkv), (hidden, q_width, formats.o)];
        let of_latents = self.latent.into_iter().flat_map(LatentSizes::matrices);
        all.extend(of_latents.map(|(rows, columns)| (rows, columns, WeightFormat::Bf16)));
        match (formats.feed_forward, self.experts) {
            (FeedForwardFormats::Dense { gate_up, down }, _) => {
                all.extend([(2 * intermediate, hidden, gate_up), (hidden, intermediate, down)]);
            }
            (FeedForwardFormats::Experts { routed, shared }, Some(experts)) => {
                let (width, n_all) = (experts.width, experts.n_all());
                all.extend([
                    (experts.n_experts, hidden, WeightFormat::Bf16),
                    (n_all * 2 * width, hidden, routed),
                    (n_all * hidden, width, routed),
                ]);
                if self.shared > 0 {
                    all.extend([(2 * self.shared, hidden, shared), (hidden, self.shared, shared)]);
                }
            }
            (FeedForwardFormats::Experts { .. }, None) => {}
        }
        all
    }

    /// Returns the number of rows of the embedding. If it is also the output layer, zeroes follow up to the
    /// end of the last rank's share.
    pub(super) fn embed_rows(self) -> usize {
        if self.is_tied { self.head_rows * self.share.n_ranks } else { self.vocab }
    }

    /// Returns whether the stage has the embedding, to embed tokens or as its output layer.
    pub(super) fn has_embedding(self) -> bool {
        self.stage.is_first() || (self.is_tied && self.stage.is_last())
    }

    /// Returns whether the stage has an output layer beside the embedding.
    pub(super) fn has_head(self) -> bool {
        self.stage.is_last() && !self.is_tied
    }

    /// Returns the bytes of all matrices of a stage, whose layers have these formats. Norms and biases are too small to
    /// count.
    pub(super) fn bytes(self, formats: &[LayerFormats]) -> usize {
        let bytes = |(rows, columns, format)| match format {
            WeightFormat::Fp8(scaling) => {
                rows * Fp8Rows::width(columns) + scaling.count(rows, columns) * size_of::<f32>()
            }
            WeightFormat::Bf16 => rows * columns * size_of::<Bf16>(),
        };
        let layers: usize = formats.iter().flat_map(|layer| self.matrices(*layer)).map(bytes).sum();
        let embed_rows = if self.has_embedding() { self.embed_rows() } else { 0 };
        let head_rows = if self.has_head() { self.head_rows } else { 0 };
        layers + (embed_rows + head_rows) * self.hidden * size_of::<Bf16>()
    }

    /// Returns the width of the widest feed-forward part that every row passes.
    pub(super) fn widest_inner(self) -> usize {
        self.intermediate.max(self.shared)
    }

    /// Returns the width of the widest rows that a layer's matrices multiply.
    pub(super) fn widest_input(self) -> usize {
        self.hidden.max(self.q_width).max(self.widest_inner())
    }

    /// Returns the number of numbers of the largest FP8 matrix, for the memory that widens one matrix at a
    /// time. Those of all experts count as one. They are not widened if activations are rounded.
    pub(super) fn widened(self, formats: &[LayerFormats], activations: ActivationFormat) -> usize {
        let sizes = match activations {
            ActivationFormat::Full => self,
            ActivationFormat::Fp8 => Self { experts: None, ..self },
        };
        let matrices = formats.iter().flat_map(|layer| sizes.matrices(*layer));
        let in_fp8 = matrices.filter(|(.., format)| *format != WeightFormat::Bf16);
        in_fp8.map(|(rows, columns, _)| rows * columns).max().unwrap_or(0)
    }
}

impl CudaWeights {
    /// Returns the embedding, with one row for each token.
    ///
    /// # Panics
    /// If the stage is not the first one.
    pub(super) fn embedding(&self) -> View<'_, Bf16> {
        self.embed().slice(0..self.sizes.vocab * self.sizes.hidden)
    }

    fn embed(&self) -> &Buffer<Bf16> {
        self.embed.as_ref().expect("the first stage has the embedding, and the last one has an output layer")
    }

    /// Returns the rank's rows of the output layer.
    ///
    /// # Panics
    /// If the stage is not the last one.
    pub(super) fn head(&self) -> View<'_, Bf16> {
        let Sizes { head_rows, hidden, share, .. } = self.sizes;
        match &self.head {
            Some(head) => head.view(),
            None => self.embed().slice(share.nth * head_rows * hidden..(share.nth + 1) * head_rows * hidden),
        }
    }
}

/// Chooses one of a layer's matrices; `None` if the layer has none of this kind.
pub(super) type MatrixKind = fn(&LayerWeights) -> Option<&Linear>;

/// The kinds of matrices of a layer: q, k and v; o; gate and up; down; heads of q of their latent; and gate and up, and
/// down of shared experts.
pub(super) const MATRIX_KINDS: [MatrixKind; 7] = [
    |layer| Some(&layer.qkv),
    |layer| Some(&layer.o),
    |layer| Some(&layer.dense()?.gate_up),
    |layer| Some(&layer.dense()?.down),
    |layer| layer.latent.as_ref()?.q.as_ref().map(|(_, heads)| heads),
    |layer| Some(&layer.shared()?.gate_up),
    |layer| Some(&layer.shared()?.down),
];

/// Returns the matrices of one kind in all layers. Measuring over all of them keeps them out of the caches.
pub(super) fn all_of(layers: &[LayerWeights], which: MatrixKind) -> Vec<WeightMatrix<'_>> {
    layers.iter().filter_map(which).map(|linear| linear.weight.view()).collect()
}

/// Returns the number of experts that a mixture's shared experts become, each as wide as a routed one; 0 if they stay
/// matrices of their own.
fn n_joined(mixture: &Mixture, formats: &[LayerFormats]) -> usize {
    let inner = mixture.intermediate;
    let n = mixture.shared.filter(|width| width.is_multiple_of(inner)).map_or(0, |width| width / inner);
    let can_join = |layer: &LayerFormats| match layer.feed_forward {
        FeedForwardFormats::Dense { .. } => true,
        FeedForwardFormats::Experts { routed, shared } => {
            routed == shared && (!layer.has_blocks() || inner.is_multiple_of(Fp8Scales::BLOCK_COLUMNS))
        }
    };
    let has_room = mixture.n_experts + n <= EXPERTS_MAX && mixture.per_token + n <= EXPERTS_OF_ROW_MAX;
    if has_room && formats.iter().all(can_join) { n } else { 0 }
}

fn has_dense(config: &ModelConfig) -> bool {
    config.mixture.as_ref().is_none_or(|mixture| mixture.layers.contains(&false))
}

#[cfg(test)]
mod tests {
    use std::num::NonZero;
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
        let [plain, in_fp8] =
            [WeightFormat::Bf16, WeightFormat::OF_ROWS].map(|format| LayerFormats::all_in(format, 32, None));
        assert_eq!(sizes(Share::WHOLE).bytes(&plain), 2 * (8_030_261_248 - norms), "all but the norms");
        assert_eq!(sizes(Share::WHOLE).widened(&plain, ActivationFormat::Full), 0);
        // A matrix in FP8 has a byte for each number, and 4 bytes for each row.
        let (vocabulary, rows) = (2 * 128_256 * 4096, 6144 + 4096 + 2 * 14_336 + 4096);
        let numbers = 8_030_261_248 - norms - vocabulary;
        assert_eq!(sizes(Share::WHOLE).bytes(&in_fp8), numbers + 2 * vocabulary + 4 * 32 * rows);
        for activations in [ActivationFormat::Full, ActivationFormat::Fp8] {
            assert_eq!(sizes(Share::WHOLE).widened(&in_fp8, activations), 2 * 14_336 * 4096);
        }
        let embedding = 128_256 * 4096;
        for share in Share::of_all(2) {
            // The embedding counts in full, because both ranks have all of it.
            assert_eq!(sizes(share).bytes(&plain), 8_030_261_248 - norms + embedding);
        }
    }

    #[test]
    fn stages_have_their_layers_and_the_ends_have_the_vocabulary() {
        let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("../bench/shapes/llama-3.1-8b");
        let config = ModelFolder::open(&config).expect("it opens").config;
        let formats = vec![LayerFormats::default(); 32];
        let heads = Heads::of(config.head_dim).expect("128");
        let whole = Sizes::of(&config, heads, Share::WHOLE).expect("multiples of 8");
        let vocabulary = 2 * 128_256 * 4096;
        let of_layer = (whole.bytes(&formats) - 2 * vocabulary) / 32;
        for (is_tied, ends) in [(false, [1, 0, 1]), (true, [1, 0, 1])] {
            let split =
                types::StageSplit { n_stages: NonZero::new(3).expect("three"), layers: vec![10, 12, 10] };
            let shares =
                StageShare::of_process(&split.over(32).expect("they add up"), None).collect::<Vec<_>>();
            for ((stage, n_layers), n_vocabularies) in shares.into_iter().zip([10, 12, 10]).zip(ends) {
                let sizes = Sizes { stage, is_tied, ..whole };
                let bytes = sizes.bytes(&formats[stage.layers()]);
                assert_eq!(bytes, n_layers * of_layer + n_vocabularies * vocabulary, "{stage:?}");
            }
        }
    }

    #[test]
    fn shared_experts_of_the_others_format_join_them() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../bench/shapes/deepseek-v2-lite");
        let config = ModelFolder::open(&folder).expect("it opens").config;
        let heads = Heads::of(config.head_dim).expect("a size for kernels");
        let all_in = |format| LayerFormats::all_in(format, config.n_layers, config.mixture.as_ref());
        let apart = |routed, shared| {
            let mut formats = all_in(routed);
            for layer in &mut formats {
                if matches!(layer.feed_forward, FeedForwardFormats::Experts { .. }) {
                    layer.feed_forward = FeedForwardFormats::Experts { routed, shared };
                }
            }
            formats
        };
        let in_blocks = WeightFormat::Fp8(Fp8Scales::OfBlocks);
        for share in Share::of_all(2).chain([Share::WHOLE]) {
            let separate = Sizes::of(&config, heads, share).expect("multiples of 8");
            for format in [WeightFormat::Bf16, WeightFormat::OF_ROWS, in_blocks] {
                let joined = separate.for_formats(&config, &all_in(format));
                assert_eq!(
                    (joined.experts.map(ExpertSizes::n_all), joined.shared),
                    (Some(66), 0),
                    "{format:?}"
                );
                assert_eq!(
                    joined.bytes(&all_in(WeightFormat::Bf16)),
                    separate.bytes(&all_in(WeightFormat::Bf16))
                );
            }
            let formats = apart(WeightFormat::OF_ROWS, WeightFormat::Bf16);
            let kept = separate.for_formats(&config, &formats);
            assert_eq!((kept.experts.map(ExpertSizes::n_all), kept.shared), (Some(64), separate.shared));
        }
    }

    #[test]
    fn the_bytes_of_experts_and_of_their_ranks_count() {
        let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("../bench/shapes/qwen3-30b-a3b");
        let config = ModelFolder::open(&config).expect("it opens").config;
        let sizes = |share| {
            Sizes::of(&config, Heads::of(config.head_dim).expect("128"), share).expect("multiples of 8")
        };
        let norms = 48 * (2 * 2048 + 2 * 128) + 2048;
        let formats = |format| LayerFormats::all_in(format, 48, config.mixture.as_ref());
        let (in_rows, in_blocks) =
            (formats(WeightFormat::OF_ROWS), formats(WeightFormat::Fp8(Fp8Scales::OfBlocks)));
        let formats = formats(WeightFormat::Bf16);
        let whole = sizes(Share::WHOLE);
        assert_eq!(whole.bytes(&formats), 2 * (30_532_122_624 - norms), "all but the norms");
        let widened = |formats: &[LayerFormats]| {
            [ActivationFormat::Full, ActivationFormat::Fp8]
                .map(|activations| whole.widened(formats, activations))
        };
        assert_eq!((whole.intermediate, widened(&formats)), (0, [0, 0]), "no layer is dense");
        // Gate and up of all experts are widened at a time, unless activations are rounded.
        assert_eq!(widened(&in_rows), [128 * 2 * 768 * 2048, 5120 * 2048]);
        let (vocabulary, routers) = (2 * 151_936 * 2048, 48 * 128 * 2048);
        let numbers = 30_532_122_624 - norms - vocabulary - routers;
        let n_scales = 48 * (5120 + 2048 + 128 * (2 * 768 + 2048));
        assert_eq!(whole.bytes(&in_rows), numbers + 2 * (vocabulary + routers) + 4 * n_scales);
        let n_scales = numbers / (64 * 128);
        assert_eq!(whole.bytes(&in_blocks), numbers + 2 * (vocabulary + routers) + 4 * n_scales);
        // On 8 ranks an expert has 96 of 768 numbers, and on the GPU 128, the last 32 of them zeroes.
        let eighth = sizes(Share { nth: 3, n_ranks: 8 });
        let widths = [&formats, &in_rows]
            .map(|formats| eighth.for_formats(&config, formats).experts.map(|it| it.width));
        assert_eq!(widths, [Some(96), Some(128)]);
        let embedding = 151_936 * 2048;
        for share in Share::of_all(2) {
            // The embedding and the routers count in full, because both ranks have all of them.
            assert_eq!(sizes(share).bytes(&formats), 30_532_122_624 - norms + embedding + routers);
        }
    }

    #[test]
    fn what_kernels_do_not_take_is_refused_by_its_name() {
        let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models/mixtral");
        let config = ModelFolder::open(&config).expect("it opens").config;
        let refusal = |change: fn(&mut Mixture)| {
            let mut changed = config.clone();
            changed.mixture.as_mut().map(change).expect("it has experts");
            Sizes::of(&changed, Heads::of(8).expect("8"), Share::WHOLE).expect_err("refused").to_string()
        };
        for (change, start) in [
            ((|mixture| mixture.n_experts = 513) as fn(&mut Mixture), "num_experts is 513"),
            (|mixture| mixture.per_token = 33, "num_experts_per_tok is 33"),
            (|mixture| mixture.intermediate = 42, "moe_intermediate_size is 42"),
        ] {
            let sentence = refusal(change);
            assert!(sentence.contains(start) && sentence.contains("the GPU's kernels"), "{sentence}");
        }
    }
}
