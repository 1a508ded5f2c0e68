//! Products of few rows by our own kernels, which also do the work after the product. A separate kernel for
//! that work would leave the memory idle for one or two microseconds.

use super::few_rows::FewRowsForm;
use super::fp8::{check_halves, check_rows};
use super::skinny::SkinnyForm;
use super::{
    BLOCK_TOKENS, Bf16, ComputeCard, CudaError, Element, Fp8Rows, Fp8Scales, KvNumber, RopeWriteKv, View,
    ViewMut, ensure, number, rows_of, two_in_one,
};
use crate::cuda::peers::{INBOXES_WORDS, Peers};

/// The kernel form for a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FusedKernel {
    Skinny(SkinnyForm),
    Few(FewRowsForm),
}

/// A weight matrix, in one of the formats that kernels read.
#[derive(Clone, Copy, Debug)]
pub enum WeightMatrix<'a> {
    Bf16(View<'a, Bf16>),
    Fp8(Fp8Rows<'a>),
    /// A bf16 matrix that the previous kernel writes: it must not be read before that kernel has ended.
    Widened(View<'a, Bf16>),
}

/// Few rows of `k` numbers, and the matrix that multiplies them.
#[derive(Clone, Copy, Debug)]
pub struct FusedProduct<'a> {
    pub w: WeightMatrix<'a>,
    pub x: View<'a, Bf16>,
    pub k: usize,
    /// The pending norm of the rows, if any.
    pub pending_norm: Option<PendingNorm<'a>>,
}

/// The work after a product.
#[derive(Debug)]
pub enum Ending<'a> {
    /// No further work: the output is a number for each pair of rows.
    Sums(ViewMut<'a, Bf16>),
    /// No further work, with the output in f32, for logits: comparing them needs the precision.
    Wide(ViewMut<'a, f32>),
    /// The matrix has the rows of gate, then of up: `silu(gate) * up`.
    Gated(ViewMut<'a, Bf16>),
    Added(AddedRows<'a>),
    /// Adds up the partial sums of several ranks, and then does the work of `Added`. All ranks run this
    /// product with the same sizes and form.
    Joined(AddedRows<'a>, &'a mut Peers),
    Heads(HeadsRows<'a>),
}

/// Adds the sums to the residual and starts its norm. The rest of the norm is a [`PendingNorm`].
#[derive(Debug)]
pub struct AddedRows<'a> {
    pub residual: ViewMut<'a, Bf16>,
    /// The residual times the norm's weights.
    pub out: ViewMut<'a, Bf16>,
    pub weight: View<'a, Bf16>,
    /// The partial sums of squares of each row: [`FusedKernel::parts`] for each row.
    pub squares: ViewMut<'a, f32>,
}

/// The work after the product of q, k and v, whose sums are all heads. The kernel adds the bias, applies
/// norms and rotation, and writes K and V into pages, like [`ComputeCard::rope_write_kv`]. That method reads
/// k and v from `qkv`; this ending writes only q to `qkv`.
#[derive(Debug)]
pub struct HeadsRows<'a> {
    pub rope: RopeWriteKv<'a>,
    pub bias: Option<View<'a, Bf16>>,
}

/// The part of a norm that [`AddedRows`] leaves to the next product: one factor for each row, by which the sums of that
/// product are multiplied.
#[derive(Clone, Copy, Debug)]
pub struct PendingNorm<'a> {
    /// The partial sums of squares, the same number for each row.
    pub squares: View<'a, f32>,
    pub epsilon: f32,
}

/// The size of a product: `n_rows` rows, each with a number for each of the matrix's `n` rows.
#[derive(Clone, Copy, Debug)]
struct OutputSize {
    n: usize,
    n_rows: usize,
}

/// A product with checked arguments, in the form that kernels take.
pub(super) struct CheckedProduct {
    pub(super) sizes: Sizes,
    pub(super) pending_norm: PendingNormArgs,
    pub(super) ending: EndingWords,
    /// The number of parts of the matrix, each summed by one block or cluster.
    pub(super) n_parts: usize,
}

/// The fields of ProductShape in endings.cuh, in the same order. The struct is copied to the GPU as bytes.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Sizes {
    pub(super) n: u32,
    pub(super) k: u32,
    pub(super) n_rows: u32,
}

/// The fields of PendingNormArgs in endings.cuh, in the same order.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct PendingNormArgs {
    squares: u64,
    n_parts: u32,
    width: u32,
    epsilon: f32,
}

