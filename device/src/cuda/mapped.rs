//! GPU memory from the virtual-memory API: allocated, mapped at an address and shared with other processes.
//!
//! Three values hold three resources, and each drop frees one: an address range ([`AddressRange`]), memory
//! ([`Physical`]) and the mapping of memory at an address ([`MappedMemory`]). Memory can therefore be [given
//! back](MappedMemory::give_back), and other memory [taken](MappedMemory::take_again) later at the same address, which
//! graphs have recorded. A peer can map the memory too, and then the memory lives until the peer unmaps it.

use std::ffi::c_void;
use std::fmt;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::{
    self, CUGPUDirectRDMAWritesOrdering, CUdevice_attribute as Attribute, CUflushGPUDirectRDMAWritesScope,
    CUflushGPUDirectRDMAWritesTarget, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationGranularity_flags,
    CUmemAllocationHandleType as HandleType, CUmemAllocationProp, CUmemAllocationType, CUmemLocation,
    CUmemLocationType, CUmemRangeHandleType,
};
use cudarc::driver::{CudaContext, DriverError, result};

use super::CudaError;

/// The handle type for sharing memory with other processes.
const SHARED_AS: HandleType = HandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// Memory of this GPU or a peer GPU, mapped for this GPU's kernels.
pub(crate) struct MappedMemory {
    // The fields `reserved` and `physical` are dropped in this order, after `drop` has unmapped the memory.
    reserved: AddressRange,
    /// `None` while the memory is given back. The lock is held during driver calls.
    physical: Mutex<Option<Physical>>,
}

/// A reserved address range without memory.
struct AddressRange {
    context: Arc<CudaContext>,
    address: u64,
    bytes: usize,
}

/// Memory without an address.
struct Physical {
    context: Arc<CudaContext>,
    handle: sys::CUmemGenericAllocationHandle,
    bytes: usize,
}

// === impl MappedMemory ===

impl MappedMemory {
    /// Allocates at least `bytes` of this GPU's memory. The content is undefined.
    pub(super) fn take(context: &Arc<CudaContext>, bytes: usize) -> Result<Self, CudaError> {
        bind(context)?;
        Self::at_new_address(context, Physical::take(context, bytes)?)
    }

    /// Maps memory that a peer has exported. `bytes` is its size at the peer.
    pub(super) fn import(context: &Arc<CudaContext>, fd: &OwnedFd, bytes: usize) -> Result<Self, CudaError> {
        bind(context)?;
        Self::at_new_address(context, Physical::import(context, fd, bytes)?)
    }

    fn at_new_address(context: &Arc<CudaContext>, physical: Physical) -> Result<Self, CudaError> {
        let reserved = AddressRange::new(context, physical.bytes)?;
        let mapped = Self { reserved, physical: Mutex::new(None) };
        mapped.back_by(physical)?;
        Ok(mapped)
    }

    /// Maps `physical` at this value's address, where nothing is mapped yet.
    fn back_by(&self, physical: Physical) -> Result<(), CudaError> {
        let mut here = self.physical();
        assert!(
            here.is_none() && physical.bytes == self.bytes(),
            "no memory is mapped yet, and the sizes are equal"
        );
        // JUSTIFICATION: cudarc has no safe calls for virtual memory.
        // SAFETY: this value owns the range, which has the memory's length and has nothing mapped.
        unsafe { sys::cuMemMap(self.address(), self.bytes(), 0, physical.handle, 0) }
            .result()
            .map_err(CudaError::during("map GPU memory"))?;
        if let Err(refused) = self.allow() {
            self.unmap();
            return Err(refused);
        }
        *here = Some(physical);
        Ok(())
    }

    /// Gives the memory back and keeps the address. A process that has imported the memory keeps it alive
    /// until it unmaps it.
    ///
    /// The caller must launch no kernel that uses the memory until it is [taken again](Self::take_again).
    pub(super) fn give_back(&self) -> Result<(), CudaError> {
        bind(&self.reserved.context)?;
        let mut here = self.physical();
        // Waits first, because the GPU may still use the memory.
        self.reserved.context.synchronize().map_err(CudaError::during("wait for the GPU"))?;
        if let Some(physical) = here.take() {
            self.unmap();
            drop(physical);
        }
        Ok(())
    }

    /// Allocates memory of the same size at the same address. Its content is undefined.
    pub(super) fn take_again(&self) -> Result<(), CudaError> {
        let context = &self.reserved.context;
        bind(context)?;
        if self.is_backed() { Ok(()) } else { self.back_by(Physical::take(context, self.bytes())?) }
    }

    /// Returns whether memory is mapped at the address.
    pub(super) fn is_backed(&self) -> bool {
        self.physical().is_some()
    }

    fn unmap(&self) {
        // JUSTIFICATION: the counterpart of `back_by`.
        // SAFETY: this value alone has mapped the range, and no kernel uses it any more.
        let _ = unsafe { sys::cuMemUnmap(self.address(), self.bytes()) };
    }

