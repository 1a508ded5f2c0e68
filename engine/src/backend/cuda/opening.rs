//! Everything that is done once: the card, the weights, the memory, the graphs.

use std::collections::{HashMap, VecDeque};
use std::num::NonZero;
use std::path::Path;

use kernels::cpu::{Arithmetic, Processor};
use kernels::cuda::{Card, CudaError, Products};
use kv_cache::KvMemory;
use tracing::info;
use types::layout::{Attention, Shard};
use types::{Fingerprint, KvDtype, KvLayout, ModelInfo};

use super::budget::Budget;
use super::decoder::{Decoder, LayerPlace};
use super::flight::HostSampler;
use super::heads::Heads;
use super::ladder::Ladder;
use super::plan::{BLOCK_TOKENS, Dims};
use super::recorded::Recorded;
use super::upload::Upload;
use super::watch::Watch;
use super::weights::{Loader, Origin, Sizes};
use super::workspace::WorkspaceShape;
use super::{CudaBackend, CudaSettings, Staging, Work, tuning};
use crate::backend::{StepLimits, cpu};
use crate::cpu::LoadFormat;
use crate::error::{LoadError, OpenError};
use crate::load::{Checkpoint, Dummy, ModelFolder, fingerprint};
use crate::model::{self, Architecture, ModelConfig};

/// Recorded at the start are steps of sequences up to so long; the rest when it is first met, which takes some milliseconds.
const RECORDED_TOKENS: usize = 9216;
/// Threads that draw what the card does not.
const SAMPLER_THREADS: usize = 4;

/// A model's description, and what follows from it before a card is touched.
#[derive(Debug)]
struct Described {
    folder: ModelFolder,
    architecture: &'static Architecture,
    heads: Heads,
    sizes: Sizes,
    layout: KvLayout,
}

impl CudaBackend {
    /// Puts the model of a folder onto a card. All memory is taken here, and what will not fit is refused with the sum.
    pub fn open(folder: &Path, kv_bytes: usize, settings: &CudaSettings) -> Result<Self, OpenError> {
        let card = open_card(settings)?;
        let mut products = Products::open(&card, settings.libraries.as_deref())?;
        info!(gpu = card.name(), kernels_compiled = card.n_compiled(), "use GPU");
        let described = Described::of(folder, settings)?;
        let config = &described.folder.config;
        let n_blocks = described.n_blocks(kv_bytes)?;
        let limits = settings.limits;
        let tokens_max = config.context_tokens.min(n_blocks as usize * BLOCK_TOKENS);
        let shape = described.workspace(&card, limits, tokens_max, n_blocks as usize);
        let budget = Budget::of(described.sizes, &shape, kv_bytes);
        budget.check(card.memory()?.0)?;

        let mut space = shape.take(&card)?;
        let memory = KvMemory::device(described.layout.clone(), n_blocks, &card)
            .map_err(|error| OpenError::KvMemory(error.to_string()))?;
        let (decoder, weights) = described.load(&card, settings, n_blocks as usize)?;
        let n_groups = described.layout.groups.len();
        let ladder = settings.graphs.then(|| Ladder::new(limits.rows, tokens_max));
        let mut recorded = Recorded::new(ladder.clone(), n_groups, space.words.len());
        {
            let mut work = Work::of(&card, &decoder, &mut products, &mut space, &memory);
            tuning::tune(&mut work, n_groups, limits, settings)?;
            if let Some(ladder) = &ladder {
                warm_up(&mut work, ladder, n_groups)?;
            }
            recorded.record_up_to(RECORDED_TOKENS, &mut work, |done, of| {
                if done == of || done % 100 == 0 {
                    info!(done, of, "record decode steps");
                }
            })?;
        }
        let staging = Staging::new(&card, &space, limits)?;
        Ok(Self {
            model: described.model_info(&weights)?,
            limits,
            watch: Watch::start().map_err(LoadError::Threads)?,
            flights: VecDeque::new(),
            recorded,
            previous: HashMap::new(),
            n_launched: 0,
            sampler: sampler(config)?,
            staging,
            products,
            space,
            decoder,
            memory,
            weight_bytes: budget.weights,
            card,
        })
    }
}

/// The card, with its own kernels unless others are named.
fn open_card(settings: &CudaSettings) -> Result<Card, CudaError> {
    let (libraries, arch) = (settings.libraries.as_deref(), settings.arch.as_deref());
    Card::open_as(settings.ordinal, libraries, &settings.kernel_cache(), arch)
}

