//! Hot path. One frame of KV on its way out: digested while it comes into the cache, written while it is there.

use std::sync::Arc;

use kv_cache::{BlockLease, KvMemory};
use types::{KvLayout, KvSpan};

use super::frame::{Body, Frame};
use super::stream::FrameWriter;
use crate::connector::ConnectorParts;
use crate::digest::{Digest, PageShape};
use crate::error::TransferError;
use crate::faults::{FaultKind, flip};
use crate::landing::PageAt;
use crate::outgoing::Outgoing;
use crate::runs::Runs;

/// Pages that wait for a stream. Holds their lease until they have left.
#[derive(Debug)]
pub(super) struct SpanOut {
    pub(super) out: Arc<Outgoing>,
    pub(super) piece: KvSpan,
    pub(super) from: Arc<BlockLease>,
}

/// Writes one frame of KV, unless its transfer is over by now.
pub(super) async fn write_span(
    writer: &mut FrameWriter,
    parts: &ConnectorParts,
    span: SpanOut,
) -> Result<(), TransferError> {
    if span.out.is_over() {
        return Ok(());
    }
    let layout = parts.memory.layout();
    let runs = Runs::new(layout, span.from.table(span.piece.group), &span.piece);
    let digests = span.digests(&parts.memory)?;
    let body = Body::Span { span: span.piece.clone(), digests };
    let frame = Frame { transfer: span.out.transfer(), body, payload_bytes: runs.bytes() };
    match parts.faults.next(runs.bytes()) {
        None => writer.write_span(&frame, &parts.memory, &runs).await,
        Some(fault) => write_with(fault, writer, frame, &parts.memory, &runs).await,
    }
}

impl SpanOut {
    fn digests(&self, memory: &KvMemory) -> Result<Vec<Digest>, TransferError> {
        let layout: &KvLayout = memory.layout();
        let table = self.from.table(self.piece.group);
        let mut digests = Vec::new();
        for at in PageAt::all(&self.piece) {
            let place = table[at.block as usize].0;
            let page = memory
                .read(at.group, at.layer_pos, place..place + 1)
                .map_err(|busy| TransferError::Memory(busy.to_string()))?;
            let shape = PageShape::new(layout, at.group, at.layer_pos);
            shape.digest_page(&page, self.out.landing.valid_tokens(at.block), &mut digests);
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
            if let Body::Span { digests, .. } = &mut frame.body {
                digests[0].0 ^= 1;
            }
        }
    }
    writer.write_span(&frame, memory, runs).await
}

/// A copy of the KV, to be spoilt.
fn copied(memory: &KvMemory, runs: &Runs) -> Result<Vec<u8>, TransferError> {
    let mut copy = Vec::with_capacity(runs.bytes());
    while copy.len() < runs.bytes() {
        let pages = runs.read(memory, copy.len()).map_err(|busy| TransferError::Memory(busy.to_string()))?;
        let mut slices = Vec::new();
        pages.append_to(&mut slices);
        for slice in &slices {
            copy.extend_from_slice(slice);
        }
    }
    Ok(copy)
}