/// The fields of an ending in endings.cuh, in words of 8 bytes. A kernel takes as many words as its ending
/// has.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct EndingWords([u64; ADDED_WORDS + INBOXES_WORDS]);

/// The number of words of the `Added` ending.
const ADDED_WORDS: usize = 5;

/// The names of a kernel by its ending.
pub(super) struct KernelNames {
    pub(super) sums: &'static str,
    pub(super) wide: &'static str,
    pub(super) gated: &'static str,
    pub(super) added: &'static str,
    pub(super) joined: &'static str,
    pub(super) heads: &'static str,
}

/// Makes the names of a kernel family for one form.
macro_rules! kernel_names {
    ($family:literal, $form:literal) => {
        KernelNames {
            sums: concat!($family, "_", $form),
            wide: concat!($family, "_wide_", $form),
            gated: concat!($family, "_gated_", $form),
            added: concat!($family, "_added_", $form),
            joined: concat!($family, "_joined_", $form),
            heads: concat!($family, "_heads_", $form),
        }
    };
}
pub(super) use kernel_names;

impl FusedKernel {
    /// Returns the number of parts of a row of `n` numbers. Each part has its own sum of squares.
    pub fn parts(self, n: usize) -> usize {
        n.div_ceil(2 * self.unit())
    }

    /// Returns whether a block sums whole heads, which their norms need.
    pub fn norms_heads(self) -> bool {
        matches!(self, Self::Few(_))
    }

    /// Returns half the number of matrix rows in a part.
    fn unit(self) -> usize {
        match self {
            Self::Skinny(_) => super::skinny::UNIT,
            Self::Few(_) => super::few_rows::UNIT,
        }
    }
}

impl<'a> WeightMatrix<'a> {
    /// Returns the number of rows of `k` numbers.
    pub fn n_rows(self, k: usize) -> usize {
        match self {
            Self::Bf16(numbers) | Self::Widened(numbers) => numbers.len() / k.max(1),
            Self::Fp8(rows) => rows.n_rows(k),
        }
    }

    /// Returns the matrix's numbers; `None` if they are not in bf16.
    pub(in crate::cuda) fn in_bf16(self) -> Option<View<'a, Bf16>> {
        match self {
            Self::Bf16(numbers) | Self::Widened(numbers) => Some(numbers),
            Self::Fp8(_) => None,
        }
    }

    /// Returns which weights share a scale; `None` if they are in bf16.
    pub fn fp8_scales(self) -> Option<Fp8Scales> {
        match self {
            Self::Bf16(_) | Self::Widened(_) => None,
            Self::Fp8(rows) => Some(rows.scaling),
        }
    }

    /// Returns the memory as 16-bit numbers.
    pub fn halves(self) -> View<'a, Bf16> {
        match self {
            Self::Bf16(numbers) | Self::Widened(numbers) => numbers,
            Self::Fp8(rows) => rows.numbers.halves(),
        }
    }
}

impl<'a> FusedProduct<'a> {
    /// Makes a product of rows without a pending norm.
    pub fn plain(w: WeightMatrix<'a>, x: View<'a, Bf16>, k: usize) -> Self {
        Self { w, x, k, pending_norm: None }
    }

    /// Returns whether the previous kernel writes the weights. If not, weights are loaded before that kernel
    /// has ended.
    pub(super) fn is_widened(&self) -> bool {
        matches!(self.w, WeightMatrix::Widened(_))
    }

