//! Attention of many new tokens for each of some sequences.

use super::widened::NarrowPages;
use super::{
    BLOCK_TOKENS, Bf16, ComputeCard, CudaError, GRID_SIDE_MAX, KvNumber, KvPages, View, ViewMut,
    WidenedPages, ensure, launch, number,
};
use crate::cuda::tensor_map::{Matrix, TensorMap};
use device::cuda::Buffer;
use device::cuda::card::Grid;

/// The numbers of threads, queries and tokens of a tile, as in `prefill_attention.cu`.
const THREADS: u32 = 128;
const TILE_QUERIES: usize = 128;
const TILE_TOKENS: usize = 64;

/// The kernel for Hopper and heads of 128 dims: its name, threads, rows of a box of queries, and tiles of 128
/// by 128 in shared memory (two of q, of K and of V), as in `prefill_attention_hopper.cu`.
const HOPPER: &str = "prefill_attention_hopper";
const HOPPER_THREADS: u32 = 384;
const HOPPER_HEAD: usize = 128;
const HOPPER_TILES: usize = 6;

/// One sequence of a step: its rows of q, and its length with them.
#[derive(Clone, Copy, Debug)]
pub struct PrefillSequence {
    pub first_row: usize,
    pub n_queries: usize,
    /// The number of tokens of the sequence. The queries are the last ones.
    pub length: usize,
}

impl PrefillSequence {
    /// Checks that sequences have queries, and lie within the rows and their tables.
    pub(super) fn check_all(
        sequences: &[Self],
        kernel: &'static str,
        n_rows: usize,
        table_stride: usize,
    ) -> Result<(), CudaError> {
        let fits = |sequence: &Self| {
            let Self { first_row, n_queries, length } = *sequence;
            (1..=length).contains(&n_queries)
                && first_row + n_queries <= n_rows
                && length.div_ceil(BLOCK_TOKENS) <= table_stride
        };
        ensure(kernel, sequences.iter().all(fits), "a sequence outside of the rows or of its table")
    }
}

/// The arguments of [`ComputeCard::prefill_attention`], for one layer.
#[derive(Debug)]
pub struct PrefillAttention<'a> {
    /// The output: rows of `n_q_heads * head_dim` numbers, one for each row of q.
    pub out: ViewMut<'a, Bf16>,
    /// The queries: rows of at least `n_q_heads * head_dim` numbers, `q_stride` apart.
    pub q: View<'a, Bf16>,
    pub q_stride: usize,
    pub n_q_heads: usize,
    pub pages: View<'a, Bf16>,
    pub kv: KvPages,
    /// A row of block numbers for each sequence. All rows have the same length.
    pub tables: View<'a, u32>,
    pub sequences: &'a [PrefillSequence],
    /// The sequences in GPU memory, from [`ComputeCard::prefill_sequences`].
    pub on_card: View<'a, [u32; 3]>,
    /// The number of last tokens that a query sees, with itself.
    pub window: usize,
    pub scale: f32,
    /// Memory that lets Hopper's kernel compute the attention over KV in FP8. Without it, the kernel for all GPUs does.
    pub widened: Option<&'a mut WidenedPages>,
}

/// The fields of PrefillShape in prefill_attention.cu, in the same order. The struct is copied to the GPU as
/// bytes.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct PrefillShape {
    pub(super) n_q_heads: u32,
    pub(super) n_kv_heads: u32,
    pub(super) q_stride: u32,
    pub(super) table_stride: u32,
    pub(super) n_blocks: u32,
    pub(super) window: u32,
    pub(super) scale: f32,
    /// The number of sequences. Only Hopper's kernels use it and what follows. A piece is their unit of work: one tile
    /// with queries of one head and one sequence.
    pub(super) n_sequences: u32,
    pub(super) n_pieces: u32,
    /// The number of heads in a row of the output. One launch may compute fewer.
    pub(super) n_out_heads: u32,
    /// The number of pages that were made of latents.
    pub(super) n_pages: u32,
}

