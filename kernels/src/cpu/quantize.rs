//! Quantization of weights to 8 bits, which halves the memory traffic of bf16, and rounding of activations to
//! 8 bits, as GPUs round them that multiply in FP8.

use std::io;

use super::bytes::SharedBytes;
use super::matrix::{FP8_BLOCK, Format, Matrix, Q8_BLOCK, scales_offset};
use super::number::{F8_MAX, f32_to_f8, f32s_mut};
use super::processor::Processor;
use super::simd::{Kernel, Simd};

/// The number of activations that share a scale.
pub const ROUND_GROUP: usize = 128;

/// The approximate number of weights in one part of the work.
const PART_NUMBERS: usize = 1 << 18;

impl Processor {
    /// Returns the nearest matrix in [`Format::Q8`]: each block's largest number becomes 127 or -127.
    pub fn quantize(&self, matrix: &Matrix) -> io::Result<Matrix> {
        let (rows, cols) = (matrix.rows(), matrix.cols());
        let len = Format::Q8.bytes(rows, cols).ok_or(io::ErrorKind::OutOfMemory)?;
        let offset = scales_offset(rows * cols).ok_or(io::ErrorKind::OutOfMemory)?;
        let bytes = SharedBytes::filled(len, |bytes| {
            let (values, scales) = bytes.split_at_mut(offset);
            let scales = f32s_mut(scales).expect("the scales are aligned");
            self.quantize_into(matrix, &mut values[..rows * cols], scales);
        })?;
        Ok(Matrix::new(bytes, rows, cols, Format::Q8).expect("the bytes have the size of the matrix"))
    }

    /// Returns the nearest matrix in [`Format::Fp8`]: each row's largest number becomes 448 or -448.
    pub fn quantize_fp8(&self, matrix: &Matrix) -> io::Result<Matrix> {
        let (rows, cols) = (matrix.rows(), matrix.cols());
        let len = rows.checked_mul(cols).ok_or(io::ErrorKind::OutOfMemory)?;
        let mut scales = vec![0.0; rows];
        let bytes = SharedBytes::filled(len, |values| {
            let rows_at_once = (PART_NUMBERS / cols.max(1)).max(1);
            let values = values.chunks_mut(rows_at_once * cols.max(1));
            let mut parts: Vec<(&mut [u8], &mut [f32])> =
                values.zip(scales.chunks_mut(rows_at_once)).collect();
            self.pool().run_on(&mut parts, 1, |nth, part| {
                let (values, scales) = &mut part[0];
                let mut row = vec![0.0; cols];
                for (within, (values, scale)) in values.chunks_mut(cols).zip(scales.iter_mut()).enumerate() {
                    matrix.read_row(nth * rows_at_once + within, &mut row);
                    self.isa().run(QuantizeRowFp8 { row: &row, values, scale });
                }
            });
        })?;
        Ok(Matrix::scaled(bytes, cols, scales.into()).expect("a byte for each number"))
    }

    /// Returns the nearest matrix in [`Format::Fp8Blocks`]: each block's largest number becomes 448 or -448.
    pub fn quantize_fp8_blocks(&self, matrix: &Matrix) -> io::Result<Matrix> {
        let (rows, cols) = (matrix.rows(), matrix.cols());
        let len = rows.checked_mul(cols).ok_or(io::ErrorKind::OutOfMemory)?;
        let n_blocks = cols.div_ceil(FP8_BLOCK);
        let mut scales = vec![0.0; rows.div_ceil(FP8_BLOCK) * n_blocks];
        let bytes = SharedBytes::filled(len, |values| {
            let values = values.chunks_mut(FP8_BLOCK * cols.max(1));
            let mut parts: Vec<(&mut [u8], &mut [f32])> =
                values.zip(scales.chunks_mut(n_blocks.max(1))).collect();
            self.pool().run_on(&mut parts, 1, |nth, part| {
                let (values, scales) = &mut part[0];
                quantize_blocks(matrix, nth * FP8_BLOCK, values, scales);
            });
        })?;
        Ok(Matrix::scaled_by_blocks(bytes, rows, cols, scales.into()).expect("a byte for each number"))
    }

