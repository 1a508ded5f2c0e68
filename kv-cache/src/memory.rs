//! Hot path.
//! The memory of one node's KV: maps a layer of a block to a region, on each of the node's ranks.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use device::cuda::{Card, Element, View, ViewMut};
use device::memory::available;
use device::{DeviceMemory, HostMemory, MemoryError, PageBusy, PageMut, PageRef, RegionShape};
use types::{GroupIdx, KvLayout, StageLayers};

/// All KV of one node. Cheap to clone: clones share the memory.
///
/// A block of a group is one page in each of the group's layers, at the block's index. The
/// [`BlockPool`](crate::BlockPool) knows the holders of blocks. This type only prevents reads of a page while it is
/// written.
///
/// If the layout has several ranks, each rank has its own memory, with its heads' share of every page;
/// [`rank`](Self::rank) returns it. Methods for pages without a rank are for memory with one rank only.
///
/// Memory with [`StageLayers::part`] has the layers of one process of a node, and with [`StageLayers::with_ranks`] its ranks.
/// Pages of other layers and ranks do not exist in it.
///
/// If the node has several pipeline stages, each stage has its own regions. A block has the same index on all stages, so
/// its bytes are the sum over the stages. See `docs/decisions/0032-the-wire-names-no-stage.md`.
#[derive(Clone)]
pub struct KvMemory {
    inner: Arc<Inner>,
}

struct Inner {
    layout: KvLayout,
    /// The region of each layer, equal on every rank.
    regions: Regions,
    n_blocks: u32,
    first_rank: u16,
    ranks: Box<[Pages]>,
}

/// One rank's share of a node's KV.
#[derive(Clone, Copy)]
pub struct RankMemory<'a> {
    pages: &'a Pages,
    regions: &'a Regions,
}

/// The memory that holds the pages.
enum Pages {
    Host(HostMemory),
    /// One GPU for each pipeline stage, with the regions of the stage's layers.
    Device(Box<[DeviceMemory]>),
}

/// KV on a GPU, in the form for kernels.
#[derive(Clone, Copy)]
pub struct OnCard<'a> {
    memory: &'a DeviceMemory,
    regions: &'a Regions,
    stage: usize,
}

impl KvMemory {
    /// Allocates host memory for `n_blocks` blocks. It can be shared with other processes of this machine if
    /// the system allows that.
    ///
    /// Fails if the size exceeds the available memory: otherwise the kernel would kill the process when the memory is
    /// used.
    pub fn host(layout: KvLayout, n_blocks: u32) -> Result<Self, MemoryError> {
        Self::host_of_stages(layout, &StageLayers::one(), n_blocks)
    }

    /// Like [`host`](Self::host), for a node with several pipeline stages.
    pub fn host_of_stages(
        layout: KvLayout,
        stages: &StageLayers,
        n_blocks: u32,
    ) -> Result<Self, MemoryError> {
        available::check(u64::from(n_blocks).saturating_mul(Self::block_bytes(&layout, stages) as u64))?;
        let regions = Regions::of(&layout, stages);
        let shapes = regions.shapes(n_blocks);
        let rank = |_| Ok(Pages::Host(HostMemory::shared(&shapes).or_else(|_| HostMemory::new(&shapes))?));
        let here = stages.ranks(layout.shard.tp_size);
        let ranks = here.clone().map(rank).collect::<Result<_, MemoryError>>()?;
        Ok(Self { inner: Arc::new(Inner { layout, regions, n_blocks, first_rank: here.start, ranks }) })
    }

    /// Allocates GPU memory for `n_blocks` blocks, one GPU for each rank of each stage: all ranks of the first stage, then
    /// those of the next. [`RankMemory::read`] and [`RankMemory::write`] use copies in host memory; kernels use
    /// [`RankMemory::on_card`].
    ///
    /// # Panics
    /// If the number of cards is not the number of ranks times that of stages.
    pub fn device(
        layout: KvLayout,
        stages: &StageLayers,
        n_blocks: u32,
        cards: &[&Card],
    ) -> Result<Self, MemoryError> {
        let here = stages.ranks(layout.shard.tp_size);
        let n_ranks = here.len();
        assert_eq!(n_ranks * stages.n_stages(), cards.len(), "a card is one rank of one stage");
        let regions = Regions::of(&layout, stages);
        let shapes = regions.shapes(n_blocks);
        let on_card = |rank, stage| {
            DeviceMemory::new(&shapes[regions.of_stage(stage)], cards[card_of(rank, stage, n_ranks)])
        };
        let rank = |rank| {
            let of_stages = (0..stages.n_stages()).map(|stage| on_card(rank, stage));
            Ok(Pages::Device(of_stages.collect::<Result<_, MemoryError>>()?))
        };
        let ranks = (0..n_ranks).map(rank).collect::<Result<_, MemoryError>>()?;
        Ok(Self { inner: Arc::new(Inner { layout, regions, n_blocks, first_rank: here.start, ranks }) })
    }

