//! Computes the list of copies from the sender's sharding of a sequence's KV to the receiver's.
//!
//! This file has no memory and no wire. Each side of a link knows its own pages only and uses the [`lanes`];
//! [`Heads`] locates one side's part of a lane in each page. A page of one layer is
//! `[K|V][kv_head][token][dim]`. So one rank's data for another is, in each block, one run for K and one for
//! V. If blocks are neighbours on both sides and all heads go the same way, runs merge into few long ones.
//!
//! | sender → receiver, 8 heads | copies for one layer of a run of blocks |
//! |---|---|
//! | tp 1 → tp 1, tp 4 → tp 4 | one per pair of ranks |
//! | tp 2 → tp 1 | K and V of each block, from each of the two ranks |
//! | tp 1 → tp 2 | K and V of each block, to each of the two ranks |
//! | tp 16 → tp 1 | as tp 8 → tp 1: of two ranks that hold the same head, one sends it |

use std::ops::Range;

use types::BlockIdx;
use types::layout::RANKS_MAX;

/// The distribution of a model over the ranks of one side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sharding {
    /// The number of KV heads of the whole model.
    pub n_heads: u16,
    /// The number of ranks of each stage. It divides the number of heads, or is a multiple of it: then
    /// several ranks hold the same head.
    pub tp_size: u16,
    /// The layers of the model that each pipeline stage holds.
    pub stages: Vec<Range<u16>>,
}

/// The distribution of one layer's heads over the ranks of one side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadDistribution {
    pub n_heads: u16,
    /// The number of ranks, as in [`Sharding`].
    pub tp_size: u16,
}

/// A pair of tensor-parallel ranks: the sender's and the receiver's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lane {
    pub from: u16,
    pub to: u16,
}

/// The heads that one lane carries. They are neighbours on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneHeads {
    pub lane: Lane,
    pub from: Heads,
    pub to: Heads,
}

/// Some neighbouring heads of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    pub first: u16,
    pub n: u16,
    /// The number of heads of the whole page.
    pub of: u16,
}

/// One rank of one side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RankIdx {
    pub stage: u16,
    pub tp_rank: u16,
}

/// The size of one head's share of a page: [`PageShape`](crate::digest::PageShape) without the number of heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadShape {
    /// 2 for K and V, 1 for a latent vector.
    pub n_parts: usize,
    /// Bytes of one head's K or V in one block.
    pub head_bytes: usize,
}

/// One side of a transfer: its sharding and the sequence's block table. A block has the same index on all ranks.
#[derive(Clone, Copy, Debug)]
pub struct Side<'a> {
    pub sharding: &'a Sharding,
    pub table: &'a [BlockIdx],
}

/// Bytes of one layer that go from one rank's region to another's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copy {
    /// The layer's number in the model.
    pub layer: u16,
    pub from: RankIdx,
    pub to: RankIdx,
    /// The offset in the sender's region of this layer.
    pub from_offset: usize,
    /// The offset in the receiver's region of this layer.
    pub to_offset: usize,
    pub bytes: usize,
}

/// The reason why two sides cannot exchange KV.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReshardError {
    #[error("{n_heads} KV heads do not spread over {tp_size} ranks")]
    Uneven { n_heads: u16, tp_size: u16 },
    #[error("the sender has {from} KV heads, the receiver {to}")]
    OtherHeads { from: u16, to: u16 },
    #[error("layers {one} and {other} need different pairs of ranks")]
    LayersDiffer { one: u16, other: u16 },
    #[error("layer {0} is missing on one side")]
    NoSuchLayer(u16),
    #[error("blocks {blocks:?} are not in both tables")]
    NoSuchBlocks { blocks: Range<u32> },
}

