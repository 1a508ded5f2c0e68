//! Rows of FP8 matrices in the GPU's order, written by several threads.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use device::cuda::Bf16;
use kernels::cpu::number::F8_MAX;
use kernels::cpu::{FP8_BLOCK, Format, Matrix, Processor};
use kernels::cuda::{Fp8Rows, Fp8Scales};

use super::blocks_of;
use crate::load::SourceRows;

/// Matrices of the same shape that become FP8 rows in the GPU's order, one matrix after the other.
///
/// Matrices in other formats are quantized while their rows are written, so no copy of a matrix is made. Several
/// threads call [`fill`](Self::fill), each for other rows.
#[derive(Debug)]
pub(in crate::backend::cuda) struct PackedRows<'a> {
    host: &'a Processor,
    matrices: Vec<PackedMatrix>,
    /// The row of a matrix for each of its rows on the GPU; `None` means zeroes.
    rows: Vec<Option<usize>>,
    columns: PackedColumns,
    scaling: Fp8Scales,
    /// The bits of the scale of each row on the GPU, once it is written. Unused if blocks have scales.
    scales: Vec<AtomicU32>,
}

#[derive(Debug)]
struct PackedMatrix {
    source: SourceRows,
    has_nan: AtomicBool,
}

/// Which columns of a matrix a row on the GPU has.
#[derive(Debug)]
struct PackedColumns {
    /// The column for each byte of a row on the GPU; `None` means zero.
    places: Vec<Option<usize>>,
    /// The columns, if they follow each other and only zeroes follow them.
    contiguous: Option<Range<usize>>,
}

/// A thread's memory for a row.
#[derive(Debug, Default)]
struct RowScratch {
    wide: Vec<f32>,
    narrow: Vec<u8>,
}

// === impl PackedRows ===

impl<'a> PackedRows<'a> {
    /// Describes parts of `matrices`, which all have `rows` and `columns` on the GPU. `columns` are those of a row
    /// before they are reordered for the GPU. With scales of blocks, a matrix has its scales already, or it is random.
    pub(in crate::backend::cuda) fn new(
        host: &'a Processor,
        matrices: Vec<SourceRows>,
        scaling: Fp8Scales,
        rows: Vec<Option<usize>>,
        columns: &[Option<usize>],
    ) -> Self {
        let scales = (0..matrices.len() * rows.len()).map(|_| AtomicU32::new(0)).collect();
        let matrix = |source| PackedMatrix { source, has_nan: AtomicBool::new(false) };
        let matrices = matrices.into_iter().map(matrix).collect();
        Self { host, matrices, rows, columns: PackedColumns::new(columns), scaling, scales }
    }

    /// Returns the bytes of a row on the GPU.
    pub(in crate::backend::cuda) fn width(&self) -> usize {
        self.columns.places.len()
    }

    /// Returns the scales in the GPU's order: for each row, or for each block row by row. Those of rows are known
    /// once all rows are written.
    ///
    /// # Panics
    /// If the GPU's blocks have numbers of several of the matrix's.
    pub(in crate::backend::cuda) fn scales(&self) -> Vec<f32> {
        if self.scaling == Fp8Scales::OfRows {
            return self.scales.iter().map(|bits| f32::from_bits(bits.load(Ordering::Relaxed))).collect();
        }
        self.matrices.iter().flat_map(|matrix| self.block_scales(matrix)).collect()
    }

    /// Returns the scales of a matrix's blocks. Random rows are quantized row by row, and all blocks have the scale of the
    /// largest random number: a row's own scale is about the same.
    fn block_scales(&self, matrix: &PackedMatrix) -> Vec<f32> {
        let checked = "the blocks were checked before memory was taken";
        let rows = blocks_of(&self.rows, Fp8Scales::BLOCK_ROWS).expect(checked);
        let columns = blocks_of(&self.columns.places, Fp8Scales::BLOCK_COLUMNS).expect(checked);
        let of_row = matrix.source.cols().div_ceil(FP8_BLOCK);
        let at = |row: usize, column: usize| match &matrix.source {
            SourceRows::Stored(_) => in_blocks(matrix).scales()[row * of_row + column],
            SourceRows::Random { numbers, .. } => numbers.scale * -f32::from(i16::MIN) / F8_MAX,
        };
        let scale = |(row, column): (Option<usize>, Option<usize>)| {
            row.zip(column).map_or(0.0, |(row, column)| at(row, column))
        };
        rows.iter().flat_map(|row| columns.iter().map(|column| (*row, *column))).map(scale).collect()
    }

