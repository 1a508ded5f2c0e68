//! Opening a GPU backend: GPUs, weights, memory and graphs.

use std::collections::{HashMap, VecDeque};
use std::path::Path;
use std::sync::Arc;

use device::cuda::{Card, CudaError};
use kernels::cuda::{ComputeCard, Peers, Products, TokenMasks};
use kv_cache::KvMemory;
use tokio::time::Instant;
use tracing::info;

use super::description::{LOAD_WITHIN, ModelDescription, host};
use super::launched_step::HostSampler;
use super::lockstep::{Helpers, RankOpenResult};
use super::rank::{Order, PREPARE_WITHIN, Rank};
use super::recorded::RecordedGraphs;
use super::share::Share;
use super::tools::Tools;
use super::watch::Watch;
use super::weights::Sizes;
use super::workspace::{PATIENCE, Workspace};
use super::{CudaBackend, CudaSettings, LoadReport, SpareReadbacks, tuning};
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
    peers: Option<Peers>,
    space: Workspace,
    memory: KvMemory,
    card: ComputeCard,
}

impl CudaBackend {
    /// Opens a folder's model on one GPU or several, and allocates all memory. Rejects a model that does not
    /// fit; the error lists the bytes by purpose.
    pub fn open(folder: &Path, kv: impl Into<KvRoom>, settings: &CudaSettings) -> Result<Self, OpenError> {
        let cards = open_cards(settings)?;
        let kv_bytes = match kv.into() {
            KvRoom::Bytes(bytes) => bytes,
            KvRoom::OnHost(_) => {
                let wrong =
                    "model.kv_memory is a percentage of host memory: set an amount or `auto` for a GPU";
                return Err(OpenError::CudaModel(wrong.to_owned()));
            }
            KvRoom::Auto(auto) => room_on(&cards, auto, folder, settings)?,
        };
        let described = Arc::new(ModelDescription::of(folder, kv_bytes, settings)?);
        described.folder.config.log_unread_keys();
        let (allocated, weight_bytes) = described.take(cards, kv_bytes)?;
        let memory = allocated.first().map(|first| first.memory.clone()).expect("there is a first rank");
        let started = Instant::now();
        let (mut rank, mut helpers) = described.load_all(allocated)?;
        let loaded = LoadReport { bytes: weight_bytes, seconds: started.elapsed().as_secs_f64() };
        info!(mib = loaded.bytes >> 20, seconds = loaded.seconds, "weights loaded onto the GPU");
        let lost = rank.tools.peers.as_ref().map(Peers::lost_flag);
        described.prepare(&mut rank, &mut helpers)?;
        let (limits, card) = (settings.limits, &rank.tools.card);
        let spare_readbacks = SpareReadbacks {
            outcomes: Vec::new(),
            targets: Vec::new(),
            drawn: vec![card.pinned(limits.rows)?, card.pinned(limits.rows)?],
        };
        let masks = TokenMasks::new(card, limits.rows, described.folder.config.vocab, PATIENCE)?;
        Ok(Self {
            model: described.model_info(&settings.arithmetic(card.arch()))?,
            limits,
            watch: Watch::start().map_err(LoadError::Threads)?,
            flights: VecDeque::new(),
            previous: HashMap::new(),
            n_launched: 0,
            sampler: sampler(&described.folder.config)?,
            spare_readbacks,
            helpers,
            lost,
            rank,
            masks: Arc::new(masks),
            n_holders: memory.n_holders(),
            memory,
            loaded,
            described,
        })
    }
}

/// Opens the GPUs, one for each rank, with kernels for their own architecture unless another is set.
fn open_cards(settings: &CudaSettings) -> Result<Vec<ComputeCard>, CudaError> {
    let (first, n_ranks, n_cards) = (settings.ordinal, usize::from(settings.ranks.get()), Card::count()?);
    if n_ranks > 1 && first + n_ranks > n_cards {
        return Err(CudaError::TooFewCards { first, n_ranks, n_cards });
    }
    let (libraries, arch) = (settings.libraries.as_deref(), settings.arch.as_deref());
    let open = |ordinal| ComputeCard::open_as(ordinal, libraries, &settings.kernel_cache(), arch);
    (first..first + n_ranks).map(open).collect()
}

