use std::num::NonZero;

use proptest::prelude::*;

use super::*;
use crate::cpu::number::{f32_to_bf16, f32_to_f16};
use crate::cpu::simd::LANES;
use crate::cpu::{Arithmetic, SharedBytes};

fn cpu(isa: Isa, threads: usize, arithmetic: Arithmetic) -> Processor {
    Processor::with_isa(isa, arithmetic, NonZero::new(threads).unwrap()).unwrap()
}

/// Makes numbers that no format represents exactly.
fn numbers(n: usize, seed: u64) -> Vec<f32> {
    (0..n as u64).map(|i| (((i + seed) * 2_654_435_761 % 1_000_003) as f32 / 500_001.5 - 1.0) * 1.7).collect()
}

fn matrix(rows: usize, cols: usize, format: Format) -> Matrix {
    let values = numbers(rows * cols, 77);
    let bytes: Vec<u8> = match format {
        Format::F32 | Format::Q8 | Format::Fp8 | Format::Fp8Blocks => {
            values.iter().flat_map(|value| value.to_le_bytes()).collect()
        }
        Format::Bf16 => values.iter().flat_map(|value| f32_to_bf16(*value).to_le_bytes()).collect(),
        Format::F16 => values.iter().flat_map(|value| f32_to_f16(*value).to_le_bytes()).collect(),
    };
    let bytes = SharedBytes::filled(bytes.len(), |to| to.copy_from_slice(&bytes)).unwrap();
    let cpu = cpu(Isa::best(), 1, Arithmetic::F32);
    let matrix = |format| Matrix::new(bytes, rows, cols, format).unwrap();
    match format {
        Format::Q8 => cpu.quantize(&matrix(Format::F32)).unwrap(),
        Format::Fp8 => cpu.quantize_fp8(&matrix(Format::F32)).unwrap(),
        Format::Fp8Blocks => in_blocks(&cpu, &matrix(Format::F32)),
        Format::F32 | Format::Bf16 | Format::F16 => matrix(format),
    }
}

/// Returns the matrix in FP8, with another scale for each block.
fn in_blocks(cpu: &Processor, matrix: &Matrix) -> Matrix {
    let near = cpu.quantize_fp8_blocks(matrix).unwrap();
    let bytes = SharedBytes::filled(near.bytes().len(), |to| to.copy_from_slice(near.bytes())).unwrap();
    let scales: Vec<f32> =
        (1_u8..).map(f32::from).zip(near.scales()).map(|(nth, scale)| nth * scale).collect();
    Matrix::scaled_by_blocks(bytes, matrix.rows(), matrix.cols(), scales.into()).unwrap()
}

fn multiplied(cpu: &Processor, x: &[f32], n_rows: usize, matrix: &Matrix, bias: Option<&[f32]>) -> Vec<f32> {
    let mut out = vec![f32::NAN; n_rows * matrix.rows()];
    cpu.multiply(x, n_rows, &mut [Product::whole(matrix, bias, &mut out)]);
    out
}

/// Computes the dot product that `tile` specifies, one number at a time.
fn dot(x: &[f32], w: &[f32]) -> f32 {
    let mut sums = [0f32; LANES];
    for (i, (x, w)) in x.iter().zip(w).enumerate() {
        sums[i % LANES] = x.mul_add(*w, sums[i % LANES]);
    }
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            sums[i] += sums[i + half];
        }
    }
    sums[0]
}

