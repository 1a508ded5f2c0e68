//! Everything that is done once: the cards, the weights, the memory, the graphs.

use std::collections::{HashMap, VecDeque};
use std::num::NonZero;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kernels::cpu::{Arithmetic, Processor};
use kernels::cuda::{Arena, Card, CudaError, KvNumber, Peers, Products};
use kv_cache::KvMemory;
use tokio::time::Instant;
use tracing::info;
use types::layout::{Attention, Shard};
use types::{Fingerprint, KvDtype, KvLayout, ModelInfo};

use super::budget::Budget;
use super::decoder::{Decoder, LayerPlace};
use super::flight::HostSampler;
use super::fp8::{self, InFp8};
use super::heads::Heads;
use super::ladder::Ladder;
use super::lockstep::{Helpers, Opened};
use super::plan::BLOCK_TOKENS;
use super::rank::{Order, PREPARE_WITHIN, Rank, Tools};
use super::recorded::Recorded;
use super::share::Share;
use super::upload::Upload;
use super::watch::Watch;
use super::weights::{CudaWeights, Loader, Origin, Sizes};
use super::workspace::{Room, Workspace, WorkspaceShape};
use super::{Arrivals, CudaBackend, CudaSettings, Loaded, tuning};
use crate::backend::{StepLimits, cpu};
use crate::cpu::LoadFormat;
use crate::error::{LoadError, OpenError};
use crate::kv_room::{AutoRoom, KvRoom, n_blocks};
use crate::load::meter::Meter;
use crate::load::{Checkpoint, Dummy, ModelFolder, Quantize, fingerprint};
use crate::model::{self, Architecture, ModelConfig};

/// Recorded at the start are steps of sequences up to so long; the rest when it is first met, which takes some milliseconds.
const RECORDED_TOKENS: usize = 9216;
/// Threads that read weights: a file's pages come faster to some at once, and not to more.
const LOADER_THREADS: usize = 8;
/// Threads that draw what the card does not.
const SAMPLER_THREADS: usize = 4;

/// How long the other ranks may take to load their weights, once this one has its own.
pub(super) const LOAD_WITHIN: Duration = Duration::from_secs(1800);

/// A model's description, and what follows from it before a card is touched.
#[derive(Debug)]
pub(super) struct Described {
    folder: ModelFolder,
    /// Of all ranks together.
    kv_bytes: usize,
    architecture: &'static Architecture,
    heads: Heads,
    layout: KvLayout,
    /// Layer by layer.
    in_fp8: Vec<InFp8>,
    n_blocks: u32,
    /// Tokens of the longest sequence.
    tokens_max: usize,
    settings: CudaSettings,
}

/// A card with all its memory taken, and no weights yet.
#[derive(Debug)]
struct Empty {
    sizes: Sizes,
    products: Products,
    peers: Option<Peers>,
    space: Workspace,
    memory: KvMemory,
    card: Card,
}

impl CudaBackend {
    /// Puts the model of a folder onto a card, or onto several. All memory is taken here, and what will not fit is refused
    /// with the sum.
    pub fn open(folder: &Path, kv: impl Into<KvRoom>, settings: &CudaSettings) -> Result<Self, OpenError> {
        let cards = open_cards(settings)?;
        let kv_bytes = match kv.into() {
            KvRoom::Bytes(bytes) => bytes,
            KvRoom::OnHost(_) => {
                let wrong =
                    "KV memory is a share of the machine's memory: name an amount for a GPU, or `auto`";
                return Err(OpenError::CudaModel(wrong.to_owned()));
            }
            KvRoom::Auto(auto) => room_on(&cards, auto, folder, settings)?,
        };
        let described = Arc::new(Described::of(folder, kv_bytes, settings)?);
        let (empty, weight_bytes) = described.take(cards, kv_bytes)?;
        let memory = empty.first().map(|first| first.memory.clone()).expect("there is a first rank");
        let started = Instant::now();
        let (mut rank, mut helpers) = described.load_all(empty)?;
        let loaded = Loaded { bytes: weight_bytes, seconds: started.elapsed().as_secs_f64() };
        info!(mib = loaded.bytes >> 20, seconds = loaded.seconds, "weights are on the GPU");
        let lost = rank.tools.peers.as_ref().map(Peers::lost_flag);
        described.prepare(&mut rank, &mut helpers)?;
        let (limits, card) = (settings.limits, &rank.tools.card);
        let arrivals = Arrivals {
            outcomes: Vec::new(),
            drawn: vec![card.pinned(limits.rows)?, card.pinned(limits.rows)?],
        };
        Ok(Self {
            model: described.model_info(&settings.arithmetic(card.arch()))?,
            limits,
            watch: Watch::start().map_err(LoadError::Threads)?,
            flights: VecDeque::new(),
            previous: HashMap::new(),
            n_launched: 0,
            sampler: sampler(&described.folder.config)?,
            arrivals,
            helpers,
            lost,
            rank,
            n_holders: memory.n_holders(),
            memory,
            loaded,
            described,
        })
    }
}

