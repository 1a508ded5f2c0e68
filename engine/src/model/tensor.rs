//! Hot path.
//! Activations: rows of f32 in reusable buffers.

use std::cell::RefCell;
use std::fmt;
use std::ops::{Deref, DerefMut, Range};
use std::rc::Rc;

/// Buffers for reuse. Their number is the largest number of tensors at one time; a pass has few.
#[derive(Clone, Default)]
pub struct Scratch {
    free: Rc<RefCell<Vec<Vec<f32>>>>,
}

/// Rows of activations: `n_rows` rows of `width` numbers. Dropping it returns the buffer.
pub struct Tensor {
    buffer: Vec<f32>,
    n_rows: usize,
    width: usize,
    home: Scratch,
}

impl Scratch {
    /// Returns a tensor with undefined content. A running engine neither allocates nor clears memory in this
    /// call.
    pub fn tensor(&self, n_rows: usize, width: usize) -> Tensor {
        let mut buffer = self.take(n_rows * width);
        buffer.resize(n_rows * width, 0.0);
        Tensor { buffer, n_rows, width, home: self.clone() }
    }

    /// Takes the smallest buffer that is large enough, else the largest one, which then grows.
    fn take(&self, len: usize) -> Vec<f32> {
        let mut free = self.free.borrow_mut();
        let fits = |buffer: &Vec<f32>| (buffer.capacity() < len, buffer.capacity().abs_diff(len));
        let best = (0..free.len()).min_by_key(|nth| fits(&free[*nth]));
        best.map(|nth| free.swap_remove(nth)).unwrap_or_default()
    }

    /// Returns the bytes of the unused buffers.
    pub fn idle_bytes(&self) -> usize {
        self.free.borrow().iter().map(|buffer| buffer.capacity() * size_of::<f32>()).sum()
    }
}

impl Tensor {
    pub fn n_rows(&self) -> usize {
        self.n_rows
    }

    pub fn width(&self) -> usize {
        self.width
    }

    pub fn row(&self, nth: usize) -> &[f32] {
        &self.buffer[nth * self.width..(nth + 1) * self.width]
    }

    pub fn row_mut(&mut self, nth: usize) -> &mut [f32] {
        &mut self.buffer[nth * self.width..(nth + 1) * self.width]
    }

    /// Divides each row into `n_groups` and copies the numbers `part` of each: (rows, groups * part).
    pub fn parts(&self, n_groups: usize, part: Range<usize>) -> Self {
        let mut out = self.home.tensor(self.n_rows, n_groups * part.len());
        let groups = self.buffer.chunks_exact(self.width / n_groups);
        for (to, from) in out.buffer.chunks_exact_mut(part.len()).zip(groups) {
            to.copy_from_slice(&from[part.clone()]);
        }
        out
    }

    /// Divides the rows of both tensors into `n_groups` and joins them group by group.
    pub fn joined(&self, other: &Self, n_groups: usize) -> Self {
        let mut out = self.home.tensor(self.n_rows, self.width + other.width);
        let (first, second) = (self.width / n_groups, other.width / n_groups);
        let pairs = self.buffer.chunks_exact(first).zip(other.buffer.chunks_exact(second));
        for (to, (one, other)) in out.buffer.chunks_exact_mut(first + second).zip(pairs) {
            to[..first].copy_from_slice(one);
            to[first..].copy_from_slice(other);
        }
        out
    }

    /// Reorders every head of `head_dim` numbers: of each two neighbours, one goes to each half.
    pub fn pairs_to_halves(&mut self, head_dim: usize) {
        let mut before = self.home.tensor(1, head_dim);
        for head in self.buffer.chunks_exact_mut(head_dim) {
            before.copy_from_slice(head);
            let (first, second) = head.split_at_mut(head_dim / 2);
            for ((pair, first), second) in before.chunks_exact(2).zip(first).zip(second) {
                (*first, *second) = (pair[0], pair[1]);
            }
        }
    }
}

impl Deref for Tensor {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.buffer
    }
}

impl DerefMut for Tensor {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.buffer
    }
}

impl Drop for Tensor {
    fn drop(&mut self) {
        self.home.free.borrow_mut().push(std::mem::take(&mut self.buffer));
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({} x {})", self.n_rows, self.width)
    }
}

impl fmt::Debug for Scratch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Scratch({} bytes idle)", self.idle_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(width: usize, numbers: &[f32]) -> Tensor {
        let mut tensor = Scratch::default().tensor(numbers.len() / width, width);
        tensor.copy_from_slice(numbers);
        tensor
    }

    #[test]
    fn rows_are_divided_and_joined_group_by_group() {
        let x = filled(6, &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0]);
        let (one, other) = (x.parts(2, 0..1), x.parts(2, 1..3));
        assert_eq!((&*one, one.width()), (&[0.0, 3.0, 10.0, 13.0][..], 2));
        assert_eq!((&*other, other.width()), (&[1.0, 2.0, 4.0, 5.0, 11.0, 12.0, 14.0, 15.0][..], 4));
        let joined = one.joined(&other, 2);
        assert_eq!((&*joined, joined.width()), (&*x, 6));
    }

    #[test]
    fn neighbours_go_to_the_two_halves() {
        let mut x = filled(8, &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
        x.pairs_to_halves(4);
        assert_eq!(*x, [0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0]);
    }

    #[test]
    fn a_buffer_is_used_again() {
        let scratch = Scratch::default();
        let (small, large) = (scratch.tensor(1, 10), scratch.tensor(10, 10));
        let (small_at, large_at) = (small.as_ptr(), large.as_ptr());
        drop((small, large));
        assert_eq!(scratch.tensor(2, 5).as_ptr(), small_at, "the smallest that is large enough");
        assert_eq!(scratch.tensor(9, 10).as_ptr(), large_at);
        assert_eq!(scratch.idle_bytes(), 440);
    }
}