const FORMATS: [Format; 6] =
    [Format::F32, Format::Bf16, Format::F16, Format::Q8, Format::Fp8, Format::Fp8Blocks];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// Every format, instruction set, shape and number of threads gives the specified bits.
    #[test]
    fn products_are_what_is_promised(
        n_rows in 1usize..70, rows in 1usize..200, cols in 1usize..1200,
        format in proptest::sample::select(&FORMATS), threads in 1usize..3,
    ) {
        let (x, weights, bias) = (numbers(n_rows * cols, 5), matrix(rows, cols, format), numbers(rows, 9));
        let mut wide = vec![0.0; cols];
        let mut expected = vec![0.0; n_rows * rows];
        for row in 0..rows {
            weights.read_row(row, &mut wide);
            for nth in 0..n_rows {
                expected[nth * rows + row] = dot(&x[nth * cols..][..cols], &wide) + bias[row];
            }
        }
        for isa in Isa::all() {
            let out = multiplied(&cpu(isa, threads, Arithmetic::F32), &x, n_rows, &weights, Some(&bias));
            prop_assert!(out == expected, "{isa:?} {format:?}");
        }
    }

    /// Columns that are computed alone have the same bits as among all columns.
    #[test]
    fn columns_stand_alone(
        n_rows in 1usize..40, rows in 2usize..200, cols in 1usize..600, cut in 0.0..1.0,
        format in proptest::sample::select(&FORMATS),
        arithmetic in proptest::sample::select(&[Arithmetic::F32, Arithmetic::Bf16]),
    ) {
        let (x, weights, bias) = (numbers(n_rows * cols, 5), matrix(rows, cols, format), numbers(rows, 9));
        let cpu = cpu(Isa::best(), 2, arithmetic);
        let all = multiplied(&cpu, &x, n_rows, &weights, Some(&bias));
        let cut = (rows as f64 * cut) as usize;
        for columns in [0..cut, cut..rows] {
            let mut out = vec![f32::NAN; n_rows * columns.len()];
            let product = Product { matrix: &weights, bias: Some(&bias), columns: columns.clone(), out: &mut out };
            cpu.multiply(&x, n_rows, &mut [product]);
            for nth in 0..n_rows {
                let (some, all) = (&out[nth * columns.len()..][..columns.len()], &all[nth * rows..][..rows]);
                prop_assert!(*some == all[columns.clone()], "{format:?} {arithmetic:?} {columns:?}");
            }
        }
    }

    /// With bf16 products too, a row's result does not depend on its neighbours, and is near the exact
    /// result.
    #[test]
    fn bf16_rows_stand_alone(
        n_rows in 2usize..70, rows in 1usize..120, cols in 1usize..1200,
        format in proptest::sample::select(&[Format::Bf16, Format::Q8]),
    ) {
        let (x, weights) = (numbers(n_rows * cols, 5), matrix(rows, cols, format));
        let fast = cpu(Isa::best(), 2, Arithmetic::Bf16);
        let many = multiplied(&fast, &x, n_rows, &weights, None);
        let exact = multiplied(&cpu(Isa::best(), 2, Arithmetic::F32), &x, n_rows, &weights, None);
        for nth in 0..n_rows {
            let alone = multiplied(&fast, &x[nth * cols..][..cols], 1, &weights, None);
            prop_assert!(many[nth * rows..][..rows] == alone);
        }
        let tolerance = 0.02 * (cols as f32).sqrt();
        prop_assert!(many.iter().zip(&exact).all(|(a, b)| (a - b).abs() <= tolerance));
    }
}

#[test]
fn several_products_share_their_input() {
    let cpu = cpu(Isa::best(), 2, Arithmetic::F32);
    let (x, a, b) = (numbers(3 * 40, 1), matrix(50, 40, Format::Bf16), matrix(7, 40, Format::F32));
    let (mut out_a, mut out_b) = (vec![0.0; 150], vec![0.0; 21]);
    let first = Product::whole(&a, None, &mut out_a);
    cpu.multiply(&x, 3, &mut [first, Product::whole(&b, None, &mut out_b)]);
    assert_eq!(out_a, multiplied(&cpu, &x, 3, &a, None));
    assert_eq!(out_b, multiplied(&cpu, &x, 3, &b, None));
}

#[test]
fn no_rows_are_no_work() {
    let cpu = cpu(Isa::best(), 1, Arithmetic::Bf16);
    assert!(multiplied(&cpu, &[], 0, &matrix(5, 4, Format::Bf16), None).is_empty());
}
