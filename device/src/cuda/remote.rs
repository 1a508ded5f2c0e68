//! Memory of a peer's card, mapped so that this card's kernels reach it.

use std::fmt;
use std::os::fd::OwnedFd;

use super::CudaError;
use super::mapped::Mapped;
use super::memory::DeviceMemory;

/// What a peer has exported. It lives for as long as this value does, also when the peer is gone.
pub struct RemoteMemory {
    mapped: Mapped,
}

impl DeviceMemory {
    /// Maps a peer's memory for the card that this memory lies on. `bytes` is what the peer's
    /// [`export`](Self::export) said.
    pub fn import(&self, fd: &OwnedFd, bytes: usize) -> Result<RemoteMemory, CudaError> {
        Ok(RemoteMemory { mapped: Mapped::import(self.context(), fd, bytes)? })
    }
}

impl RemoteMemory {
    pub(super) fn address(&self) -> u64 {
        self.mapped.address()
    }

    pub(super) fn ordinal(&self) -> usize {
        self.mapped.ordinal()
    }

    pub fn bytes(&self) -> usize {
        self.mapped.bytes()
    }
}

impl fmt::Debug for RemoteMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RemoteMemory({} bytes)", self.bytes())
    }
}
