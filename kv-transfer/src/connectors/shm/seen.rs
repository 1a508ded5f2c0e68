//! Hot path. What the receiver sees of a sender: its stage, and its ranks' pages if they can be seen.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use kernels::{OutsidePeer, Parts, PeerMemory, Stores};

use crate::connectors::link::frame::FrameError;
use crate::connectors::link::medium::{Elsewhere, Place};
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

impl Seen {
    fn memory(&self, place: Place) -> Result<&PeerMemory, FrameError> {
        let of_rank = || self.pages.get(usize::from(place.rank));
        let memory = if place.slot.is_some() { Some(&self.stage) } else { of_rank() };
        memory.ok_or(FrameError::Unexpected("KV in pages that are not shown"))
    }
}

impl Elsewhere for Seen {
    fn copy(&self, from: Place, into: &mut [u8]) -> Result<(), TransferError> {
        self.memory(from)?.copy(from.offset, into).map_err(outside)
    }

    fn copy_hashed(
        &self,
        from: Place,
        into: &mut [u8],
        parts: Parts,
        stores: Stores,
        each: &mut dyn FnMut(u64),
    ) -> Result<(), TransferError> {
        self.memory(from)?.copy_hashed(from.offset, into, parts, stores, each).map_err(outside)
    }
}

fn outside(_: OutsidePeer) -> TransferError {
    FrameError::Body("a piece lies outside what is shown").into()
}
