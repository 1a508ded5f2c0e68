//! Errors of GPU calls. Each text says what failed and what to do.

use cudarc::driver::DriverError;
use cudarc::driver::sys::CUresult;

/// A missing GPU or library, or a failed call.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    #[error(
        "no CUDA driver: libcuda.so.1 is not on this machine (install NVIDIA's driver, or run on the CPU)"
    )]
    NoDriver,
    #[error("a CUDA driver is here, but it finds no GPU (is one visible to this process?)")]
    NoDevice,
    #[error("GPU {ordinal} does not exist: the driver finds {n_cards} GPUs")]
    NoSuchDevice { ordinal: usize, n_cards: usize },
    #[error(
        "GPU {from} cannot reach GPU {to}'s memory, which several GPUs of one model need (nvidia-smi topo -p2p r)"
    )]
    NotReachable { from: usize, to: usize },
    #[error("{parts} need one GPU each, from GPU {first} on, but the driver finds {n_cards} GPUs")]
    TooFewCards { parts: String, first: usize, n_cards: usize },
    #[error("one of the GPUs that share the model is lost: {why}")]
    PeerLost { why: String },
    #[error("no NVRTC: libnvrtc.so is not on the loader's path{place} (install CUDA's runtime compiler)")]
    NoNvrtc { place: String },
    #[error(
        "the driver supports CUDA {}.{} but libnvrtc compiles for CUDA {}.{}: update the driver, or install an older libnvrtc",
        driver.0, driver.1, nvrtc.0, nvrtc.1
    )]
    DriverTooOld { driver: (i32, i32), nvrtc: (i32, i32) },
    #[error("{name} has compute capability {}.{}, but these kernels need 8.0 or later", capability.0, capability.1)]
    CardTooOld { name: String, capability: (i32, i32) },
    #[error("compile {source_name} for {arch}: {log}")]
    Compile { source_name: &'static str, arch: String, log: String },
    #[error("{call} of NVRTC failed with {code}")]
    Nvrtc { call: &'static str, code: String },
    #[error("no cuBLASLt: libcublasLt.so is not on the loader's path{place} (install CUDA's cuBLAS)")]
    NoCublas { place: String },
    #[error("{call} of cuBLASLt failed with {code}")]
    Cublas { call: &'static str, code: String },
    #[error("cuBLASLt has no algorithm to multiply {n_rows} rows of {k} numbers by a matrix of {n} rows")]
    NoProduct { n: usize, k: usize, n_rows: usize },
    #[error("no NCCL: libnccl.so.2 is not on the loader's path (install NVIDIA's libnccl2)")]
    NoNccl,
    #[error("NCCL is too old: version {version} is installed, {needed} or later is needed")]
    NcclTooOld { version: i32, needed: i32 },
    #[error("{call} of NCCL: {why}")]
    Nccl { call: &'static str, why: String },
    #[error("out of GPU memory: {bytes} bytes requested, {free_bytes} of {total_bytes} bytes free")]
    OutOfMemory { bytes: usize, free_bytes: usize, total_bytes: usize },
    #[error("the GPU memory is released while the node sleeps")]
    GivenBack,
    #[error(
        "the GPU driver cannot share GPU memory with other devices (dmabuf): install NVIDIA's open kernel modules, on Linux 5.12 or later"
    )]
    NoDmabuf,
    #[error("{what}")]
    Driver {
        what: &'static str,
        #[source]
        source: DriverError,
    },
    #[error("launch {kernel}: {wrong}")]
    Argument { kernel: &'static str, wrong: &'static str },
}

impl CudaError {
    /// Returns whether the GPU had too little memory. It still works then.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::Driver { source: DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY), .. })
    }

    /// Returns whether the driver cannot do this on this machine at all.
    pub fn is_not_supported(&self) -> bool {
        use CUresult::{CUDA_ERROR_NOT_PERMITTED, CUDA_ERROR_NOT_SUPPORTED};
        let Self::Driver { source: DriverError(code), .. } = self else { return false };
        matches!(code, CUDA_ERROR_NOT_SUPPORTED | CUDA_ERROR_NOT_PERMITTED)
    }

    /// Wraps a driver error with the operation that failed.
    pub fn during(what: &'static str) -> impl FnOnce(DriverError) -> Self {
        move |source| Self::Driver { what, source }
    }
}

/// Rejects a launch whose arguments do not fit together.
pub fn ensure(kernel: &'static str, holds: bool, wrong: &'static str) -> Result<(), CudaError> {
    if holds { Ok(()) } else { Err(CudaError::Argument { kernel, wrong }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_driver_never_does_differs_from_what_it_has_no_room_for() {
        let failed = |code| CudaError::during("page-lock host memory for the GPU")(DriverError(code));
        for code in [CUresult::CUDA_ERROR_NOT_SUPPORTED, CUresult::CUDA_ERROR_NOT_PERMITTED] {
            assert!(failed(code).is_not_supported(), "{code:?}");
        }
        assert!(!failed(CUresult::CUDA_ERROR_OUT_OF_MEMORY).is_not_supported());
        assert!(!CudaError::NoDriver.is_not_supported());
    }
}
