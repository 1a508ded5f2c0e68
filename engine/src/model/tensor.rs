//! Hot path.
//! Activations: rows of f32 in reusable buffers.

use std::cell::RefCell;
use std::fmt;
use std::ops::{Deref, DerefMut};
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
