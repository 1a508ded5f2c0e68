//! Memory from the system, private or shared with other processes.

use std::io;
use std::os::fd::OwnedFd;

use memmap2::{Advice, MmapMut, MmapOptions, MmapRaw};
use rustix::fs::{MemfdFlags, SealFlags};

/// Private memory.
pub(super) fn private(bytes: usize) -> io::Result<MmapRaw> {
    let mapping: MmapRaw = MmapMut::map_anon(bytes.max(1))?.into();
    prefer_huge_pages(&mapping);
    Ok(mapping)
}

/// Memory that other processes can read if they get its file.
///
/// They cannot write it, and no process can shrink it: both are sealed. The file has no name. It counts as
/// memory of this process, not as part of `/dev/shm`.
pub(super) fn shared(bytes: usize) -> io::Result<(MmapRaw, OwnedFd)> {
    let file = rustix::fs::memfd_create("baton-kv", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&file, bytes.max(1) as u64)?;
    let mapping = MmapOptions::new().map_raw(&file)?;
    prefer_huge_pages(&mapping);
    // The order matters: the mapping above stays writable, and later ones cannot be writable.
    let seals = SealFlags::FUTURE_WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&file, seals)?;
    Ok((mapping, file))
}

/// Huge pages save page faults and TLB misses. Without them, this works more slowly.
fn prefer_huge_pages(mapping: &MmapRaw) {
    let _ = mapping.advise(Advice::HugePage);
}
