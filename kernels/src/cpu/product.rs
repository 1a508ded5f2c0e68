//! Hot path.
//! Matrix products: many rows of activations by the rows of weight matrices.
//!
//! Cost: a decode step reads every weight once and is bound by memory; a prefill chunk is bound by arithmetic, so each
//! weight that was loaded and widened serves several rows, and what is multiplied stays in the core's caches.

use std::ops::Range;

use super::columns::Columns;
use super::matrix::{Format, Matrix};
use super::processor::Processor;
use super::scratch;
#[cfg(target_arch = "x86_64")]
use super::simd::{Avx512Bf16, Bf16Kernel};
use super::simd::{Isa, Kernel, Simd};
use super::strips::{BLOCK, FEW_ROWS, STRIP, Strips};
#[cfg(target_arch = "x86_64")]
use super::tile::Bf16PairRows;
use super::tile::{Bf16Rows, F16Rows, F32Rows, Q8Rows, Rows, Sums};

/// Weight bytes that one part of a decode step's product reads: worth a claim, and little enough to share evenly.
const PART_BYTES: usize = 128 << 10;
/// From so many rows on, a part's weights are first brought into the form that is quickest to multiply.
const PANEL_FROM_ROWS: usize = 17;

/// `out = x × matrixᵀ + bias`, for as many rows as `out` has room for.
#[derive(Debug)]
pub struct Product<'a> {
    pub matrix: &'a Matrix,
    pub bias: Option<&'a [f32]>,
    /// Row after row, `matrix.rows()` numbers each.
    pub out: &'a mut [f32],
}

impl Processor {
    /// Multiplies the same `n_rows` rows of activations by several matrices.
    ///
    /// # Panics
    /// If a length does not fit `n_rows` and the matrix.
    pub fn multiply(&self, x: &[f32], n_rows: usize, products: &mut [Product<'_>]) {
        if n_rows == 0 {
            return;
        }
        let narrow =
            self.multiplies_bf16() && products.iter().any(|product| product.matrix.format() == Format::Bf16);
        let cols = x.len() / n_rows;
        scratch::with_narrow(if narrow { n_rows * spacing(cols) } else { 0 }, |x_bf16| {
            for (wide, narrow) in x.chunks_exact(cols.max(1)).zip(x_bf16.chunks_exact_mut(spacing(cols))) {
                self.narrow(wide, &mut narrow[..cols]);
            }
            let x = Activations { wide: x, bf16: narrow.then_some(&*x_bf16), n_rows };
            let jobs: Vec<Job<'_>> = products.iter_mut().map(|product| Job::new(&x, product)).collect();
            self.run_all(&jobs);
        });
    }

    fn run_all(&self, jobs: &[Job<'_>]) {
        let parts: Vec<(usize, Range<usize>)> = jobs
            .iter()
            .enumerate()
            .flat_map(|(nth, job)| job.parts().map(move |columns| (nth, columns)))
            .collect();
        self.pool().run(parts.len(), &|part| {
            let (nth, columns) = &parts[part];
            jobs[*nth].run(self.isa(), columns.clone());
        });
    }
}

/// From one row to the next in our own buffers: whole cache lines, and one more, lest the same column of all rows falls
/// into the same few places of the cache.
fn spacing(cols: usize) -> usize {
    cols.next_multiple_of(32) + 32
}

/// What is multiplied by the weights.
struct Activations<'a> {
    wide: &'a [f32],
    /// The same in bf16 and [`spacing`] apart, where weights of that type are multiplied by the processor's bf16 instruction.
    bf16: Option<&'a [u16]>,
    n_rows: usize,
}

/// One product, taken apart so that several threads can write columns of its output.
struct Job<'a> {
    x: &'a Activations<'a>,
    matrix: &'a Matrix,
    bias: Option<&'a [f32]>,
    out: Columns<'a>,
}

impl<'a> Job<'a> {
    fn new(x: &'a Activations<'a>, product: &'a mut Product<'_>) -> Self {
        let matrix = product.matrix;
        assert_eq!(x.wide.len(), x.n_rows * matrix.cols(), "activations");
        assert_eq!(product.out.len(), x.n_rows * matrix.rows(), "output");
        assert!(product.bias.is_none_or(|bias| bias.len() == matrix.rows()), "bias");
        Self { x, matrix, bias: product.bias, out: Columns::new(product.out, matrix.rows()) }
    }

    fn bias_of(&self, columns: &Range<usize>) -> Option<&[f32]> {
        self.bias.map(|bias| &bias[columns.clone()])
    }

    /// The columns of each part.
    fn parts(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let n_columns = self.matrix.rows();
        let row_bytes = (self.matrix.bytes().len() / n_columns.max(1)).max(1);
        let by_bytes = (PART_BYTES / row_bytes).next_multiple_of(STRIP).max(STRIP);
        let width = if self.x.n_rows > FEW_ROWS { STRIP } else { by_bytes };
        (0..n_columns).step_by(width).map(move |first| first..(first + width).min(n_columns))
    }

