//! Layers of experts whose matrices may have to be widened first.

use device::cuda::CudaError;

use super::super::ComputeCard;
use super::super::ops::{
    ExpertActivations, ExpertInput, ExpertLayer, ExpertSpace, ExpertSums, ExpertsForm, WeightMatrix,
};
use super::Products;

impl Products {
    /// Like [`ComputeCard::gate_experts`]. Tiles of rows that are not rounded multiply a matrix that is widened to bf16.
    pub fn gate_experts(
        &mut self,
        card: &ComputeCard,
        form: ExpertsForm,
        layer: ExpertLayer<'_>,
        input: ExpertInput<'_>,
        space: &mut ExpertSpace,
    ) -> Result<(), CudaError> {
        let gate_up = self.for_experts(card, form, layer.gate_up, layer.sizes.hidden, space.activations())?;
        card.gate_experts(form, ExpertLayer { gate_up, ..layer }, input, space)
    }

    /// Like [`ComputeCard::sum_experts`].
    pub fn sum_experts(
        &mut self,
        card: &ComputeCard,
        form: ExpertsForm,
        layer: ExpertLayer<'_>,
        to: ExpertSums<'_>,
        space: &mut ExpertSpace,
    ) -> Result<(), CudaError> {
        let down = self.for_experts(card, form, layer.down, layer.sizes.width, space.activations())?;
        card.sum_experts(form, ExpertLayer { down, ..layer }, to, space)
    }

    /// Returns the matrices in the format that this form takes.
    fn for_experts<'a>(
        &'a mut self,
        card: &ComputeCard,
        form: ExpertsForm,
        w: WeightMatrix<'a>,
        k: usize,
        activations: ExpertActivations,
    ) -> Result<WeightMatrix<'a>, CudaError> {
        match (w, form, activations) {
            (WeightMatrix::Fp8(rows), ExpertsForm::Tiles, ExpertActivations::Full) => {
                Ok(WeightMatrix::Widened(self.room.widen(card, rows, k)?))
            }
            _ => Ok(w),
        }
    }
}
