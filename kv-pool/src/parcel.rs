//! One sequence's life in the pool: on its way in, then whole and ready to be given out.

use std::ops::Range;
use std::sync::Arc;

use kv_cache::{BlockLease, Holder, Holding, LayerFence};
use kv_transfer::{Arrival, ArrivedKv, KvSender};
use tracing::info;
use types::{BlockHash, Destination, Handoff, KvSpan, Landing, RequestId, TransferId};

use crate::error::PoolError;
use crate::shelf::Inner;

/// Blocks that are looked at before they are sent: few enough for the wire to begin soon.
const LOOK_BLOCKS: u32 = 32;

/// A sequence on its way into the pool. Dropping it gives the put up, and its room back.
#[derive(Debug)]
pub struct Incoming {
    inner: Arc<Inner>,
    arrival: Arrival,
    request: RequestId,
    hashes: Vec<BlockHash>,
    n_held: usize,
}

/// A sequence that is whole: its blocks cannot be evicted, and its first token is known. It may be delivered more than
/// once. Dropping it lets go of the last block, if that is filled in part, and leaves the full ones to be found, or
/// evicted.
#[derive(Debug)]
pub struct Parcel {
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

    /// Waits for the KV, and lets others find it. Dropping the future gives the put up.
    pub async fn stored(self) -> Result<Parcel, PoolError> {
        let Self { inner, arrival, request, hashes, n_held } = self;
        let ArrivedKv { mut lease, handoff, bytes, scheme, .. } = arrival.settle().await?;
        lease.rename(Holder { what: Holding::Outbox, request });
        for ordinal in n_held..lease.n_blocks() {
            inner.kept.note(&lease, ordinal, valid_tokens(&inner, handoff.n_tokens, ordinal));
            if let Some(hash) = hashes.get(ordinal) {
                lease.publish(ordinal, *hash);
            }
            // Reading a block takes tens of microseconds; others want their turn.
            tokio::task::yield_now().await;
        }
        info!(transfer = %handoff.transfer, blocks = lease.n_blocks() - n_held, held = n_held, connector = %scheme, "put");
        Ok(Parcel { inner, lease: Arc::new(lease), handoff, bytes })
    }
}

fn valid_tokens(inner: &Inner, n_tokens: u32, ordinal: usize) -> u16 {
    (n_tokens - ordinal as u32 * inner.block_tokens()).min(inner.block_tokens()) as u16
}

impl Parcel {
    /// Bytes of KV that travelled here for it.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Fills a decode node's landing, and waits until all of it is there and verified. Dropping the future aborts.
    ///
    /// Each block is looked at before it is sent: one that is not what was put fails the delivery, and is not found any
    /// more.
    pub async fn deliver(&self, landing: Landing) -> Result<(), PoolError> {
        let (transfer, wanted) = (landing.transfer, landing.wanted_blocks());
        self.check_landing(&landing)?;
        let connector = self.inner.connector(&landing.wire.scheme)?;
        let mut sender = connector.open(&Destination::Landing(landing)).await?;
        let mut begin = wanted.start;
        while begin < wanted.end {
            let blocks = begin..wanted.end.min(begin + LOOK_BLOCKS);
            begin = blocks.end;
            self.look(blocks.clone()).await?;
            self.send(&mut *sender, blocks).await?;
        }
        Ok(sender.finish(Handoff { transfer, ..self.handoff.clone() }).await?)
    }

    /// Before a byte moves: a block that was found to be spoilt need not be looked at again.
    fn check_landing(&self, landing: &Landing) -> Result<(), PoolError> {
        let stored = self.handoff.n_tokens;
        if landing.n_tokens != stored {
            return Err(PoolError::OtherLength { landing: landing.n_tokens, stored });
        }
        let ordinal = self.inner.kept.n_sound(&self.lease);
        if ordinal < self.lease.n_blocks() { Err(PoolError::Spoilt { ordinal }) } else { Ok(()) }
    }

    /// What is about to be sent is what was put.
    async fn look(&self, blocks: Range<u32>) -> Result<(), PoolError> {
        for ordinal in blocks.map(|ordinal| ordinal as usize) {
            if !self.inner.kept.is_whole(&self.lease, ordinal) {
                return Err(PoolError::Spoilt { ordinal });
            }
            tokio::task::yield_now().await;
        }
        Ok(())
    }

    async fn send(&self, sender: &mut dyn KvSender, blocks: Range<u32>) -> Result<(), PoolError> {
        let layout = self.inner.parts.memory.layout();
        for group in layout.group_indices() {
            let layers = 0..layout.group(group).layers.len() as u16;
            let span = KvSpan { group, blocks: blocks.clone(), layers };
            sender.send(span, Arc::clone(&self.lease), LayerFence::open()).await?;
        }
        Ok(())
    }
}
