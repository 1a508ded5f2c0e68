//! Attention of one new token for each of many sequences.

use super::{
    BLOCK_TOKENS, Bf16, ComputeCard, CudaError, GRID_SIDE_MAX, KvNumber, KvPages, View, ViewMut, ensure,
    launch, number, rows_of,
};
use device::cuda::card::{Grid, grid};

/// The number of threads of a block, as in `decode_attention.cu`.
const THREADS: u32 = 128;
/// The number of warps of a block. They share its pages.
const WARPS: usize = THREADS as usize / 32;
/// The number of query heads that one pass over a KV head computes.
const HEADS_AT_ONCE: usize = 8;

/// The number of threads of a head's merge, as in `decode_attention.cu`.
const MERGE_THREADS: u32 = 256;
/// The number of tiles of queries of one sequence that are computed together, as in
/// `decode_attention_hopper.cu`.
const TILES_AT_ONCE: usize = 3;
/// The number of pages in a block's shared memory, as in `decode_attention_hopper.cu`.
const PAGES_AT_ONCE: usize = 4 * 3;

/// The number of blocks of threads that a multiprocessor runs at the same time. Registers limit
/// `decode_attention.cu`; shared memory limits the kernel for Hopper.
const BLOCKS_AT_ONCE: usize = 3;
const BLOCKS_AT_ONCE_ON_HOPPER: usize = 2;
/// The maximum number of chunks of a sequence. More chunks take longer to merge than they save.
const CHUNKS_MAX: usize = 64;
/// The costs of starting and of merging a chunk, as the number of tokens that a block of threads computes in
/// that time.
const START_TOKENS: usize = 128;
const MERGE_TOKENS: usize = 4;

/// The arguments of [`ComputeCard::decode_attention`], for one layer.
#[derive(Debug)]
pub struct DecodeAttention<'a> {
    /// The output: a row of `n_q_heads * head_dim` numbers for each sequence.
    pub out: ViewMut<'a, Bf16>,
    /// Scratch buffers of at least [`DecodeAttention::parts_numbers`] and [`DecodeAttention::n_parts`]
    /// numbers.
    pub parts: ViewMut<'a, f32>,
    pub part_sums: ViewMut<'a, [f32; 2]>,
    /// The queries: rows of at least `n_q_heads * head_dim` numbers, `q_stride` apart.
    pub q: View<'a, Bf16>,
    pub q_stride: usize,
    pub n_q_heads: usize,
    pub pages: View<'a, Bf16>,
    pub kv: KvPages,
    /// A row of block numbers for each sequence. All rows have the same length.
    pub tables: View<'a, u32>,
    /// The number of consecutive rows that are queries of one sequence and use its table; 1 if each row is a
    /// sequence.
    pub rows_of_table: usize,
    /// Whether only the last page of each sequence may have been written since the last wait for the GPU. If
    /// so, the other pages may be read while the previous kernel still runs.
    pub last_is_new: bool,
    /// Tokens of each sequence, with the new one. If a length exceeds the table, the kernel reads other rows;
    /// the caller must prevent this.
    pub lengths: View<'a, u32>,
    /// The greatest of the lengths. Tokens beyond it are ignored.
    pub length_max: usize,
    /// The number of tokens for one block of threads: a multiple of 16. The order of the sums depends on this
    /// number only.
    pub chunk_tokens: usize,
    /// The number of last tokens that a query sees.
    pub window: usize,
    pub scale: f32,
    /// Whether KV is loaded into registers even if there is a copy engine. Then concurrent kernels that load into
    /// registers too ([`SkinnyForm`](super::SkinnyForm)) use the shared memory for their L1 cache.
    pub leaves_cache: bool,
}

/// The fields of DecodeShape in decode_attention.cu, in the same order. The struct is copied to the GPU as
/// bytes.
#[derive(Clone, Copy)]
#[repr(C)]
struct DecodeShape {
    n_q_heads: u32,
    n_kv_heads: u32,
    q_stride: u32,
    table_stride: u32,
    n_blocks: u32,
    chunk_blocks: u32,
    window: u32,
    scale: f32,
    rows_of_table: u32,
    last_is_new: u32,
}

