//! Attention in which all heads share one latent vector for each token: the latents and queries, their attention, and
//! the products of each head with matrices of its own.

use super::{
    BLOCK_TOKENS, Bf16, ComputeCard, CudaError, GRID_SIDE_MAX, KvNumber, KvPages, PrefillSequence, View,
    ViewMut, ensure, launch, number, rows_of,
};
use device::cuda::card::{Grid, grid};

/// The widths that kernels are compiled for, as in `latent.cuh`: of the compressed key and value, and of the rotated
/// part of the key. Models with fewer numbers are padded with zeroes.
pub const LATENT_RANK: usize = 512;
pub const LATENT_ROTATED: usize = 64;
/// The width of a latent, and of a query for latents.
pub const LATENT_WIDTH: usize = LATENT_RANK + LATENT_ROTATED;
/// The widths of the unrotated part of a head of q, of a head of q, and of a head's value.
pub const LATENT_UNROTATED: usize = 128;
pub const LATENT_Q_HEAD: usize = LATENT_UNROTATED + LATENT_ROTATED;
pub const LATENT_VALUE: usize = 128;

const WRITE_THREADS: u32 = 256;
const HEADS_THREADS: u32 = 128;
const MERGE_THREADS: u32 = LATENT_RANK as u32 / 4;
/// The number of tokens of a tile of latents, and between two rows of scores, as in `latent.cuh`.
const TILE_TOKENS: usize = 32;
const SCORE_STRIDE: usize = TILE_TOKENS + 4;

/// The kernels for attention, by the number of queries that a block of threads computes.
struct Form {
    bf16: &'static str,
    fp8: &'static str,
    n_queries: usize,
    threads: u32,
}

const FEW: Form =
    Form { bf16: "attend_latents_16", fp8: "attend_latents_fp8_16", n_queries: 16, threads: 128 };
const MANY: Form =
    Form { bf16: "attend_latents_64", fp8: "attend_latents_fp8_64", n_queries: 64, threads: 256 };

impl Form {
    fn kernel(&self, number: KvNumber) -> &'static str {
        match number {
            KvNumber::Bf16 => self.bf16,
            KvNumber::Fp8 => self.fp8,
        }
    }

    /// Returns the bytes of the queries, of tiles of latents, and of scores. There are two tiles of 16-bit numbers; or one
    /// beside two of 8-bit numbers.
    fn shared_bytes(&self) -> u32 {
        let rows = (self.n_queries + 2 * TILE_TOKENS) * LATENT_WIDTH * size_of::<Bf16>();
        (rows + self.n_queries * SCORE_STRIDE * size_of::<f32>()) as u32
    }
}

/// Describes pages of latents as pages with one head, whose key and value are each half of a latent.
pub(super) fn latent_pages(n_blocks: usize, number: KvNumber) -> KvPages {
    KvPages { n_kv_heads: 1, head_dim: LATENT_WIDTH / 2, n_blocks, number }
}

/// The arguments of [`ComputeCard::write_latents`], for rows of one layer.
#[derive(Debug)]
pub struct WriteLatents<'a> {
    /// The rows: the latent of q or something else, then [`LATENT_WIDTH`] numbers, the compressed key and value and
    /// the part of the key that is rotated.
    pub rows: View<'a, Bf16>,
    pub stride: usize,
    /// The latent of q, if the model has one.
    pub q: Option<NormedLatents<'a>>,
    pub pages: ViewMut<'a, Bf16>,
    pub number: KvNumber,
    pub n_blocks: usize,
    pub positions: View<'a, u32>,
    /// The slot of each row's latent: block * 16 + token. A slot outside of the pages is not written.
    pub slots: View<'a, u32>,
    /// Cosine and sine for each position and each of half of the rotated numbers.
    pub turns: View<'a, [f32; 2]>,
    /// The weights of the norm of the compressed key and value, and its width without padding.
    pub weight: View<'a, Bf16>,
    pub width: usize,
    pub epsilon: f32,
}

