//! The layout of KV in a node's memory.
//!
//! Memory order is `[layer][block][K|V][kv_head][token][dim]`. One head's K, or V, of a block is contiguous.
//! So a tensor-parallel shard is two contiguous ranges, and neighbouring blocks of one layer are one copy.

use std::fmt;

/// The index of a layer group. A sequence has one block table per group.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct GroupIdx(pub u16);

/// The number format of the values in a KV block.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum KvDtype {
    F32,
    Bf16,
    F16,
    Fp8E4m3,
}

impl KvDtype {
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
            Self::Fp8E4m3 => 1,
        }
    }

    pub fn as_str(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::Fp8E4m3 => "fp8_e4m3",
        }
    }
}

impl fmt::Display for KvDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The kind of attention that a group's layers use.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Attention {
    Full,
    SlidingWindow {
        tokens: u32,
    },
    /// One latent vector per token instead of K and V per head (MLA).
    Latent,
}

impl Attention {
    /// Returns how many tokens a token attends to, itself included; `None` for all tokens from the first one
    /// on.
    pub fn window(self) -> Option<usize> {
        match self {
            Self::SlidingWindow { tokens } => Some(tokens as usize),
            Self::Full | Self::Latent => None,
        }
    }
}

/// The shape of one layer's KV.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct LayerShape {
    /// The index of the layer in the whole model.
    pub layer: u16,
    pub n_kv_heads: u16,
    pub head_dim: u16,
}

/// Layers with the same attention. They share the block tables of a sequence.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LayerGroup {
    pub attention: Attention,
    pub layers: Vec<LayerShape>,
}

/// The largest number of ranks of one node: the KV wire names a rank with one byte.
pub const RANKS_MAX: u16 = 64;

/// The part of the model's KV that a node holds, and the number of ranks over which it is spread.
///
/// Each rank stores its own heads of every page, in its own memory. A block has the same index on all ranks, so code
/// that counts or leases blocks does not depend on the number of ranks.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Shard {
    pub stage: u16,
    pub n_stages: u16,
    pub tp_size: u16,
}

impl Shard {
    pub const WHOLE: Self = Self { stage: 0, n_stages: 1, tp_size: 1 };
}

/// The error of a layout whose KV heads do not spread evenly over the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{n_kv_heads} KV heads do not spread over {tp_size} ranks: the one number must divide the other")]
pub struct UnevenHeads {
    pub n_kv_heads: u16,
    pub tp_size: u16,
}

/// The shape of one node's KV memory, without its size. Head counts are those of the whole model, not of one rank.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KvLayout {
    pub block_tokens: u16,
    pub dtype: KvDtype,
    pub groups: Vec<LayerGroup>,
    pub shard: Shard,
}

impl KvLayout {
    /// Returns a layout with equal layers: one group with full attention.
    pub fn uniform(block_tokens: u16, dtype: KvDtype, n_layers: u16, n_kv_heads: u16, head_dim: u16) -> Self {
        let layers = (0..n_layers).map(|layer| LayerShape { layer, n_kv_heads, head_dim }).collect();
        let group = LayerGroup { attention: Attention::Full, layers };
        Self { block_tokens, dtype, groups: vec![group], shard: Shard::WHOLE }
    }

    /// Spreads the layout over `tp_size` ranks. With fewer heads than ranks, several ranks hold the same head.
    pub fn over_ranks(self, tp_size: u16) -> Result<Self, UnevenHeads> {
        let spread = Self { shard: Shard { tp_size, ..self.shard }, ..self };
        spread.check_ranks().map(|()| spread)
    }

    /// Checks that every layer's heads spread evenly over the ranks.
    pub fn check_ranks(&self) -> Result<(), UnevenHeads> {
        let tp_size = self.shard.tp_size;
        let mut heads = self.groups.iter().flat_map(|group| &group.layers).map(|shape| shape.n_kv_heads);
        let is_uneven = |n: &u16| {
            !(1..=RANKS_MAX).contains(&tp_size) || !(n.is_multiple_of(tp_size) || tp_size.is_multiple_of(*n))
        };
        heads.find(is_uneven).map_or(Ok(()), |n_kv_heads| Err(UnevenHeads { n_kv_heads, tp_size }))
    }

