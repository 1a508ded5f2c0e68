//! Hot path.
//! Host memory for KV: regions of equal pages whose aliasing is checked at run time.
//!
//! A compute thread writes pages while the tasks of a connector read others, and which page belongs to whom changes
//! with every sequence: the borrow checker cannot follow. So every page has a borrow state, as a `RefCell` has, made
//! of one atomic. It never blocks: a borrow is had at once or refused, and a refusal is a bug in the caller, who
//! must have asked for a block that it does not hold.
//!
//! Cost: one compare-and-swap per page to borrow and one to give back. Pages are 4 KiB to 64 KiB, so this stays
//! under a thousandth of the time to copy them.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use memmap2::{MmapMut, MmapRaw};

/// Where regions start within the mapping: a multiple of any vector's width and of a memory page.
const REGION_ALIGN_BYTES: usize = 4096;
/// Nobody holds the page.
const IDLE: u32 = 0;
/// Somebody writes the page. Every other value is a number of readers.
const WRITTEN: u32 = u32::MAX;

/// What one region looks like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionShape {
    pub page_bytes: usize,
    pub n_pages: u32,
}

/// Anonymous memory of this process, zero at first, mapped once and never moved.
pub struct HostMemory {
    mapping: MmapRaw,
    regions: Box<[Region]>,
    /// The bytes of all pages, without the gaps between regions.
    bytes: usize,
}

struct Region {
    shape: RegionShape,
    /// Where it starts in the mapping.
    offset: usize,
    borrows: Box<[AtomicU32]>,
}

/// No memory to be had.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    #[error("the regions' sizes add up to more bytes than an address can name")]
    TooLarge,
    #[error("map {bytes} bytes of memory")]
    Map {
        bytes: usize,
        #[source]
        source: std::io::Error,
    },
}

/// A page of the run is held in a way that excludes this borrow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{wanted} page {page} of region {region}, which {held}")]
pub struct PageBusy {
    pub region: u32,
    pub page: u32,
    pub wanted: Access,
    pub held: Held,
}

/// What a borrow is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    Read,
    Write,
}

/// Who stands in the way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Held {
    ByWriter,
    ByReaders(u32),
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Read => "read",
            Self::Write => "write",
        })
    }
}

impl fmt::Display for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ByWriter => f.write_str("somebody writes"),
            Self::ByReaders(n) => write!(f, "{n} others read"),
        }
    }
}

// === impl HostMemory ===

impl HostMemory {
    /// Maps all regions at once. Memory is taken from the system as it is first touched.
    pub fn new(shapes: &[RegionShape]) -> Result<Self, MemoryError> {
        let (mut end, mut bytes) = (0, 0);
        let mut regions = Vec::with_capacity(shapes.len());
        for shape in shapes {
            regions.push(Region::new(*shape, end));
            end = region_end(*shape, end).ok_or(MemoryError::TooLarge)?;
            bytes += shape.bytes().ok_or(MemoryError::TooLarge)?;
        }
        Ok(Self { mapping: map(end)?, regions: regions.into(), bytes })
    }