    /// Rounds rows of `cols` activations to FP8 numbers (e4m3), times a scale for each [`ROUND_GROUP`] of a row:
    /// the smallest power of two that makes the group's largest number 448 at most.
    pub fn round_rows(&self, x: &mut [f32], cols: usize) {
        self.by_rows(x, cols, |_, rows| {
            rows.chunks_mut(cols).for_each(|row| self.isa().run(RoundRow { row }));
        });
    }

    fn quantize_into(&self, matrix: &Matrix, values: &mut [u8], scales: &mut [f32]) {
        let cols = matrix.cols().max(1);
        let rows_at_once = (PART_NUMBERS / cols).max(1);
        let values = values.chunks_mut(rows_at_once * cols);
        let scales = scales.chunks_mut(rows_at_once * cols.div_ceil(Q8_BLOCK));
        let mut parts: Vec<(&mut [u8], &mut [f32])> = values.zip(scales).collect();
        self.pool().run_on(&mut parts, 1, |nth, part| {
            let (values, scales) = &mut part[0];
            self.quantize_rows(matrix, nth * rows_at_once, values, scales);
        });
    }

    fn quantize_rows(&self, matrix: &Matrix, first: usize, values: &mut [u8], scales: &mut [f32]) {
        let mut row = vec![0.0; matrix.cols()];
        let scales = scales.chunks_mut(row.len().div_ceil(Q8_BLOCK));
        for (nth, (values, scales)) in values.chunks_mut(row.len()).zip(scales).enumerate() {
            matrix.read_row(first + nth, &mut row);
            self.isa().run(QuantizeRow { row: &row, values, scales });
        }
    }
}

/// Quantizes the rows of one row of blocks.
fn quantize_blocks(matrix: &Matrix, first: usize, values: &mut [u8], scales: &mut [f32]) {
    let cols = matrix.cols();
    let mut wide = vec![0.0; values.len()];
    for (row, wide) in wide.chunks_mut(cols).enumerate() {
        matrix.read_row(first + row, wide);
        for (block, scale) in wide.chunks(FP8_BLOCK).zip(&mut *scales) {
            *scale = block.iter().fold(*scale, |greatest, number| greatest.max(number.abs() / F8_MAX));
        }
    }
    for (wide, values) in wide.chunks(cols).zip(values.chunks_mut(cols)) {
        let blocks = wide.chunks(FP8_BLOCK).zip(values.chunks_mut(FP8_BLOCK));
        for ((block, values), scale) in blocks.zip(&*scales) {
            let per_number = (1.0 / scale).min(f32::MAX);
            for (number, value) in block.iter().zip(values) {
                *value = f32_to_f8(number * per_number);
            }
        }
    }
}

struct QuantizeRow<'a> {
    row: &'a [f32],
    values: &'a mut [u8],
    scales: &'a mut [f32],
}

impl Kernel for QuantizeRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _simd: S) {
        let blocks = self.row.chunks(Q8_BLOCK).zip(self.values.chunks_mut(Q8_BLOCK));
        for ((block, values), scale) in blocks.zip(self.scales) {
            let mut greatest = 0f32;
            for number in block {
                greatest = greatest.max(number.abs());
            }
            *scale = greatest / 127.0;
            let per_number = if greatest > 0.0 { 127.0 / greatest } else { 0.0 };
            for (number, value) in block.iter().zip(values) {
                *value = ((number * per_number).round_ties_even() as i8).cast_unsigned();
            }
        }
    }
}

struct QuantizeRowFp8<'a> {
    row: &'a [f32],
    values: &'a mut [u8],
    scale: &'a mut f32,
}

impl Kernel for QuantizeRowFp8<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _simd: S) {
        let mut greatest = 0f32;
        for number in self.row {
            greatest = greatest.max(number.abs());
        }
        *self.scale = greatest / F8_MAX;
        // The factor is bounded, so that it stays finite and zeroes stay zeroes.
        let per_number = (F8_MAX / greatest).min(f32::MAX);
        for (number, value) in self.row.iter().zip(self.values) {
            *value = f32_to_f8(number * per_number);
        }
    }
}

struct RoundRow<'a> {
    row: &'a mut [f32],
}

