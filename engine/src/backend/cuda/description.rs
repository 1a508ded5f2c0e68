//! A model's description, computed before a GPU is used: its folder, the derived sizes and the origin of its
//! weights.

use std::num::NonZero;
use std::path::Path;
use std::time::Duration;

use device::cuda::{Arena, Bf16};
use kernels::cpu::{Arithmetic, Processor, Rotation};
use kernels::cuda::ops::LATENT_WIDTH;
use kernels::cuda::{ComputeCard, ExpertActivations, Fp8Scales, KvNumber, Products};
use kv_cache::KvMemory;
use types::layout::Shard;
use types::{Fingerprint, KvDtype, KvLayout, ModelInfo, StageLayers};

use super::CudaSettings;
use super::blocks;
use super::budget::{Budget, KvBytes};
use super::decoder::{Decoder, LayerPlace};
use super::fp8::{self, LayerFormats, WeightFormat};
use super::graph_sizes::GraphSizes;
use super::heads::Heads;
use super::latent::LatentHeads;
use super::loader::{Loader, Origin};
use super::plan::BLOCK_TOKENS;
use super::share::Share;
use super::spread_experts;
use super::stage::StageShare;
use super::targets::TARGET_WORDS;
use super::upload::Upload;
use super::weights::{CudaWeights, Sizes};
use super::workspace::{StepSizes, WorkspaceShape};
use crate::backend::{ExpertPlacement, StepLimits, cpu};
use crate::cpu::LoadFormat;
use crate::error::{LoadError, OpenError};
use crate::kv_room::n_blocks;
use crate::load::meter::Meter;
use crate::load::weights::HasFp8;
use crate::load::{Checkpoint, Dummy, KvScaled, ModelFolder, Quantize, fingerprint, tensors};
use crate::model::{ActivationFormat, ModelConfig};

/// The number of threads that read, generate and quantize weights. Reading a file takes a few threads; quantizing
/// takes all of the cores that a GPU usually has.
const LOADER_THREADS: usize = 16;

/// The time limit for the other ranks to load their weights after the first one has finished.
pub(super) const LOAD_WITHIN: Duration = Duration::from_secs(1800);

/// A model's description and derived sizes, computed before a GPU is used.
#[derive(Debug)]
pub(super) struct ModelDescription {
    pub(super) folder: ModelFolder,
    /// The bytes of KV of all ranks of this process together.
    pub(super) kv_bytes: usize,
    /// The heads of the output of attention.
    pub(super) heads: Heads,
    pub(super) latent: Option<LatentHeads>,
    pub(super) layout: KvLayout,
    /// All stages of the model.
    pub(super) all_stages: StageLayers,
    /// The stages that this process computes.
    pub(super) stages: StageLayers,
    /// Which matrices are in FP8, one entry for each layer.
    pub(super) formats: Vec<LayerFormats>,
    /// The format of the input of products with FP8 matrices.
    pub(super) activations: ActivationFormat,
    pub(super) n_blocks: u32,
    /// The number of tokens of the longest sequence.
    pub(super) tokens_max: usize,
    pub(super) settings: CudaSettings,
}

/// Returns the format of made-up weights.
fn made_up_format(config: &ModelConfig, quantize: Quantize) -> WeightFormat {
    match quantize {
        Quantize::Fp8 => WeightFormat::OF_ROWS,
        _ if config.has_block_scales => WeightFormat::Fp8(Fp8Scales::OfBlocks),
        _ => WeightFormat::Bf16,
    }
}

/// Returns whether any of a model's weights are in FP8.
fn is_in_fp8(formats: &[LayerFormats]) -> bool {
    formats.iter().any(|layer| layer.has_fp8())
}

