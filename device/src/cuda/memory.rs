//! GPU memory for KV: regions of equal pages, like [`HostMemory`](crate::HostMemory).
//!
//! The memory is allocated at once by the virtual-memory API, so that it can be exported to a peer on this
//! host, which writes into it.
//!
//! There are two kinds of users. CPU code borrows pages as in host memory and gets copies; tcp, checks and
//! tests thus work unchanged on a GPU node. Kernels get a whole region ([`DeviceMemory::region`]). Leases
//! decide which pages a kernel may use, because a step has too many pages to borrow one by one.

use std::fmt;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use cudarc::driver::CudaContext;

use super::buffer::{Element, View, ViewMut};
use super::mapped::MappedMemory;
use super::reach::reach;
use super::staging::Staging;
use super::wire_kernels::WireKernels;
use super::{Card, CudaError};
use crate::borrow::{Access, BorrowRefusal, PageBusy, ReadBorrow, WriteBorrow};
use crate::memory::MemoryError;
use crate::page::{PageMut, PageRef};
use crate::regions::{MemoryRun, RegionShape, Regions};

/// Memory of one GPU: zero at first, never moved. It can be [given back](Self::give_back) while it is not
/// used.
pub struct DeviceMemory {
    context: Arc<CudaContext>,
    staging: Staging,
    /// The kernels that move pages between GPUs.
    kernels: WireKernels,
    regions: Regions,
    mapped: Arc<MappedMemory>,
}

impl DeviceMemory {
    /// Allocates all regions at once.
    pub fn new(shapes: &[RegionShape], card: &Card) -> Result<Self, MemoryError> {
        let regions = Regions::new(shapes)?;
        let bytes = regions.places().end();
        Self::taken(card, regions).map_err(|source| MemoryError::Device { bytes, source })
    }

    fn taken(card: &Card, regions: Regions) -> Result<Self, CudaError> {
        let context = card.context();
        let mapped = Arc::new(MappedMemory::take(context, regions.places().end())?);
        let staging = Staging::new(context)?;
        // JUSTIFICATION: fresh KV memory must not contain another process's data.
        // SAFETY: the whole range is mapped, and no other code knows it yet.
        unsafe { staging.clear(mapped.address(), mapped.bytes())? };
        Ok(Self { context: Arc::clone(context), staging, kernels: WireKernels::of(card)?, regions, mapped })
    }

    /// Gives the memory back and keeps its addresses. No page can be borrowed until it is [taken
    /// again](Self::take_again).
    ///
    /// If the memory is already given back, nothing happens. Returns an error and changes nothing if a page
    /// is borrowed or a device accesses the memory directly. Meanwhile the caller must launch no kernel that
    /// uses a [`region`](Self::region). A process that has [imported](Self::export) the memory keeps it alive
    /// until it unmaps it.
    pub fn give_back(&self) -> Result<(), MemoryError> {
        if !self.mapped.is_backed() {
            return Ok(());
        }
        self.regions.take_away().map_err(MemoryError::Held)?;
        if self.is_registered() {
            self.regions.bring_back();
            return Err(MemoryError::Registered);
        }
        let bytes = self.mapped.bytes();
        self.mapped.give_back().map_err(|source| MemoryError::GiveBack { bytes, source })
    }

    /// Allocates memory of the same size again, all zero.
    pub fn take_again(&self) -> Result<(), MemoryError> {
        if self.mapped.is_backed() {
            return Ok(());
        }
        let bytes = self.mapped.bytes();
        self.cleared_again().map_err(|source| MemoryError::Device { bytes, source })?;
        self.regions.bring_back();
        Ok(())
    }

    fn cleared_again(&self) -> Result<(), CudaError> {
        self.mapped.take_again()?;
        // JUSTIFICATION: fresh KV memory must not contain another process's data.
        // SAFETY: the whole range is mapped, and no page of it can be borrowed yet.
        let cleared = unsafe { self.staging.clear(self.mapped.address(), self.mapped.bytes()) };
        // The error of the clearing is reported, because it has the cause.
        cleared.inspect_err(|_| drop(self.mapped.give_back()))
    }

    /// Returns whether another device accesses the memory directly.
    pub fn is_registered(&self) -> bool {
        Arc::strong_count(&self.mapped) > 1
    }

    /// Returns the bytes of GPU memory that this value holds, or holds again when taken.
    pub fn mapped_bytes(&self) -> usize {
        self.mapped.bytes()
    }

