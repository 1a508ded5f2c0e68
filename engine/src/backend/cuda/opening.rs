//! Opening a GPU backend: GPUs, weights, memory and graphs.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;

use device::cuda::{Bf16, Card, CudaError, HostOutbox};
use kernels::cuda::{ComputeCard, Peers, Products, TokenMasks};
use kv_cache::KvMemory;
use tokio::time::Instant;
use tracing::info;
use types::Fingerprint;

use super::budget::KvBytes;
use super::description::{LOAD_WITHIN, ModelDescription, host};
use super::elsewhere::{Elsewhere, ElsewhereParts};
use super::launched_step::{HostSampler, LostFlags};
use super::links::{LinkSizes, StageLinks, TokenRing};
use super::lockstep::{Helpers, RankOpenResult};
use super::previous::PreviousTokens;
use super::rank::{Order, PREPARE_WITHIN, Rank};
use super::rank_links::{JoinSums, ProcessSums, RankLinks};
use super::recorded::RecordedGraphs;
use super::tools::Tools;
use super::watch::Watch;
use super::weights::Sizes;
use super::workspace::{PATIENCE, Workspace};
use super::{CudaBackend, CudaSettings, LoadReport, SpareReadbacks, tuning};
use crate::backend::cpu;
use crate::backend::remote::{RemoteProcess, StageRanks, weights_of};
use crate::error::{LoadError, OpenError};
use crate::kv_room::{AutoRoom, KvRoom};
use crate::model::{ActivationFormat, ModelConfig};

/// The longest sequences of steps that are recorded at the start. Longer steps are recorded at their first
/// use, which takes some milliseconds.
const RECORDED_TOKENS: usize = 9216;
/// The number of threads that compute masks of grammars, and sample what the GPU does not support.
const SAMPLER_THREADS: usize = 4;

/// A GPU whose memory is allocated, except that of weights.
#[derive(Debug)]
struct AllocatedRank {
    sizes: Sizes,
    products: Products,
    /// `None` with one rank, or ranks in several processes.
    peers: Option<Peers>,
    /// Joins the ranks of several processes; `None` if they are in one.
    sums: Option<JoinSums>,
    links: StageLinks,
    space: Workspace,
    memory: KvMemory,
    card: ComputeCard,
}

/// A model whose config is read, and opened GPUs for it.
#[derive(Debug)]
pub(super) struct PreparedModel {
    cards: Vec<ComputeCard>,
    pub(super) described: ModelDescription,
}

/// A model's ranks with their weights, prepared for steps.
// Fields are dropped in this order: values that use the memory before the memory.
#[derive(Debug)]
pub(super) struct OpenedRanks {
    pub(super) helpers: Helpers<Rank>,
    pub(super) rank: Rank,
    /// Where the rows of the stage before go, if another process computes it.
    pub(super) rows_in: Option<HostOutbox<Bf16>>,
    pub(super) memory: KvMemory,
    pub(super) lost: LostFlags,
    pub(super) loaded: LoadReport,
    pub(super) described: Arc<ModelDescription>,
}

/// The GPUs of a process, and what their steps share.
#[derive(Debug)]
struct Allocated {
    ranks: Vec<AllocatedRank>,
    rows_in: Option<HostOutbox<Bf16>>,
    /// The bytes of weights on the GPU with the most.
    weight_bytes: usize,
}

impl PreparedModel {
    /// Opens the GPUs, and reads a model's config. Rejects a size of KV memory that does not apply to GPUs.
    pub(super) fn of(folder: &Path, kv: KvRoom, settings: &CudaSettings) -> Result<Self, OpenError> {
        let cards = open_cards(settings)?;
        let kv_bytes = match kv {
            KvRoom::Bytes(bytes) => bytes,
            KvRoom::OnHost(_) => {
                let wrong =
                    "model.kv_memory is a percentage of host memory: set an amount or `auto` for a GPU";
                return Err(OpenError::CudaModel(wrong.to_owned()));
            }
            KvRoom::Auto(auto) => room_on(&cards, auto, folder, settings)?,
        };
        let described = ModelDescription::of(folder, kv_bytes, settings)?;
        described.folder.config.log_unread_keys();
        Ok(Self { cards, described })
    }