/// The norm of the latents of q.
#[derive(Debug)]
pub struct NormedLatents<'a> {
    /// The normed rows.
    pub out: ViewMut<'a, Bf16>,
    pub weight: View<'a, Bf16>,
    /// The width without padding.
    pub width: usize,
}

/// The fields of WriteShape in latent.cu, in the same order, as in all structs below.
#[repr(C)]
struct WriteShape {
    stride: u32,
    q_rank: u32,
    q_width: u32,
    kv_width: u32,
    n_slots: u32,
    n_positions: u32,
    epsilon: f32,
}

#[repr(C)]
struct HeadsShape {
    n_rows: u32,
    x_row: u32,
    x_head: u32,
    y_row: u32,
    y_head: u32,
}

/// The kernels for products of heads: a block of threads multiplies some rows of x by some of the matrix.
struct HeadsForm {
    keys: &'static str,
    values: &'static str,
    n_rows: usize,
    n_columns: usize,
}

const FEW_HEADS: HeadsForm =
    HeadsForm { keys: "multiply_keys_few", values: "multiply_values_few", n_rows: 16, n_columns: 32 };
const MANY_HEADS: HeadsForm =
    HeadsForm { keys: "multiply_keys", values: "multiply_values", n_rows: 64, n_columns: 64 };

impl HeadsForm {
    fn of(n_rows: usize) -> Self {
        if n_rows <= FEW_HEADS.n_rows { FEW_HEADS } else { MANY_HEADS }
    }

    /// Returns a grid with `n_blocks` blocks of threads for each tile of rows and each head.
    fn grid(
        &self,
        kernel: &'static str,
        n_blocks: usize,
        n_rows: usize,
        n_heads: usize,
    ) -> Result<Grid, CudaError> {
        let n_tiles = n_rows.div_ceil(self.n_rows);
        ensure(kernel, n_tiles.max(n_heads) <= GRID_SIDE_MAX, "too many rows or heads")?;
        Ok(Grid::of((n_blocks, n_tiles, n_heads), HEADS_THREADS, 0))
    }
}

/// The heads of q of some rows, which have a position each.
struct QHeads<'a> {
    q: View<'a, Bf16>,
    stride: usize,
    n_heads: usize,
    positions: View<'a, u32>,
    turns: View<'a, [f32; 2]>,
}

/// Where rotated parts are written: the address of the first one, and the numbers between two rows and between two heads.
struct RotatedParts {
    address: u64,
    row: usize,
    head: usize,
}

#[repr(C)]
struct Turned {
    rotated: u64,
    positions: u64,
    turns: u64,
    q_row: u32,
    row: u32,
    head: u32,
    n_heads: u32,
    n_positions: u32,
}

#[repr(C)]
struct LatentShape {
    n_heads: u32,
    table_stride: u32,
    n_blocks: u32,
    chunk_tokens: u32,
    rows_of_table: u32,
    last_is_new: u32,
    scale: f32,
}

/// The arguments of [`ComputeCard::make_queries`]: the heads of q of some rows.
#[derive(Debug)]
pub struct LatentQueries<'a> {
    /// The queries: `n_heads` times [`LATENT_WIDTH`] numbers for each row.
    pub out: ViewMut<'a, Bf16>,
    /// The rows: `n_heads` times [`LATENT_Q_HEAD`] numbers, `stride` apart.
    pub q: View<'a, Bf16>,
    pub stride: usize,
    pub n_heads: usize,
    pub positions: View<'a, u32>,
    pub turns: View<'a, [f32; 2]>,
    /// The transposed keys of each head: [`LATENT_RANK`] rows of [`LATENT_UNROTATED`] numbers.
    pub keys: View<'a, Bf16>,
}

/// The arguments of [`ComputeCard::turn_heads`]: the heads of q of some rows.
#[derive(Debug)]
pub struct TurnedHeads<'a> {
    /// The rows: `n_heads` times [`LATENT_Q_HEAD`] numbers, `stride` apart.
    pub q: ViewMut<'a, Bf16>,
    pub stride: usize,
    pub n_heads: usize,
    pub positions: View<'a, u32>,
    pub turns: View<'a, [f32; 2]>,
}

