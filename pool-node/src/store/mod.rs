//! The blocks of one pool node: stored by hash, delivered to decode nodes, evicted when unused.
//!
//! The node's [`BlockPool`] limits the store to its memory and evicts the least recently used block. A block that is
//! being read or written is leased and cannot be evicted.
//!
//! Suggested reading order: this file, the stages of one sequence ([`sequence`]), the digests that verify it
//! ([`digests`]).

pub mod sequence;
pub mod digests;
pub mod error;

use std::sync::Arc;

use kv_cache::{BlockLease, BlockPool, Holder, Holding};
use kv_transfer::{ConnectorParts, KvConnector, LandRequest};
use types::{BlockCounts, BlockHash, Deadline, Landing, RequestId, Scheme, TransferId};

pub use error::StoreError;
pub use sequence::{Incoming, StoredSequence};

use self::digests::BlockDigests;

/// A store for the KV of sequences, in the blocks of one pool node. Cheap to clone.
#[derive(Clone, Debug)]
pub struct BlockStore {
    inner: Arc<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) parts: ConnectorParts,
    connectors: Vec<Arc<dyn KvConnector>>,
    pool: BlockPool,
    pub(crate) digests: BlockDigests,
}

/// A request for room for the KV of one sequence from a prefill node.
#[derive(Clone, Debug)]
pub struct PutRequest {
    pub transfer: TransferId,
    /// The id of the client's request, shown in the list of blocks.
    pub request: RequestId,
    /// The hashes of all full blocks of the sequence.
    pub hashes: Vec<BlockHash>,
    /// The number of tokens of the whole sequence. Its last block may be partly filled.
    pub n_tokens: u32,
    /// The connector that the prefill node sends on.
    pub connector: Scheme,
    pub deadline: Deadline,
}

impl BlockStore {
    /// Makes a store over the memory of `parts`, which the connectors must use too.
    pub fn new(parts: ConnectorParts, connectors: Vec<Arc<dyn KvConnector>>) -> Self {
        let pool = BlockPool::new(parts.memory.layout(), parts.memory.n_blocks());
        let digests = BlockDigests::new(parts.memory.clone());
        Self { inner: Arc::new(Inner { parts, connectors, pool, digests }) }
    }

    pub fn counts(&self) -> BlockCounts {
        self.inner.pool.counts()
    }

    pub fn pool(&self) -> &BlockPool {
        &self.inner.pool
    }

    /// Returns the number of leading blocks of a sequence that the store holds.
    pub fn n_held(&self, hashes: &[BlockHash]) -> usize {
        let holder = Holder { what: Holding::Landing, request: RequestId::new("look-up") };
        self.inner.adopt(hashes, &holder).n_blocks()
    }

    /// Leases the sequence's blocks that the store has, and reserves room for the rest. Must be called within
    /// a runtime.
    ///
    /// The landing requests the missing blocks, and always the last one, which comes with the handoff. The
    /// room is returned when the [`Incoming`] is dropped, when the transfer fails, or when its deadline
    /// passes.
    pub fn put(&self, request: PutRequest) -> Result<(Landing, Incoming), StoreError> {
        let PutRequest { transfer, request, hashes, n_tokens, connector, deadline } = request;
        let n_blocks = self.inner.n_blocks(n_tokens, &hashes)?;
        let connector = self.inner.connector(&connector)?;
        let holder = Holder { what: Holding::Landing, request };
        let held = self.inner.adopt(&hashes[..hashes.len().min(n_blocks - 1)], &holder);
        let n_held = held.n_blocks();
        let wanted = n_blocks - n_held;
        let fresh = self.inner.pool.reserve(wanted, holder.clone());
        let lease = held.join(fresh.map_err(|source| StoreError::Full { wanted, source })?);
        let held_tokens = n_held as u32 * self.inner.block_tokens();
        let request = LandRequest { transfer, lease, n_tokens, held_tokens, deadline };
        let (landing, arrival) = connector.land(request)?;
        Ok((landing, Incoming::new(Arc::clone(&self.inner), arrival, holder.request, hashes, n_held)))
    }
}

impl Inner {
    pub(crate) fn connector(&self, scheme: &Scheme) -> Result<&Arc<dyn KvConnector>, StoreError> {
        let known = self.connectors.iter().find(|connector| connector.scheme() == *scheme);
        known.ok_or_else(|| StoreError::NoConnector(scheme.clone()))
    }

    pub(crate) fn block_tokens(&self) -> u32 {
        u32::from(self.parts.memory.layout().block_tokens)
    }

    /// Leases the leading blocks that the store has, up to the first corrupt one. A corrupt block is replaced
    /// when it is stored again.
    fn adopt(&self, hashes: &[BlockHash], holder: &Holder) -> BlockLease {
        let lease = self.pool.adopt(hashes, holder.clone());
        let n_sound = self.digests.n_sound(&lease);
        if n_sound == lease.n_blocks() {
            return lease;
        }
        drop(lease);
        self.pool.adopt(&hashes[..n_sound], holder.clone())
    }

    /// Returns the number of blocks of a sequence. Refuses a sequence that does not have one hash per full
    /// block.
    fn n_blocks(&self, n_tokens: u32, hashes: &[BlockHash]) -> Result<usize, StoreError> {
        let full = (n_tokens / self.block_tokens()) as usize;
        if n_tokens == 0 || hashes.len() != full {
            return Err(StoreError::OtherHashes { hashes: hashes.len(), n_tokens });
        }
        Ok(n_tokens.div_ceil(self.block_tokens()) as usize)
    }
}