    fn physical(&self) -> MutexGuard<'_, Option<Physical>> {
        self.physical.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets this GPU's kernels read and write the memory, also if it is on another GPU.
    fn allow(&self) -> Result<(), CudaError> {
        let access = CUmemAccessDesc {
            location: on(&self.reserved.context),
            flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // JUSTIFICATION: cudarc has no safe calls for virtual memory.
        // SAFETY: the whole range is mapped; the description outlives the call.
        unsafe { sys::cuMemSetAccess(self.address(), self.bytes(), &access, 1) }
            .result()
            .map_err(CudaError::during("make GPU memory reachable (can the two GPUs reach each other?)"))
    }

    /// Returns a file descriptor for mapping the memory in another process. The memory lives until the last
    /// process unmaps it.
    pub(super) fn export(&self) -> Result<OwnedFd, CudaError> {
        bind(&self.reserved.context)?;
        let physical = self.physical();
        let handle = physical.as_ref().ok_or(CudaError::GivenBack)?.handle;
        let mut fd: i32 = -1;
        // JUSTIFICATION: cudarc has no safe calls for virtual memory.
        // SAFETY: the driver writes a new file descriptor of this process, which no other code knows.
        unsafe {
            sys::cuMemExportToShareableHandle((&raw mut fd).cast(), handle, SHARED_AS, 0)
                .result()
                .map_err(CudaError::during("export GPU memory"))?;
            Ok(OwnedFd::from_raw_fd(fd))
        }
    }

    /// Returns a file descriptor (dmabuf) through which another device of this machine accesses the whole
    /// memory.
    pub(super) fn dmabuf(&self) -> Result<OwnedFd, CudaError> {
        let context = &self.reserved.context;
        bind(context)?;
        let supported = Attribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED;
        // The attribute is checked, because an older driver supports neither the attribute nor the call.
        if context.attribute(supported).is_ok_and(|supported| supported != 0) {
            self.exported_as_dmabuf()
        } else {
            Err(CudaError::NoDmabuf)
        }
    }

    fn exported_as_dmabuf(&self) -> Result<OwnedFd, CudaError> {
        let physical = self.physical();
        if physical.is_none() {
            return Err(CudaError::GivenBack);
        }
        let mut fd: i32 = -1;
        let kind = CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
        // JUSTIFICATION: cudarc has no safe calls for virtual memory.
        // SAFETY: the range is mapped and consists of whole pages. The driver writes a new file descriptor of
        // this process, which no other code knows.
        unsafe {
            sys::cuMemGetHandleForAddressRange((&raw mut fd).cast(), self.address(), self.bytes(), kind, 0)
                .result()
                .map_err(CudaError::during("give GPU memory to other devices (dmabuf)"))?;
            Ok(OwnedFd::from_raw_fd(fd))
        }
    }

    /// Returns when kernels launched later see every write that other devices have reported complete.
    pub(super) fn settle_writes(&self) -> Result<(), CudaError> {
        let context = &self.reserved.context;
        bind(context)?;
        let ordering = context
            .attribute(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING)
            .map_err(CudaError::during("ask for the ordering of RDMA writes to the GPU"))?;
        if ordering >= CUGPUDirectRDMAWritesOrdering::CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER as i32 {
            return Ok(());
        }
        // JUSTIFICATION: cudarc has no safe call for this.
        // SAFETY: the call takes no pointers, and the context is current on this thread.
        unsafe {
            sys::cuFlushGPUDirectRDMAWrites(
                CUflushGPUDirectRDMAWritesTarget::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX,
                CUflushGPUDirectRDMAWritesScope::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER,
            )
        }
        .result()
        .map_err(CudaError::during("flush RDMA writes to the GPU"))
    }

    pub(super) fn address(&self) -> u64 {
        self.reserved.address
    }

    /// Returns the GPU whose kernels can access the memory.
    pub(super) fn ordinal(&self) -> usize {
        self.reserved.context.ordinal()
    }

    /// Returns the number of mapped bytes: the requested size, rounded up to whole units.
    pub(super) fn bytes(&self) -> usize {
        self.reserved.bytes
    }
}

impl Drop for MappedMemory {
    fn drop(&mut self) {
        let context = &self.reserved.context;
        // Waits, because the GPU may still use the memory. If waiting fails, the context and all its memory
        // are lost.
        let _ = context.synchronize();
        if self.is_backed() {
            self.unmap();
        }
    }
}

impl fmt::Debug for MappedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mapped")
            .field("ordinal", &self.reserved.context.ordinal())
            .field("bytes", &self.bytes())
            .field("is_backed", &self.is_backed())
            .finish()
    }
}

// === impl AddressRange ===