/// The arguments of both kinds of attention over latents, for one layer.
#[derive(Debug)]
pub struct LatentAttention<'a> {
    /// The sums of latents: `n_heads` times [`LATENT_RANK`] numbers for each row.
    pub out: ViewMut<'a, Bf16>,
    /// The queries: `n_heads` times [`LATENT_WIDTH`] numbers for each row.
    pub q: View<'a, Bf16>,
    pub n_heads: usize,
    pub pages: View<'a, Bf16>,
    pub number: KvNumber,
    pub n_blocks: usize,
    /// A row of block numbers for each sequence. All rows have the same length.
    pub tables: View<'a, u32>,
    pub scale: f32,
}

/// The buffers that attention of single tokens needs beside [`LatentAttention`]: see
/// [`DecodeAttention`](super::DecodeAttention).
#[derive(Debug)]
pub struct LatentRows<'a> {
    pub parts: ViewMut<'a, f32>,
    pub part_sums: ViewMut<'a, [f32; 2]>,
    pub lengths: View<'a, u32>,
    pub length_max: usize,
    pub rows_of_table: usize,
    pub last_is_new: bool,
    pub chunk_tokens: usize,
}

impl ComputeCard {
    /// Norms and rotates the latents of rows, and writes them into pages. Norms the latents of q.
    pub fn write_latents(&self, write: WriteLatents<'_>) -> Result<(), CudaError> {
        let kernel = match write.number {
            KvNumber::Bf16 => "write_latents",
            KvNumber::Fp8 => "write_latents_fp8",
        };
        let WriteLatents { rows, stride, q, pages, positions, slots, turns, weight, .. } = &write;
        self.check_places(kernel, &[rows, pages, turns, weight], &[positions, slots])?;
        let n_rows = rows_of(kernel, rows.len(), *stride)?;
        let q_rank = q.as_ref().map_or(0, |q| q.weight.len());
        let has_room =
            stride.is_multiple_of(8) && q_rank.is_multiple_of(8) && *stride >= q_rank + LATENT_WIDTH;
        ensure(kernel, has_room, "rows that are too short, or not of whole vectors")?;
        let are_alike = positions.len() == n_rows && slots.len() == n_rows;
        ensure(kernel, are_alike, "not one position and slot for each row")?;
        let is_whole = pages.len() == latent_pages(write.n_blocks, write.number).halves();
        ensure(kernel, is_whole, "pages of the wrong total size")?;
        let is_wide = weight.len() == LATENT_RANK && (1..=LATENT_RANK).contains(&write.width);
        ensure(kernel, is_wide, "a norm of another width than that of latents")?;
        let (mut normed, mut q_weight, mut q_width) = (0, 0, 1);
        if let Some(NormedLatents { out, weight, width }) = q {
            self.check_places(kernel, &[out, weight], &[])?;
            let is_whole = out.len() == n_rows * q_rank && (1..=q_rank).contains(width);
            ensure(kernel, is_whole, "latents of q of another size")?;
            (normed, q_weight, q_width) = (out.address(), weight.address(), *width);
        }
        if n_rows == 0 {
            return Ok(());
        }
        let shape = WriteShape {
            stride: number(kernel, *stride)?,
            q_rank: number(kernel, q_rank)?,
            q_width: number(kernel, q_width)?,
            kv_width: number(kernel, write.width)?,
            n_slots: number(kernel, write.n_blocks * BLOCK_TOKENS)?,
            n_positions: number(kernel, rows_of(kernel, turns.len(), LATENT_ROTATED / 2)?)?,
            epsilon: write.epsilon,
        };
        launch!(
            self,
            kernel,
            grid(n_rows, 1, WRITE_THREADS),
            &normed,
            &pages.address(),
            &rows.address(),
            &positions.address(),
            &slots.address(),
            &turns.address(),
            &q_weight,
            &weight.address(),
            &shape
        )
    }