    /// Changes the number of blocks.
    pub(super) fn with_blocks(self, n_blocks: u32) -> Self {
        Self { described: self.described.with_blocks(n_blocks), ..self }
    }

    /// Names the kind of the GPUs.
    pub(super) fn hardware(&self) -> String {
        let names = self.cards.iter().map(|card| format!("{} ({})", card.name(), card.arch()));
        names.collect::<Vec<_>>().join(", ")
    }

    /// Returns the model's fingerprint, without loading its weights.
    pub(super) fn fingerprint(&self) -> Result<Fingerprint, OpenError> {
        let arch = self.cards.first().expect("there is a GPU").arch();
        Ok(self.described.fingerprint(&self.described.settings().arithmetic(arch))?)
    }

    /// Allocates all memory, loads the weights and prepares steps. Rejects a model that does not fit; the error lists the
    /// bytes by purpose. `joins` joins the ranks of the stage, if some are in other processes.
    pub(super) fn open(self, joins: Option<StageRanks>) -> Result<OpenedRanks, OpenError> {
        let Self { cards, described } = self;
        let described = Arc::new(described);
        let Allocated { ranks, rows_in, weight_bytes } = described.take(cards, joins.as_ref())?;
        let memory = ranks.first().map(|first| first.memory.clone()).expect("there is a first rank");
        cpu::log_latents(&described.folder.config, &memory);
        cpu::log_stages(&described.stages, &memory);
        let started = Instant::now();
        let of_ranks: Vec<_> =
            ranks.iter().filter_map(|rank| rank.peers.as_ref()).map(Peers::lost_flag).collect();
        let sums: Vec<_> =
            ranks.iter().filter_map(|rank| rank.sums.as_ref()).map(|sums| sums.end.clone()).collect();
        let (mut rank, mut helpers) = described.load_all(ranks)?;
        let loaded = LoadReport { bytes: weight_bytes, seconds: started.elapsed().as_secs_f64() };
        info!(mib = loaded.bytes >> 20, seconds = loaded.seconds, "weights loaded onto the GPU");
        described.prepare(&mut rank, &mut helpers)?;
        let lost = LostFlags { of_ranks: of_ranks.into(), sums: sums.into(), ..LostFlags::default() };
        Ok(OpenedRanks { described, memory, rank, helpers, lost, rows_in, loaded })
    }
}

impl CudaBackend {
    /// Opens a folder's model on one GPU, or divided over several GPUs, and allocates all memory. Rejects a model that does
    /// not fit; the error lists the bytes by purpose.
    pub fn open(folder: &Path, kv: impl Into<KvRoom>, settings: &CudaSettings) -> Result<Self, OpenError> {
        Self::of(PreparedModel::of(folder, kv.into(), settings)?, &[], None)
    }

    /// Opens the share of this process. `remote` are the other processes. For `joins` see [`PreparedModel::open`].
    pub(super) fn of(
        prepared: PreparedModel,
        remote: &[RemoteProcess],
        joins: Option<StageRanks>,
    ) -> Result<Self, OpenError> {
        let opened = prepared.open(joins)?;
        let OpenedRanks { described, memory, rank, helpers, lost, rows_in, loaded } = opened;
        let (limits, card) = (described.settings().limits, &rank.tools.card);
        let model = described.model_info(&described.settings().arithmetic(card.arch()))?;
        weights_of(remote, &model.fingerprint)?;
        let n_steps = rank.tools.decoder.sizes.stage.steps_in_flight_max();
        let elsewhere = match remote {
            [] => None,
            remote => {
                let (sizes, vocab) = (described.link_sizes(), described.folder.config.vocab);
                let (rows, lost) = (rows_in, lost.clone());
                Some(Elsewhere::start(ElsewhereParts { remote, rows, sizes, n_steps, vocab, lost, card })?)
            }
        };
        let n_stages = described.all_stages.n_stages();
        let drawn = (0..n_steps).map(|_| card.pinned(limits.rows));
        let drawn = drawn.collect::<Result<_, _>>()?;
        let spare_readbacks = SpareReadbacks { outcomes: Vec::new(), targets: Vec::new(), drawn };
        let masks = TokenMasks::new(card, limits.rows, described.folder.config.vocab, PATIENCE)?;
        Ok(Self {
            model,
            limits,
            watch: Watch::start(n_steps).map_err(LoadError::Threads)?,
            flights: VecDeque::new(),
            previous: PreviousTokens::new(n_steps),
            steps_in_flight_max: n_steps,
            ring: TokenRing::new(n_stages, limits.rows),
            n_launched: 0,
            sampler: sampler(&described.folder.config)?,
            spare_readbacks,
            helpers,
            lost,
            elsewhere,
            rank,
            masks: Arc::new(masks),
            n_holders: memory.n_holders(),
            memory,
            loaded,
            described,
        })
    }
}

