//! A fence: the progress of a running step, layer by layer.
//!
//! The engine raises the signal when each layer's KV is written. A sender waits for the layers that it wants to send,
//! so a layer is sent while the next one is computed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};

use tokio::sync::Notify;

/// The computing side of a fence. If it is dropped before a layer is done, all waits for that layer fail.
#[derive(Debug)]
pub struct FenceSignal {
    progress: Arc<Progress>,
}

/// The waiting side of a fence; cheap to clone.
#[derive(Clone, Debug)]
pub struct LayerFence {
    /// `None` if the fence is always open.
    progress: Option<Arc<Progress>>,
}

/// The progress of a step. It wakes its waiters in the order in which they began to wait, so that a
/// simulation is repeatable. A `tokio::sync::watch` would wake them in random order.
#[derive(Debug, Default)]
struct Progress {
    layers: AtomicU16,
    is_over: AtomicBool,
    changed: Notify,
}

/// The error of a wait: the step failed before the layers below `wanted` were computed. Their KV will never
/// be valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the step failed with {done} of {wanted} layers computed")]
pub struct FenceBroken {
    pub wanted: u16,
    pub done: u16,
}

impl FenceSignal {
    pub fn new() -> (FenceSignal, LayerFence) {
        let progress = Arc::new(Progress::default());
        (FenceSignal { progress: Arc::clone(&progress) }, LayerFence { progress: Some(progress) })
    }

    /// Reports that all layers with a number below `n` are written. Never waits; ignores an `n` below an earlier one.
    pub fn layers_done(&self, n: u16) {
        if self.progress.layers.fetch_max(n, Ordering::AcqRel) < n {
            self.progress.changed.notify_waiters();
        }
    }
}

impl Drop for FenceSignal {
    fn drop(&mut self) {
        self.progress.is_over.store(true, Ordering::Release);
        self.progress.changed.notify_waiters();
    }
}

impl Progress {
    fn done(&self) -> u16 {
        self.layers.load(Ordering::Acquire)
    }

    /// Returns the result of a wait, or `None` while it may change. Reads `is_over` first, because no layer
    /// is computed after the end.
    fn verdict(&self, wanted: u16) -> Option<Result<(), FenceBroken>> {
        let is_over = self.is_over.load(Ordering::Acquire);
        match self.done() {
            done if done >= wanted => Some(Ok(())),
            done => is_over.then_some(Err(FenceBroken { wanted, done })),
        }
    }
}

impl LayerFence {
    /// Returns a fence that is always open, for KV that already exists, such as a cached prefix.
    pub fn open() -> Self {
        Self { progress: None }
    }

    /// Waits until all layers below number `layers` are written. Cancel-safe.
    ///
    /// The wait ends when the step ends. A caller with a deadline must add its own.
    pub async fn wait(&self, layers: u16) -> Result<(), FenceBroken> {
        let Some(progress) = &self.progress else { return Ok(()) };
        loop {
            let changed = progress.changed.notified();
            tokio::pin!(changed);
            // Registers before the check, so that no change between the check and the wait is missed.
            changed.as_mut().enable();
            if let Some(verdict) = progress.verdict(layers) {
                return verdict;
            }
            changed.await;
        }
    }

    /// Returns the number of layers that are written, beginning with the first; `None` for a fence that is always open.
    pub fn n_written(&self) -> Option<u16> {
        self.progress.as_ref().map(|progress| progress.done())
    }

    /// Returns whether [`wait`](Self::wait) would return at once with success.
    pub fn is_open(&self, layers: u16) -> bool {
        self.progress.as_ref().is_none_or(|progress| progress.done() >= layers)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn layers_open_one_after_the_other() {
        let (signal, fence) = FenceSignal::new();
        assert!(!fence.is_open(1));
        assert!(timeout(Duration::from_secs(1), fence.wait(1)).await.is_err(), "nothing is computed yet");
        signal.layers_done(2);
        assert_eq!(fence.wait(2).await, Ok(()));
        assert!(fence.is_open(2) && !fence.is_open(3));
        assert_eq!((fence.n_written(), LayerFence::open().n_written()), (Some(2), None));
        signal.layers_done(1);
        assert!(fence.is_open(2), "a layer that is done stays done");
    }

    #[tokio::test(start_paused = true)]
    async fn a_signal_dropped_early_breaks_the_rest() {
        let (signal, fence) = FenceSignal::new();
        signal.layers_done(3);
        drop(signal);
        assert_eq!(fence.wait(3).await, Ok(()), "what is done stays done");
        assert_eq!(fence.wait(4).await, Err(FenceBroken { wanted: 4, done: 3 }));
    }

    #[tokio::test(start_paused = true)]
    async fn who_waits_already_is_woken() {
        let (signal, fence) = FenceSignal::new();
        let (passed, ()) = tokio::join!(fence.wait(5), async { signal.layers_done(5) });
        assert_eq!(passed, Ok(()));
        let (broken, ()) = tokio::join!(fence.wait(6), async { drop(signal) });
        assert_eq!(broken, Err(FenceBroken { wanted: 6, done: 5 }));
    }

    #[tokio::test(start_paused = true)]
    async fn an_open_fence_never_holds() {
        assert_eq!(LayerFence::open().wait(u16::MAX).await, Ok(()));
        assert!(LayerFence::open().is_open(u16::MAX));
    }
}
