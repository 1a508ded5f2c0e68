//! Attention of many new tokens on Hopper: the GPU first makes keys and values of each head from the latents.

use super::latent::latent_pages;
use super::prefill::PrefillShape;
use super::widened::NarrowPages;
use super::{
    BLOCK_TOKENS, Bf16, ComputeCard, CudaError, GRID_SIDE_MAX, KvNumber, KvPages, LATENT_Q_HEAD, LATENT_RANK,
    LATENT_UNROTATED, LATENT_VALUE, LATENT_WIDTH, PrefillSequence, View, ViewMut, WidenedPages, ensure,
    launch, number, rows_of,
};
use crate::cuda::tensor_map::{Matrix, TensorMap};
use device::cuda::card::Grid;

/// The kernels, with the threads and tiles of `expand_latents.cu` and `prefill_attention_hopper.cu`.
const EXPAND: &str = "expand_latents";
const EXPAND_THREADS: u32 = 256;
const EXPAND_TOKENS: usize = 128;
/// Two tiles of latents and two of a matrix, 64 numbers of each of 128 rows.
const EXPAND_SHARED_BYTES: u32 = 4 * 128 * 64 * 2;
const ATTEND: &str = "prefill_attention_expanded";
const ATTEND_THREADS: u32 = 384;
const ATTEND_TILE: usize = 128;
/// Three tiles of queries and keys, two of values, and padding to align them.
const ATTEND_SHARED_BYTES: u32 =
    (3 * ATTEND_TILE * LATENT_Q_HEAD + 2 * ATTEND_TILE * LATENT_VALUE) as u32 * 2 + 1024;

/// From this number of new tokens in a sequence on, the attention is faster if keys and values are made of latents.
/// Making them for one token costs as much time as this many queries save.
const QUERIES_MIN: usize = 192;

/// The arguments of [`ComputeCard::attend_expanded`], for one layer.
#[derive(Debug)]
pub struct ExpandedAttention<'a> {
    /// The output: `n_heads` times [`LATENT_VALUE`] numbers for each row of q.
    pub out: ViewMut<'a, Bf16>,
    /// The queries, rotated: rows of `n_heads` times [`LATENT_Q_HEAD`] numbers, `q_stride` apart.
    pub q: View<'a, Bf16>,
    pub q_stride: usize,
    pub n_heads: usize,
    /// The pages of latents.
    pub pages: View<'a, Bf16>,
    pub number: KvNumber,
    /// Memory for pages in FP8, which are widened first.
    pub widened: Option<&'a mut WidenedPages>,
    pub n_blocks: usize,
    /// A row of block numbers for each sequence. All rows have the same length.
    pub tables: View<'a, u32>,
    pub sequences: &'a [PrefillSequence],
    pub on_card: View<'a, [u32; 3]>,
    /// For each head the transposed matrix of its keys, and the matrix of its values.
    pub keys: View<'a, Bf16>,
    pub values: View<'a, Bf16>,
    /// Memory for keys and values: heads that have room are computed at the same time.
    pub room: ViewMut<'a, Bf16>,
    pub scale: f32,
}

/// The fields of ExpandShape in expand_latents.cu.
#[derive(Clone, Copy)]
#[repr(C)]
struct ExpandShape {
    n_heads: u32,
    first_head: u32,
    table_stride: u32,
    n_blocks: u32,
}

/// Heads that are computed at the same time.
#[derive(Clone, Copy)]
struct SomeHeads {
    first: usize,
    n: usize,
}