/// The cards, one for each rank, with their own kernels unless others are named.
fn open_cards(settings: &CudaSettings) -> Result<Vec<Card>, CudaError> {
    let (first, n_ranks, n_cards) = (settings.ordinal, usize::from(settings.ranks.get()), Card::count()?);
    if n_ranks > 1 && first + n_ranks > n_cards {
        return Err(CudaError::TooFewCards { first, n_ranks, n_cards });
    }
    let (libraries, arch) = (settings.libraries.as_deref(), settings.arch.as_deref());
    let open = |ordinal| Card::open_as(ordinal, libraries, &settings.kernel_cache(), arch);
    (first..first + n_ranks).map(open).collect()
}

/// KV as large as its share of the fullest card leaves it.
fn room_on(
    cards: &[Card],
    auto: AutoRoom,
    folder: &Path,
    settings: &CudaSettings,
) -> Result<usize, OpenError> {
    let memories = cards.iter().map(Card::memory).collect::<Result<Vec<_>, _>>()?;
    // As if all of it were for KV: what goes by the longest sequence is counted in full.
    let described = Described::of(folder, memories.iter().map(|(_, total)| total).sum(), settings)?;
    let mut least = usize::MAX;
    for ((share, card), memory) in Share::of_all(cards.len()).zip(cards).zip(memories) {
        let sizes = Sizes::of(&described.folder.config, described.heads, share)?;
        let shape = described.workspace(card, sizes);
        let taken = Budget::of(sizes, &described.in_fp8, &shape, 0).without_kv();
        least = least.min(auto.on_gpus(cards.len(), memory, taken));
    }
    info!(mib = least >> 20, percent = auto.gpu_percent, "KV gets what the GPU has left");
    Ok(least)
}

fn open_products(card: &Card, settings: &CudaSettings) -> Result<Products, CudaError> {
    let libraries = settings.libraries.as_deref();
    if settings.deterministic {
        Products::open_alike(card, libraries)
    } else {
        Products::open(card, libraries)
    }
}

/// The host with so many threads, or as many as it has cores.
fn host(threads: usize) -> Result<Processor, LoadError> {
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    let threads = NonZero::new(cores.min(threads)).unwrap_or(NonZero::<usize>::MIN);
    Processor::new(Arithmetic::F32, threads).map_err(LoadError::Threads)
}

fn sampler(config: &ModelConfig) -> Result<HostSampler, OpenError> {
    Ok(HostSampler {
        processor: host(SAMPLER_THREADS)?,
        eos_tokens: config.eos_tokens.clone(),
        vocab: config.vocab,
    })
}

impl Described {
    /// `kv_bytes` are for all ranks together.
    fn of(folder: &Path, kv_bytes: usize, settings: &CudaSettings) -> Result<Self, OpenError> {
        let folder = ModelFolder::open(folder)?;
        let config = &folder.config;
        let architecture =
            model::architecture(&config.architecture).map_err(|known| LoadError::Architecture {
                path: folder.path().join("config.json"),
                name: config.architecture.clone(),
                known,
            })?;
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
        let heads = Heads::of(config.head_dim)?;
        let windows = (architecture.windows)(config);
        let layout = KvLayout {
            block_tokens: BLOCK_TOKENS as u16,
            dtype: settings.kv_dtype,
            groups: cpu::groups(config.n_kv_heads as u16, heads.padded as u16, &windows),
            shard: Shard::WHOLE,
        };
        let layout = layout.over_ranks(settings.ranks.get());
        let layout = layout.map_err(|uneven| LoadError::Ranks(uneven.to_string()))?;
        let n_blocks = n_blocks(&layout, kv_bytes)?;
        let tokens_max = KvMemory::longest(&layout, n_blocks, config.context_tokens);
        let in_fp8 = match settings.load_format {
            LoadFormat::Safetensors => {
                let checkpoint = Checkpoint::open(folder.path())?;
                InFp8::of_layers(config.n_layers, settings.quantize, &checkpoint)
            }
            LoadFormat::Dummy { .. } if settings.quantize == Quantize::Fp8 => {
                vec![InFp8::ALL; config.n_layers]
            }
            LoadFormat::Dummy { .. } => vec![InFp8::default(); config.n_layers],
        };
        let settings = settings.clone();
        Ok(Self { architecture, heads, layout, in_fp8, n_blocks, tokens_max, settings, folder, kv_bytes })
    }

