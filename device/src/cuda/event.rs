//! Places in the stream that another thread can wait for.

use cudarc::driver::CudaEvent;
use cudarc::driver::sys::CUevent_flags;

use super::{Card, CudaError, Marker};

/// Reached when all work before it is done.
#[derive(Debug)]
pub struct Event(pub(super) CudaEvent);

impl Event {
    /// Sleeps until it is reached. An error says that the card failed before.
    pub fn wait(&self) -> Result<(), CudaError> {
        self.0.synchronize().map_err(CudaError::during("wait for the GPU"))
    }

    /// Milliseconds of the card's time since `marker`, once this is reached.
    pub fn ms_since(&self, marker: &Marker) -> Result<f32, CudaError> {
        marker.0.elapsed_ms(&self.0).map_err(CudaError::during("measure between two events"))
    }

    /// Whether [`wait`](Self::wait) would return at once.
    pub fn is_reached(&self) -> Result<bool, CudaError> {
        self.0.try_is_complete().map_err(CudaError::during("ask the GPU"))
    }
}

impl Card {
    /// An event behind all work so far.
    pub fn event(&self) -> Result<Event, CudaError> {
        // The waiting thread sleeps: steps take milliseconds, and the cores have others to serve.
        let flags = Some(CUevent_flags::CU_EVENT_BLOCKING_SYNC);
        self.stream().record_event(flags).map(Event).map_err(CudaError::during("record an event"))
    }
}
