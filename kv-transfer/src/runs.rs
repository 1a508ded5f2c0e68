//! Hot path. A span as runs of neighbouring blocks: the location of its bytes in one node's memory, in the wire's
//! order.
//!
//! The wire's order is layer by layer and block by block. The two sides have different block tables, so each side
//! cuts the same bytes into its own runs. If blocks are neighbours, a layer is one slice, however many blocks it has.
//! With several ranks, the bytes are those of one [lane](crate::lanes). A side whose pages also have other heads has
//! a slice of K and a slice of V in each page.
//!
//! Pages are borrowed for one attempt to read or write, never while a task waits. So a stalled wire holds no page,
//! and a landing that is closed between two attempts is quiet at once.

use std::io::{IoSlice, IoSliceMut};
use std::ops::Range;

use kv_cache::{KvMemory, PageBusy, PageMut, PageRef};
use types::layout::LayerShape;
use types::{BlockIdx, GroupIdx, KvLayout, KvSpan};

use crate::digest::PageShape;
use crate::lanes::{LaneSpan, Lanes};
use crate::reshard::{HeadShape, Heads};

/// Limit of slices in one system call. Linux accepts at most 1024.
const SLICES_MAX: usize = 64;
/// Limit of bytes moved in one attempt, which bounds the time for which a landing's lock is held.
const ATTEMPT_BYTES_MAX: usize = 1 << 20;

/// Contiguous bytes in a memory that both sides can access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    pub offset: u64,
    pub bytes: u32,
}

/// Memory that is borrowed at once: one layer of neighbouring blocks, or some heads of one page.
#[derive(Clone, Debug, PartialEq, Eq)]
struct PageRun {
    layer_pos: u16,
    /// The run's blocks, as indices in the pool.
    blocks: Range<u32>,
    /// The offset of the run in the span's bytes.
    start: usize,
    bytes: usize,
    /// The heads that the run covers in its page; `None` if it covers all borrowed bytes.
    some: Option<SomeHeads>,
}

/// The heads of a lane in a page that also has other heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SomeHeads {
    heads: Heads,
    shape: HeadShape,
}

/// A part of a span, located in one rank's memory.
#[derive(Clone, Debug)]
pub(crate) struct Runs {
    rank: u16,
    group: GroupIdx,
    runs: Vec<PageRun>,
    bytes: usize,
}

impl Runs {
    /// Locates the part in the sender's memory. `layout` is the sender's, and `blocks` are those of the span only.
    pub(crate) fn sent(layout: &KvLayout, lanes: &Lanes, blocks: &[BlockIdx], span: &LaneSpan) -> Self {
        let heads = |shape: LayerShape| lanes.heads(shape.n_kv_heads, span.lane).from;
        Self::new(layout, span.lane.from, blocks, span, heads)
    }

    /// Locates the part in the receiver's memory, by the receiver's layout and table.
    pub(crate) fn wanted(layout: &KvLayout, lanes: &Lanes, table: &[BlockIdx], span: &LaneSpan) -> Self {
        let heads = |shape: LayerShape| lanes.heads(shape.n_kv_heads, span.lane).to;
        Self::new(layout, span.lane.to, of_span(table, span), span, heads)
    }

    fn new(
        layout: &KvLayout,
        rank: u16,
        blocks: &[BlockIdx],
        span: &KvSpan,
        heads: impl Fn(LayerShape) -> Heads,
    ) -> Self {
        let mut runs = Self { rank, group: span.group, runs: Vec::new(), bytes: 0 };
        for layer_pos in span.layers.clone() {
            let shape = layout.group(span.group).layers[usize::from(layer_pos)];
            let (heads, page) = (heads(shape), PageShape::new(layout, span.group, layer_pos));
            if heads.are_all() {
                runs.add_pages(layer_pos, blocks, page.page_bytes());
            } else {
                runs.add_heads(layer_pos, blocks, SomeHeads { heads, shape: page.head_shape() });
            }
        }
        runs
    }

    /// Adds whole pages; neighbouring pages are one slice.
    fn add_pages(&mut self, layer_pos: u16, blocks: &[BlockIdx], page_bytes: usize) {
        for neighbours in blocks.chunk_by(|a, b| a.0 + 1 == b.0) {
            let blocks = neighbours[0].0..neighbours[0].0 + neighbours.len() as u32;
            let bytes = page_bytes * blocks.len();
            self.push(PageRun { layer_pos, blocks, start: self.bytes, bytes, some: None });
        }
    }

    /// Adds some heads of each page: a slice of K and a slice of V.
    fn add_heads(&mut self, layer_pos: u16, blocks: &[BlockIdx], some: SomeHeads) {
        for block in blocks {
            let blocks = block.0..block.0 + 1;
            self.push(PageRun {
                layer_pos,
                blocks,
                start: self.bytes,
                bytes: some.bytes(),
                some: Some(some),
            });
        }
    }