/// Returns the copies that move `layers` of `blocks` from one side to the other. Each byte is copied once;
/// copies are in the receiver's order, and neighbouring ones are merged.
///
/// Every rank of the receiver gets all its heads, including those that other ranks also get. If several ranks of the
/// sender hold a head, the receiving ranks use them in turn.
pub fn reshard(
    shape: HeadShape,
    from: Side<'_>,
    to: Side<'_>,
    blocks: Range<u32>,
    layers: Range<u16>,
) -> Result<Vec<Copy>, ReshardError> {
    let lanes = lanes(from.sharding.spread(), to.sharding.spread())?;
    check_tables(from, to, &blocks)?;
    let mut copies = Vec::new();
    for layer in layers {
        let (from_stage, to_stage) = (from.sharding.stage_of(layer)?, to.sharding.stage_of(layer)?);
        for heads in &lanes {
            let from_rank = RankIdx { stage: from_stage, tp_rank: heads.lane.from };
            let to_rank = RankIdx { stage: to_stage, tp_rank: heads.lane.to };
            let way = RankCopy { shape, layer, from: from_rank, to: to_rank, heads: *heads };
            way.copy(&blocks, from.table, to.table, &mut copies);
        }
    }
    Ok(copies)
}

/// Returns all lanes between two sides, in the receiver's order. Each rank of the receiver gets each of its
/// heads from one rank.
pub fn lanes(from: HeadDistribution, to: HeadDistribution) -> Result<Vec<LaneHeads>, ReshardError> {
    from.check()?;
    to.check()?;
    if from.n_heads != to.n_heads {
        return Err(ReshardError::OtherHeads { from: from.n_heads, to: to.n_heads });
    }
    Ok((0..to.tp_size).flat_map(|tp_rank| lanes_to(from, to, tp_rank)).collect())
}

/// Returns the lanes to one rank of the receiver: its heads in order, each from one rank.
fn lanes_to(from: HeadDistribution, to: HeadDistribution, to_rank: u16) -> Vec<LaneHeads> {
    let wanted = to.heads_of(to_rank);
    let mut lanes = Vec::new();
    let mut head = wanted.start;
    while head < wanted.end {
        let holders = from.holders_of(head);
        let lane = Lane { from: holders.start + to_rank % holders.len() as u16, to: to_rank };
        let heads = LaneHeads::between(from, to, lane);
        head += heads.to.n;
        lanes.push(heads);
    }
    lanes
}

fn check_tables(from: Side<'_>, to: Side<'_>, blocks: &Range<u32>) -> Result<(), ReshardError> {
    if blocks.end as usize > from.table.len().min(to.table.len()) {
        return Err(ReshardError::NoSuchBlocks { blocks: blocks.clone() });
    }
    Ok(())
}

// === impl Sharding ===

impl Sharding {
    /// Describes one rank that holds everything.
    pub fn whole(n_heads: u16, n_layers: u16) -> Self {
        Self::tensor_parallel(n_heads, 1, n_layers)
    }

    /// Describes one pipeline stage of `tp_size` ranks.
    pub fn tensor_parallel(n_heads: u16, tp_size: u16, n_layers: u16) -> Self {
        Self { n_heads, tp_size, stages: std::iter::once(0..n_layers).collect() }
    }

    pub fn spread(&self) -> HeadDistribution {
        HeadDistribution { n_heads: self.n_heads, tp_size: self.tp_size }
    }

    fn stage_of(&self, layer: u16) -> Result<u16, ReshardError> {
        let stage = self.stages.iter().position(|layers| layers.contains(&layer));
        stage.map(|stage| stage as u16).ok_or(ReshardError::NoSuchLayer(layer))
    }
}

// === impl HeadDistribution ===

impl HeadDistribution {
    fn check(self) -> Result<(), ReshardError> {
        let Self { n_heads, tp_size } = self;
        let is_even = n_heads > 0
            && (1..=RANKS_MAX).contains(&tp_size)
            && (n_heads.is_multiple_of(tp_size) || tp_size.is_multiple_of(n_heads));
        if is_even { Ok(()) } else { Err(ReshardError::Uneven { n_heads, tp_size }) }
    }

