//! A thread that waits for the GPU and opens steps' fences as the GPU finishes each layer.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use device::cuda::{CudaError, Event, Marker};
use kernels::cuda::LostFlag;
use kv_cache::FenceSignal;
use tracing::trace;

use crate::backend::STEPS_IN_FLIGHT_MAX;

/// The thread and its queue. The thread ends when this value is dropped.
#[derive(Debug)]
pub(super) struct Watch {
    /// The queue of steps; `None` after the thread was told to end.
    steps: Option<SyncSender<WatchedStep>>,
    thread: Option<thread::JoinHandle<()>>,
}

/// One step: for each rank, an event for each layer, in order. If times are measured, also an event at the
/// start.
#[derive(Debug)]
pub(super) struct WatchedStep {
    pub(super) began: Option<Marker>,
    pub(super) written: Vec<Vec<Event>>,
    /// The flag of a lost rank, which makes the results invalid; `None` with one rank.
    pub(super) lost: Option<LostFlag>,
    pub(super) signal: Arc<FenceSignal>,
}

impl Watch {
    pub(super) fn start() -> std::io::Result<Self> {
        let (steps, incoming) = sync_channel(2 * STEPS_IN_FLIGHT_MAX);
        let thread = thread::Builder::new().name("cuda-layers".to_owned()).spawn(move || run(&incoming))?;
        Ok(Self { steps: Some(steps), thread: Some(thread) })
    }

    /// Queues a step and does not wait. If the thread is too far behind, the fence opens when the step is
    /// collected.
    pub(super) fn watch(&self, step: WatchedStep) {
        if let Some(steps) = &self.steps {
            let _ = steps.try_send(step);
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.steps = None;
        if let Some(thread) = self.thread.take() {
            // If the thread panicked, the panic is logged, and fences opened when their steps were collected,
            // so the result is ignored.
            let _ = thread.join();
        }
    }
}

fn run(steps: &Receiver<WatchedStep>) {
    while let Ok(step) = steps.recv() {
        let n_layers = step.written.iter().map(Vec::len).min().unwrap_or(0);
        for (layer, n_done) in (0..n_layers).zip(1..) {
            if step.wait(layer).is_err() || step.lost.as_ref().is_some_and(LostFlag::is_raised) {
                break;
            }
            step.signal.layers_done(n_done);
        }
        step.tell();
    }
}

impl WatchedStep {
    /// Waits until all ranks have written a layer.
    fn wait(&self, layer: usize) -> Result<(), CudaError> {
        self.written.iter().try_for_each(|of_rank| of_rank[layer].wait())
    }

    /// Logs when the KV of each layer was written, by the first rank's clock.
    fn tell(&self) {
        let Some(began) = &self.began else { return };
        let of_first = self.written.first().map_or(&[][..], Vec::as_slice);
        let layers: Result<Vec<f32>, _> = of_first.iter().map(|layer| layer.ms_since(began)).collect();
        trace!(target: "walk", layers_ms = ?layers.unwrap_or_default(), "KV of all layers written on the GPU");
    }
}