/// Runs each number of rows once: code is loaded when it first runs, which cannot be recorded.
fn warm_up(work: &mut Work<'_>, ladder: &Ladder, n_groups: usize) -> Result<(), OpenError> {
    // All words are nowhere: tokens and slots that do not exist, sequences of no length.
    let words = work.space.words.view_mut();
    work.card.fill(words, 0xff)?;
    for rows in ladder.rows() {
        let dims = Dims::of_decodes(n_groups, *rows, BLOCK_TOKENS);
        let lengths = dims.sections().lengths;
        work.card.fill(work.space.words.view_mut().slice(lengths), 0)?;
        work.forward(dims, &[], |_| Ok(()))?;
        work.card.fill(work.space.words.view_mut(), 0xff)?;
    }
    Ok(work.card.synchronize()?)
}

fn sampler(config: &ModelConfig) -> Result<HostSampler, OpenError> {
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    let threads = NonZero::new(cores.min(SAMPLER_THREADS)).unwrap_or(NonZero::<usize>::MIN);
    let processor = Processor::new(Arithmetic::F32, threads).map_err(LoadError::Threads)?;
    Ok(HostSampler { processor, eos_tokens: config.eos_tokens.clone(), vocab: config.vocab })
}

impl Staging {
    fn new(card: &Card, space: &super::Workspace, limits: StepLimits) -> Result<Self, OpenError> {
        let two = |len: usize| Ok::<_, CudaError>([card.pinned(len)?, card.pinned(len)?].into());
        Ok(Self {
            words: two(space.words.len())?,
            draws: two(space.draws.len())?,
            edits: two(space.edits.len())?,
            outcomes: Vec::new(),
            drawn: vec![card.pinned(limits.rows)?, card.pinned(limits.rows)?],
        })
    }
}

impl Described {
    fn of(folder: &Path, settings: &CudaSettings) -> Result<Self, OpenError> {
        let folder = ModelFolder::open(folder)?;
        let config = &folder.config;
        let architecture =
            model::architecture(&config.architecture).map_err(|known| LoadError::Architecture {
                path: folder.path().join("config.json"),
                name: config.architecture.clone(),
                known,
            })?;
        if settings.kv_dtype != KvDtype::Bf16 {
            let wrong = format!("KV in {} is not implemented on a GPU: bf16 is", settings.kv_dtype);
            return Err(OpenError::CudaModel(wrong));
        }
        let heads = Heads::of(config.head_dim)?;
        let sizes = Sizes::of(config, heads)?;
        let windows = (architecture.windows)(config);
        let layout = KvLayout {
            block_tokens: BLOCK_TOKENS as u16,
            dtype: settings.kv_dtype,
            groups: cpu::groups(config.n_kv_heads as u16, heads.padded as u16, &windows),
            shard: Shard::WHOLE,
        };
        Ok(Self { architecture, heads, sizes, layout, folder })
    }

    fn n_blocks(&self, kv_bytes: usize) -> Result<u32, OpenError> {
        let n_blocks = KvMemory::blocks_within(&self.layout, kv_bytes);
        let block_bytes = || self.layout.group_indices().map(|group| self.layout.block_bytes(group)).sum();
        if n_blocks > 0 {
            Ok(n_blocks)
        } else {
            Err(OpenError::NoKvMemory { bytes: kv_bytes, block_bytes: block_bytes() })
        }
    }

    fn workspace(
        &self,
        card: &Card,
        limits: StepLimits,
        tokens_max: usize,
        n_blocks: usize,
    ) -> WorkspaceShape {
        let n_words = words_max(limits, self.layout.groups.len(), tokens_max, n_blocks);
        WorkspaceShape::of(card, self.sizes, limits, self.heads.padded, tokens_max, n_words)
    }

    fn load(
        &self,
        card: &Card,
        settings: &CudaSettings,
        n_blocks: usize,
    ) -> Result<(Decoder, String), OpenError> {
        let config = &self.folder.config;
        let host = Processor::new(Arithmetic::F32, NonZero::<usize>::MIN).map_err(LoadError::Threads)?;
        let (checkpoint, dummy);
        let (origin, name) = match settings.load_format {
            LoadFormat::Safetensors => {
                checkpoint = Checkpoint::open(self.folder.path())?;
                let name = fingerprint::of_weights(&checkpoint);
                (Origin::Host(&checkpoint as &dyn crate::load::TensorSource), name)
            }
            // Narrow heads are moved apart, which the host does.
            LoadFormat::Dummy { seed } if self.heads.are_padded() => {
                dummy = Dummy { seed, processor: &host };
                (Origin::Host(&dummy), format!("dummy, seed {seed}"))
            }
            LoadFormat::Dummy { seed } => (Origin::Card { seed }, format!("dummy, seed {seed}")),
        };
        let (heads, sizes) = (self.heads, self.sizes);
        let upload = Upload::new(card, sizes.bytes())?;
        let loader =
            Loader { origin, config, parts: (self.architecture.parts)(config), heads, sizes, upload };
        let turns = heads.turns(&config.rope.frequencies(config.head_dim), config.context_tokens);
        let decoder = Decoder {
            weights: loader.load()?,
            sizes,
            heads,
            epsilon: config.norm_epsilon,
            turns: card.upload(&turns)?,
            places: places(&self.layout),
            n_blocks,
            chunk_tokens: None,
        };
        Ok((decoder, name))
    }

