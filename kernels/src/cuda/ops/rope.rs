//! Applies head norms, rotates q and k by their positions, and writes K and V into pages.

use super::{
    BLOCK_TOKENS, Bf16, ComputeCard, CudaError, GRID_SIDE_MAX, KvNumber, KvPages, View, ViewMut, ensure,
    launch, number, rows_of,
};
use device::cuda::card::grid;

/// The maximum number of threads for a row, as in `rope.cu`. A thread has 16 numbers of a head.
const THREADS_MAX: usize = 256;
const DIMS_OF_THREAD: usize = 16;

/// The arguments of [`ComputeCard::rope_write_kv`], for rows of one layer.
#[derive(Debug)]
pub struct RopeWriteKv<'a> {
    /// The rows: all heads of q, then of k, then of v. q is rotated in place; k and v are read.
    pub qkv: ViewMut<'a, Bf16>,
    pub n_q_heads: usize,
    pub pages: ViewMut<'a, Bf16>,
    pub kv: KvPages,
    pub positions: View<'a, u32>,
    /// The slot of each row's K and V: block * 16 + token. A slot outside of the pages is not written.
    pub slots: View<'a, u32>,
    /// Cosine and sine for each position and each of the first half of the dims.
    pub turns: View<'a, [f32; 2]>,
    /// The weights of q's and of k's norm, if the model has them.
    pub norms: Option<[View<'a, Bf16>; 2]>,
    pub epsilon: f32,
}

/// The fields of RopeShape in rope.cu, in the same order. The struct is copied to the GPU as bytes.
#[derive(Clone, Copy)]
#[repr(C)]
struct RopeShape {
    n_q_heads: u32,
    n_kv_heads: u32,
    n_slots: u32,
    n_positions: u32,
    epsilon: f32,
}

impl ComputeCard {
    /// Rotates q in place and writes k, rotated, and v into their pages.
    pub fn rope_write_kv(&self, rope: RopeWriteKv<'_>) -> Result<(), CudaError> {
        let kernel = match (rope.kv.number, rope.kv.head_dim) {
            (KvNumber::Bf16, 64) => "rope_write_kv_64",
            (KvNumber::Bf16, _) => "rope_write_kv_128",
            (KvNumber::Fp8, 64) => "rope_write_kv_fp8_64",
            (KvNumber::Fp8, _) => "rope_write_kv_fp8_128",
        };
        let RopeWriteKv { qkv, pages, kv, positions, slots, turns, .. } = &rope;
        let head_dim = kv.head_dim;
        let n_heads = rope.n_heads();
        let n_rows = rows_of(kernel, qkv.len(), n_heads * head_dim)?;
        ensure(kernel, n_rows <= GRID_SIDE_MAX, "too many rows")?;
        rope.check(self, kernel, n_rows)?;
        // A null address tells the kernel that there is no norm.
        let norms = rope.norms.map_or([0, 0], |[q, k]| [q.address(), k.address()]);
        if n_rows == 0 {
            return Ok(());
        }
        let shape = RopeShape {
            n_q_heads: number(kernel, rope.n_q_heads)?,
            n_kv_heads: number(kernel, kv.n_kv_heads)?,
            n_slots: number(kernel, kv.n_blocks * BLOCK_TOKENS)?,
            n_positions: number(kernel, rows_of(kernel, turns.len(), head_dim / 2)?)?,
            epsilon: rope.epsilon,
        };
        // Divides the heads of a row evenly into passes of whole warps.
        let lanes = n_heads * head_dim / DIMS_OF_THREAD;
        let threads = lanes.div_ceil(lanes.div_ceil(THREADS_MAX)).next_multiple_of(32);
        let config = grid(n_rows, 1, threads as u32);
        launch!(
            self,
            kernel,
            config,
            &qkv.address(),
            &pages.address(),
            &positions.address(),
            &slots.address(),
            &turns.address(),
            &norms[0],
            &norms[1],
            &shape
        )
    }
}

impl RopeWriteKv<'_> {
    fn n_heads(&self) -> usize {
        self.n_q_heads + 2 * self.kv.n_kv_heads
    }

    /// Checks that all arguments have `n_rows` rows. Returns the width of all heads of a row.
    pub(super) fn check(
        &self,
        card: &ComputeCard,
        kernel: &'static str,
        n_rows: usize,
    ) -> Result<usize, CudaError> {
        let Self { qkv, pages, kv, positions, slots, turns, norms, .. } = self;
        let head_dim = kv.head_dim;
        ensure(kernel, [64, 128].contains(&head_dim), "heads that are not 64 or 128 wide")?;
        card.check_places(kernel, &[qkv, pages, turns], &[positions, slots])?;
        let width = self.n_heads() * head_dim;
        ensure(kernel, qkv.len() == n_rows * width, "rows whose width is not that of all heads")?;
        let are_alike = positions.len() == n_rows && slots.len() == n_rows;
        ensure(kernel, are_alike, "not one position and slot for each row")?;
        ensure(kernel, pages.len() == kv.halves(), "pages of the wrong total size")?;
        if let Some([q, k]) = norms {
            card.check_places(kernel, &[q, k], &[])?;
            let are_wide = q.len() == head_dim && k.len() == head_dim;
            ensure(kernel, are_wide, "norms whose width is not that of a head")?;
        }
        Ok(width)
    }
}