/// Opens the GPUs, one for each rank of each stage, with kernels for their own architecture unless another is set.
fn open_cards(settings: &CudaSettings) -> Result<Vec<ComputeCard>, CudaError> {
    let (first, n_cards) = (settings.ordinal, Card::count()?);
    let gpus = settings.gpus();
    if gpus.len() > 1 && gpus.end > n_cards {
        let (n_ranks, n_stages) = (settings.ranks, settings.stages.n_stages);
        let parts = match n_stages.get() {
            1 => format!("{n_ranks} ranks"),
            _ => format!("{n_stages} pipeline stages with {n_ranks} ranks each"),
        };
        return Err(CudaError::TooFewCards { parts, first, n_cards });
    }
    let (libraries, arch) = (settings.libraries.as_deref(), settings.arch.as_deref());
    let open = |ordinal| ComputeCard::open_as(ordinal, libraries, &settings.kernel_cache(), arch);
    gpus.map(open).collect()
}

/// Returns the bytes of KV memory for as many blocks as the GPU with the least room has memory for.
fn room_on(
    cards: &[ComputeCard],
    auto: AutoRoom,
    folder: &Path,
    settings: &CudaSettings,
) -> Result<usize, OpenError> {
    let memories = cards.iter().map(|card| card.memory()).collect::<Result<Vec<_>, _>>()?;
    // All memory counts as KV in this description, so that sizes that depend on the longest sequence reach
    // their maximum.
    let described = ModelDescription::of(folder, memories.iter().map(|memory| memory.total).sum(), settings)?;
    let mut of_gpus = Vec::with_capacity(cards.len());
    for (((stage, share), card), memory) in described.shares().into_iter().zip(cards).zip(memories) {
        let sizes = described.sizes(stage, share)?;
        let shape = described.workspace(card, sizes);
        let taken = described.budget(sizes, &shape, KvBytes::default()).without_kv();
        of_gpus.push((auto.on_gpu(memory, taken), described.block_bytes()[stage.nth_here()]));
    }
    let bytes = kv_bytes_within(&of_gpus);
    info!(mib = bytes >> 20, percent = auto.gpu_percent, "KV memory sized from the GPU's free memory");
    Ok(bytes)
}

/// Returns the bytes on all GPUs for as many blocks as each of them has room for. A GPU has some bytes of room, and a block
/// takes some bytes there.
fn kv_bytes_within(of_gpus: &[(usize, usize)]) -> usize {
    let blocks = of_gpus.iter().map(|(room, block_bytes)| room / block_bytes.max(&1)).min().unwrap_or(0);
    blocks * of_gpus.iter().map(|(_, block_bytes)| block_bytes).sum::<usize>()
}

fn open_products(card: &ComputeCard, settings: &CudaSettings) -> Result<Products, CudaError> {
    let libraries = settings.libraries.as_deref();
    if settings.deterministic {
        Products::open_deterministic(card, libraries)
    } else {
        Products::open(card, libraries)
    }
}

