//! Points in the stream that another thread can wait for.

use cudarc::driver::CudaEvent;
use cudarc::driver::sys::CUevent_flags;

use super::{Card, CudaError, Marker};

/// A point in the stream, reached when all earlier work is done.
#[derive(Debug)]
pub struct Event(pub(super) CudaEvent);

impl Event {
    /// Blocks the thread until the event is reached. An error means that the GPU failed before.
    pub fn wait(&self) -> Result<(), CudaError> {
        self.0.synchronize().map_err(CudaError::during("wait for the GPU"))
    }

    /// Returns the milliseconds of GPU time from `marker` to this event, which must be reached.
    pub fn ms_since(&self, marker: &Marker) -> Result<f32, CudaError> {
        marker.0.elapsed_ms(&self.0).map_err(CudaError::during("measure between two events"))
    }

    /// Returns whether [`wait`](Self::wait) would return at once.
    pub fn is_reached(&self) -> Result<bool, CudaError> {
        self.0.try_is_complete().map_err(CudaError::during("ask the GPU"))
    }
}

impl Card {
    /// Records an event after all earlier work.
    pub fn event(&self) -> Result<Event, CudaError> {
        // The waiting thread sleeps and does not spin, because steps take milliseconds and other threads need
        // the CPU core.
        let flags = Some(CUevent_flags::CU_EVENT_BLOCKING_SYNC);
        self.stream().record_event(flags).map(Event).map_err(CudaError::during("record an event"))
    }

    /// Makes all later work wait for an event of this GPU or of another one.
    pub fn wait_for(&self, event: &Event) -> Result<(), CudaError> {
        self.stream().wait(&event.0).map_err(CudaError::during("wait for another GPU"))
    }
}