impl DecodeAttention<'_> {
    /// Returns the number of partial results: one for each row, head and chunk.
    pub fn n_parts(n_rows: usize, n_q_heads: usize, length_max: usize, chunk_tokens: usize) -> usize {
        n_rows * n_q_heads * length_max.div_ceil(chunk_tokens).max(1)
    }

    /// Returns a good chunk size for one block of threads: chunks that fill the GPU's multiprocessors evenly.
    ///
    /// The size depends on the batch, and with it the order of sums. A caller whose results must not depend
    /// on the batch uses a fixed number.
    pub fn chunk_tokens_for(
        card: &ComputeCard,
        n_rows: usize,
        n_kv_heads: usize,
        length_max: usize,
    ) -> usize {
        let at_once = if card.has(HOPPER[0].one) { BLOCKS_AT_ONCE_ON_HOPPER } else { BLOCKS_AT_ONCE };
        let places = card.n_multiprocessors() as usize * at_once;
        let blocks = length_max.div_ceil(BLOCK_TOKENS).max(1);
        // The warp with the most pages determines the time of a chunk, so chunks are whole numbers of pages
        // for each warp.
        let chunk = |n_chunks: usize| blocks.div_ceil(n_chunks).next_multiple_of(WARPS) * BLOCK_TOKENS;
        let tokens_of_time = |n_chunks: &usize| {
            let tokens = chunk(*n_chunks);
            let n_chunks = length_max.div_ceil(tokens).max(1);
            let n_turns = (n_rows * n_kv_heads * n_chunks).div_ceil(places).max(1);
            let of_merge = if n_chunks > 1 { n_chunks * MERGE_TOKENS } else { 0 };
            n_turns * (tokens + START_TOKENS) + of_merge
        };
        let n_chunks = (1..=blocks.min(CHUNKS_MAX)).min_by_key(tokens_of_time).unwrap_or(1);
        chunk(n_chunks)
    }

    /// Returns the number of numbers in all partial results.
    pub fn parts_numbers(n_parts: usize, head_dim: usize) -> usize {
        n_parts * head_dim
    }

    fn n_chunks(&self) -> usize {
        self.length_max.div_ceil(self.chunk_tokens).max(1)
    }

    /// Returns the number of queries of one sequence that are computed together; `None` if each is computed
    /// alone. With a window each query starts at another token, and the sums of its warps would depend on the
    /// other queries.
    fn queries_at_once(&self) -> Option<usize> {
        let n_rows = self.lengths.len();
        let are_of_one = n_rows > 1 && self.rows_of_table >= n_rows && self.window >= self.length_max;
        let of_group = HEADS_AT_ONCE / (self.n_q_heads / self.kv.n_kv_heads);
        are_of_one.then_some(TILES_AT_ONCE * of_group.max(1))
    }

    fn check(&self, kernel: &'static str) -> Result<usize, CudaError> {
        let (head_dim, n_kv_heads) = (self.kv.head_dim, self.kv.n_kv_heads);
        ensure(kernel, [64, 128].contains(&head_dim), "heads that are not 64 or 128 wide")?;
        let divides = n_kv_heads > 0 && self.n_q_heads > 0 && self.n_q_heads.is_multiple_of(n_kv_heads);
        ensure(kernel, divides, "a number of query heads that is not a multiple of the KV heads")?;
        let n_rows = rows_of(kernel, self.out.len(), self.n_q_heads * head_dim)?;
        ensure(kernel, n_rows <= GRID_SIDE_MAX, "too many sequences")?;
        let is_chunk = self.chunk_tokens > 0 && self.chunk_tokens.is_multiple_of(BLOCK_TOKENS);
        ensure(kernel, is_chunk, "chunks that are not whole blocks")?;
        let width = self.n_q_heads * head_dim;
        let is_wide = self.q_stride >= width && self.q_stride.is_multiple_of(8);
        ensure(kernel, is_wide, "rows of q that overlap, or are not aligned to 16 bytes")?;
        let q_needed = if n_rows == 0 { 0 } else { (n_rows - 1) * self.q_stride + width };
        ensure(kernel, self.q.len() >= q_needed, "fewer rows of q than sequences")?;
        ensure(kernel, self.pages.len() == self.kv.halves(), "pages of the wrong total size")?;
        ensure(kernel, self.lengths.len() == n_rows, "not one length for each sequence")?;
        ensure(kernel, self.rows_of_table > 0, "tables without rows")?;
        let n_tables = n_rows.div_ceil(self.rows_of_table);
        let table_stride = rows_of(kernel, self.tables.len(), n_tables.max(1))?;
        let covers = n_rows == 0 || table_stride >= self.length_max.div_ceil(BLOCK_TOKENS);
        ensure(kernel, covers, "tables shorter than the sequences")?;
        if self.n_chunks() > 1 {
            let n_parts = Self::n_parts(n_rows, self.n_q_heads, self.length_max, self.chunk_tokens);
            let has_room =
                self.part_sums.len() >= n_parts && self.parts.len() >= Self::parts_numbers(n_parts, head_dim);
            ensure(kernel, has_room, "too little room for parts")?;
        }
        Ok(n_rows)
    }
}

