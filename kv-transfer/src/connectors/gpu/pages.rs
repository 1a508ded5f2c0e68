//! Hot path. The pages of a span, in the form that a GPU's copy job takes.

use std::ops::Range;

use device::cuda::{PageRuns, SomePages};
use kv_cache::{KvMemory, OnCard};
use types::{BlockIdx, GroupIdx, KvLayout};

use crate::connectors::link::frame::Piece;
use crate::connectors::link::span_out::PagesOut;
use crate::digest::PageShape;
use crate::error::TransferError;
use crate::landing::{OpenLanding, bad_request};
use crate::lanes::{LaneSpan, Lanes};
use crate::reshard::{Heads, LaneHeads};
use crate::runs::of_span;

/// Bytes that a GPU moves in one operation.
const VECTOR_BYTES: usize = 16;

/// Neighbouring layers of a span whose pages have the same shape and are on one GPU: one copy job takes them.
#[derive(Debug)]
pub(in crate::connectors) struct UniformPages {
    /// The part of each page on this side that the span's lane carries.
    here: PageRuns,
    /// The part of each page on the other side that the span's lane carries.
    there: PageRuns,
    /// The pipeline stage of this side that has the layers.
    pub(in crate::connectors) stage: usize,
    /// Region and page of each block, layer by layer.
    pub(in crate::connectors) places: Vec<(u32, u32)>,
    n_blocks: usize,
    /// The partly filled block of the span, and the number of valid bytes in each of its runs.
    partial: Option<(usize, usize)>,
}

/// Checks that a GPU can move this memory's pages. The page copier refuses a sequence with a partly filled
/// last block if a token is not a multiple of 16 bytes, which no real model has.
pub(in crate::connectors) fn check(memory: &KvMemory) -> Result<(), TransferError> {
    let layout = memory.layout();
    for group in layout.group_indices() {
        for layer_pos in 0..layout.group(group).layers.len() as u16 {
            let head_bytes = PageShape::new(layout, group, layer_pos).head_bytes;
            if !head_bytes.is_multiple_of(VECTOR_BYTES) {
                return Err(bad_request("a head's part of a block is not a multiple of 16 bytes"));
            }
        }
    }
    Ok(())
}

/// Returns the GPU that holds one rank's KV of a pipeline stage.
pub(in crate::connectors) fn card_of(
    memory: &KvMemory,
    rank: u16,
    stage: usize,
) -> Result<OnCard<'_>, TransferError> {
    memory.rank(rank).on_card(stage).ok_or_else(|| bad_request("this node's KV is not on a GPU"))
}

/// One side of a lane: the memory with the pages, and the lane's heads in them.
#[derive(Clone, Copy)]
struct Side<'a> {
    memory: &'a KvMemory,
    /// The blocks of the span only.
    blocks: &'a [BlockIdx],
    /// The number of tokens of the whole sequence.
    n_tokens: u32,
    /// Selects a lane's heads on this side and on the other side, in this order.
    heads: fn(LaneHeads) -> (Heads, Heads),
}

/// Returns the parts of this process's pages that a span's lane sends, in runs of layers whose pages have the
/// same shape.
pub(in crate::connectors) fn sent(memory: &KvMemory, pages: PagesOut<'_>) -> Vec<UniformPages> {
    let PagesOut { lanes, piece, blocks, n_tokens, .. } = pages;
    let side = Side { memory, blocks, n_tokens, heads: |heads| (heads.from, heads.to) };
    uniform_pages(side, lanes, piece)
}

/// Returns the parts of this node's pages that a span's lane fills.
pub(in crate::connectors) fn wanted(landing: &OpenLanding, span: &LaneSpan) -> Vec<UniformPages> {
    let (table, n_tokens) =
        (&landing.landing().tables[usize::from(span.group.0)], landing.landing().n_tokens);
    let heads = |heads: LaneHeads| (heads.to, heads.from);
    let side = Side { memory: landing.memory(), blocks: of_span(table, span), n_tokens, heads };
    uniform_pages(side, landing.lanes(), span)
}

