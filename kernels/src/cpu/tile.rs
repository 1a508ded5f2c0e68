//! Hot path.
//! The summation of products. Every matrix product and every attention score is a dot product from this
//! module.
//!
//! A dot product has sixteen running sums. Sum i takes the products at i, i + 16, i + 32, … in this order,
//! each by one fused multiply-add; at the end [`Simd::sum`] adds the sixteen. A [`tile`] computes several dot
//! products side by side, to load each number once for several of them, but never splits or reorders one. So
//! a result depends on its own row and column only: not on the batch, the chunk, the number of threads or the
//! processor.
//!
//! With bf16 products (see [`Avx512Bf16`]) sum i takes the products at 2i and 2i + 1 of every 32, by a CPU
//! instruction. Results are independent of the batch too, but need processors with that instruction.

use std::ops::Range;

use super::matrix::{Q8_BLOCK, Q8Numbers};
use super::number::{bf16_to_f32, f16_to_f32};
#[cfg(target_arch = "x86_64")]
use super::simd::Avx512Bf16;
use super::simd::{Accumulate, LANES, Simd};

mod fp8;

pub(super) use fp8::{F8BlockRows, F8Rows};

/// The size of a cache line.
const LINE_BYTES: usize = 64;

/// Sixteen running sums of one dot product.
pub(super) type Sums = [f32; LANES];

/// A row of numbers that is read one vector at a time.
pub(super) trait Row<S: Accumulate>: Copy {
    /// Bytes that a vector's numbers take in memory.
    const STEP_BYTES: usize;

    /// Returns the number of whole vectors.
    fn n_steps(self) -> usize;
    /// Returns the row of a range of whole vectors.
    fn part(self, steps: Range<usize>) -> Self;
    fn step(self, simd: S, nth: usize) -> S::Floats;
    /// Returns the numbers after the last whole vector, padded with zeroes.
    fn tail(self, simd: S) -> Option<S::Floats>;
    /// Prefetches the memory `bytes` bytes after the row's first number.
    fn prefetch(self, simd: S, bytes: usize);
}

/// Rows of equal length.
pub(super) trait Rows<S: Accumulate>: Copy + Send + Sync {
    type Row: Row<S>;
    fn row(self, nth: usize) -> Self::Row;
    /// Returns the distance from one row to the next.
    fn row_bytes(self) -> usize;
}

/// Whether a tile begins new sums or continues the existing ones.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Start {
    Fresh,
    Continue,
}

/// Sums `R` rows by `C` columns. The sums of row r and column c are at `r * STRIDE + c` of `sums`.
///
/// Also prefetches the memory of the next tile, line by line: the size of the columns, from `ahead` bytes
/// after their start. 0 prefetches nothing.
// All indices are constants after loops are unrolled, so the running sums stay in registers. One access
// through a variable would make the compiler keep them in memory. They are therefore stored at the end and
// not returned.
#[inline(always)]
pub(super) fn tile<
    S: Accumulate,
    X: Row<S>,
    W: Row<S>,
    const R: usize,
    const C: usize,
    const STRIDE: usize,
>(
    simd: S,
    x: [X; R],
    w: [W; C],
    start: Start,
    ahead: usize,
    sums: &mut [Sums],
) {
    assert!(sums.len() >= (R - 1) * STRIDE + C);
    let mut running = [[simd.zero(); C]; R];
    if start == Start::Continue {
        for r in 0..R {
            for c in 0..C {
                running[r][c] = simd.load_sums(&sums[r * STRIDE + c]);
            }
        }
    }
    let running = if ahead > 0 {
        steps::<S, X, W, R, C, true>(simd, x, w, running, ahead)
    } else {
        steps::<S, X, W, R, C, false>(simd, x, w, running, 0)
    };
    for r in 0..R {
        for c in 0..C {
            simd.store_sums(running[r][c], &mut sums[r * STRIDE + c]);
        }
    }
}