    /// Makes queries for latents of heads of q: multiplies the unrotated part by the head's keys, and rotates the other.
    pub fn make_queries(&self, queries: LatentQueries<'_>) -> Result<(), CudaError> {
        let form = HeadsForm::of(queries.positions.len());
        let kernel = form.keys;
        let LatentQueries { out, q, stride, n_heads, positions, turns, keys } = queries;
        self.check_places(kernel, &[&out, &q, &turns, &keys], &[&positions])?;
        let n_rows = rows_of(kernel, out.len(), n_heads * LATENT_WIDTH)?;
        ensure(kernel, positions.len() == n_rows, "not one position for each query")?;
        let is_whole = keys.len() == n_heads * LATENT_RANK * LATENT_UNROTATED;
        ensure(kernel, is_whole, "keys of another size than that of all heads")?;
        let heads = QHeads { q, stride, n_heads, positions, turns };
        let address = out.address() + (LATENT_RANK * size_of::<Bf16>()) as u64;
        let to = RotatedParts { address, row: n_heads * LATENT_WIDTH, head: LATENT_WIDTH };
        let turned = heads.turned(kernel, to)?;
        if n_rows == 0 {
            return Ok(());
        }
        let shape = HeadsShape {
            n_rows: number(kernel, n_rows)?,
            x_row: number(kernel, stride)?,
            x_head: LATENT_Q_HEAD as u32,
            y_row: number(kernel, n_heads * LATENT_WIDTH)?,
            y_head: LATENT_WIDTH as u32,
        };
        // The last block rotates.
        let config = form.grid(kernel, LATENT_RANK / form.n_columns + 1, n_rows, n_heads)?;
        launch!(self, kernel, config, &out.address(), &q.address(), &keys.address(), &shape, &turned)
    }

    /// Rotates the rotated part of each head of q in its place.
    pub fn turn_heads(&self, heads: TurnedHeads<'_>) -> Result<(), CudaError> {
        let kernel = "turn_queries";
        let TurnedHeads { q, stride, n_heads, positions, turns } = heads;
        self.check_places(kernel, &[&q, &turns], &[&positions])?;
        let address = q.address() + (LATENT_UNROTATED * size_of::<Bf16>()) as u64;
        let heads = QHeads { q: q.view(), stride, n_heads, positions, turns };
        let turned = heads.turned(kernel, RotatedParts { address, row: stride, head: LATENT_Q_HEAD })?;
        if positions.is_empty() {
            return Ok(());
        }
        launch!(self, kernel, grid(positions.len(), 1, WRITE_THREADS), &q.address(), &turned)
    }

    /// Multiplies each head's sum of latents by the head's values: `n_heads` times [`LATENT_VALUE`] numbers for each
    /// row. `values` has [`LATENT_VALUE`] rows of [`LATENT_RANK`] numbers for each head.
    pub fn multiply_values(
        &self,
        out: ViewMut<'_, Bf16>,
        sums: View<'_, Bf16>,
        values: View<'_, Bf16>,
    ) -> Result<(), CudaError> {
        let n_heads = rows_of("multiply_values", values.len(), LATENT_VALUE * LATENT_RANK)?;
        let n_rows = rows_of("multiply_values", out.len(), n_heads * LATENT_VALUE)?;
        let form = HeadsForm::of(n_rows);
        let kernel = form.values;
        self.check_places(kernel, &[&out, &sums, &values], &[])?;
        ensure(
            kernel,
            sums.len() == n_rows * n_heads * LATENT_RANK,
            "another number of sums than of outputs",
        )?;
        if n_rows == 0 {
            return Ok(());
        }
        let shape = HeadsShape {
            n_rows: number(kernel, n_rows)?,
            x_row: number(kernel, n_heads * LATENT_RANK)?,
            x_head: LATENT_RANK as u32,
            y_row: number(kernel, n_heads * LATENT_VALUE)?,
            y_head: LATENT_VALUE as u32,
        };
        let config = form.grid(kernel, LATENT_VALUE / form.n_columns, n_rows, n_heads)?;
        launch!(self, kernel, config, &out.address(), &sums.address(), &values.address(), &shape)
    }