impl ComputeCard {
    /// Computes `out = softmax(q * K * scale) * V` for one query of each sequence, over its pages.
    ///
    /// Query heads share KV heads in order. A sequence without tokens gives zeroes.
    pub fn decode_attention(&self, attention: DecodeAttention<'_>) -> Result<(), CudaError> {
        let (kernel, merge) = match (attention.kv.number, attention.kv.head_dim) {
            (KvNumber::Bf16, 64) => ("decode_attention_64", "merge_parts_64"),
            (KvNumber::Bf16, _) => ("decode_attention_128", "merge_parts_128"),
            (KvNumber::Fp8, 64) => ("decode_attention_fp8_64", "merge_parts_64"),
            (KvNumber::Fp8, _) => ("decode_attention_fp8_128", "merge_parts_128"),
        };
        let n_rows = attention.check(kernel)?;
        let DecodeAttention { out, parts, part_sums, q, pages, tables, lengths, .. } = &attention;
        self.check_places(kernel, &[out, q, pages], &[parts, part_sums, tables, lengths])?;
        if n_rows == 0 {
            return Ok(());
        }
        let kv = attention.kv;
        let shape = DecodeShape {
            n_q_heads: number(kernel, attention.n_q_heads)?,
            n_kv_heads: number(kernel, kv.n_kv_heads)?,
            q_stride: number(kernel, attention.q_stride)?,
            table_stride: number(kernel, tables.len() / n_rows.div_ceil(attention.rows_of_table))?,
            n_blocks: number(kernel, kv.n_blocks)?,
            chunk_blocks: number(kernel, attention.chunk_tokens / BLOCK_TOKENS)?,
            window: u32::try_from(attention.window).unwrap_or(u32::MAX),
            scale: attention.scale,
            rows_of_table: number(kernel, attention.rows_of_table)?,
            last_is_new: u32::from(attention.last_is_new),
        };
        let n_chunks = attention.n_chunks();
        let tiles = kv.n_kv_heads * (attention.n_q_heads / kv.n_kv_heads).div_ceil(HEADS_AT_ONCE);
        self.launch_decode(kernel, &attention, (n_chunks, tiles, n_rows), shape)?;
        if n_chunks == 1 {
            return Ok(());
        }
        let config = grid(attention.n_q_heads, n_rows, MERGE_THREADS);
        let n_parts = number(kernel, n_chunks)?;
        launch!(
            self,
            merge,
            config,
            &out.address(),
            &parts.address(),
            &part_sums.address(),
            &lengths.address(),
            &shape.n_q_heads,
            &n_parts,
            &shape.chunk_blocks
        )
    }

    /// Launches the kernel that uses the copy engine, if the GPU has one, the caller allows it and there is one for this
    /// KV; else the other one.
    fn launch_decode(
        &self,
        kernel: &'static str,
        attention: &DecodeAttention<'_>,
        blocks: (usize, usize, usize),
        shape: DecodeShape,
    ) -> Result<(), CudaError> {
        let DecodeAttention { out, parts, part_sums, q, pages, tables, lengths, kv, .. } = attention;
        let of_heads = |hopper: &&Hopper| {
            let is_able =
                (hopper.number, hopper.head_dim) == (kv.number, kv.head_dim) && self.has(hopper.one);
            is_able && !attention.leaves_cache
        };
        let Some(hopper) = HOPPER.iter().find(of_heads) else {
            let config = Grid::of(blocks, THREADS, 0);
            return launch!(
                self,
                kernel,
                config,
                &out.address(),
                &parts.address(),
                &part_sums.address(),
                &q.address(),
                &pages.address(),
                &tables.address(),
                &lengths.address(),
                &shape
            );
        };
        let of_pages = kv.map(*pages)?;
        let config = Grid::of(blocks, THREADS, shared_bytes(hopper));
        if let Some(n_at_once) = attention.queries_at_once() {
            let n_rows = lengths.len();
            let blocks = (blocks.0, blocks.1, n_rows.div_ceil(n_at_once));
            let n_rows = number(hopper.many, n_rows)?;
            return launch!(
                self,
                hopper.many,
                Grid { blocks, ..config },
                &out.address(),
                &parts.address(),
                &part_sums.address(),
                &q.address(),
                &of_pages,
                &tables.address(),
                &lengths.address(),
                &shape,
                &n_rows
            );
        }
        launch!(
            self,
            hopper.one,
            config,
            &out.address(),
            &parts.address(),
            &part_sums.address(),
            &q.address(),
            &of_pages,
            &tables.address(),
            &lengths.address(),
            &shape
        )
    }
}

/// Kernels that use the copy engine, for one format and one head size: one with one query of each sequence, one with
/// many queries of one sequence.
struct Hopper {
    one: &'static str,
    many: &'static str,
    number: KvNumber,
    head_dim: usize,
}

const HOPPER: [Hopper; 3] = [
    Hopper {
        one: "decode_attention_hopper_64",
        many: "decode_attention_hopper_many_64",
        number: KvNumber::Bf16,
        head_dim: 64,
    },
    Hopper {
        one: "decode_attention_hopper_128",
        many: "decode_attention_hopper_many_128",
        number: KvNumber::Bf16,
        head_dim: 128,
    },
    Hopper {
        one: "decode_attention_hopper_fp8_128",
        many: "decode_attention_hopper_many_fp8_128",
        number: KvNumber::Fp8,
        head_dim: 128,
    },
];

/// Returns the bytes of the rings of pages, with padding to align them to 1,024 bytes. Rings of FP8 have twice as many
/// pages of half the size.
fn shared_bytes(hopper: &Hopper) -> u32 {
    (PAGES_AT_ONCE * 2 * BLOCK_TOKENS * hopper.head_dim * size_of::<Bf16>() + 1024) as u32
}

/// Returns the dynamic shared memory of a kernel in this file.
pub(in crate::cuda) fn shared_bytes_of(kernel: &str) -> Option<u32> {
    let found = HOPPER.iter().find(|hopper| [hopper.one, hopper.many].contains(&kernel));
    found.map(shared_bytes)
}