impl PrefillAttention<'_> {
    /// Returns whether pages of this form are widened, if there is memory for it.
    pub fn widens(card: &ComputeCard, number: KvNumber, head_dim: usize) -> bool {
        number == KvNumber::Fp8 && head_dim == HOPPER_HEAD && card.has(HOPPER)
    }

    fn check(&self, kernel: &'static str) -> Result<(), CudaError> {
        let (head_dim, n_kv_heads) = (self.kv.head_dim, self.kv.n_kv_heads);
        ensure(kernel, [64, 128].contains(&head_dim), "heads that are not 64 or 128 wide")?;
        let divides = n_kv_heads > 0 && self.n_q_heads > 0 && self.n_q_heads.is_multiple_of(n_kv_heads);
        ensure(kernel, divides, "a number of query heads that is not a multiple of the KV heads")?;
        ensure(kernel, self.sequences.len() <= GRID_SIDE_MAX, "too many sequences")?;
        let width = self.n_q_heads * head_dim;
        let is_wide = self.q_stride >= width && self.q_stride.is_multiple_of(8);
        ensure(kernel, is_wide, "rows of q that overlap, or are not aligned to 16 bytes")?;
        ensure(kernel, self.pages.len() == self.kv.halves(), "pages of the wrong total size")?;
        ensure(
            kernel,
            self.on_card.len() == self.sequences.len(),
            "not one sequence on the GPU for each sequence",
        )?;
        ensure(kernel, self.window > 0, "an empty window")?;
        self.sequences.iter().try_for_each(|sequence| self.check_sequence(kernel, *sequence, width))
    }

    fn check_sequence(
        &self,
        kernel: &'static str,
        sequence: PrefillSequence,
        width: usize,
    ) -> Result<(), CudaError> {
        let PrefillSequence { first_row, n_queries, length } = sequence;
        ensure(kernel, n_queries <= length, "more queries than tokens")?;
        ensure(kernel, n_queries <= GRID_SIDE_MAX * TILE_QUERIES, "too many queries")?;
        if n_queries == 0 {
            return Ok(());
        }
        let last_row = first_row + n_queries - 1;
        ensure(kernel, self.q.len() >= last_row * self.q_stride + width, "rows of q out of bounds")?;
        ensure(kernel, self.out.len() >= (last_row + 1) * width, "rows of the output out of bounds")?;
        let covers = self.tables.len() / self.sequences.len() >= length.div_ceil(BLOCK_TOKENS);
        ensure(kernel, covers, "tables shorter than the sequences")
    }
}

impl ComputeCard {
    /// Uploads sequences in the form that the kernel reads.
    pub fn prefill_sequences(&self, sequences: &[PrefillSequence]) -> Result<Buffer<[u32; 3]>, CudaError> {
        let kernel = "prefill_attention_128";
        let on_card = sequences.iter().map(|sequence| {
            let PrefillSequence { first_row, n_queries, length } = *sequence;
            Ok([number(kernel, first_row)?, number(kernel, n_queries)?, number(kernel, length)?])
        });
        self.upload(&on_card.collect::<Result<Vec<_>, CudaError>>()?)
    }

    /// Computes `out = softmax(q * K * scale) * V` for the last queries of each sequence; each query sees the
    /// tokens up to itself.
    pub fn prefill_attention(&self, mut attention: PrefillAttention<'_>) -> Result<(), CudaError> {
        let kernel = match (attention.kv.number, attention.kv.head_dim) {
            (KvNumber::Bf16, 64) => "prefill_attention_64",
            (KvNumber::Bf16, _) => "prefill_attention_128",
            (KvNumber::Fp8, 64) => "prefill_attention_fp8_64",
            (KvNumber::Fp8, _) => "prefill_attention_fp8_128",
        };
        attention.check(kernel)?;
        let widened = attention.widened.take();
        let PrefillAttention { out, q, pages, tables, on_card, sequences, kv, .. } = &attention;
        self.check_places(kernel, &[out, q, pages], &[tables, on_card])?;
        let n_queries = sequences.iter().map(|sequence| sequence.n_queries).max().unwrap_or(0);
        if n_queries == 0 {
            return Ok(());
        }
        if let Some(widened) = widened.filter(|_| PrefillAttention::widens(self, kv.number, kv.head_dim)) {
            return self.prefill_widened(attention, widened);
        }
        let shape = PrefillShape {
            n_q_heads: number(kernel, attention.n_q_heads)?,
            n_kv_heads: number(kernel, kv.n_kv_heads)?,
            q_stride: number(kernel, attention.q_stride)?,
            table_stride: number(kernel, tables.len() / sequences.len())?,
            n_blocks: number(kernel, kv.n_blocks)?,
            window: u32::try_from(attention.window).unwrap_or(u32::MAX),
            scale: attention.scale,
            n_sequences: number(kernel, sequences.len())?,
            n_pieces: number(
                kernel,
                attention.n_q_heads * n_queries.div_ceil(TILE_QUERIES) * sequences.len(),
            )?,
            n_out_heads: number(kernel, attention.n_q_heads)?,
            n_pages: 0,
        };
        let blocks = (attention.n_q_heads, n_queries.div_ceil(TILE_QUERIES), sequences.len());
        if kv.number == KvNumber::Bf16 && kv.head_dim == HOPPER_HEAD && self.has(HOPPER) {
            return self.launch_prefill_hopper(&attention, shape);
        }
        let shared_bytes = shared_bytes_of(kernel).unwrap_or(0);
        let config = Grid::of(blocks, THREADS, shared_bytes);
        launch!(
            self,
            kernel,
            config,
            &out.address(),
            &q.address(),
            &pages.address(),
            &tables.address(),
            &on_card.address(),
            &shape
        )
    }