    /// Returns the number of blocks of threads that share the queries of one token.
    pub fn latent_tiles(&self, n_heads: usize) -> usize {
        n_heads.div_ceil(self.latent_form(n_heads).n_queries)
    }

    fn latent_form(&self, n_queries: usize) -> Form {
        if n_queries >= MANY.n_queries && self.has(MANY.bf16) { MANY } else { FEW }
    }

    /// Computes attention of one token of each sequence: `out = softmax(q * latents * scale) * compressed latents`.
    pub fn attend_latents(
        &self,
        attention: LatentAttention<'_>,
        rows: LatentRows<'_>,
    ) -> Result<(), CudaError> {
        let LatentRows { parts, part_sums, lengths, length_max, rows_of_table, last_is_new, chunk_tokens } =
            rows;
        let form = self.latent_form(attention.n_heads);
        let kernel = form.kernel(attention.number);
        let n_rows = attention.check(self, kernel)?;
        self.check_places(kernel, &[], &[&parts, &part_sums, &lengths])?;
        let is_chunk = chunk_tokens > 0 && chunk_tokens.is_multiple_of(TILE_TOKENS);
        ensure(kernel, is_chunk, "chunks that are not whole tiles")?;
        ensure(kernel, lengths.len() == n_rows, "not one length for each row")?;
        ensure(
            kernel,
            n_rows <= GRID_SIDE_MAX && rows_of_table > 0,
            "too many rows, or tables without rows",
        )?;
        let n_tables = n_rows.div_ceil(rows_of_table);
        let table_stride = rows_of(kernel, attention.tables.len(), n_tables.max(1))?;
        let covers = n_rows == 0 || table_stride >= length_max.div_ceil(BLOCK_TOKENS);
        ensure(kernel, covers, "tables shorter than the sequences")?;
        let n_chunks = length_max.div_ceil(chunk_tokens).max(1);
        let n_parts = n_rows * attention.n_heads * n_chunks;
        let has_room = part_sums.len() >= n_parts && parts.len() >= n_parts * LATENT_RANK;
        ensure(kernel, n_chunks == 1 || has_room, "too little room for parts")?;
        if n_rows == 0 {
            return Ok(());
        }
        let shape = attention.shape(kernel, table_stride, chunk_tokens, rows_of_table)?;
        let shape = LatentShape { last_is_new: u32::from(last_is_new), ..shape };
        let blocks = (n_chunks, attention.n_heads.div_ceil(form.n_queries), n_rows);
        let config = Grid::of(blocks, form.threads, form.shared_bytes());
        let of_rows = [parts.address(), part_sums.address(), lengths.address(), 0];
        self.launch_latents(kernel, config, &attention, of_rows, &shape)?;
        if n_chunks == 1 {
            return Ok(());
        }
        launch!(
            self,
            "merge_latents",
            grid(attention.n_heads, n_rows, MERGE_THREADS),
            &attention.out.address(),
            &parts.address(),
            &part_sums.address(),
            &lengths.address(),
            &shape.n_heads,
            &number(kernel, n_chunks)?,
            &shape.chunk_tokens
        )
    }

    /// Computes attention of many new tokens of each sequence. A token sees the earlier tokens, and itself. `on_card` has
    /// the three numbers of each of `sequences`.
    pub fn attend_latents_of_chunks(
        &self,
        attention: LatentAttention<'_>,
        sequences: &[PrefillSequence],
        on_card: View<'_, [u32; 3]>,
    ) -> Result<(), CudaError> {
        let form = self.latent_form(usize::MAX);
        let kernel = form.kernel(attention.number);
        let n_rows = attention.check(self, kernel)?;
        self.check_places(kernel, &[], &[&on_card])?;
        ensure(kernel, on_card.len() == sequences.len(), "other sequences on the GPU")?;
        if sequences.is_empty() {
            return Ok(());
        }
        let table_stride = rows_of(kernel, attention.tables.len(), sequences.len())?;
        PrefillSequence::check_all(sequences, kernel, n_rows, table_stride)?;
        let shape = attention.shape(kernel, table_stride, u32::MAX as usize, 1)?;
        let n_queries = sequences.iter().map(|sequence| sequence.n_queries).max().unwrap_or(0);
        let n_tiles = (n_queries * attention.n_heads).div_ceil(form.n_queries);
        ensure(kernel, n_tiles.max(sequences.len()) <= GRID_SIDE_MAX, "too many queries or sequences")?;
        let config = Grid::of((1, n_tiles, sequences.len()), form.threads, form.shared_bytes());
        self.launch_latents(kernel, config, &attention, [0, 0, 0, on_card.address()], &shape)
    }

