//! The factors of a product in the format that its method takes: FP8 matrices that are widened to bf16, and rows
//! that are rounded to FP8.

use device::cuda::error::ensure;
use device::cuda::{Bf16, Buffer, CudaError, View};

use super::super::ComputeCard;
use super::super::ops::{Fp8Rows, FusedKernel, ManyFp8Form, ManyRows, QuantizedRows, WeightMatrix};
use super::{Factors, Method};

/// Memory for the factors of products with an FP8 matrix.
#[derive(Debug, Default)]
pub(super) struct Room {
    /// The matrix in bf16; `None` before [`super::Products::make_room`].
    pub(super) widened: Option<Buffer<Bf16>>,
    /// The rounded rows; `None` if rows are not rounded.
    pub(super) rounded: Option<RoundedRoom>,
}

/// Memory for rounded rows: in FP8 with scales, or in bf16.
#[derive(Debug)]
pub(super) struct RoundedRoom {
    bytes: Buffer<u8>,
    scales: Buffer<f32>,
}

/// The factors of a product, in the format that its method takes.
pub(super) enum Prepared<'a> {
    Plain(Factors<'a>),
    Fp8 { form: ManyFp8Form, w: Fp8Rows<'a>, x: QuantizedRows<'a>, k: usize },
}

impl Prepared<'_> {
    /// Returns the number of the matrix's rows.
    pub(super) fn n(&self) -> usize {
        match self {
            Self::Plain(Factors { w, k, .. }) => w.n_rows(*k),
            Self::Fp8 { w, k, .. } => w.n_rows(*k),
        }
    }

    /// Multiplies by our kernels for many rows.
    pub(super) fn multiply_many(self, card: &ComputeCard, rows: ManyRows<'_>) -> Result<(), CudaError> {
        match self {
            Self::Plain(Factors { w, x, k }) => match w.in_bf16() {
                Some(w) => card.multiply_many(w, x, k, rows),
                None => ensure("product", false, "a matrix in FP8 that was not widened"),
            },
            Self::Fp8 { form, w, x, k } => card.multiply_many_fp8(form, w, x, k, rows),
        }
    }
}

impl Room {
    /// Widens a matrix to bf16 in the memory for it. Fails if there is none.
    pub(super) fn widen(
        &mut self,
        card: &ComputeCard,
        w: Fp8Rows<'_>,
        k: usize,
    ) -> Result<View<'_, Bf16>, CudaError> {
        widen(card, self.widened.as_mut(), w, k)
    }

    /// Returns the factors in the format that this method takes.
    pub(super) fn prepare<'a>(
        &'a mut self,
        card: &ComputeCard,
        way: &Method,
        factors: Factors<'a>,
    ) -> Result<Prepared<'a>, CudaError> {
        let Factors { w: WeightMatrix::Fp8(w), x, k } = factors else { return Ok(Prepared::Plain(factors)) };
        let Self { widened, rounded } = self;
        let x = match (rounded, way) {
            (Some(room), Method::ManyFp8(form)) => {
                return Ok(Prepared::Fp8 { form: *form, w, x: room.in_fp8(card, x, k)?, k });
            }
            (Some(room), _) => room.in_bf16(card, x, k)?,
            (None, _) => x,
        };
        let w = match way {
            Method::Own(FusedKernel::Few(_)) => factors.w,
            _ => WeightMatrix::Widened(widen(card, widened.as_mut(), w, k)?),
        };
        Ok(Prepared::Plain(Factors { w, x, k }))
    }
}

impl RoundedRoom {
    /// Allocates memory for `n_rows` rows of `k` numbers.
    pub(super) fn new(card: &ComputeCard, n_rows: usize, k: usize) -> Result<Self, CudaError> {
        let bytes = card.buffer(bytes_of(n_rows, k))?;
        Ok(Self { bytes, scales: card.buffer(QuantizedRows::n_scales(n_rows, k))? })
    }

    /// Returns the bytes that [`new`](Self::new) allocates.
    pub(super) fn n_bytes(n_rows: usize, k: usize) -> usize {
        bytes_of(n_rows, k) + QuantizedRows::n_scales(n_rows, k) * size_of::<f32>()
    }

    pub(super) fn in_bf16(
        &mut self,
        card: &ComputeCard,
        x: View<'_, Bf16>,
        k: usize,
    ) -> Result<View<'_, Bf16>, CudaError> {
        let n_bytes = x.len() * size_of::<Bf16>();
        self.check(n_bytes)?;
        card.round_rows(self.bytes.view_mut().slice(0..n_bytes).halves(), x, k)?;
        Ok(self.bytes.slice(0..n_bytes).halves())
    }

    fn in_fp8(
        &mut self,
        card: &ComputeCard,
        x: View<'_, Bf16>,
        k: usize,
    ) -> Result<QuantizedRows<'_>, CudaError> {
        let n_rows = x.len() / k;
        let (n_bytes, n_scales) = (n_rows * Fp8Rows::width(k), QuantizedRows::n_scales(n_rows, k));
        self.check(n_bytes)?;
        let Self { bytes, scales } = self;
        card.quantize_rows(bytes.view_mut().slice(0..n_bytes), scales.view_mut().slice(0..n_scales), x, k)?;
        Ok(QuantizedRows { numbers: bytes.slice(0..n_bytes), scales: scales.slice(0..n_scales) })
    }

    fn check(&self, n_bytes: usize) -> Result<(), CudaError> {
        ensure("product", n_bytes <= self.bytes.len(), "no room for rounded rows")
    }
}

/// Returns the bytes of rounded rows: in bf16, or in FP8 with padding.
fn bytes_of(n_rows: usize, k: usize) -> usize {
    n_rows * Fp8Rows::width(k) * size_of::<Bf16>()
}

/// Widens the matrix to bf16 in the memory for it. Fails if there is none.
fn widen<'a>(
    card: &ComputeCard,
    room: Option<&'a mut Buffer<Bf16>>,
    w: Fp8Rows<'_>,
    k: usize,
) -> Result<View<'a, Bf16>, CudaError> {
    let n_numbers = w.n_rows(k) * k;
    let room = room.filter(|room| room.len() >= n_numbers);
    let room =
        room.ok_or(CudaError::Argument { kernel: "product", wrong: "no room to widen a matrix in FP8" })?;
    card.widen_fp8(room.view_mut().slice(0..n_numbers), w, k)?;
    Ok(room.slice(0..n_numbers))
}
