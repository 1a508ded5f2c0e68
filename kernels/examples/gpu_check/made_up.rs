//! Checks generated weights against those that the CPU generates and quantizes, to the last bit.

use std::num::NonZero;

use baton_kernels::cpu::number::{F8_MAX, bf16_to_f32};
use baton_kernels::cpu::random::RandomNumbers;
use baton_kernels::cpu::{Arithmetic, Processor};
use baton_kernels::cuda::{ComputeCard, DummyRows, Fp8Rows, Fp8RowsMut, Fp8Scales};
use device::cuda::{Bf16, CudaError};

use super::check_rows::POISON;
use super::extent::Extent;
use super::fp8::{SCALES, name};
use super::verdict::Verdicts;

/// Rows in FP8 on the host.
#[derive(Debug, PartialEq)]
struct Made {
    bytes: Vec<u8>,
    scales: Vec<f32>,
}

pub(crate) fn check(card: &ComputeCard, verdicts: &mut Verdicts, extent: Extent) -> Result<(), CudaError> {
    let host = Processor::new(Arithmetic::F32, NonZero::<usize>::MIN).expect("a thread");
    // Columns of the matrix, its rows and columns here, and the rows and numbers that there is room for.
    let cases = [
        (64, 0..3, 0..64, 3, 64),
        (200, 5..69, 0..200, 128, 200),
        (1536, 100..612, 0..1536, 512, 1536),
        (4096, 0..256, 2048..4096, 256, 2048),
        (328, 0..64, 164..328, 64, 192),
        (40, 0..1, 24..40, 64, 24),
    ];
    for (cols, rows, columns, n_rows, k) in extent.of(&cases, 2).iter().cloned() {
        let random = RandomNumbers { key: 77 + cols as u64, scale: 1.7 / 32768.0 / (cols as f32).sqrt() };
        let part = DummyRows { cols, rows: rows.clone(), columns: columns.clone() };
        let mut in_bf16 = card.buffer::<Bf16>(n_rows * k)?;
        card.fill(in_bf16.view_mut(), POISON)?;
        card.dummy_rows(in_bf16.view_mut(), k, random, &part)?;
        let is_right = card.download(in_bf16.view())? == in_bf16_on_host(&host, random, &part, [n_rows, k]);
        verdicts.holds(format!("made up bf16: {rows:?} {columns:?} of {cols}"), is_right);
        for scaling in SCALES {
            let expected = on_host(&host, random, &part, scaling, [n_rows, k]);
            let mut numbers = card.upload(&vec![0xA5_u8; expected.bytes.len()])?;
            let mut scales = card.upload(&vec![f32::NAN; expected.scales.len()])?;
            let to = Fp8RowsMut { numbers: numbers.view_mut(), scales: scales.view_mut(), scaling, k };
            card.dummy_fp8(to, random, &part)?;
            let made = Made { bytes: card.download(numbers.view())?, scales: card.download(scales.view())? };
            let format = name(scaling);
            verdicts.holds(format!("made up {format}: {rows:?} {columns:?} of {cols}"), made == expected);
        }
    }
    Ok(())
}

fn in_bf16_on_host(
    host: &Processor,
    random: RandomNumbers,
    part: &DummyRows,
    [n_rows, k]: [usize; 2],
) -> Vec<Bf16> {
    let DummyRows { cols, rows, columns } = part;
    let (mut made, mut narrow) = (vec![Bf16(0); n_rows * k], vec![0; *cols]);
    for (row, to) in rows.clone().zip(made.chunks_mut(k)) {
        host.fill_random(random, row * cols, &mut narrow);
        for (number, column) in to.iter_mut().zip(columns.clone()) {
            *number = Bf16(narrow[column]);
        }
    }
    made
}

/// Generates a part in bf16, and quantizes the whole rows.
fn on_host(
    host: &Processor,
    random: RandomNumbers,
    part: &DummyRows,
    scaling: Fp8Scales,
    [n_rows, k]: [usize; 2],
) -> Made {
    let DummyRows { cols, rows, columns } = part;
    let width = Fp8Rows::width(k);
    let mut made = Made { bytes: vec![0; n_rows * width], scales: vec![0.0; scaling.count(n_rows, k)] };
    let (mut narrow, mut in_fp8) = (vec![0; *cols], vec![0; *cols]);
    for (to, row) in rows.clone().enumerate() {
        host.fill_random(random, row * cols, &mut narrow);
        let wide: Vec<f32> = narrow.iter().map(|number| bf16_to_f32(*number)).collect();
        let scale = host.quantize_row_fp8(&wide, &mut in_fp8);
        for (nth, column) in columns.clone().enumerate() {
            made.bytes[to * width + Fp8Rows::place(nth)] = in_fp8[column];
        }
        if scaling == Fp8Scales::OfRows {
            made.scales[to] = scale;
        }
    }
    if scaling == Fp8Scales::OfBlocks {
        let of_row = k.div_ceil(Fp8Scales::BLOCK_COLUMNS);
        for (nth, scale) in made.scales.iter_mut().enumerate() {
            let is_real = nth / of_row * Fp8Scales::BLOCK_ROWS < rows.len()
                && nth % of_row * Fp8Scales::BLOCK_COLUMNS < columns.len();
            *scale = if is_real { random.scale * 32768.0 / F8_MAX } else { 0.0 };
        }
    }
    made
}
