//! The choice of experts for up to eight rows in one kernel, with the addition and the norm before it (`experts_few.cu`).

use super::expert_space::{ExpertSpace, ExpertsForm, SCORE_ROWS};
use super::experts::{ExpertInput, ExpertLayer};
use super::fp8::QuantizedShape;
use super::rows::{NormedRows, check_norm};
use super::{Bf16, ComputeCard, CudaError, ensure, launch, number, rows_of};
use device::cuda::card::Grid;

const KERNEL: &str = "choose_few";

/// The numbers of blocks, which form one cluster, of threads, and of numbers between rows in shared memory, as in
/// `experts_few.cu`.
const BLOCKS: usize = 8;
const THREADS: u32 = 512;
const ROW_GAP: usize = 32;
/// The greatest width of a row.
const WIDTH_MAX: usize = 8192;

/// The fields of FewRows in experts_few.cu, in the same order. An address of zero is null.
#[derive(Default)]
#[repr(C)]
struct FewRows {
    x: u64,
    residual: u64,
    given: u64,
    weight: u64,
    quantized: u64,
    scales: u64,
    epsilon: f32,
}

impl ComputeCard {
    /// Returns whether [`gate_experts`](Self::gate_experts) adds and norms this number of rows.
    pub fn norms_with_choice(
        &self,
        form: ExpertsForm,
        layer: ExpertLayer<'_>,
        space: &ExpertSpace,
        n_rows: usize,
    ) -> bool {
        let are_few = n_rows <= SCORE_ROWS && layer.sizes.hidden <= WIDTH_MAX;
        let is_entered = self.has_ring_for(layer.gate_up, space);
        form == ExpertsForm::Units && are_few && is_entered && self.has(KERNEL)
    }

    /// Adds and norms the rows, if they are not normed. Chooses the experts of each row and places the choices. Returns
    /// the address of the rows that enter the first product.
    pub(super) fn choose_few(
        &self,
        layer: ExpertLayer<'_>,
        input: ExpertInput<'_>,
        space: &mut ExpertSpace,
    ) -> Result<u64, CudaError> {
        let hidden = layer.sizes.hidden;
        let (n_rows, mut rows) = match input {
            ExpertInput::Normed(x) => {
                self.check_places(KERNEL, &[&x], &[])?;
                let n_rows = rows_of(KERNEL, x.len(), hidden)?;
                (n_rows, FewRows { x: x.address(), ..FewRows::default() })
            }
            ExpertInput::Given { given, rows: NormedRows { out, residual, weight, epsilon } } => {
                self.check_places(KERNEL, &[&given, &out, &residual, &weight], &[])?;
                let are_alike = given.len() == out.len() && given.len() == residual.len();
                ensure(KERNEL, are_alike && weight.len() == hidden, "rows or a norm of different lengths")?;
                let n_rows = check_norm(KERNEL, out.len(), hidden)?;
                let (x, residual) = (out.address(), residual.address());
                let (given, weight) = (given.address(), weight.address());
                (n_rows, FewRows { x, residual, given, weight, epsilon, ..FewRows::default() })
            }
        };
        let mut entering = rows.x;
        if layer.gate_up.fp8_scales().is_some()
            && let Some(quantized) = &mut space.quantized
        {
            (rows.quantized, rows.scales) =
                (quantized.x.view_mut().address(), quantized.x_scales.view_mut().address());
            entering = rows.quantized;
        }
        let shared_bytes = number(KERNEL, n_rows * (hidden + ROW_GAP) * size_of::<Bf16>())?;
        let config = Grid::of((BLOCKS, 1, 1), THREADS, shared_bytes);
        let (weights, to) = (space.weights.view_mut().address(), space.place_addresses());
        let (places, router, correction) =
            (space.places_shape(1, n_rows)?, layer.router.address(), layer.correction());
        let (shape, quantized) =
            (layer.router_shape(KERNEL, n_rows)?, QuantizedShape::of(KERNEL, n_rows, hidden)?);
        launch!(
            self,
            KERNEL,
            config,
            BLOCKS,
            &rows,
            &weights,
            &to,
            &places,
            &router,
            &correction,
            &shape,
            &quantized
        )?;
        Ok(entering)
    }
}

/// Returns the dynamic shared memory of the kernel of this file.
pub(in crate::cuda) fn shared_bytes_of(kernel: &str) -> Option<u32> {
    (kernel == KERNEL).then_some((SCORE_ROWS * (WIDTH_MAX + ROW_GAP) * size_of::<Bf16>()) as u32)
}
