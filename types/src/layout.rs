//! How KV lies in a node's memory.
//!
//! Memory order is `[layer][block][K|V][kv_head][token][dim]`: one head's part of K and of V is contiguous, so a
//! tensor-parallel shard is two runs, and a run of neighbouring blocks of one layer is one copy.

use std::fmt;

/// Which group of layers a block belongs to. A sequence has one block table per group.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct GroupIdx(pub u16);

/// The number type of KV.
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

/// What a group's layers look at.
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
    /// How many tokens back a token looks, itself included; `None`: to the first one.
    pub fn window(self) -> Option<usize> {
        match self {
            Self::SlidingWindow { tokens } => Some(tokens as usize),
            Self::Full | Self::Latent => None,
        }
    }
}

/// One layer's share of a block.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct LayerShape {
    /// The layer's number in the whole model.
    pub layer: u16,
    pub n_kv_heads: u16,
    pub head_dim: u16,
}

/// Layers that are alike in what they look at. They share block tables.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LayerGroup {
    pub attention: Attention,
    pub layers: Vec<LayerShape>,
}

/// Which part of the model's KV this memory holds.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Shard {
    pub stage: u16,
    pub n_stages: u16,
    pub tp_rank: u16,
    pub tp_size: u16,
}

impl Shard {
    pub const WHOLE: Self = Self { stage: 0, n_stages: 1, tp_rank: 0, tp_size: 1 };
}

/// The shape of one node's KV memory, without its size.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KvLayout {
    pub block_tokens: u16,
    pub dtype: KvDtype,
    pub groups: Vec<LayerGroup>,
    pub shard: Shard,
}

impl KvLayout {
    /// Layers that are all alike: one group of full attention.
    pub fn uniform(block_tokens: u16, dtype: KvDtype, n_layers: u16, n_kv_heads: u16, head_dim: u16) -> Self {
        let layers = (0..n_layers).map(|layer| LayerShape { layer, n_kv_heads, head_dim }).collect();
        let group = LayerGroup { attention: Attention::Full, layers };
        Self { block_tokens, dtype, groups: vec![group], shard: Shard::WHOLE }
    }

    pub fn group(&self, group: GroupIdx) -> &LayerGroup {
        &self.groups[usize::from(group.0)]
    }

    /// The first of a group's blocks that is looked at from this position, and so from any later one.
    pub fn first_block_seen(&self, group: GroupIdx, position: usize) -> usize {
        match self.group(group).attention.window() {
            Some(window) => (position + 1).saturating_sub(window) / usize::from(self.block_tokens),
            None => 0,
        }
    }

    /// Whole blocks of the narrowest window, in which every group sees every token. `None`: nothing bounds the sight.
    pub fn blocks_seen_by_all(&self) -> Option<usize> {
        let windows = self.groups.iter().filter_map(|group| group.attention.window());
        windows.min().map(|window| window / usize::from(self.block_tokens))
    }

    /// Blocks per group that a running sequence holds at most, however long it gets: what others may find of it, a
    /// window, and what is being written. `None`: some group looks at everything.
    pub fn blocks_held_at_most(&self) -> Option<usize> {
        let windows = self.groups.iter().map(|group| group.attention.window());
        let widest = windows.collect::<Option<Vec<usize>>>()?.into_iter().max()?;
        Some(self.blocks_seen_by_all()? + self.blocks_for(widest) + 2)
    }

    pub fn group_indices(&self) -> impl Iterator<Item = GroupIdx> + use<> {
        (0..self.groups.len() as u16).map(GroupIdx)
    }

    /// Bytes of one head's K, or V, in one block.
    pub fn head_bytes(&self, shape: LayerShape) -> usize {
        usize::from(self.block_tokens) * self.token_bytes(shape)
    }

    /// Bytes of one token in one head's K, or V.
    pub fn token_bytes(&self, shape: LayerShape) -> usize {
        usize::from(shape.head_dim) * self.dtype.bytes()
    }

    /// Bytes of one layer's share of a block: K and V of all heads.
    pub fn page_bytes(&self, shape: LayerShape) -> usize {
        let parts = if self.is_latent(shape) { 1 } else { 2 };
        parts * usize::from(shape.n_kv_heads) * self.head_bytes(shape)
    }

    /// Bytes of one block of a group, over all its layers.
    pub fn block_bytes(&self, group: GroupIdx) -> usize {
        self.group(group).layers.iter().map(|shape| self.page_bytes(*shape)).sum()
    }

    /// Blocks of one group that `tokens` tokens need.
    pub fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(usize::from(self.block_tokens))
    }

    fn is_latent(&self, shape: LayerShape) -> bool {
        self.groups.iter().any(|group| group.attention == Attention::Latent && group.layers.contains(&shape))
    }

    /// The parts of a fingerprint that come from the layout. Sharding is left out: both sides may shard as they like.
    pub fn fingerprint_parts(&self) -> Vec<(String, String)> {
        let mut parts = vec![
            ("kv.block_tokens".to_owned(), self.block_tokens.to_string()),
            ("kv.dtype".to_owned(), self.dtype.to_string()),
        ];
        for (idx, group) in self.groups.iter().enumerate() {
            parts.push((format!("kv.group{idx}.attention"), format!("{:?}", group.attention)));
            parts.push((format!("kv.group{idx}.layers"), group.layers.len().to_string()));
            if let Some(first) = group.layers.first() {
                let heads = u32::from(first.n_kv_heads) * u32::from(self.shard.tp_size);
                parts.push((format!("kv.group{idx}.head_dim"), first.head_dim.to_string()));
                parts.push((format!("kv.group{idx}.kv_heads"), heads.to_string()));
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
    fn a_window_has_a_first_block_that_it_sees() {
        let mut layout = KvLayout::uniform(16, KvDtype::Bf16, 1, 1, 4);
        assert_eq!((layout.first_block_seen(GroupIdx(0), 1000), layout.blocks_seen_by_all()), (0, None));
        layout.groups[0].attention = Attention::SlidingWindow { tokens: 21 };
        assert_eq!((layout.blocks_seen_by_all(), layout.blocks_held_at_most()), (Some(1), Some(1 + 2 + 2)));
        // From position 36 on, tokens 16 and later are seen: 16 ..= 36 are 21.
        for (position, expected) in [(0, 0), (20, 0), (35, 0), (36, 1), (51, 1), (52, 2), (1000, 61)] {
            assert_eq!(layout.first_block_seen(GroupIdx(0), position), expected, "{position}");
        }
        let full = LayerGroup { attention: Attention::Full, layers: Vec::new() };
        layout.groups.push(full);
        assert_eq!((layout.blocks_seen_by_all(), layout.blocks_held_at_most()), (Some(1), None));
        assert_eq!(layout.first_block_seen(GroupIdx(1), 1000), 0);
    }
}
