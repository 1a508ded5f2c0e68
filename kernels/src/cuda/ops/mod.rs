//! Computation on a GPU: one method for each kernel, which checks its arguments before the launch.
//!
//! The methods cannot check numbers in GPU memory (tokens, positions, lengths, block tables). The kernels
//! check them: for an index out of bounds they write NaN, or nothing.

mod rows;
mod rope;
mod argmax;
mod skinny;
mod decode;
mod prefill;
mod widened;
mod latent;
mod expanded;
mod probe;
mod few_rows;
mod many_rows;
mod experts;
mod expert_space;
mod expert_products;
mod expert_ring;
mod experts_few;
mod experts_fp8;
mod endings;
mod fp8;
mod feed;
mod sample;
mod better;
mod bias;
mod dummy;
mod ranks;

pub use better::{CountBetter, Standing};
pub use decode::DecodeAttention;
pub use dummy::DummyRows;
pub use endings::{AddedRows, Ending, FusedKernel, FusedProduct, HeadsRows, PendingNorm, WeightMatrix};
pub use expanded::ExpandedAttention;
pub use expert_space::{ExpertActivations, ExpertSizes, ExpertSpace, ExpertsForm, HeldExperts};
pub use experts::{
    EXPERT_GROUPS_MAX, EXPERTS_MAX, EXPERTS_OF_ROW_MAX, ExpertChoice, ExpertInput, ExpertLayer, ExpertSums,
};
pub use feed::{FeedTokens, NOWHERE};
pub(super) use few_rows::MEETING_PARTS;
pub use few_rows::{FEW_ROWS_FORMS, FEW_ROWS_MAX, FEW_ROWS_SHARES, FewRowsForm};
pub use fp8::{Fp8Rows, Fp8RowsMut, Fp8Scales, QuantizedRows};
pub use latent::{
    LATENT_Q_HEAD, LATENT_RANK, LATENT_ROTATED, LATENT_UNROTATED, LATENT_VALUE, LATENT_WIDTH,
    LatentAttention, LatentQueries, LatentRows, NormedLatents, TurnedHeads, WriteLatents,
};
pub use many_rows::{MANY_FP8_FORMS, ManyFp8Form, ManyRows};
pub use prefill::{PrefillAttention, PrefillSequence};
pub use ranks::SumRows;
pub use rope::RopeWriteKv;
pub use rows::NormedRows;
pub use sample::{DrawRow, EDIT_WORDS, LATE, LogitEdit, Outcome, SampleTokens, TOP_MAX};
pub use skinny::{SKINNY_FORMS, SKINNY_ROWS_MAX, SkinnyForm};
pub use widened::{WidenedPages, WidenedSize};

use std::time::Duration;

use device::cuda::error::ensure;
use device::cuda::{Bf16, CudaError, Element, View, ViewMut};

use super::ComputeCard;
use super::tensor_map::{Matrix, TensorMap};

/// The number of tokens of a KV page, also in `kernels/cu/pages.cuh`.
pub const BLOCK_TOKENS: usize = 16;
/// The largest second and third dimension of a grid.
const GRID_SIDE_MAX: usize = 65_535;

/// One layer's KV: one page of `[K|V][kv_head][token][dim]` for each block.
#[derive(Clone, Copy, Debug)]
pub struct KvPages {
    pub n_kv_heads: usize,
    pub head_dim: usize,
    pub n_blocks: usize,
    pub number: KvNumber,
}

/// The number format of KV. FP8 (e4m3) has no scale; two FP8 numbers count as one 16-bit number in views.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvNumber {
    Bf16,
    Fp8,
}

impl KvPages {
    /// Returns the length of all pages, in 16-bit numbers.
    pub fn halves(&self) -> usize {
        let numbers = self.n_blocks * self.page_numbers();
        match self.number {
            KvNumber::Bf16 => numbers,
            KvNumber::Fp8 => numbers / 2,
        }
    }

    /// Returns the number of numbers in one page.
    pub fn page_numbers(&self) -> usize {
        2 * self.n_kv_heads * BLOCK_TOKENS * self.head_dim
    }