    /// Borrows a run of pages for reading: all of them, or none.
    ///
    /// # Panics
    /// If there is no such region, or no such page in it.
    pub fn read(&self, region: u32, pages: Range<u32>) -> Result<PageRef<'_>, PageBusy> {
        let run = self.run(region, &pages);
        let borrow = ReadBorrow::take(run.borrows).map_err(|refusal| refusal.at(region, pages.start))?;
        Ok(PageRef { start: run.start, len: run.len, borrow, memory: PhantomData })
    }

    /// Borrows a run of pages for writing: all of them, or none.
    ///
    /// # Panics
    /// If there is no such region, or no such page in it.
    pub fn write(&self, region: u32, pages: Range<u32>) -> Result<PageMut<'_>, PageBusy> {
        let run = self.run(region, &pages);
        let borrow = WriteBorrow::take(run.borrows).map_err(|refusal| refusal.at(region, pages.start))?;
        Ok(PageMut { start: run.start, len: run.len, borrow, memory: PhantomData })
    }

    pub fn shape(&self, region: u32) -> RegionShape {
        self.region(region).shape
    }

    pub fn n_regions(&self) -> u32 {
        self.regions.len() as u32
    }

    /// The bytes of all pages.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    fn region(&self, region: u32) -> &Region {
        &self.regions[region as usize]
    }

    fn run(&self, region: u32, pages: &Range<u32>) -> Run<'_> {
        let region = self.region(region);
        assert!(
            pages.start <= pages.end && pages.end <= region.shape.n_pages,
            "pages {pages:?} are not in a region of {}",
            region.shape.n_pages
        );
        let (first, last) = (pages.start as usize, pages.end as usize);
        // JUSTIFICATION: a slice of the mapping must not exist before the borrow is checked, hence pointer arithmetic.
        // SAFETY: `offset + page_bytes * n_pages` lies within the mapping by construction, and `first` is at most
        // `n_pages`, so the result stays within (or one past the end of) the one allocation; it is not null.
        let start = unsafe {
            NonNull::new_unchecked(
                self.mapping.as_mut_ptr().add(region.offset + first * region.shape.page_bytes),
            )
        };
        Run { start, len: (last - first) * region.shape.page_bytes, borrows: &region.borrows[first..last] }
    }
}

impl fmt::Debug for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostMemory")
            .field("regions", &self.regions.len())
            .field("bytes", &self.bytes())
            .finish()
    }
}

impl Region {
    fn new(shape: RegionShape, offset: usize) -> Self {
        let borrows = (0..shape.n_pages).map(|_| AtomicU32::new(IDLE)).collect();
        Self { shape, offset, borrows }
    }
}

impl RegionShape {
    fn bytes(self) -> Option<usize> {
        self.page_bytes.checked_mul(self.n_pages as usize)
    }
}

/// Where the next region may start.
fn region_end(shape: RegionShape, offset: usize) -> Option<usize> {
    offset.checked_add(shape.bytes()?)?.checked_next_multiple_of(REGION_ALIGN_BYTES)
}

fn map(bytes: usize) -> Result<MmapRaw, MemoryError> {
    let mapping = MmapMut::map_anon(bytes.max(1)).map_err(|source| MemoryError::Map { bytes, source })?;
    // Huge pages save page faults and TLB misses; a system that has none serves as well, only slower.
    #[cfg(target_os = "linux")]
    let _ = mapping.advise(memmap2::Advice::HugePage);
    Ok(mapping.into())
}

/// A run of pages, not borrowed yet.
struct Run<'a> {
    start: NonNull<u8>,
    len: usize,
    borrows: &'a [AtomicU32],
}

// === impl borrows ===

/// The n-th page of a run could not be borrowed.
struct Refused {
    nth: usize,
    wanted: Access,
    held: Held,
}

impl Refused {
    fn at(self, region: u32, first: u32) -> PageBusy {
        PageBusy { region, page: first + self.nth as u32, wanted: self.wanted, held: self.held }
    }
}

/// One reader's share of the pages' borrow states. Dropping it gives the pages back.
struct ReadBorrow<'a>(&'a [AtomicU32]);

impl<'a> ReadBorrow<'a> {
    fn take(pages: &'a [AtomicU32]) -> Result<Self, Refused> {
        for (nth, page) in pages.iter().enumerate() {
            if let Err(held) = add_reader(page) {
                drop(Self(&pages[..nth]));
                return Err(Refused { nth, wanted: Access::Read, held });
            }
        }
        Ok(Self(pages))
    }
}

impl Drop for ReadBorrow<'_> {
    fn drop(&mut self) {
        for page in self.0 {
            page.fetch_sub(1, Ordering::Release);
        }
    }
}

