//! Sequences in scattered pages of KV.

use baton_kernels::cpu::number::{f8_to_f32, f32_to_f8};
use baton_kernels::cuda::KvNumber;
use baton_kernels::cuda::ops::BLOCK_TOKENS;
use device::cuda::Bf16;

use super::draw::{Draw, wide};

/// Pages of several sequences, and the tables that name them. Positions without a token are NaN.
pub(crate) struct ScatteredPages {
    pub(crate) n_blocks: usize,
    /// The length of a sequence's table.
    pub(crate) table_stride: usize,
    pub(crate) tables: Vec<u32>,
    pub(crate) pages: Vec<Bf16>,
}

impl ScatteredPages {
    /// Draws sequences of these lengths. A page has `n_parts` parts, each with `width` numbers for each of its tokens.
    pub(crate) fn draw(draw: &mut Draw, lengths: &[usize], n_parts: usize, width: usize) -> Self {
        let blocks = |length: usize| length.div_ceil(BLOCK_TOKENS);
        let table_stride = blocks(lengths.iter().copied().max().unwrap_or(0)) + 1;
        let n_blocks = lengths.iter().copied().map(blocks).sum::<usize>() + 3;
        let page_numbers = n_parts * BLOCK_TOKENS * width;
        let mut free = draw.order(n_blocks);
        let mut tables = vec![u32::MAX; lengths.len() * table_stride];
        let mut pages = vec![Bf16(u16::MAX); n_blocks * page_numbers];
        for (row, length) in lengths.iter().enumerate() {
            for block in 0..blocks(*length) {
                let at = free.pop().expect("there are enough blocks");
                tables[row * table_stride + block] = at;
                let n_tokens = (length - block * BLOCK_TOKENS).min(BLOCK_TOKENS);
                let page = &mut pages[at as usize * page_numbers..][..page_numbers];
                for part in page.chunks_mut(BLOCK_TOKENS * width) {
                    part[..n_tokens * width].fill_with(|| Bf16::from(draw.number()));
                }
            }
        }
        Self { n_blocks, table_stride, tables, pages }
    }

    /// Rounds the numbers to those of a format.
    pub(crate) fn rounded_to(mut self, number: KvNumber) -> Self {
        if number == KvNumber::Fp8 {
            for number in &mut self.pages {
                *number = Bf16::from(f8_to_f32(f32_to_f8(f32::from(*number))));
            }
        }
        self
    }
}

/// Returns pages in the format of GPU memory.
pub(crate) fn halves(pages: &[Bf16], number: KvNumber) -> Vec<Bf16> {
    match number {
        KvNumber::Bf16 => pages.to_vec(),
        KvNumber::Fp8 => in_8_bits(pages),
    }
}

/// Returns the numbers in 8 bits, two in each 16-bit number.
fn in_8_bits(numbers: &[Bf16]) -> Vec<Bf16> {
    let pair =
        |pair: &[Bf16]| u16::from_le_bytes([pair[0], pair[1]].map(|number| f32_to_f8(f32::from(number))));
    numbers.chunks_exact(2).map(|numbers| Bf16(pair(numbers))).collect()
}

/// Returns the numbers of pages in either format.
pub(crate) fn numbers_of(halves: &[Bf16], number: KvNumber) -> Vec<f64> {
    match number {
        KvNumber::Bf16 => wide(halves),
        KvNumber::Fp8 => halves
            .iter()
            .flat_map(|half| half.0.to_le_bytes())
            .map(|byte| f64::from(f8_to_f32(byte)))
            .collect(),
    }
}
