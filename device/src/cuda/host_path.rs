//! A plain copy from one GPU to another through page-locked host memory: the reference for KV that takes this path.

use std::fmt;
use std::sync::Arc;

use cudarc::driver::CudaStream;
use cudarc::driver::sys::cuMemcpyAsync;

use super::CudaError;
use super::error::ensure;
use super::memory::DeviceMemory;
use super::slots::Slots;
use crate::memory::HostMemory;
use crate::regions::RegionShape;

/// The bytes of one copy. The next piece goes down while one goes up.
const PIECE_BYTES: usize = 16 << 20;
/// The pieces in host memory.
const N_PIECES: u32 = 4;

/// Host memory between two GPUs, and a stream of each.
pub struct HostPath {
    slots: Slots,
    down: Arc<CudaStream>,
    up: Arc<CudaStream>,
}

impl HostPath {
    /// The shape of the host memory.
    pub const HOST: RegionShape = RegionShape { page_bytes: PIECE_BYTES, n_pages: N_PIECES };

    pub fn over(host: &HostMemory, near: &DeviceMemory, far: &DeviceMemory) -> Result<Self, CudaError> {
        let slots = Slots::in_host_memory(host, &[near, far])?;
        let stream =
            |memory: &DeviceMemory| memory.context().new_stream().map_err(CudaError::during("make a stream"));
        Ok(Self { slots, down: stream(near)?, up: stream(far)? })
    }

    /// Copies the first `bytes` bytes of one memory into the other, and waits.
    pub fn copy(&self, near: &DeviceMemory, far: &DeviceMemory, bytes: usize) -> Result<(), CudaError> {
        let fits = bytes <= near.bytes() && bytes <= far.bytes();
        ensure("plain copy", fits, "more bytes than both memories have")?;
        let mut is_up = Vec::new();
        for (nth, start) in (0..bytes).step_by(PIECE_BYTES).enumerate() {
            let n = PIECE_BYTES.min(bytes - start);
            let host = self.slots.address(nth % N_PIECES as usize, 0, n)?;
            if let Some(before) = nth.checked_sub(N_PIECES as usize) {
                self.down.wait(&is_up[before]).map_err(CudaError::during("wait for a copy"))?;
            }
            piece(&self.down, near.page_address(0, 0) + start as u64, host, n)?;
            let is_down = self.down.record_event(None).map_err(CudaError::during("mark a copy"))?;
            self.up.wait(&is_down).map_err(CudaError::during("wait for a copy"))?;
            piece(&self.up, host, far.page_address(0, 0) + start as u64, n)?;
            is_up.push(self.up.record_event(None).map_err(CudaError::during("mark a copy"))?);
        }
        self.up.synchronize().map_err(CudaError::during("copy between a GPU and the host"))
    }
}

fn piece(stream: &CudaStream, from: u64, to: u64, bytes: usize) -> Result<(), CudaError> {
    stream.context().bind_to_thread().map_err(CudaError::during("use the GPU from this thread"))?;
    // JUSTIFICATION: the memory is accessed by address.
    // SAFETY: the caller has checked both ranges. The memory lives until the caller has waited for the copy.
    unsafe { cuMemcpyAsync(to, from, bytes, stream.cu_stream()) }
        .result()
        .map_err(CudaError::during("copy between a GPU and the host"))
}

impl fmt::Debug for HostPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostPath").field("slots", &self.slots).finish_non_exhaustive()
    }
}
