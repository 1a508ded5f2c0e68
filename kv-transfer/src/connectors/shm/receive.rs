//! Hot path. The receiver's end of a shm link: the sender's stage, and its ranks' pages if they are shared.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use async_trait::async_trait;
use device::PeerMemory;

use super::copy::{SharedPieces, copy_span};
use super::stage::STAGE_BYTES_MAX;
use crate::connectors::gpu::staging::{HostStaging, InSlot, LazyMover, SlotMemory, claim_slot, take_slot};
use crate::connectors::link::frame::{FrameError, KvPlace};
use crate::connectors::link::kv_path::{KvFrame, KvPath, Receipt, wrong_place};
use crate::connectors::link::stream::FrameReader;
use crate::error::TransferError;
use crate::landing::{Claim, OpenLanding};

#[derive(Debug)]
pub(super) struct ShmPath {
    stage: Arc<PeerMemory>,
    /// Copies KV from the stage to GPUs; otherwise the processor does.
    mover: LazyMover,
    /// The sender's pages, one memory per rank; empty if they are not shared.
    pages: Vec<PeerMemory>,
}

impl ShmPath {
    /// Maps the files of a stream's greeting. Returns `None` for all streams but the first, which carry no
    /// files.
    pub(super) fn of(
        files: Vec<OwnedFd>,
        staging: Option<Arc<dyn HostStaging>>,
    ) -> Result<Option<Self>, TransferError> {
        let mut mapped = Vec::new();
        for file in files {
            let memory =
                PeerMemory::map(file).map_err(|source| TransferError::Map { source: Arc::new(source) })?;
            mapped.push(memory);
        }
        let mut mapped = mapped.into_iter();
        let Some(stage) = mapped.next() else { return Ok(None) };
        let stage = Arc::new(stage);
        let staging = staging.filter(|_| stage.bytes() <= STAGE_BYTES_MAX);
        let mover = LazyMover::new(staging, SlotMemory::Peer(Arc::clone(&stage)));
        Ok(Some(Self { stage, mover, pages: mapped.collect() }))
    }
}

#[async_trait]
impl KvPath for ShmPath {
    async fn receive(
        self: Arc<Self>,
        frame: KvFrame,
        landing: Option<Arc<OpenLanding>>,
        _reader: &mut FrameReader,
    ) -> Result<Receipt, TransferError> {
        let KvFrame { span, digests, place, .. } = frame;
        if let (KvPlace::Slot { piece, .. }, Some(landing)) = (&place, &landing)
            && let Some(mover) = self.mover.get().await?
        {
            let (mover, landing, bytes) = (Arc::clone(mover), Arc::clone(landing), piece.bytes as usize);
            if claim_slot(&landing, &span, bytes, &digests)? == Claim::Skip {
                return Ok(Receipt::dropped());
            }
            let from =
                InSlot { slot: 0, offset: usize::try_from(piece.offset).unwrap_or(usize::MAX), guard: None };
            let fetch = async move { take_slot(&*mover, from, &landing, &span, bytes, digests).await };
            return Ok(Receipt::Pending(Box::pin(fetch)));
        }
        let (memory, pieces) = match place {
            KvPlace::Pieces(pieces) => (self.pages.get(usize::from(span.lane.from)), pieces),
            KvPlace::Slot { piece, .. } => (Some(&*self.stage), vec![piece]),
            _ => return Err(wrong_place()),
        };
        let Some(landing) = landing else { return Ok(Receipt::dropped()) };
        let memory = memory.ok_or(FrameError::Unexpected("KV in pages that are not shared"))?;
        let from = SharedPieces { memory, pieces: &pieces };
        copy_span(&landing, &span, &digests.here()?, from).map(Receipt::Done)
    }
}
