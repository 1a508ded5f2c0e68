//! Hot path.
//! Products in f32. All weights are widened to f32 exactly.

use super::{Part, spacing};
use crate::cpu::matrix::Format;
use crate::cpu::scratch;
use crate::cpu::simd::{Isa, Kernel, LANES, Simd};
use crate::cpu::strips::Strips;
use crate::cpu::tile::{Bf16Rows, F8BlockRows, F8Rows, F16Rows, F32Rows, Q8Rows, Row, Rows};

/// The number of rows from which an f32 copy of the weights costs less than widening them repeatedly.
const PANEL_FROM_ROWS: usize = 17;

pub(super) fn multiply(isa: Isa, part: Part<'_>) {
    let (matrix, cols, first) = (part.job.matrix, part.cols(), part.first_number());
    match matrix.format() {
        Format::F32 => multiply_by(isa, part, F32Rows::new(&matrix.f32s()[first..], cols)),
        // Bf16 weights are not copied, because widening takes two operations, which costs less than a copy.
        Format::Bf16 => multiply_by(isa, part, Bf16Rows::new(&matrix.u16s()[first..], cols)),
        Format::F16 => by_panel(isa, part, F16Rows::new(&matrix.u16s()[first..], cols)),
        Format::Fp8 => {
            let scales = &matrix.scales()[part.columns.start..];
            by_panel(isa, part, F8Rows::new(&matrix.bytes()[first..], scales, cols));
        }
        Format::Fp8Blocks => {
            let weights = F8BlockRows::starting_at(matrix, part.columns.start);
            by_panel(isa, part, weights);
        }
        Format::Q8 => {
            let weights = Q8Rows::starting_at(matrix.q8(), cols, part.columns.start);
            by_panel(isa, part, weights);
        }
    }
}

/// Multiplies by f32 copies of the weights, if there are enough rows to share them.
fn by_panel(isa: Isa, part: Part<'_>, weights: impl AnyRows) {
    if !part.wants_panel(PANEL_FROM_ROWS) {
        return multiply_by(isa, part, weights);
    }
    let cols = part.cols();
    scratch::with_wide(part.panel_numbers(), |panel| {
        for (row, wide) in panel.chunks_exact_mut(spacing(cols)).enumerate() {
            isa.run(Widen { weights, row, wide: &mut wide[..cols] });
        }
        multiply_by(isa, part, F32Rows::spaced(panel, cols, spacing(cols)));
    });
}

fn multiply_by(isa: Isa, part: Part<'_>, weights: impl AnyRows) {
    isa.run(Multiply { part, weights });
}

struct Multiply<'a, W> {
    part: Part<'a>,
    /// The matrix rows of this part's columns, numbered from the first column.
    weights: W,
}

impl<W: AnyRows> Kernel for Multiply<'_, W> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let cols = self.part.cols();
        let Part { job, columns, sums } = self.part;
        let strips = Strips {
            adder: simd,
            simd,
            x: F32Rows::new(job.x.wide, cols),
            weights: self.weights.rows::<S>(),
            bias: job.bias_of(&columns),
            out: &job.out,
            first: columns.start,
        };
        strips.run(job.x.n_rows, columns.len(), sums);
    }
}

/// A kernel that widens one row of weights.
struct Widen<'a, W> {
    weights: W,
    row: usize,
    wide: &'a mut [f32],
}

impl<W: AnyRows> Kernel for Widen<'_, W> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let row = self.weights.rows::<S>().row(self.row);
        let (steps, tail) = self.wide.as_chunks_mut();
        for (nth, step) in steps.iter_mut().enumerate() {
            simd.store(row.step(simd, nth), step);
        }
        if let Some(last) = row.tail(simd) {
            let mut wide = [0.0; LANES];
            simd.store(last, &mut wide);
            tail.copy_from_slice(&wide[..tail.len()]);
        }
    }
}

/// Rows that every instruction set can read.
trait AnyRows: Copy + Send + Sync {
    fn rows<S: Simd>(self) -> impl Rows<S>;
}

macro_rules! any_rows {
    ($($rows:ident)*) => {$(
        impl AnyRows for $rows<'_> {
            #[inline(always)]
            fn rows<S: Simd>(self) -> impl Rows<S> {
                self
            }
        }
    )*};
}

any_rows!(F32Rows Bf16Rows F8Rows F8BlockRows F16Rows Q8Rows);
