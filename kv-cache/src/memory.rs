//! Hot path.
//! The memory that one node's KV lies in: which region a layer of a block is in, on each of the node's ranks.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use device::cuda::{Card, Element, View, ViewMut};
use device::memory::available;
use device::{DeviceMemory, HostMemory, MemoryError, PageBusy, PageMut, PageRef, RegionShape};
use types::layout::LayerGroup;
use types::{GroupIdx, KvLayout};

/// All KV of one node. Cheap to clone: all clones are the same memory.
///
/// A block of a group is one page in each of the group's layers, at the block's index. The
/// [`BlockPool`](crate::BlockPool) knows the holders of blocks; this type only prevents a read of a page while it is
/// written.
///
/// Where the layout has several ranks, each has memory of its own with its heads' share of every page: [`rank`](Self::rank)
/// reaches one's. What is said of pages without naming a rank is for memory that has only one.
#[derive(Clone)]
pub struct KvMemory {
    inner: Arc<Inner>,
}

struct Inner {
    layout: KvLayout,
    /// The same on every rank.
    regions: Regions,
    n_blocks: u32,
    ranks: Box<[Pages]>,
}

/// One rank's share of a node's KV.
#[derive(Clone, Copy)]
pub struct RankMemory<'a> {
    pages: &'a Pages,
    regions: &'a Regions,
}

/// Where the pages are.
enum Pages {
    Host(HostMemory),
    Device(DeviceMemory),
}

/// KV that lies on a card, as kernels see it.
#[derive(Clone, Copy)]
pub struct OnCard<'a> {
    memory: &'a DeviceMemory,
    regions: &'a Regions,
}

impl KvMemory {
    /// Host memory for `n_blocks` blocks, which other processes of this machine can be shown if the system allows it.
    ///
    /// More than is available is refused before it is mapped: the kernel would kill the process when it is touched.
    pub fn host(layout: KvLayout, n_blocks: u32) -> Result<Self, MemoryError> {
        available::check(u64::from(n_blocks).saturating_mul(Self::block_bytes(&layout) as u64))?;
        let regions = Regions::of(&layout);
        let shapes = regions.shapes(n_blocks);
        let rank = |_| Ok(Pages::Host(HostMemory::shared(&shapes).or_else(|_| HostMemory::new(&shapes))?));
        let ranks = (0..layout.shard.tp_size).map(rank).collect::<Result<_, MemoryError>>()?;
        Ok(Self { inner: Arc::new(Inner { layout, regions, n_blocks, ranks }) })
    }

    /// Memory of cards for `n_blocks` blocks, one card for each rank. [`RankMemory::read`] and [`RankMemory::write`] go by
    /// copies in host memory; kernels reach it by [`RankMemory::on_card`].
    ///
    /// # Panics
    /// If there is not one card for each of the layout's ranks.
    pub fn device(layout: KvLayout, n_blocks: u32, cards: &[&Card]) -> Result<Self, MemoryError> {
        assert_eq!(usize::from(layout.shard.tp_size), cards.len(), "a card is one rank");
        let regions = Regions::of(&layout);
        let shapes = regions.shapes(n_blocks);
        let rank = |card: &&Card| Ok(Pages::Device(DeviceMemory::new(&shapes, card)?));
        let ranks = cards.iter().map(rank).collect::<Result<_, MemoryError>>()?;
        Ok(Self { inner: Arc::new(Inner { layout, regions, n_blocks, ranks }) })
    }