#[inline(always)]
fn steps<S: Accumulate, X: Row<S>, W: Row<S>, const R: usize, const C: usize, const PREFETCH: bool>(
    simd: S,
    x: [X; R],
    w: [W; C],
    mut running: [[S::Floats; C]; R],
    ahead: usize,
) -> [[S::Floats; C]; R] {
    // The lengths are checked once, because this removes the bounds checks in every step.
    let n_steps = x[0].n_steps();
    for r in 0..R {
        assert_eq!(x[r].n_steps(), n_steps);
    }
    for c in 0..C {
        assert_eq!(w[c].n_steps(), n_steps);
    }
    for nth in 0..n_steps {
        let mut now = [simd.zero(); R];
        for r in 0..R {
            now[r] = x[r].step(simd, nth);
        }
        for c in 0..C {
            if PREFETCH && c < C * W::STEP_BYTES / LINE_BYTES {
                w[0].prefetch(simd, ahead + nth * C * W::STEP_BYTES + c * LINE_BYTES);
            }
            let w = w[c].step(simd, nth);
            for r in 0..R {
                running[r][c] = simd.accumulate(now[r], w, running[r][c]);
            }
        }
    }
    running
}

/// Adds the products after the last whole vector of the rows.
#[inline(always)]
pub(super) fn add_tail<S: Accumulate>(simd: S, x: impl Row<S>, w: impl Row<S>, sums: &mut Sums) {
    if let (Some(x), Some(w)) = (x.tail(simd), w.tail(simd)) {
        simd.store_sums(simd.accumulate(x, w, simd.load_sums(sums)), sums);
    }
}

// === impl f32, bf16, f16 ===

/// Defines the type of rows of numbers that only need widening.
macro_rules! plain_rows {
    ($rows:ident, $row:ident, $number:ty, $load:ident, $widen:expr) => {
        #[derive(Clone, Copy)]
        pub(super) struct $rows<'a> {
            numbers: &'a [$number],
            cols: usize,
            stride: usize,
        }

        #[derive(Clone, Copy)]
        pub(super) struct $row<'a> {
            steps: &'a [[$number; LANES]],
            tail: &'a [$number],
        }

        impl<'a> $rows<'a> {
            pub(super) fn new(numbers: &'a [$number], cols: usize) -> Self {
                Self::spaced(numbers, cols, cols)
            }

            /// Returns rows whose starts are `stride` numbers apart.
            pub(super) fn spaced(numbers: &'a [$number], cols: usize, stride: usize) -> Self {
                Self { numbers, cols, stride }
            }
        }

        impl<'a, S: Simd> Rows<S> for $rows<'a> {
            type Row = $row<'a>;

            #[inline(always)]
            fn row(self, nth: usize) -> $row<'a> {
                $row::new(&self.numbers[nth * self.stride..][..self.cols])
            }

            #[inline(always)]
            fn row_bytes(self) -> usize {
                self.stride * size_of::<$number>()
            }
        }

        impl<'a> $row<'a> {
            #[inline(always)]
            pub(super) fn new(numbers: &'a [$number]) -> Self {
                let (steps, tail) = numbers.as_chunks();
                Self { steps, tail }
            }
        }

        impl<S: Simd> Row<S> for $row<'_> {
            const STEP_BYTES: usize = LANES * size_of::<$number>();

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
                simd.$load(&self.steps[nth])
            }

            #[inline(always)]
            fn prefetch(self, simd: S, bytes: usize) {
                simd.prefetch(self.steps.as_ptr().wrapping_byte_add(bytes));
            }

            #[inline(always)]
            fn tail(self, simd: S) -> Option<S::Floats> {
                widened_tail(simd, self.tail, $widen)
            }
        }
    };
}

/// Widens the numbers after a row's last whole vector, and fills the vector with zeroes. Returns `None` if there are none.
#[inline(always)]
fn widened_tail<S: Simd, T: Copy>(simd: S, tail: &[T], widen: impl Fn(T) -> f32) -> Option<S::Floats> {
    let mut wide = [0.0; LANES];
    for (wide, narrow) in wide.iter_mut().zip(tail) {
        *wide = widen(*narrow);
    }
    (!tail.is_empty()).then(|| simd.load(&wide))
}

