//! The lanes of one transfer, and the parts of spans that they carry.
//!
//! A span names layers and blocks of a sequence; its producer need not know about ranks. On the wire a span
//! is split into parts, one for each pair of ranks that have heads in common. Between nodes with equal
//! numbers of ranks a part is whole pages; otherwise it is some heads of each page.
//! See `docs/decisions/0012-ranks-share-outputs.md`.

use std::ops::{Deref, Range};
use std::sync::Arc;

use types::layout::LayerShape;
use types::{KvLayout, KvSpan};

use crate::reshard::{HeadDistribution, Lane, LaneHeads, ReshardError, lanes};

/// The part of a span that one lane carries, from one rank of the sender to one rank of the receiver. Dereferences to
/// the span.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LaneSpan {
    pub lane: Lane,
    pub span: KvSpan,
}

impl Deref for LaneSpan {
    type Target = KvSpan;

    fn deref(&self) -> &KvSpan {
        &self.span
    }
}

/// All lanes between a sender and a receiver. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lanes {
    all: Arc<[Lane]>,
    from_tp: u16,
    to_tp: u16,
}

impl Lanes {
    /// Returns the one lane between nodes that have one rank each.
    pub fn only() -> Self {
        Self { all: [Lane::ONLY].into(), from_tp: 1, to_tp: 1 }
    }

    /// Returns the lanes between `from_tp` ranks and the ranks of `to`. The sender's layout equals `to`
    /// except for its ranks.
    pub fn between(from_tp: u16, to: &KvLayout) -> Result<Self, ReshardError> {
        let to_tp = to.shard.tp_size;
        let mut shapes = to.groups.iter().flat_map(|group| &group.layers);
        let Some(first) = shapes.next() else { return Ok(Self::only()) };
        let all = lanes_of(*first, from_tp, to_tp)?;
        for shape in shapes {
            if shape.n_kv_heads != first.n_kv_heads && lanes_of(*shape, from_tp, to_tp)? != all {
                return Err(ReshardError::LayersDiffer { one: first.layer, other: shape.layer });
            }
        }
        Ok(Self { all: all.into(), from_tp, to_tp })
    }

    /// Returns the sender's number of ranks.
    pub fn from_tp(&self) -> u16 {
        self.from_tp
    }

    /// Returns all lanes, in the order of the receiver's ranks.
    pub fn all(&self) -> &[Lane] {
        &self.all
    }

    pub fn len(&self) -> usize {
        self.all.len()
    }

    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Returns the index of `lane`; `None` if the transfer has no such lane.
    pub fn position(&self, lane: Lane) -> Option<usize> {
        self.all.iter().position(|known| *known == lane)
    }

    /// Returns the positions of the lanes to some neighbouring ranks of the receiver.
    pub fn to_ranks(&self, ranks: &Range<u16>) -> Range<usize> {
        self.all.partition_point(|lane| lane.to < ranks.start)
            ..self.all.partition_point(|lane| lane.to < ranks.end)
    }

    /// Returns the heads of a layer that one lane carries.
    pub fn heads(&self, n_kv_heads: u16, lane: Lane) -> LaneHeads {
        let spread = |tp_size| HeadDistribution { n_heads: n_kv_heads, tp_size };
        LaneHeads::between(spread(self.from_tp), spread(self.to_tp), lane)
    }

    /// Returns the largest number of heads of a layer that one lane carries.
    pub fn widest(&self, n_kv_heads: u16) -> usize {
        let heads = self.all.iter().map(|lane| usize::from(self.heads(n_kv_heads, *lane).to.n));
        heads.max().unwrap_or(0)
    }

    /// Returns whether any page of the receiver gets its heads on several lanes.
    pub fn share_pages(&self) -> bool {
        self.all.windows(2).any(|pair| pair[0].to == pair[1].to)
    }
}

fn lanes_of(shape: LayerShape, from_tp: u16, to_tp: u16) -> Result<Vec<Lane>, ReshardError> {
    let spread = |tp_size| HeadDistribution { n_heads: shape.n_kv_heads, tp_size };
    Ok(lanes(spread(from_tp), spread(to_tp))?.into_iter().map(|heads| heads.lane).collect())
}

#[cfg(test)]
mod tests {
    use types::KvDtype;
    use types::layout::Shard;

    use super::*;
    use crate::reshard::Heads;

    fn between(n_kv_heads: u16, from_tp: u16, to_tp: u16) -> Result<Lanes, ReshardError> {
        let layout = KvLayout::uniform(16, KvDtype::Bf16, 3, n_kv_heads, 8);
        Lanes::between(from_tp, &KvLayout { shard: Shard { tp_size: to_tp, ..layout.shard }, ..layout })
    }

    fn pairs(lanes: &Lanes) -> Vec<(u16, u16)> {
        lanes.all().iter().map(|lane| (lane.from, lane.to)).collect()
    }

    #[test]
    fn lanes_table() {
        for (n_heads, from_tp, to_tp, expected, share) in [
            (8, 1, 1, vec![(0, 0)], false),
            (8, 2, 2, vec![(0, 0), (1, 1)], false),
            (8, 2, 1, vec![(0, 0), (1, 0)], true),
            (8, 1, 2, vec![(0, 0), (0, 1)], false),
            (8, 4, 2, vec![(0, 0), (1, 0), (2, 1), (3, 1)], true),
            (2, 4, 1, vec![(0, 0), (2, 0)], true),
            (2, 1, 4, vec![(0, 0), (0, 1), (0, 2), (0, 3)], false),
        ] {
            let lanes = between(n_heads, from_tp, to_tp).expect("they can");
            assert_eq!(pairs(&lanes), expected, "{n_heads} heads, tp {from_tp} to tp {to_tp}");
            assert_eq!(lanes.share_pages(), share, "{n_heads} heads, tp {from_tp} to tp {to_tp}");
        }
    }

    #[test]
    fn a_lane_s_heads_are_where_they_are_on_each_side() {
        let lanes = between(8, 4, 1).expect("they can");
        let heads = lanes.heads(8, Lane { from: 2, to: 0 });
        assert_eq!(
            (heads.from, heads.to),
            (Heads { first: 0, n: 2, of: 2 }, Heads { first: 4, n: 2, of: 8 })
        );
        assert!(heads.from.are_all() && !heads.to.are_all());
        assert_eq!(lanes.widest(8), 2);
        assert_eq!(lanes.position(Lane { from: 2, to: 0 }), Some(2));
        assert_eq!(lanes.position(Lane { from: 4, to: 0 }), None);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        assert_eq!(between(8, 3, 1), Err(ReshardError::Uneven { n_heads: 8, tp_size: 3 }));
        assert_eq!(between(8, 1, 0), Err(ReshardError::Uneven { n_heads: 8, tp_size: 0 }));
        let mut layout = KvLayout::uniform(16, KvDtype::Bf16, 2, 8, 8);
        layout.groups[0].layers[1].n_kv_heads = 2;
        assert_eq!(
            Lanes::between(2, &layout).map(|lanes| lanes.len()),
            Ok(2),
            "the same ranks have some of both"
        );
        assert_eq!(Lanes::between(4, &layout), Err(ReshardError::LayersDiffer { one: 0, other: 1 }));
    }
}