    fn model_info(&self, weights: &str) -> Result<ModelInfo, OpenError> {
        let config = &self.folder.config;
        Ok(ModelInfo {
            name: self.folder.name(),
            context_tokens: config.context_tokens as u32,
            vocab: config.vocab as u32,
            eos_tokens: config.eos_tokens.clone(),
            fingerprint: self.fingerprint(weights)?,
            layout: self.layout.clone(),
        })
    }

    fn fingerprint(&self, weights: &str) -> Result<Fingerprint, LoadError> {
        let tokenizer = self.folder.tokenizer()?;
        let parts = [
            ("weights", weights.to_owned()),
            ("dtype", "bf16".to_owned()),
            ("arithmetic", "bf16 on a GPU".to_owned()),
            ("rope", self.folder.config.rope.fingerprint()),
            ("tokenizer", fingerprint::of_tokenizer(tokenizer.as_deref())),
        ];
        Ok(fingerprint::fingerprint(&self.layout, parts))
    }
}

/// Where each layer's KV lies, by the layer's number.
fn places(layout: &KvLayout) -> Vec<LayerPlace> {
    let mut places: Vec<(u16, LayerPlace)> = Vec::new();
    for group in layout.group_indices() {
        let window = match layout.group(group).attention {
            Attention::SlidingWindow { tokens } => tokens as usize,
            Attention::Full | Attention::Latent => usize::MAX,
        };
        let layers = layout.group(group).layers.iter().zip(0..);
        places
            .extend(layers.map(|(shape, layer_pos)| (shape.layer, LayerPlace { group, layer_pos, window })));
    }
    places.sort_unstable_by_key(|(layer, _)| *layer);
    places.into_iter().map(|(_, place)| place).collect()
}

/// Words of the largest plan: tables as long as the longest sequence, for as many rows as there may be, yet no more
/// blocks than there are, four times over, for rows that share blocks or are shorter than the longest.
fn words_max(limits: StepLimits, n_groups: usize, tokens_max: usize, n_blocks: usize) -> usize {
    let blocks = tokens_max.div_ceil(BLOCK_TOKENS);
    let of_tables = limits.rows * blocks;
    let of_tables = of_tables.min(4 * n_blocks + limits.rows * 64).max(blocks);
    let of_tokens = (2 + n_groups) * limits.tokens;
    of_tokens + 6 * limits.rows + 2 * n_groups * of_tables
}

#[cfg(test)]
mod tests {
    use types::GroupIdx;

    use super::*;

    #[test]
    fn layers_know_their_group_and_window() {
        let groups = cpu::groups(2, 64, &[None, Some(8), None]);
        let layout = KvLayout { block_tokens: 16, dtype: KvDtype::Bf16, groups, shard: Shard::WHOLE };
        let place = |group, layer_pos, window| LayerPlace { group: GroupIdx(group), layer_pos, window };
        assert_eq!(places(&layout), [place(0, 0, usize::MAX), place(1, 0, 8), place(0, 1, usize::MAX)]);
    }

    #[test]
    fn a_machine_without_a_gpu_is_told_so_before_the_model_is_looked_at() {
        let settings = CudaSettings { ordinal: 4096, cache: None, ..CudaSettings::default() };
        let error = CudaBackend::open(Path::new("/nowhere"), 1 << 20, &settings).expect_err("no such GPU");
        let sentence = error.to_string();
        assert!(error.is_no_gpu(), "{sentence}");
        assert!(sentence.len() > 20 && !sentence.contains('\n'), "{sentence}");
    }

    #[test]
    fn words_are_bounded_by_what_there_is() {
        let limits = StepLimits { tokens: 2048, rows: 256 };
        let of_long = words_max(limits, 1, 131_072, 1 << 20);
        assert!(of_long < 1 << 23, "{of_long}");
        assert!(words_max(limits, 1, 1024, 64) < 1 << 16);
    }
}
