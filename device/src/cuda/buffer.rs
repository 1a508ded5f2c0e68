//! Typed GPU memory with bounds: a kernel only gets memory that lies within one allocation.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{CudaContext, result};

use crate::number::{bf16_to_f32, f32_to_bf16};

use super::CudaError;
use super::mapped::{MappedMemory, no_room};

/// A bfloat16 number: the upper 16 bits of an f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Bf16(pub u16);

/// A type that GPU memory can hold: plain numbers.
///
/// # Safety
/// The type has no padding and no pointers, and every bit pattern is a valid value.
pub unsafe trait Element: Copy + Send + Sync + 'static {}

macro_rules! elements {
    ($($number:ty),*) => {$(
        // JUSTIFICATION: GPU memory is copied as bytes.
        // SAFETY: a number, or an array of numbers, without padding.
        unsafe impl Element for $number {}
    )*};
}
elements!(u8, u32, u64, f32, Bf16, [f32; 2], [u32; 3]);

/// Memory of one GPU. Dropping it returns the memory to the driver, or to its arena.
pub struct Buffer<T: Element> {
    memory: Memory,
    len: usize,
    element: PhantomData<T>,
}

/// The owner of a buffer's memory.
enum Memory {
    Own(DriverAllocation),
    /// The memory is a part of a larger piece.
    Part {
        piece: Arc<MappedMemory>,
        offset: usize,
    },
}

/// Memory from the driver's own allocator.
struct DriverAllocation {
    context: Arc<CudaContext>,
    address: u64,
}

/// A readable part of a buffer.
#[derive(Clone, Copy)]
pub struct View<'a, T: Element> {
    address: u64,
    len: usize,
    ordinal: usize,
    buffer: PhantomData<&'a [T]>,
}

/// A writable part of a buffer, with no other user.
pub struct ViewMut<'a, T: Element> {
    address: u64,
    len: usize,
    ordinal: usize,
    buffer: PhantomData<&'a mut [T]>,
}

// === impl Bf16 ===

impl From<f32> for Bf16 {
    fn from(wide: f32) -> Self {
        Self(f32_to_bf16(wide))
    }
}

impl From<Bf16> for f32 {
    fn from(narrow: Bf16) -> Self {
        bf16_to_f32(narrow.0)
    }
}

// === impl Buffer ===

impl<T: Element> Buffer<T> {
    /// Allocates GPU memory. Its content is undefined.
    pub fn new(context: &Arc<CudaContext>, len: usize) -> Result<Self, CudaError> {
        let memory = Memory::Own(DriverAllocation::new(context, len.saturating_mul(size_of::<T>()))?);
        Ok(Self { memory, len, element: PhantomData })
    }

    /// Makes a buffer of `len` numbers in a piece. The caller gives no other buffer the same range.
    ///
    /// # Panics
    /// If the range is not within the piece, or its start is not aligned.
    pub(super) fn part(piece: Arc<MappedMemory>, offset: usize, len: usize) -> Self {
        let end = len.checked_mul(size_of::<T>()).and_then(|bytes| bytes.checked_add(offset));
        assert!(end.is_some_and(|end| end <= piece.bytes()), "{len} numbers at {offset} of {piece:?}");
        assert!(offset.is_multiple_of(align_of::<T>()), "numbers at {offset}");
        Self { memory: Memory::Part { piece, offset }, len, element: PhantomData }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn view(&self) -> View<'_, T> {
        View::over(self.memory.address(), self.len, self.memory.ordinal())
    }

    pub fn view_mut(&mut self) -> ViewMut<'_, T> {
        ViewMut::over(self.memory.address(), self.len, self.memory.ordinal())
    }

    /// Returns a view of some of the numbers.
    ///
    /// # Panics
    /// If the range does not lie within the buffer.
    pub fn slice(&self, range: Range<usize>) -> View<'_, T> {
        self.view().slice(range)
    }
}

impl<T: Element> fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ordinal = self.memory.ordinal();
        f.debug_struct("Buffer").field("len", &self.len).field("ordinal", &ordinal).finish()
    }
}

// === impl Memory, Allocated ===

impl Memory {
    fn address(&self) -> u64 {
        match self {
            Self::Own(memory) => memory.address,
            Self::Part { piece, offset } => piece.address() + *offset as u64,
        }
    }

    fn ordinal(&self) -> usize {
        match self {
            Self::Own(memory) => memory.context.ordinal(),
            Self::Part { piece, .. } => piece.ordinal(),
        }
    }
}

