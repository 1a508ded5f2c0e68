//! The output of a product, and the work after it.

use std::ops::Range;

use device::cuda::{Bf16, CudaError, View, ViewMut};

use super::super::ComputeCard;
use super::super::ops::{Ending, NormedRows};

/// The output of a product, and the work after it.
#[derive(Debug)]
pub struct ProductOutput<'a> {
    pub y: OutputRows<'a>,
    pub next: Option<Epilogue<'a>>,
}

/// The output of a product.
#[derive(Debug)]
pub enum OutputRows<'a> {
    Narrow(ViewMut<'a, Bf16>),
    Wide(ViewMut<'a, f32>),
}

/// The work after a product, which a kernel for many rows may include.
#[derive(Debug)]
pub enum Epilogue<'a> {
    /// The product has the columns of a gate and then of up: `silu(gate) * up`.
    Gate(ViewMut<'a, Bf16>),
    Norm(NormedRows<'a>),
}

impl OutputRows<'_> {
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Narrow(view) => view.len(),
            Self::Wide(view) => view.len(),
        }
    }

    pub(super) fn is_wide(&self) -> bool {
        matches!(self, Self::Wide(_))
    }

    pub(super) fn reborrow(&mut self) -> OutputRows<'_> {
        match self {
            Self::Narrow(view) => OutputRows::Narrow(view.reborrow()),
            Self::Wide(view) => OutputRows::Wide(view.reborrow()),
        }
    }

    pub(super) fn slice(&mut self, range: Range<usize>) -> OutputRows<'_> {
        match self {
            Self::Narrow(view) => OutputRows::Narrow(view.reborrow().slice(range)),
            Self::Wide(view) => OutputRows::Wide(view.reborrow().slice(range)),
        }
    }

    pub(super) fn address(&self) -> u64 {
        match self {
            Self::Narrow(view) => view.address(),
            Self::Wide(view) => view.address(),
        }
    }
}

impl<'a> From<OutputRows<'a>> for Ending<'a> {
    fn from(rows: OutputRows<'a>) -> Self {
        match rows {
            OutputRows::Narrow(y) => Self::Sums(y),
            OutputRows::Wide(y) => Self::Wide(y),
        }
    }
}

impl Epilogue<'_> {
    /// Runs the work in a separate kernel, for rows of `n` numbers.
    pub(super) fn follow(
        self,
        card: &ComputeCard,
        product: View<'_, Bf16>,
        n: usize,
    ) -> Result<(), CudaError> {
        match self {
            Self::Gate(gated) => card.silu_mul(gated, product, n / 2),
            Self::Norm(NormedRows { residual, out, weight, epsilon }) => {
                card.add_rms_norm(out, residual, product, weight, epsilon)
            }
        }
    }

    pub(super) fn reborrow(&mut self) -> Epilogue<'_> {
        match self {
            Self::Gate(gated) => Epilogue::Gate(gated.reborrow()),
            Self::Norm(NormedRows { residual, out, weight, epsilon }) => Epilogue::Norm(NormedRows {
                residual: residual.reborrow(),
                out: out.reborrow(),
                weight: *weight,
                epsilon: *epsilon,
            }),
        }
    }
}
