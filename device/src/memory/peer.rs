//! Hot path.
//! Another process's memory, mapped for reading.
//!
//! The owner may write while this process reads, so no slice of the memory ever exists. Bytes are copied out,
//! and the caller then verifies the copy.

use std::fmt;
use std::os::fd::{AsFd as _, OwnedFd};

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::SealFlags;

use crate::xxh3::{self, Parts, Stores};

/// A memory file that its owner cannot shrink, mapped for reading.
pub struct PeerMemory {
    mapping: MmapRaw,
}

/// The reason why a peer's memory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PeerMemoryError {
    #[error("read the seals of the offered memory")]
    Look(#[source] rustix::io::Errno),
    #[error("the offered memory is not sealed against shrinking")]
    NotSealed,
    #[error("map {bytes} bytes of another process's memory")]
    Map {
        bytes: usize,
        #[source]
        source: std::io::Error,
    },
}

/// The error for a range outside of the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{len} bytes at offset {offset} are outside of the memory of {bytes} bytes")]
pub struct PeerMemoryRangeError {
    pub offset: u64,
    pub len: usize,
    pub bytes: usize,
}

impl PeerMemory {
    /// Maps the whole file. Rejects a file that could shrink: reading removed pages would kill this process.
    pub fn map(file: OwnedFd) -> Result<Self, PeerMemoryError> {
        let seals = rustix::fs::fcntl_get_seals(file.as_fd()).map_err(PeerMemoryError::Look)?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(PeerMemoryError::NotSealed);
        }
        let bytes = rustix::fs::fstat(file.as_fd()).map_err(PeerMemoryError::Look)?.st_size;
        let bytes = usize::try_from(bytes).unwrap_or(0);
        let mapping = MmapOptions::new().len(bytes).map_raw_read_only(&file);
        mapping.map(|mapping| Self { mapping }).map_err(|source| PeerMemoryError::Map { bytes, source })
    }

    pub fn bytes(&self) -> usize {
        self.mapping.len()
    }

    /// Returns the address of the mapping, for GPUs that read it directly.
    pub(crate) fn start(&self) -> *const u8 {
        self.mapping.as_ptr()
    }

    /// Copies the current bytes at `offset`.
    ///
    /// If the owner writes at the same time, the copy is a mixture of old and new bytes.
    pub fn copy(&self, offset: u64, into: &mut [u8]) -> Result<(), PeerMemoryRangeError> {
        let from = self.at(offset, into.len())?;
        // JUSTIFICATION: no slice of this memory may exist, because another process may write it.
        // SAFETY: the source range is in the mapping, which is sealed against shrinking and lives as long as
        // `self`. The target is this process's own memory, which no other process can access, so they do not
        // overlap. Bytes that change during the copy give some mixture, and every mixture is valid bytes.
        unsafe {
            std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len());
        }
        Ok(())
    }

    /// Like [`copy`](Self::copy), and calls `each` with the XXH3-64 of each part of the copy.
    pub fn copy_hashed(
        &self,
        offset: u64,
        into: &mut [u8],
        parts: Parts,
        stores: Stores,
        each: impl FnMut(u64),
    ) -> Result<(), PeerMemoryRangeError> {
        let from = self.at(offset, into.len())?;
        // JUSTIFICATION: no slice of this memory may exist, as in `copy`.
        // SAFETY: the ranges are as in `copy`.
        unsafe { xxh3::copy_parts(from, into, parts, stores, each) };
        Ok(())
    }

    /// Returns the address of `len` bytes at `offset`. A range outside of the memory is an error.
    fn at(&self, offset: u64, len: usize) -> Result<*const u8, PeerMemoryRangeError> {
        let outside = PeerMemoryRangeError { offset, len, bytes: self.bytes() };
        let start = usize::try_from(offset).map_err(|_| outside)?;
        let lies_inside = start.checked_add(len).is_some_and(|end| end <= self.bytes());
        lies_inside.then(|| self.mapping.as_ptr().wrapping_add(start)).ok_or(outside)
    }
}

impl fmt::Debug for PeerMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PeerMemory({} bytes)", self.bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{HostMemory, RegionShape};

    const SHAPES: [RegionShape; 2] =
        [RegionShape { page_bytes: 64, n_pages: 8 }, RegionShape { page_bytes: 100, n_pages: 3 }];

    fn seen(memory: &HostMemory) -> PeerMemory {
        let file = memory.file().expect("it is shared").try_clone_to_owned().expect("a descriptor");
        PeerMemory::map(file).expect("it is sealed")
    }

    #[test]
    fn a_peer_sees_what_is_written_now() {
        let memory = HostMemory::shared(&SHAPES).expect("a few KiB can be shared");
        let peer = seen(&memory);
        let mut copy = [0; 100];
        for fill in [7, 9] {
            memory.write(1, 2..3).expect("idle").fill(fill);
            peer.copy(memory.file_offset(1, 2) as u64, &mut copy).expect("it lies inside");
            assert_eq!(copy, [fill; 100]);
        }
        peer.copy(memory.file_offset(0, 0) as u64, &mut copy).expect("it lies inside");
        assert_eq!(copy, [0; 100]);
    }

    #[test]
    fn nothing_outside_is_read() {
        let memory = HostMemory::shared(&SHAPES).expect("a few KiB can be shared");
        let peer = seen(&memory);
        let end = peer.bytes() as u64;
        peer.copy(end, &mut []).expect("nothing is everywhere");
        for offset in [end, end - 9, u64::MAX, u64::MAX - 5] {
            assert!(peer.copy(offset, &mut [0; 10]).is_err(), "{offset}");
        }
    }

    #[test]
    fn a_peer_can_neither_write_nor_shrink_it() {
        let memory = HostMemory::shared(&SHAPES).expect("a few KiB can be shared");
        let file =
            std::fs::File::from(memory.file().expect("shared").try_clone_to_owned().expect("a descriptor"));
        file.set_len(1).expect_err("it is sealed");
        MmapOptions::new().map_raw(&file).expect_err("it is sealed");
    }

    #[test]
    fn memory_that_could_shrink_is_refused() {
        let file = tempfile::tempfile().expect("a file");
        assert!(PeerMemory::map(file.into()).is_err());
    }

    #[test]
    fn memory_lives_on_for_its_peer() {
        let memory = HostMemory::shared(&SHAPES).expect("a few KiB can be shared");
        memory.write(0, 0..1).expect("idle").fill(3);
        let (peer, offset) = (seen(&memory), memory.file_offset(0, 0) as u64);
        drop(memory);
        let mut copy = [0; 64];
        peer.copy(offset, &mut copy).expect("it lies inside");
        assert_eq!(copy, [3; 64]);
    }
}