plain_rows!(F32Rows, F32Row, f32, load, std::convert::identity);
plain_rows!(Bf16Rows, Bf16Row, u16, load_bf16, bf16_to_f32);
plain_rows!(F16Rows, F16Row, u16, load_f16, f16_to_f32);

// === impl q8 ===

/// Rows of 8-bit integers in blocks of [`Q8_BLOCK`], each block with a scale.
#[derive(Clone, Copy)]
pub(super) struct Q8Rows<'a> {
    values: &'a [i8],
    scales: &'a [f32],
    cols: usize,
}

#[derive(Clone, Copy)]
pub(super) struct Q8Row<'a> {
    steps: &'a [[i8; LANES]],
    tail: &'a [i8],
    scales: &'a [f32],
}

const STEPS_PER_SCALE: usize = Q8_BLOCK / LANES;

impl<'a> Q8Rows<'a> {
    /// Returns the rows from `row` on.
    pub(super) fn starting_at(numbers: Q8Numbers<'a>, cols: usize, row: usize) -> Self {
        let Q8Numbers { values, scales } = numbers;
        Self { values: &values[row * cols..], scales: &scales[row * cols.div_ceil(Q8_BLOCK)..], cols }
    }
}

impl<'a, S: Simd> Rows<S> for Q8Rows<'a> {
    type Row = Q8Row<'a>;

    #[inline(always)]
    fn row(self, nth: usize) -> Q8Row<'a> {
        let n_blocks = self.cols.div_ceil(Q8_BLOCK);
        let (steps, tail) = self.values[nth * self.cols..][..self.cols].as_chunks();
        Q8Row { steps, tail, scales: &self.scales[nth * n_blocks..][..n_blocks] }
    }

    #[inline(always)]
    fn row_bytes(self) -> usize {
        self.cols
    }
}

impl<S: Simd> Row<S> for Q8Row<'_> {
    const STEP_BYTES: usize = LANES;

    #[inline(always)]
    fn n_steps(self) -> usize {
        self.steps.len()
    }

    /// Returns the row of a range of vectors, which must start with a whole scale.
    #[inline(always)]
    fn part(self, steps: Range<usize>) -> Self {
        let scales = &self.scales[steps.start / STEPS_PER_SCALE..];
        assert!(scales.len() >= steps.len().div_ceil(STEPS_PER_SCALE));
        Self { steps: &self.steps[steps], tail: self.tail, scales }
    }

    #[inline(always)]
    fn step(self, simd: S, nth: usize) -> S::Floats {
        simd.mul(simd.load_i8(&self.steps[nth]), simd.splat(self.scales[nth / STEPS_PER_SCALE]))
    }

    #[inline(always)]
    fn prefetch(self, simd: S, bytes: usize) {
        simd.prefetch(self.steps.as_ptr().wrapping_byte_add(bytes));
    }

    #[inline(always)]
    fn tail(self, simd: S) -> Option<S::Floats> {
        let scale = self.scales.last().copied().unwrap_or(0.0);
        widened_tail(simd, self.tail, |value| f32::from(value) * scale)
    }
}

// === impl bf16 products ===

/// Rows of bf16 that are multiplied without widening, two at a time.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(super) struct Bf16PairRows<'a> {
    numbers: &'a [u16],
    cols: usize,
    stride: usize,
}

#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(super) struct Bf16PairRow<'a> {
    steps: &'a [[u16; 2 * LANES]],
    tail: &'a [u16],
}

#[cfg(target_arch = "x86_64")]
impl<'a> Bf16PairRows<'a> {
    /// Returns rows whose starts are `stride` numbers apart.
    pub(super) fn spaced(numbers: &'a [u16], cols: usize, stride: usize) -> Self {
        Self { numbers, cols, stride }
    }
}

#[cfg(target_arch = "x86_64")]
impl<'a> Rows<Avx512Bf16> for Bf16PairRows<'a> {
    type Row = Bf16PairRow<'a>;

    #[inline(always)]
    fn row(self, nth: usize) -> Bf16PairRow<'a> {
        let (steps, tail) = self.numbers[nth * self.stride..][..self.cols].as_chunks();
        Bf16PairRow { steps, tail }
    }

    #[inline(always)]
    fn row_bytes(self) -> usize {
        self.stride * 2
    }
}

