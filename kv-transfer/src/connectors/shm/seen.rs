//! Hot path. What the receiver sees of a sender: its stage, and its ranks' pages if they can be seen.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use kernels::PeerMemory;

use crate::connectors::link::frame::FrameError;
use crate::connectors::link::medium::Elsewhere;
use crate::error::TransferError;

#[derive(Debug)]
pub(super) struct Seen {
    stage: PeerMemory,
    /// Of each rank, or of none.
    pages: Vec<PeerMemory>,
}

impl Seen {
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

impl Elsewhere for Seen {
    fn copy(&self, rank: u16, slot: Option<u16>, offset: u64, into: &mut [u8]) -> Result<(), TransferError> {
        let memory = if slot.is_some() { Some(&self.stage) } else { self.pages.get(usize::from(rank)) };
        let memory = memory.ok_or(FrameError::Unexpected("KV in pages that are not shown"))?;
        memory.copy(offset, into).map_err(|_| FrameError::Body("a piece lies outside what is shown").into())
    }
}
