//! Hot path. The receiver's end of a pair: asks for messages in the order of the sender's frames, and scatters them
//! into pages.

use std::sync::Arc;

use async_trait::async_trait;
use tokio::sync::oneshot;
use tracing::trace;
use types::KvSpan;

use super::pair_queue::PairQueue;
use super::pair_queues::PairQueues;
use crate::connectors::gpu::free_slots::LentSlot;
use crate::connectors::gpu::staging::{InSlot, claim_slot, take_slot};
use crate::connectors::link::frame::{FrameError, KvPlace};
use crate::connectors::link::frame_digests::FrameDigests;
use crate::connectors::link::kv_path::{KvFrame, KvPath, Receipt, wrong_place};
use crate::connectors::link::stream::FrameReader;
use crate::error::TransferError;
use crate::landing::{Claim, OpenLanding};
use crate::lanes::LaneSpan;
use crate::reshard::Lane;

/// The receiver's end of one link.
#[derive(Debug)]
pub(super) struct NcclPath(pub(super) PairQueues);

/// A message that was requested from NCCL. If it is dropped, the message is still received, and then
/// discarded.
#[derive(Debug)]
struct PostedMessage {
    pair_queue: Arc<PairQueue>,
    slot: Arc<LentSlot>,
    bytes: usize,
    received: oneshot::Receiver<Result<(), TransferError>>,
}

impl NcclPath {
    /// Requests a message of `bytes` bytes; `number` must be the lane's next one. Waits for room, not for the
    /// message.
    async fn post(&self, lane: Lane, number: u64, bytes: u32) -> Result<PostedMessage, TransferError> {
        let (line, bytes) = (self.0.of(lane)?, bytes as usize);
        if line.number() != number {
            return Err(FrameError::Unexpected("a message number out of order").into());
        }
        let pair_queue = Arc::clone(&line.pair_queue);
        if bytes == 0 || bytes > pair_queue.stage().slot_bytes() {
            return Err(FrameError::Body("the message is empty or longer than a slot").into());
        }
        let slot = Arc::new(pair_queue.slot().await?);
        let received = pair_queue.put(Arc::clone(&slot), bytes, Vec::new()).await?;
        Ok(PostedMessage { pair_queue, slot, bytes, received })
    }
}

#[async_trait]
impl KvPath for NcclPath {
    async fn receive(
        self: Arc<Self>,
        frame: KvFrame,
        landing: Option<Arc<OpenLanding>>,
        _reader: &mut FrameReader,
    ) -> Result<Receipt, TransferError> {
        let KvFrame { span, digests, place: KvPlace::Message { number, bytes }, .. } = frame else {
            return Err(wrong_place());
        };
        let posted = self.post(span.lane, number, bytes).await?;
        let Some(landing) = landing else { return Ok(Receipt::dropped()) };
        let fetch = async move { posted.fetch(&landing, &span, digests).await };
        Ok(Receipt::Pending(Box::pin(fetch)))
    }

    fn n_lanes(&self) -> usize {
        self.0.len()
    }

    fn opened(&self, _landing: &OpenLanding) {
        self.0.expect();
    }
}

impl PostedMessage {
    /// Waits for the message, scatters it into the landing's pages and verifies them. The scatter does not wait for
    /// the digests.
    async fn fetch(
        self,
        landing: &OpenLanding,
        span: &LaneSpan,
        digests: FrameDigests,
    ) -> Result<Vec<KvSpan>, TransferError> {
        let claim = claim_slot(landing, span, self.bytes, &digests)?;
        self.received.await.map_err(|_| TransferError::Closed)??;
        if claim == Claim::Skip {
            return Ok(Vec::new());
        }
        trace!(target: "walk", transfer = %landing.landing().transfer, blocks = ?span.blocks, "NCCL message received");
        let mover = self.pair_queue.stage().mover();
        take_slot(mover, InSlot::of(self.slot.nth), landing, span, self.bytes, digests).await
    }
}
