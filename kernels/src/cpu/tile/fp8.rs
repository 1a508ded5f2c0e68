//! Hot path.
//! Rows of 8-bit floating-point numbers, with a scale for each row or for each block.

use std::ops::Range;

use super::{Row, Rows, widened_tail};
use crate::cpu::matrix::{FP8_BLOCK, Matrix};
use crate::cpu::number::f8_to_f32;
use crate::cpu::simd::{LANES, Simd};

/// Rows of 8-bit floating-point numbers, each row with a scale. A weight is their product, computed in f32.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct F8Rows<'a> {
    numbers: &'a [u8],
    scales: &'a [f32],
    cols: usize,
}

#[derive(Clone, Copy)]
pub(in crate::cpu) struct F8Row<'a> {
    steps: &'a [[u8; LANES]],
    tail: &'a [u8],
    scale: f32,
}

impl<'a> F8Rows<'a> {
    /// Returns the rows of `numbers`: one row for each scale.
    pub(in crate::cpu) fn new(numbers: &'a [u8], scales: &'a [f32], cols: usize) -> Self {
        Self { numbers, scales, cols }
    }
}

impl<'a, S: Simd> Rows<S> for F8Rows<'a> {
    type Row = F8Row<'a>;

    #[inline(always)]
    fn row(self, nth: usize) -> F8Row<'a> {
        let (steps, tail) = self.numbers[nth * self.cols..][..self.cols].as_chunks();
        F8Row { steps, tail, scale: self.scales[nth] }
    }

    #[inline(always)]
    fn row_bytes(self) -> usize {
        self.cols
    }
}

impl<S: Simd> Row<S> for F8Row<'_> {
    const STEP_BYTES: usize = LANES;

    #[inline(always)]
    fn n_steps(self) -> usize {
        self.steps.len()
    }

    #[inline(always)]
    fn part(self, steps: Range<usize>) -> Self {
        Self { steps: &self.steps[steps], ..self }
    }

    #[inline(always)]
    fn step(self, simd: S, nth: usize) -> S::Floats {
        simd.mul(simd.load_f8(&self.steps[nth]), simd.splat(self.scale))
    }

    #[inline(always)]
    fn prefetch(self, simd: S, bytes: usize) {
        simd.prefetch(self.steps.as_ptr().wrapping_byte_add(bytes));
    }

    #[inline(always)]
    fn tail(self, simd: S) -> Option<S::Floats> {
        widened_tail(simd, self.tail, |narrow| f8_to_f32(narrow) * self.scale)
    }
}

// === block scales ===

/// Rows of 8-bit floating-point numbers with a scale for each block of [`FP8_BLOCK`] rows and columns. A weight is the
/// product of number and scale, computed in f32.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct F8BlockRows<'a> {
    matrix: &'a Matrix,
    first: usize,
}

#[derive(Clone, Copy)]
pub(in crate::cpu) struct F8BlockRow<'a> {
    steps: &'a [[u8; LANES]],
    tail: &'a [u8],
    scales: &'a [f32],
}

const STEPS_PER_BLOCK: usize = FP8_BLOCK / LANES;

impl<'a> F8BlockRows<'a> {
    /// Returns the rows from `first` on, which may be in the middle of a block.
    pub(in crate::cpu) fn starting_at(matrix: &'a Matrix, first: usize) -> Self {
        Self { matrix, first }
    }
}

impl<'a, S: Simd> Rows<S> for F8BlockRows<'a> {
    type Row = F8BlockRow<'a>;

    #[inline(always)]
    fn row(self, nth: usize) -> F8BlockRow<'a> {
        let (row, cols) = (self.first + nth, self.matrix.cols());
        let n_blocks = cols.div_ceil(FP8_BLOCK);
        let (steps, tail) = self.matrix.bytes()[row * cols..][..cols].as_chunks();
        F8BlockRow { steps, tail, scales: &self.matrix.scales()[row / FP8_BLOCK * n_blocks..][..n_blocks] }
    }

    #[inline(always)]
    fn row_bytes(self) -> usize {
        self.matrix.cols()
    }
}

impl<S: Simd> Row<S> for F8BlockRow<'_> {
    const STEP_BYTES: usize = LANES;

    #[inline(always)]
    fn n_steps(self) -> usize {
        self.steps.len()
    }

    /// Returns the row of a range of vectors, which must start with a whole block.
    #[inline(always)]
    fn part(self, steps: Range<usize>) -> Self {
        let scales = &self.scales[steps.start / STEPS_PER_BLOCK..];
        assert!(scales.len() >= steps.len().div_ceil(STEPS_PER_BLOCK));
        Self { steps: &self.steps[steps], tail: self.tail, scales }
    }

    #[inline(always)]
    fn step(self, simd: S, nth: usize) -> S::Floats {
        simd.mul(simd.load_f8(&self.steps[nth]), simd.splat(self.scales[nth / STEPS_PER_BLOCK]))
    }

    #[inline(always)]
    fn prefetch(self, simd: S, bytes: usize) {
        simd.prefetch(self.steps.as_ptr().wrapping_byte_add(bytes));
    }

    #[inline(always)]
    fn tail(self, simd: S) -> Option<S::Floats> {
        let scale = self.scales.last().copied().unwrap_or(0.0);
        widened_tail(simd, self.tail, |narrow| f8_to_f32(narrow) * scale)
    }
}