    /// Borrows a run of pages and copies them from the GPU. Borrows all pages of the run or none.
    ///
    /// # Panics
    /// If the region or the page does not exist.
    pub fn read(&self, region: u32, pages: Range<u32>) -> Result<PageRef<'_>, PageBusy> {
        let run = self.run(region, &pages, Access::Read)?;
        let borrow = ReadBorrow::take(run.borrows).map_err(|refusal| refusal.at(region, pages.start))?;
        // JUSTIFICATION: GPU memory is accessed by address.
        // SAFETY: the run lies in the mapping, which this value holds; no page of it has a writer.
        let copy = unsafe { self.staging.read(self.address(&run), run.len) };
        let copy = copy.map_err(|_| lost(region, pages.start, Access::Read))?;
        // SAFETY: the copy is initialised, as long as the run, and has no other owner.
        Ok(unsafe { PageRef::new(copy.start(), run.len, borrow, Some(copy)) })
    }

    /// Borrows a run of pages and copies them from the GPU. When the borrow ends, they are copied back.
    /// Borrows all pages of the run or none.
    ///
    /// # Panics
    /// If the region or the page does not exist.
    pub fn write(&self, region: u32, pages: Range<u32>) -> Result<PageMut<'_>, PageBusy> {
        let run = self.run(region, &pages, Access::Write)?;
        let borrow = WriteBorrow::take(run.borrows).map_err(|refusal| refusal.at(region, pages.start))?;
        // JUSTIFICATION: GPU memory is accessed by address.
        // SAFETY: the run lies in the mapping, which this value holds; no other code has borrowed a page of it, and the copy
        // is dropped before the borrow is.
        let copy = unsafe { self.staging.write(self.address(&run), run.len) };
        let copy = copy.map_err(|_| lost(region, pages.start, Access::Write))?;
        // SAFETY: the copy is initialised, as long as the run, and has no other owner.
        Ok(unsafe { PageMut::new(copy.start(), run.len, borrow, Some(copy)) })
    }

    /// Returns all pages of a region, for kernels that read them.
    ///
    /// # Panics
    /// If the region does not exist, or its bytes are not whole numbers of this type.
    pub fn region<T: Element>(&self, region: u32) -> View<'_, T> {
        let (address, len) = self.numbers::<T>(region);
        View::over(address, len, self.ordinal())
    }

    /// Returns all pages of a region, for kernels that write some of them. The kernels may write only pages
    /// that the caller has leased and that no other code uses.
    ///
    /// # Panics
    /// If the region does not exist, or its bytes are not whole numbers of this type.
    pub fn region_mut<T: Element>(&self, region: u32) -> ViewMut<'_, T> {
        let (address, len) = self.numbers::<T>(region);
        ViewMut::over(address, len, self.ordinal())
    }

    fn numbers<T: Element>(&self, region: u32) -> (u64, usize) {
        let (offset, bytes) = self.regions.places().run(region, &(0..self.shape(region).n_pages));
        assert!(bytes.is_multiple_of(size_of::<T>()), "pages of {bytes} bytes are not whole numbers");
        (self.mapped.address() + offset as u64, bytes / size_of::<T>())
    }

    /// Returns a file descriptor for mapping the memory in another process of this host, and the number of
    /// bytes to map.
    pub fn export(&self) -> Result<(OwnedFd, usize), CudaError> {
        Ok((self.mapped.export()?, self.mapped.bytes()))
    }

    /// Returns a file descriptor (dmabuf) for another device of this machine, the address of the first byte,
    /// and the number of bytes.
    pub fn dmabuf(&self) -> Result<(OwnedFd, u64, usize), CudaError> {
        Ok((self.mapped.dmabuf()?, self.mapped.address(), self.mapped.bytes()))
    }

    /// Returns when the GPU sees every write that other devices have reported complete.
    pub fn settle_writes(&self) -> Result<(), CudaError> {
        self.mapped.settle_writes()
    }

    pub fn shape(&self, region: u32) -> RegionShape {
        self.regions.places().shape(region)
    }

    pub fn n_regions(&self) -> u32 {
        self.regions.places().len() as u32
    }

    /// Returns the total bytes of all pages.
    pub fn bytes(&self) -> usize {
        self.regions.places().bytes()
    }

    /// Returns the bytes in use on the GPU, by all processes.
    pub fn used_bytes(&self) -> Result<u64, CudaError> {
        let counted = self.context.mem_get_info().map_err(CudaError::during("ask for the GPU's memory"))?;
        Ok((counted.1 - counted.0) as u64)
    }

    /// Lets this memory's GPU access memory that the driver's allocator gives out on the GPU of `other`.
    pub fn reach(&self, other: &Self) -> Result<(), CudaError> {
        if self.ordinal() == other.ordinal() { Ok(()) } else { reach(&self.context, &other.context) }
    }

    /// Returns the GPU of this memory.
    pub fn ordinal(&self) -> usize {
        self.context.ordinal()
    }

    /// Returns the offset of a page in the memory that [`export`](Self::export) exports.
    ///
    /// # Panics
    /// If the region or the page does not exist.
    pub fn offset(&self, region: u32, page: u32) -> u64 {
        self.regions.places().run(region, &(page..page + 1)).0 as u64
    }

    pub(super) fn page_address(&self, region: u32, page: u32) -> u64 {
        self.mapped.address() + self.offset(region, page)
    }

    /// Returns the mapping, for devices that access the memory directly.
    pub(crate) fn mapped(&self) -> &Arc<MappedMemory> {
        &self.mapped
    }

    pub(super) fn wire_kernels(&self) -> &WireKernels {
        &self.kernels
    }

    pub(super) fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    fn run(&self, region: u32, pages: &Range<u32>, wanted: Access) -> Result<MemoryRun<'_>, PageBusy> {
        let run = self.regions.run(region, pages);
        if self.staging.is_lost() { Err(lost(region, pages.start, wanted)) } else { Ok(run) }
    }

    fn address(&self, run: &MemoryRun<'_>) -> u64 {
        self.mapped.address() + run.offset as u64
    }
}

fn lost(region: u32, page: u32, wanted: Access) -> PageBusy {
    PageBusy { region, page, wanted, held: BorrowRefusal::OnLostCard }
}

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceMemory")
            .field("ordinal", &self.ordinal())
            .field("regions", &self.n_regions())
            .field("bytes", &self.bytes())
            .finish()
    }
}
