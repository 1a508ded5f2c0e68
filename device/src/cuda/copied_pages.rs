//! The pages that a copy job reads and writes: on this GPU, on a peer GPU, and in a slot.

use super::CudaError;
use super::error::ensure;
use super::remote::RemoteMemory;
use super::slots::{Slots, VECTOR_BYTES};

/// The layout of a page, `[K|V][head]`, with a run of `run_bytes` for each head, and the range of heads to
/// move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRuns {
    pub n_parts: usize,
    /// The number of heads to move: neighbours from `first_head` on.
    pub n_heads: usize,
    pub run_bytes: usize,
    pub first_head: usize,
    /// The number of all heads of the page.
    pub page_heads: usize,
}

/// Pages of equal layout, and the part of them to move.
#[derive(Clone, Copy, Debug)]
pub struct SomePages<'a> {
    /// The region and the page of each page to move, layer by layer.
    pub places: &'a [(u32, u32)],
    /// The number of pages in each layer.
    pub n_of_layer: usize,
    pub runs: PageRuns,
    /// The page of each layer in which only the first bytes of each run are valid, and the number of these
    /// bytes.
    pub partial: Option<(usize, usize)>,
}

/// Pages in a peer GPU's memory, at these offsets: one for each local page.
#[derive(Clone, Copy, Debug)]
pub struct RemotePages<'a> {
    pub memory: &'a RemoteMemory,
    pub offsets: &'a [u64],
    /// The parts and heads to move. The pages may have other heads too.
    pub runs: PageRuns,
}

impl RemotePages<'_> {
    /// Returns the address of the first byte to move in each page.
    pub(super) fn addresses(self) -> impl Iterator<Item = u64> {
        let first = self.memory.address() + self.runs.start() as u64;
        self.offsets.iter().map(move |offset| first + offset)
    }
}

/// A place in a slot: an offset from the slot's start.
#[derive(Clone, Copy, Debug)]
pub struct SlotAt<'a> {
    pub slots: &'a Slots,
    pub slot: usize,
    pub offset: usize,
}

impl SlotAt<'_> {
    /// Returns the addresses of these pages in the slot, packed one after the other.
    pub(super) fn pages(self, some: &SomePages<'_>) -> Result<impl Iterator<Item = u64> + use<>, CudaError> {
        let (n_pages, page_bytes) = (some.places.len(), some.runs.moved_bytes());
        let first = self.slots.address(self.slot, self.offset, n_pages * page_bytes)?;
        let is_vectors =
            self.slots.slot_bytes().is_multiple_of(VECTOR_BYTES) && self.offset.is_multiple_of(VECTOR_BYTES);
        ensure("a slot", is_vectors, "pages that do not start at a multiple of 16 bytes")?;
        Ok((0..n_pages as u64).map(move |nth| first + nth * page_bytes as u64))
    }
}

// === impl PageRuns ===

impl PageRuns {
    /// Makes the layout of pages whose heads are all moved.
    pub const fn whole(n_parts: usize, n_heads: usize, run_bytes: usize) -> Self {
        Self { n_parts, n_heads, run_bytes, first_head: 0, page_heads: n_heads }
    }

    pub fn page_bytes(&self) -> usize {
        self.n_parts * self.part_bytes()
    }

    /// Returns the bytes of the heads to move in one page.
    pub fn moved_bytes(&self) -> usize {
        self.n_parts * self.n_heads * self.run_bytes
    }

    pub(super) fn are_there(&self) -> bool {
        self.first_head.checked_add(self.n_heads).is_some_and(|end| end <= self.page_heads)
    }

    pub(super) fn are_whole(&self) -> bool {
        self.n_heads == self.page_heads
    }

    /// Returns the distance from K to V.
    pub(super) fn part_bytes(&self) -> usize {
        self.page_heads * self.run_bytes
    }

    /// Returns the offset of the first head to move.
    pub(super) fn start(&self) -> usize {
        self.first_head * self.run_bytes
    }

    /// Returns the same heads as they lie in a slot, without the other heads.
    pub(super) fn packed(&self) -> Self {
        Self { first_head: 0, page_heads: self.n_heads, ..*self }
    }
}
