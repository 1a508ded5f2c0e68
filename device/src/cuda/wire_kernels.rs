//! The kernels of `wire.cu`, and their shared memory.

use cudarc::driver::sys::{CUdevice_attribute as Attribute, CUfunction_attribute as FunctionAttribute};
use cudarc::driver::{CudaContext, CudaFunction};

use super::{Card, CudaError};

/// Shared memory of one stage for all warps of a block, as in wire.cu.
pub(super) const STAGE_BYTES: usize = 16 * 4096;
/// Shared memory of a block outside its stages.
const TABLE_BYTES: usize = 17 << 10;
/// The maximum number of stages of a block.
const STAGES_MAX: usize = 2;

/// The kernels that move and digest pages, on one GPU.
#[derive(Clone)]
pub(super) struct WireKernels {
    pub(super) pull: CudaFunction,
    pub(super) digest: CudaFunction,
    pub(super) copy: CudaFunction,
    /// The number of pipeline stages of a warp.
    pub(super) n_stages: usize,
}

// === impl WireKernels ===

impl WireKernels {
    pub(super) fn of(card: &Card) -> Result<Self, CudaError> {
        let n_stages = n_stages(card.context())?;
        let [pull, digest, copy] = ["wire_pull", "wire_digest", "wire_copy"].map(|name| card.function(name));
        for kernel in [&pull, &digest, &copy] {
            let attribute = FunctionAttribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            kernel
                .set_attribute(attribute, (n_stages * STAGE_BYTES) as i32)
                .map_err(CudaError::during("reserve shared memory for a kernel"))?;
        }
        Ok(Self { pull, digest, copy, n_stages })
    }
}

/// Returns the number of stages that fit into shared memory: zero before Hopper, because only Hopper's
/// kernels have stages.
fn n_stages(context: &CudaContext) -> Result<usize, CudaError> {
    let attribute = |attribute| {
        context.attribute(attribute).map_err(CudaError::during("ask for the GPU's shared memory"))
    };
    let bytes = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as usize;
    let is_hopper = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)? >= 9;
    let fitting = bytes.saturating_sub(TABLE_BYTES) / STAGE_BYTES;
    Ok(if is_hopper { fitting.clamp(1, STAGES_MAX) } else { 0 })
}