    /// Returns the heads that one rank holds.
    pub fn heads_of(self, tp_rank: u16) -> Range<u16> {
        let per_rank = (self.n_heads / self.tp_size).max(1);
        let first = tp_rank / self.n_holders() * per_rank;
        first..first + per_rank
    }

    /// Returns the ranks that hold a head.
    fn holders_of(self, head: u16) -> Range<u16> {
        let per_rank = (self.n_heads / self.tp_size).max(1);
        let first = head / per_rank * self.n_holders();
        first..first + self.n_holders()
    }

    /// Returns the number of ranks that hold the same head.
    fn n_holders(self) -> u16 {
        (self.tp_size / self.n_heads).max(1)
    }
}

// === impl Lane ===

impl Lane {
    /// The only lane between nodes with one rank each.
    pub const ONLY: Self = Self { from: 0, to: 0 };
}

impl LaneHeads {
    /// Returns the heads that both ends of a lane hold; no heads if the ranks have none in common.
    pub fn between(from: HeadDistribution, to: HeadDistribution, lane: Lane) -> Self {
        let (held, wanted) = (from.heads_of(lane.from), to.heads_of(lane.to));
        let first = held.start.max(wanted.start);
        let n = held.end.min(wanted.end).saturating_sub(first);
        let within = |heads: Range<u16>| Heads { first: first - heads.start, n, of: heads.len() as u16 };
        Self { lane, from: within(held), to: within(wanted) }
    }
}

impl Heads {
    /// Returns whether the lane carries all heads of the page.
    pub fn are_all(self) -> bool {
        self.n == self.of
    }

    pub fn range(self) -> Range<usize> {
        usize::from(self.first)..usize::from(self.first + self.n)
    }

    /// Returns the offset in a page of the heads' K (part 0) or V (part 1).
    pub fn offset(self, shape: HeadShape, part: usize) -> usize {
        (part * usize::from(self.of) + usize::from(self.first)) * shape.head_bytes
    }
}

/// The data of one layer that goes from one rank to another rank.
struct RankCopy {
    shape: HeadShape,
    layer: u16,
    from: RankIdx,
    to: RankIdx,
    heads: LaneHeads,
}

impl RankCopy {
    fn copy(
        &self,
        blocks: &Range<u32>,
        from_table: &[BlockIdx],
        to_table: &[BlockIdx],
        copies: &mut Vec<Copy>,
    ) {
        let Self { shape, layer, from, to, heads } = *self;
        let page_bytes = |heads: Heads| shape.n_parts * usize::from(heads.of) * shape.head_bytes;
        for block in blocks.start as usize..blocks.end as usize {
            for part in 0..shape.n_parts {
                let offset = |place: BlockIdx, heads: Heads| {
                    place.0 as usize * page_bytes(heads) + heads.offset(shape, part)
                };
                let next = Copy {
                    layer,
                    from,
                    to,
                    from_offset: offset(from_table[block], heads.from),
                    to_offset: offset(to_table[block], heads.to),
                    bytes: usize::from(heads.to.n) * shape.head_bytes,
                };
                append(copies, next);
            }
        }
    }
}

/// Adds a copy, or extends the last one by it.
fn append(copies: &mut Vec<Copy>, next: Copy) {
    match copies.last_mut() {
        Some(last) if last.goes_on_with(&next) => last.bytes += next.bytes,
        _ => copies.push(next),
    }
}

impl Copy {
    fn goes_on_with(&self, next: &Self) -> bool {
        (self.layer, self.from, self.to) == (next.layer, next.from, next.to)
            && self.from_offset + self.bytes == next.from_offset
            && self.to_offset + self.bytes == next.to_offset
    }
}

#[cfg(test)]
#[path = "reshard_tests.rs"]
mod tests;