    fn push(&mut self, run: PageRun) {
        self.bytes += run.bytes;
        self.runs.push(run);
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the locations of the slices in the rank's memory, or in its file.
    pub(crate) fn pieces(&self, memory: &KvMemory) -> Vec<Piece> {
        let memory = memory.rank(self.rank);
        self.places(|layer_pos, page| memory.offset(self.group, layer_pos, page))
    }

    /// Returns the locations of the slices in a memory. `start_of` takes a layer and a block and returns the
    /// start of their page.
    pub(crate) fn places(&self, start_of: impl Fn(u16, u32) -> u64) -> Vec<Piece> {
        let pieces = |run: &PageRun| {
            let start = start_of(run.layer_pos, run.blocks.start);
            let piece = move |slice: Range<usize>| Piece {
                offset: start + slice.start as u64,
                bytes: slice.len() as u32,
            };
            non_empty(&run.slices(0)).cloned().map(piece).collect::<Vec<_>>()
        };
        self.runs.iter().flat_map(pieces).collect()
    }

    /// Borrows the pages from `offset` on, up to the limit of one attempt.
    pub(crate) fn read<'m>(&self, memory: &'m KvMemory, offset: usize) -> Result<ReadSlices<'m>, PageBusy> {
        let (runs, mut skip) = self.attempt(offset);
        let memory = memory.rank(self.rank);
        let mut pages = Vec::with_capacity(runs.len());
        for run in runs {
            let slices = run.slices(std::mem::take(&mut skip));
            pages.push((memory.read(self.group, run.layer_pos, run.blocks.clone())?, slices));
        }
        Ok(ReadSlices { pages })
    }

    /// Like [`read`](Self::read), but borrows the pages for writing.
    pub(crate) fn write<'m>(&self, memory: &'m KvMemory, offset: usize) -> Result<WriteSlices<'m>, PageBusy> {
        let (runs, mut skip) = self.attempt(offset);
        let memory = memory.rank(self.rank);
        let mut pages = Vec::with_capacity(runs.len());
        for run in runs {
            let slices = run.slices(std::mem::take(&mut skip));
            pages.push((memory.write(self.group, run.layer_pos, run.blocks.clone())?, slices));
        }
        Ok(WriteSlices { pages })
    }

    /// Returns the runs of one attempt, and the number of bytes of the first run that are already done.
    fn attempt(&self, offset: usize) -> (&[PageRun], usize) {
        let first = self.runs.partition_point(|run| run.start + run.bytes <= offset);
        let rest = &self.runs[first..];
        let skip = rest.first().map_or(0, |run| offset - run.start);
        let runs_max = SLICES_MAX / rest.first().map_or(1, PageRun::n_slices);
        let n_runs =
            rest.iter().take(runs_max).take_while(|run| run.start < offset + ATTEMPT_BYTES_MAX).count();
        (&rest[..n_runs], skip)
    }
}

/// Returns the part of a block table that a span names.
pub(crate) fn of_span<'t>(table: &'t [BlockIdx], span: &KvSpan) -> &'t [BlockIdx] {
    &table[span.blocks.start as usize..span.blocks.end as usize]
}

impl PageRun {
    fn n_slices(&self) -> usize {
        self.some.map_or(1, |some| some.shape.n_parts)
    }

    /// Returns the slices of the borrowed pages, without their first `skip` bytes.
    fn slices(&self, mut skip: usize) -> Slices {
        let mut slices = [0..0, 0..0];
        for (nth, slice) in slices.iter_mut().enumerate().take(self.n_slices()) {
            let whole = self.some.map_or(0..self.bytes, |some| some.slice(nth));
            let skipped = skip.min(whole.len());
            skip -= skipped;
            *slice = whole.start + skipped..whole.end;
        }
        slices
    }
}

impl SomeHeads {
    fn slice(&self, part: usize) -> Range<usize> {
        let start = self.heads.offset(self.shape, part);
        start..start + self.heads.range().len() * self.shape.head_bytes
    }

    fn bytes(&self) -> usize {
        self.shape.n_parts * self.heads.range().len() * self.shape.head_bytes
    }
}

/// Borrowed pages to read from, and the slices in each.
#[derive(Debug)]
pub(crate) struct ReadSlices<'m> {
    pages: Vec<(PageRef<'m>, Slices)>,
}

/// The slices of one run: one slice, or one of K and one of V. An empty range is no slice.
type Slices = [Range<usize>; 2];

fn non_empty(slices: &Slices) -> impl Iterator<Item = &Range<usize>> {
    slices.iter().filter(|slice| !slice.is_empty())
}

impl ReadSlices<'_> {
    pub(crate) fn len(&self) -> usize {
        self.pages.iter().map(|(_, slices)| non_empty(slices).count()).sum()
    }

    pub(crate) fn append_to<'s>(&'s self, all: &mut Vec<IoSlice<'s>>) {
        for (page, slices) in &self.pages {
            all.extend(non_empty(slices).map(|slice| IoSlice::new(&page[slice.clone()])));
        }
    }
}

/// Borrowed pages to write into, and the slices in each.
#[derive(Debug)]
pub(crate) struct WriteSlices<'m> {
    pages: Vec<(PageMut<'m>, Slices)>,
}

impl WriteSlices<'_> {
    pub(crate) fn slices(&mut self) -> Vec<IoSliceMut<'_>> {
        let mut all = Vec::with_capacity(self.pages.len());
        for (page, slices) in &mut self.pages {
            let (mut rest, mut at) = (&mut **page, 0);
            for slice in non_empty(slices) {
                let (now, later) = rest.split_at_mut(slice.end - at);
                all.push(IoSliceMut::new(&mut now[slice.start - at..]));
                (rest, at) = (later, slice.end);
            }
        }
        all
    }
}

#[cfg(test)]
#[path = "runs_tests.rs"]
mod tests;