    /// Returns the memory in the form for kernels; `None` if it is on the host or on several GPUs.
    pub fn on_card(&self) -> Option<OnCard<'_>> {
        let mut all = self.on_cards();
        all.next().filter(|_| all.next().is_none())
    }

    /// Returns the memory of each GPU: all ranks of the first stage, then those of the next. Empty if it is on the host.
    pub fn on_cards(&self) -> impl Iterator<Item = OnCard<'_>> {
        let of_stage = move |stage| self.ranks().filter_map(move |rank| self.rank(rank).on_card(stage));
        (0..self.n_stages()).flat_map(of_stage)
    }

    /// Returns whether the memory is on one or several GPUs.
    pub fn is_on_cards(&self) -> bool {
        self.inner.ranks.iter().all(|pages| matches!(pages, Pages::Device(_)))
    }

    /// Returns whether the memory has a layer. Some are missing only if the node has several processes.
    ///
    /// # Panics
    /// If the layout has no such group or layer.
    pub fn has_layer(&self, group: GroupIdx, layer_pos: u16) -> bool {
        self.inner.regions.of_layer(group, layer_pos) != NO_REGION
    }

    /// Returns the number of pipeline stages with regions of their own.
    pub fn n_stages(&self) -> usize {
        self.inner.regions.stage_ends.len()
    }

    /// Returns the stage that has a layer, and the index of the layer's memory region among those of the stage.
    pub fn region_in_stage(&self, group: GroupIdx, layer_pos: u16) -> (usize, u32) {
        self.inner.regions.in_stage(self.inner.regions.of_layer(group, layer_pos))
    }

    /// Returns the number of blocks that fit into `bytes`, rounded down.
    ///
    /// A layout without attention has no KV. It gets one block for any amount of memory.
    pub fn blocks_within(layout: &KvLayout, stages: &StageLayers, bytes: usize) -> u32 {
        match Self::block_bytes(layout, stages) {
            0 => 1,
            block_bytes => u32::try_from(bytes / block_bytes).unwrap_or(u32::MAX),
        }
    }

    /// Returns the bytes of one block in all regions of these ranks and stages.
    pub fn block_bytes(layout: &KvLayout, stages: &StageLayers) -> usize {
        Regions::of(layout, stages).block_bytes() * stages.ranks(layout.shard.tp_size).len()
    }

    /// Returns the bytes of one block on a rank, for each stage.
    pub fn stage_block_bytes(layout: &KvLayout, stages: &StageLayers) -> Vec<usize> {
        Regions::of(layout, stages).stage_block_bytes().collect()
    }

    /// Returns the number of tokens of the longest sequence that fits into `n_blocks` blocks, at most
    /// `context_tokens`.
    pub fn longest(layout: &KvLayout, n_blocks: u32, context_tokens: usize) -> usize {
        match (n_blocks as usize).checked_div(layout.groups.len()) {
            None => context_tokens,
            Some(blocks) => context_tokens.min(blocks * usize::from(layout.block_tokens)),
        }
    }

    /// Returns the number of clones, this one included.
    pub fn n_holders(&self) -> usize {
        Arc::strong_count(&self.inner)
    }

    pub fn layout(&self) -> &KvLayout {
        &self.inner.layout
    }

    pub fn n_blocks(&self) -> u32 {
        self.inner.n_blocks
    }

    /// Returns the total bytes.
    pub fn bytes(&self) -> usize {
        self.inner.ranks.iter().map(Pages::bytes).sum()
    }

    /// Returns the bytes of each pipeline stage.
    pub fn stage_bytes(&self) -> Vec<usize> {
        let n_pages = self.n_blocks() as usize * self.ranks().len();
        self.inner.regions.stage_block_bytes().map(|block_bytes| block_bytes * n_pages).collect()
    }

    /// Returns whether each layer has the region that it has on a node with one pipeline stage.
    pub fn has_regions_of_one_stage(&self) -> bool {
        self.inner.regions.by_layer == Regions::of(self.layout(), &StageLayers::one()).by_layer
    }

    /// Returns the number of ranks of the node.
    pub fn n_ranks(&self) -> u16 {
        self.inner.layout.shard.tp_size
    }

    /// Returns the ranks whose share the memory has. Some are missing only if the node has several processes.
    pub fn ranks(&self) -> Range<u16> {
        let Inner { first_rank, ranks, .. } = &*self.inner;
        *first_rank..first_rank + ranks.len() as u16
    }

    /// Returns one rank's share of the pages.
    ///
    /// # Panics
    /// If the memory has no such rank.
    pub fn rank(&self, tp_rank: u16) -> RankMemory<'_> {
        let Inner { first_rank, ranks, regions, .. } = &*self.inner;
        let nth = tp_rank.checked_sub(*first_rank).expect("the memory has the rank");
        RankMemory { pages: &ranks[usize::from(nth)], regions }
    }

    /// Returns the share of the only rank, which is the whole memory.
    fn whole(&self) -> RankMemory<'_> {
        assert_eq!(self.n_ranks(), 1, "memory of several ranks is reached rank by rank");
        self.rank(0)
    }

    /// Borrows one layer of neighbouring blocks for reading: their pages, one after the other.
    ///
    /// `layer_pos` is the layer's position in its group, not its number in the model. A refusal means that one of
    /// these blocks is being written: the caller does not hold the block, or reads before it is computed.
    ///
    /// # Panics
    /// If the group, the layer or one of the blocks does not exist, or there are several ranks.
    pub fn read(&self, group: GroupIdx, layer_pos: u16, blocks: Range<u32>) -> Result<PageRef<'_>, PageBusy> {
        self.whole().read(group, layer_pos, blocks)
    }

    /// Borrows one layer of neighbouring blocks for writing. Like [`read`](Self::read), but also refused while any
    /// page is borrowed.
    pub fn write(
        &self,
        group: GroupIdx,
        layer_pos: u16,
        blocks: Range<u32>,
    ) -> Result<PageMut<'_>, PageBusy> {
        self.whole().write(group, layer_pos, blocks)
    }
}

