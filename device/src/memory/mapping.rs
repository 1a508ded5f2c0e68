//! Memory from the system: for this process alone, or for others to look at.

use std::io;
use std::os::fd::OwnedFd;

use memmap2::{Advice, MmapMut, MmapOptions, MmapRaw};
use rustix::fs::{MemfdFlags, SealFlags};

/// Memory that no other process can see.
pub(super) fn private(bytes: usize) -> io::Result<MmapRaw> {
    let mapping: MmapRaw = MmapMut::map_anon(bytes.max(1))?.into();
    prefer_huge_pages(&mapping);
    Ok(mapping)
}

/// Memory that other processes can read if they are given the file in which it lies.
///
/// They cannot write it, and no process can shrink it: both are sealed. The file has no name, and counts as this process's
/// memory and not as a part of `/dev/shm`.
pub(super) fn shared(bytes: usize) -> io::Result<(MmapRaw, OwnedFd)> {
    let file = rustix::fs::memfd_create("baton-kv", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&file, bytes.max(1) as u64)?;
    let mapping = MmapOptions::new().map_raw(&file)?;
    prefer_huge_pages(&mapping);
    // In this order: the mapping above stays writable, later ones cannot become so.
    let seals = SealFlags::FUTURE_WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&file, seals)?;
    Ok((mapping, file))
}

/// Huge pages save page faults and TLB misses; a system that has none serves as well, only slower.
fn prefer_huge_pages(mapping: &MmapRaw) {
    let _ = mapping.advise(Advice::HugePage);
}