impl ModelDescription {
    /// Reads the folder's description. `kv_bytes` is for all ranks together.
    pub(super) fn of(folder: &Path, kv_bytes: usize, settings: &CudaSettings) -> Result<Self, OpenError> {
        let folder = ModelFolder::open(folder)?;
        let config = &folder.config;
        if !matches!(settings.kv_dtype, KvDtype::Bf16 | KvDtype::Fp8E4m3) {
            let wrong =
                format!("KV in {} is not implemented on a GPU: bf16 and fp8_e4m3 are", settings.kv_dtype);
            return Err(OpenError::CudaModel(wrong));
        }
        if settings.quantize == Quantize::Q8 {
            let wrong = "weights in q8 are not implemented on a GPU: fp8 is";
            return Err(OpenError::CudaModel(wrong.to_owned()));
        }
        Share::check(config, usize::from(settings.ranks.get()))?;
        spread_experts::check(config, settings)?;
        let all_stages = settings.stages.over(config.n_layers as u16).map_err(LoadError::Stages)?;
        let stages = all_stages.only(settings.only_stage()).map_err(LoadError::Stages)?;
        let stages = stages.with_ranks(settings.ranks_here());
        let latent = LatentHeads::of(config)?;
        let heads = match &latent {
            Some(latent) => latent.values(),
            None => Heads::of(config.head_dim)?,
        };
        let layout = KvLayout {
            block_tokens: BLOCK_TOKENS as u16,
            dtype: settings.kv_dtype,
            groups: match latent {
                Some(_) => cpu::latent_groups(config.n_layers as u16, LATENT_WIDTH as u16),
                None => cpu::groups(config.n_kv_heads as u16, heads.padded as u16, &config.windows),
            },
            shard: Shard::WHOLE,
        };
        let layout = layout.over_ranks(settings.ranks.get());
        let layout = layout.map_err(|uneven| LoadError::Ranks(uneven.to_string()))?;
        let n_blocks = n_blocks(&layout, &stages, kv_bytes)?;
        let tokens_max = KvMemory::longest(&layout, n_blocks, config.context_tokens);
        let mut formats = match settings.load_format {
            LoadFormat::Safetensors => {
                let checkpoint = Checkpoint::open(folder.path())?;
                tensors::check_all_read(config, &checkpoint)?;
                LayerFormats::of_layers(
                    config.n_layers,
                    config.mixture.as_ref(),
                    settings.quantize,
                    &checkpoint,
                )
            }
            LoadFormat::Dummy { .. } => {
                let format = made_up_format(config, settings.quantize);
                LayerFormats::all_in(format, config.n_layers, config.mixture.as_ref())
            }
        };
        if latent.is_some() {
            formats.iter_mut().for_each(|layer| layer.qkv = WeightFormat::Bf16);
        }
        blocks::check(config, heads, &formats, usize::from(settings.ranks.get()), settings.experts)?;
        let has_fp8 = HasFp8(is_in_fp8(&formats));
        let activations = settings.activations.resolve(config.activations, has_fp8)?;
        let settings = settings.clone();
        Ok(Self {
            heads,
            latent,
            layout,
            all_stages,
            stages,
            formats,
            activations,
            n_blocks,
            tokens_max,
            settings,
            folder,
            kv_bytes,
        })
    }

    /// Changes the number of blocks, for which there must be room.
    pub(super) fn with_blocks(self, n_blocks: u32) -> Self {
        let tokens_max = KvMemory::longest(&self.layout, n_blocks, self.folder.config.context_tokens);
        Self { n_blocks, tokens_max, ..self }
    }

    /// Reads the folder's description again.
    pub(super) fn again(&self) -> Result<Self, OpenError> {
        Self::of(self.folder.path(), self.kv_bytes, &self.settings)
    }

    pub(super) fn settings(&self) -> &CudaSettings {
        &self.settings
    }

    /// Returns the number of words of the largest plan without log-probabilities of prompts.
    pub(super) fn words_max(&self) -> usize {
        words_max(self.settings.limits, self.layout.groups.len(), self.tokens_max)
    }

    /// Returns the share of each GPU of this process: all ranks of the first stage, then those of the next.
    pub(super) fn shares(&self) -> Vec<(StageShare, Share)> {
        let (n_ranks, here) = (usize::from(self.settings.ranks.get()), self.settings.ranks_here());
        let ours = Share::of_all(n_ranks).filter(|share| here.contains(&(share.nth as u16)));
        let ours: Vec<Share> = ours.collect();
        let of_stage = |stage| ours.iter().map(move |share| (stage, *share));
        StageShare::of_process(&self.all_stages, self.settings.only_stage()).flat_map(of_stage).collect()
    }

    /// Returns the sizes of one GPU's share.
    pub(super) fn sizes(&self, stage: StageShare, share: Share) -> Result<Sizes, OpenError> {
        let sizes = Sizes::of(&self.folder.config, self.heads, share)?;
        let sizes = match (self.settings.experts, &self.folder.config.mixture) {
            (ExpertPlacement::Spread, Some(mixture)) => sizes.with_spread_experts(mixture),
            _ => sizes,
        };
        let sizes = sizes.for_formats(&self.folder.config, &self.formats);
        Ok(Sizes { stage, ..sizes })
    }

