//! The transfer of KV: the landing that receives it, the spans that are sent, and the handoff that ends it.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::block::BlockIdx;
use crate::ids::{Epoch, Grant, NodeId, TransferId};
use crate::layout::{GroupIdx, KvLayout};
use crate::node::Fingerprint;
use crate::prompt::PromptDigest;
use crate::step::Step;

/// The name of a connector: `tcp`, `shm`, `rdma`, …
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Scheme(Arc<str>);

impl Scheme {
    pub fn new(name: impl Into<Arc<str>>) -> Self {
        Self(name.into())
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The address of one connector of a node. Each connector defines the form of its endpoint.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct WireAddress {
    pub scheme: Scheme,
    pub endpoint: String,
    /// If true, only nodes on the same host can reach the address.
    pub within_host: bool,
}

/// The destination of a sequence's KV, sent to a prefill node.
#[derive(Clone, Debug, PartialEq)]
pub enum Destination {
    /// The KV goes to blocks that a decode node or pool node has reserved.
    Landing(Landing),
    /// The landing is not known yet. The KV stays leased on the prefill node until `Deliver` names this
    /// transfer and a landing, or until the deadline passes.
    Held(TransferId),
}

impl Destination {
    pub fn transfer(&self) -> TransferId {
        match self {
            Self::Landing(landing) => landing.transfer,
            Self::Held(transfer) => *transfer,
        }
    }
}

/// The address of reserved blocks on one node, and the right to fill them.
#[derive(Clone, Debug, PartialEq)]
pub struct Landing {
    pub transfer: TransferId,
    pub node: NodeId,
    pub epoch: Epoch,
    /// The right to fill the landing. If the landing is `bound`, the grant is encrypted with the prompt's
    /// digest.
    pub grant: Grant,
    /// If true, only a sender that knows the prompt can decrypt the grant.
    pub bound: bool,
    pub wire: WireAddress,
    /// The number of tokens whose KV the landing covers: those of the whole prompt.
    pub n_tokens: u32,
    /// The number of leading tokens whose KV the receiver already has; their KV is not sent. A multiple of
    /// the block size.
    pub held_tokens: u32,
    /// The receiver's blocks, one table per layer group, including the blocks it already has.
    pub tables: Vec<Vec<BlockIdx>>,
    pub layout: KvLayout,
    pub fingerprint: Fingerprint,
}

impl Landing {
    /// Encrypts the grant with the prompt's digest, so that this landing refuses KV of any other prompt.
    #[must_use]
    pub fn bound_to(self, prompt: PromptDigest) -> Self {
        Self { grant: self.grant.sealed(prompt.0), bound: true, ..self }
    }

    /// Decrypts the grant with the digest of the prompt whose KV is sent. Another prompt's digest yields a
    /// wrong grant.
    #[must_use]
    pub fn opened_with(self, prompt: PromptDigest) -> Self {
        match self.bound {
            true => Self { grant: self.grant.sealed(prompt.0), bound: false, ..self },
            false => self,
        }
    }

    /// Returns the blocks to send, as indices within the sequence.
    pub fn wanted_blocks(&self) -> Range<u32> {
        let block_tokens = u32::from(self.layout.block_tokens);
        self.held_tokens / block_tokens..self.n_tokens.div_ceil(block_tokens)
    }

    /// Returns the number of pages to send. A page is one layer's part of a block.
    pub fn wanted_pages(&self) -> usize {
        let n_layers: usize = self.layout.groups.iter().map(|group| group.layers.len()).sum();
        self.wanted_blocks().len() * n_layers
    }

    /// Returns the number of valid tokens in block `ordinal` of the sequence; only the last block can be
    /// partly filled.
    pub fn valid_tokens(&self, ordinal: u32) -> u16 {
        self.layout.valid_tokens(self.n_tokens, ordinal)
    }
}

/// A part of a sequence's KV that is sent at once: some layers of some blocks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KvSpan {
    pub group: GroupIdx,
    /// The blocks of the span, as indices within the sequence, not in a pool: sender and receiver use
    /// different tables.
    pub blocks: Range<u32>,
    /// The layers of the span, as indices into the group's list of layers.
    pub layers: Range<u16>,
}

/// The last message of a transfer: all of the sequence's KV is in place. It carries the first token.
#[derive(Clone, Debug, PartialEq)]
pub struct Handoff {
    pub transfer: TransferId,
    /// The number of tokens whose KV is in place, including those that the receiver already had.
    pub n_tokens: u32,
    pub first: Step,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::KvDtype;

    fn landing(n_tokens: u32, held_tokens: u32) -> Landing {
        Landing {
            transfer: TransferId(1),
            node: NodeId::new("d"),
            epoch: Epoch(1),
            grant: Grant::from_bytes([0; 16]),
            bound: false,
            wire: WireAddress { scheme: Scheme::new("tcp"), endpoint: String::new(), within_host: false },
            n_tokens,
            held_tokens,
            tables: vec![],
            layout: KvLayout::uniform(16, KvDtype::F32, 3, 1, 4),
            fingerprint: Fingerprint::default(),
        }
    }

    #[test]
    fn a_bound_grant_opens_with_its_prompt_only() {
        let (one, other) = (PromptDigest([1; 16]), PromptDigest([2; 16]));
        let landing = landing(1, 0);
        let bound = landing.clone().bound_to(one);
        assert_ne!(bound.grant, landing.grant);
        assert_eq!(bound.clone().opened_with(one), landing);
        assert_ne!(bound.opened_with(other).grant, landing.grant);
        assert_eq!(landing.clone().opened_with(other), landing, "of a node that does not bind");
    }

    #[test]
    fn what_is_held_is_not_wanted() {
        for (n_tokens, held, blocks, pages, last_valid) in [
            (1, 0, 0..1, 3, 1),
            (16, 0, 0..1, 3, 16),
            (17, 0, 0..2, 6, 1),
            (40, 16, 1..3, 6, 8),
            (32, 32, 2..2, 0, 16),
        ] {
            let landing = landing(n_tokens, held);
            assert_eq!(landing.wanted_blocks(), blocks);
            assert_eq!(landing.wanted_pages(), pages);
            assert_eq!(landing.valid_tokens((n_tokens - 1) / 16), last_valid);
        }
    }
}