    /// Returns whether two layouts are equal apart from the number of ranks.
    pub fn is_same_but_for_ranks(&self, other: &Self) -> bool {
        let shard = Shard { tp_size: other.shard.tp_size, ..self.shard };
        (self.block_tokens, self.dtype, &self.groups, shard)
            == (other.block_tokens, other.dtype, &other.groups, other.shard)
    }

    pub fn group(&self, group: GroupIdx) -> &LayerGroup {
        &self.groups[usize::from(group.0)]
    }

    /// Returns the index of the group's first block that `position` attends to. Later positions do not attend
    /// to earlier blocks.
    pub fn first_block_seen(&self, group: GroupIdx, position: usize) -> usize {
        match self.group(group).attention.window() {
            Some(window) => (position + 1).saturating_sub(window) / usize::from(self.block_tokens),
            None => 0,
        }
    }

    /// Returns the number of full blocks in the narrowest window. `None` if all groups have full attention.
    pub fn blocks_seen_by_all(&self) -> Option<usize> {
        let windows = self.groups.iter().filter_map(|group| group.attention.window());
        windows.min().map(|window| window / usize::from(self.block_tokens))
    }

    /// Returns how many blocks per group a running sequence holds at most, at any length: the blocks kept for
    /// the prefix cache, those of the widest window, and the ones being written. `None` if a group has full
    /// attention.
    pub fn blocks_held_at_most(&self) -> Option<usize> {
        let windows = self.groups.iter().map(|group| group.attention.window());
        let widest = windows.collect::<Option<Vec<usize>>>()?.into_iter().max()?;
        Some(self.blocks_seen_by_all()? + self.blocks_for(widest) + 2)
    }

    pub fn group_indices(&self) -> impl Iterator<Item = GroupIdx> + use<> {
        (0..self.groups.len() as u16).map(GroupIdx)
    }

    /// Returns the bytes of one head's K, or V, in one block.
    pub fn head_bytes(&self, shape: LayerShape) -> usize {
        usize::from(self.block_tokens) * self.token_bytes(shape)
    }

    /// Returns the bytes of one token in one head's K, or V.
    pub fn token_bytes(&self, shape: LayerShape) -> usize {
        usize::from(shape.head_dim) * self.dtype.bytes()
    }

    /// Returns the number of a layer's KV heads on one rank: at least one, even with fewer heads than ranks.
    pub fn rank_heads(&self, shape: LayerShape) -> u16 {
        shape.n_kv_heads.div_ceil(self.shard.tp_size)
    }

    /// Returns the bytes of one layer's page on one rank: K and V of the rank's heads.
    pub fn rank_page_bytes(&self, shape: LayerShape) -> usize {
        let parts = if self.is_latent(shape) { 1 } else { 2 };
        parts * usize::from(self.rank_heads(shape)) * self.head_bytes(shape)
    }

    /// Returns the bytes of one layer's page, summed over all ranks.
    pub fn page_bytes(&self, shape: LayerShape) -> usize {
        usize::from(self.shard.tp_size) * self.rank_page_bytes(shape)
    }

    /// Returns the bytes of one block of a group, summed over the group's layers.
    pub fn block_bytes(&self, group: GroupIdx) -> usize {
        self.group(group).layers.iter().map(|shape| self.page_bytes(*shape)).sum()
    }

    /// Returns the number of valid tokens in block `ordinal` of a sequence of `n_tokens` tokens; only the last block can
    /// be partly filled.
    pub fn valid_tokens(&self, n_tokens: u32, ordinal: u32) -> u16 {
        let block_tokens = u32::from(self.block_tokens);
        (n_tokens - ordinal * block_tokens).min(block_tokens) as u16
    }

