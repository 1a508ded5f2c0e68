//! Memory of a card by the virtual-memory API: taken as such, mapped at an address, and handed to other processes.
//!
//! Three values for three rights, each given back by its drop: an address range ([`Reserved`]), memory ([`Physical`]),
//! and the one being reachable at the other ([`Mapped`]). Memory can so be [given back](Mapped::give_back) and other memory
//! [taken](Mapped::take_again) at the same address later, which graphs have recorded; and it can be mapped by a peer, who
//! keeps it for as long as he has it.

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

/// What memory is handed to other processes as.
const SHARED_AS: HandleType = HandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// Memory of this card or of a peer's, reachable from this card's kernels.
pub(crate) struct Mapped {
    // Dropped in this order, and after the unmapping in `drop`.
    reserved: Reserved,
    /// `None` while the memory is given back. Held for a call of the driver.
    physical: Mutex<Option<Physical>>,
}

/// An address range with nothing behind it.
struct Reserved {
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

// === impl Mapped ===

impl Mapped {
    /// Takes at least `bytes` of this card's memory. Their content is undefined.
    pub(super) fn take(context: &Arc<CudaContext>, bytes: usize) -> Result<Self, CudaError> {
        bind(context)?;
        Self::at_new_address(context, Physical::take(context, bytes)?)
    }

    /// Maps the memory that a peer has exported, of its size there.
    pub(super) fn import(context: &Arc<CudaContext>, fd: &OwnedFd, bytes: usize) -> Result<Self, CudaError> {
        bind(context)?;
        Self::at_new_address(context, Physical::import(context, fd, bytes)?)
    }

    fn at_new_address(context: &Arc<CudaContext>, physical: Physical) -> Result<Self, CudaError> {
        let reserved = Reserved::new(context, physical.bytes)?;
        let mapped = Self { reserved, physical: Mutex::new(None) };
        mapped.back_by(physical)?;
        Ok(mapped)
    }

