//! Hot path. Sends one KV frame: computes its digests, and writes it while it is in the cache.

use std::ops::Range;
use std::sync::Arc;

use kv_cache::{BlockLease, KvMemory};
use types::{BlockIdx, KvLayout, KvSpan, TransferId};

use super::frame::{Body, Frame, KvPlace};
use super::stream::FrameWriter;
use crate::connector_parts::ConnectorParts;
use crate::digest::{Digest, PageShape};
use crate::error::TransferError;
use crate::faults::{FaultKind, flip};
use crate::landing::PageAt;
use crate::lanes::{LaneSpan, Lanes};
use crate::outgoing::Outgoing;
use crate::pending_copies::PendingCopy;
use crate::runs::{Runs, of_span};

/// Pages that wait for a stream. Holds their lease until they are sent.
#[derive(Debug)]
pub(in crate::connectors) struct SpanOut {
    pub(in crate::connectors) out: Arc<Outgoing>,
    pub(in crate::connectors) piece: LaneSpan,
    pub(in crate::connectors) from: Arc<BlockLease>,
    /// Counts the frame as being written, until the drop.
    #[expect(dead_code, reason = "held for its Drop")]
    pub(in crate::connectors) pending_copy: PendingCopy,
}

/// The pages of one KV frame, and their blocks in this process's memory.
#[derive(Clone, Copy, Debug)]
pub(in crate::connectors) struct PagesOut<'a> {
    pub(in crate::connectors) transfer: TransferId,
    pub(in crate::connectors) lanes: &'a Lanes,
    pub(in crate::connectors) piece: &'a LaneSpan,
    /// The blocks of the piece only.
    pub(in crate::connectors) blocks: &'a [BlockIdx],
    /// The number of tokens of the whole sequence.
    pub(in crate::connectors) n_tokens: u32,
}

/// Writes one KV frame on the stream itself. Not cancel-safe.
pub(in crate::connectors) async fn write_span(
    writer: &mut FrameWriter,
    parts: &ConnectorParts,
    pages: PagesOut<'_>,
) -> Result<(), TransferError> {
    let runs = pages.runs(&parts.memory);
    let digests = if parts.settings.digests { pages.digests(&parts.memory)? } else { Vec::new() };
    let body = Body::Kv { span: pages.piece.span.clone(), digests: Some(digests), place: KvPlace::Inline };
    let frame = Frame::new(pages.transfer, body).on(pages.piece.lane);
    let frame = Frame { payload_bytes: runs.bytes(), ..frame };
    match parts.faults.next(runs.bytes()) {
        None => writer.write_span(&frame, &parts.memory, &runs).await,
        Some(fault) => write_with(fault, writer, frame, &parts.memory, &runs).await,
    }
}

impl SpanOut {
    /// Returns the number in the model of the first layer. A piece has layers of one process on each side.
    pub(in crate::connectors) fn first_layer(&self) -> u16 {
        let layers = &self.out.landing.layout.group(self.piece.group).layers;
        layers[usize::from(self.piece.layers.start)].layer
    }

    pub(in crate::connectors) fn pages(&self) -> PagesOut<'_> {
        let (piece, landing) = (&self.piece, &self.out.landing);
        let blocks = of_span(self.from.table(piece.group), piece);
        let (transfer, n_tokens) = (landing.transfer, landing.n_tokens);
        PagesOut { transfer, lanes: &self.out.lanes, piece, blocks, n_tokens }
    }

    /// Returns the location of the pages in this node's memory.
    pub(in crate::connectors) fn runs(&self, parts: &ConnectorParts) -> Runs {
        self.pages().runs(&parts.memory)
    }

    /// Makes the frame of a part of this span, such as one page.
    pub(in crate::connectors) fn page(&self, span: KvSpan) -> Self {
        let piece = LaneSpan { lane: self.piece.lane, span };
        let (out, from) = (Arc::clone(&self.out), Arc::clone(&self.from));
        Self { pending_copy: out.pending_copies.begin(), out, piece, from }
    }

    /// Returns the number of bytes on the span's lane.
    pub(in crate::connectors) fn bytes(&self, parts: &ConnectorParts) -> usize {
        self.pages().bytes(parts.memory.layout())
    }

    /// Returns the digests; empty if digests are turned off.
    pub(in crate::connectors) fn digests(
        &self,
        parts: &ConnectorParts,
    ) -> Result<Vec<Digest>, TransferError> {
        if parts.settings.digests { self.pages().digests(&parts.memory) } else { Ok(Vec::new()) }
    }
}

