//! One pool node's blocks: put, kept, given out, and evicted when nobody reads them.
//!
//! Room is the node's [`BlockPool`]: bounded by its memory, the longest unused evicted first, and never a block that is
//! being read or written, because whoever does so holds a lease.

use std::sync::Arc;

use chassis::spawn_guarded;
use kv_cache::{BlockLease, BlockPool, Holder, Holding, LayerFence};
use kv_transfer::{Arrival, ConnectorParts, KvConnector, LandRequest, Source};
use tracing::info;
use types::{
    BlockCounts, BlockHash, Deadline, Destination, Handoff, KvSpan, Landing, RequestId, Scheme, TransferId,
};

use crate::error::PoolError;
use crate::kept::Kept;

/// See the module. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Shelf {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    parts: ConnectorParts,
    connectors: Vec<Arc<dyn KvConnector>>,
    pool: BlockPool,
    kept: Kept,
}

/// A prefill node has, or will have, the KV of these blocks.
#[derive(Clone, Debug)]
pub struct PutRequest {
    pub transfer: TransferId,
    /// Of a sequence's full blocks, from its first one on.
    pub hashes: Vec<BlockHash>,
    /// On which of the pool's connectors it wants to send.
    pub connector: Scheme,
    pub deadline: Deadline,
}

/// The answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Put {
    /// All of it is here already.
    Held,
    /// The rest may be sent there, layer by layer as it is computed. It can be found once all of it has arrived.
    Landing(Landing),
}

/// A decode node's landing, and what shall be in it.
#[derive(Clone, Debug)]
pub struct Delivery {
    pub hashes: Vec<BlockHash>,
    /// For as many tokens as these blocks hold.
    pub landing: Landing,
    pub handoff: Handoff,
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
        self.inner.adopt(hashes).n_blocks()
    }

    /// Makes room for what is not here yet. Must be called within a runtime.
    ///
    /// The room is given back when the transfer fails, or when its deadline passes.
    pub fn put(&self, request: PutRequest) -> Result<Put, PoolError> {
        let PutRequest { transfer, hashes, connector, deadline } = request;
        let held = self.inner.adopt(&hashes);
        let (n_held, wanted) = (held.n_blocks(), hashes.len() - held.n_blocks());
        if wanted == 0 {
            return Ok(Put::Held);
        }
        let fresh = self.inner.pool.reserve(wanted, holder());
        let lease = held.join(fresh.map_err(|source| PoolError::Full { wanted, source })?);
        let (n_tokens, held_tokens) = (self.inner.n_tokens(hashes.len()), self.inner.n_tokens(n_held));
        let request = LandRequest { transfer, lease, n_tokens, held_tokens, source: Source::Peer, deadline };
        let (landing, arrival) = self.inner.connector(&connector)?.land(request)?;
        let inner = Arc::clone(&self.inner);
        spawn_guarded(&self.inner.parts.gate, "pool put", inner.keep(arrival, hashes, n_held)).detach();
        Ok(Put::Landing(landing))
    }

    /// Fills a decode node's landing. Dropping the future aborts.
    pub async fn deliver(&self, delivery: Delivery) -> Result<(), PoolError> {
        let Delivery { hashes, landing, handoff } = delivery;
        let lease = Arc::new(self.inner.wanted(&hashes, &landing)?);
        self.inner.check(&lease, &hashes, &landing).await?;
        let connector = self.inner.connector(&landing.wire.scheme)?;
        let mut sender = connector.open(&Destination::Landing(landing)).await?;
        let layout = self.inner.parts.memory.layout();
        for group in layout.group_indices() {
            let layers = 0..layout.group(group).layers.len() as u16;
            let span = KvSpan { group, blocks: 0..hashes.len() as u32, layers };
            sender.send(span, Arc::clone(&lease), LayerFence::open()).await?;
        }
        Ok(sender.finish(handoff).await?)
    }
}

impl Inner {
    fn adopt(&self, hashes: &[BlockHash]) -> BlockLease {
        self.pool.adopt(hashes, holder())
    }

    fn connector(&self, scheme: &Scheme) -> Result<&Arc<dyn KvConnector>, PoolError> {
        let known = self.connectors.iter().find(|connector| connector.scheme() == *scheme);
        known.ok_or_else(|| PoolError::NoConnector(scheme.clone()))
    }

    fn n_tokens(&self, n_blocks: usize) -> u32 {
        n_blocks as u32 * u32::from(self.parts.memory.layout().block_tokens)
    }

    /// Waits for KV, and lets others find it.
    async fn keep(self: Arc<Self>, arrival: Arrival, hashes: Vec<BlockHash>, n_held: usize) {
        let transfer = arrival.transfer();
        let kv = match arrival.settle().await {
            Ok(kv) => kv,
            Err(error) => return info!(%transfer, %error, "put failed"),
        };
        for (ordinal, hash) in hashes.iter().enumerate().skip(n_held) {
            self.kept.note(&kv.lease, ordinal, *hash);
            kv.lease.publish(ordinal, *hash);
            // Reading a block takes tens of microseconds; others want their turn.
            tokio::task::yield_now().await;
        }
        info!(%transfer, blocks = hashes.len() - n_held, connector = %kv.scheme, "put");
    }

    /// All blocks of a delivery, or none.
    fn wanted(&self, hashes: &[BlockHash], landing: &Landing) -> Result<BlockLease, PoolError> {
        let blocks = self.n_tokens(hashes.len());
        if landing.n_tokens != blocks {
            return Err(PoolError::OtherLength { landing: landing.n_tokens, blocks });
        }
        let lease = self.adopt(hashes);
        let (have, wanted) = (lease.n_blocks(), hashes.len());
        if have < wanted { Err(PoolError::Missing { have, wanted }) } else { Ok(lease) }
    }

    /// What is about to be sent is what was put.
    async fn check(
        &self,
        lease: &BlockLease,
        hashes: &[BlockHash],
        landing: &Landing,
    ) -> Result<(), PoolError> {
        for ordinal in landing.wanted_blocks() {
            let ordinal = ordinal as usize;
            if !self.kept.is_whole(lease, ordinal, hashes[ordinal]) {
                return Err(PoolError::Spoilt { ordinal });
            }
            tokio::task::yield_now().await;
        }
        Ok(())
    }
}

fn holder() -> Holder {
    Holder { what: Holding::Landing, request: RequestId::new("pool") }
}
