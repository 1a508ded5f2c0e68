//! Memory that a device may reach.

use std::fmt;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use memmap2::MmapRaw;

use super::device::Device;
use super::error::VerbsError;
use super::sys::{Mr, register_dmabuf};
use crate::cuda::mapped::Mapped;
use crate::cuda::memory::DeviceMemory;
use crate::memory::HostMemory;

/// What belongs together: queue pairs reach the memory of their own domain and no other. Clones are the same.
#[derive(Clone)]
pub struct Domain {
    pub(super) inner: Arc<Allocated>,
}

pub(super) struct Allocated {
    pub(super) pd: NonNull<std::ffi::c_void>,
    pub(super) device: Device,
}

// JUSTIFICATION: a pointer is neither by itself.
// SAFETY: as for the device: the library takes its own locks.
unsafe impl Send for Allocated {}
// SAFETY: as above.
unsafe impl Sync for Allocated {}

/// Who may do what with a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rights {
    /// This side sends from it.
    Own,
    /// Peers that know its key may write into it, anywhere in it.
    PeersWrite,
}

/// Memory that is locked, and that the device reaches, for as long as this value lives.
pub struct Region {
    mr: NonNull<Mr>,
    start: u64,
    bytes: usize,
    #[expect(dead_code, reason = "held for its Drop: after this value's own")]
    domain: Domain,
    memory: Option<Held>,
    functions: &'static super::sys::Functions,
}

/// What must not be given back before the device has let go of it.
enum Held {
    #[expect(dead_code, reason = "held for its Drop")]
    Host(Arc<MmapRaw>),
    #[expect(dead_code, reason = "held for its Drop")]
    Card(Arc<Mapped>),
    /// The file holds it.
    File,
}

// JUSTIFICATION: a pointer is neither by itself.
// SAFETY: as for the device: the library takes its own locks.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Domain {
    pub fn new(device: &Device) -> Result<Self, VerbsError> {
        let (functions, context) = device.parts();
        // JUSTIFICATION: a call into C.
        // SAFETY: the context is open, and is held by the value below.
        let pd = unsafe { (functions.ibv_alloc_pd)(context) };
        let pd = NonNull::new(pd).ok_or_else(|| VerbsError::last("make a protection domain"))?;
        Ok(Self { inner: Arc::new(Allocated { pd, device: device.clone() }) })
    }

    /// Locks all pages of `memory` and lets the device reach them. Takes a while: once for a pool, not for a transfer.
    ///
    /// What a peer writes does not go through the pages' borrows. It is bytes that change by themselves, as those of a
    /// file do that is mapped: the code that gives the key away looks at a page only after the peer has said that it is done
    /// with it, and trusts what it finds by its digest alone.
    pub fn register(&self, memory: &HostMemory, rights: Rights) -> Result<Region, VerbsError> {
        let access = rights.as_access();
        let (mapping, bytes) = (memory.mapping(), memory.mapping().len());
        let functions = self.inner.device.inner.functions;
        // JUSTIFICATION: a call into C.
        // SAFETY: the range is all of a mapping that the region holds until the device has let go of it.
        let mr = unsafe {
            (functions.ibv_reg_mr)(self.inner.pd.as_ptr(), mapping.as_mut_ptr().cast(), bytes, access)
        };
        let refused = || VerbsError::Register { bytes, source: io::Error::last_os_error() };
        let mr = NonNull::new(mr).ok_or_else(refused)?;
        let (start, memory) = (mapping.as_ptr() as u64, Some(Held::Host(Arc::clone(mapping))));
        Ok(Region { mr, start, bytes, domain: self.clone(), memory, functions })
    }

    /// The same for all of a card's `memory`, which the device reaches past the processor: what is written there is to be
    /// looked at by the card, once it has [settled](DeviceMemory::settle_writes).
    pub fn register_card(&self, memory: &DeviceMemory, rights: Rights) -> Result<Region, VerbsError> {
        // Asked before the driver is: without the function, that is what is to be said.
        register_dmabuf()?;
        let (file, start, bytes) = memory.dmabuf().map_err(VerbsError::Export)?;
        let mut region = self.register_dmabuf(file.as_fd(), start, bytes, rights)?;
        region.memory = Some(Held::Card(Arc::clone(memory.mapped())));
        Ok(region)
    }

    /// The same for `bytes` of another device's memory, from the first one that `file` shows on. Requests and peers call
    /// that byte `start`, which must lie in its page as the byte does in its own.
    pub fn register_dmabuf(
        &self,
        file: BorrowedFd<'_>,
        start: u64,
        bytes: usize,
        rights: Rights,
    ) -> Result<Region, VerbsError> {
        let (register, functions) = (register_dmabuf()?, self.inner.device.inner.functions);
        let (domain, fd) = (self.inner.pd.as_ptr(), file.as_raw_fd());
        // JUSTIFICATION: a call into C.
        // SAFETY: the file is open. The kernel holds what it shows until the device has let go of it, and refuses a file
        // that shows no device's memory, or less of it.
        let mr = unsafe { register(domain, 0, bytes, start, fd, rights.as_access()) };
        let refused = || VerbsError::RegisterDmabuf { bytes, source: io::Error::last_os_error() };
        let mr = NonNull::new(mr).ok_or_else(refused)?;
        Ok(Region { mr, start, bytes, domain: self.clone(), memory: Some(Held::File), functions })
    }
}

/// Whether the library can register memory of other devices. Which devices' drivers take it shows when one is asked to.
pub fn knows_dmabuf() -> Result<(), VerbsError> {
    register_dmabuf().map(|_| ())
}

impl Rights {
    fn as_access(self) -> i32 {
        /// `IBV_ACCESS_LOCAL_WRITE`, without which there is no remote one.
        const LOCAL_WRITE: i32 = 1;
        /// `IBV_ACCESS_REMOTE_WRITE`.
        const REMOTE_WRITE: i32 = 2;
        match self {
            Self::Own => LOCAL_WRITE,
            Self::PeersWrite => LOCAL_WRITE | REMOTE_WRITE,
        }
    }
}

impl Drop for Allocated {
    fn drop(&mut self) {
        // JUSTIFICATION: a call into C.
        // SAFETY: regions and queue pairs hold this value, so there is none left.
        unsafe { (self.device.inner.functions.ibv_dealloc_pd)(self.pd.as_ptr()) };
    }
}

impl Region {
    /// The address of its first byte, as peers name it.
    pub fn start(&self) -> u64 {
        self.start
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// What a peer must show to write here.
    pub fn key(&self) -> u32 {
        // JUSTIFICATION: a field of C.
        // SAFETY: the structure lives until the region is given back.
        unsafe { self.mr.as_ref().rkey }
    }

    /// What this side's own requests show.
    pub(super) fn own_key(&self) -> u32 {
        // JUSTIFICATION: a field of C.
        // SAFETY: as above.
        unsafe { self.mr.as_ref().lkey }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // JUSTIFICATION: a call into C.
        // SAFETY: the region was given by the library and is given back once.
        let errno = unsafe { (self.functions.ibv_dereg_mr)(self.mr.as_ptr()) };
        if errno != 0 {
            // The device still reaches it: then it must never be reused.
            std::mem::forget(self.memory.take());
        }
    }
}

impl fmt::Debug for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Domain({})", self.inner.device.name())
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({} bytes)", self.bytes)
    }
}
