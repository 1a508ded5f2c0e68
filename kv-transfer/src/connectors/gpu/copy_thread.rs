//! A thread that waits for the copy jobs of a GPU, so that no task has to block.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use chassis::Gate;
use device::DeviceMemory;
use device::cuda::{CopyJob, CudaError, PageCopier, PageCopierSize};
use kv_cache::KvMemory;
use tokio::sync::{mpsc, oneshot};
use tracing::trace;

use super::pages::card_of;
use crate::error::TransferError;
use crate::pending_copies::PendingCopy;

/// Limit of copy jobs in progress of one copy thread.
const COPY_JOBS_MAX: usize = 64;

/// A GPU's page copier, and the thread that waits for its copy jobs. The thread ends when this is dropped and all
/// jobs are done.
#[derive(Debug)]
pub(in crate::connectors) struct CopyThread {
    copier: Arc<PageCopier>,
    waiting: mpsc::Sender<ThreadJob>,
}

/// One copy thread for each GPU of the node. Cheap to clone.
#[derive(Clone, Debug)]
pub(in crate::connectors) struct CopyThreads {
    /// The ranks of this process.
    ranks: Range<u16>,
    /// Those of all these ranks of the first stage, then those of the next.
    all: Arc<[CopyThread]>,
}

impl CopyThreads {
    pub(in crate::connectors) fn start(
        memory: &KvMemory,
        size: PageCopierSize,
        gate: &Gate,
    ) -> Result<Self, TransferError> {
        let ranks = memory.ranks();
        let of_stage = |stage| memory.ranks().map(move |rank| card_of(memory, rank, stage));
        let all = (0..memory.n_stages()).flat_map(of_stage);
        let all = all.map(|card| CopyThread::start(card?.memory(), size, gate));
        Ok(Self { ranks, all: all.collect::<Result<_, _>>()? })
    }

    /// Returns one of the copy threads.
    pub(in crate::connectors) fn any(&self) -> &CopyThread {
        self.all.first().expect("a node on GPUs has one")
    }

    /// Returns the copy thread of the GPU of a rank of a pipeline stage.
    ///
    /// # Panics
    /// If there is no such GPU.
    pub(in crate::connectors) fn of(&self, rank: u16, stage: usize) -> &CopyThread {
        &self.all[stage * self.ranks.len() + usize::from(rank - self.ranks.start)]
    }
}

/// A job of the copy thread.
#[derive(Debug)]
enum ThreadJob {
    Take { copy_job: CopyJob, answer: oneshot::Sender<Result<Vec<u64>, CudaError>>, held: Held },
    Release(Guard),
}

/// A value that is held for its drop: a slot, slots, or a peer's memory.
pub(in crate::connectors) type Guard = Arc<dyn Any + Send + Sync>;

/// The values that must live until a copy job is done, even if its answer is no longer awaited.
#[derive(Debug, Default)]
pub(in crate::connectors) struct Held {
    /// Counts the copy for its landing.
    pub(in crate::connectors) pending_copy: Option<PendingCopy>,
    /// The slots that the job uses.
    #[expect(dead_code, reason = "held for its Drop")]
    pub(in crate::connectors) slots: Option<Guard>,
    /// Keeps the job's slot from other users.
    #[expect(dead_code, reason = "held for its Drop")]
    pub(in crate::connectors) slot: Option<Guard>,
}

impl Held {
    pub(in crate::connectors) fn pending(pending_copy: PendingCopy) -> Self {
        Self { pending_copy: Some(pending_copy), ..Self::default() }
    }
}

/// A copy job in progress on the GPU.
#[derive(Debug)]
pub(in crate::connectors) struct UnderWay(oneshot::Receiver<Result<Vec<u64>, CudaError>>);

/// The right to start one copy job.
#[derive(Debug)]
pub(in crate::connectors) struct Room<'a>(mpsc::Permit<'a, ThreadJob>);

impl CopyThread {
    /// Starts the thread for the GPU of this memory. The thread holds the gate.
    pub(in crate::connectors) fn start(
        memory: &DeviceMemory,
        size: PageCopierSize,
        gate: &Gate,
    ) -> Result<Self, TransferError> {
        let inside = gate.enter("gpu wire thread").map_err(|_| TransferError::Closed)?;
        let copier = PageCopier::new(memory, size);
        let copier = Arc::new(copier.map_err(TransferError::device)?);
        let (waiting, jobs) = mpsc::channel(COPY_JOBS_MAX);
        let waits = Arc::clone(&copier);
        std::thread::Builder::new()
            .name("gpu-wire".to_owned())
            .spawn(move || {
                wait_for_all(&waits, jobs);
                drop((waits, inside));
            })
            .map_err(TransferError::lost)?;
        Ok(Self { copier, waiting })
    }

    pub(in crate::connectors) fn copier(&self) -> &PageCopier {
        &self.copier
    }

    /// Waits until one more copy job may start.
    pub(in crate::connectors) async fn room(&self) -> Result<Room<'_>, TransferError> {
        self.waiting.reserve().await.map(Room).map_err(|_| TransferError::Closed)
    }

    /// Releases slots or a peer's memory on the thread, because that waits until the GPU no longer uses them.
    pub(in crate::connectors) fn release(&self, guard: Guard) {
        // If the queue is full, the memory is released here, when this call drops it.
        let _ = self.waiting.try_send(ThreadJob::Release(guard));
    }
}

impl Room<'_> {
    /// Waits for a copy job and returns its digests. The job continues, with the values that it holds, if this future
    /// is dropped.
    pub(in crate::connectors) async fn take(
        self,
        copy_job: CopyJob,
        held: Held,
    ) -> Result<Vec<u64>, TransferError> {
        self.fill(copy_job, held).digests().await
    }

    /// Hands a copy job to the thread and returns at once; the caller waits for the digests later.
    pub(in crate::connectors) fn fill(self, copy_job: CopyJob, held: Held) -> UnderWay {
        let (answer, answered) = oneshot::channel();
        self.0.send(ThreadJob::Take { copy_job, answer, held });
        UnderWay(answered)
    }
}

impl UnderWay {
    pub(in crate::connectors) async fn digests(self) -> Result<Vec<u64>, TransferError> {
        self.0.await.map_err(|_| TransferError::Closed)?.map_err(TransferError::device)
    }
}

fn wait_for_all(copier: &PageCopier, mut jobs: mpsc::Receiver<ThreadJob>) {
    while let Some(job) = jobs.blocking_recv() {
        match job {
            ThreadJob::Release(guard) => drop(guard),
            ThreadJob::Take { copy_job, answer, held } => {
                let digests = copier.take(copy_job);
                trace!(target: "walk", writes = held.pending_copy.is_some(), "GPU copy job finished");
                drop(held);
                // The receiver of the answer may be gone, so a failed send is ignored.
                let _ = answer.send(digests);
            }
        }
    }
}
