//! One pool node's blocks: put, kept, given out, and evicted when nobody reads them.
//!
//! Room is the node's [`BlockPool`]: bounded by its memory, the longest unused evicted first, and never a block that is
//! being read or written, because whoever does so holds a lease.

use std::sync::Arc;

use kv_cache::{BlockLease, BlockPool, Holder, Holding};
use kv_transfer::{ConnectorParts, KvConnector, LandRequest, Source};
use types::{BlockCounts, BlockHash, Deadline, Landing, RequestId, Scheme, TransferId};

use crate::error::PoolError;
use crate::kept::Kept;
use crate::parcel::Incoming;

/// See the module. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Shelf {
    inner: Arc<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) parts: ConnectorParts,
    connectors: Vec<Arc<dyn KvConnector>>,
    pool: BlockPool,
    pub(crate) kept: Kept,
}

/// A prefill node has, or will have, the KV of a sequence.
#[derive(Clone, Debug)]
pub struct PutRequest {
    pub transfer: TransferId,
    /// On whose behalf: for the ledger.
    pub request: RequestId,
    /// Of the sequence's full blocks, all of them.
    pub hashes: Vec<BlockHash>,
    /// Of the whole sequence: its last block may be filled in part.
    pub n_tokens: u32,
    /// On which of the pool's connectors it is sent.
    pub connector: Scheme,
    pub deadline: Deadline,
}

impl Shelf {
    /// Keeps blocks in the memory of `parts`, which the connectors were built over.
    pub fn new(parts: ConnectorParts, connectors: Vec<Arc<dyn KvConnector>>) -> Self {
        let pool = BlockPool::new(parts.memory.layout(), parts.memory.n_blocks());
        let kept = Kept::new(parts.memory.clone());
        Self { inner: Arc::new(Inner { parts, connectors, pool, kept }) }
    }

    pub fn counts(&self) -> BlockCounts {
        self.inner.pool.counts()
    }

    pub fn pool(&self) -> &BlockPool {
        &self.inner.pool
    }

    /// How many blocks of a sequence are here, from its first one on.
    pub fn n_held(&self, hashes: &[BlockHash]) -> usize {
        let holder = Holder { what: Holding::Landing, request: RequestId::new("look-up") };
        self.inner.adopt(hashes, &holder).n_blocks()
    }

    /// Makes room for what is not here yet, and keeps from being evicted what is. Must be called within a runtime.
    ///
    /// The landing says what is wanted. That is the last block at least, which comes with the handoff: there is
    /// something to wait for even where all else is here already. All of it is given back with the
    /// [`Incoming`], when the transfer fails, or when its deadline passes.
    pub fn put(&self, request: PutRequest) -> Result<(Landing, Incoming), PoolError> {
        let PutRequest { transfer, request, hashes, n_tokens, connector, deadline } = request;
        let n_blocks = self.inner.n_blocks(n_tokens, &hashes)?;
        let connector = self.inner.connector(&connector)?;
        let holder = Holder { what: Holding::Landing, request };
        let held = self.inner.adopt(&hashes[..hashes.len().min(n_blocks - 1)], &holder);
        let n_held = held.n_blocks();
        let wanted = n_blocks - n_held;
        let fresh = self.inner.pool.reserve(wanted, holder.clone());
        let lease = held.join(fresh.map_err(|source| PoolError::Full { wanted, source })?);
        let held_tokens = n_held as u32 * self.inner.block_tokens();
        let request = LandRequest { transfer, lease, n_tokens, held_tokens, source: Source::Peer, deadline };
        let (landing, arrival) = connector.land(request)?;
        Ok((landing, Incoming::new(Arc::clone(&self.inner), arrival, holder.request, hashes, n_held)))
    }
}

impl Inner {
    pub(crate) fn connector(&self, scheme: &Scheme) -> Result<&Arc<dyn KvConnector>, PoolError> {
        let known = self.connectors.iter().find(|connector| connector.scheme() == *scheme);
        known.ok_or_else(|| PoolError::NoConnector(scheme.clone()))
    }

    pub(crate) fn block_tokens(&self) -> u32 {
        u32::from(self.parts.memory.layout().block_tokens)
    }

    /// Leases what is here of a sequence, up to the first block that was found to be spoilt: one that is put anew
    /// takes its place.
    fn adopt(&self, hashes: &[BlockHash], holder: &Holder) -> BlockLease {
        let lease = self.pool.adopt(hashes, holder.clone());
        let n_sound = self.kept.n_sound(&lease);
        if n_sound == lease.n_blocks() {
            return lease;
        }
        drop(lease);
        self.pool.adopt(&hashes[..n_sound], holder.clone())
    }

    /// How many blocks a sequence has. Each of its full ones must have a hash.
    fn n_blocks(&self, n_tokens: u32, hashes: &[BlockHash]) -> Result<usize, PoolError> {
        let full = (n_tokens / self.block_tokens()) as usize;
        if n_tokens == 0 || hashes.len() != full {
            return Err(PoolError::OtherHashes { hashes: hashes.len(), n_tokens });
        }
        Ok(n_tokens.div_ceil(self.block_tokens()) as usize)
    }
}
