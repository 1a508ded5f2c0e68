//! Hot path. The unfinished work of a sender's device: its queue pairs, and the pages that they read.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use device::verbs::{Completion, QueuePair, VerbsError};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
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

/// The frames whose KV is being written, and whether more may follow.
#[derive(Debug, Default)]
pub(super) struct UnderWay {
    /// The frames by number. Held for a look-up, never across an await.
    frames: Mutex<HashMap<u64, FrameOut>>,
    lost: OnceLock<TransferError>,
    broken: CancellationToken,
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

impl UnderWay {
    /// Registers a frame, before the request goes to the device.
    pub(super) fn enter(&self, number: u32, frame: FrameOut) -> Result<(), TransferError> {
        let mut frames = self.frames();
        // The loss is checked under the lock: either this call sees it, or `give_up` sees the frame.
        match self.lost.get() {
            Some(error) => Err(error.clone()),
            None => {
                frames.insert(number.into(), frame);
                Ok(())
            }
        }
    }

    /// Removes a frame whose request did not go to the device.
    pub(super) fn forget(&self, number: u32) {
        let forgotten = self.frames().remove(&u64::from(number));
        drop(forgotten);
    }

    /// Handles a completion. Fails if the device reports a failed request.
    pub(super) fn done(&self, completion: Completion) -> Result<(), TransferError> {
        if let Err(failure) = completion.outcome {
            return Err(TransferError::rdma(VerbsError::Failed(failure)));
        }
        let frame = self.frames().remove(&completion.id);
        if let Some(done) = frame.and_then(|frame| frame.done) {
            // The waiting task may be gone, so a failed send is ignored.
            let _ = done.send(());
        }
        Ok(())
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
        let given_up = std::mem::take(&mut *self.frames());
        drop(given_up);
    }

    fn frames(&self) -> MutexGuard<'_, HashMap<u64, FrameOut>> {
        self.frames.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