    /// Returns which matrices are in FP8, for each layer of a stage.
    fn formats_of(&self, stage: StageShare) -> &[LayerFormats] {
        &self.formats[stage.layers()]
    }

    /// Returns the number of numbers of the largest FP8 matrix of a stage.
    pub(super) fn widened(&self, sizes: Sizes) -> usize {
        sizes.widened(self.formats_of(sizes.stage), self.activations)
    }

    /// Returns the bytes of one block of KV on a GPU of each stage of this process.
    pub(super) fn block_bytes(&self) -> Vec<usize> {
        KvMemory::stage_block_bytes(&self.layout, &self.stages)
    }

    /// Returns the bytes of KV of a GPU of this stage, and of all GPUs.
    pub(super) fn kv(&self, stage: StageShare) -> KvBytes {
        let (n_blocks, all) = (self.n_blocks as usize, KvMemory::block_bytes(&self.layout, &self.stages));
        KvBytes { here: n_blocks * self.block_bytes()[stage.nth_here()], all: n_blocks * all }
    }

    pub(super) fn workspace(&self, card: &ComputeCard, sizes: Sizes) -> WorkspaceShape {
        let limits = self.settings.limits;
        let n_words = self.words_max() + TARGET_WORDS * limits.tokens;
        let (tokens_max, chunk_tokens) = (self.tokens_max, self.settings.chunk_tokens());
        let experts = match (self.activations, self.formats.iter().any(|layer| layer.has_fp8_experts())) {
            (ActivationFormat::Fp8, true) => ExpertActivations::Rounded,
            _ => ExpertActivations::Full,
        };
        let room = StepSizes { tokens_max, n_words, chunk_tokens, kv_number: self.kv_number(), experts };
        WorkspaceShape::of(card, sizes, limits, self.heads.padded, room)
    }

    /// Returns the memory that one GPU needs.
    pub(super) fn budget(&self, sizes: Sizes, shape: &WorkspaceShape, kv: KvBytes) -> Budget {
        let turns = self.rotated().turns_bytes(self.tokens_max);
        let rounded = match self.activations {
            ActivationFormat::Fp8 => {
                Products::rounded_bytes(self.settings.limits.tokens, sizes.widest_input())
            }
            ActivationFormat::Full => 0,
        };
        let widened = self.widened(sizes) * size_of::<Bf16>();
        Budget::of(sizes, self.formats_of(sizes.stage), shape.bytes() + turns + rounded + widened, kv)
    }

    /// Returns the sizes of steps that are recorded. Sums over ranks of several processes are not.
    pub(super) fn graph_sizes(&self) -> Option<GraphSizes> {
        let CudaSettings { graphs, limits, .. } = self.settings;
        (graphs && !self.settings.has_mates()).then(|| GraphSizes::new(limits.rows, self.tokens_max))
    }

    /// Computes the cosines and sines of every position that a sequence can have.
    fn turns(&self) -> Vec<[f32; 2]> {
        let config = &self.folder.config;
        let frequencies = config.rope.frequencies(config.head_dim);
        let rotation = Rotation { frequencies: &frequencies, factor: config.rope.turn_factor() };
        self.rotated().turns(rotation, self.tokens_max)
    }

    /// Returns the parts of heads that are rotated.
    fn rotated(&self) -> Heads {
        self.latent.map_or(self.heads, |latent| latent.rotated)
    }

    pub(super) fn decoder(&self, card: &ComputeCard, sizes: Sizes) -> Result<Decoder, OpenError> {
        let (config, heads) = (&self.folder.config, self.heads);
        let mut arena = card.arena();
        Ok(Decoder {
            weights: self.weights_on(card, sizes, &mut arena)?,
            arena,
            sizes,
            heads,
            latent: self.latent,
            epsilon: config.norm_epsilon,
            turns: card.upload(&self.turns())?,
            places: places(&self.layout)[sizes.stage.layers()].to_vec(),
            n_blocks: self.n_blocks as usize,
            kv_number: self.kv_number(),
            chunk_tokens: self.settings.chunk_tokens(),
        })
    }

    fn kv_number(&self) -> KvNumber {
        match self.layout.dtype {
            KvDtype::Fp8E4m3 => KvNumber::Fp8,
            _ => KvNumber::Bf16,
        }
    }