impl ExpandedAttention<'_> {
    /// Returns the numbers of one head's keys and values of a sequence of this length.
    pub fn numbers_of_head(length: usize) -> usize {
        length.div_ceil(BLOCK_TOKENS) * 2 * BLOCK_TOKENS * LATENT_VALUE
    }

    /// Returns whether there is room for at least one head, and this attention is faster than that over latents.
    pub fn is_faster(sequences: &[PrefillSequence], room: usize) -> bool {
        let sum = |of: fn(&PrefillSequence) -> usize| sequences.iter().map(of).sum::<usize>();
        let numbers = sum(|sequence| Self::numbers_of_head(sequence.length));
        let is_worth = sum(|sequence| sequence.n_queries * sequence.length)
            >= QUERIES_MIN * sum(|sequence| sequence.length);
        (1..=room).contains(&numbers) && is_worth
    }

    /// Widens pages in FP8. The attention then reads those in bf16.
    fn widen(&mut self, card: &ComputeCard) -> Result<(), CudaError> {
        let (KvNumber::Fp8, Some(widened)) = (self.number, self.widened.take()) else { return Ok(()) };
        let narrow = NarrowPages {
            pages: self.pages,
            kv: latent_pages(self.n_blocks, self.number),
            tables: self.tables,
            on_card: self.on_card,
            window: usize::MAX,
        };
        card.widen_pages(widened, narrow)?;
        let widened: &WidenedPages = widened;
        let (pages, kv) = widened.pages();
        (self.pages, self.n_blocks, self.number) = (pages, kv.n_blocks, kv.number);
        self.tables = widened.tables(self.tables.len());
        Ok(())
    }

    fn check(&self, kernel: &'static str) -> Result<(), CudaError> {
        let n_rows = rows_of(kernel, self.out.len(), self.n_heads * LATENT_VALUE)?;
        let width = self.n_heads * LATENT_Q_HEAD;
        let is_wide = self.q_stride >= width && self.q_stride.is_multiple_of(8);
        ensure(kernel, is_wide, "rows of q that overlap, or are not aligned to 16 bytes")?;
        let needed = n_rows.saturating_sub(1) * self.q_stride + width;
        ensure(kernel, n_rows > 0 && self.q.len() >= needed, "fewer rows of q than of the output")?;
        let is_whole = self.pages.len() == latent_pages(self.n_blocks, self.number).halves();
        ensure(kernel, is_whole, "pages of the wrong total size")?;
        let is_readable = self.number == KvNumber::Bf16 || self.widened.is_some();
        ensure(kernel, is_readable, "pages in FP8 without memory to widen them")?;
        let are_whole = self.keys.len() == self.n_heads * LATENT_RANK * LATENT_UNROTATED
            && self.values.len() == self.n_heads * LATENT_RANK * LATENT_VALUE;
        ensure(kernel, are_whole, "matrices of another size than those of all heads")?;
        let are_alike = self.on_card.len() == self.sequences.len() && !self.sequences.is_empty();
        ensure(kernel, are_alike, "other sequences on the GPU")?;
        let table_stride = rows_of(kernel, self.tables.len(), self.sequences.len())?;
        PrefillSequence::check_all(self.sequences, kernel, n_rows, table_stride)?;
        let most = (2 * self.n_heads).max(self.sequences.len());
        ensure(kernel, most <= GRID_SIDE_MAX, "too many heads or sequences")
    }
}

impl ComputeCard {
    /// Returns whether this GPU has the kernels of [`ComputeCard::attend_expanded`].
    pub fn expands_latents(&self) -> bool {
        self.has(ATTEND)
    }

    /// Computes attention of many new tokens of each sequence. A token sees the earlier tokens, and itself.
    pub fn attend_expanded(&self, mut attention: ExpandedAttention<'_>) -> Result<(), CudaError> {
        attention.check(ATTEND)?;
        let ExpandedAttention { out, q, pages, tables, on_card, keys, values, room, .. } = &attention;
        self.check_places(ATTEND, &[out, q, pages, keys, values, room], &[tables, on_card])?;
        attention.widen(self)?;
        let of_head: usize = attention
            .sequences
            .iter()
            .map(|sequence| ExpandedAttention::numbers_of_head(sequence.length))
            .sum();
        let n_at_once = (attention.room.len() / of_head).min(attention.n_heads);
        ensure(ATTEND, n_at_once > 0, "too little room for the keys and values of one head")?;
        for first in (0..attention.n_heads).step_by(n_at_once) {
            let heads = SomeHeads { first, n: n_at_once.min(attention.n_heads - first) };
            self.expand_latents(&mut attention, heads)?;
            let n_pages = of_head / (2 * BLOCK_TOKENS * LATENT_VALUE);
            self.attend_expanded_heads(&attention, heads, n_pages)?;
        }
        Ok(())
    }

    fn expand_latents(
        &self,
        attention: &mut ExpandedAttention<'_>,
        heads: SomeHeads,
    ) -> Result<(), CudaError> {
        let ExpandedAttention { pages, tables, sequences, on_card, keys, values, n_blocks, .. } = attention;
        let shape = ExpandShape {
            n_heads: number(EXPAND, heads.n)?,
            first_head: number(EXPAND, heads.first)?,
            table_stride: number(EXPAND, tables.len() / sequences.len())?,
            n_blocks: number(EXPAND, *n_blocks)?,
        };
        let length_max = sequences.iter().map(|sequence| sequence.length).max().unwrap_or(0);
        let blocks = (length_max.div_ceil(EXPAND_TOKENS), 2 * heads.n, sequences.len());
        launch!(
            self,
            EXPAND,
            Grid::of(blocks, EXPAND_THREADS, EXPAND_SHARED_BYTES),
            &attention.room.address(),
            &pages.address(),
            &tables.address(),
            &on_card.address(),
            &keys.address(),
            &values.address(),
            &shape
        )
    }

