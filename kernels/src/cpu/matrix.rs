//! A weight matrix as a checkpoint stores it: one row of numbers for each output.

use std::io;
use std::sync::Arc;

use super::bytes::SharedBytes;
use super::number::{self, bf16_to_f32, f8_to_f32, f16_to_f32};

/// The number of weights that share one scale in [`Format::Q8`].
pub const Q8_BLOCK: usize = 32;
/// The number of rows and of columns that share one scale in [`Format::Fp8Blocks`].
pub const FP8_BLOCK: usize = 128;

/// The number format of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    F32,
    Bf16,
    F16,
    /// 8-bit integers, and one f32 scale for each 32 of a row: first all numbers, then all scales.
    Q8,
    /// 8-bit floating point (e4m3: 4 bits of exponent, 3 of mantissa). The scales, one for each row, are
    /// stored separately.
    Fp8,
    /// Like [`Fp8`](Self::Fp8), with a scale for each block of 128 rows and 128 columns. The last block of a row or
    /// a column may be smaller.
    Fp8Blocks,
}

/// A matrix of `rows` outputs with `cols` inputs each.
#[derive(Clone, Debug)]
pub struct Matrix {
    bytes: SharedBytes,
    rows: usize,
    cols: usize,
    format: Format,
    /// The scales: one for each row in [`Format::Fp8`]; one for each block, row by row of blocks, in
    /// [`Format::Fp8Blocks`]; otherwise empty.
    scales: Arc<[f32]>,
}

/// The error for bytes that have the wrong length for a matrix.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{rows} x {cols} numbers of {format:?} take {expected} bytes, not {found}")]
pub struct WrongSize {
    pub rows: usize,
    pub cols: usize,
    pub format: Format,
    pub expected: usize,
    pub found: usize,
}

impl Format {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::Q8 => "q8",
            Self::Fp8 | Self::Fp8Blocks => "fp8",
        }
    }

    /// Returns whether numbers are in FP8, with any scales.
    pub fn is_fp8(self) -> bool {
        matches!(self, Self::Fp8 | Self::Fp8Blocks)
    }

    /// Returns the bytes of a matrix, without separate scales; `None` if the size overflows.
    pub fn bytes(self, rows: usize, cols: usize) -> Option<usize> {
        let numbers = rows.checked_mul(cols)?;
        match self {
            Self::F32 => numbers.checked_mul(4),
            Self::Bf16 | Self::F16 => numbers.checked_mul(2),
            Self::Fp8 | Self::Fp8Blocks => Some(numbers),
            Self::Q8 => scales_offset(numbers)?
                .checked_add(rows.checked_mul(cols.div_ceil(Q8_BLOCK))?.checked_mul(4)?),
        }
    }
}

/// Returns the offset of the scales in a [`Format::Q8`] matrix, aligned for f32.
pub(super) fn scales_offset(numbers: usize) -> Option<usize> {
    numbers.checked_next_multiple_of(4)
}

/// Numbers of a matrix in [`Format::Q8`], and a scale for each block of them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Q8Numbers<'a> {
    pub(super) values: &'a [i8],
    pub(super) scales: &'a [f32],
}

impl Matrix {
    /// Takes the bytes without a copy. [`aligned`](Self::aligned) copies them if they are not aligned.
    ///
    /// # Panics
    /// If the format is in FP8: see [`Self::scaled`] and [`Self::scaled_by_blocks`].
    pub fn new(bytes: SharedBytes, rows: usize, cols: usize, format: Format) -> Result<Self, WrongSize> {
        assert!(!format.is_fp8(), "an FP8 matrix has scales");
        Self::of_format(bytes, rows, cols, format, Arc::new([]))
    }

    /// Returns a matrix in [`Format::Fp8`], with one row for each scale.
    pub fn scaled(bytes: SharedBytes, cols: usize, scales: Arc<[f32]>) -> Result<Self, WrongSize> {
        Self::of_format(bytes, scales.len(), cols, Format::Fp8, scales)
    }

    /// Returns a matrix in [`Format::Fp8Blocks`].
    ///
    /// # Panics
    /// If there is not one scale for each block.
    pub fn scaled_by_blocks(
        bytes: SharedBytes,
        rows: usize,
        cols: usize,
        scales: Arc<[f32]>,
    ) -> Result<Self, WrongSize> {
        assert_eq!(
            scales.len(),
            rows.div_ceil(FP8_BLOCK) * cols.div_ceil(FP8_BLOCK),
            "a scale for each block"
        );
        Self::of_format(bytes, rows, cols, Format::Fp8Blocks, scales)
    }

    fn of_format(
        bytes: SharedBytes,
        rows: usize,
        cols: usize,
        format: Format,
        scales: Arc<[f32]>,
    ) -> Result<Self, WrongSize> {
        let expected = format.bytes(rows, cols).unwrap_or(usize::MAX);
        if bytes.len() != expected {
            return Err(WrongSize { rows, cols, format, expected, found: bytes.len() });
        }
        Ok(Self { bytes, rows, cols, format, scales })
    }

