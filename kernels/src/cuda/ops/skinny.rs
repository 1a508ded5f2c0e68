//! Products of up to 8 rows with a large matrix, bound by reading the matrix; for every GPU.

use super::endings::{CheckedProduct, Ending, FusedKernel, FusedProduct, KernelNames, kernel_names};
use super::{ComputeCard, CudaError, ensure, launch};
use device::cuda::card::{Grid, grid};

/// The maximum number of rows in one pass over the matrix.
pub const SKINNY_ROWS_MAX: usize = 8;
/// Half of the matrix rows of a block of threads, as in `skinny.cu`.
pub(super) const UNIT: usize = 8;

/// A division of the work. The fastest one depends on the matrix and the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SkinnyForm {
    /// The form's name in the kernel names: the number of warps that multiply, and the number of loads in
    /// flight.
    pub name: &'static str,
    warps: u32,
}

/// All forms; the first is fast for most matrices (`docs/measurements`).
pub const SKINNY_FORMS: &[SkinnyForm] = &[
    SkinnyForm { name: "16x2", warps: 16 },
    SkinnyForm { name: "8x4", warps: 8 },
    SkinnyForm { name: "4x4", warps: 4 },
    SkinnyForm { name: "8x2", warps: 8 },
];
/// The kernel names, in the order of [`SKINNY_FORMS`].
const NAMES: [KernelNames; 4] = [
    kernel_names!("skinny", "16x2"),
    kernel_names!("skinny", "8x4"),
    kernel_names!("skinny", "4x4"),
    kernel_names!("skinny", "8x2"),
];

impl ComputeCard {
    /// Computes [`ComputeCard::multiply_own`] for up to 8 rows with a bf16 matrix.
    pub(super) fn skinny(
        &self,
        form: SkinnyForm,
        product: FusedProduct<'_>,
        ending: Ending<'_>,
    ) -> Result<(), CudaError> {
        let names = SKINNY_FORMS.iter().zip(&NAMES).find(|(one, _)| **one == form).map(|(_, names)| names);
        let kernel = names.expect("every form is in SKINNY_FORMS").of(&ending);
        let checked = product.check(self, kernel, FusedKernel::Skinny(form), &ending)?;
        let CheckedProduct { sizes, pending_norm, ending, n_parts } = checked;
        ensure(kernel, sizes.n_rows as usize <= SKINNY_ROWS_MAX, "more than 8 rows")?;
        let Some(w) = product.w.in_bf16() else {
            return ensure(kernel, false, "a matrix in FP8 that was not widened");
        };
        if sizes.n == 0 || sizes.n_rows == 0 {
            return Ok(());
        }
        // There is one more warp, which does the work after the product.
        let config = Grid { waits: product.is_widened(), ..grid(n_parts, 1, (form.warps + 1) * 32) };
        launch!(self, kernel, config, &ending, &pending_norm, &w.address(), &product.x.address(), &sizes)
    }
}