/// Groups the layers of a span by GPU and page shape. The two layouts differ in their ranks only, so both sides store
/// one head of one block in the same form.
fn uniform_pages(side: Side<'_>, lanes: &Lanes, span: &LaneSpan) -> Vec<UniformPages> {
    let (layout, n_blocks) = (side.memory.layout(), side.blocks.len());
    let valid = layout.valid_tokens(side.n_tokens, span.blocks.end - 1);
    let is_partial = valid < layout.block_tokens;
    let mut all: Vec<UniformPages> = Vec::new();
    for layer_pos in span.layers.clone() {
        let (stage, region) = side.memory.region_in_stage(span.group, layer_pos);
        let shape = PageShape::new(layout, span.group, layer_pos);
        let layer = layout.group(span.group).layers[usize::from(layer_pos)];
        let (here, there) = (side.heads)(lanes.heads(layer.n_kv_heads, span.lane));
        let (here, there) = (runs(shape, here), runs(shape, there));
        if all.last().is_none_or(|last| (last.here, last.there, last.stage) != (here, there, stage)) {
            let partial = is_partial.then_some((n_blocks - 1, usize::from(valid) * shape.token_bytes));
            all.push(UniformPages { here, there, stage, places: Vec::new(), n_blocks, partial });
        }
        all.last_mut()
            .expect("one was just pushed")
            .places
            .extend(side.blocks.iter().map(|block| (region, block.0)));
    }
    all
}

fn runs(shape: PageShape, heads: Heads) -> PageRuns {
    PageRuns {
        n_parts: shape.n_parts,
        n_heads: heads.range().len(),
        run_bytes: shape.head_bytes,
        first_head: heads.range().start,
        page_heads: usize::from(heads.of),
    }
}

impl UniformPages {
    pub(in crate::connectors) fn some(&self) -> SomePages<'_> {
        let Self { here, places, n_blocks, partial, .. } = self;
        SomePages { places, n_of_layer: *n_blocks, runs: *here, partial: *partial }
    }

    /// Returns the part of each page on the other side.
    pub(in crate::connectors) fn there(&self) -> PageRuns {
        self.there
    }

    /// Returns the number of bytes that the lane carries.
    pub(in crate::connectors) fn bytes(&self) -> usize {
        self.places.len() * self.here.moved_bytes()
    }

    /// Returns the number of pages in each layer.
    pub(in crate::connectors) fn n_blocks(&self) -> usize {
        self.n_blocks
    }

    /// Returns some of the layers, counted from the first one.
    pub(in crate::connectors) fn layers(&self, layers: Range<usize>) -> Self {
        let places = self.places[layers.start * self.n_blocks..layers.end * self.n_blocks].to_vec();
        Self { places, ..*self }
    }

    /// Adds the location of the pages in the memory that this node shares; neighbouring pages are one piece. `offset_of`
    /// takes a region and a page of the GPU. Pages are whole, even if the lane carries a part of them.
    pub(in crate::connectors) fn pieces(&self, offset_of: impl Fn(u32, u32) -> u64, pieces: &mut Vec<Piece>) {
        let bytes = self.here.page_bytes() as u32;
        for (region, page) in &self.places {
            let offset = offset_of(*region, *page);
            match pieces.last_mut() {
                Some(last) if follows(last, offset) && last.bytes.checked_add(bytes).is_some() => {
                    last.bytes += bytes;
                }
                _ => pieces.push(Piece { offset, bytes }),
            }
        }
    }
}

fn follows(last: &Piece, offset: u64) -> bool {
    last.offset + u64::from(last.bytes) == offset
}

/// The location of each page in a peer's shared memory, from the pieces of a frame: the inverse of
/// [`UniformPages::pieces`].
pub(in crate::connectors) struct Offsets<'a> {
    pieces: std::slice::Iter<'a, Piece>,
    rest: Piece,
}