fn sampler(config: &ModelConfig) -> Result<HostSampler, OpenError> {
    Ok(HostSampler {
        processor: host(SAMPLER_THREADS)?,
        eos_tokens: config.eos_tokens.clone(),
        vocab: config.vocab,
    })
}

impl ModelDescription {
    /// Allocates the memory of all GPUs except that of weights.
    fn take(&self, cards: Vec<ComputeCard>, joins: Option<&StageRanks>) -> Result<Allocated, OpenError> {
        let mut taken = Vec::with_capacity(cards.len());
        let (mut weight_bytes, mut together, has_mates) = (0, None, self.settings.has_mates());
        for ((stage, share), card) in self.shares().into_iter().zip(cards) {
            let mut products = open_products(&card, &self.settings)?;
            info!(
                gpu = card.name(),
                kernels_compiled = card.n_compiled(),
                rank = share.nth,
                stage = stage.nth,
                "GPU opened for a rank of the model"
            );
            let sizes = self.sizes(stage, share)?;
            let shape = self.workspace(&card, sizes);
            let budget = self.budget(sizes, &shape, self.kv(stage));
            budget.check(card.memory()?.free)?;
            products.make_room(&card, self.widened(sizes))?;
            if self.activations == ActivationFormat::Fp8 {
                products.round_activations(&card, self.settings.limits.tokens, sizes.widest_input())?;
            }
            (weight_bytes, together) = (weight_bytes.max(budget.weights), shape.together());
            let space = shape.take(&card)?;
            taken.push((sizes, products, space, card));
        }
        let all: Vec<&ComputeCard> = taken.iter().map(|(_, _, _, card)| card).collect();
        let in_memory: Vec<&Card> = all.iter().map(|card| &***card).collect();
        let memory = KvMemory::device(self.layout.clone(), &self.stages, self.n_blocks, &in_memory)
            .map_err(|error| OpenError::KvMemory(error.to_string()))?;
        let shown: Vec<_> = taken.iter().map(|(_, _, space, _)| space.shown()).collect();
        let n_ranks = usize::from(self.settings.ranks.get());
        let mut peers = Vec::new();
        if let Some(together) = together.filter(|_| !has_mates) {
            for (cards, shown) in all.chunks(n_ranks).zip(shown.chunks(n_ranks)) {
                peers.extend(Peers::all(cards, shown, together)?);
            }
        }
        let sizes = self.link_sizes();
        let (links, rows_in) = match sizes.only {
            None => (StageLinks::all(&all, sizes)?, None),
            Some(nth) => StageLinks::of_process(&all, sizes, nth)?,
        };
        let mut links = links.into_iter();
        let mut peers = peers.into_iter();
        let sums = all.iter().filter_map(|_| joins).map(JoinSums::of).collect::<Result<Vec<_>, _>>()?;
        let mut sums = sums.into_iter();
        let allocated = |(sizes, products, space, card)| AllocatedRank {
            sizes,
            products,
            peers: peers.next(),
            sums: sums.next(),
            links: links.next().expect("a GPU has links"),
            space,
            memory: memory.clone(),
            card,
        };
        Ok(Allocated { ranks: taken.into_iter().map(allocated).collect(), rows_in, weight_bytes })
    }

    fn link_sizes(&self) -> LinkSizes {
        let CudaSettings { ranks, limits, .. } = self.settings;
        let only = self.settings.only_stage();
        let (n_ranks, n_stages) = (usize::from(ranks.get()), self.all_stages.n_stages());
        LinkSizes { n_ranks, n_stages, only, limits, hidden: self.folder.config.hidden }
    }

    /// Returns the index of the GPU whose rank works on the caller's thread: the first rank of this process's last stage. The
    /// host reads its results.
    pub(super) fn nth_of_sampler(&self) -> usize {
        (self.stages.n_stages() - 1) * self.settings.ranks_here().len()
    }

