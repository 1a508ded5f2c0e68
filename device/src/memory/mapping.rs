//! Memory from the system, private or shared with other processes.

use std::io;
use std::os::fd::OwnedFd;

use memmap2::{Advice, MmapMut, MmapOptions, MmapRaw};
use rustix::fs::{MemfdFlags, SealFlags};

/// Maps private memory of this process.
pub(super) fn private(bytes: usize) -> io::Result<MmapRaw> {
    let mapping: MmapRaw = MmapMut::map_anon(bytes.max(1))?.into();
    prefer_huge_pages(&mapping);
    Ok(mapping)
}

/// Maps memory that other processes can read if they get its file.
///
/// Other processes cannot write the memory, and no process can shrink it: both are sealed. The file has no
/// name. It counts as memory of this process, not as part of `/dev/shm`.
pub(super) fn shared(bytes: usize) -> io::Result<(MmapRaw, OwnedFd)> {
    let file = rustix::fs::memfd_create("baton-kv", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&file, bytes.max(1) as u64)?;
    let mapping = MmapOptions::new().map_raw(&file)?;
    prefer_huge_pages(&mapping);
    // The seals come after the mapping, because this mapping stays writable, and later ones cannot be
    // writable.
    let seals = SealFlags::FUTURE_WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&file, seals)?;
    Ok((mapping, file))
}

/// Asks for huge pages, which save page faults and TLB misses. An error is ignored: without them, this works
/// more slowly.
fn prefer_huge_pages(mapping: &MmapRaw) {
    let _ = mapping.advise(Advice::HugePage);
}