impl DriverAllocation {
    fn new(context: &Arc<CudaContext>, bytes: usize) -> Result<Self, CudaError> {
        let bytes = bytes.max(1);
        context.bind_to_thread().map_err(CudaError::during("use the GPU from this thread"))?;
        // JUSTIFICATION: cudarc's slices free on a stream and track events, which a graph cannot record.
        // SAFETY: only this value has the address, and it frees it once.
        let address = unsafe { result::malloc_sync(bytes) }.map_err(|source| no_room(bytes, source))?;
        Ok(Self { context: Arc::clone(context), address })
    }
}

impl Drop for DriverAllocation {
    fn drop(&mut self) {
        // Waits, because the GPU may still use the memory. If waiting fails, the context and all its memory
        // are lost.
        let _ = self.context.synchronize();
        // JUSTIFICATION: the counterpart of `new`.
        // SAFETY: the address came from `malloc_sync` and no view outlives the buffer.
        let _ = unsafe { result::free_sync(self.address) };
    }
}

// === impl View, ViewMut ===

macro_rules! views {
    ($($view:ident),*) => {$(
        impl<T: Element> $view<'_, T> {
            pub fn len(&self) -> usize {
                self.len
            }

            pub fn is_empty(&self) -> bool {
                self.len == 0
            }

            /// Returns the address of the view's first number in GPU memory. Only `unsafe` code can use it.
            pub fn address(&self) -> u64 {
                self.address
            }

            /// Returns the GPU that has this memory.
            pub fn ordinal(&self) -> usize {
                self.ordinal
            }

            /// Returns whether the view's address permits a 16-byte load.
            pub fn is_aligned(&self) -> bool {
                self.address.is_multiple_of(16)
            }

            /// Makes a view of `len` numbers from `address` on. The caller guarantees that they exist.
            pub(super) fn over(address: u64, len: usize, ordinal: usize) -> Self {
                Self { address, len, ordinal, buffer: PhantomData }
            }

            fn place(&self, range: &Range<usize>) -> u64 {
                assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {} numbers", self.len);
                self.address + (range.start * size_of::<T>()) as u64
            }
        }

        impl<T: Element> fmt::Debug for $view<'_, T> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($view)).field("len", &self.len).field("ordinal", &self.ordinal).finish()
            }
        }
    )*};
}
views!(View, ViewMut);

impl<'a, T: Element> View<'a, T> {
    /// Returns a view of some of the numbers.
    ///
    /// # Panics
    /// If the range does not lie within the view.
    pub fn slice(self, range: Range<usize>) -> View<'a, T> {
        View { address: self.place(&range), len: range.len(), ..self }
    }
}

macro_rules! halves {
    ($($view:ident),*) => {$(
        impl<'a, T: Element> $view<'a, T> {
            /// Returns the same memory as 16-bit numbers.
            ///
            /// # Panics
            /// If the number of bytes is odd.
            pub fn halves(self) -> $view<'a, Bf16> {
                let bytes = self.len * size_of::<T>();
                assert!(bytes.is_multiple_of(2), "{bytes} bytes are not whole 16-bit numbers");
                $view::over(self.address, bytes / 2, self.ordinal)
            }
        }
    )*};
}
halves!(View, ViewMut);

impl<'a> View<'a, u32> {
    /// Returns the same numbers in groups of three.
    ///
    /// # Panics
    /// If the length is not a multiple of three.
    pub fn triples(self) -> View<'a, [u32; 3]> {
        assert!(self.len.is_multiple_of(3), "{} numbers are not whole triples", self.len);
        View { address: self.address, len: self.len / 3, ordinal: self.ordinal, buffer: PhantomData }
    }
}

impl<'a, T: Element> ViewMut<'a, T> {
    /// Returns a view of some of the numbers.
    ///
    /// # Panics
    /// If the range does not lie within the view.
    pub fn slice(self, range: Range<usize>) -> ViewMut<'a, T> {
        ViewMut { address: self.place(&range), len: range.len(), ..self }
    }

    /// Returns a read view of the same memory.
    pub fn view(&self) -> View<'_, T> {
        View { address: self.address, len: self.len, ordinal: self.ordinal, buffer: PhantomData }
    }

    /// Returns a write view of the same memory with a shorter lifetime.
    pub fn reborrow(&mut self) -> ViewMut<'_, T> {
        ViewMut { address: self.address, len: self.len, ordinal: self.ordinal, buffer: PhantomData }
    }
}
