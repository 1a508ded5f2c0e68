//! Hot path. The sender: shares its GPUs' memory, and sends the place of each frame's KV.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use chassis::{Stream, World};
use kv_cache::KvMemory;
use tracing::trace;
use types::GroupIdx;

use super::accept;
use super::shared::{SharedFiles, StageSizes};
use crate::connector_parts::ConnectorParts;
use crate::connectors::gpu::copy_thread::{CopyThreads, Held};
use crate::connectors::gpu::pages::{UniformPages, card_of, page_of_bit, sent};
use crate::connectors::link::frame::{Body, Frame, KvPlace, Piece};
use crate::connectors::link::send_path::KvSendPath;
use crate::connectors::link::span_out::{SpanOut, corrupt_first};
use crate::connectors::link::stream::FrameWriter;
use crate::digest::Digest;
use crate::error::TransferError;
use crate::faults::{FaultKind, flip};

/// The sender's side of one link.
#[derive(Debug)]
pub(super) struct CudaIpcSendPath {
    world: World,
    memory: KvMemory,
    sizes: StageSizes,
    copy_threads: CopyThreads,
    /// The bits of this node's own pages that faults have flipped. A fault flips the page itself, because the
    /// KV is not sent. The bits are restored before the next frame is sent. The lock is held while bits are
    /// flipped or restored, never across an await.
    flipped: Mutex<Vec<FlippedBit>>,
}

#[derive(Debug)]
struct FlippedBit {
    rank: u16,
    page: (GroupIdx, u16, u32),
    bit: usize,
}

impl CudaIpcSendPath {
    pub(super) fn over(
        parts: &ConnectorParts,
        copy_threads: CopyThreads,
    ) -> Result<Arc<dyn KvSendPath>, TransferError> {
        let (world, memory) = (parts.world.clone(), parts.memory.clone());
        let sizes = StageSizes::here(&memory)?;
        Ok(Arc::new(Self { world, memory, sizes, copy_threads, flipped: Mutex::default() }))
    }

    /// Returns the pages of a span, and their location in the shared memory.
    fn pages(&self, span: &SpanOut) -> Result<(Vec<UniformPages>, Vec<Piece>), TransferError> {
        let (all, mut pieces) = (sent(&self.memory, span.pages()), Vec::new());
        for pages in &all {
            let card = card_of(&self.memory, span.piece.lane.from, pages.stage)?.memory();
            let start = self.sizes.start(pages.stage);
            pages.pieces(|region, page| start + card.offset(region, page), &mut pieces);
        }
        Ok((all, pieces))
    }

    /// Returns the digests, computed by the GPU that holds the pages.
    async fn digests(&self, span: &SpanOut, all: &[UniformPages]) -> Result<Vec<Digest>, TransferError> {
        let rank = span.piece.lane.from;
        let mut digests = Vec::new();
        for pages in all {
            let card = card_of(&self.memory, rank, pages.stage)?;
            let copy_thread = self.copy_threads.of(rank, pages.stage);
            let room = copy_thread.room().await?;
            let copy_job = copy_thread.copier().digest(card.memory(), pages.some());
            let made = room.take(copy_job.map_err(TransferError::device)?, Held::default()).await?;
            digests.extend(made.into_iter().map(Digest));
        }
        Ok(digests)
    }

    /// Sends the location of the pages, and later their digests. The receiver copies while the digests are
    /// computed.
    async fn show(&self, writer: &mut FrameWriter, span: &SpanOut) -> Result<(), TransferError> {
        let (all, pieces) = self.pages(span)?;
        writer.write(&shown(span, pieces, None)).await?;
        let (transfer, blocks) = (span.out.transfer(), &span.piece.blocks);
        trace!(target: "walk", %transfer, ?blocks, "KV frame sent to the peer");
        let digests = self.digests(span, &all).await?;
        trace!(target: "walk", %transfer, ?blocks, "digests of a KV frame computed");
        writer.write(&said(span, digests)).await
    }

    /// Sends the location of the pages in one frame without digests.
    async fn show_bare(&self, writer: &mut FrameWriter, span: &SpanOut) -> Result<(), TransferError> {
        let (_, pieces) = self.pages(span)?;
        writer.write(&shown(span, pieces, Some(Vec::new()))).await
    }

    fn flip(&self, span: &SpanOut, bit: u64) -> Result<(), TransferError> {
        let (piece, table) = (&span.piece, span.from.table(span.piece.group));
        let (page, bit) = page_of_bit(self.memory.layout(), &span.out.lanes, table, piece, bit);
        let one = FlippedBit { rank: piece.lane.from, page, bit };
        let mut flipped = self.flipped();
        self.flip_in(&one)?;
        flipped.push(one);
        Ok(())
    }

    fn put_right(&self) -> Result<(), TransferError> {
        let mut flipped = self.flipped();
        flipped.drain(..).try_for_each(|one| self.flip_in(&one))
    }

    fn flipped(&self) -> MutexGuard<'_, Vec<FlippedBit>> {
        self.flipped.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn flip_in(
        &self,
        FlippedBit { rank, page: (group, layer_pos, page), bit }: &FlippedBit,
    ) -> Result<(), TransferError> {
        let bytes = self.memory.rank(*rank).write(*group, *layer_pos, *page..page + 1);
        flip(&mut bytes.map_err(|busy| TransferError::Memory(busy.to_string()))?, *bit as u64);
        Ok(())
    }

    async fn write_with(
        &self,
        fault: FaultKind,
        writer: &mut FrameWriter,
        span: &SpanOut,
    ) -> Result<(), TransferError> {
        let (all, pieces) = self.pages(span)?;
        // The digests are computed before the fault corrupts the pages.
        let mut digests = self.digests(span, &all).await?;
        match fault {
            FaultKind::Lose => return Err(TransferError::lost_because("a fault was injected")),
            FaultKind::Stall => return std::future::pending().await,
            FaultKind::Delay(by) => tokio::time::sleep(by).await,
            FaultKind::Duplicate => {
                writer.write(&shown(span, pieces.clone(), None)).await?;
                writer.write(&said(span, digests.clone())).await?;
            }
            FaultKind::FlipBit(bit) => self.flip(span, bit)?,
            FaultKind::WrongDigest => corrupt_first(&mut digests),
        }
        writer.write(&shown(span, pieces, None)).await?;
        writer.write(&said(span, digests)).await
    }
}

#[async_trait]
impl KvSendPath for CudaIpcSendPath {
    /// Connects stream number `stream`. The first stream carries the memory of all ranks of all stages.
    async fn connect(&self, endpoint: &str, stream: u16) -> io::Result<Stream> {
        let shared = (stream == 0).then(|| SharedFiles::of(&self.memory)).transpose()?;
        accept::connect(endpoint, &self.world, shared.as_ref()).await
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
        self.put_right()?;
        match parts.faults.next(span.bytes(parts)) {
            Some(fault) => self.write_with(fault, writer, &span).await,
            None if parts.settings.digests => self.show(writer, &span).await,
            None => self.show_bare(writer, &span).await,
        }
    }
}

fn shown(span: &SpanOut, pieces: Vec<Piece>, digests: Option<Vec<Digest>>) -> Frame {
    let body = Body::Kv { span: span.piece.span.clone(), digests, place: KvPlace::Pieces(pieces) };
    Frame::new(span.out.transfer(), body).on(span.piece.lane)
}

fn said(span: &SpanOut, digests: Vec<Digest>) -> Frame {
    Frame::new(span.out.transfer(), Body::Digests { span: span.piece.span.clone(), digests })
        .on(span.piece.lane)
}
