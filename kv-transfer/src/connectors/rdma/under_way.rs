//! Hot path. The unfinished work of a sender's device: its queue pairs, and the pages that they read.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use device::verbs::{Completion, QueuePair, VerbsError};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::connectors::link::span_out::SpanOut;
use crate::error::TransferError;

/// One queue pair, until it is destroyed.
#[derive(Debug)]
pub(super) struct Pair {
    /// The queue pair; `None` once it is destroyed. Held for one call, never across an await.
    pair: Mutex<Option<QueuePair>>,
    /// Permits for the requests that the pair's queue has room for.
    room: Arc<Semaphore>,
}

/// The frames whose KV is being written, and whether more may follow. `F` is held until the device is done with a frame.
#[derive(Debug)]
pub(super) struct UnderWay<F = FrameOut> {
    /// The number of queue pairs, which take the frames in turn.
    n_pairs: u64,
    /// Held for a look-up, never across an await.
    frames: Mutex<Frames<F>>,
    lost: OnceLock<TransferError>,
    broken: CancellationToken,
}

#[derive(Debug)]
struct Frames<F> {
    /// The frames by number, with the time at which they went to the device.
    in_progress: HashMap<u64, (F, Instant)>,
    /// The time of each queue pair's last completion.
    completed: HashMap<u64, Instant>,
}

/// One frame in progress. Until the device is done with it, it holds the lease of its pages, its pending copy, and
/// room in the queue.
#[derive(Debug)]
pub(super) struct FrameOut {
    #[expect(dead_code, reason = "held for its Drop")]
    pub(super) span: SpanOut,
    #[expect(dead_code, reason = "held for its Drop")]
    pub(super) room: OwnedSemaphorePermit,
    /// Notified when the write is done.
    pub(super) done: Option<oneshot::Sender<()>>,
}

// === impl Pair ===

impl Pair {
    pub(super) fn new(pair: QueuePair) -> Self {
        let room = Arc::new(Semaphore::new(pair.room().writes as usize));
        Self { pair: Mutex::new(Some(pair)), room }
    }

    /// Waits for room for `n` requests.
    pub(super) async fn room(&self, n: u32) -> Result<OwnedSemaphorePermit, TransferError> {
        Arc::clone(&self.room).acquire_many_owned(n).await.map_err(|_| destroyed())
    }

    pub(super) fn with(
        &self,
        call: impl FnOnce(&QueuePair) -> Result<(), VerbsError>,
    ) -> Result<(), TransferError> {
        call(self.pair().as_ref().ok_or_else(destroyed)?).map_err(TransferError::rdma)
    }

    /// Destroys the queue pair. After this call the device reads no page for it.
    pub(super) fn destroy(&self) {
        self.room.close();
        drop(self.pair().take());
    }

    fn pair(&self) -> MutexGuard<'_, Option<QueuePair>> {
        self.pair.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn destroyed() -> TransferError {
    TransferError::lost_because("the link's queue pairs are destroyed")
}

// === impl UnderWay ===

impl<F> UnderWay<F> {
    pub(super) fn new(n_pairs: u16) -> Self {
        let frames = Frames { in_progress: HashMap::new(), completed: HashMap::new() };
        Self {
            n_pairs: u64::from(n_pairs.max(1)),
            frames: Mutex::new(frames),
            lost: OnceLock::new(),
            broken: CancellationToken::new(),
        }
    }

    /// Registers a frame, before the request goes to the device.
    pub(super) fn enter(&self, number: u32, frame: F) -> Result<(), TransferError> {
        let mut frames = self.frames();
        // The loss is checked under the lock: either this call sees it, or `give_up` sees the frame.
        match self.lost.get() {
            Some(error) => Err(error.clone()),
            None => {
                frames.in_progress.insert(number.into(), (frame, Instant::now()));
                Ok(())
            }
        }
    }

    /// Removes a frame whose request did not go to the device.
    pub(super) fn forget(&self, number: u32) {
        let forgotten = self.frames().in_progress.remove(&u64::from(number));
        drop(forgotten);
    }

    /// Handles a completion and returns its frame. Fails if the device reports a failed request.
    pub(super) fn done(&self, completion: Completion) -> Result<Option<F>, TransferError> {
        if let Err(failure) = completion.outcome {
            return Err(TransferError::rdma(VerbsError::Failed(failure)));
        }
        let mut frames = self.frames();
        frames.completed.insert(completion.id % self.n_pairs, Instant::now());
        Ok(frames.in_progress.remove(&completion.id).map(|(frame, _)| frame))
    }

    /// Returns once a queue pair with a frame in progress has completed nothing for `stall`. A device reports a peer that
    /// does not answer, but not all devices do so always: Soft-RoCE once reported nothing for a minute.
    pub(super) async fn stalled(&self, stall: Duration) -> TransferError {
        while !self.is_stalled(stall) {
            tokio::time::sleep(stall / 4).await;
        }
        TransferError::Stalled { what: "writing KV", after: stall }
    }

    fn is_stalled(&self, stall: Duration) -> bool {
        let frames = self.frames();
        frames.in_progress.iter().any(|(number, (_, since))| {
            let completed = frames.completed.get(&(number % self.n_pairs));
            completed.map_or(*since, |completed| *completed.max(since)).elapsed() >= stall
        })
    }

    /// Sets the error of the link; only the first one is kept. Frames in progress stay until they are
    /// [released](Self::give_up).
    pub(super) fn lose(&self, error: TransferError) {
        let _ = self.lost.set(error);
        self.broken.cancel();
    }

    pub(super) async fn broken(&self) -> TransferError {
        self.broken.cancelled().await;
        self.lost.get().cloned().unwrap_or(TransferError::Closed)
    }

    /// Releases all frames. Call it only when no queue pair that could read their pages is left.
    pub(super) fn give_up(&self) {
        let given_up = std::mem::take(&mut self.frames().in_progress);
        drop(given_up);
    }

    fn frames(&self) -> MutexGuard<'_, Frames<F>> {
        self.frames.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use device::verbs::Done;
    use tokio::time::{sleep, timeout};

    use super::*;

    const STALL: Duration = Duration::from_secs(4);

    fn completed(number: u32) -> Completion {
        Completion { id: number.into(), queue_pair: 0, outcome: Ok(Done::Written) }
    }

    #[tokio::test(start_paused = true)]
    async fn a_pair_that_completes_nothing_is_found_beside_one_that_does() {
        let under_way = UnderWay::new(2);
        timeout(10 * STALL, under_way.stalled(STALL)).await.expect_err("nothing is in progress");
        // Frames with even numbers are on the first pair.
        for number in [0, 1] {
            under_way.enter(number, ()).expect("not lost");
        }
        sleep(STALL / 2).await;
        assert_eq!(under_way.done(completed(0)).expect("good"), Some(()));
        under_way.enter(2, ()).expect("not lost");
        assert!(!under_way.is_stalled(STALL));
        let began = Instant::now();
        let error = under_way.stalled(STALL).await;
        assert!(matches!(error, TransferError::Stalled { .. }), "{error}");
        assert_eq!(began.elapsed(), STALL / 2, "the second pair has completed nothing");
        under_way.done(completed(1)).expect("good");
        assert!(!under_way.is_stalled(STALL), "frame 2 has waited for half of the time");
    }
}