    fn run(&self, isa: Isa, columns: Range<usize>) {
        let (matrix, cols) = (self.matrix, self.matrix.cols());
        let first = columns.start * cols;
        scratch::with_sums(self.x.n_rows.min(BLOCK) * STRIP, |sums| match matrix.format() {
            Format::F32 => self.exactly(isa, columns, F32Rows::new(&matrix.f32s()[first..], cols), sums),
            Format::Bf16 => self.bf16(isa, columns, sums),
            Format::F16 => self.widened(isa, columns, F16Rows::new(&matrix.u16s()[first..], cols), sums),
            Format::Q8 => self.widened(
                isa,
                columns.clone(),
                Q8Rows::starting_at(matrix.q8(), cols, columns.start),
                sums,
            ),
        });
    }

    /// bf16 by bf16 where that is wanted and there is an instruction for it.
    fn bf16(&self, isa: Isa, columns: Range<usize>, sums: &mut [Sums]) {
        let (weights, cols) = (self.matrix.u16s(), self.matrix.cols());
        #[cfg(target_arch = "x86_64")]
        if let (Some(bf16), Some(x)) = (isa.bf16(), self.x.bf16) {
            if self.x.n_rows < PANEL_FROM_ROWS {
                let weights = Bf16PairRows::spaced(&weights[columns.start * cols..], cols, cols);
                return bf16.run(Bf16Part { job: self, x, columns, weights, sums });
            }
            return scratch::with_panel(columns.len() * spacing(cols), |panel| {
                for (row, panel) in columns.clone().zip(panel.chunks_exact_mut(spacing(cols))) {
                    panel[..cols].copy_from_slice(&weights[row * cols..][..cols]);
                }
                let weights = Bf16PairRows::spaced(panel, cols, spacing(cols));
                bf16.run(Bf16Part { job: self, x, columns, weights, sums });
            });
        }
        self.exactly(isa, columns.clone(), Bf16Rows::new(&weights[columns.start * cols..], cols), sums);
    }

    /// Through f32 copies of the weights, if there are enough rows to share them.
    fn widened(&self, isa: Isa, columns: Range<usize>, weights: impl AnyRows, sums: &mut [Sums]) {
        if self.x.n_rows < PANEL_FROM_ROWS {
            return self.exactly(isa, columns, weights, sums);
        }
        let cols = self.matrix.cols();
        scratch::with_wide(columns.len() * spacing(cols), |panel| {
            for (row, panel) in panel.chunks_exact_mut(spacing(cols)).enumerate() {
                isa.run(Widen { weights, row, wide: &mut panel[..cols] });
            }
            self.exactly(isa, columns, F32Rows::spaced(panel, cols, spacing(cols)), sums);
        });
    }

    /// In f32, to which all weights are widened without loss.
    fn exactly(&self, isa: Isa, columns: Range<usize>, weights: impl AnyRows, sums: &mut [Sums]) {
        isa.run(Part { job: self, columns, weights, sums });
    }
}

/// Some columns of one product, in f32.
struct Part<'a, W> {
    job: &'a Job<'a>,
    columns: Range<usize>,
    /// The rows of these columns alone.
    weights: W,
    sums: &'a mut [Sums],
}

impl<W: AnyRows> Kernel for Part<'_, W> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (job, cols) = (self.job, self.job.matrix.cols());
        let (x, weights) = (F32Rows::new(job.x.wide, cols), self.weights.rows::<S>());
        let strips = Strips {
            adder: simd,
            simd,
            x,
            weights,
            bias: job.bias_of(&self.columns),
            out: &job.out,
            first: self.columns.start,
        };
        strips.run(job.x.n_rows, self.columns.len(), self.sums);
    }
}

/// Some columns of one product, bf16 by bf16.
#[cfg(target_arch = "x86_64")]
struct Bf16Part<'a> {
    job: &'a Job<'a>,
    x: &'a [u16],
    columns: Range<usize>,
    weights: Bf16PairRows<'a>,
    sums: &'a mut [Sums],
}

#[cfg(target_arch = "x86_64")]
impl Bf16Kernel for Bf16Part<'_> {
    type Out = ();

    #[inline(always)]
    fn run(self, adder: Avx512Bf16) {
        let (job, cols) = (self.job, self.job.matrix.cols());
        let x = Bf16PairRows::spaced(self.x, cols, spacing(cols));
        let strips = Strips {
            adder,
            simd: adder.simd(),
            x,
            weights: self.weights,
            bias: job.bias_of(&self.columns),
            out: &job.out,
            first: self.columns.start,
        };
        strips.run(job.x.n_rows, self.columns.len(), self.sums);
    }
}

/// One row of weights, widened.
struct Widen<'a, W> {
    weights: W,
    row: usize,
    wide: &'a mut [f32],
}

impl<W: AnyRows> Kernel for Widen<'_, W> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        use super::tile::Row;
        let row = self.weights.rows::<S>().row(self.row);
        let (steps, tail) = self.wide.as_chunks_mut();
        for (nth, step) in steps.iter_mut().enumerate() {
            simd.store(row.step(simd, nth), step);
        }
        if let Some(last) = row.tail(simd) {
            let mut wide = [0.0; super::simd::LANES];
            simd.store(last, &mut wide);
            tail.copy_from_slice(&wide[..tail.len()]);
        }
    }
}

// === rows for any instruction set ===

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

any_rows!(F32Rows Bf16Rows F16Rows Q8Rows);

#[cfg(test)]
mod tests;