impl Kernel for RoundRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _simd: S) {
        for group in self.row.chunks_mut(ROUND_GROUP) {
            let mut greatest = 0f32;
            for number in group.iter() {
                greatest = greatest.max(number.abs());
            }
            let exponent = scale_exponent(greatest);
            let (scale, inverse) = (f32::from_bits(exponent << 23), f32::from_bits((254 - exponent) << 23));
            for number in group {
                *number = rounded_to_f8(*number * inverse) * scale;
            }
        }
    }
}

/// Returns the exponent, as f32 stores it, of a group's scale. It is bounded, so that the scale and its inverse
/// are normal numbers. 448 is 1.75 times 2^8.
#[inline(always)]
fn scale_exponent(greatest: f32) -> u32 {
    let bits = greatest.to_bits();
    let exponent = (bits >> 23) + u32::from(bits & 0x7F_FFFF > 0x60_0000);
    (exponent.max(32) - 8).min(246)
}

/// Rounds a number of at most 448 to the nearest FP8 number (e4m3), ties to even, and keeps it in f32.
///
/// FP8 numbers from 2^-6 on have four significant bits; below, they are 2^-9 apart. Adding and subtracting a
/// number whose last bit has that distance rounds.
#[inline(always)]
fn rounded_to_f8(number: f32) -> f32 {
    let exponent = ((number.to_bits() >> 23) & 0xFF).max(127 - 6);
    let last = 1.5 * f32::from_bits((exponent + 20) << 23);
    (number + last) - last
}

#[cfg(test)]
mod tests {
    use std::num::NonZero;

    use super::*;
    use crate::cpu::Arithmetic;
    use crate::cpu::number::f8_to_f32;

    #[test]
    fn quantized_numbers_are_near() {
        let values: Vec<f32> = (0..300 * 1070).map(|i| ((i * 37 % 101) as f32 - 50.0) / 25.0).collect();
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let bytes = SharedBytes::filled(bytes.len(), |to| to.copy_from_slice(&bytes)).unwrap();
        let exact = Matrix::new(bytes, 300, 1070, Format::F32).unwrap();
        let near =
            Processor::new(Arithmetic::F32, NonZero::new(2).unwrap()).unwrap().quantize(&exact).unwrap();
        let (mut row, mut row_q8) = (vec![0.0; 1070], vec![0.0; 1070]);
        for nth in 0..300 {
            exact.read_row(nth, &mut row);
            near.read_row(nth, &mut row_q8);
            assert!(row.iter().zip(&row_q8).all(|(a, b)| (a - b).abs() <= 2.0 / 127.0 * 0.51));
        }
    }

    /// These FP8 numbers have 3 mantissa bits. The error of a number is at most half a unit of the last mantissa bit, or
    /// half of the smallest subnormal.
    #[test]
    fn rows_in_fp8_are_near() {
        let values: Vec<f32> = (0..300 * 1070).map(|i| ((i * 37 % 101) as f32 - 50.0) / 25.0).collect();
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let bytes = SharedBytes::filled(bytes.len(), |to| to.copy_from_slice(&bytes)).unwrap();
        let exact = Matrix::new(bytes, 300, 1070, Format::F32).unwrap();
        let near =
            Processor::new(Arithmetic::F32, NonZero::new(2).unwrap()).unwrap().quantize_fp8(&exact).unwrap();
        assert_eq!((near.rows(), near.cols(), near.scales().len()), (300, 1070, 300));
        let (mut row, mut row_fp8) = (vec![0.0; 1070], vec![0.0; 1070]);
        for nth in 0..300 {
            exact.read_row(nth, &mut row);
            near.read_row(nth, &mut row_fp8);
            let bound = |number: f32| (number.abs() / 16.0).max(near.scales()[nth] / 1024.0) * 1.001;
            assert!(row.iter().zip(&row_fp8).all(|(a, b)| (a - b).abs() <= bound(*a)));
        }
    }

