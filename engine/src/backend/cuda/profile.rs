//! Measures each kind of work of a decode step separately. Not used while serving.

use device::cuda::CudaError;
use kernels::cuda::FusedKernel;
use serde::Serialize;

use super::decoder::{Decoder, Pass};
use super::layer::{NormState, form, heads_form};
use super::plan::Dims;
use super::timing::time_recorded;
use super::tools::Tools;
use super::weights::Linear;

/// The times of a decode step's parts: each kind of work of all layers, recorded and run like a step.
#[derive(Clone, Debug, Serialize)]
pub struct DecodeProfile {
    pub rows: usize,
    pub length: usize,
    /// The names of the parts, and their times in milliseconds.
    pub parts: Vec<(&'static str, f64)>,
    pub step_ms: f64,
}

type ProfiledPart = (&'static str, fn(&Decoder, &mut Pass<'_>) -> Result<(), CudaError>);

pub(super) fn profile_decode(
    tools: &mut Tools,
    rows: usize,
    length: usize,
) -> Result<DecodeProfile, CudaError> {
    let dims = Dims::of_decodes(tools.memory.layout().groups.len(), rows, length);
    tools.write_words(&dims.measured_words(length, tools.memory.n_blocks()))?;
    let parts: [ProfiledPart; 6] = [
        ("products of q, k and v, rope, KV written", Decoder::all_projected),
        ("attention", Decoder::all_attention),
        ("product of o, residual, norm", Decoder::all_attended_given),
        ("products of gate and up, gate", Decoder::all_gated),
        ("product of down, residual, norm", Decoder::all_gated_given),
        ("output layer and argmax", |decoder, pass| decoder.draw(pass)),
    ];
    let mut times = Vec::with_capacity(parts.len());
    for (name, work) in parts {
        times.push((name, time_recorded(tools, dims, work)?));
    }
    let step_ms = time_recorded(tools, dims, |decoder, pass| decoder.forward(pass, |_| Ok(())))?;
    Ok(DecodeProfile { rows, length, parts: times, step_ms })
}

impl Decoder {
    fn all_attention(&self, pass: &mut Pass<'_>) -> Result<(), CudaError> {
        self.places.iter().try_for_each(|place| self.attend_decodes(pass, *place))
    }

    fn all_projected(&self, pass: &mut Pass<'_>) -> Result<(), CudaError> {
        let mut layers = self.weights.layers.iter().zip(&self.places);
        layers.try_for_each(|(layer, place)| {
            let down = layer.dense().map(|dense| &dense.down);
            let normed = self.normed_for(pass, down, heads_form(pass, layer));
            self.project(pass, layer, *place, normed)
        })
    }

    fn all_attended_given(&self, pass: &mut Pass<'_>) -> Result<(), CudaError> {
        self.weights.layers.iter().try_for_each(|layer| self.add_attention(pass, layer).map(drop))
    }

    fn all_gated(&self, pass: &mut Pass<'_>) -> Result<(), CudaError> {
        self.weights.layers.iter().try_for_each(|layer| {
            let gate_up = layer.dense().and_then(|dense| form(pass, &dense.gate_up));
            let normed = match self.norms_with_choice(pass, layer) {
                true => NormState::Given,
                false => self.normed_for(pass, Some(&layer.o), gate_up),
            };
            self.gate(pass, layer, normed)
        })
    }

    fn all_gated_given(&self, pass: &mut Pass<'_>) -> Result<(), CudaError> {
        let layers = &self.weights.layers;
        let mut nth = 0..layers.len();
        nth.try_for_each(|nth| self.add_feed_forward(pass, &layers[nth], layers.get(nth + 1)).map(drop))
    }

    /// Returns the state of the normed rows before `product`, if the product `before` wrote them.
    fn normed_for(
        &self,
        pass: &Pass<'_>,
        before: Option<&Linear>,
        product: Option<FusedKernel>,
    ) -> NormState {
        match (before.and_then(|before| form(pass, before)), product) {
            (Some(form), Some(_)) if pass.ranks.is_alone() => {
                NormState::Pending { n_parts: form.parts(self.sizes.hidden) }
            }
            _ => NormState::Whole,
        }
    }
}