impl<'a> Offsets<'a> {
    pub(in crate::connectors) fn new(pieces: &'a [Piece]) -> Self {
        Self { pieces: pieces.iter(), rest: Piece { offset: 0, bytes: 0 } }
    }

    /// Returns the offset of the next page of `page_bytes`; `None` if no piece holds the whole page.
    pub(in crate::connectors) fn next(&mut self, page_bytes: usize) -> Option<u64> {
        let bytes = u32::try_from(page_bytes).ok()?;
        if self.rest.bytes == 0 {
            self.rest = *self.pieces.next()?;
        }
        let offset = self.rest.offset;
        self.rest.bytes = self.rest.bytes.checked_sub(bytes)?;
        self.rest.offset += u64::from(bytes);
        Some(offset)
    }

    pub(in crate::connectors) fn is_empty(&self) -> bool {
        self.rest.bytes == 0 && self.pieces.as_slice().is_empty()
    }
}

/// Returns the page that holds one bit of a span's lane, counted in the wire's order, and the bit's position
/// in the page.
pub(in crate::connectors) fn page_of_bit(
    layout: &KvLayout,
    lanes: &Lanes,
    table: &[BlockIdx],
    span: &LaneSpan,
    bit: u64,
) -> ((GroupIdx, u16, u32), usize) {
    let of_layer = |layer_pos: u16| {
        let layer = layout.group(span.group).layers[usize::from(layer_pos)];
        let heads = lanes.heads(layer.n_kv_heads, span.lane).from;
        runs(PageShape::new(layout, span.group, layer_pos), heads)
    };
    let whole: usize =
        span.layers.clone().map(|layer| of_layer(layer).moved_bytes() * span.blocks.len()).sum();
    let mut byte = (bit / 8 % whole as u64) as usize;
    for layer_pos in span.layers.clone() {
        let runs = of_layer(layer_pos);
        if byte < runs.moved_bytes() * span.blocks.len() {
            let block = span.blocks.start as usize + byte / runs.moved_bytes();
            let (in_page, part_bytes) = (byte % runs.moved_bytes(), runs.n_heads * runs.run_bytes);
            let (part, in_part) = (in_page / part_bytes, in_page % part_bytes);
            let at = (part * runs.page_heads + runs.first_head) * runs.run_bytes + in_part;
            return ((span.group, layer_pos, table[block].0), at * 8 + (bit % 8) as usize);
        }
        byte -= runs.moved_bytes() * span.blocks.len();
    }
    unreachable!("the bit is one of the span's")
}

#[cfg(test)]
pub(in crate::connectors) mod tests {
    use std::num::NonZero;

    use types::{KvDtype, KvSpan, StageSplit};

    use super::*;
    use crate::runs::Runs;

    /// Compares [`page_of_bit`] with the runs of the other wires, for every byte on each lane.
    #[test]
    fn a_bit_of_a_lane_is_in_one_of_its_heads() {
        for (from_tp, to_tp) in [(1, 1), (1, 2), (2, 1), (2, 2), (4, 2)] {
            let layout =
                |tp| KvLayout::uniform(16, KvDtype::Bf16, 3, 4, 8).over_ranks(tp).expect("it divides");
            let (ours, theirs) = (layout(from_tp), layout(to_tp));
            let lanes = Lanes::between(from_tp, &theirs).expect("they can");
            let page_bytes = PageShape::new(&ours, GroupIdx(0), 0).page_bytes() as u64;
            let table = [5, 6, 2].map(BlockIdx);
            let start_of = |layer: u16, page: u32| (u64::from(layer) * 10 + u64::from(page)) * page_bytes;
            for lane in lanes.all() {
                let span = KvSpan { group: GroupIdx(0), blocks: 0..3, layers: 1..3 };
                let span = LaneSpan { lane: *lane, span };
                let places = Runs::sent(&ours, &lanes, of_span(&table, &span), &span).places(start_of);
                let bytes =
                    places.iter().flat_map(|piece| piece.offset..piece.offset + u64::from(piece.bytes));
                for (nth, byte) in bytes.enumerate() {
                    let bit = nth as u64 * 8 + 3;
                    let ((_, layer, page), at) = page_of_bit(&ours, &lanes, &table, &span, bit);
                    assert_eq!(start_of(layer, page) * 8 + at as u64, byte * 8 + 3, "{lane:?}, byte {nth}");
                }
            }
        }
    }

