//! Hot path. The receiver's end of a shm link: the sender's stage, and its ranks' pages if they are shared.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use async_trait::async_trait;
use device::PeerMemory;

use super::copy::{SharedPieces, copy_span};
use crate::connectors::link::frame::{FrameError, KvPlace};
use crate::connectors::link::kv_path::{KvFrame, KvPath, Receipt, wrong_place};
use crate::connectors::link::stream::FrameReader;
use crate::error::TransferError;
use crate::landing::OpenLanding;

#[derive(Debug)]
pub(super) struct ShmPath {
    stage: PeerMemory,
    /// The sender's pages, one memory per rank; empty if they are not shared.
    pages: Vec<PeerMemory>,
}

impl ShmPath {
    /// Maps the files of a stream's greeting. Returns `None` for all streams but the first, which carry no
    /// files.
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
        let memory = memory.ok_or(FrameError::Unexpected("KV in pages that are not shared"))?;
        let from = SharedPieces { memory, pieces: &pieces };
        copy_span(&landing, &span, &digests.here()?, from).map(Receipt::Done)
    }
}
