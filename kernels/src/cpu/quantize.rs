//! Quantization of weights to 8 bits, which halves the memory traffic of bf16, and rounding of activations to
//! 8 bits, as GPUs round them that multiply in FP8.

use std::io;

use super::bytes::SharedBytes;
use super::matrix::{FP8_BLOCK, Format, Matrix, Q8_BLOCK, scales_offset};
use super::number::{F8_MAX, f32_to_f8, f32s_mut};
use super::processor::Processor;
use super::simd::{Kernel, LANES, Simd};

/// The number of activations that share a scale.
pub const ROUND_GROUP: usize = 128;

/// The approximate number of weights in one part of the work.
const PART_NUMBERS: usize = 1 << 16;

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
                    *scale = self.quantize_row_fp8(&row, values);
                }
            });
        })?;
        Ok(Matrix::scaled(bytes, cols, scales.into()).expect("a byte for each number"))
    }

    /// Writes the nearest row in [`Format::Fp8`] on the calling thread. Returns its scale.
    ///
    /// # Panics
    /// If the rows have different lengths.
    pub fn quantize_row_fp8(&self, row: &[f32], values: &mut [u8]) -> f32 {
        assert_eq!(row.len(), values.len());
        self.isa().run(QuantizeRowFp8 { row, values })
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
                let wide = &mut vec![0.0; values.len()];
                for (row, wide) in wide.chunks_mut(cols).enumerate() {
                    matrix.read_row(nth * FP8_BLOCK + row, wide);
                }
                self.isa().run(QuantizeBlocks { wide, cols, values, scales });
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

/// Returns the greatest magnitude; 0 without numbers. NaN is no number.
///
/// Magnitudes have the order of their bits. The greatest of integers, lane by lane, is compiled to vector
/// instructions; that of floats is not, because of NaN.
#[inline(always)]
fn greatest_of(numbers: &[f32]) -> f32 {
    let mut lanes = [0; LANES];
    let (vectors, rest) = numbers.as_chunks::<LANES>();
    for vector in vectors {
        for lane in 0..LANES {
            lanes[lane] = magnitude_bits(vector[lane]).max(lanes[lane]);
        }
    }
    let mut greatest = 0;
    for number in rest {
        greatest = magnitude_bits(*number).max(greatest);
    }
    for lane in lanes {
        greatest = lane.max(greatest);
    }
    f32::from_bits(greatest)
}

/// Returns the bits of a number's magnitude; 0 for NaN.
#[inline(always)]
fn magnitude_bits(number: f32) -> u32 {
    let bits = number.to_bits() & 0x7FFF_FFFF;
    if bits > f32::INFINITY.to_bits() { 0 } else { bits }
}

/// The rows of one row of blocks.
struct QuantizeBlocks<'a> {
    wide: &'a [f32],
    cols: usize,
    values: &'a mut [u8],
    scales: &'a mut [f32],
}

impl Kernel for QuantizeBlocks<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _simd: S) {
        let Self { wide, cols, values, scales } = self;
        for wide in wide.chunks(cols) {
            for (block, scale) in wide.chunks(FP8_BLOCK).zip(&mut *scales) {
                *scale = scale.max(greatest_of(block) / F8_MAX);
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
            let greatest = greatest_of(block);
            *scale = greatest / 127.0;
            let per_number = if greatest > 0.0 { 127.0 / greatest } else { 0.0 };
            for (number, value) in block.iter().zip(values) {
                *value = rounded_to_i8(number * per_number).cast_unsigned();
            }
        }
    }
}

/// Rounds to the nearest integer, ties to even. Larger numbers become -128 or 127, and NaN becomes 0.
#[inline(always)]
fn rounded_to_i8(number: f32) -> i8 {
    // Around 1.5 * 2^23, f32 has no finer steps than 1, so the addition rounds. The last bits are the integer.
    let rounded = number.clamp(-128.0, 127.0) + 12_582_912.0;
    if number.is_nan() { 0 } else { rounded.to_bits() as i8 }
}

/// Writes the FP8 numbers of a row, and returns its scale.
struct QuantizeRowFp8<'a> {
    row: &'a [f32],
    values: &'a mut [u8],
}