/// Returns the bytes of KV memory that the GPU with the least free memory allows.
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
    let mut least = usize::MAX;
    for ((share, card), memory) in Share::of_all(cards.len()).zip(cards).zip(memories) {
        let sizes = Sizes::of(&described.folder.config, described.heads, share)?;
        let shape = described.workspace(card, sizes);
        let taken = described.budget(sizes, &shape, 0).without_kv();
        least = least.min(auto.on_gpus(cards.len(), memory, taken));
    }
    info!(mib = least >> 20, percent = auto.gpu_percent, "KV memory sized from the GPU's free memory");
    Ok(least)
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
    /// Allocates the memory of all GPUs except that of weights. Also returns the bytes of weights on each
    /// GPU.
    fn take(
        &self,
        cards: Vec<ComputeCard>,
        kv_bytes: usize,
    ) -> Result<(Vec<AllocatedRank>, usize), OpenError> {
        let mut taken = Vec::with_capacity(cards.len());
        let (mut weight_bytes, mut together) = (0, None);
        for (share, card) in Share::of_all(cards.len()).zip(cards) {
            let mut products = open_products(&card, &self.settings)?;
            info!(
                gpu = card.name(),
                kernels_compiled = card.n_compiled(),
                rank = share.nth,
                "GPU opened for a rank of the model"
            );
            let sizes = Sizes::of(&self.folder.config, self.heads, share)?;
            let shape = self.workspace(&card, sizes);
            let budget = self.budget(sizes, &shape, kv_bytes);
            budget.check(card.memory()?.free)?;
            products.make_room(&card, sizes.widened(&self.formats))?;
            if self.activations == ActivationFormat::Fp8 {
                products.round_activations(&card, self.settings.limits.tokens, sizes.widest_input())?;
            }
            (weight_bytes, together) = (budget.weights, shape.together());
            let space = shape.take(&card)?;
            taken.push((sizes, products, space, card));
        }
        let all: Vec<&ComputeCard> = taken.iter().map(|(_, _, _, card)| card).collect();
        let in_memory: Vec<&Card> = all.iter().map(|card| &***card).collect();
        let memory = KvMemory::device(self.layout.clone(), self.n_blocks, &in_memory)
            .map_err(|error| OpenError::KvMemory(error.to_string()))?;
        let shown: Vec<_> = taken.iter().map(|(_, _, space, _)| space.shown()).collect();
        let peers = together.map(|together| Peers::all(&all, &shown, together)).transpose()?;
        let mut peers = peers.into_iter().flatten();
        let allocated = |(sizes, products, space, card)| AllocatedRank {
            sizes,
            products,
            peers: peers.next(),
            space,
            memory: memory.clone(),
            card,
        };
        Ok((taken.into_iter().map(allocated).collect(), weight_bytes))
    }

    /// Loads the weights of all ranks at the same time: the first rank's on this thread, the others' on their
    /// threads.
    fn load_all(self: &Arc<Self>, allocated: Vec<AllocatedRank>) -> Result<(Rank, Helpers<Rank>), OpenError> {
        let mut allocated = allocated.into_iter();
        let first = allocated.next().expect("there is a first rank");
        let mut helpers = Helpers::none();
        let opened: Vec<RankOpenResult<OpenError>> = allocated
            .map(|allocated| {
                let described = Arc::clone(self);
                helpers.start(move || described.load(allocated)).map_err(LoadError::Threads)
            })
            .collect::<Result<_, _>>()?;
        let rank = self.load(first)?;
        for (nth, opened) in (1..).zip(opened) {
            let silent = |_| OpenError::Ranks(format!("rank {nth} did not load its weights in time"));
            opened.recv_timeout(LOAD_WITHIN).map_err(silent)??;
        }
        Ok((rank, helpers))
    }

    fn load(&self, allocated: AllocatedRank) -> Result<Rank, OpenError> {
        let AllocatedRank { sizes, products, peers, space, memory, card } = allocated;
        let decoder = self.decoder(&card, sizes)?;
        let recorded = RecordedGraphs::new(self.graph_sizes(), self.layout.groups.len(), self.words_max());
        Ok(Rank::new(Tools { products, peers, space, decoder, memory, card }, recorded)?)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_a_gpu_is_told_so_before_the_model_is_looked_at() {
        let settings = CudaSettings { ordinal: 4096, cache: None, ..CudaSettings::default() };
        let error = CudaBackend::open(Path::new("/nowhere"), 1 << 20, &settings).expect_err("no such GPU");
        let sentence = error.to_string();
        assert!(error.is_no_gpu(), "{sentence}");
        assert!(sentence.len() > 20 && !sentence.contains('\n'), "{sentence}");
    }
}
