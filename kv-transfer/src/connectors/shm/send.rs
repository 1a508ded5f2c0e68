//! Hot path. The sender: shares its memory with the receiver, and sends the place of each frame's KV.

use std::io;
use std::sync::Arc;

use async_trait::async_trait;
use chassis::identity::link;
use chassis::{Stream, World};
use kv_cache::KvMemory;

use super::SCHEME;
use super::accept;
use super::stage::Stage;
use crate::connector_parts::ConnectorParts;
use crate::connectors::gpu::slot_set::SlotSet;
use crate::connectors::gpu::staging::{HostStaging, InSlot, LazyMover, SlotMemory};
use crate::connectors::link::frame::{Body, Frame, FrameError, KvPlace, Piece};
use crate::connectors::link::send_path::KvSendPath;
use crate::connectors::link::span_out::{SpanOut, copy_out, corrupt_first};
use crate::connectors::link::stream::{FrameWriter, within};
use crate::digest::Digest;
use crate::error::TransferError;
use crate::faults::{FaultKind, flip};
use crate::lanes::LaneSpan;
use crate::runs::Runs;

/// The sender's end of one link.
#[derive(Debug)]
pub(super) struct ShmSendPath {
    world: World,
    memory: KvMemory,
    /// Whether the receiver reads the pages themselves, and not copies in the stage.
    in_place: bool,
    stage: Stage,
    /// Copies KV from GPUs into the stage; otherwise the processor does.
    mover: LazyMover,
}

impl ShmSendPath {
    /// Makes a send path that shares the pages, if the system lets other processes map them.
    pub(super) fn in_place(parts: &ConnectorParts) -> Result<Arc<dyn KvSendPath>, TransferError> {
        let in_place = parts.memory.has_files();
        Ok(Arc::new(Self { in_place, ..Self::copying(parts, None)? }))
    }

    /// Makes a send path that shares copies only. GPUs make them if there is a `staging`.
    pub(super) fn staged(
        parts: &ConnectorParts,
        staging: Option<Arc<dyn HostStaging>>,
    ) -> Result<Arc<dyn KvSendPath>, TransferError> {
        Ok(Arc::new(Self::copying(parts, staging)?))
    }

    fn copying(parts: &ConnectorParts, staging: Option<Arc<dyn HostStaging>>) -> Result<Self, TransferError> {
        let stage = Stage::new(SlotSet::of(SCHEME, parts)?)?;
        let mover = LazyMover::new(staging, SlotMemory::Own(Arc::clone(stage.memory())));
        Ok(Self { world: parts.world.clone(), memory: parts.memory.clone(), in_place: false, stage, mover })
    }
}

#[async_trait]
impl KvSendPath for ShmSendPath {
    /// Connects stream number `stream`. The first stream also passes file descriptors: the staging memory's and, if the
    /// receiver reads pages in place, those of the KV pages.
    async fn connect(&self, endpoint: &str, stream: u16) -> io::Result<Stream> {
        let n_shown = if self.in_place { self.memory.n_ranks() } else { 0 };
        let pages = (0..n_shown).filter_map(|tp_rank| self.memory.rank(tp_rank).file());
        let files: Vec<_> = std::iter::once(self.stage.file()).chain(pages).collect();
        let shown = if stream == 0 { &files[..] } else { &[] };
        link::prove(&self.world, accept::connect(endpoint, shown).await?).await
    }

    async fn write_span(
        &self,
        writer: &mut FrameWriter,
        parts: &ConnectorParts,
        span: SpanOut,
    ) -> Result<(), TransferError> {
        if span.out.is_over() {
            return Ok(());
        }
        let runs = span.runs(parts);
        let pointing = OutgoingFrame { shown: self, parts, span: &span, runs, has_wrong_digest: false };
        match parts.faults.next(pointing.runs.bytes()) {
            None => writer.write(&pointing.frame().await?).await,
            Some(fault) => pointing.write_with(fault, writer).await,
        }
    }

    fn taken(&self, slot: u16) -> Result<(), FrameError> {
        self.stage.taken(slot)
    }
}

/// One frame that is about to be sent.
struct OutgoingFrame<'a> {
    shown: &'a ShmSendPath,
    parts: &'a ConnectorParts,
    span: &'a SpanOut,
    runs: Runs,
    /// Whether a digest is made wrong, for a fault that is injected.
    has_wrong_digest: bool,
}

impl OutgoingFrame<'_> {
    async fn frame(&self) -> Result<Frame, TransferError> {
        match self.shown.in_place {
            true => {
                let digests = self.span.digests(self.parts)?;
                Ok(self.frame_of(digests, KvPlace::Pieces(self.runs.pieces(&self.shown.memory))))
            }
            false => self.staged(|_| {}).await,
        }
    }

    /// Copies the KV into a slot, applies `change` to the copy, and returns the frame for it.
    async fn staged(&self, change: impl FnOnce(&mut [u8])) -> Result<Frame, TransferError> {
        let wait = async { Ok(self.shown.stage.slot().await) };
        let slot = within(self.parts.settings.stall(), "waiting for a slot of the stage", wait).await?;
        let bytes = self.runs.bytes();
        let digests = self.fill(slot).await?;
        change(&mut self.shown.stage.write(slot)[..bytes]);
        let piece = Piece { offset: self.shown.stage.offset(slot), bytes: bytes as u32 };
        Ok(self.frame_of(digests, KvPlace::Slot { slot, piece }))
    }

    /// Copies the KV into a slot. Returns its digests.
    async fn fill(&self, slot: u16) -> Result<Vec<Digest>, TransferError> {
        let stage = &self.shown.stage;
        match self.shown.mover.get().await? {
            Some(mover) => {
                let digests = self.parts.settings.wanted_digests();
                mover.gather(InSlot::of(slot.into()), self.span.pages(), digests).await?.digests().await
            }
            None => {
                let digests = self.span.digests(self.parts)?;
                copy_out(&self.shown.memory, &self.runs, &mut stage.write(slot))?;
                Ok(digests)
            }
        }
    }

    fn frame_of(&self, mut digests: Vec<Digest>, place: KvPlace) -> Frame {
        if self.has_wrong_digest {
            corrupt_first(&mut digests);
        }
        let (LaneSpan { lane, span }, digests) = (self.span.piece.clone(), Some(digests));
        Frame::new(self.span.out.transfer(), Body::Kv { span, digests, place }).on(lane)
    }

    async fn write_with(mut self, fault: FaultKind, writer: &mut FrameWriter) -> Result<(), TransferError> {
        match fault {
            FaultKind::Lose => return Err(TransferError::lost_because("a fault was injected")),
            FaultKind::Stall => return std::future::pending().await,
            FaultKind::Delay(by) => tokio::time::sleep(by).await,
            FaultKind::Duplicate => writer.write(&self.frame().await?).await?,
            FaultKind::WrongDigest => self.has_wrong_digest = true,
            // The fault changes a copy, so that the sender's own pages stay intact.
            FaultKind::FlipBit(bit) => {
                return writer.write(&self.staged(|copy| flip(copy, bit)).await?).await;
            }
        }
        writer.write(&self.frame().await?).await
    }
}
