//! Hot path.
//! A decoder on a GPU. There is one plan for all architectures, which differ only in their
//! [`OptionalTensors`](crate::model::OptionalTensors) and windows.

use device::cuda::{Arena, Buffer, View};
use kernels::cuda::{ComputeCard, KvNumber, KvPages, PrefillSequence, Products};
use kv_cache::OnCard;
use types::GroupIdx;

use super::heads::Heads;
use super::latent::LatentHeads;
use super::plan::{Dims, Sections};
use super::rank_links::RankLinks;
use super::weights::{CudaWeights, Sizes};
use super::workspace::Workspace;

/// A model, and the location of its KV.
#[derive(Debug)]
pub(super) struct Decoder {
    pub(super) weights: CudaWeights,
    /// The memory of the weights.
    pub(super) arena: Arena,
    pub(super) sizes: Sizes,
    pub(super) heads: Heads,
    /// The latent attention; `None`: heads have keys and values of their own.
    pub(super) latent: Option<LatentHeads>,
    pub(super) epsilon: f32,
    /// Cosine and sine of the rotation, for each position.
    pub(super) turns: Buffer<[f32; 2]>,
    /// Where each layer's KV is, one entry for each layer of the stage.
    pub(super) places: Vec<LayerPlace>,
    pub(super) n_blocks: usize,
    pub(super) kv_number: KvNumber,
    /// The tokens of a chunk of attention, if results must not depend on the batch; otherwise `None`.
    pub(super) chunk_tokens: Option<usize>,
}

/// The location of one layer's KV, and the layer's window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LayerPlace {
    pub(super) group: GroupIdx,
    pub(super) layer_pos: u16,
    /// The number of last tokens that a query sees.
    pub(super) window: usize,
}

/// One forward pass of a step.
#[derive(Debug)]
pub(super) struct Pass<'a> {
    pub(super) card: &'a ComputeCard,
    pub(super) products: &'a mut Products,
    pub(super) ranks: &'a mut RankLinks,
    pub(super) space: &'a mut Workspace,
    /// The tokens of the steps in flight, for the ends of several stages; otherwise those that the step before sampled
    /// are in the workspace.
    pub(super) earlier: Option<View<'a, u32>>,
    pub(super) kv: OnCard<'a>,
    pub(super) dims: Dims,
    pub(super) sections: Sections,
    pub(super) sequences: &'a [PrefillSequence],
    /// With latent attention: the number of rows, from the first one on, whose attention is over latents. The other rows are
    /// chunks of prompts, for which keys and values are made of latents.
    pub(super) latent_rows: usize,
}

impl Decoder {
    pub(super) fn n_q_heads(&self) -> usize {
        self.sizes.q_width / self.heads.padded
    }

    pub(super) fn kv_pages(&self) -> KvPages {
        let head_dim = self.heads.padded;
        let n_kv_heads = self.sizes.kv_width / head_dim;
        KvPages { n_kv_heads, head_dim, n_blocks: self.n_blocks, number: self.kv_number }
    }

    pub(super) fn scale(&self) -> f32 {
        self.latent.map_or_else(|| (self.heads.real as f32).sqrt().recip(), |latent| latent.scale)
    }
}
