//! Hot path. Pages on a card, which the device reads and writes past the processor: the card itself makes their digests.

use chassis::Gate;
use device::cuda::PageCopierSize;
use kv_cache::{KvMemory, OnCard};

use crate::connectors::gpu::copy_thread::CopyThread;
use crate::connectors::gpu::pages::{self, sent, wanted};
use crate::connectors::link::span_out::SpanOut;
use crate::digest::Digest;
use crate::error::TransferError;
use crate::landing::{OpenLanding, bad_request};
use crate::lanes::LaneSpan;

/// Looks at one card's pages.
#[derive(Debug)]
pub(super) struct CardLook {
    memory: KvMemory,
    copy_thread: CopyThread,
}

impl CardLook {
    /// Refused where pages are not such as a card can digest.
    pub(super) fn at(memory: &KvMemory, gate: &Gate) -> Result<Self, TransferError> {
        pages::check(memory)?;
        let copy_thread = CopyThread::start(memory, 0, PageCopierSize::default(), gate)?;
        Ok(Self { memory: memory.clone(), copy_thread })
    }

    /// What the pages of a span are that is about to be written; `None` where only some heads of each page are meant,
    /// which the processor digests in a copy.
    pub(super) async fn sent(&self, span: &SpanOut) -> Result<Option<Vec<Digest>>, TransferError> {
        if span.out.lanes.len() > 1 {
            return Ok(None);
        }
        let mut digests = Vec::new();
        for pages in sent(&self.memory, span)? {
            let room = self.copy_thread.room().await?;
            let copy_job = self.copy_thread.copier().digest(on_card(&self.memory)?.memory(), pages.some());
            digests.extend(room.take(copy_job.map_err(TransferError::device)?, None).await?);
        }
        Ok(Some(digests.into_iter().map(Digest).collect()))
    }

    /// What the pages of a span are that a peer's device has written here; `None` as above.
    ///
    /// A landing that has ended has no pages any more: then there are no digests.
    pub(super) async fn written(
        &self,
        landing: &OpenLanding,
        span: &LaneSpan,
    ) -> Result<Option<Vec<Digest>>, TransferError> {
        let card = on_card(&self.memory)?.memory();
        card.settle_writes().map_err(TransferError::device)?;
        if landing.lanes().len() > 1 {
            return Ok(None);
        }
        let mut digests = Vec::new();
        for pages in wanted(landing, span)? {
            let room = self.copy_thread.room().await?;
            let look = |_: &KvMemory| self.copy_thread.copier().digest(card, pages.some());
            let Some((copy_job, pending_copy)) = landing.begin_copy(look) else {
                return Ok(Some(Vec::new()));
            };
            digests.extend(room.take(copy_job.map_err(TransferError::device)?, Some(pending_copy)).await?);
        }
        Ok(Some(digests.into_iter().map(Digest).collect()))
    }
}

/// The card's side of memory that lies on one. A connector that moves no other is not made without.
fn on_card(memory: &KvMemory) -> Result<OnCard<'_>, TransferError> {
    match memory.on_card() {
        Some(card) => Ok(card),
        None if memory.is_on_cards() => Err(bad_request(
            "this node's KV is spread over several GPUs, and this connector moves what lies on one",
        )),
        None => Err(bad_request("this node's KV is not on a GPU")),
    }
}
