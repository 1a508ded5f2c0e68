//! Hot path.
//! A row-major output that several threads fill together.

use std::marker::PhantomData;
use std::ops::Range;

/// An output in which every thread writes its own columns of some rows.
///
/// The code that creates a `Columns` ensures that no number is written by two threads: parts of a product
/// have disjoint ranges of columns, and parts of attention have disjoint heads or rows.
pub(super) struct Columns<'a> {
    start: *mut f32,
    /// The number of the first column in the output, which may have only some of a matrix's columns.
    first: usize,
    n_columns: usize,
    len: usize,
    out: PhantomData<&'a mut [f32]>,
}

// SAFETY: a `Columns` is a `&mut [f32]`, which may be sent and shared. Only `set` writes it.
unsafe impl Sync for Columns<'_> {}

impl<'a> Columns<'a> {
    pub(super) fn new(out: &'a mut [f32], columns: Range<usize>) -> Self {
        let (start, len) = (out.as_mut_ptr(), out.len());
        Self { start, first: columns.start, n_columns: columns.len(), len, out: PhantomData }
    }

    /// Writes neighbouring columns of one row.
    #[inline(always)]
    pub(super) fn set(&self, row: usize, column: usize, values: &[f32]) {
        assert!(column >= self.first);
        let column = column - self.first;
        let at = row * self.n_columns + column;
        assert!(column + values.len() <= self.n_columns && at + values.len() <= self.len);
        // JUSTIFICATION: columns of a row-major matrix are not a slice, so they cannot be borrowed mutably.
        // SAFETY: the target is within the output, which is borrowed for 'a. By this type's contract no other
        // thread writes there.
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), self.start.add(at), values.len()) }
    }
}