    #[test]
    fn blocks_in_fp8_are_near() {
        // The numbers of each block have another size.
        let (rows, cols) = (300, 1070);
        let size = |at: usize| 2f32.powi((at / cols / 128 + at % cols / 128) as i32);
        let values: Vec<f32> =
            (0..rows * cols).map(|at| ((at * 37 % 101) as f32 - 50.0) / 25.0 * size(at)).collect();
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let bytes = SharedBytes::filled(bytes.len(), |to| to.copy_from_slice(&bytes)).unwrap();
        let exact = Matrix::new(bytes, rows, cols, Format::F32).unwrap();
        let cpu = Processor::new(Arithmetic::F32, NonZero::new(2).unwrap()).unwrap();
        let near = cpu.quantize_fp8_blocks(&exact).unwrap();
        assert_eq!((near.rows(), near.cols(), near.scales().len()), (rows, cols, 3 * 9));
        let mut row = vec![0.0; cols];
        for (nth, values) in values.chunks(cols).enumerate() {
            near.read_row(nth, &mut row);
            for (column, (a, b)) in values.iter().zip(&row).enumerate() {
                let scale = near.scales()[nth / 128 * 9 + column / 128];
                let bound = (a.abs() / 16.0).max(scale / 1024.0) * 1.001;
                assert!((a - b).abs() <= bound, "{nth} {column}: {a} became {b}");
            }
        }
    }

    #[test]
    fn zeroes_stay_zeroes() {
        let zeroes = Matrix::new(SharedBytes::filled(40 * 4, |_| {}).unwrap(), 1, 40, Format::F32).unwrap();
        let near =
            Processor::new(Arithmetic::F32, NonZero::new(1).unwrap()).unwrap().quantize(&zeroes).unwrap();
        let mut row = vec![9.0; 40];
        near.read_row(0, &mut row);
        assert_eq!(row, [0.0; 40]);
        let near =
            Processor::new(Arithmetic::F32, NonZero::new(1).unwrap()).unwrap().quantize_fp8(&zeroes).unwrap();
        near.read_row(0, &mut row);
        assert_eq!(row, [0.0; 40]);
        let near = Processor::new(Arithmetic::F32, NonZero::new(1).unwrap()).unwrap();
        near.quantize_fp8_blocks(&zeroes).unwrap().read_row(0, &mut row);
        assert_eq!(row, [0.0; 40]);
    }

    #[test]
    fn activations_are_rounded_to_numbers_of_8_bits() {
        let numbers = (0..=0x43E0_0000_u32).step_by(977).map(f32::from_bits);
        for number in numbers.flat_map(|number| [number, -number]) {
            let expected = f8_to_f32(f32_to_f8(number));
            assert_eq!(rounded_to_f8(number).to_bits() << 1, expected.to_bits() << 1, "{number:e}");
        }
        // The number between two FP8 numbers, and its neighbours.
        for (number, expected) in [(17.0, 16.0), (17.001, 18.0), (19.0, 20.0), (-17.0, -16.0), (447.0, 448.0)]
        {
            assert_eq!(rounded_to_f8(number), expected, "{number}");
        }
    }

    #[test]
    fn each_group_of_a_row_has_a_scale_of_its_own() {
        for (greatest, scale) in [(448.0, 1.0), (449.0, 2.0), (224.0, 0.5), (225.0, 1.0), (1.75, 1.0 / 256.0)]
        {
            assert_eq!(f32::from_bits(scale_exponent(greatest) << 23), scale, "{greatest}");
        }
        // The row has two groups. The second one has fewer and smaller numbers.
        let mut x: Vec<f32> = (0..200).map(|nth| nth as f32).collect();
        x[128..].iter_mut().for_each(|number| *number /= 1024.0);
        let cpu = Processor::new(Arithmetic::F32, NonZero::new(2).unwrap()).unwrap();
        let expected: Vec<f32> = x
            .iter()
            .zip(0..)
            .map(|(number, nth)| {
                let scale = if nth < 128 { 0.5 } else { 1.0 / 2048.0 };
                f8_to_f32(f32_to_f8(number / scale)) * scale
            })
            .collect();
        let mut rows = [x.clone(), vec![0.0; 200], x].concat();
        cpu.round_rows(&mut rows, 200);
        assert_eq!(rows, [expected.clone(), vec![0.0; 200], expected].concat());
    }
}
