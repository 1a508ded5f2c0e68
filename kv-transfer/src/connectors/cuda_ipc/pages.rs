//! Hot path. A span's pages as a card is told of them.

use kernels::cuda::{PageRuns, SomePages};
use kv_cache::{KvMemory, OnCard};
use types::{BlockIdx, GroupIdx, KvLayout, KvSpan, Landing};

use super::on_card;
use crate::connectors::link::frame::Piece;
use crate::digest::PageShape;
use crate::error::TransferError;
use crate::landing::bad_request;

/// A card moves so many bytes at once.
const VECTOR_BYTES: usize = 16;

/// Neighbouring layers of a span whose pages are alike: what one errand takes.
#[derive(Debug)]
pub(in crate::connectors) struct Alike {
    shape: PageShape,
    /// Region and page, layer by layer.
    pub(in crate::connectors) places: Vec<(u32, u32)>,
    n_blocks: usize,
    /// The block of the span that is filled in part, and how many bytes of each of its runs are valid.
    partial: Option<(usize, usize)>,
}

/// Refuses memory whose pages no card can move. Where a token is not a multiple of 16 bytes either, which no real model's
/// is, a sequence whose last block is filled in part is refused by the courier.
pub(in crate::connectors) fn check(memory: &KvMemory) -> Result<(), TransferError> {
    on_card(memory)?;
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

/// All pages of a span, whose blocks `table` has, in runs of layers that are alike.
pub(in crate::connectors) fn alike(
    memory: OnCard<'_>,
    landing: &Landing,
    table: &[BlockIdx],
    span: &KvSpan,
) -> Vec<Alike> {
    let mut all: Vec<Alike> = Vec::new();
    for layer_pos in span.layers.clone() {
        let shape = PageShape::new(&landing.layout, span.group, layer_pos);
        if all.last().is_none_or(|last| last.shape != shape) {
            all.push(Alike::new(shape, landing, span));
        }
        let blocks = &table[span.blocks.start as usize..span.blocks.end as usize];
        let region = memory.region(span.group, layer_pos);
        all.last_mut()
            .expect("one was just pushed")
            .places
            .extend(blocks.iter().map(|block| (region, block.0)));
    }
    all
}

impl Alike {
    fn new(shape: PageShape, landing: &Landing, span: &KvSpan) -> Self {
        let last = span.blocks.end - 1;
        let valid = landing.valid_tokens(last);
        let is_partial = valid < landing.layout.block_tokens;
        let partial = (span.blocks.len() - 1, usize::from(valid) * shape.token_bytes);
        let n_blocks = span.blocks.len();
        Self { shape, places: Vec::new(), n_blocks, partial: is_partial.then_some(partial) }
    }

    pub(in crate::connectors) fn some(&self) -> SomePages<'_> {
        let PageShape { n_parts, n_heads, head_bytes, .. } = self.shape;
        SomePages {
            places: &self.places,
            n_of_layer: self.n_blocks,
            runs: PageRuns { n_parts, n_heads, run_bytes: head_bytes },
            partial: self.partial,
        }
    }

    pub(in crate::connectors) fn page_bytes(&self) -> usize {
        self.shape.page_bytes()
    }

    /// Where the pages lie in what this node shows of its card, neighbours together.
    pub(super) fn pieces(&self, memory: OnCard<'_>, pieces: &mut Vec<Piece>) {
        let bytes = self.page_bytes() as u32;
        for (region, page) in &self.places {
            let offset = memory.memory().offset(*region, *page);
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

/// Where each page lies in what a peer shows, from the pieces of a frame: the inverse of [`Alike::pieces`].
pub(super) struct Offsets<'a> {
    pieces: std::slice::Iter<'a, Piece>,
    rest: Piece,
}

impl<'a> Offsets<'a> {
    pub(super) fn new(pieces: &'a [Piece]) -> Self {
        Self { pieces: pieces.iter(), rest: Piece { offset: 0, bytes: 0 } }
    }

    /// The next page of so many bytes; `None` where the pieces do not have it whole.
    pub(super) fn next(&mut self, page_bytes: usize) -> Option<u64> {
        let bytes = u32::try_from(page_bytes).ok()?;
        if self.rest.bytes == 0 {
            self.rest = *self.pieces.next()?;
        }
        let offset = self.rest.offset;
        self.rest.bytes = self.rest.bytes.checked_sub(bytes)?;
        self.rest.offset += u64::from(bytes);
        Some(offset)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.rest.bytes == 0 && self.pieces.as_slice().is_empty()
    }
}

/// The page that holds one bit of a span, counted in the wire's order, and the bit's place there.
pub(super) fn page_of_bit(
    layout: &KvLayout,
    table: &[BlockIdx],
    span: &KvSpan,
    bit: u64,
) -> ((GroupIdx, u16, u32), usize) {
    let page_bytes = |layer_pos| PageShape::new(layout, span.group, layer_pos).page_bytes();
    let whole: usize = span.layers.clone().map(|layer_pos| page_bytes(layer_pos) * span.blocks.len()).sum();
    let mut byte = (bit / 8 % whole as u64) as usize;
    for layer_pos in span.layers.clone() {
        let of_layer = page_bytes(layer_pos) * span.blocks.len();
        if byte < of_layer {
            let block = span.blocks.start as usize + byte / page_bytes(layer_pos);
            let at = byte % page_bytes(layer_pos) * 8 + (bit % 8) as usize;
            return ((span.group, layer_pos, table[block].0), at);
        }
        byte -= of_layer;
    }
    unreachable!("the bit is one of the span's")
}

#[cfg(test)]
mod tests {
    use super::*;

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