impl<'a> RankMemory<'a> {
    /// Returns the memory of a stage's GPU in the form for kernels; `None` if it is on the host.
    pub fn on_card(&self, stage: usize) -> Option<OnCard<'a>> {
        match self.pages {
            Pages::Device(stages) => {
                stages.get(stage).map(|memory| OnCard { memory, regions: self.regions, stage })
            }
            Pages::Host(_) => None,
        }
    }

    /// Like [`KvMemory::read`], for the rank's share of each page.
    ///
    /// # Panics
    /// If the group, the layer or one of the blocks does not exist.
    pub fn read(&self, group: GroupIdx, layer_pos: u16, blocks: Range<u32>) -> Result<PageRef<'a>, PageBusy> {
        let region = self.regions.of_layer(group, layer_pos);
        match self.pages {
            Pages::Host(pages) => pages.read(region, blocks),
            Pages::Device(stages) => {
                let (stage, region) = self.regions.in_stage(region);
                stages[stage].read(region, blocks)
            }
        }
    }

    /// Like [`KvMemory::write`], for the rank's share of each page.
    ///
    /// # Panics
    /// If the group, the layer or one of the blocks does not exist.
    pub fn write(
        &self,
        group: GroupIdx,
        layer_pos: u16,
        blocks: Range<u32>,
    ) -> Result<PageMut<'a>, PageBusy> {
        let region = self.regions.of_layer(group, layer_pos);
        match self.pages {
            Pages::Host(pages) => pages.write(region, blocks),
            Pages::Device(stages) => {
                let (stage, region) = self.regions.in_stage(region);
                stages[stage].write(region, blocks)
            }
        }
    }
}

impl Pages {
    fn bytes(&self) -> usize {
        match self {
            Self::Host(pages) => pages.bytes(),
            Self::Device(stages) => stages.iter().map(DeviceMemory::bytes).sum(),
        }
    }
}

impl<'a> OnCard<'a> {
    /// Returns one layer's pages of all blocks: block `n` is the n-th page.
    ///
    /// # Panics
    /// If the group or the layer does not exist, or its page size is not a multiple of this type's size.
    pub fn layer<T: Element>(&self, group: GroupIdx, layer_pos: u16) -> View<'a, T> {
        self.memory.region(self.region(group, layer_pos))
    }

    /// Like [`layer`](Self::layer), but returns a view for kernels that write.
    ///
    /// Pages that kernels write are not checked. The block tables of the kernels must name only blocks that
    /// the caller has leased, and that are not borrowed through [`KvMemory::read`] or [`KvMemory::write`] meanwhile.
    pub fn layer_mut<T: Element>(&self, group: GroupIdx, layer_pos: u16) -> ViewMut<'a, T> {
        self.memory.region_mut(self.region(group, layer_pos))
    }

    /// Returns the index of the memory region of a layer on this GPU.
    ///
    /// # Panics
    /// If another GPU has the layer.
    pub fn region(&self, group: GroupIdx, layer_pos: u16) -> u32 {
        let (stage, region) = self.regions.in_stage(self.regions.of_layer(group, layer_pos));
        assert_eq!(stage, self.stage, "layer {layer_pos} of group {group:?} is on another GPU");
        region
    }

    pub fn memory(&self) -> &'a DeviceMemory {
        self.memory
    }
}

