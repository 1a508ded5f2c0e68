//! Hot path. What a sender shows: its card's memory, and where in it the KV of each frame lies.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use chassis::Stream;
use kv_cache::KvMemory;
use types::{GroupIdx, KvSpan};

use super::carrier::Carrier;
use super::pages::{alike, page_of_bit};
use super::{door, on_card};
use crate::connector::ConnectorParts;
use crate::connectors::link::frame::{Body, Frame, FrameError};
use crate::connectors::link::medium::Medium;
use crate::connectors::link::span_out::{SpanOut, spoil};
use crate::connectors::link::stream::FrameWriter;
use crate::digest::Digest;
use crate::error::TransferError;
use crate::faults::{FaultKind, flip};

/// The sender's side of one link.
#[derive(Debug)]
pub(super) struct Shown {
    memory: KvMemory,
    carrier: Arc<Carrier>,
    /// Bits of this node's own pages that faults have flipped: KV cannot be spoilt on its way, for nobody sends it. They
    /// are put right before the next frame leaves. Held for a look, never across an await.
    flipped: Mutex<Vec<Flipped>>,
}

#[derive(Debug)]
struct Flipped {
    page: (GroupIdx, u16, u32),
    bit: usize,
}

impl Shown {
    pub(super) fn over(
        parts: &ConnectorParts,
        carrier: Arc<Carrier>,
    ) -> Result<Arc<dyn Medium>, TransferError> {
        Ok(Arc::new(Self { memory: parts.memory.clone(), carrier, flipped: Mutex::default() }))
    }

    /// The frame for some pages: their digests are made by the card, where they are.
    async fn frame(&self, parts: &ConnectorParts, span: &SpanOut) -> Result<Frame, TransferError> {
        let card = on_card(&self.memory)?;
        let table = span.from.table(span.piece.group);
        let (mut pieces, mut digests) = (Vec::new(), Vec::new());
        for pages in alike(card, &span.out.landing, table, &span.piece) {
            pages.pieces(card, &mut pieces);
            if parts.settings.digests {
                let room = self.carrier.room().await?;
                let errand = self.carrier.courier().digest(card.memory(), pages.some());
                let made = room.take(errand.map_err(TransferError::device)?, None).await?;
                digests.extend(made.into_iter().map(Digest));
            }
        }
        let body = Body::SpanAt { span: span.piece.span.clone(), slot: None, pieces, digests };
        Ok(Frame::new(span.out.transfer(), body))
    }

    fn flip(&self, span: &KvSpan, table: &[types::BlockIdx], bit: u64) -> Result<(), TransferError> {
        let (page, bit) = page_of_bit(self.memory.layout(), table, span, bit);
        self.flip_in(page, bit)?;
        self.flipped.lock().unwrap_or_else(PoisonError::into_inner).push(Flipped { page, bit });
        Ok(())
    }

    fn put_right(&self) -> Result<(), TransferError> {
        let flipped = std::mem::take(&mut *self.flipped.lock().unwrap_or_else(PoisonError::into_inner));
        flipped.into_iter().try_for_each(|Flipped { page, bit }| self.flip_in(page, bit))
    }

    fn flip_in(
        &self,
        (group, layer_pos, page): (GroupIdx, u16, u32),
        bit: usize,
    ) -> Result<(), TransferError> {
        let bytes = self.memory.write(group, layer_pos, page..page + 1);
        flip(&mut bytes.map_err(|busy| TransferError::Memory(busy.to_string()))?, bit as u64);
        Ok(())
    }

    async fn write_with(
        &self,
        fault: FaultKind,
        writer: &mut FrameWriter,
        mut frame: Frame,
        span: &SpanOut,
    ) -> Result<(), TransferError> {
        match fault {
            FaultKind::Lose => return Err(TransferError::lost_because("a fault was injected")),
            FaultKind::Stall => return std::future::pending().await,
            FaultKind::Delay(by) => tokio::time::sleep(by).await,
            FaultKind::Duplicate => writer.write(&frame).await?,
            FaultKind::FlipBit(bit) => self.flip(&span.piece, span.from.table(span.piece.group), bit)?,
            FaultKind::WrongDigest => {
                if let Body::SpanAt { digests, .. } = &mut frame.body {
                    spoil(digests);
                }
            }
        }
        writer.write(&frame).await
    }
}

#[async_trait]
impl Medium for Shown {
    /// The first stream brings the memory.
    async fn connect(&self, endpoint: &str, stream: u16) -> io::Result<Stream> {
        if stream > 0 {
            return door::connect(endpoint, None).await;
        }
        let card = on_card(&self.memory).map_err(io::Error::other)?;
        let shown = card.memory().export().map_err(io::Error::other)?;
        door::connect(endpoint, Some(&shown)).await
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
        let frame = self.frame(parts, &span).await?;
        let n_pages = span.piece.layers.len() * span.piece.blocks.len();
        match parts.faults.next(bytes_of(&frame, n_pages)) {
            None => writer.write(&frame).await,
            Some(fault) => self.write_with(fault, writer, frame, &span).await,
        }
    }

    fn taken(&self, _slot: u16) -> Result<(), FrameError> {
        Err(FrameError::Unexpected("a slot of a stage that this wire does not have"))
    }

    fn writes(&self) -> bool {
        false
    }

    async fn broken(&self) -> TransferError {
        std::future::pending().await
    }

    fn close(&self) {}
}

/// Bytes of KV that a frame is about.
fn bytes_of(frame: &Frame, n_pages: usize) -> usize {
    match &frame.body {
        Body::SpanAt { pieces, .. } => pieces.iter().map(|piece| piece.bytes as usize).sum(),
        _ => n_pages,
    }
}
