//! Hot path.
//! The order of a product's tiles, chosen so that their operands are in a near cache.
//!
//! A strip of columns is computed for one block of rows at a time, and within a block for some steps of all
//! rows at a time. The order of tiles does not change the result, because each dot product continues its own
//! sums.

use std::ops::Range;

use super::columns::Columns;
use super::simd::{Accumulate, LANES, Simd, Tiles};
use super::tile::{self, Row, Rows, Start, Sums};

/// The number of columns in progress at one time: whole vectors of output, and whole tiles of any width.
pub(super) const STRIP: usize = 48;
/// The number of rows in progress at one time. With [`STRIP`], their sums take 192 KiB.
pub(super) const BLOCK: usize = 64;
/// The largest number of rows for which weights are read once, fastest in the order in which they are stored.
pub(super) const FEW_ROWS: usize = 16;
/// The number of vectors of each row that are multiplied before the next rows. A tile's weights, up to 24
/// KiB, stay in the L1 cache for all rows. A block's activations, 256 KiB, stay in the L2 cache for all
/// columns.
const STEPS: usize = 64;
/// The maximum prefetch distance for weights, in bytes: what the L1 cache can hold beside the current tile.
const AHEAD_BYTES_MAX: usize = 64 << 10;

/// The operands and the output of one part of a product.
pub(super) struct Strips<'a, A, S, X, W> {
    /// Sums the products.
    pub(super) adder: A,
    /// Turns sums into totals.
    pub(super) simd: S,
    pub(super) x: X,
    /// The rows of the weights, numbered from the first column of the part.
    pub(super) weights: W,
    /// The bias of this part's columns.
    pub(super) bias: Option<&'a [f32]>,
    pub(super) out: &'a Columns<'a>,
    /// The first column of the part in the output.
    pub(super) first: usize,
}

/// One unit of the work: some steps of some rows by some columns.
#[derive(Clone)]
struct Work {
    rows: Range<usize>,
    columns: Range<usize>,
    steps: Range<usize>,
    start: Start,
}

impl<A: Accumulate, S: Simd, X: Rows<A>, W: Rows<A>> Strips<'_, A, S, X, W> {
    /// Computes the part. `sums` has room for a block by a strip, or for fewer rows if there are fewer.
    #[inline(always)]
    pub(super) fn run(&self, n_rows: usize, n_columns: usize, sums: &mut [Sums]) {
        let mut left = 0..n_columns;
        while !left.is_empty() {
            let columns = take(&mut left, STRIP);
            let mut rows_left = 0..n_rows;
            while !rows_left.is_empty() {
                let rows = take(&mut rows_left, BLOCK);
                self.add_up(rows.clone(), columns.clone(), sums);
                self.write_totals(rows, columns.clone(), sums);
            }
        }
    }

    #[inline(always)]
    fn add_up(&self, rows: Range<usize>, columns: Range<usize>, sums: &mut [Sums]) {
        let mut left = 0..self.x.row(0).n_steps();
        let most = if rows.len() > FEW_ROWS { STEPS } else { left.len() };
        let mut start = Start::Fresh;
        loop {
            let steps = take(&mut left, most);
            self.strip(&Work { rows: rows.clone(), columns: columns.clone(), steps, start }, sums);
            start = Start::Continue;
            if left.is_empty() {
                break;
            }
        }
        if self.x.row(0).tail(self.adder).is_some() {
            self.add_tails(rows, columns, sums);
        }
    }

    #[inline(always)]
    fn add_tails(&self, rows: Range<usize>, columns: Range<usize>, sums: &mut [Sums]) {
        for (r, row) in rows.enumerate() {
            for (c, column) in columns.clone().enumerate() {
                tile::add_tail(
                    self.adder,
                    self.x.row(row),
                    self.weights.row(column),
                    &mut sums[r * STRIP + c],
                );
            }
        }
    }

    /// Computes tiles of the largest size that the registers allow. The remaining columns of a strip are
    /// computed one by one.
    #[inline(always)]
    fn strip(&self, work: &Work, sums: &mut [Sums]) {
        let mut next = 0;
        match A::TILES {
            Tiles::Small => self.tiles::<2, 3>(work, &mut next, sums),
            Tiles::Large => self.tiles::<4, 6>(work, &mut next, sums),
        }
        self.tiles::<2, 1>(work, &mut next, sums);
    }

    /// Computes the columns from `next` on that make whole tiles.
    #[inline(always)]
    fn tiles<const R: usize, const C: usize>(&self, work: &Work, next: &mut usize, sums: &mut [Sums]) {
        while *next + C <= work.columns.len() {
            self.down::<R, C>(work, work.columns.start + *next, &mut sums[*next..]);
            *next += C;
        }
    }

    /// Computes all rows of some columns, so that the columns are loaded from memory only once.
    #[inline(always)]
    fn down<const R: usize, const C: usize>(&self, work: &Work, column: usize, sums: &mut [Sums]) {
        let mut w = [self.weights.row(column).part(work.steps.clone()); C];
        for c in 1..C {
            w[c] = self.weights.row(column + c).part(work.steps.clone());
        }
        let few = work.rows.len() <= FEW_ROWS;
        // The product saturates, because the emulator of tests/rdma-vm reports a wrong overflow if its flag is stored in
        // a new page of the stack.
        let all_bytes = self.weights.row_bytes().saturating_mul(C);
        let mut ahead = if few { all_bytes.min(AHEAD_BYTES_MAX) } else { 0 };
        let mut r = 0;
        while r + R <= work.rows.len() {
            self.tile::<R, C>(work, r, w, ahead, sums);
            ahead = 0;
            r += R;
        }
        if R > 2 && r + 2 <= work.rows.len() {
            self.tile::<2, C>(work, r, w, ahead, sums);
            ahead = 0;
            r += 2;
        }
        if r < work.rows.len() {
            self.tile::<1, C>(work, r, w, ahead, sums);
        }
    }

    #[inline(always)]
    fn tile<const R: usize, const C: usize>(
        &self,
        work: &Work,
        r: usize,
        w: [W::Row; C],
        ahead: usize,
        sums: &mut [Sums],
    ) {
        let mut x = [self.x.row(work.rows.start + r).part(work.steps.clone()); R];
        for i in 1..R {
            x[i] = self.x.row(work.rows.start + r + i).part(work.steps.clone());
        }
        tile::tile::<A, _, _, R, C, STRIP>(self.adder, x, w, work.start, ahead, &mut sums[r * STRIP..]);
    }

    #[inline(always)]
    fn write_totals(&self, rows: Range<usize>, columns: Range<usize>, sums: &[Sums]) {
        for (r, row) in rows.enumerate() {
            let sums = &sums[r * STRIP..][..STRIP];
            let mut totals = [0.0; STRIP];
            for (sums, totals) in sums.as_chunks::<LANES>().0.iter().zip(totals.as_chunks_mut::<LANES>().0) {
                self.simd.store(self.simd.sums(sums), totals);
            }
            self.add_bias(&mut totals, columns.clone());
            self.out.set(row, self.first + columns.start, &totals[..columns.len()]);
        }
    }

    #[inline(always)]
    fn add_bias(&self, totals: &mut [f32; STRIP], columns: Range<usize>) {
        if let Some(bias) = self.bias {
            for (total, bias) in totals.iter_mut().zip(&bias[columns]) {
                *total += bias;
            }
        }
    }
}

/// Takes at most `most` numbers from the front.
#[inline(always)]
fn take(left: &mut Range<usize>, most: usize) -> Range<usize> {
    let taken = left.start..left.end.min(left.start + most);
    left.start = taken.end;
    taken
}