impl PagesOut<'_> {
    pub(in crate::connectors) fn runs(&self, memory: &KvMemory) -> Runs {
        Runs::sent(memory.layout(), self.lanes, self.blocks, self.piece)
    }

    /// Returns the number of bytes on the lane.
    pub(in crate::connectors) fn bytes(&self, layout: &KvLayout) -> usize {
        let page_bytes = |layer_pos: u16| {
            let page = PageShape::new(layout, self.piece.group, layer_pos);
            page.n_parts * self.heads(layout, layer_pos).len() * page.head_bytes
        };
        self.piece.layers.clone().map(page_bytes).sum::<usize>() * self.blocks.len()
    }

    /// Returns the lane's heads of a layer, as indices in the pages of this process.
    pub(in crate::connectors) fn heads(&self, layout: &KvLayout, layer_pos: u16) -> Range<usize> {
        let n_kv_heads = layout.group(self.piece.group).layers[usize::from(layer_pos)].n_kv_heads;
        self.lanes.heads(n_kv_heads, self.piece.lane).from.range()
    }

    pub(in crate::connectors) fn digests(&self, memory: &KvMemory) -> Result<Vec<Digest>, TransferError> {
        let mut digests = Vec::new();
        let layout = memory.layout();
        let memory = memory.rank(self.piece.lane.from);
        for at in PageAt::all(self.piece) {
            let place = self.blocks[(at.block - self.piece.blocks.start) as usize].0;
            let page = memory
                .read(at.group, at.layer_pos, place..place + 1)
                .map_err(|busy| TransferError::Memory(busy.to_string()))?;
            let shape = PageShape::new(layout, at.group, at.layer_pos);
            let heads = self.heads(layout, at.layer_pos);
            if digests.is_empty() {
                digests.reserve(heads.len() * self.piece.layers.len() * self.blocks.len());
            }
            shape.digest_heads(&page, heads, layout.valid_tokens(self.n_tokens, at.block), &mut digests);
        }
        Ok(digests)
    }
}

// === faults ===

async fn write_with(
    fault: FaultKind,
    writer: &mut FrameWriter,
    mut frame: Frame,
    memory: &KvMemory,
    runs: &Runs,
) -> Result<(), TransferError> {
    match fault {
        FaultKind::Lose => return Err(TransferError::lost_because("a fault was injected")),
        FaultKind::Stall => return std::future::pending().await,
        FaultKind::Delay(by) => tokio::time::sleep(by).await,
        FaultKind::Duplicate => writer.write_span(&frame, memory, runs).await?,
        FaultKind::FlipBit(bit) => {
            let mut payload = copied(memory, runs)?;
            flip(&mut payload, bit);
            return writer.write_copy(&frame, &payload).await;
        }
        FaultKind::WrongDigest => {
            if let Body::Kv { digests: Some(digests), .. } = &mut frame.body {
                corrupt_first(digests);
            }
        }
    }
    writer.write_span(&frame, memory, runs).await
}

/// Makes the first digest wrong, if there is one.
pub(in crate::connectors) fn corrupt_first(digests: &mut [Digest]) {
    if let Some(first) = digests.first_mut() {
        first.0 ^= 1;
    }
}

/// Returns a copy of the KV, for a fault that corrupts it.
fn copied(memory: &KvMemory, runs: &Runs) -> Result<Vec<u8>, TransferError> {
    let mut copy = vec![0; runs.bytes()];
    copy_out(memory, runs, &mut copy)?;
    Ok(copy)
}

/// Copies the KV out of its pages into `copy`.
pub(in crate::connectors) fn copy_out(
    memory: &KvMemory,
    runs: &Runs,
    into: &mut [u8],
) -> Result<(), TransferError> {
    let mut done = 0;
    while done < runs.bytes() {
        let pages = runs.read(memory, done).map_err(|busy| TransferError::Memory(busy.to_string()))?;
        let mut slices = Vec::new();
        pages.append_to(&mut slices);
        for slice in &slices {
            into[done..done + slice.len()].copy_from_slice(slice);
            done += slice.len();
        }
    }
    Ok(())
}