impl fmt::Debug for OnCard<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.memory.fmt(f)
    }
}

impl fmt::Debug for RankMemory<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RankMemory({} bytes)", self.pages.bytes())
    }
}

impl fmt::Debug for KvMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KvMemory").field("n_blocks", &self.n_blocks()).field("bytes", &self.bytes()).finish()
    }
}

/// The region of a layer that the memory does not have.
const NO_REGION: u32 = u32::MAX;

/// The region of a rank for each layer of each group.
///
/// A block belongs to one group at a time. So groups whose layers have the same page size share regions, layer by
/// layer: a model of 4 full and 12 windowed layers, as 4 groups of 4, needs 4 regions. Layers of another page size
/// have their own regions. So have the layers of each pipeline stage.
#[derive(Debug, Default)]
struct Regions {
    page_bytes: Vec<usize>,
    /// [`NO_REGION`] for the layers of other processes.
    by_layer: Vec<Vec<u32>>,
    /// For each stage, the number of regions of it and of all earlier stages.
    stage_ends: Vec<usize>,
}

impl Regions {
    fn of(layout: &KvLayout, stages: &StageLayers) -> Self {
        let by_layer = layout.groups.iter().map(|group| vec![NO_REGION; group.layers.len()]).collect();
        let mut regions = Self { by_layer, ..Self::default() };
        for layers in stages.iter() {
            regions.add(layout, &layers);
        }
        regions
    }

    /// Adds the regions of one stage.
    fn add(&mut self, layout: &KvLayout, stage: &Range<u16>) {
        let mut groups: Vec<Vec<u32>> = Vec::with_capacity(layout.groups.len());
        for (nth, group) in layout.groups.iter().enumerate() {
            let mut lies_in = Vec::with_capacity(group.layers.len());
            for (pos, shape) in group.layers.iter().enumerate() {
                if stage.contains(&shape.layer) {
                    let page_bytes = layout.rank_page_bytes(*shape);
                    let shared = self.shared_at(&groups, lies_in.len(), page_bytes);
                    let region = shared.unwrap_or_else(|| self.new_region(page_bytes));
                    lies_in.push(region);
                    self.by_layer[nth][pos] = region;
                }
            }
            groups.push(lies_in);
        }
        self.stage_ends.push(self.page_bytes.len());
    }

    /// Returns the region of the layer at the same position in an earlier group of the stage, if the page size is the
    /// same.
    fn shared_at(&self, groups: &[Vec<u32>], pos: usize, page_bytes: usize) -> Option<u32> {
        let at_pos = groups.iter().filter_map(|layers| layers.get(pos).copied());
        at_pos.into_iter().find(|region| self.page_bytes[*region as usize] == page_bytes)
    }

    fn new_region(&mut self, page_bytes: usize) -> u32 {
        self.page_bytes.push(page_bytes);
        self.page_bytes.len() as u32 - 1
    }

    fn shapes(&self, n_blocks: u32) -> Vec<RegionShape> {
        self.page_bytes
            .iter()
            .map(|page_bytes| RegionShape { page_bytes: *page_bytes, n_pages: n_blocks })
            .collect()
    }

    /// Returns the bytes of one block on a rank.
    fn block_bytes(&self) -> usize {
        self.page_bytes.iter().sum()
    }

    /// Returns the bytes of one block on a rank, for each stage.
    fn stage_block_bytes(&self) -> impl Iterator<Item = usize> {
        (0..self.stage_ends.len()).map(|stage| self.page_bytes[self.of_stage(stage)].iter().sum())
    }

    fn of_layer(&self, group: GroupIdx, layer_pos: u16) -> u32 {
        self.by_layer[usize::from(group.0)][usize::from(layer_pos)]
    }

    /// Returns the stage that has a region.
    fn stage_of(&self, region: u32) -> usize {
        self.stage_ends.partition_point(|end| *end <= region as usize)
    }

    /// Returns the range of a stage's regions.
    fn of_stage(&self, stage: usize) -> Range<usize> {
        let start = if stage == 0 { 0 } else { self.stage_ends[stage - 1] };
        start..self.stage_ends[stage]
    }

    /// Returns a region's stage, and its index among the regions of the stage.
    fn in_stage(&self, region: u32) -> (usize, u32) {
        let stage = self.stage_of(region);
        (stage, region - self.of_stage(stage).start as u32)
    }
}

/// Returns the index of the GPU that has a rank of a stage.
fn card_of(rank: usize, stage: usize, n_ranks: usize) -> usize {
    stage * n_ranks + rank
}

mod shared;
#[cfg(test)]
mod tests;