fn add_reader(page: &AtomicU32) -> Result<(), Held> {
    let one_more = |readers: u32| (readers < WRITTEN - 1).then(|| readers + 1);
    match page.fetch_update(Ordering::Acquire, Ordering::Relaxed, one_more) {
        Ok(_) => Ok(()),
        Err(WRITTEN) => Err(Held::ByWriter),
        Err(readers) => Err(Held::ByReaders(readers)),
    }
}

/// The only writer's hold on the pages' borrow states. Dropping it gives the pages back.
struct WriteBorrow<'a>(&'a [AtomicU32]);

impl<'a> WriteBorrow<'a> {
    fn take(pages: &'a [AtomicU32]) -> Result<Self, Refused> {
        for (nth, page) in pages.iter().enumerate() {
            if let Err(held) = set_writer(page) {
                drop(Self(&pages[..nth]));
                return Err(Refused { nth, wanted: Access::Write, held });
            }
        }
        Ok(Self(pages))
    }
}

impl Drop for WriteBorrow<'_> {
    fn drop(&mut self) {
        for page in self.0 {
            page.store(IDLE, Ordering::Release);
        }
    }
}

fn set_writer(page: &AtomicU32) -> Result<(), Held> {
    match page.compare_exchange(IDLE, WRITTEN, Ordering::Acquire, Ordering::Relaxed) {
        Ok(_) => Ok(()),
        Err(WRITTEN) => Err(Held::ByWriter),
        Err(readers) => Err(Held::ByReaders(readers)),
    }
}

// === impl PageRef, PageMut ===

/// A run of pages that nobody can write while this value lives. The bytes of all pages, one page after the other.
//
// A pointer and not a slice, for the reason that `std::cell::Ref` has one: a reference in the guard would claim to be
// valid until the end of the function that drops the guard, that is, for a moment after the pages were given back.
pub struct PageRef<'a> {
    start: NonNull<u8>,
    len: usize,
    #[expect(dead_code, reason = "held for its Drop")]
    borrow: ReadBorrow<'a>,
    memory: PhantomData<&'a [u8]>,
}

/// A run of pages that nobody else can read or write while this value lives.
pub struct PageMut<'a> {
    start: NonNull<u8>,
    len: usize,
    #[expect(dead_code, reason = "held for its Drop")]
    borrow: WriteBorrow<'a>,
    memory: PhantomData<&'a mut [u8]>,
}

// JUSTIFICATION: the pointer makes the guards neither Send nor Sync by itself, but connectors hold them across awaits.
// SAFETY: a `PageRef` is a `&[u8]` with a counter, and a `PageMut` is a `&mut [u8]` with a flag; the counter and the
// flag are atomics. Both slices are Send and Sync, and nothing else is reached through the pointer.
unsafe impl Send for PageRef<'_> {}
// SAFETY: as above.
unsafe impl Sync for PageRef<'_> {}
// SAFETY: as above.
unsafe impl Send for PageMut<'_> {}
// SAFETY: as above.
unsafe impl Sync for PageMut<'_> {}

impl Deref for PageRef<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // JUSTIFICATION: the borrow was checked at run time, which the compiler cannot see.
        // SAFETY: the run lies in a mapping that outlives 'a, is initialised (the system hands out zeroes), and has
        // no writer: `borrow` counts this reader in every page's state, and a writer needs that state to be idle.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl Deref for PageMut<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // JUSTIFICATION: the borrow was checked at run time, which the compiler cannot see.
        // SAFETY: the run lies in a mapping that outlives 'a and is initialised; `borrow` marks every page as
        // written, which excludes all other borrows, and `&self` excludes a mutable slice from this one.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for PageMut<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        // JUSTIFICATION: the borrow was checked at run time, which the compiler cannot see.
        // SAFETY: as in `deref`, and `&mut self` makes this the only slice made from this borrow.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl fmt::Debug for PageRef<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PageRef({} bytes)", self.len)
    }
}

impl fmt::Debug for PageMut<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PageMut({} bytes)", self.len)
    }
}

#[cfg(test)]
mod tests;
