//! The parameters of one measurement: the bytes, the places of the blocks, the order of layers, and whether
//! pages are verified.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use types::{KvDtype, KvLayout};

/// The size of one layer's part of a block, if the message is large enough. Llama 3.1 8B has 64 KiB.
const PAGE_BYTES_MAX: u64 = 64 << 10;
const N_LAYERS_MAX: u64 = 32;
const BLOCK_TOKENS: u16 = 16;
/// The bytes of one KV head in one block: K and V of 128 numbers of two bytes per token.
const HEAD_BYTES: u64 = 2 * 128 * 2 * BLOCK_TOKENS as u64;

/// How a sequence's blocks lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Blocks {
    /// All blocks are neighbours, on both sides.
    Contiguous,
    /// The blocks are scattered: no two are neighbours, on either side.
    Scattered,
}

/// How the layers of the KV are passed to the connector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Layers {
    /// The KV is passed layer by layer, as a model computes it.
    Streamed,
    /// The KV of all layers is passed in one call.
    AtOnce,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Digests {
    On,
    Off,
}

/// The kind of memory that holds the KV, on both sides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Memory {
    #[default]
    Host,
    /// The memory of the first and the second GPU of this machine.
    Gpus,
}

/// The parameters of one measurement.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Case {
    pub connector: String,
    pub bytes: u64,
    pub blocks: Blocks,
    pub layers: Layers,
    pub digests: Digests,
    pub streams: u16,
    #[serde(default)]
    pub memory: Memory,
    /// The streams are encrypted, with certificates on both sides.
    #[serde(default)]
    pub tls: bool,
}

impl Case {
    /// The connector's name in tables and plots.
    pub fn wire(&self) -> String {
        if self.tls { format!("{} over TLS", self.connector) } else { self.connector.clone() }
    }
}

/// The layout and number of blocks of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    pub layout: KvLayout,
    pub n_blocks: u32,
}

impl Shape {
    /// Returns the shape of a message of `bytes`; `None` if it is no whole number of pages with at least one
    /// head.
    pub fn of(bytes: u64) -> Option<Self> {
        let page_bytes = bytes.min(PAGE_BYTES_MAX);
        if bytes == 0 || !page_bytes.is_multiple_of(HEAD_BYTES) || !bytes.is_multiple_of(page_bytes) {
            return None;
        }
        let n_pages = bytes / page_bytes;
        let n_layers = n_pages.min(N_LAYERS_MAX);
        if !n_pages.is_multiple_of(n_layers) {
            return None;
        }
        let n_heads = u16::try_from(page_bytes / HEAD_BYTES).ok()?;
        let layout = KvLayout::uniform(BLOCK_TOKENS, KvDtype::Bf16, n_layers as u16, n_heads, 128);
        Some(Self { layout, n_blocks: u32::try_from(n_pages / n_layers).ok()? })
    }

    pub fn n_tokens(&self) -> u32 {
        self.n_blocks * u32::from(BLOCK_TOKENS)
    }
}

#[cfg(test)]
mod tests {
    use types::GroupIdx;

    use super::*;

    #[test]
    fn a_message_is_so_many_layers_and_blocks() {
        for (bytes, n_layers, n_blocks) in [
            (16 << 10, 1, 1),
            (64 << 10, 1, 1),
            (1 << 20, 16, 1),
            (2 << 20, 32, 1),
            (64 << 20, 32, 32),
            (1 << 30, 32, 512),
            (4 << 30, 32, 2048),
        ] {
            let shape = Shape::of(bytes).expect("a whole number of pages");
            assert_eq!((shape.layout.groups[0].layers.len(), shape.n_blocks), (n_layers, n_blocks));
            assert_eq!(shape.layout.block_bytes(GroupIdx(0)) as u64 * u64::from(shape.n_blocks), bytes);
        }
        for bytes in [0, 1, 100 << 10, (2 << 20) + (64 << 10)] {
            assert_eq!(Shape::of(bytes), None, "{bytes}");
        }
    }
}
