//! A peer GPU's memory, mapped for this GPU's kernels.

use std::fmt;
use std::os::fd::OwnedFd;

use super::CudaError;
use super::mapped::MappedMemory;
use super::memory::DeviceMemory;

/// Memory that a peer has exported. It lives as long as this value, even after the peer has exited.
pub struct RemoteMemory {
    mapped: MappedMemory,
}

impl DeviceMemory {
    /// Maps a peer's memory for the GPU of this memory. `bytes` comes from the peer's
    /// [`export`](Self::export).
    pub fn import(&self, fd: &OwnedFd, bytes: usize) -> Result<RemoteMemory, CudaError> {
        Ok(RemoteMemory { mapped: MappedMemory::import(self.context(), fd, bytes)? })
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
