//! Hot path.
//! A thread's own buffers. They are reused by all parts of the work, so that parts allocate nothing.
//!
//! The buffers are aligned to cache lines, because a vector across two lines takes two loads.

use std::cell::Cell;

use super::simd::LANES;
use super::tile::Sums;

const LINE_BYTES: usize = 64;

thread_local! {
    static SUMS: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
    static NARROW: Cell<Vec<u16>> = const { Cell::new(Vec::new()) };
    static PANEL: Cell<Vec<u16>> = const { Cell::new(Vec::new()) };
    static WIDE: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

/// Lends `len` running sums with undefined content.
pub(super) fn with_sums<R>(len: usize, f: impl FnOnce(&mut [Sums]) -> R) -> R {
    SUMS.with(|kept| lend(kept, len * LANES, |numbers| f(numbers.as_chunks_mut().0)))
}

/// Lends `len` narrow numbers with undefined content, for the activations of a whole product.
pub(super) fn with_narrow<R>(len: usize, f: impl FnOnce(&mut [u16]) -> R) -> R {
    NARROW.with(|kept| lend(kept, len, f))
}

/// Lends `len` narrow numbers with undefined content, for the weights of one part.
#[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "used by AVX-512's bf16 products"))]
pub(super) fn with_panel<R>(len: usize, f: impl FnOnce(&mut [u16]) -> R) -> R {
    PANEL.with(|kept| lend(kept, len, f))
}

/// Lends `len` numbers with undefined content.
pub(super) fn with_wide<R>(len: usize, f: impl FnOnce(&mut [f32]) -> R) -> R {
    WIDE.with(|kept| lend(kept, len, f))
}

/// Lends the buffer to `f`. A second call within `f` gets another buffer.
fn lend<T: Default + Clone, R>(kept: &Cell<Vec<T>>, len: usize, f: impl FnOnce(&mut [T]) -> R) -> R {
    let mut buffer = kept.take();
    let with_room = len + LINE_BYTES / size_of::<T>();
    if buffer.len() < with_room {
        buffer.resize(with_room, T::default());
    }
    let first = buffer.as_ptr().align_offset(LINE_BYTES).min(with_room - len);
    let result = f(&mut buffer[first..first + len]);
    kept.set(buffer);
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_lent_starts_on_a_line() {
        for len in [0, 1, 100, 7, 5000] {
            with_wide(len, |wide| {
                assert_eq!(wide.len(), len);
                assert_eq!(wide.as_ptr().addr() % LINE_BYTES, 0);
            });
        }
        with_sums(3, |sums| assert_eq!(sums.len(), 3));
    }

    #[test]
    fn a_loan_within_a_loan_is_another_buffer() {
        with_wide(4, |outer| {
            outer.fill(1.0);
            with_wide(4, |inner| inner.fill(2.0));
            assert_eq!(outer, [1.0; 4]);
        });
    }
}