    /// Returns the number of blocks in one group for `tokens` tokens.
    pub fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(usize::from(self.block_tokens))
    }

    /// Returns the number of blocks in all groups together for `tokens` tokens.
    pub fn blocks_of_all_groups(&self, tokens: usize) -> usize {
        self.blocks_for(tokens) * self.groups.len()
    }

    fn is_latent(&self, shape: LayerShape) -> bool {
        self.groups.iter().any(|group| group.attention == Attention::Latent && group.layers.contains(&shape))
    }

    /// Returns the layout's entries of a fingerprint. Sharding is left out, because two nodes may shard
    /// differently.
    pub fn fingerprint_parts(&self) -> Vec<(String, String)> {
        let mut parts = vec![
            ("kv.block_tokens".to_owned(), self.block_tokens.to_string()),
            ("kv.dtype".to_owned(), self.dtype.to_string()),
        ];
        for (idx, group) in self.groups.iter().enumerate() {
            parts.push((format!("kv.group{idx}.attention"), format!("{:?}", group.attention)));
            parts.push((format!("kv.group{idx}.layers"), group.layers.len().to_string()));
            if let Some(first) = group.layers.first() {
                parts.push((format!("kv.group{idx}.head_dim"), first.head_dim.to_string()));
                parts.push((format!("kv.group{idx}.kv_heads"), first.n_kv_heads.to_string()));
            }
        }
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama_3_1_8b_has_64_kib_pages() {
        let layout = KvLayout::uniform(16, KvDtype::Bf16, 32, 8, 128);
        let shape = layout.groups[0].layers[0];
        assert_eq!(layout.page_bytes(shape), 64 << 10);
        assert_eq!(layout.block_bytes(GroupIdx(0)), 2 << 20);
        assert_eq!(layout.blocks_for(8192), 512);
        assert_eq!(layout.blocks_for(0), 0);
        assert_eq!(layout.blocks_for(17), 2);
    }

    #[test]
    fn ranks_share_heads_and_nothing_else_changes() {
        let whole = KvLayout::uniform(16, KvDtype::Bf16, 32, 8, 128);
        let shape = whole.groups[0].layers[0];
        for (tp_size, heads, page_bytes) in
            [(1, 8, 64 << 10), (2, 4, 64 << 10), (8, 1, 64 << 10), (16, 1, 128 << 10)]
        {
            let spread = whole.clone().over_ranks(tp_size).expect("the one divides the other");
            assert_eq!(spread.rank_heads(shape), heads, "tp {tp_size}");
            assert_eq!(spread.page_bytes(shape), page_bytes, "tp {tp_size}");
            assert_eq!(spread.fingerprint_parts(), whole.fingerprint_parts());
            assert!(spread.is_same_but_for_ranks(&whole));
        }
        let error = whole.clone().over_ranks(3).expect_err("8 is no multiple of 3");
        assert_eq!(
            error.to_string(),
            "8 KV heads do not spread over 3 ranks: the one number must divide the other"
        );
        whole.clone().over_ranks(0).expect_err("no rank would hold it");
        whole.clone().over_ranks(128).expect_err("more than there can be");
        assert!(!whole.is_same_but_for_ranks(&KvLayout::uniform(16, KvDtype::Bf16, 32, 4, 128)));
    }

    #[test]
    fn a_window_has_a_first_block_that_it_sees() {
        let mut layout = KvLayout::uniform(16, KvDtype::Bf16, 1, 1, 4);
        assert_eq!((layout.first_block_seen(GroupIdx(0), 1000), layout.blocks_seen_by_all()), (0, None));
        layout.groups[0].attention = Attention::SlidingWindow { tokens: 21 };
        assert_eq!((layout.blocks_seen_by_all(), layout.blocks_held_at_most()), (Some(1), Some(1 + 2 + 2)));
        // Position 36 attends to 21 tokens, 16 to 36, so its first block is block 1.
        for (position, expected) in [(0, 0), (20, 0), (35, 0), (36, 1), (51, 1), (52, 2), (1000, 61)] {
            assert_eq!(layout.first_block_seen(GroupIdx(0), position), expected, "{position}");
        }
        let full = LayerGroup { attention: Attention::Full, layers: Vec::new() };
        layout.groups.push(full);
        assert_eq!((layout.blocks_seen_by_all(), layout.blocks_held_at_most()), (Some(1), None));
        assert_eq!(layout.first_block_seen(GroupIdx(1), 1000), 0);
    }
}
