//! The layout of one layer's cells in a page of one rank.

use std::ops::Range;

use types::layout::{Attention, LayerShape};
use types::{GroupIdx, KvLayout};

use super::kv::CellKey;

/// One rank's share of one layer of the model, and the shape of its pages: `[K|V][kv_head][token][dim]`.
#[derive(Clone, Debug)]
pub(super) struct Layer {
    /// The layer's number in the model.
    pub(super) number: u16,
    pub(super) rank: u16,
    pub(super) group: GroupIdx,
    /// The layer's position in its group.
    pub(super) pos: u16,
    block_tokens: usize,
    token_bytes: usize,
    /// The keys of a token's cells, one for each head and part, in the page's order.
    keys: Vec<CellKey>,
}

impl Layer {
    /// Returns all layers in the order of computation, rank by rank within each layer.
    pub(super) fn all(layout: &KvLayout) -> Vec<Self> {
        let mut layers = Vec::new();
        for group in layout.group_indices() {
            for (shape, pos) in layout.group(group).layers.iter().zip(0u16..) {
                let of_rank = |rank| Self::new(layout, group, pos, rank, *shape);
                layers.extend((0..layout.shard.tp_size).map(of_rank));
            }
        }
        layers.sort_by_key(|layer| (layer.number, layer.rank));
        layers
    }

    fn new(layout: &KvLayout, group: GroupIdx, pos: u16, rank: u16, shape: LayerShape) -> Self {
        let n_parts = if layout.group(group).attention == Attention::Latent { 1 } else { 2 };
        let n_heads = usize::from(layout.rank_heads(shape));
        // The key has the head's number in the model: with fewer heads than ranks, neighbouring ranks hold
        // the same head.
        let first = usize::from(rank) * usize::from(shape.n_kv_heads) / usize::from(layout.shard.tp_size);
        let key = |nth: usize| CellKey::new(shape.layer, nth / n_heads, first + nth % n_heads);
        Self {
            number: shape.layer,
            rank,
            group,
            pos,
            block_tokens: usize::from(layout.block_tokens),
            token_bytes: layout.token_bytes(shape),
            keys: (0..n_parts * n_heads).map(key).collect(),
        }
    }

    /// Returns the cells of one token of a block, each with its byte range in the page.
    pub(super) fn cells(&self, token_in_block: usize) -> impl Iterator<Item = (CellKey, Range<usize>)> + '_ {
        let head_bytes = self.block_tokens * self.token_bytes;
        let first = token_in_block * self.token_bytes;
        self.keys.iter().enumerate().map(move |(nth, key)| {
            let start = nth * head_bytes + first;
            (*key, start..start + self.token_bytes)
        })
    }

    /// Returns the first cell of a token, from which its link is read.
    pub(super) fn first_cell(&self, token_in_block: usize) -> (CellKey, Range<usize>) {
        let start = token_in_block * self.token_bytes;
        (self.keys[0], start..start + self.token_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use types::KvDtype;

    /// Several ranks together write the same cells as one rank, at other positions.
    #[test]
    fn ranks_have_their_heads_and_no_others() {
        let whole = KvLayout::uniform(4, KvDtype::F32, 1, 2, 4);
        let heads = |tp_size| -> Vec<Vec<CellKey>> {
            let spread = whole.clone().over_ranks(tp_size).expect("two heads do");
            Layer::all(&spread).iter().map(|layer| layer.keys.clone()).collect()
        };
        let key = |part, head| CellKey::new(0, part, head);
        assert_eq!(heads(1), [[key(0, 0), key(0, 1), key(1, 0), key(1, 1)]]);
        assert_eq!(heads(2), [[key(0, 0), key(1, 0)], [key(0, 1), key(1, 1)]]);
        let (first, second) = ([key(0, 0), key(1, 0)], [key(0, 1), key(1, 1)]);
        assert_eq!(heads(4), [first, first, second, second]);
    }

    #[test]
    fn cells_cover_a_page_once() {
        let layout = KvLayout::uniform(4, KvDtype::F32, 3, 2, 4);
        let layers = Layer::all(&layout);
        assert_eq!(layers.iter().map(|layer| layer.number).collect::<Vec<_>>(), [0, 1, 2]);
        let mut covered: Vec<Range<usize>> = Vec::new();
        for token in 0..4 {
            covered.extend(layers[1].cells(token).map(|(_, bytes)| bytes));
        }
        covered.sort_by_key(|bytes| bytes.start);
        assert_eq!(covered.first().map(|bytes| bytes.start), Some(0));
        assert_eq!(
            covered.last().map(|bytes| bytes.end),
            Some(layout.page_bytes(layout.groups[0].layers[0]))
        );
        assert!(covered.windows(2).all(|pair| pair[0].end == pair[1].start));
        assert_eq!(layers[1].first_cell(2), layers[1].cells(2).next().expect("a layer has cells"));
    }
}