    /// Writes whole rows as pairs of bytes, from row `first` on.
    pub(in crate::backend::cuda) fn fill(&self, first: usize, pairs: &mut [Bf16]) {
        let mut scratch = RowScratch::default();
        for (row, pairs) in (first..).zip(pairs.chunks_mut(self.width() / 2)) {
            let matrix = &self.matrices[row / self.rows.len()];
            let Some(from) = self.rows[row % self.rows.len()] else {
                pairs.fill(Bf16::default());
                continue;
            };
            let (bytes, scale) = match (self.scaling, &matrix.source) {
                (Fp8Scales::OfBlocks, SourceRows::Stored(_)) => (stored_row(in_blocks(matrix), from), 0.0),
                (_, source) => scratch.scaled_row(source, from, self.host),
            };
            self.scales[row].store(scale.to_bits(), Ordering::Relaxed);
            if self.columns.pack(bytes, pairs).has_nan {
                matrix.has_nan.store(true, Ordering::Relaxed);
            }
        }
    }

    /// Returns the index of the first matrix with NaN among the bytes that `fill` has written.
    pub(in crate::backend::cuda) fn nth_with_nan(&self) -> Option<usize> {
        self.matrices.iter().position(|matrix| matrix.has_nan.load(Ordering::Relaxed))
    }
}

fn in_blocks(matrix: &PackedMatrix) -> &Matrix {
    matrix.source.stored_as(Format::Fp8Blocks).expect("the loader has quantized other formats")
}

/// Returns a row's bytes of an FP8 matrix.
fn stored_row(matrix: &Matrix, row: usize) -> &[u8] {
    &matrix.bytes()[row * matrix.cols()..(row + 1) * matrix.cols()]
}

// === impl RowScratch ===

impl RowScratch {
    /// Returns a row in FP8, quantized if the matrix has no scales of rows, and its scale.
    fn scaled_row<'a>(&'a mut self, source: &'a SourceRows, row: usize, host: &Processor) -> (&'a [u8], f32) {
        if let Some(matrix) = source.stored_as(Format::Fp8) {
            return (stored_row(matrix, row), matrix.scales()[row]);
        }
        let cols = source.cols();
        self.wide.resize(cols, 0.0);
        self.narrow.resize(cols, 0);
        source.read_row(row, &mut self.wide, host);
        let scale = host.quantize_row_fp8(&self.wide, &mut self.narrow);
        (&self.narrow, scale)
    }
}

// === impl PackedColumns ===

/// The result of packing a row.
struct PackedRow {
    has_nan: bool,
}

impl PackedColumns {
    fn new(columns: &[Option<usize>]) -> Self {
        let mut places = vec![None; Fp8Rows::width(columns.len())];
        for (nth, column) in columns.iter().enumerate() {
            places[Fp8Rows::place(nth)] = *column;
        }
        let first = columns.first().copied().flatten().unwrap_or(0);
        let n_real = columns.iter().flatten().count();
        let expected = |nth: usize| (nth < n_real).then_some(first + nth);
        let is_contiguous = columns.iter().enumerate().all(|(nth, column)| *column == expected(nth));
        Self { places, contiguous: is_contiguous.then_some(first..first + n_real) }
    }

