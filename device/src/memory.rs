//! Hot path.
//! Host memory for KV: regions of equal pages whose aliasing is checked at run time.
//!
//! A compute thread writes pages while tasks of a connector read other pages. The thread that uses a page
//! changes with every sequence, which the compiler cannot check. So every page has a borrow state.
//!
//! Cost: one compare-and-swap for each page to borrow and one to return it. Pages have 4 KiB to 64 KiB, so
//! this takes under a thousandth of the time to copy them.

pub mod available;
mod mapping;
pub mod peer;

use std::fmt;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use memmap2::MmapRaw;

use crate::borrow::{PageBusy, ReadBorrow, WriteBorrow};
use crate::cuda::CudaError;
use crate::page::{PageMut, PageRef};
use crate::regions::{RegionShape, Regions};

/// Memory of this process: zero at first, mapped once and never moved.
pub struct HostMemory {
    /// The mapping, shared with devices that access the memory directly. The last user unmaps it.
    mapping: Arc<MmapRaw>,
    /// The file that other processes map to read the memory; `None` for anonymous memory.
    file: Option<OwnedFd>,
    regions: Regions,
}

/// The error of an operation on KV memory.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    #[error("the regions are larger than the address space")]
    TooLarge,
    #[error("{} MiB of memory are requested, but only {} MiB are available to this process", asked >> 20, available >> 20)]
    TooMuch { asked: u64, available: u64 },
    #[error("map {bytes} bytes of memory")]
    Map {
        bytes: usize,
        #[source]
        source: std::io::Error,
    },
    #[error("create {bytes} bytes of shared memory")]
    Share {
        bytes: usize,
        #[source]
        source: std::io::Error,
    },
    #[error("give back KV memory")]
    Held(#[source] PageBusy),
    #[error("give back KV memory that is registered with a network card")]
    Registered,
    #[error("give back {bytes} bytes of GPU memory")]
    GiveBack {
        bytes: usize,
        #[source]
        source: CudaError,
    },
    #[error("allocate {bytes} bytes of GPU memory")]
    Device {
        bytes: usize,
        #[source]
        source: CudaError,
    },
}

impl HostMemory {
    /// Maps all regions at once. The system allocates memory at the first access.
    pub fn new(shapes: &[RegionShape]) -> Result<Self, MemoryError> {
        let regions = Regions::new(shapes)?;
        let bytes = regions.places().end();
        let mapping = mapping::private(bytes).map_err(|source| MemoryError::Map { bytes, source })?;
        Ok(Self { mapping: Arc::new(mapping), file: None, regions })
    }

    /// Like [`new`](Self::new), for other processes to [read](peer::PeerMemory) through the
    /// [`file`](Self::file).
    pub fn shared(shapes: &[RegionShape]) -> Result<Self, MemoryError> {
        let regions = Regions::new(shapes)?;
        let bytes = regions.places().end();
        let (mapping, file) =
            mapping::shared(bytes).map_err(|source| MemoryError::Share { bytes, source })?;
        Ok(Self { mapping: Arc::new(mapping), file: Some(file), regions })
    }

    /// Returns the file that another process maps to read this memory, if it is [`shared`](Self::shared).
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        self.file.as_ref().map(AsFd::as_fd)
    }

    /// Returns the offset of a page in [`file`](Self::file).
    ///
    /// # Panics
    /// If the region or the page does not exist.
    pub fn file_offset(&self, region: u32, page: u32) -> usize {
        self.regions.places().run(region, &(page..page + 1)).0
    }

    /// Borrows a run of pages for reading. Borrows all pages of the run or none.
    ///
    /// # Panics
    /// If the region or the page does not exist.
    pub fn read(&self, region: u32, pages: Range<u32>) -> Result<PageRef<'_>, PageBusy> {
        let run = self.regions.run(region, &pages);
        let borrow = ReadBorrow::take(run.borrows).map_err(|refusal| refusal.at(region, pages.start))?;
        // JUSTIFICATION: the compiler cannot check which thread uses a page.
        // SAFETY: the run lies in the mapping, which outlives the borrow of `self` and is initialised (the
        // system provides zeroes). Every writer needs a `WriteBorrow` of these pages, which this reader
        // excludes.
        Ok(unsafe { PageRef::new(self.at(run.offset), run.len, borrow, None) })
    }

    /// Borrows a run of pages for writing. Borrows all pages of the run or none.
    ///
    /// # Panics
    /// If the region or the page does not exist.
    pub fn write(&self, region: u32, pages: Range<u32>) -> Result<PageMut<'_>, PageBusy> {
        let run = self.regions.run(region, &pages);
        let borrow = WriteBorrow::take(run.borrows).map_err(|refusal| refusal.at(region, pages.start))?;
        // JUSTIFICATION: the compiler cannot check which thread uses a page.
        // SAFETY: the run is mapped and initialised as in `read`, and a `WriteBorrow` excludes every other
        // borrow.
        Ok(unsafe { PageMut::new(self.at(run.offset), run.len, borrow, None) })
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

    /// Returns the mapping, for devices that access the memory directly.
    pub(crate) fn mapping(&self) -> &Arc<MmapRaw> {
        &self.mapping
    }

    fn at(&self, offset: usize) -> NonNull<u8> {
        assert!(offset <= self.mapping.len(), "regions lie within the mapping");
        // JUSTIFICATION: no slice of the mapping may exist before the borrow is checked, hence pointer
        // arithmetic.
        // SAFETY: the offset lies within (or one past the end of) the one allocation; the result is not null.
        unsafe { NonNull::new_unchecked(self.mapping.as_mut_ptr().add(offset)) }
    }
}

impl fmt::Debug for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostMemory")
            .field("regions", &self.n_regions())
            .field("bytes", &self.bytes())
            .finish()
    }
}

#[cfg(test)]
mod tests;