    /// What the folder says now.
    pub(super) fn again(&self) -> Result<Self, OpenError> {
        Self::of(self.folder.path(), self.kv_bytes, &self.settings)
    }

    pub(super) fn settings(&self) -> &CudaSettings {
        &self.settings
    }

    /// Takes the memory of all cards but that of weights, whose bytes on each card are answered too.
    fn take(&self, cards: Vec<Card>, kv_bytes: usize) -> Result<(Vec<Empty>, usize), OpenError> {
        let mut taken = Vec::with_capacity(cards.len());
        let (mut weight_bytes, mut together) = (0, None);
        for (share, card) in Share::of_all(cards.len()).zip(cards) {
            let mut products = open_products(&card, &self.settings)?;
            info!(gpu = card.name(), kernels_compiled = card.n_compiled(), rank = share.nth, "use GPU");
            let sizes = Sizes::of(&self.folder.config, self.heads, share)?;
            let shape = self.workspace(&card, sizes);
            let budget = Budget::of(sizes, &self.in_fp8, &shape, kv_bytes);
            budget.check(card.memory()?.0)?;
            products.make_room(&card, sizes.widened(&self.in_fp8))?;
            (weight_bytes, together) = (budget.weights, shape.together());
            let space = shape.take(&card)?;
            taken.push((sizes, products, space, card));
        }
        let all: Vec<&Card> = taken.iter().map(|(_, _, _, card)| card).collect();
        let memory = KvMemory::device(self.layout.clone(), self.n_blocks, &all)
            .map_err(|error| OpenError::KvMemory(error.to_string()))?;
        let shown: Vec<_> = taken.iter().map(|(_, _, space, _)| space.shown()).collect();
        let peers = together.map(|together| Peers::all(&all, &shown, together)).transpose()?;
        let mut peers = peers.into_iter().flatten();
        let empty = |(sizes, products, space, card)| Empty {
            sizes,
            products,
            peers: peers.next(),
            space,
            memory: memory.clone(),
            card,
        };
        Ok((taken.into_iter().map(empty).collect(), weight_bytes))
    }

    fn workspace(&self, card: &Card, sizes: Sizes) -> WorkspaceShape {
        let limits = self.settings.limits;
        let n_words = words_max(limits, self.layout.groups.len(), self.tokens_max);
        let (tokens_max, chunk_tokens) = (self.tokens_max, self.settings.chunk_tokens());
        let room = Room { tokens_max, n_words, chunk_tokens };
        WorkspaceShape::of(card, sizes, limits, self.heads.padded, room)
    }

    /// All ranks load their weights at the same time: the first one here, the others on threads of their own.
    fn load_all(self: &Arc<Self>, empty: Vec<Empty>) -> Result<(Rank, Helpers<Rank>), OpenError> {
        let mut empty = empty.into_iter();
        let first = empty.next().expect("there is a first rank");
        let mut helpers = Helpers::none();
        let opened: Vec<Opened<OpenError>> = empty
            .map(|empty| {
                let described = Arc::clone(self);
                helpers.start(move || described.load(empty)).map_err(LoadError::Threads)
            })
            .collect::<Result<_, _>>()?;
        let rank = self.load(first)?;
        for (nth, opened) in (1..).zip(opened) {
            let silent = |_| OpenError::Ranks(format!("rank {nth} did not load its weights"));
            opened.recv_timeout(LOAD_WITHIN).map_err(silent)??;
        }
        Ok((rank, helpers))
    }

    fn load(&self, empty: Empty) -> Result<Rank, OpenError> {
        let Empty { sizes, products, peers, space, memory, card } = empty;
        let decoder = self.decoder(&card, sizes)?;
        let recorded = Recorded::new(self.ladder(), self.layout.groups.len(), space.words.len());
        Ok(Rank::new(Tools { products, peers, space, decoder, memory, card }, recorded)?)
    }

    fn ladder(&self) -> Option<Ladder> {
        let CudaSettings { graphs, limits, .. } = self.settings;
        graphs.then(|| Ladder::new(limits.rows, self.tokens_max))
    }

