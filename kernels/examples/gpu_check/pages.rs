//! Sequences in scattered pages of KV.

use baton_kernels::cuda::ops::BLOCK_TOKENS;
use device::cuda::Bf16;

use super::draw::Draw;

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
}