    pub(super) fn check(
        &self,
        card: &ComputeCard,
        kernel: &'static str,
        form: FusedKernel,
        ending: &Ending<'_>,
    ) -> Result<CheckedProduct, CudaError> {
        let Self { w, x, k, pending_norm } = *self;
        ensure(kernel, k > 0 && k.is_multiple_of(8), "rows whose width is not a multiple of 8")?;
        let n = match w {
            WeightMatrix::Bf16(w) | WeightMatrix::Widened(w) => {
                card.check_places(kernel, &[&w, &x], &[])?;
                rows_of(kernel, w.len(), k)?
            }
            WeightMatrix::Fp8(w) => {
                card.check_places(kernel, &[&w.numbers, &x], &[&w.scales])?;
                let n = check_rows(kernel, w, k)?;
                if matches!(ending, Ending::Gated(_)) {
                    check_halves(kernel, w, n)?;
                }
                n
            }
        };
        let n_rows = rows_of(kernel, x.len(), k)?;
        ending.check(card, kernel, form, OutputSize { n, n_rows })?;
        let pending_norm = match pending_norm {
            None => PendingNormArgs::default(),
            Some(pending_norm) => pending_norm.check(card, kernel, k, n_rows)?,
        };
        let sizes = Sizes { n: number(kernel, n)?, k: number(kernel, k)?, n_rows: number(kernel, n_rows)? };
        let n_parts = match ending {
            Ending::Gated(_) => (n / 2).div_ceil(form.unit()),
            Ending::Sums(_) | Ending::Wide(_) | Ending::Added(_) | Ending::Joined(..) | Ending::Heads(_) => {
                form.parts(n)
            }
        };
        Ok(CheckedProduct { sizes, pending_norm, ending: ending.words(kernel, n_parts)?, n_parts })
    }
}

impl PendingNorm<'_> {
    fn check(
        &self,
        card: &ComputeCard,
        kernel: &'static str,
        k: usize,
        n_rows: usize,
    ) -> Result<PendingNormArgs, CudaError> {
        card.check_places(kernel, &[], &[&self.squares])?;
        let is_whole = n_rows == 0 || (!self.squares.is_empty() && self.squares.len().is_multiple_of(n_rows));
        ensure(kernel, is_whole, "different numbers of sums of squares for the rows")?;
        let n_parts = number(kernel, self.squares.len() / n_rows.max(1))?;
        let width = number(kernel, k)?;
        Ok(PendingNormArgs { squares: self.squares.address(), n_parts, width, epsilon: self.epsilon })
    }
}

impl Ending<'_> {
    fn check(
        &self,
        card: &ComputeCard,
        kernel: &'static str,
        form: FusedKernel,
        size: OutputSize,
    ) -> Result<(), CudaError> {
        let OutputSize { n, n_rows } = size;
        match self {
            Self::Sums(y) => check_sums(card, kernel, y, n * n_rows),
            Self::Wide(y) => check_sums(card, kernel, y, n * n_rows),
            Self::Gated(y) => {
                card.check_places(kernel, &[y], &[])?;
                ensure(kernel, n.is_multiple_of(16), "a gate whose width is not a multiple of 8")?;
                ensure(kernel, y.len() == n / 2 * n_rows, "an output of the wrong size")
            }
            Self::Added(added) => added.check(card, kernel, size, form.parts(n)),
            Self::Joined(added, peers) => {
                peers.check_thrown(card, kernel, size.n_rows, size.n)?;
                added.check(card, kernel, size, form.parts(n))
            }
            Self::Heads(heads) => heads.check(card, kernel, size, form),
        }
    }

    fn words(&self, kernel: &'static str, n_parts: usize) -> Result<EndingWords, CudaError> {
        let mut words = EndingWords::default();
        match self {
            Self::Sums(y) | Self::Gated(y) => words.0[0] = y.address(),
            Self::Wide(y) => words.0[0] = y.address(),
            Self::Added(added) => words.begin(&added.words(kernel, n_parts)?),
            Self::Joined(added, peers) => {
                words.begin(&added.words(kernel, n_parts)?);
                words.0[ADDED_WORDS..].copy_from_slice(&peers.inboxes(kernel)?);
            }
            Self::Heads(heads) => words.begin(&heads.words(kernel)?),
        }
        Ok(words)
    }
}

impl EndingWords {
    fn begin(&mut self, words: &[u64]) {
        self.0[..words.len()].copy_from_slice(words);
    }
}

fn check_sums<T: Element>(
    card: &ComputeCard,
    kernel: &'static str,
    y: &ViewMut<'_, T>,
    n_sums: usize,
) -> Result<(), CudaError> {
    card.check_places(kernel, &[y], &[])?;
    ensure(kernel, y.len() == n_sums, "an output of the wrong size")
}