    /// Loads a rank's weights into the arena, at the same addresses each time.
    pub(super) fn weights_on(
        &self,
        card: &ComputeCard,
        sizes: Sizes,
        arena: &mut Arena,
    ) -> Result<CudaWeights, OpenError> {
        let config = &self.folder.config;
        let host = host(LOADER_THREADS)?;
        let (checkpoint, scaled, dummy);
        let origin = match self.settings.load_format {
            LoadFormat::Safetensors => {
                checkpoint = Checkpoint::open(self.folder.path())?;
                scaled = KvScaled::of(&checkpoint, config, self.settings.kv_dtype)?;
                Origin::Host(&scaled as &dyn crate::load::TensorSource)
            }
            // Only the host can pad narrow heads.
            LoadFormat::Dummy { seed } if self.heads.are_padded() => {
                dummy = Dummy { seed, processor: &host };
                Origin::Host(&dummy)
            }
            LoadFormat::Dummy { seed } => Origin::Card { seed },
        };
        let (heads, latent) = (self.heads, self.latent);
        let bytes = sizes.bytes(self.formats_of(sizes.stage));
        // All ranks load at the same time, so only one reports progress.
        let is_last_here = sizes.stage.is_last() || sizes.stage.has_others_elsewhere();
        let is_first_here = sizes.share.nth == usize::from(self.settings.ranks_here().start);
        let meter = if is_first_here && is_last_here { Meter::new(bytes) } else { Meter::silent(bytes) };
        let upload = Upload::new(card, &host, meter)?;
        let (formats, quantize) = (&self.formats, self.settings.quantize);
        Loader { origin, config, heads, latent, sizes, formats, quantize, arena, upload }.load()
    }

    /// Returns the fingerprint of the weights.
    fn weights(&self) -> Result<String, LoadError> {
        match self.settings.load_format {
            LoadFormat::Safetensors => Ok(fingerprint::of_weights(&Checkpoint::open(self.folder.path())?)),
            LoadFormat::Dummy { seed } => Ok(format!("dummy, seed {seed}")),
        }
    }

    pub(super) fn model_info(&self, arithmetic: &str) -> Result<ModelInfo, OpenError> {
        let config = &self.folder.config;
        Ok(ModelInfo {
            name: self.folder.name(),
            context_tokens: self.tokens_max as u32,
            vocab: config.vocab as u32,
            eos_tokens: config.eos_tokens.clone(),
            fingerprint: self.fingerprint(arithmetic)?,
            layout: self.layout.clone(),
        })
    }

    pub(super) fn fingerprint(&self, arithmetic: &str) -> Result<Fingerprint, LoadError> {
        let tokenizer = self.folder.tokenizer()?;
        let parts = [
            ("weights", self.weights()?),
            ("dtype", self.activations.added_to(fp8::dtype(&self.formats))),
            ("arithmetic", arithmetic.to_owned()),
            ("tokenizer", fingerprint::of_tokenizer(tokenizer.as_deref())),
        ];
        let of_config = self.folder.config.fingerprint_parts();
        Ok(fingerprint::fingerprint(&self.layout, parts.into_iter().chain(of_config)))
    }
}

/// Makes a processor with at most `threads` threads, and at most one per core.
pub(super) fn host(threads: usize) -> Result<Processor, LoadError> {
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    let threads = NonZero::new(cores.min(threads)).unwrap_or(NonZero::<usize>::MIN);
    Processor::new(Arithmetic::F32, threads).map_err(LoadError::Threads)
}

/// Returns the location of each layer's KV, in layer order.
fn places(layout: &KvLayout) -> Vec<LayerPlace> {
    let mut places: Vec<(u16, LayerPlace)> = Vec::new();
    for group in layout.group_indices() {
        let window = layout.group(group).attention.window().unwrap_or(usize::MAX);
        let layers = layout.group(group).layers.iter().zip(0..);
        places
            .extend(layers.map(|(shape, layer_pos)| (shape.layer, LayerPlace { group, layer_pos, window })));
    }
    places.sort_unstable_by_key(|(layer, _)| *layer);
    places.into_iter().map(|(_, place)| place).collect()
}