#[cfg(target_arch = "x86_64")]
impl Row<Avx512Bf16> for Bf16PairRow<'_> {
    const STEP_BYTES: usize = 4 * LANES;

    #[inline(always)]
    fn n_steps(self) -> usize {
        self.steps.len()
    }

    #[inline(always)]
    fn part(self, steps: Range<usize>) -> Self {
        Self { steps: &self.steps[steps], ..self }
    }

    #[inline(always)]
    fn step(self, simd: Avx512Bf16, nth: usize) -> <Avx512Bf16 as Accumulate>::Floats {
        simd.load_pairs(&self.steps[nth])
    }

    #[inline(always)]
    fn prefetch(self, simd: Avx512Bf16, bytes: usize) {
        simd.prefetch(self.steps.as_ptr().wrapping_byte_add(bytes));
    }

    #[inline(always)]
    fn tail(self, simd: Avx512Bf16) -> Option<<Avx512Bf16 as Accumulate>::Floats> {
        let mut pairs = [0; 2 * LANES];
        pairs[..self.tail.len()].copy_from_slice(self.tail);
        (!self.tail.is_empty()).then(|| simd.load_pairs(&pairs))
    }
}

/// Rows of [`Q8Rows`], rounded to bf16 when they are read.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(super) struct Q8PairRows<'a>(Q8Rows<'a>);

#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(super) struct Q8PairRow<'a> {
    steps: &'a [[i8; 2 * LANES]],
    tail: &'a [i8],
    scales: &'a [f32],
}

#[cfg(target_arch = "x86_64")]
impl<'a> Q8PairRows<'a> {
    /// Returns the rows from `row` on.
    pub(super) fn starting_at(numbers: Q8Numbers<'a>, cols: usize, row: usize) -> Self {
        Self(Q8Rows::starting_at(numbers, cols, row))
    }
}

#[cfg(target_arch = "x86_64")]
impl<'a> Rows<Avx512Bf16> for Q8PairRows<'a> {
    type Row = Q8PairRow<'a>;

    #[inline(always)]
    fn row(self, nth: usize) -> Q8PairRow<'a> {
        let Q8Rows { values, scales, cols } = self.0;
        let n_blocks = cols.div_ceil(Q8_BLOCK);
        let (steps, tail) = values[nth * cols..][..cols].as_chunks();
        Q8PairRow { steps, tail, scales: &scales[nth * n_blocks..][..n_blocks] }
    }

    #[inline(always)]
    fn row_bytes(self) -> usize {
        self.0.cols
    }
}

#[cfg(target_arch = "x86_64")]
impl Row<Avx512Bf16> for Q8PairRow<'_> {
    const STEP_BYTES: usize = 2 * LANES;

    #[inline(always)]
    fn n_steps(self) -> usize {
        self.steps.len()
    }

    /// Returns the row of a range of vectors. Each vector is a block and so has a scale, and the tail has one
    /// more.
    #[inline(always)]
    fn part(self, steps: Range<usize>) -> Self {
        Self { scales: &self.scales[steps.clone()], steps: &self.steps[steps], tail: self.tail }
    }

    #[inline(always)]
    fn step(self, simd: Avx512Bf16, nth: usize) -> <Avx512Bf16 as Accumulate>::Floats {
        simd.scaled_pairs(&self.steps[nth], self.scales[nth])
    }

    #[inline(always)]
    fn prefetch(self, simd: Avx512Bf16, bytes: usize) {
        simd.prefetch(self.steps.as_ptr().wrapping_byte_add(bytes));
    }

    #[inline(always)]
    fn tail(self, simd: Avx512Bf16) -> Option<<Avx512Bf16 as Accumulate>::Floats> {
        let mut values = [0; 2 * LANES];
        values[..self.tail.len()].copy_from_slice(self.tail);
        let scale = self.scales.last().copied().unwrap_or(0.0);
        (!self.tail.is_empty()).then(|| simd.scaled_pairs(&values, scale))
    }
}
