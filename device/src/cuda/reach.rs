//! Access of one GPU to memory of another GPU that the driver's allocator has given out.

use cudarc::driver::{CudaContext, sys};

use super::CudaError;

/// Lets kernels and copies of one GPU access another GPU's memory directly.
pub fn reach(from: &CudaContext, to: &CudaContext) -> Result<(), CudaError> {
    let not_reachable = CudaError::NotReachable { from: from.ordinal(), to: to.ordinal() };
    from.bind_to_thread().map_err(CudaError::during("use the GPU from this thread"))?;
    let mut can = 0;
    // JUSTIFICATION: cudarc has no safe call for this.
    // SAFETY: both are GPUs of this machine, and the pointer is to a number that outlives the call.
    unsafe { sys::cuDeviceCanAccessPeer(&raw mut can, from.cu_device(), to.cu_device()) }
        .result()
        .map_err(CudaError::during("ask whether two GPUs reach each other"))?;
    if can == 0 {
        return Err(not_reachable);
    }
    // JUSTIFICATION: cudarc has no safe call for this.
    // SAFETY: the context is alive, and it is the GPU's primary context, which lives as long as the process uses the
    // GPU.
    match unsafe { sys::cuCtxEnablePeerAccess(to.cu_ctx(), 0) } {
        sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(()),
        outcome => outcome.result().map_err(CudaError::during("make one GPU's memory reachable for another")),
    }
}