/// Returns the number of words of the largest plan without targets: the most rows, with tables for the longest sequence. All
/// tables of a step are as long as the longest one, so the number of blocks is no bound: one row may be long
/// and the others short.
fn words_max(limits: StepLimits, n_groups: usize, tokens_max: usize) -> usize {
    let of_tables = limits.rows * tokens_max.div_ceil(BLOCK_TOKENS);
    let of_tokens = (3 + n_groups) * limits.tokens;
    of_tokens + 6 * limits.rows + 2 * n_groups * of_tables
}

#[cfg(test)]
mod tests {
    use kernels::cpu::RopeAngles;
    use types::{GroupIdx, StageSplit};

    use super::super::fp8::FeedForwardFormats;
    use super::super::plan::Dims;
    use super::*;

    #[test]
    fn layers_know_their_group_and_window() {
        let groups = cpu::groups(2, 64, &[None, Some(8), None]);
        let layout = KvLayout { block_tokens: 16, dtype: KvDtype::Bf16, groups, shard: Shard::WHOLE };
        let place = |group, layer_pos, window| LayerPlace { group: GroupIdx(group), layer_pos, window };
        assert_eq!(places(&layout), [place(0, 0, usize::MAX), place(1, 0, 8), place(0, 1, usize::MAX)]);
    }

    #[test]
    fn latents_have_one_group_on_every_rank_and_products_of_latents_stay_in_bf16() {
        let open = |settings: CudaSettings| {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models/deepseek-v3");
            ModelDescription::of(&folder, 1 << 24, &settings)
        };
        let two = NonZero::new(2).expect("two");
        for ranks in [NonZero::<u16>::MIN, two] {
            let described = open(CudaSettings { ranks, ..CudaSettings::default() }).expect("it opens");
            let groups = &described.layout.groups;
            assert_eq!((groups.len(), groups[0].attention), (1, types::layout::Attention::Latent));
            assert_eq!(described.block_bytes(), [16 * 576 * 2 * 3], "{ranks} ranks");
        }
        let settings = CudaSettings { kv_dtype: KvDtype::Fp8E4m3, ..CudaSettings::default() };
        assert_eq!(open(settings).expect("it opens").block_bytes(), [16 * 576 * 3]);
        let quantized = open(CudaSettings { quantize: Quantize::Fp8, ..CudaSettings::default() });
        let (routed, shared) = (WeightFormat::OF_ROWS, WeightFormat::OF_ROWS);
        let of_experts = FeedForwardFormats::Experts { routed, shared };
        for layer in quantized.expect("it opens").formats {
            assert_eq!((layer.qkv, layer.o), (WeightFormat::Bf16, WeightFormat::OF_ROWS));
            let is_dense = matches!(layer.feed_forward, FeedForwardFormats::Dense { .. });
            assert!(is_dense || layer.feed_forward == of_experts, "{layer:?}");
        }
    }

    /// Rotates a head on a processor. The first half of the head is ones and the second half is zeroes, so that the
    /// results are the cosines and the sines.
    fn turned_by_the_processor(config: &ModelConfig, n_positions: usize) -> Vec<[f32; 2]> {
        let frequencies = config.rope.frequencies(config.head_dim);
        let rotation = Rotation { frequencies: &frequencies, factor: config.rope.turn_factor() };
        let half = config.head_dim / 2;
        let mut x = [vec![1.0; half], vec![0.0; half]].concat().repeat(n_positions);
        let processor = host(1).expect("a processor");
        processor.rotate(&mut x, 1, &RopeAngles::new(rotation, 0..n_positions));
        let of_head =
            |head: &[f32]| (0..half).map(|pair| [head[pair], head[half + pair]]).collect::<Vec<_>>();
        x.chunks_exact(config.head_dim).flat_map(of_head).collect()
    }

    #[test]
    fn the_gpu_turns_heads_as_the_processor_does() {
        // The factor of YaRN's cosines and sines in `transformers`: 0.1 * ln 8 + 1.
        for (model, factor) in [
            ("llama", 1.0),
            ("llama3", 1.0),
            ("llama-yarn", 1.207_944_2),
            ("qwen3", 1.0),
            ("deepseek-v2", 1.0),
        ] {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models").join(model);
            let opened = ModelDescription::of(&folder, 1 << 24, &CudaSettings::default()).expect(model);
            let (turns, heads) = (opened.turns(), opened.rotated());
            let unpadded = turns.chunks_exact(heads.padded / 2).flat_map(|row| &row[..heads.real / 2]);
            let unpadded: Vec<[f32; 2]> = unpadded.copied().collect();
            assert_eq!(
                unpadded,
                turned_by_the_processor(&opened.folder.config, opened.tokens_max),
                "{model}"
            );
            for [cos, sin] in unpadded {
                assert!((cos.hypot(sin) - factor).abs() < 1e-6, "{model}: {cos} {sin}");
            }
        }
    }

