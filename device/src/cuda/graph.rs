//! Work that is told to the card once, and done often: hundreds of launches for the price of one.

use std::fmt;

use cudarc::driver::CudaGraph;
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};

use super::{Card, CudaError};

/// A recorded run of launches, on the memory that they were recorded with.
///
/// Memory must outlive the graphs that work on it. Where it does not, the card faults or overwrites other numbers of the
/// card; nothing of this machine's is reached, and on a card any pattern of bits is a number.
pub struct Graph(CudaGraph);

// JUSTIFICATION: cudarc's graph holds pointers, which makes it neither Send nor Sync.
// SAFETY: the driver allows any thread to use a graph, one at a time, and `launch` takes `&mut self`.
unsafe impl Send for Graph {}

impl Card {
    /// Records what `work` launches instead of running it. `work` may launch and nothing else: what takes memory or waits
    /// cannot be recorded.
    pub fn record(&self, work: impl FnOnce() -> Result<(), CudaError>) -> Result<Graph, CudaError> {
        let failed = "record a graph";
        self.stream()
            .begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
            .map_err(CudaError::during(failed))?;
        let worked = work();
        // A recording is ended also after an error, or the stream would stay in it.
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
    /// Puts all of it at the end of the stream.
    pub fn launch(&mut self) -> Result<(), CudaError> {
        self.0.launch().map_err(CudaError::during("launch a graph"))
    }
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Graph")
    }
}