    /// Makes this memory reachable at the address, where there is none.
    fn back_by(&self, physical: Physical) -> Result<(), CudaError> {
        let mut here = self.physical();
        assert!(
            here.is_none() && physical.bytes == self.bytes(),
            "one piece of memory, as long as its addresses"
        );
        // JUSTIFICATION: cudarc has no safe calls for virtual memory.
        // SAFETY: the range is ours, as long as the memory, and nothing is mapped there.
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

    /// Gives the memory back and keeps the address. A process that has imported it keeps it alive until it lets go.
    ///
    /// The caller sees to it that no kernel is launched that uses it, until it is [taken again](Self::take_again).
    pub(super) fn give_back(&self) -> Result<(), CudaError> {
        bind(&self.reserved.context)?;
        let mut here = self.physical();
        // The card may still be at work on it.
        self.reserved.context.synchronize().map_err(CudaError::during("wait for the GPU"))?;
        if let Some(physical) = here.take() {
            self.unmap();
            drop(physical);
        }
        Ok(())
    }

    /// Takes as much memory as was given back, at the same address. Its content is undefined.
    pub(super) fn take_again(&self) -> Result<(), CudaError> {
        let context = &self.reserved.context;
        bind(context)?;
        if self.is_backed() { Ok(()) } else { self.back_by(Physical::take(context, self.bytes())?) }
    }

    /// Whether there is memory at the address.
    pub(super) fn is_backed(&self) -> bool {
        self.physical().is_some()
    }

    fn unmap(&self) {
        // JUSTIFICATION: the counterpart of `back_by`.
        // SAFETY: the range is mapped, by this value alone, and no kernel uses it any more.
        let _ = unsafe { sys::cuMemUnmap(self.address(), self.bytes()) };
    }

    fn physical(&self) -> MutexGuard<'_, Option<Physical>> {
        self.physical.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets this card's kernels read and write it, wherever the memory is.
    fn allow(&self) -> Result<(), CudaError> {
        let access = CUmemAccessDesc {
            location: on(&self.reserved.context),
            flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // JUSTIFICATION: as above.
        // SAFETY: the whole range is mapped; the description outlives the call.
        unsafe { sys::cuMemSetAccess(self.address(), self.bytes(), &access, 1) }
            .result()
            .map_err(CudaError::during("make GPU memory reachable (can the two GPUs reach each other?)"))
    }

    /// Something that another process can map it by. The memory lives for as long as anyone has it.
    pub(super) fn export(&self) -> Result<OwnedFd, CudaError> {
        bind(&self.reserved.context)?;
        let physical = self.physical();
        let handle = physical.as_ref().ok_or(CudaError::GivenBack)?.handle;
        let mut fd: i32 = -1;
        // JUSTIFICATION: as above.
        // SAFETY: the driver writes a file descriptor of this process, which no other code knows yet.
        unsafe {
            sys::cuMemExportToShareableHandle((&raw mut fd).cast(), handle, SHARED_AS, 0)
                .result()
                .map_err(CudaError::during("export GPU memory"))?;
            Ok(OwnedFd::from_raw_fd(fd))
        }
    }

    /// Something that another device of this machine can reach it by: all of it, from its first byte on.
    pub(super) fn dmabuf(&self) -> Result<OwnedFd, CudaError> {
        let context = &self.reserved.context;
        bind(context)?;
        let supported = Attribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED;
        // An older driver knows neither the question nor the call.
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
        // JUSTIFICATION: as above.
        // SAFETY: the range is mapped, and made of whole pages; the driver writes a file descriptor of this process, which
        // no other code knows yet.
        unsafe {
            sys::cuMemGetHandleForAddressRange((&raw mut fd).cast(), self.address(), self.bytes(), kind, 0)
                .result()
                .map_err(CudaError::during("give GPU memory to other devices (dmabuf)"))?;
            Ok(OwnedFd::from_raw_fd(fd))
        }
    }

    /// Returns when kernels that are launched from here on see what other devices have said that they have written.
    pub(super) fn settle_writes(&self) -> Result<(), CudaError> {
        let context = &self.reserved.context;
        bind(context)?;
        let ordering = context
            .attribute(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING)
            .map_err(CudaError::during("ask in which order the GPU sees a device's writes"))?;
        if ordering >= CUGPUDirectRDMAWritesOrdering::CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER as i32 {
            return Ok(());
        }
        // JUSTIFICATION: as above.
        // SAFETY: the call has no pointers; the context is this thread's.
        unsafe {
            sys::cuFlushGPUDirectRDMAWrites(
                CUflushGPUDirectRDMAWritesTarget::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX,
                CUflushGPUDirectRDMAWritesScope::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER,
            )
        }
        .result()
        .map_err(CudaError::during("have the GPU see a device's writes"))
    }

    pub(super) fn address(&self) -> u64 {
        self.reserved.address
    }

    /// Whose kernels reach it.
    pub(super) fn ordinal(&self) -> usize {
        self.reserved.context.ordinal()
    }

    /// All that is mapped: what was asked for, and the rest of its last unit.
    pub(super) fn bytes(&self) -> usize {
        self.reserved.bytes
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let context = &self.reserved.context;
        // The card may still be at work on it. Where waiting fails the context is lost, memory and all.
        let _ = context.synchronize();
        if self.is_backed() {
            self.unmap();
        }
    }
}

impl fmt::Debug for Mapped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mapped")
            .field("ordinal", &self.reserved.context.ordinal())
            .field("bytes", &self.bytes())
            .field("is_backed", &self.is_backed())
            .finish()
    }
}

// === impl Reserved ===

impl Reserved {
    fn new(context: &Arc<CudaContext>, bytes: usize) -> Result<Self, CudaError> {
        let mut address = 0;
        // JUSTIFICATION: as above.
        // SAFETY: the driver writes the address of a range with no other owner.
        unsafe { sys::cuMemAddressReserve(&mut address, bytes, 0, 0, 0) }
            .result()
            .map_err(CudaError::during("reserve addresses for GPU memory"))?;
        Ok(Self { context: Arc::clone(context), address, bytes })
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        let _ = bind(&self.context);
        // JUSTIFICATION: the counterpart of `new`.
        // SAFETY: the range is ours and nothing is mapped there any more.
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
        // JUSTIFICATION: as above.
        // SAFETY: the driver writes a handle, which is kept by this value alone; the description outlives the call.
        unsafe { sys::cuMemCreate(&mut handle, bytes, &wanted, 0) }
            .result()
            .map_err(|source| no_room(bytes, source))?;
        Ok(Self { context: Arc::clone(context), handle, bytes })
    }

    fn import(context: &Arc<CudaContext>, fd: &OwnedFd, bytes: usize) -> Result<Self, CudaError> {
        let mut handle = 0;
        // The driver wants the number itself in the place of a pointer.
        let number = fd.as_raw_fd() as usize as *mut c_void;
        // JUSTIFICATION: as above.
        // SAFETY: the driver looks at the descriptor, which is open, and refuses what is no memory of a card.
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
        // SAFETY: the handle is ours; the memory stays for as long as it is mapped anywhere.
        let _ = unsafe { sys::cuMemRelease(self.handle) };
    }
}

fn bind(context: &CudaContext) -> Result<(), CudaError> {
    context.bind_to_thread().map_err(CudaError::during("use the GPU from this thread"))
}

fn on(context: &CudaContext) -> CUmemLocation {
    CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: context.ordinal() as i32 }
}

/// Has to be asked for when memory is taken, and is refused where it cannot be had.
fn can_be_read_by_network_cards(context: &CudaContext) -> bool {
    let attribute = Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED;
    context.attribute(attribute).is_ok_and(|supported| supported != 0)
}

/// The unit in which memory is handed out.
fn granularity(wanted: &CUmemAllocationProp) -> Result<usize, CudaError> {
    let mut unit = 0;
    let recommended = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
    // JUSTIFICATION: as above.
    // SAFETY: both pointers are to values that outlive the call.
    unsafe { sys::cuMemGetAllocationGranularity(&mut unit, wanted, recommended) }
        .result()
        .map_err(CudaError::during("ask for the unit of GPU memory"))?;
    Ok(unit)
}

/// At least one unit: no memory at all cannot be mapped.
fn whole_units(bytes: usize, unit: usize) -> usize {
    bytes.max(1).next_multiple_of(unit.max(1))
}

/// The card's memory is counted again, so that the message says how much is missing.
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