    #[test]
    fn stages_that_cannot_share_the_layers_are_refused_before_a_gpu_is_opened() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models/llama");
        for (n_stages, layers, expected) in [
            (3, vec![], "pipeline stages: 3 stages for 2 layers: every stage needs a layer"),
            (2, vec![2, 1], "pipeline stages: stage_layers adds up to 3 layers, and the model has 2"),
            (2, vec![2], "pipeline stages: stage_layers has 1 numbers for 2 stages"),
        ] {
            let stages = StageSplit { n_stages: NonZero::new(n_stages).expect("some"), layers };
            let settings = CudaSettings { stages, ..CudaSettings::default() };
            let opened = ModelDescription::of(&folder, 1 << 24, &settings);
            assert_eq!(opened.expect_err(expected).to_string(), expected);
        }
    }

    #[test]
    fn gpus_are_in_the_order_of_stages_and_have_the_kv_of_their_layers() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models/llama");
        let two = NonZero::new(2).expect("two");
        let stages = StageSplit { n_stages: two, layers: Vec::new() };
        for (ranks, stages) in [(NonZero::<u16>::MIN, StageSplit::default()), (two, stages)] {
            let (n_ranks, n_stages) = (usize::from(ranks.get()), usize::from(stages.n_stages.get()));
            let settings = CudaSettings { ranks, stages, ..CudaSettings::default() };
            let described = ModelDescription::of(&folder, 1 << 24, &settings).expect("it opens");
            let shares = described.shares();
            let order: Vec<_> = shares.iter().map(|(stage, share)| (stage.nth, share.nth)).collect();
            let expected: Vec<_> =
                (0..n_stages).flat_map(|stage| (0..n_ranks).map(move |rank| (stage, rank))).collect();
            assert_eq!(order, expected);
            let kv: Vec<KvBytes> = shares.iter().map(|(stage, _)| described.kv(*stage)).collect();
            assert!(kv.iter().all(|kv| kv.all <= 1 << 24 && kv.here * kv_parts(&shares) == kv.all), "{kv:?}");
            let layers: usize = shares.iter().map(|(stage, _)| stage.layers().len()).sum();
            assert_eq!(layers, 2 * n_ranks, "each layer is on all ranks of one stage");
        }
    }

    /// Returns the number of equal parts of KV: every GPU has as many layers as every other one.
    fn kv_parts(shares: &[(StageShare, Share)]) -> usize {
        shares.len()
    }

    #[test]
    fn a_checkpoint_with_block_scales_keeps_them_on_one_and_two_gpus() {
        for (model, ranks) in [("qwen3-fp8", 1), ("qwen3-fp8", 2), ("qwen3-moe-fp8", 1), ("qwen3-moe-fp8", 2)]
        {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models").join(model);
            let ranks = NonZero::new(ranks).expect("some");
            let opened =
                ModelDescription::of(&folder, 1 << 24, &CudaSettings { ranks, ..CudaSettings::default() });
            let opened = opened.expect("it opens");
            assert!(opened.formats.iter().all(|layer| layer.has_blocks()));
            assert_eq!(opened.activations, ActivationFormat::Fp8, "as the checkpoint was made for");
        }
    }

    #[test]
    fn there_are_words_for_one_long_row_among_short_ones() {
        let limits = StepLimits { tokens: 2048, rows: 256 };
        let room = words_max(limits, 2, 131_072);
        let decodes = Dims::of_decodes(2, limits.rows, 131_072);
        assert!(decodes.n_words() <= room, "{} of {room}", decodes.n_words());
        let (n_decodes, n_chunks) = (limits.rows - 100, 100);
        let chunks =
            Dims { n_chunks, n_tokens: limits.tokens, chunk_blocks: decodes.decode_blocks, ..decodes };
        let mixed = Dims { n_decodes, ..chunks };
        assert!(mixed.n_words() <= room, "{} of {room}", mixed.n_words());
        assert!(room < 1 << 24, "{room}: 64 MiB on the card");
        let told = Dims { n_targets: limits.tokens, ..mixed };
        assert_eq!(told.n_words() - mixed.n_words(), TARGET_WORDS * limits.tokens);
    }
}
