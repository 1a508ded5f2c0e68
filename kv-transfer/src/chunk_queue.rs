//! The queue from the producer of a sequence's KV to the sender of a transfer.
//!
//! A scheduler's sink fills it without waiting. [`KvSender::feed`](crate::KvSender::feed) empties it.

use std::fmt;
use std::sync::Arc;

use kv_cache::{BlockLease, LayerFence};
use tokio::sync::mpsc;
use types::{Handoff, KvSpan};

/// One item of a sequence that is sent.
#[derive(Debug)]
pub enum Chunk {
    /// Some layers of some blocks, which `ready` reports as computed: the arguments of
    /// [`KvSender::send`](crate::KvSender::send).
    Kv { span: KvSpan, from: Arc<BlockLease>, ready: LayerFence },
    /// The last item: all KV is queued.
    Handoff(Handoff),
}

/// The receiving end of a bounded queue of chunks.
pub struct ChunkQueue {
    chunks: mpsc::Receiver<Chunk>,
    on_taken: Box<dyn Fn() + Send>,
}

impl ChunkQueue {
    /// Wraps `chunks`. Calls `on_taken` after each chunk that leaves the queue; `on_taken` must not block.
    pub fn new(chunks: mpsc::Receiver<Chunk>, on_taken: impl Fn() + Send + 'static) -> Self {
        Self { chunks, on_taken: Box::new(on_taken) }
    }

    /// Returns a queue that holds these chunks and gets no others.
    pub fn of(chunks: Vec<Chunk>) -> Self {
        let (queue, received) = mpsc::channel(chunks.len().max(1));
        for chunk in chunks {
            queue.try_send(chunk).expect("the queue has room for all chunks");
        }
        Self::new(received, || {})
    }

    /// Returns the next chunk; `None` if the producer is gone. Cancel-safe.
    pub async fn next(&mut self) -> Option<Chunk> {
        let chunk = self.chunks.recv().await?;
        (self.on_taken)();
        Some(chunk)
    }
}

impl fmt::Debug for ChunkQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChunkQueue").field("queued", &self.chunks.len()).finish_non_exhaustive()
    }
}