impl AddedRows<'_> {
    fn check(
        &self,
        card: &ComputeCard,
        kernel: &'static str,
        size: OutputSize,
        n_parts: usize,
    ) -> Result<(), CudaError> {
        let OutputSize { n, n_rows } = size;
        let Self { residual, out, weight, squares } = self;
        card.check_places(kernel, &[residual, out, weight], &[squares])?;
        ensure(kernel, n.is_multiple_of(8), "a residual whose width is not a multiple of 8")?;
        let are_rows = residual.len() == n * n_rows && out.len() == n * n_rows;
        ensure(kernel, are_rows, "a residual or an output of the wrong size")?;
        ensure(kernel, weight.len() == n, "a norm whose width differs from a row's")?;
        ensure(kernel, squares.len() == n_parts * n_rows, "not one sum of squares for each part of a row")
    }

    fn words(&self, kernel: &'static str, n_parts: usize) -> Result<[u64; ADDED_WORDS], CudaError> {
        let Self { residual, out, weight, squares } = self;
        let n_parts = u64::from(number(kernel, n_parts)?);
        Ok([residual.address(), out.address(), weight.address(), squares.address(), n_parts])
    }
}

impl HeadsRows<'_> {
    fn check(
        &self,
        card: &ComputeCard,
        kernel: &'static str,
        size: OutputSize,
        form: FusedKernel,
    ) -> Result<(), CudaError> {
        let OutputSize { n, n_rows } = size;
        let width = self.rope.check(card, kernel, n_rows)?;
        ensure(kernel, width == n, "a matrix whose rows are not those of all heads")?;
        ensure(
            kernel,
            self.rope.norms.is_none() || form.norms_heads(),
            "norms of heads that several blocks divide",
        )?;
        let Some(bias) = &self.bias else { return Ok(()) };
        card.check_places(kernel, &[bias], &[])?;
        ensure(kernel, bias.len() == n, "a bias whose length is not that of all heads")
    }

    fn words(&self, kernel: &'static str) -> Result<[u64; 12], CudaError> {
        let RopeWriteKv { qkv, pages, positions, slots, turns, norms, kv, .. } = &self.rope;
        let [q_norm, k_norm] = norms.map_or([0, 0], |[q, k]| [q.address(), k.address()]);
        let bias = self.bias.map_or(0, |bias| bias.address());
        let n_positions = rows_of(kernel, turns.len(), kv.head_dim / 2)?;
        let of_size = |size: usize| number(kernel, size);
        Ok([
            qkv.address(),
            pages.address(),
            positions.address(),
            slots.address(),
            turns.address(),
            bias,
            q_norm,
            k_norm,
            two_in_one(of_size(self.rope.n_q_heads)?, of_size(kv.n_kv_heads)?),
            two_in_one(of_size(kv.head_dim)?, of_size(kv.n_blocks * BLOCK_TOKENS)?),
            two_in_one(of_size(n_positions)?, u32::from(kv.number == KvNumber::Fp8)),
            u64::from(self.rope.epsilon.to_bits()),
        ])
    }
}

impl KernelNames {
    pub(super) fn of(&self, ending: &Ending<'_>) -> &'static str {
        match ending {
            Ending::Sums(_) => self.sums,
            Ending::Wide(_) => self.wide,
            Ending::Gated(_) => self.gated,
            Ending::Added(_) => self.added,
            Ending::Joined(..) => self.joined,
            Ending::Heads(_) => self.heads,
        }
    }

    pub(super) fn has(&self, kernel: &str) -> bool {
        [self.sums, self.wide, self.gated, self.added, self.joined, self.heads].contains(&kernel)
    }
}

impl ComputeCard {
    /// Computes `x * transpose(w)`, a number for each pair of rows, and the work after the product.
    pub fn multiply_own(
        &self,
        form: FusedKernel,
        product: FusedProduct<'_>,
        ending: Ending<'_>,
    ) -> Result<(), CudaError> {
        match form {
            FusedKernel::Skinny(form) => self.skinny(form, product, ending),
            FusedKernel::Few(form) => self.few_rows(form, product, ending),
        }
    }
}