    /// Loads the weights of all ranks at the same time: those of the first rank that samples on this thread, the others'
    /// on their threads.
    fn load_all(self: &Arc<Self>, allocated: Vec<AllocatedRank>) -> Result<(Rank, Helpers<Rank>), OpenError> {
        let mut allocated = allocated;
        let first = allocated.remove(self.nth_of_sampler());
        let mut helpers = Helpers::none();
        let opened: Vec<RankOpenResult<OpenError>> = allocated
            .into_iter()
            .map(|allocated| {
                let (described, name) = (Arc::clone(self), rank_name(allocated.sizes));
                helpers.start(name, move || described.load(allocated)).map_err(LoadError::Threads)
            })
            .collect::<Result<_, _>>()?;
        let rank = self.load(first)?;
        for (name, opened) in helpers.names().zip(opened) {
            let silent = |_| OpenError::Ranks(format!("{name} did not load its weights in time"));
            opened.recv_timeout(LOAD_WITHIN).map_err(silent)??;
        }
        Ok((rank, helpers))
    }

    fn load(&self, allocated: AllocatedRank) -> Result<Rank, OpenError> {
        let AllocatedRank { sizes, products, peers, sums, links, space, memory, card } = allocated;
        // The ranks of all processes join before they load weights, which takes some of them longer than others.
        let ranks = match (peers, sums) {
            (Some(peers), _) => RankLinks::Peers(Box::new(peers)),
            (None, Some(sums)) => RankLinks::Processes(ProcessSums::join(&card, sizes.share, sums)?),
            (None, None) => RankLinks::Alone,
        };
        let decoder = self.decoder(&card, sizes)?;
        let recorded = RecordedGraphs::new(self.graph_sizes(), self.layout.groups.len(), self.words_max());
        Ok(Rank::new(Tools { products, ranks, links, space, decoder, memory, card }, recorded)?)
    }

    /// Measures the fastest products and records steps, on all ranks at the same time.
    fn prepare(&self, rank: &mut Rank, helpers: &mut Helpers<Rank>) -> Result<(), OpenError> {
        let Rank { recorded, tools, .. } = rank;
        if !self.settings.deterministic {
            tuning::tune(tools, helpers, self.settings.limits, &self.settings)?;
        }
        if let Some(graph_sizes) = self.graph_sizes() {
            helpers.begin(&Order::WarmUp(graph_sizes.clone()))?;
            tools.warm_up(&graph_sizes)?;
            helpers.finish(PREPARE_WITHIN)?;
        }
        helpers.begin(&Order::Record(RECORDED_TOKENS))?;
        recorded.record_up_to(RECORDED_TOKENS, tools, |done, of| {
            if done == of || done % 100 == 0 {
                info!(done, of, "CUDA graphs of decode steps are being recorded");
            }
        })?;
        helpers.finish(PREPARE_WITHIN)?;
        Ok(())
    }
}

/// Names a rank in errors and in the list of threads.
fn rank_name(sizes: Sizes) -> String {
    let (stage, rank) = (sizes.stage.nth, sizes.share.nth);
    match (sizes.stage.n_stages, sizes.share.n_ranks) {
        (1, _) => format!("rank {rank}"),
        (_, 1) => format!("stage {stage}"),
        _ => format!("stage {stage} rank {rank}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kv_has_as_many_blocks_as_the_tightest_gpu() {
        for (of_gpus, expected) in [
            (&[(1000, 10)][..], 1000),
            (&[(1009, 10)], 1000),
            (&[(1000, 10), (500, 10)], 1000),
            (&[(1000, 30), (1000, 10)], 33 * 40),
            (&[(5, 10), (1000, 10)], 0),
        ] {
            assert_eq!(kv_bytes_within(of_gpus), expected, "{of_gpus:?}");
        }
    }

    #[test]
    fn a_machine_without_a_gpu_is_told_so_before_the_model_is_looked_at() {
        let settings = CudaSettings { ordinal: 4096, cache: None, ..CudaSettings::default() };
        let error = CudaBackend::open(Path::new("/nowhere"), 1 << 20, &settings).expect_err("no such GPU");
        let sentence = error.to_string();
        assert!(error.is_no_gpu(), "{sentence}");
        assert!(sentence.len() > 20 && !sentence.contains('\n'), "{sentence}");
    }
}