    /// Allocates host memory for stages with these numbers of layers.
    pub(in crate::connectors) fn memory_of_stages(
        layout: &KvLayout,
        counts: &[u16],
        n_blocks: u32,
    ) -> KvMemory {
        let n_stages = NonZero::new(counts.len() as u16).expect("some");
        let stages = StageSplit { n_stages, layers: counts.to_vec() }.over(counts.iter().sum());
        KvMemory::host_of_stages(layout.clone(), &stages.expect("they add up"), n_blocks).expect("a few KiB")
    }

    /// Returns the pages of a span of full blocks, as a node of one rank has them.
    pub(in crate::connectors) fn pages_here(
        memory: &KvMemory,
        table: &[BlockIdx],
        span: &KvSpan,
    ) -> Vec<UniformPages> {
        let lanes = Lanes::between(1, memory.layout()).expect("they can");
        let (blocks, n_tokens) = (of_span(table, span), 16 * table.len() as u32);
        let span = LaneSpan { lane: lanes.all()[0], span: span.clone() };
        let side = Side { memory, blocks, n_tokens, heads: |heads| (heads.to, heads.from) };
        uniform_pages(side, &lanes, &span)
    }

    /// A copy job has layers of one GPU only, and names their regions there.
    #[test]
    fn pages_of_several_stages_are_on_several_gpus() {
        let layout = KvLayout::uniform(16, KvDtype::Bf16, 5, 2, 8);
        let table = [4, 2].map(BlockIdx);
        for (counts, expected) in [
            (&[5][..], &[(0, vec![1, 2, 3])][..]),
            (&[2, 3], &[(0, vec![1]), (1, vec![0, 1])]),
            (&[2, 1, 2], &[(0, vec![1]), (1, vec![0]), (2, vec![0])]),
        ] {
            let memory = memory_of_stages(&layout, counts, 5);
            let span = KvSpan { group: GroupIdx(0), blocks: 0..2, layers: 1..4 };
            let pages = pages_here(&memory, &table, &span);
            let found: Vec<(usize, Vec<u32>)> = pages
                .iter()
                .map(|pages| {
                    (pages.stage, pages.places.iter().step_by(2).map(|(region, _)| *region).collect())
                })
                .collect();
            assert_eq!(found, expected, "{counts:?}");
            let blocks: Vec<u32> =
                pages.iter().flat_map(|pages| pages.places.iter().map(|(_, page)| *page)).collect();
            assert_eq!(blocks, [4, 2].repeat(3));
        }
    }

    fn piece(offset: u64, bytes: u32) -> Piece {
        Piece { offset, bytes }
    }

    #[test]
    fn pieces_are_cut_into_pages() {
        let pieces = [piece(100, 64), piece(500, 192), piece(900, 32)];
        let mut offsets = Offsets::new(&pieces);
        let seen: Vec<_> = [64, 64, 64, 64, 32].map(|bytes| offsets.next(bytes)).to_vec();
        assert_eq!(seen, [100, 500, 564, 628, 900].map(Some));
        assert!(offsets.is_empty());
    }

    #[test]
    fn a_page_that_lies_in_two_pieces_is_none() {
        let pieces = [piece(100, 96), piece(196, 32)];
        let mut offsets = Offsets::new(&pieces);
        assert_eq!(offsets.next(64), Some(100));
        assert_eq!(offsets.next(64), None);
        assert!(!Offsets::new(&pieces).is_empty());
    }
}