    /// Returns the same matrix, copied if its numbers are not aligned.
    pub fn aligned(self) -> io::Result<Self> {
        let edge = match self.format {
            Format::F32 | Format::Q8 => 4,
            Format::Bf16 | Format::F16 => 2,
            Format::Fp8 | Format::Fp8Blocks => 1,
        };
        if self.bytes.as_ptr().addr().is_multiple_of(edge) {
            return Ok(self);
        }
        let bytes = SharedBytes::filled(self.bytes.len(), |copy| copy.copy_from_slice(&self.bytes))?;
        Ok(Self { bytes, ..self })
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn cols(&self) -> usize {
        self.cols
    }

    pub fn format(&self) -> Format {
        self.format
    }

    /// Returns the stored numbers; for [`Format::Q8`] also the scales.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns the scales: one for each row in [`Format::Fp8`]; one for each block in [`Format::Fp8Blocks`];
    /// otherwise none.
    pub fn scales(&self) -> &[f32] {
        &self.scales
    }

    /// Returns the matrix times a power of two, which changes no number but for its exponent. FP8 numbers keep their format
    /// and get other scales; all others are widened to f32.
    pub fn times(&self, power: f32) -> io::Result<Self> {
        if self.format.is_fp8() {
            let scales = self.scales.iter().map(|scale| scale * power).collect();
            return Ok(Self { scales, ..self.clone() });
        }
        self.in_f32(power)
    }

    /// Returns the matrix times a factor, in f32.
    pub fn in_f32(&self, factor: f32) -> io::Result<Self> {
        let (rows, cols) = (self.rows, self.cols);
        let bytes = SharedBytes::filled(rows * cols * size_of::<f32>(), |bytes| {
            let numbers = number::f32s_mut(bytes).expect("the memory is aligned");
            for (nth, row) in numbers.chunks_exact_mut(cols).enumerate() {
                self.read_row(nth, row);
                row.iter_mut().for_each(|number| *number *= factor);
            }
        })?;
        Ok(Self { bytes, rows, cols, format: Format::F32, scales: Arc::new([]) })
    }

    /// Widens one row into `to`.
    ///
    /// # Panics
    /// If the row does not exist, or `to` has another length.
    pub fn read_row(&self, row: usize, to: &mut [f32]) {
        assert_eq!(to.len(), self.cols);
        let numbers = row * self.cols..(row + 1) * self.cols;
        match self.format {
            Format::F32 => to.copy_from_slice(&self.f32s()[numbers]),
            Format::Bf16 => widen(&self.u16s()[numbers], to, bf16_to_f32),
            Format::F16 => widen(&self.u16s()[numbers], to, f16_to_f32),
            Format::Fp8 => {
                let scale = self.scales[row];
                for (number, to) in self.bytes[numbers].iter().zip(to) {
                    *to = f8_to_f32(*number) * scale;
                }
            }
            Format::Fp8Blocks => {
                let n_blocks = self.cols.div_ceil(FP8_BLOCK);
                let scales = &self.scales[row / FP8_BLOCK * n_blocks..];
                for (nth, (number, to)) in self.bytes[numbers].iter().zip(to).enumerate() {
                    *to = f8_to_f32(*number) * scales[nth / FP8_BLOCK];
                }
            }
            Format::Q8 => {
                let Q8Numbers { values, scales } = self.q8();
                let n_blocks = self.cols.div_ceil(Q8_BLOCK);
                let scales = &scales[row * n_blocks..(row + 1) * n_blocks];
                for (nth, (value, to)) in values[numbers].iter().zip(to).enumerate() {
                    *to = f32::from(*value) * scales[nth / Q8_BLOCK];
                }
            }
        }
    }

    pub(super) fn f32s(&self) -> &[f32] {
        number::f32s(&self.bytes).expect("`aligned` was called, and `new` checked the length")
    }

    pub(super) fn u16s(&self) -> &[u16] {
        number::u16s(&self.bytes).expect("`aligned` was called, and `new` checked the length")
    }

    /// Returns the numbers and the scales of a [`Format::Q8`] matrix.
    pub(super) fn q8(&self) -> Q8Numbers<'_> {
        let numbers = self.rows * self.cols;
        let (values, scales) = self.bytes.split_at(numbers.next_multiple_of(4));
        let scales =
            number::f32s(scales).expect("`aligned` was called, and the numbers are padded to 4 bytes");
        let values = &number::i8s(values).expect("bytes are always aligned")[..numbers];
        Q8Numbers { values, scales }
    }
}

fn widen(narrow: &[u16], to: &mut [f32], number: impl Fn(u16) -> f32) {
    for (narrow, to) in narrow.iter().zip(to) {
        *to = number(*narrow);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_file_is_refused() {
        let bytes = SharedBytes::filled(10, |_| {}).unwrap();
        let error = Matrix::new(bytes, 2, 3, Format::Bf16).expect_err("12 bytes are needed");
        assert_eq!(error.to_string(), "2 x 3 numbers of Bf16 take 12 bytes, not 10");
    }

    #[test]
    fn each_block_has_a_scale_of_its_own() {
        let (rows, cols) = (130, 300);
        let bytes = SharedBytes::filled(rows * cols, |bytes| bytes.fill(0x38)).unwrap();
        let scales = [2.0, 3.0, 5.0, 7.0, 11.0, 13.0];
        let matrix = Matrix::scaled_by_blocks(bytes, rows, cols, scales.into()).unwrap();
        let mut row = vec![0.0; cols];
        for nth in 0..rows {
            matrix.read_row(nth, &mut row);
            for (column, number) in row.iter().enumerate() {
                assert_eq!(*number, scales[nth / 128 * 3 + column / 128], "row {nth}, column {column}");
            }
        }
    }

    #[test]
    fn bytes_off_the_edge_are_moved() {
        let bytes =
            SharedBytes::filled(9, |bytes| bytes[1..5].copy_from_slice(&1.5f32.to_le_bytes())).unwrap();
        let matrix = Matrix::new(bytes.slice(1..9), 1, 2, Format::F32).unwrap().aligned().unwrap();
        let mut row = [9.0; 2];
        matrix.read_row(0, &mut row);
        assert_eq!(row, [1.5, 0.0]);
    }
}
