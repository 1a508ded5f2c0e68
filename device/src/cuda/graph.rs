//! CUDA graphs: launches that are recorded once and run often, for the cost of one launch.

use std::fmt;

use cudarc::driver::CudaGraph;
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};

use super::{Card, CudaError};

/// A recorded sequence of launches, with the addresses of the memory that they use.
///
/// The memory must outlive the graph. Otherwise the GPU faults or overwrites other numbers in its memory.
/// Host memory is not affected, and every bit pattern in GPU memory is a valid number.
pub struct Graph(CudaGraph);

// JUSTIFICATION: cudarc's graph holds pointers, so it is neither Send nor Sync.
// SAFETY: the driver allows any thread to use a graph, one at a time, and `launch` takes `&mut self`.
unsafe impl Send for Graph {}

impl Card {
    /// Records the launches of `work` instead of running them. `work` may only launch: allocations and waits
    /// cannot be recorded.
    pub fn record(&self, work: impl FnOnce() -> Result<(), CudaError>) -> Result<Graph, CudaError> {
        let failed = "record a graph";
        self.stream()
            .begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
            .map_err(CudaError::during(failed))?;
        let worked = work();
        // The capture is also ended after an error, because otherwise the stream would stay in capture mode.
        let flags = CUgraphInstantiate_flags(0);
        let graph = self.stream().end_capture(flags);
        worked?;
        let graph = graph.map_err(CudaError::during(failed))?;
        let graph = graph.expect("a recording that began gives a graph");
        graph.upload().map_err(CudaError::during("put a graph onto the GPU"))?;
        Ok(Graph(graph))
    }
}

impl Graph {
    /// Puts the whole graph at the end of the stream.
    pub fn launch(&mut self) -> Result<(), CudaError> {
        self.0.launch().map_err(CudaError::during("launch a graph"))
    }
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Graph")
    }
}