    /// What kernels see of it, if all of it lies on one card.
    pub fn on_card(&self) -> Option<OnCard<'_>> {
        if self.n_ranks() == 1 { self.rank(0).on_card() } else { None }
    }

    /// Whether it lies on cards, one or several.
    pub fn is_on_cards(&self) -> bool {
        self.inner.ranks.iter().all(|pages| matches!(pages, Pages::Device(_)))
    }

    /// How many blocks fit into `bytes`: never more, so that the regions' sum stays within what was given.
    ///
    /// A layout without attention keeps no KV and has one block, whatever the memory.
    pub fn blocks_within(layout: &KvLayout, bytes: usize) -> u32 {
        match Self::block_bytes(layout) {
            0 => 1,
            block_bytes => u32::try_from(bytes / block_bytes).unwrap_or(u32::MAX),
        }
    }

    /// Bytes of one block in all regions of all ranks.
    pub fn block_bytes(layout: &KvLayout) -> usize {
        Regions::of(layout).block_bytes() * usize::from(layout.shard.tp_size)
    }

    /// Tokens of the longest sequence that fits in `n_blocks` blocks, at most `context_tokens`.
    pub fn longest(layout: &KvLayout, n_blocks: u32, context_tokens: usize) -> usize {
        match (n_blocks as usize).checked_div(layout.groups.len()) {
            None => context_tokens,
            Some(blocks) => context_tokens.min(blocks * usize::from(layout.block_tokens)),
        }
    }

    /// How many clones there are. None of them can be made but from another.
    pub fn n_holders(&self) -> usize {
        Arc::strong_count(&self.inner)
    }

    pub fn layout(&self) -> &KvLayout {
        &self.inner.layout
    }

    pub fn n_blocks(&self) -> u32 {
        self.inner.n_blocks
    }

    /// On all ranks.
    pub fn bytes(&self) -> usize {
        self.inner.ranks.iter().map(Pages::bytes).sum()
    }

    pub fn n_ranks(&self) -> u16 {
        self.inner.layout.shard.tp_size
    }

    /// One rank's share of the pages.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn rank(&self, tp_rank: u16) -> RankMemory<'_> {
        RankMemory { pages: &self.inner.ranks[usize::from(tp_rank)], regions: &self.inner.regions }
    }

    /// The share of the only rank, which is all of it.
    fn whole(&self) -> RankMemory<'_> {
        assert_eq!(self.n_ranks(), 1, "memory of several ranks is reached rank by rank");
        self.rank(0)
    }

    /// Reads one layer of neighbouring blocks: their pages, one after the other.
    ///
    /// `layer_pos` is the layer's position in its group, not its number in the model. A refusal means that one of these
    /// blocks is being written: the caller reads a block that it does not hold, or reads before the block was computed.
    ///
    /// # Panics
    /// If the group, the layer or one of the blocks does not exist, or there are several ranks.
    pub fn read(&self, group: GroupIdx, layer_pos: u16, blocks: Range<u32>) -> Result<PageRef<'_>, PageBusy> {
        self.whole().read(group, layer_pos, blocks)
    }

    /// Writes one layer of neighbouring blocks. Like [`read`](Self::read), but refused while any of the pages is borrowed.
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
    /// What kernels see of it, if it lies on a card.
    pub fn on_card(&self) -> Option<OnCard<'a>> {
        match self.pages {
            Pages::Device(memory) => Some(OnCard { memory, regions: self.regions }),
            Pages::Host(_) => None,
        }
    }

    /// Like [`KvMemory::read`], the rank's share of each page.
    ///
    /// # Panics
    /// If the group, the layer or one of the blocks does not exist.
    pub fn read(&self, group: GroupIdx, layer_pos: u16, blocks: Range<u32>) -> Result<PageRef<'a>, PageBusy> {
        let region = self.regions.of_layer(group, layer_pos);
        match self.pages {
            Pages::Host(pages) => pages.read(region, blocks),
            Pages::Device(pages) => pages.read(region, blocks),
        }
    }

    /// Like [`KvMemory::write`], the rank's share of each page.
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
            Pages::Device(pages) => pages.write(region, blocks),
        }
    }
}

impl Pages {
    fn bytes(&self) -> usize {
        match self {
            Self::Host(pages) => pages.bytes(),
            Self::Device(pages) => pages.bytes(),
        }
    }
}

impl<'a> OnCard<'a> {
    /// One layer's pages, of all blocks: block `n` is the n-th page.
    ///
    /// # Panics
    /// If the group or the layer does not exist, or its pages are not whole numbers of this type.
    pub fn layer<T: Element>(&self, group: GroupIdx, layer_pos: u16) -> View<'a, T> {
        self.memory.region(self.region(group, layer_pos))
    }

    /// Like [`layer`](Self::layer), for kernels that write.
    ///
    /// Nothing here checks which pages they write: the tables that they are given must name blocks that the caller has
    /// leased, and that are not borrowed by [`KvMemory::read`] or [`KvMemory::write`] meanwhile.
    pub fn layer_mut<T: Element>(&self, group: GroupIdx, layer_pos: u16) -> ViewMut<'a, T> {
        self.memory.region_mut(self.region(group, layer_pos))
    }

    /// Which of the memory's regions a layer lies in.
    pub fn region(&self, group: GroupIdx, layer_pos: u16) -> u32 {
        self.regions.of_layer(group, layer_pos)
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

/// Which region of a rank each layer of each group lies in.
///
/// A block belongs to one group at a time, so groups whose layers have pages of one size share regions, layer by
/// layer: a model of 4 full and 12 windowed layers, as 4 groups of 4, needs 4 regions. Layers of another width have
/// a region of their own.
#[derive(Debug, Default)]
struct Regions {
    page_bytes: Vec<usize>,
    by_layer: Vec<Vec<u32>>,
}

impl Regions {
    fn of(layout: &KvLayout) -> Self {
        let mut regions = Self::default();
        for group in &layout.groups {
            regions.add(layout, group);
        }
        regions
    }

    fn add(&mut self, layout: &KvLayout, group: &LayerGroup) {
        let mut lies_in = Vec::with_capacity(group.layers.len());
        for (pos, shape) in group.layers.iter().enumerate() {
            let page_bytes = layout.rank_page_bytes(*shape);
            let region = self.shared_at(pos, page_bytes).unwrap_or_else(|| self.new_region(page_bytes));
            lies_in.push(region);
        }
        self.by_layer.push(lies_in);
    }

    /// The region that an earlier group's layer at the same position lies in, if its pages are as large.
    fn shared_at(&self, pos: usize, page_bytes: usize) -> Option<u32> {
        let at_pos = self.by_layer.iter().filter_map(|layers| layers.get(pos).copied());
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

    /// What one more block costs a rank.
    fn block_bytes(&self) -> usize {
        self.page_bytes.iter().sum()
    }

    fn of_layer(&self, group: GroupIdx, layer_pos: u16) -> u32 {
        self.by_layer[usize::from(group.0)][usize::from(layer_pos)]
    }
}

mod shared;
#[cfg(test)]
mod tests;