    /// Describes all pages to the copy engine, in boxes of the tokens of a page. A row is one head of K or V of one
    /// token.
    fn map(&self, pages: View<'_, Bf16>) -> Result<TensorMap, CudaError> {
        let n_rows = self.n_blocks * 2 * self.n_kv_heads * BLOCK_TOKENS;
        let (address, width) = (pages.address(), self.head_dim);
        match self.number {
            KvNumber::Bf16 => {
                let matrix = Matrix { address, n_rows, n_columns: width, stride: width };
                TensorMap::of(matrix, BLOCK_TOKENS)
            }
            KvNumber::Fp8 => TensorMap::of_fp8(address, n_rows, width, BLOCK_TOKENS),
        }
    }
}

/// The properties of a view that launches check, for any element type.
trait CheckedView {
    fn lies_on(&self, card: &ComputeCard) -> bool;
    fn is_vector(&self) -> bool;
}

impl<T: Element> CheckedView for View<'_, T> {
    fn lies_on(&self, card: &ComputeCard) -> bool {
        self.ordinal() == card.ordinal()
    }
    fn is_vector(&self) -> bool {
        self.is_aligned()
    }
}

impl<T: Element> CheckedView for ViewMut<'_, T> {
    fn lies_on(&self, card: &ComputeCard) -> bool {
        self.ordinal() == card.ordinal()
    }
    fn is_vector(&self) -> bool {
        self.is_aligned()
    }
}

impl ComputeCard {
    /// Checks that all memory is on this GPU and that vectors, which are loaded 16 bytes at a time, are
    /// aligned. Indices need no alignment.
    fn check_places(
        &self,
        kernel: &'static str,
        vectors: &[&dyn CheckedView],
        indices: &[&dyn CheckedView],
    ) -> Result<(), CudaError> {
        let mut all = vectors.iter().chain(indices);
        ensure(kernel, all.all(|view| view.lies_on(self)), "memory of another GPU")?;
        ensure(
            kernel,
            vectors.iter().all(|view| view.is_vector()),
            "numbers that are not aligned to 16 bytes",
        )
    }
}

/// Returns a size as a kernel argument. A size of more than 32 bits is an error: it does not fit into GPU
/// memory.
pub(super) fn number(kernel: &'static str, size: usize) -> Result<u32, CudaError> {
    u32::try_from(size).map_err(|_| CudaError::Argument { kernel, wrong: "a size of more than 32 bits" })
}

/// Returns a duration as a kernel argument.
pub(super) fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Packs two neighbouring 32-bit fields into one word. GPU and host are little-endian.
pub(super) fn two_in_one(first: u32, second: u32) -> u64 {
    u64::from(first) | u64::from(second) << 32
}

/// Returns the number of rows of `width` numbers; a remainder is an error.
fn rows_of(kernel: &'static str, len: usize, width: usize) -> Result<usize, CudaError> {
    let fits = width > 0 && len.is_multiple_of(width);
    ensure(kernel, fits, "numbers that do not make whole rows")?;
    Ok(len / width)
}

/// Returns the dynamic shared memory of a kernel.
pub(super) fn shared_bytes_of(kernel: &str) -> Option<u32> {
    let of_files = [
        prefill::shared_bytes_of,
        decode::shared_bytes_of,
        expert_ring::shared_bytes_of,
        experts_few::shared_bytes_of,
        few_rows::shared_bytes_of,
        many_rows::shared_bytes_of,
        expert_products::shared_bytes_of,
        latent::shared_bytes_of,
        expanded::shared_bytes_of,
    ];
    of_files.iter().find_map(|of_file| of_file(kernel))
}

/// Launches a kernel by name with these arguments, in single blocks of threads or in clusters. The caller has
/// checked the arguments.
macro_rules! launch {
    ($card:expr, $kernel:expr, $grid:expr, &$first:expr, $($argument:expr),+ $(,)?) => {
        launch!($card, $kernel, $grid, 1, &$first, $($argument),+)
    };
    ($card:expr, $kernel:expr, $grid:expr, $cluster:expr, $($argument:expr),+ $(,)?) => {{
        // JUSTIFICATION: GPU code is called by address, outside of Rust's checks.
        // SAFETY: the arguments have the types and order of the kernel's signature in kernels/cu, and live
        // until the end of this call. The earlier checks bound its reads and writes to the views. Its output
        // is borrowed mutably, and later work of the same stream waits for it.
        unsafe {
            $card.launch(
                $kernel,
                $grid,
                $cluster,
                &mut [$(std::ptr::from_ref($argument).cast_mut().cast::<std::ffi::c_void>()),+],
            )
        }
    }};
}
use launch;