    /// Finds out what is fastest, and records steps: all ranks do the same at the same time.
    fn prepare(&self, rank: &mut Rank, helpers: &mut Helpers<Rank>) -> Result<(), OpenError> {
        let Rank { recorded, tools, .. } = rank;
        if !self.settings.deterministic {
            tuning::tune(tools, helpers, self.settings.limits, &self.settings)?;
        }
        if let Some(ladder) = self.ladder() {
            helpers.begin(&Order::WarmUp(ladder.clone()))?;
            tools.warm_up(&ladder)?;
            helpers.finish(PREPARE_WITHIN)?;
        }
        helpers.begin(&Order::Record(RECORDED_TOKENS))?;
        recorded.record_up_to(RECORDED_TOKENS, tools, |done, of| {
            if done == of || done % 100 == 0 {
                info!(done, of, "record decode steps");
            }
        })?;
        helpers.finish(PREPARE_WITHIN)?;
        Ok(())
    }

    fn decoder(&self, card: &Card, sizes: Sizes) -> Result<Decoder, OpenError> {
        let (config, heads) = (&self.folder.config, self.heads);
        let turns = heads.turns(&config.rope.frequencies(config.head_dim), config.context_tokens);
        let mut arena = card.arena();
        Ok(Decoder {
            weights: self.weights_on(card, sizes, &mut arena)?,
            arena,
            sizes,
            heads,
            epsilon: config.norm_epsilon,
            turns: card.upload(&turns)?,
            places: places(&self.layout),
            n_blocks: self.n_blocks as usize,
            kv_number: match self.layout.dtype {
                KvDtype::Fp8E4m3 => KvNumber::Fp8,
                _ => KvNumber::Bf16,
            },
            chunk_tokens: self.settings.chunk_tokens(),
        })
    }

    /// A rank's weights, put where the arena has them: the same place each time.
    pub(super) fn weights_on(
        &self,
        card: &Card,
        sizes: Sizes,
        arena: &mut Arena,
    ) -> Result<CudaWeights, OpenError> {
        let config = &self.folder.config;
        let host = host(LOADER_THREADS)?;
        let (checkpoint, dummy);
        let origin = match self.settings.load_format {
            LoadFormat::Safetensors => {
                checkpoint = Checkpoint::open(self.folder.path())?;
                Origin::Host(&checkpoint as &dyn crate::load::TensorSource)
            }
            // Narrow heads are moved apart and weights quantized, which the host does.
            LoadFormat::Dummy { seed } if self.heads.are_padded() || self.is_in_fp8() => {
                dummy = Dummy { seed, processor: &host };
                Origin::Host(&dummy)
            }
            LoadFormat::Dummy { seed } => Origin::Card { seed },
        };
        let heads = self.heads;
        let bytes = sizes.bytes(&self.in_fp8);
        // Ranks load side by side, and the first one tells how far they are.
        let meter = if sizes.share.is_first() { Meter::new(bytes) } else { Meter::silent(bytes) };
        let upload = Upload::new(card, &host, meter)?;
        let parts = (self.architecture.parts)(config);
        Loader { origin, config, parts, heads, sizes, in_fp8: &self.in_fp8, arena, upload }.load()
    }

    /// Some of its weights are.
    fn is_in_fp8(&self) -> bool {
        self.in_fp8.iter().any(|layer| layer.any())
    }

    /// What the weights are told apart by.
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

    fn fingerprint(&self, arithmetic: &str) -> Result<Fingerprint, LoadError> {
        let tokenizer = self.folder.tokenizer()?;
        let parts = [
            ("weights", self.weights()?),
            ("dtype", fp8::dtype(&self.in_fp8)),
            ("arithmetic", arithmetic.to_owned()),
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

/// Words of the largest plan: tables as long as the longest sequence, for as many rows as there may be. All of a step's
/// tables are as long as that of its longest row, so no number of blocks bounds them: one long row among many short ones.
fn words_max(limits: StepLimits, n_groups: usize, tokens_max: usize) -> usize {
    let of_tables = limits.rows * tokens_max.div_ceil(BLOCK_TOKENS);
    let of_tokens = (3 + n_groups) * limits.tokens;
    of_tokens + 6 * limits.rows + 2 * n_groups * of_tables
}

#[cfg(test)]
mod tests {
    use types::GroupIdx;

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
    fn a_machine_without_a_gpu_is_told_so_before_the_model_is_looked_at() {
        let settings = CudaSettings { ordinal: 4096, cache: None, ..CudaSettings::default() };
        let error = CudaBackend::open(Path::new("/nowhere"), 1 << 20, &settings).expect_err("no such GPU");
        let sentence = error.to_string();
        assert!(error.is_no_gpu(), "{sentence}");
        assert!(sentence.len() > 20 && !sentence.contains('\n'), "{sentence}");
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
    }
}