    fn attend_expanded_heads(
        &self,
        attention: &ExpandedAttention<'_>,
        heads: SomeHeads,
        n_pages: usize,
    ) -> Result<(), CudaError> {
        let ExpandedAttention { out, q, q_stride, n_heads, pages, n_blocks, tables, sequences, .. } =
            attention;
        let n_queries = sequences.iter().map(|sequence| sequence.n_queries).max().unwrap_or(0);
        let n_pieces = heads.n * n_queries.div_ceil(ATTEND_TILE) * sequences.len();
        let shape = PrefillShape {
            n_q_heads: number(ATTEND, heads.n)?,
            n_kv_heads: number(ATTEND, heads.n)?,
            q_stride: number(ATTEND, *q_stride)?,
            table_stride: number(ATTEND, tables.len() / sequences.len())?,
            n_blocks: number(ATTEND, *n_blocks)?,
            window: u32::MAX,
            scale: attention.scale,
            n_sequences: number(ATTEND, sequences.len())?,
            n_pieces: number(ATTEND, n_pieces)?,
            n_out_heads: number(ATTEND, *n_heads)?,
            n_pages: number(ATTEND, n_pages)?,
        };
        let at = |address: u64, numbers: usize| address + (numbers * size_of::<Bf16>()) as u64;
        let of_q = TensorMap::of(
            Matrix {
                address: at(q.address(), heads.first * LATENT_Q_HEAD),
                n_rows: out.len() / (n_heads * LATENT_VALUE),
                n_columns: heads.n * LATENT_Q_HEAD,
                stride: *q_stride,
            },
            ATTEND_TILE,
        )?;
        let number = KvNumber::Bf16;
        let kv = KvPages { n_kv_heads: heads.n, head_dim: LATENT_VALUE, n_blocks: n_pages, number };
        let of_pages = kv.map(attention.room.view())?;
        let of_latents = TensorMap::of(
            Matrix {
                address: pages.address(),
                n_rows: n_blocks * BLOCK_TOKENS,
                n_columns: LATENT_WIDTH,
                stride: LATENT_WIDTH,
            },
            BLOCK_TOKENS,
        )?;
        let n_blocks = (self.n_multiprocessors() as usize).min(n_pieces);
        launch!(
            self,
            ATTEND,
            Grid::of((n_blocks, 1, 1), ATTEND_THREADS, ATTEND_SHARED_BYTES),
            &at(out.address(), heads.first * LATENT_VALUE),
            &of_q,
            &of_pages,
            &of_latents,
            &tables.address(),
            &attention.on_card.address(),
            &self.tickets(),
            &shape
        )
    }
}

/// Returns the dynamic shared memory of a kernel in this file.
pub(in crate::cuda) fn shared_bytes_of(kernel: &str) -> Option<u32> {
    match kernel {
        EXPAND => Some(EXPAND_SHARED_BYTES),
        ATTEND => Some(ATTEND_SHARED_BYTES),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_made_of_latents_for_many_queries_if_a_head_has_room() {
        let page = ExpandedAttention::numbers_of_head(1);
        for (sequences, room, expected) in [
            (&[][..], usize::MAX, false),
            (&[(192, 192)][..], 12 * page, true),
            (&[(192, 193)][..], 12 * page, false),
            (&[(192, 193)][..], 13 * page, true),
            (&[(191, 4000)][..], usize::MAX, false),
            (&[(100, 1000), (284, 1000)][..], usize::MAX, true),
            (&[(100, 1001), (284, 1000)][..], usize::MAX, false),
        ] {
            let of = |(n_queries, length): &(usize, usize)| PrefillSequence {
                first_row: 0,
                n_queries: *n_queries,
                length: *length,
            };
            let of_case: Vec<PrefillSequence> = sequences.iter().map(of).collect();
            assert_eq!(ExpandedAttention::is_faster(&of_case, room), expected, "{sequences:?}, {room}");
        }
    }
}
