//! Times work on the GPU, recorded like steps.

use device::cuda::CudaError;

use super::decoder::{Decoder, Pass};
use super::plan::Dims;
use super::tools::Tools;

/// The number of runs. The fastest one counts.
const N_TIMES: usize = 5;

/// Returns the time of a whole decode step in milliseconds, recorded like served steps.
pub(super) fn time_step(tools: &mut Tools, dims: Dims) -> Result<f64, CudaError> {
    tools.pass(dims, &[], |decoder, pass| {
        // The first run loads code, which cannot be recorded, so it comes before the recording.
        decoder.forward(pass, |_| Ok(()))?;
        let card = pass.card;
        let mut graph = card.record(|| decoder.forward(pass, |_| Ok(())))?;
        fastest(|| {
            let start = card.mark()?;
            graph.launch()?;
            start.ms_until(&card.mark()?)
        })
    })
}

/// Returns the time of `work` in milliseconds, in a pass of this size, recorded like a step.
pub(super) fn time_recorded(
    tools: &mut Tools,
    dims: Dims,
    work: impl Fn(&Decoder, &mut Pass<'_>) -> Result<(), CudaError>,
) -> Result<f64, CudaError> {
    tools.pass(dims, &[], |decoder, pass| {
        work(decoder, pass)?;
        let card = pass.card;
        let mut graph = card.record(|| work(decoder, pass))?;
        fastest(|| {
            let start = card.mark()?;
            graph.launch()?;
            let end = card.mark()?;
            start.ms_until(&end)
        })
    })
}

/// Returns the shortest time of some runs. The first run does not count, because it may load code.
pub(super) fn fastest(mut time: impl FnMut() -> Result<f32, CudaError>) -> Result<f64, CudaError> {
    time()?;
    let mut least = f32::INFINITY;
    for _ in 0..N_TIMES {
        least = least.min(time()?);
    }
    Ok(f64::from(least))
}