impl AddressRange {
    fn new(context: &Arc<CudaContext>, bytes: usize) -> Result<Self, CudaError> {
        let mut address = 0;
        // JUSTIFICATION: cudarc has no safe calls for virtual memory.
        // SAFETY: the driver writes the address of a range with no other owner.
        unsafe { sys::cuMemAddressReserve(&mut address, bytes, 0, 0, 0) }
            .result()
            .map_err(CudaError::during("reserve addresses for GPU memory"))?;
        Ok(Self { context: Arc::clone(context), address, bytes })
    }
}

impl Drop for AddressRange {
    fn drop(&mut self) {
        let _ = bind(&self.context);
        // JUSTIFICATION: the counterpart of `new`.
        // SAFETY: this value owns the range, and nothing is mapped there any more.
        let _ = unsafe { sys::cuMemAddressFree(self.address, self.bytes) };
    }
}

// === impl Physical ===

impl Physical {
    fn take(context: &Arc<CudaContext>, bytes: usize) -> Result<Self, CudaError> {
        let wanted = CUmemAllocationProp {
            type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: SHARED_AS,
            location: on(context),
            win32HandleMetaData: std::ptr::null_mut(),
            allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
                compressionType: 0,
                gpuDirectRDMACapable: u8::from(can_be_read_by_network_cards(context)),
                usage: 0,
                reserved: [0; 4],
            },
        };
        let bytes = whole_units(bytes, granularity(&wanted)?);
        let mut handle = 0;
        // JUSTIFICATION: cudarc has no safe calls for virtual memory.
        // SAFETY: the driver writes a handle, which only this value keeps. The description outlives the call.
        unsafe { sys::cuMemCreate(&mut handle, bytes, &wanted, 0) }
            .result()
            .map_err(|source| no_room(bytes, source))?;
        Ok(Self { context: Arc::clone(context), handle, bytes })
    }

    fn import(context: &Arc<CudaContext>, fd: &OwnedFd, bytes: usize) -> Result<Self, CudaError> {
        let mut handle = 0;
        // The driver takes the descriptor's number in place of a pointer.
        let number = fd.as_raw_fd() as usize as *mut c_void;
        // JUSTIFICATION: cudarc has no safe calls for virtual memory.
        // SAFETY: the descriptor is open. The driver rejects a descriptor that is not GPU memory.
        unsafe { sys::cuMemImportFromShareableHandle(&mut handle, number, SHARED_AS) }
            .result()
            .map_err(CudaError::during("import a peer's GPU memory"))?;
        Ok(Self { context: Arc::clone(context), handle, bytes })
    }
}

impl Drop for Physical {
    fn drop(&mut self) {
        let _ = bind(&self.context);
        // JUSTIFICATION: the counterpart of `take` and `import`.
        // SAFETY: this value owns the handle. The memory lives until its last mapping is removed.
        let _ = unsafe { sys::cuMemRelease(self.handle) };
    }
}

fn bind(context: &CudaContext) -> Result<(), CudaError> {
    context.bind_to_thread().map_err(CudaError::during("use the GPU from this thread"))
}

fn on(context: &CudaContext) -> CUmemLocation {
    CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: context.ordinal() as i32 }
}

/// Returns whether memory for RDMA can be allocated on this GPU. RDMA must be requested at allocation, which
/// fails if it is not supported.
fn can_be_read_by_network_cards(context: &CudaContext) -> bool {
    let attribute = Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED;
    context.attribute(attribute).is_ok_and(|supported| supported != 0)
}

/// Returns the unit of GPU memory allocation, in bytes.
fn granularity(wanted: &CUmemAllocationProp) -> Result<usize, CudaError> {
    let mut unit = 0;
    let recommended = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
    // JUSTIFICATION: cudarc has no safe call for this.
    // SAFETY: both pointers are to values that outlive the call.
    unsafe { sys::cuMemGetAllocationGranularity(&mut unit, wanted, recommended) }
        .result()
        .map_err(CudaError::during("ask for the unit of GPU memory"))?;
    Ok(unit)
}

/// Rounds up to whole units. Returns at least one unit, because an empty range cannot be mapped.
fn whole_units(bytes: usize, unit: usize) -> usize {
    bytes.max(1).next_multiple_of(unit.max(1))
}

/// Makes the error for a failed allocation of `bytes`. Reads the free memory, so that the error says how much
/// is missing.
pub(super) fn no_room(bytes: usize, source: DriverError) -> CudaError {
    match result::mem_get_info() {
        Ok((free_bytes, total_bytes)) if bytes > free_bytes => {
            CudaError::OutOfMemory { bytes, free_bytes, total_bytes }
        }
        _ => CudaError::during("take memory of the GPU")(source),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_taken_in_whole_units() {
        let unit = 2 << 20;
        for (bytes, taken) in [(0, unit), (1, unit), (unit, unit), (unit + 1, 2 * unit), (1 << 30, 1 << 30)] {
            assert_eq!(whole_units(bytes, unit), taken, "{bytes} bytes");
        }
    }
}
