//! Hot path. Sends one KV frame: computes its digests, and writes it while it is in the cache.

use std::sync::Arc;

use kv_cache::{BlockLease, KvMemory};
use types::KvSpan;

use super::frame::{Body, Frame, KvPlace};
use super::stream::FrameWriter;
use crate::connector_parts::ConnectorParts;
use crate::digest::{Digest, PageShape};
use crate::error::TransferError;
use crate::faults::{FaultKind, flip};
use crate::landing::PageAt;
use crate::lanes::LaneSpan;
use crate::outgoing::Outgoing;
use crate::pending_copies::PendingCopy;
use crate::runs::Runs;

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

/// Writes one KV frame on the stream itself.
pub(in crate::connectors) async fn write_span(
    writer: &mut FrameWriter,
    parts: &ConnectorParts,
    span: SpanOut,
) -> Result<(), TransferError> {
    let (runs, digests) = (span.runs(parts), span.digests(parts)?);
    let body = Body::Kv { span: span.piece.span.clone(), digests: Some(digests), place: KvPlace::Inline };
    let frame = Frame::new(span.out.transfer(), body).on(span.piece.lane);
    let frame = Frame { payload_bytes: runs.bytes(), ..frame };
    match parts.faults.next(runs.bytes()) {
        None => writer.write_span(&frame, &parts.memory, &runs).await,
        Some(fault) => write_with(fault, writer, frame, &parts.memory, &runs).await,
    }
}

impl SpanOut {
    /// Returns the location of the pages in this node's memory.
    pub(in crate::connectors) fn runs(&self, parts: &ConnectorParts) -> Runs {
        let table = self.from.table(self.piece.group);
        Runs::sent(parts.memory.layout(), &self.out.lanes, table, &self.piece)
    }

    /// Makes the frame of a part of this span, such as one page.
    pub(in crate::connectors) fn page(&self, span: KvSpan) -> Self {
        let piece = LaneSpan { lane: self.piece.lane, span };
        let (out, from) = (Arc::clone(&self.out), Arc::clone(&self.from));
        Self { pending_copy: out.pending_copies.begin(), out, piece, from }
    }

    /// Returns the number of bytes on the span's lane.
    pub(in crate::connectors) fn bytes(&self, parts: &ConnectorParts) -> usize {
        let layout = parts.memory.layout();
        let page_bytes = |layer_pos: u16| {
            let layer = layout.group(self.piece.group).layers[usize::from(layer_pos)];
            let heads = self.out.lanes.heads(layer.n_kv_heads, self.piece.lane).from;
            let page = PageShape::new(layout, self.piece.group, layer_pos);
            page.n_parts * heads.range().len() * page.head_bytes
        };
        self.piece.layers.clone().map(page_bytes).sum::<usize>() * self.piece.blocks.len()
    }

    /// Returns the digests; empty if digests are turned off.
    pub(in crate::connectors) fn digests(
        &self,
        parts: &ConnectorParts,
    ) -> Result<Vec<Digest>, TransferError> {
        if parts.settings.digests { self.digests_of(&parts.memory) } else { Ok(Vec::new()) }
    }

    pub(in crate::connectors) fn digests_of(&self, memory: &KvMemory) -> Result<Vec<Digest>, TransferError> {
        let mut digests = Vec::new();
        let (layout, lane) = (memory.layout(), self.piece.lane);
        let memory = memory.rank(lane.from);
        let table = self.from.table(self.piece.group);
        for at in PageAt::all(&self.piece) {
            let place = table[at.block as usize].0;
            let page = memory
                .read(at.group, at.layer_pos, place..place + 1)
                .map_err(|busy| TransferError::Memory(busy.to_string()))?;
            let shape = PageShape::new(layout, at.group, at.layer_pos);
            let n_kv_heads = layout.group(at.group).layers[usize::from(at.layer_pos)].n_kv_heads;
            let heads = self.out.lanes.heads(n_kv_heads, lane).from.range();
            if digests.is_empty() {
                digests.reserve(heads.len() * self.piece.layers.len() * self.piece.blocks.len());
            }
            shape.digest_heads(&page, heads, self.out.landing.valid_tokens(at.block), &mut digests);
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
