//! Memory that is registered with an RDMA device.

use std::fmt;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use memmap2::MmapRaw;

use super::device::Device;
use super::error::VerbsError;
use super::layout::{ACCESS_LOCAL_WRITE, ACCESS_REMOTE_WRITE, Mr};
use super::sys::register_dmabuf;
use crate::cuda::mapped::MappedMemory;
use crate::cuda::memory::DeviceMemory;
use crate::memory::HostMemory;

/// A protection domain: queue pairs access only the memory of their own domain. Clones share the domain.
#[derive(Clone)]
pub struct Domain {
    pub(super) inner: Arc<DomainHandle>,
}

pub(super) struct DomainHandle {
    pub(super) pd: NonNull<std::ffi::c_void>,
    pub(super) device: Device,
}

// JUSTIFICATION: a pointer is neither Send nor Sync.
// SAFETY: the library takes its own locks, as for `Device`.
unsafe impl Send for DomainHandle {}
// SAFETY: the library takes its own locks, as for `Device`.
unsafe impl Sync for DomainHandle {}

/// The access rights to a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rights {
    /// Only this side uses the memory, to send from it.
    Own,
    /// Peers with the region's key may write anywhere in it.
    PeersWrite,
}

/// Locked memory that the device can access while this value lives.
pub struct Region {
    mr: NonNull<Mr>,
    start: u64,
    bytes: usize,
    #[expect(dead_code, reason = "held for its Drop: after this value's own")]
    domain: Domain,
    memory: Option<RegisteredMemory>,
    functions: &'static super::sys::Functions,
}

/// Memory that must not be freed before the device has released it.
enum RegisteredMemory {
    #[expect(dead_code, reason = "held for its Drop")]
    Host(Arc<MmapRaw>),
    #[expect(dead_code, reason = "held for its Drop")]
    Card(Arc<MappedMemory>),
    /// The kernel holds the memory through its file.
    File,
}

// JUSTIFICATION: a pointer is neither Send nor Sync.
// SAFETY: the library takes its own locks, as for `Device`.
unsafe impl Send for Region {}
// SAFETY: the library takes its own locks, as for `Device`.
unsafe impl Sync for Region {}

impl Domain {
    pub fn new(device: &Device) -> Result<Self, VerbsError> {
        let (functions, context) = device.parts();
        // JUSTIFICATION: a call into C.
        // SAFETY: the context is open, and the value below holds it.
        let pd = unsafe { (functions.ibv_alloc_pd)(context) };
        let pd = NonNull::new(pd).ok_or_else(|| VerbsError::last("make a protection domain"))?;
        Ok(Self { inner: Arc::new(DomainHandle { pd, device: device.clone() }) })
    }

    /// Locks all pages of `memory` and lets the device access them. This is slow, so it is done once for a
    /// pool, not for each transfer.
    ///
    /// A peer's writes do not use the pages' borrows: the bytes change like those of a mapped file. The
    /// caller that gives out the key reads a page only after the peer has reported that it has finished. It
    /// then trusts the content only by its digest.
    pub fn register(&self, memory: &HostMemory, rights: Rights) -> Result<Region, VerbsError> {
        let access = rights.as_access();
        let (mapping, bytes) = (memory.mapping(), memory.mapping().len());
        let functions = self.inner.device.inner.functions;
        // JUSTIFICATION: a call into C.
        // SAFETY: the range is a whole mapping, which the region holds until the device has released it.
        let mr = unsafe {
            (functions.ibv_reg_mr)(self.inner.pd.as_ptr(), mapping.as_mut_ptr().cast(), bytes, access)
        };
        let refused = || VerbsError::Register { bytes, source: io::Error::last_os_error() };
        let mr = NonNull::new(mr).ok_or_else(refused)?;
        let (start, memory) = (mapping.as_ptr() as u64, Some(RegisteredMemory::Host(Arc::clone(mapping))));
        Ok(Region { mr, start, bytes, domain: self.clone(), memory, functions })
    }

    /// Registers all of a GPU's `memory`, which the device accesses without the CPU. Written bytes are for
    /// the GPU to read, after [`settle_writes`](DeviceMemory::settle_writes).
    pub fn register_card(&self, memory: &DeviceMemory, rights: Rights) -> Result<Region, VerbsError> {
        // This check comes before the driver call, so that a missing function is reported first.
        register_dmabuf()?;
        let (file, start, bytes) = memory.dmabuf().map_err(VerbsError::Export)?;
        let mut region = self.register_dmabuf(file.as_fd(), start, bytes, rights)?;
        region.memory = Some(RegisteredMemory::Card(Arc::clone(memory.mapped())));
        Ok(region)
    }

    /// Registers `bytes` of another device's memory, from the first byte of `file`. `start` is the address of
    /// that byte in requests and for peers. Its offset within a memory page must equal the byte's real
    /// offset.
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
        // SAFETY: the file is open. The kernel holds its memory until the device has released it, and rejects
        // a file that is not device memory or too short.
        let mr = unsafe { register(domain, 0, bytes, start, fd, rights.as_access()) };
        let refused = || VerbsError::RegisterDmabuf { bytes, source: io::Error::last_os_error() };
        let mr = NonNull::new(mr).ok_or_else(refused)?;
        Ok(Region { mr, start, bytes, domain: self.clone(), memory: Some(RegisteredMemory::File), functions })
    }
}

/// Checks that the library can register memory of other devices. Whether a device's driver supports it is
/// known only at registration.
pub fn knows_dmabuf() -> Result<(), VerbsError> {
    register_dmabuf().map(|_| ())
}

impl Rights {
    fn as_access(self) -> i32 {
        match self {
            Self::Own => ACCESS_LOCAL_WRITE,
            Self::PeersWrite => ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE,
        }
    }
}

impl Drop for DomainHandle {
    fn drop(&mut self) {
        // JUSTIFICATION: a call into C.
        // SAFETY: regions and queue pairs hold this value, so none is left.
        unsafe { (self.device.inner.functions.ibv_dealloc_pd)(self.pd.as_ptr()) };
    }
}

impl Region {
    /// Returns the address of the first byte, for peers.
    pub fn start(&self) -> u64 {
        self.start
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the key that a peer needs for writes into this region.
    pub fn key(&self) -> u32 {
        // JUSTIFICATION: a field of a C structure.
        // SAFETY: the structure lives until the region is deregistered.
        unsafe { self.mr.as_ref().rkey }
    }

    /// Returns the key for this side's own requests.
    pub(super) fn own_key(&self) -> u32 {
        // JUSTIFICATION: a field of a C structure.
        // SAFETY: the structure lives until the region is deregistered.
        unsafe { self.mr.as_ref().lkey }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // JUSTIFICATION: a call into C.
        // SAFETY: the region is from the library and is deregistered once.
        let errno = unsafe { (self.functions.ibv_dereg_mr)(self.mr.as_ptr()) };
        if errno != 0 {
            // The device can still access the memory, so it must never be reused.
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
