//! Hot path.
//! Products of bf16 by bf16, two at a time, by a CPU instruction: twice as fast as f32.

use super::{Part, exact, spacing};
use crate::cpu::matrix::Format;
use crate::cpu::scratch;
use crate::cpu::simd::{Avx512Bf16, Bf16Kernel, LANES};
use crate::cpu::strips::Strips;
use crate::cpu::tile::{Bf16PairRows, Q8PairRows, Row, Rows};

/// The number of bf16 numbers in one vector of pairs.
const PAIRED: usize = 2 * LANES;

/// The number of rows from which weights are copied so that no vector crosses a cache line.
const PANEL_FROM_ROWS: usize = 17;
/// The number of rows from which 8-bit weights are converted to bf16 once for all rows.
const Q8_PANEL_FROM_ROWS: usize = 5;

/// The prefetch distance for weights that are copied: a few rows follow one another.
const COPY_AHEAD_BYTES: usize = 4096;

/// Multiplies by the bf16 instruction. `x` is the part's activations in bf16, [`spacing`] apart. Weights that
/// bf16 would round much are multiplied exactly.
pub(super) fn multiply(bf16: Avx512Bf16, part: Part<'_>, x: &[u16]) {
    let (matrix, cols, first) = (part.job.matrix, part.cols(), part.first_number());
    match matrix.format() {
        Format::Bf16 => {
            let weights = Bf16PairRows::spaced(&matrix.u16s()[first..], cols, cols);
            multiply_by(bf16, part, x, weights, PANEL_FROM_ROWS);
        }
        Format::Q8 => {
            let weights = Q8PairRows::starting_at(matrix.q8(), cols, part.columns.start);
            multiply_by(bf16, part, x, weights, Q8_PANEL_FROM_ROWS);
        }
        Format::F32 | Format::F16 | Format::Fp8 | Format::Fp8Blocks => exact::multiply(bf16.isa(), part),
    }
}

/// Multiplies by these weights. From `PANEL_FROM_ROWS` rows on, copies the weights first, so that they start
/// on cache lines.
fn multiply_by(
    bf16: Avx512Bf16,
    part: Part<'_>,
    x: &[u16],
    weights: impl Rows<Avx512Bf16>,
    panel_from: usize,
) {
    if !part.wants_panel(panel_from) {
        return bf16.run(Multiply { part, x, weights });
    }
    let cols = part.cols();
    scratch::with_panel(part.panel_numbers(), |panel| {
        for (row, paired) in panel.chunks_exact_mut(spacing(cols)).enumerate() {
            bf16.run(Copy { row: weights.row(row), paired: &mut paired[..cols] });
        }
        bf16.run(Multiply { part, x, weights: Bf16PairRows::spaced(panel, cols, spacing(cols)) });
    });
}

struct Multiply<'a, W> {
    part: Part<'a>,
    x: &'a [u16],
    /// The matrix rows of this part's columns, numbered from the first column.
    weights: W,
}

impl<W: Rows<Avx512Bf16>> Bf16Kernel for Multiply<'_, W> {
    type Output = ();

    #[inline(always)]
    fn run(self, adder: Avx512Bf16) {
        let cols = self.part.cols();
        let Part { job, columns, sums } = self.part;
        let strips = Strips {
            adder,
            simd: adder.simd(),
            x: Bf16PairRows::spaced(self.x, cols, spacing(cols)),
            weights: self.weights,
            bias: job.bias_of(&columns),
            out: &job.out,
            first: columns.start,
        };
        strips.run(job.x.n_rows, columns.len(), sums);
    }
}

/// A kernel that copies one row of weights as pairs.
struct Copy<'a, W> {
    row: W,
    paired: &'a mut [u16],
}

impl<W: Row<Avx512Bf16>> Bf16Kernel for Copy<'_, W> {
    type Output = ();

    #[inline(always)]
    fn run(self, bf16: Avx512Bf16) {
        let (steps, tail) = self.paired.as_chunks_mut::<PAIRED>();
        for (nth, step) in steps.iter_mut().enumerate() {
            self.row.prefetch(bf16, COPY_AHEAD_BYTES + nth * W::STEP_BYTES);
            bf16.store_pairs(self.row.step(bf16, nth), step);
        }
        if let Some(last) = self.row.tail(bf16) {
            let mut pairs = [0; PAIRED];
            bf16.store_pairs(last, &mut pairs);
            tail.copy_from_slice(&pairs[..tail.len()]);
        }
    }
}
