//! Hot path. What the receiver sees of a sender: its stage, and its ranks' pages if they can be seen.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use async_trait::async_trait;
use device::PeerMemory;

use super::copy::{Shown, copy_span};
use crate::connectors::link::frame::{FrameError, KvPlace};
use crate::connectors::link::kv_path::{KvFrame, KvPath, Receipt, wrong_place};
use crate::connectors::link::stream::FrameReader;
use crate::error::TransferError;
use crate::landing::OpenLanding;

#[derive(Debug)]
pub(super) struct ShmPath {
    stage: PeerMemory,
    /// One per rank, or empty if the pages are not shared.
    pages: Vec<PeerMemory>,
}

impl ShmPath {
    /// The files that came with a greeting: none on all streams of a link but the first.
    pub(super) fn of(files: Vec<OwnedFd>) -> Result<Option<Self>, TransferError> {
        let mut mapped = Vec::new();
        for file in files {
            let memory =
                PeerMemory::map(file).map_err(|source| TransferError::Map { source: Arc::new(source) })?;
            mapped.push(memory);
        }
        let mut mapped = mapped.into_iter();
        Ok(mapped.next().map(|stage| Self { stage, pages: mapped.collect() }))
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
        let (memory, pieces) = match place {
            KvPlace::Pieces(pieces) => (self.pages.get(usize::from(span.lane.from)), pieces),
            KvPlace::Slot { piece, .. } => (Some(&self.stage), vec![piece]),
            _ => return Err(wrong_place()),
        };
        let Some(landing) = landing else { return Ok(Receipt::dropped()) };
        let memory = memory.ok_or(FrameError::Unexpected("KV in pages that are not shown"))?;
        let from = Shown { memory, pieces: &pieces };
        copy_span(&landing, &span, &digests.here()?, from).map(Receipt::Done)
    }
}
