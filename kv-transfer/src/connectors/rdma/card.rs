//! Hot path. Pages on a GPU, which the RDMA device reads and writes without the CPU. The GPU computes their digests.

use chassis::Gate;
use device::cuda::PageCopierSize;
use kv_cache::{KvMemory, OnCard};

use crate::connectors::gpu::copy_thread::{CopyThread, Held};
use crate::connectors::gpu::pages::{self, sent, wanted};
use crate::connectors::link::span_out::SpanOut;
use crate::digest::Digest;
use crate::error::TransferError;
use crate::landing::{OpenLanding, bad_request};
use crate::lanes::LaneSpan;

/// Computes digests of one GPU's pages, for KV that the RDMA device moves.
#[derive(Debug)]
pub(super) struct CardLook {
    memory: KvMemory,
    copy_thread: CopyThread,
}

impl CardLook {
    /// Starts the copy thread of this memory's GPU. Fails if the GPU cannot digest pages of this layout.
    pub(super) fn at(memory: &KvMemory, gate: &Gate) -> Result<Self, TransferError> {
        pages::check(memory)?;
        let copy_thread = CopyThread::start(on_card(memory)?.memory(), PageCopierSize::default(), gate)?;
        Ok(Self { memory: memory.clone(), copy_thread })
    }

    /// Returns the digests of a span that is about to be written. `None` if lanes carry some heads of each
    /// page; then the CPU digests a copy.
    pub(super) async fn sent(&self, span: &SpanOut) -> Result<Option<Vec<Digest>>, TransferError> {
        if span.out.lanes.len() > 1 {
            return Ok(None);
        }
        let mut digests = Vec::new();
        for pages in sent(&self.memory, span.pages()) {
            let room = self.copy_thread.room().await?;
            let copy_job = self.copy_thread.copier().digest(on_card(&self.memory)?.memory(), pages.some());
            digests.extend(room.take(copy_job.map_err(TransferError::device)?, Held::default()).await?);
        }
        Ok(Some(digests.into_iter().map(Digest).collect()))
    }

    /// Returns the digests of a span that a peer's device has written here; `None` as in
    /// [`sent`](Self::sent).
    ///
    /// A landing that has ended has no pages, so it has no digests.
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
        for pages in wanted(landing, span) {
            let room = self.copy_thread.room().await?;
            let look = |_: &KvMemory| self.copy_thread.copier().digest(card, pages.some());
            let Some((copy_job, pending_copy)) = landing.begin_copy(look) else {
                return Ok(Some(Vec::new()));
            };
            digests.extend(
                room.take(copy_job.map_err(TransferError::device)?, Held::pending(pending_copy)).await?,
            );
        }
        Ok(Some(digests.into_iter().map(Digest).collect()))
    }
}

/// Returns the GPU of this memory. Called only for a connector that moves GPU memory.
fn on_card(memory: &KvMemory) -> Result<OnCard<'_>, TransferError> {
    match memory.on_card() {
        Some(card) => Ok(card),
        None if memory.is_on_cards() => Err(bad_request(
            "this node's KV is spread over several GPUs, and this connector moves what lies on one",
        )),
        None => Err(bad_request("this node's KV is not on a GPU")),
    }
}
