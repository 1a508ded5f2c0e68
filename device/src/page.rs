//! Hot path.
//! Borrowed pages: the guards of readers and writers of KV, on the host or on a GPU.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use crate::borrow::{ReadBorrow, WriteBorrow};
use crate::cuda::staging::{StagedCopy, WriteBack};

/// A run of pages that cannot be written while this value lives. It dereferences to the bytes of all pages,
/// one page after the other.
///
/// On a GPU, it is a copy in host memory, made at the time of the borrow.
//
// A pointer instead of a slice, as in `std::cell::Ref`: a reference in the guard would claim to be valid
// until the end of the function that drops the guard, which is after the pages are returned.
pub struct PageRef<'a> {
    start: NonNull<u8>,
    len: usize,
    #[expect(dead_code, reason = "held for its Drop")]
    copy: Option<StagedCopy<'a>>,
    #[expect(dead_code, reason = "held for its Drop")]
    borrow: ReadBorrow<'a>,
    memory: PhantomData<&'a [u8]>,
}

/// A run of pages that no other code can read or write while this value lives.
///
/// On a GPU, it is a copy in host memory, which is written to the GPU when the guard is dropped.
pub struct PageMut<'a> {
    start: NonNull<u8>,
    len: usize,
    // Fields are dropped in this order: the bytes are on the GPU before the pages can be borrowed again.
    #[expect(dead_code, reason = "held for its Drop")]
    copy: Option<WriteBack<'a>>,
    #[expect(dead_code, reason = "held for its Drop")]
    borrow: WriteBorrow<'a>,
    memory: PhantomData<&'a mut [u8]>,
}

impl<'a> PageRef<'a> {
    /// Makes the guard of a run of `len` bytes.
    ///
    /// # Safety
    /// `len` bytes from `start` are initialised, live for 'a (or as long as `copy`), and are not written
    /// during the borrow.
    pub(crate) unsafe fn new(
        start: NonNull<u8>,
        len: usize,
        borrow: ReadBorrow<'a>,
        copy: Option<StagedCopy<'a>>,
    ) -> Self {
        Self { start, len, copy, borrow, memory: PhantomData }
    }
}

impl<'a> PageMut<'a> {
    /// Makes the guard of a run of `len` bytes.
    ///
    /// # Safety
    /// `len` bytes from `start` are initialised, live for 'a (or as long as `copy`), and are used by no other
    /// code during the borrow.
    pub(crate) unsafe fn new(
        start: NonNull<u8>,
        len: usize,
        borrow: WriteBorrow<'a>,
        copy: Option<WriteBack<'a>>,
    ) -> Self {
        Self { start, len, copy, borrow, memory: PhantomData }
    }
}

// JUSTIFICATION: the pointer makes the guards neither Send nor Sync, but connectors hold them across awaits.
// SAFETY: a `PageRef` is a `&[u8]` with a counter, and a `PageMut` is a `&mut [u8]` with a flag. The counter
// and the flag are atomics. Both slices are Send and Sync, and so is a copy that is held with them. The
// pointer gives access to nothing else.
unsafe impl Send for PageRef<'_> {}
// SAFETY: it is a `&[u8]` with an atomic counter, as above.
unsafe impl Sync for PageRef<'_> {}
// SAFETY: it is a `&mut [u8]` with an atomic flag, as above.
unsafe impl Send for PageMut<'_> {}
// SAFETY: it is a `&mut [u8]` with an atomic flag, as above.
unsafe impl Sync for PageMut<'_> {}

impl Deref for PageRef<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // JUSTIFICATION: the borrow was checked at run time, which the compiler cannot see.
        // SAFETY: by the contract of `new`, the run is initialised and outlives this value. It has no writer:
        // `borrow` counts this reader in every page's state, and a writer needs that state to be idle.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl Deref for PageMut<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // JUSTIFICATION: the borrow was checked at run time, which the compiler cannot see.
        // SAFETY: by the contract of `new`, the run is initialised and outlives this value. `borrow` marks
        // every page as written, which excludes all other borrows, and `&self` excludes a mutable slice.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for PageMut<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        // JUSTIFICATION: the borrow was checked at run time, which the compiler cannot see.
        // SAFETY: the run is valid as in `deref`, and `&mut self` makes this the only slice of this borrow.
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