impl Kernel for QuantizeRowFp8<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, _simd: S) -> f32 {
        let greatest = greatest_of(self.row);
        // The factor is bounded, so that it stays finite and zeroes stay zeroes.
        let per_number = (F8_MAX / greatest).min(f32::MAX);
        for (number, value) in self.row.iter().zip(self.values) {
            *value = f32_to_f8(number * per_number);
        }
        greatest / F8_MAX
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
    use crate::cpu::number::{bf16_to_f32, f8_to_f32};
    use crate::cpu::{Arithmetic, Isa};

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

    /// Quantizes a row number by number, as kernels did before they were written for vectors.
    fn plain_fp8(row: &[f32]) -> (Vec<u8>, f32) {
        let greatest = row.iter().fold(0f32, |greatest, number| greatest.max(number.abs()));
        let per_number = (F8_MAX / greatest).min(f32::MAX);
        (row.iter().map(|number| f32_to_f8(number * per_number)).collect(), greatest / F8_MAX)
    }

    fn plain_q8(block: &[f32]) -> (Vec<u8>, f32) {
        let greatest = block.iter().fold(0f32, |greatest, number| greatest.max(number.abs()));
        let per_number = if greatest > 0.0 { 127.0 / greatest } else { 0.0 };
        let value = |number: &f32| ((number * per_number).round_ties_even() as i8).cast_unsigned();
        (block.iter().map(value).collect(), greatest / 127.0)
    }

    /// Returns rows with all bf16 numbers, times several factors, in ascending and in mixed order, with and without
    /// numbers that are not finite.
    fn rows_of_all_numbers() -> Vec<Vec<f32>> {
        let mut rows =
            vec![vec![], vec![0.0], vec![f32::NAN; 3], vec![f32::MIN_POSITIVE / 64.0, 0.0, f32::NAN]];
        for factor in [1.0, 448.0 / 447.0, 1.0 / 3.0, 1e-20, 1e20] {
            for odd in [1, 40_503] {
                let number = |nth: u32| bf16_to_f32((nth.wrapping_mul(odd)) as u16) * factor;
                let all: Vec<f32> = (0..65_536).map(number).collect();
                for len in [65_536, 1070, 128, 37] {
                    rows.extend(all.chunks(len).map(<[f32]>::to_vec));
                }
                rows.push(all.into_iter().filter(|number| number.is_finite()).collect());
            }
        }
        rows
    }

    #[test]
    fn vectors_give_the_bits_of_single_numbers() {
        for row in rows_of_all_numbers() {
            let (fp8, scale) = plain_fp8(&row);
            let q8: Vec<(Vec<u8>, f32)> = row.chunks(Q8_BLOCK).map(plain_q8).collect();
            for isa in Isa::all() {
                let cpu = Processor::with_isa(isa, Arithmetic::F32, NonZero::<usize>::MIN).unwrap();
                let mut values = vec![9; row.len()];
                let found = cpu.quantize_row_fp8(&row, &mut values);
                assert_eq!(found.to_bits(), scale.to_bits(), "{isa:?}");
                assert_eq!(values, fp8, "{isa:?}");
                let mut scales = vec![9.0; q8.len()];
                isa.run(QuantizeRow { row: &row, values: &mut values, scales: &mut scales });
                for ((values, scale), (expected, of_block)) in values.chunks(Q8_BLOCK).zip(&scales).zip(&q8) {
                    assert_eq!((values, scale.to_bits()), (&expected[..], of_block.to_bits()), "{isa:?}");
                }
            }
        }
    }

    #[test]
    fn blocks_in_vectors_have_the_bits_of_single_numbers() {
        for wide in rows_of_all_numbers().into_iter().filter(|row| row.len() == 1070) {
            // Two rows of 535 numbers, so five blocks.
            let mut expected_scales = [0f32; 5];
            for (nth, number) in wide.iter().enumerate() {
                let scale = &mut expected_scales[nth % 535 / FP8_BLOCK];
                *scale = scale.max(number.abs() / F8_MAX);
            }
            let value = |(nth, number): (usize, &f32)| {
                f32_to_f8(number * (1.0 / expected_scales[nth % 535 / FP8_BLOCK]).min(f32::MAX))
            };
            let expected: Vec<u8> = wide.iter().enumerate().map(value).collect();
            for isa in Isa::all() {
                let (mut values, mut scales) = (vec![9; wide.len()], [0.0; 5]);
                isa.run(QuantizeBlocks { wide: &wide, cols: 535, values: &mut values, scales: &mut scales });
                assert_eq!(scales.map(f32::to_bits), expected_scales.map(f32::to_bits), "{isa:?}");
                assert_eq!(values, expected, "{isa:?}");
            }
        }
    }
}
