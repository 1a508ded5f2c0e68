//! Hot path.
//! Matrix products: rows of activations by the rows of weight matrices.
//!
//! Cost: a decode step reads every weight once and is bound by memory. A prefill chunk is bound by
//! arithmetic: each weight that is loaded and widened is used for several rows, and the operands stay in the
//! core's caches.

use std::ops::Range;

use super::columns::Columns;
use super::matrix::{Format, Matrix};
use super::processor::Processor;
use super::scratch;
use super::simd::Isa;
use super::strips::{BLOCK, FEW_ROWS, STRIP};
use super::tile::Sums;

mod exact;
#[cfg(target_arch = "x86_64")]
mod paired;

/// Weight bytes that one part of a decode step's product reads: enough to justify a claim, and few enough for
/// even shares.
const PART_BYTES: usize = 128 << 10;

/// The number of activations that one part of the rounding to bf16 handles.
const NARROW_NUMBERS: usize = 32 << 10;

/// `out = x × matrixᵀ + bias`, for the rows that `out` has room for, or for some columns.
///
/// A column's results are bit-identical, whichever other columns are computed with it.
#[derive(Debug)]
pub struct Product<'a> {
    pub matrix: &'a Matrix,
    /// The bias: one number for each row of the matrix, even if only some columns are computed.
    pub bias: Option<&'a [f32]>,
    /// The columns to compute: a range of the matrix's outputs.
    pub columns: Range<usize>,
    /// The output, row by row, with one number for each of the computed columns.
    pub out: &'a mut [f32],
}

impl<'a> Product<'a> {
    /// Returns a product with all columns.
    pub fn whole(matrix: &'a Matrix, bias: Option<&'a [f32]>, out: &'a mut [f32]) -> Self {
        Self { matrix, bias, columns: 0..matrix.rows(), out }
    }
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
        let has_pairs = |product: &Product<'_>| matches!(product.matrix.format(), Format::Bf16 | Format::Q8);
        let narrow = self.multiplies_bf16() && products.iter().any(has_pairs);
        let cols = x.len() / n_rows;
        scratch::with_narrow(if narrow { n_rows * spacing(cols) } else { 0 }, |x_bf16| {
            self.narrow_rows(x, cols, x_bf16);
            let x = Activations { wide: x, bf16: narrow.then_some(&*x_bf16), n_rows };
            let jobs: Vec<ProductJob<'_>> =
                products.iter_mut().map(|product| ProductJob::new(&x, product)).collect();
            self.run_all(&jobs);
        });
    }

    /// Rounds rows to bf16, with a distance of [`spacing`] between them.
    fn narrow_rows(&self, wide: &[f32], cols: usize, narrow: &mut [u16]) {
        let spacing = spacing(cols);
        let rows_at_once = (NARROW_NUMBERS / spacing).max(1);
        self.pool().run_on(narrow, rows_at_once * spacing, |nth, narrow| {
            let wide = wide[nth * rows_at_once * cols..].chunks(cols);
            for (wide, narrow) in wide.zip(narrow.chunks_mut(spacing)) {
                self.narrow(wide, &mut narrow[..cols]);
            }
        });
    }

    fn run_all(&self, jobs: &[ProductJob<'_>]) {
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

/// Returns the distance between rows in our own buffers: whole cache lines, plus one. Without the extra line
/// the same column of all rows would map to the same few cache sets.
fn spacing(cols: usize) -> usize {
    cols.next_multiple_of(32) + 32
}

/// The activations that the weights multiply.
struct Activations<'a> {
    wide: &'a [f32],
    /// The activations in bf16, [`spacing`] apart, if the CPU's bf16 instruction is used.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "read by AVX-512's bf16 products"))]
    bf16: Option<&'a [u16]>,
    n_rows: usize,
}

/// One product, prepared so that several threads can write columns of its output.
struct ProductJob<'a> {
    x: &'a Activations<'a>,
    matrix: &'a Matrix,
    bias: Option<&'a [f32]>,
    columns: Range<usize>,
    out: Columns<'a>,
}

impl<'a> ProductJob<'a> {
    fn new(x: &'a Activations<'a>, product: &'a mut Product<'_>) -> Self {
        let matrix = product.matrix;
        assert_eq!(x.wide.len(), x.n_rows * matrix.cols(), "activations");
        let columns = product.columns.clone();
        assert!(columns.end <= matrix.rows(), "columns");
        assert_eq!(product.out.len(), x.n_rows * columns.len(), "output");
        assert!(product.bias.is_none_or(|bias| bias.len() == matrix.rows()), "bias");
        let out = Columns::new(product.out, columns.clone());
        Self { x, matrix, bias: product.bias, columns, out }
    }

    fn bias_of(&self, columns: &Range<usize>) -> Option<&[f32]> {
        self.bias.map(|bias| &bias[columns.clone()])
    }

    /// Returns the range of columns of each part of the work.
    fn parts(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let row_bytes = (self.matrix.bytes().len() / self.matrix.rows().max(1)).max(1);
        let by_bytes = (PART_BYTES / row_bytes).next_multiple_of(STRIP).max(STRIP);
        let width = if self.x.n_rows > FEW_ROWS { STRIP } else { by_bytes };
        let end = self.columns.end;
        self.columns.clone().step_by(width).map(move |first| first..(first + width).min(end))
    }

    fn run(&self, isa: Isa, columns: Range<usize>) {
        scratch::with_sums(self.x.n_rows.min(BLOCK) * STRIP, |sums| {
            let part = Part { job: self, columns, sums };
            #[cfg(target_arch = "x86_64")]
            if let (Some(bf16), Some(x)) = (isa.bf16(), self.x.bf16) {
                return paired::multiply(bf16, part, x);
            }
            exact::multiply(isa, part);
        });
    }
}

/// Some columns of one product.
struct Part<'a> {
    job: &'a ProductJob<'a>,
    columns: Range<usize>,
    /// The sums of one block of rows by one strip of columns.
    sums: &'a mut [Sums],
}

impl Part<'_> {
    /// Returns the number of weights before this part's first one.
    fn first_number(&self) -> usize {
        self.columns.start * self.cols()
    }

    fn cols(&self) -> usize {
        self.job.matrix.cols()
    }

    /// Returns the size of a copy of the part's weights, in numbers.
    fn panel_numbers(&self) -> usize {
        self.columns.len() * spacing(self.cols())
    }

    fn wants_panel(&self, from_rows: usize) -> bool {
        self.job.x.n_rows >= from_rows
    }
}

#[cfg(test)]
mod tests;