    /// Writes the bytes of a row to their places.
    fn pack(&self, from: &[u8], pairs: &mut [Bf16]) -> PackedRow {
        let is_nan = |byte: u8| byte & 0x7F == 0x7F;
        if let Some(columns) = self.contiguous.clone() {
            let bytes = &from[columns];
            let (real, zeroes) = pairs.split_at_mut(Fp8Rows::width(bytes.len()) / 2);
            Fp8Rows::pack(bytes, real);
            zeroes.fill(Bf16::default());
            return PackedRow { has_nan: bytes.iter().fold(false, |any, byte| any | is_nan(*byte)) };
        }
        let mut has_nan = false;
        for (pair, columns) in pairs.iter_mut().zip(self.places.as_chunks::<2>().0) {
            let bytes = columns.map(|column| column.map_or(0, |column| from[column]));
            has_nan |= bytes.into_iter().any(is_nan);
            *pair = Bf16(u16::from_le_bytes(bytes));
        }
        PackedRow { has_nan }
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZero;

    use kernels::cpu::{Arithmetic, SharedBytes};

    use super::*;
    use crate::load::{Dummy, TensorSource};

    fn matrix(rows: usize, cols: usize) -> Matrix {
        let bytes = SharedBytes::filled(rows * cols, |bytes| {
            bytes.iter_mut().enumerate().for_each(|(nth, byte)| *byte = (nth % 100) as u8);
        });
        let scales: Vec<f32> = (0..rows).map(|row| row as f32 + 0.5).collect();
        Matrix::scaled(bytes.expect("memory"), cols, scales.into()).expect("a byte for each number")
    }

    fn host() -> Processor {
        Processor::new(Arithmetic::F32, NonZero::<usize>::MIN).expect("a thread")
    }

    /// Fills all rows in two parts, and returns the bytes.
    fn filled(packed: &PackedRows<'_>, n_rows: usize) -> Vec<u8> {
        let mut pairs = vec![Bf16(9); n_rows * packed.width() / 2];
        let (head, tail) = pairs.split_at_mut(n_rows / 2 * packed.width() / 2);
        packed.fill(0, head);
        packed.fill(n_rows / 2, tail);
        pairs.iter().flat_map(|pair| pair.0.to_le_bytes()).collect()
    }

    #[test]
    fn bytes_go_where_the_card_looks_for_them() {
        let (matrix, host) = (matrix(3, 90), host());
        // The rows are the second row, zeroes, and the first row. Each has the columns from 5 on, with and without two
        // zero columns in between.
        let split = (5..40).map(Some).chain([None, None]).chain((40..83).map(Some)).collect();
        let contiguous = (5..60).map(Some).chain([None; 60]).collect();
        for columns in [split, contiguous] {
            let columns: Vec<Option<usize>> = columns;
            let rows = vec![Some(1), None, Some(0)];
            let sources = vec![SourceRows::Stored(matrix.clone())];
            let packed = PackedRows::new(&host, sources, Fp8Scales::OfRows, rows, &columns);
            let bytes = filled(&packed, 3);
            assert_eq!(packed.scales(), [1.5, 0.0, 0.5]);
            for (row, from) in [(0, Some(1)), (1, None), (2, Some(0))] {
                for nth in 0..128 {
                    let column = columns.get(nth).copied().flatten();
                    let number = |(row, column): (usize, usize)| ((row * 90 + column) % 100) as u8;
                    let expected = from.zip(column).map_or(0, number);
                    assert_eq!(bytes[row * 128 + Fp8Rows::place(nth)], expected, "row {row}, number {nth}");
                }
            }
            assert_eq!(packed.nth_with_nan(), None);
        }
    }

    #[test]
    fn rows_are_quantized_as_whole_matrices_are() {
        let host = host();
        let dummy = Dummy { seed: 4, processor: &host };
        let (n_rows, cols) = (7, 130);
        let names = ["a", "b", "c"];
        let in_bf16 = names.map(|name| dummy.matrix(name, n_rows, cols).expect("memory"));
        let in_blocks = in_bf16.clone().map(|matrix| host.quantize_fp8_blocks(&matrix).expect("memory"));
        let [in_fp8, again] = [&in_bf16, &in_blocks]
            .map(|all| all.each_ref().map(|one| host.quantize_fp8(one).expect("memory")));
        // Every second row, and columns as of a rank in the middle.
        let rows: Vec<Option<usize>> = vec![Some(0), Some(2), None, Some(4), Some(6)];
        let columns: Vec<Option<usize>> = (40..110).map(Some).collect();
        let random = names.map(|name| dummy.rows(name, n_rows, cols).expect("random"));
        for (sources, expected) in [
            (random, &in_fp8),
            (in_bf16.map(SourceRows::Stored), &in_fp8),
            (in_fp8.clone().map(SourceRows::Stored), &in_fp8),
            (in_blocks.map(SourceRows::Stored), &again),
        ] {
            let packed = PackedRows::new(&host, sources.to_vec(), Fp8Scales::OfRows, rows.clone(), &columns);
            let bytes = filled(&packed, 15);
            for (place, scale) in packed.scales().into_iter().enumerate() {
                let (fp8, row) = (&expected[place / 5], rows[place % 5]);
                assert_eq!(scale, row.map_or(0.0, |row| fp8.scales()[row]));
                for (nth, column) in columns.iter().enumerate() {
                    let expected =
                        row.zip(*column).map_or(0, |(row, column)| fp8.bytes()[row * cols + column]);
                    assert_eq!(
                        bytes[place * 128 + Fp8Rows::place(nth)],
                        expected,
                        "row {place}, number {nth}"
                    );
                }
            }
        }
    }

    #[test]
    fn random_blocks_have_about_the_numbers_of_random_rows() {
        let host = host();
        let source = Dummy { seed: 4, processor: &host }.rows("a", 128, 256).expect("random");
        let rows: Vec<Option<usize>> = (0..128).map(Some).collect();
        let columns: Vec<Option<usize>> = (0..256).map(Some).collect();
        let [in_rows, in_blocks] = [Fp8Scales::OfRows, Fp8Scales::OfBlocks]
            .map(|scaling| PackedRows::new(&host, vec![source.clone()], scaling, rows.clone(), &columns));
        assert_eq!(filled(&in_rows, 128), filled(&in_blocks, 128));
        let (of_rows, of_blocks) = (in_rows.scales(), in_blocks.scales());
        assert_eq!(of_blocks, [of_blocks[0]; 4]);
        for of_row in of_rows {
            assert!((0.95..1.01).contains(&(of_row / of_blocks[0])), "{of_row} and {}", of_blocks[0]);
        }
    }

    #[test]
    fn blocks_of_a_matrix_are_halved_and_stay_with_their_rows() {
        let bytes = SharedBytes::filled(300 * 200, |_| {}).expect("memory");
        let scales: Vec<f32> = (1..=6).map(|nth| nth as f32).collect();
        let matrix =
            Matrix::scaled_by_blocks(bytes, 300, 200, scales.into()).expect("a byte for each number");
        // Rows 128 to 299, followed by zeroes, and all columns.
        let rows = (128..300).map(Some).chain([None; 84]).collect();
        let columns: Vec<Option<usize>> = (0..200).map(Some).collect();
        let host = host();
        let scales =
            PackedRows::new(&host, vec![SourceRows::Stored(matrix); 2], Fp8Scales::OfBlocks, rows, &columns)
                .scales();
        let of_one = [3.0, 4.0, 3.0, 4.0, 5.0, 6.0, 0.0, 0.0];
        assert_eq!(scales, [of_one, of_one].concat());
        assert_eq!(Fp8Scales::OfBlocks.count(512, 200), scales.len());
    }

    #[test]
    fn what_is_no_number_is_noticed() {
        for byte in [0x7F, 0xFF] {
            let bytes = SharedBytes::filled(128, |bytes| bytes[70] = byte).expect("memory");
            let matrix = Matrix::scaled(bytes, 64, vec![1.0; 2].into()).expect("a byte for each number");
            let (host, columns): (_, Vec<Option<usize>>) = (host(), (0..64).map(Some).collect());
            for (rows, nth) in [(vec![Some(0)], None), (vec![Some(1)], Some(0))] {
                let packed = PackedRows::new(
                    &host,
                    vec![SourceRows::Stored(matrix.clone())],
                    Fp8Scales::OfRows,
                    rows,
                    &columns,
                );
                packed.fill(0, &mut [Bf16(0); 32]);
                assert_eq!(packed.nth_with_nan(), nth);
            }
        }
    }
}
