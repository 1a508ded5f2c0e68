//! The pages that a copy job reads and writes: on this card, on a peer's card, and in a slot.

use super::CudaError;
use super::error::ensure;
use super::remote::RemoteMemory;
use super::slots::Slots;

/// The kernels move this number of bytes at once.
pub(super) const VECTOR_BYTES: usize = 16;

/// How a page is divided, `[K|V][head]`, each a run of `run_bytes`; and which of its heads are meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRuns {
    pub n_parts: usize,
    /// Those that are meant: neighbours, from the first on.
    pub n_heads: usize,
    pub run_bytes: usize,
    pub first_head: usize,
    /// All that the page has.
    pub page_heads: usize,
}

/// Some pages of regions that are alike, and what of them counts.
#[derive(Clone, Copy, Debug)]
pub struct SomePages<'a> {
    /// Region and page, layer by layer.
    pub places: &'a [(u32, u32)],
    /// How many of them each layer has.
    pub n_of_layer: usize,
    pub runs: PageRuns,
    /// The page of each layer whose runs are valid only in their first bytes, and the number of these.
    pub partial: Option<(usize, usize)>,
}

/// Pages of a peer's card, as many as there are here, at these offsets of its memory.
#[derive(Clone, Copy, Debug)]
pub struct RemotePages<'a> {
    pub memory: &'a RemoteMemory,
    pub offsets: &'a [u64],
    /// The parts and heads that are meant here, whatever other heads the pages have.
    pub runs: PageRuns,
}

impl RemotePages<'_> {
    /// Where what is meant of each begins.
    pub(super) fn addresses(self) -> impl Iterator<Item = u64> {
        let first = self.memory.address() + self.runs.start() as u64;
        self.offsets.iter().map(move |offset| first + offset)
    }
}

/// A place in a slot.
#[derive(Clone, Copy, Debug)]
pub struct SlotAt<'a> {
    pub slots: &'a Slots,
    pub slot: usize,
    pub offset: usize,
}

impl SlotAt<'_> {
    /// The addresses of these pages from here on, one after the other.
    pub(super) fn pages(self, some: &SomePages<'_>) -> Result<impl Iterator<Item = u64> + use<>, CudaError> {
        let (n_pages, page_bytes) = (some.places.len(), some.runs.moved_bytes());
        let first = self.slots.address(self.slot, self.offset, n_pages * page_bytes)?;
        let is_vectors =
            self.slots.slot_bytes().is_multiple_of(VECTOR_BYTES) && self.offset.is_multiple_of(VECTOR_BYTES);
        ensure("a slot", is_vectors, "pages that begin off a 16-byte edge")?;
        Ok((0..n_pages as u64).map(move |nth| first + nth * page_bytes as u64))
    }
}

// === impl PageRuns ===

impl PageRuns {
    /// All heads are meant.
    pub const fn whole(n_parts: usize, n_heads: usize, run_bytes: usize) -> Self {
        Self { n_parts, n_heads, run_bytes, first_head: 0, page_heads: n_heads }
    }

    pub fn page_bytes(&self) -> usize {
        self.n_parts * self.part_bytes()
    }

    /// Bytes of the parts that are meant.
    pub fn moved_bytes(&self) -> usize {
        self.n_parts * self.n_heads * self.run_bytes
    }

    pub(super) fn are_there(&self) -> bool {
        self.first_head.checked_add(self.n_heads).is_some_and(|end| end <= self.page_heads)
    }

    pub(super) fn are_whole(&self) -> bool {
        self.n_heads == self.page_heads
    }

    /// From K to V.
    pub(super) fn part_bytes(&self) -> usize {
        self.page_heads * self.run_bytes
    }

    /// Where the first head that is meant begins in its page.
    pub(super) fn start(&self) -> usize {
        self.first_head * self.run_bytes
    }

    /// The same as they lie in a slot, where there are no others.
    pub(super) fn packed(&self) -> Self {
        Self { first_head: 0, page_heads: self.n_heads, ..*self }
    }
}