    /// `addresses` are those of parts, of their sums, of lengths, and of sequences. A null address tells the kernel that
    /// there are none.
    fn launch_latents(
        &self,
        kernel: &'static str,
        config: Grid,
        attention: &LatentAttention<'_>,
        addresses: [u64; 4],
        shape: &LatentShape,
    ) -> Result<(), CudaError> {
        let LatentAttention { out, q, pages, tables, .. } = attention;
        let [parts, part_sums, lengths, sequences] = &addresses;
        launch!(
            self,
            kernel,
            config,
            &out.address(),
            parts,
            part_sums,
            &q.address(),
            &pages.address(),
            &tables.address(),
            lengths,
            sequences,
            shape
        )
    }
}

impl LatentAttention<'_> {
    /// Returns the number of rows.
    fn check(&self, card: &ComputeCard, kernel: &'static str) -> Result<usize, CudaError> {
        let Self { out, q, n_heads, pages, number, n_blocks, tables, .. } = self;
        card.check_places(kernel, &[out, q, pages], &[tables])?;
        let n_rows = rows_of(kernel, out.len(), n_heads * LATENT_RANK)?;
        ensure(kernel, q.len() == n_rows * n_heads * LATENT_WIDTH, "another number of queries than of sums")?;
        let is_whole = pages.len() == latent_pages(*n_blocks, *number).halves();
        ensure(kernel, is_whole, "pages of the wrong total size")?;
        Ok(n_rows)
    }

    fn shape(
        &self,
        kernel: &'static str,
        table_stride: usize,
        chunk_tokens: usize,
        rows_of_table: usize,
    ) -> Result<LatentShape, CudaError> {
        Ok(LatentShape {
            n_heads: number(kernel, self.n_heads)?,
            table_stride: number(kernel, table_stride)?,
            n_blocks: number(kernel, self.n_blocks)?,
            chunk_tokens: number(kernel, chunk_tokens)?,
            rows_of_table: number(kernel, rows_of_table)?,
            last_is_new: 0,
            scale: self.scale,
        })
    }
}

impl QHeads<'_> {
    /// Returns the arguments of kernels that rotate the rotated part of each head and write it to `to`.
    fn turned(&self, kernel: &'static str, to: RotatedParts) -> Result<Turned, CudaError> {
        let Self { q, stride, n_heads, positions, turns } = self;
        let (n_rows, width) = (positions.len(), n_heads * LATENT_Q_HEAD);
        let is_wide = *stride >= width && stride.is_multiple_of(8);
        ensure(kernel, is_wide, "rows of q that overlap, or are not aligned to 16 bytes")?;
        let needed = if n_rows == 0 { 0 } else { (n_rows - 1) * stride + width };
        ensure(kernel, q.len() >= needed, "fewer rows of q than queries")?;
        Ok(Turned {
            rotated: to.address,
            positions: positions.address(),
            turns: turns.address(),
            q_row: number(kernel, *stride)?,
            row: number(kernel, to.row)?,
            head: number(kernel, to.head)?,
            n_heads: number(kernel, *n_heads)?,
            n_positions: number(kernel, rows_of(kernel, turns.len(), LATENT_ROTATED / 2)?)?,
        })
    }
}

/// Returns the dynamic shared memory of a kernel in this file.
pub(in crate::cuda) fn shared_bytes_of(kernel: &str) -> Option<u32> {
    [FEW, MANY].iter().find(|form| [form.bf16, form.fp8].contains(&kernel)).map(Form::shared_bytes)
}
