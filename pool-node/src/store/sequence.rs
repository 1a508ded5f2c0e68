//! One sequence in the store: incoming at first, then complete and ready for delivery.

use std::ops::Range;
use std::sync::Arc;

use kv_cache::{BlockLease, Holder, Holding, LayerFence};
use kv_transfer::{Arrival, ArrivedKv, KvSender};
use tracing::info;
use types::{BlockHash, Destination, Handoff, KvSpan, Landing, RequestId, TransferId};

use super::Inner;
use super::error::StoreError;

/// The number of blocks that are verified together before they are sent. The first batch is sent before the
/// rest is verified.
const VERIFY_BLOCKS: u32 = 32;

/// A sequence whose KV is arriving. Dropping it ends the transfer and returns the room.
#[derive(Debug)]
pub struct Incoming {
    inner: Arc<Inner>,
    arrival: Arrival,
    request: RequestId,
    hashes: Vec<BlockHash>,
    n_held: usize,
}

/// A complete sequence with its first token. Its blocks cannot be evicted, and it may be delivered more than
/// once. Dropping it frees a partly filled last block and leaves the full blocks in the cache.
#[derive(Debug)]
pub struct StoredSequence {
    inner: Arc<Inner>,
    lease: Arc<BlockLease>,
    handoff: Handoff,
    bytes: u64,
}

impl Incoming {
    pub(crate) fn new(
        inner: Arc<Inner>,
        arrival: Arrival,
        request: RequestId,
        hashes: Vec<BlockHash>,
        n_held: usize,
    ) -> Self {
        Self { inner, arrival, request, hashes, n_held }
    }

    pub fn transfer(&self) -> TransferId {
        self.arrival.transfer()
    }

    /// Waits until all KV has arrived, and makes the full blocks available to later prompts. Dropping the
    /// future ends the transfer.
    pub async fn stored(self) -> Result<StoredSequence, StoreError> {
        let Self { inner, arrival, request, hashes, n_held } = self;
        let ArrivedKv { mut lease, handoff, bytes, scheme, .. } = arrival.settle().await?;
        lease.rename(Holder { what: Holding::Outbox, request });
        for ordinal in n_held..lease.n_blocks() {
            inner.digests.note(&lease, ordinal, valid_tokens(&inner, handoff.n_tokens, ordinal));
            if let Some(hash) = hashes.get(ordinal) {
                lease.publish(ordinal, *hash);
            }
            // Digesting a block takes tens of microseconds, so the task yields to others after each.
            tokio::task::yield_now().await;
        }
        info!(transfer = %handoff.transfer, blocks = lease.n_blocks() - n_held, held = n_held, connector = %scheme, "sequence stored on the pool node");
        Ok(StoredSequence { inner, lease: Arc::new(lease), handoff, bytes })
    }
}

fn valid_tokens(inner: &Inner, n_tokens: u32, ordinal: usize) -> u16 {
    (n_tokens - ordinal as u32 * inner.block_tokens()).min(inner.block_tokens()) as u16
}

impl StoredSequence {
    /// Returns the bytes of KV that were received for this sequence.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Fills a decode node's landing and waits until the KV has arrived and is verified. Dropping the future
    /// aborts the delivery.
    ///
    /// Each block is verified before it is sent. A block that differs from the KV that was stored fails the
    /// delivery, and is no longer served.
    pub async fn deliver(&self, landing: Landing) -> Result<(), StoreError> {
        let (transfer, wanted) = (landing.transfer, landing.wanted_blocks());
        self.check_landing(&landing)?;
        let connector = self.inner.connector(&landing.wire.scheme)?;
        let mut sender = connector.open(&Destination::Landing(landing)).await?;
        let mut begin = wanted.start;
        while begin < wanted.end {
            let blocks = begin..wanted.end.min(begin + VERIFY_BLOCKS);
            begin = blocks.end;
            self.verify(blocks.clone()).await?;
            self.send(&mut *sender, blocks).await?;
        }
        Ok(sender.finish(Handoff { transfer, ..self.handoff.clone() }).await?)
    }

    /// Refuses a landing with another number of tokens, and a sequence with a corrupt block, before any byte
    /// is sent.
    fn check_landing(&self, landing: &Landing) -> Result<(), StoreError> {
        let stored = self.handoff.n_tokens;
        if landing.n_tokens != stored {
            return Err(StoreError::OtherLength { landing: landing.n_tokens, stored });
        }
        let ordinal = self.inner.digests.n_sound(&self.lease);
        if ordinal < self.lease.n_blocks() { Err(StoreError::Spoilt { ordinal }) } else { Ok(()) }
    }

    /// Checks that these blocks still contain the KV that was stored.
    async fn verify(&self, blocks: Range<u32>) -> Result<(), StoreError> {
        for ordinal in blocks.map(|ordinal| ordinal as usize) {
            if !self.inner.digests.is_whole(&self.lease, ordinal) {
                return Err(StoreError::Spoilt { ordinal });
            }
            tokio::task::yield_now().await;
        }
        Ok(())
    }

    async fn send(&self, sender: &mut dyn KvSender, blocks: Range<u32>) -> Result<(), StoreError> {
        let layout = self.inner.parts.memory.layout();
        for group in layout.group_indices() {
            let layers = 0..layout.group(group).layers.len() as u16;
            let span = KvSpan { group, blocks: blocks.clone(), layers };
            sender.send(span, Arc::clone(&self.lease), LayerFence::open()).await?;
        }
        Ok(())
    }
}
