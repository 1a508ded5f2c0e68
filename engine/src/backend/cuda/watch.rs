//! A thread that waits for the GPU and opens steps' fences as the GPU finishes each layer.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use device::cuda::{CudaError, Event, Marker};
use kv_cache::FenceSignal;
use tracing::trace;

use super::launched_step::LostFlags;

/// The thread and its queue. The thread ends when this value is dropped.
#[derive(Debug)]
pub(super) struct Watch {
    /// The queue of steps; `None` after the thread was told to end.
    steps: Option<SyncSender<WatchedStep>>,
    thread: Option<thread::JoinHandle<()>>,
}

/// One step. If times are measured, it has an event at the start.
#[derive(Debug)]
pub(super) struct WatchedStep {
    pub(super) began: Option<Marker>,
    /// The first layer that this process computes.
    pub(super) first_layer: u16,
    /// For each stage, for each of its ranks, an event for each layer of the stage, in order.
    pub(super) written: Vec<Vec<Vec<Event>>>,
    /// The flags of lost ranks, which make the results invalid.
    pub(super) lost: LostFlags,
    pub(super) signal: Arc<FenceSignal>,
}

impl Watch {
    pub(super) fn start(steps_in_flight_max: usize) -> std::io::Result<Self> {
        let (steps, incoming) = sync_channel(2 * steps_in_flight_max);
        let thread = thread::Builder::new().name("cuda-layers".to_owned()).spawn(move || run(&incoming))?;
        Ok(Self { steps: Some(steps), thread: Some(thread) })
    }

    /// Queues a step and does not wait. If the thread is too far behind, or the step uses a recorded graph and has no events,
    /// the fence opens when the step is collected.
    pub(super) fn watch(&self, step: WatchedStep) {
        let has_events = step.written.iter().flatten().all(|of_rank| !of_rank.is_empty());
        if let Some(steps) = self.steps.as_ref().filter(|_| has_events) {
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
        for (layer, n_done) in layers(&step.written).zip(step.first_layer + 1..) {
            if wait(layer).is_err() || step.lost.is_raised() {
                break;
            }
            step.signal.layers_done(n_done);
        }
        step.tell();
    }
}

/// Returns the events of each layer, one for each rank of its stage, in the order of layers.
fn layers<E>(stages: &[Vec<Vec<E>>]) -> impl Iterator<Item = impl Iterator<Item = &E>> {
    let of_stage = |ranks: &'_ Vec<Vec<E>>| 0..ranks.iter().map(Vec::len).min().unwrap_or(0);
    stages
        .iter()
        .flat_map(move |ranks| of_stage(ranks).map(move |layer| ranks.iter().map(move |rank| &rank[layer])))
}

/// Waits until all ranks have written a layer.
fn wait<'a>(mut layer: impl Iterator<Item = &'a Event>) -> Result<(), CudaError> {
    layer.try_for_each(Event::wait)
}

impl WatchedStep {
    /// Logs when the KV of each layer of the last stage was written, by the clock of its first rank.
    fn tell(&self) {
        let Some(began) = &self.began else { return };
        let of_last = self.written.last().and_then(|ranks| ranks.first());
        let of_first = of_last.map_or(&[][..], Vec::as_slice);
        let layers: Result<Vec<f32>, _> = of_first.iter().map(|layer| layer.ms_since(began)).collect();
        trace!(target: "walk", layers_ms = ?layers.unwrap_or_default(), "KV of all layers written on the GPU");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_in_order_over_the_stages_and_have_an_event_of_each_rank() {
        let one = vec![vec![vec!["a0", "b0"], vec!["a1", "b1"]]];
        let two = vec![vec![vec!["a0"], vec!["a1"]], vec![vec!["b0", "c0"], vec!["b1", "c1"]]];
        for (stages, expected) in
            [(one, &[["a0", "a1"], ["b0", "b1"]][..]), (two, &[["a0", "a1"], ["b0", "b1"], ["c0", "c1"]])]
        {
            let found: Vec<Vec<&str>> = layers(&stages).map(|layer| layer.copied().collect()).collect();
            assert_eq!(found, expected);
        }
        assert_eq!(layers::<u8>(&[]).count(), 0);
    }
}