    /// Widens the pages of as many sequences as there is room for, computes their attention, and goes on with the next
    /// ones.
    fn prefill_widened(
        &self,
        mut attention: PrefillAttention<'_>,
        widened: &mut WidenedPages,
    ) -> Result<(), CudaError> {
        let n_sequences = attention.sequences.len();
        let stride = attention.tables.len() / n_sequences;
        let n_at_once = widened.n_sequences(stride);
        ensure("widen_pages", n_at_once > 0, "a longer table than there is room for")?;
        for first in (0..n_sequences).step_by(n_at_once) {
            let these = first..(first + n_at_once).min(n_sequences);
            let tables = attention.tables.slice(these.start * stride..these.end * stride);
            let on_card = attention.on_card.slice(these.clone());
            let PrefillAttention { pages, kv, window, .. } = attention;
            self.widen_pages(widened, NarrowPages { pages, kv, tables, on_card, window })?;
            let (pages, kv) = widened.pages();
            self.prefill_attention(PrefillAttention {
                out: attention.out.reborrow(),
                pages,
                kv,
                tables: widened.tables(tables.len()),
                sequences: &attention.sequences[these],
                on_card,
                widened: None,
                ..attention
            })?;
        }
        Ok(())
    }

    fn launch_prefill_hopper(
        &self,
        attention: &PrefillAttention<'_>,
        shape: PrefillShape,
    ) -> Result<(), CudaError> {
        let PrefillAttention { out, q, q_stride, pages, tables, on_card, kv, .. } = attention;
        let width = attention.n_q_heads * kv.head_dim;
        let n_rows = (q.len() - width) / q_stride + 1;
        let of_q = Matrix { address: q.address(), n_rows, n_columns: width, stride: *q_stride };
        let of_q = TensorMap::of(of_q, TILE_QUERIES)?;
        let of_pages = kv.map(*pages)?;
        let shared_bytes = shared_bytes_of(HOPPER).unwrap_or(0);
        let tickets = self.tickets();
        let n_blocks = self.n_multiprocessors().min(shape.n_pieces) as usize;
        let config = Grid::of((n_blocks, 1, 1), HOPPER_THREADS, shared_bytes);
        launch!(
            self,
            HOPPER,
            config,
            &out.address(),
            &of_q,
            &of_pages,
            &tables.address(),
            &on_card.address(),
            &tickets,
            &shape
        )
    }
}

/// Returns the shared memory of one block of threads: a tile of q, of K and of V. For Hopper's kernel: its
/// tiles, with padding to align them to 1,024 bytes.
pub(in crate::cuda) fn shared_bytes_of(kernel: &str) -> Option<u32> {
    let of_rows = |n_rows: usize, head_dim: usize| (n_rows * head_dim * size_of::<Bf16>()) as u32;
    match kernel {
        "prefill_attention_64" | "prefill_attention_fp8_64" => {
            Some(of_rows(TILE_QUERIES + 2 * TILE_TOKENS, 64))
        }
        "prefill_attention_128" | "prefill_attention_fp8_128" => {
            Some(of_rows(TILE_QUERIES + 2 * TILE_TOKENS, 128))
        }
        HOPPER => Some(of_rows(HOPPER_TILES * 128, HOPPER_HEAD) + 1024),
        _ => None,
    }
}
