//! Hot path. The receiver's end of a cuda-ipc link: copies KV from the sender's GPUs.

use std::sync::Arc;

use async_trait::async_trait;
use device::cuda::{PageDigests, RemoteMemory, RemotePages};
use kv_cache::KvMemory;
use tracing::trace;
use types::KvSpan;

use crate::connectors::gpu::copy_thread::{CopyThreads, Held};
use crate::connectors::gpu::pages::{Offsets, UniformPages, card_of, wanted};
use crate::connectors::link::frame::{FrameError, KvPlace, Piece};
use crate::connectors::link::frame_digests::{FrameDigests, check_count, differing};
use crate::connectors::link::kv_path::{KvFrame, KvPath, Receipt, wrong_place};
use crate::connectors::link::stream::FrameReader;
use crate::digest::Digest;
use crate::error::TransferError;
use crate::landing::{Claim, OpenLanding};
use crate::lanes::LaneSpan;
use crate::reshard::Lane;

/// The receiver's end of one link. A sender's memory stays mapped as long as its link lives.
#[derive(Debug)]
pub(super) struct CudaIpcPath {
    /// The memory of each lane's sending GPU, mapped for the lane's receiving GPU.
    remotes: Vec<(Lane, Arc<RemoteMemory>)>,
    copy_threads: CopyThreads,
}

impl CudaIpcPath {
    pub(super) fn new(remotes: Vec<(Lane, Arc<RemoteMemory>)>, copy_threads: CopyThreads) -> Self {
        Self { remotes, copy_threads }
    }

    fn remote(&self, lane: Lane) -> Result<&RemoteMemory, FrameError> {
        let found = self.remotes.iter().find(|(of, _)| *of == lane);
        found.map(|(_, remote)| &**remote).ok_or(FrameError::Unexpected("KV of a GPU that is not shared"))
    }

    /// Copies pages of one shape from the sender's GPU and returns the digests of the copies; `None` once the landing is closed.
    async fn pull(
        &self,
        landing: &OpenLanding,
        lane: Lane,
        job: &PullJob,
        digests: PageDigests,
    ) -> Result<Option<Vec<u64>>, TransferError> {
        let PullJob { pages, offsets } = job;
        let (remote, copy_thread) = (self.remote(lane)?, self.copy_threads.of(lane.to, pages.stage));
        let room = copy_thread.room().await?;
        let from = RemotePages { memory: remote, offsets, runs: pages.there() };
        let start = |memory: &KvMemory| {
            let memory = card_of(memory, lane.to, pages.stage)?.memory();
            copy_thread.copier().fetch(from, memory, pages.some(), digests).map_err(TransferError::device)
        };
        let Some((copy_job, pending_copy)) = landing.begin_copy(start) else { return Ok(None) };
        trace!(target: "walk", transfer = %landing.landing().transfer, "copy of KV pages launched on the GPU");
        room.take(copy_job?, Held::pending(pending_copy)).await.map(Some)
    }
}

impl Drop for CudaIpcPath {
    fn drop(&mut self) {
        for (lane, remote) in self.remotes.drain(..) {
            self.copy_threads.of(lane.to, 0).release(remote);
        }
    }
}

impl CudaIpcPath {
    /// Copies a span into the landing's pages and verifies it. The copy does not wait for the digests.
    ///
    /// If this future is dropped, the GPU continues its copies, and the landing waits for them.
    async fn fetch(
        &self,
        landing: &OpenLanding,
        span: &LaneSpan,
        digests: FrameDigests,
        pieces: &[Piece],
    ) -> Result<Vec<KvSpan>, TransferError> {
        let claim = landing.claim_frame(span, &digests)?;
        let jobs = pull_jobs(landing, span, pieces)?;
        if claim == Claim::Skip {
            return Ok(Vec::new());
        }
        let (transfer, blocks) = (landing.landing().transfer, &span.blocks);
        trace!(target: "walk", %transfer, ?blocks, "copy of a KV frame's pages begins");
        let (mut bytes, mut here) = (0, Vec::new());
        for job in &jobs {
            match self.pull(landing, span.lane, job, digests.wanted_here()).await? {
                Some(copied) => here.extend(copied.into_iter().map(Digest)),
                None => return Ok(Vec::new()),
            }
            bytes += job.pages.bytes();
        }
        trace!(target: "walk", %transfer, ?blocks, "copy of a KV frame's pages finished");
        let Some(said) = digests.wait().await else { return Ok(Vec::new()) };
        check_count(&said, &here)?;
        let wrong = differing(landing, span, &said, &here);
        // A landing that has just failed requests no page again, so the list is empty then.
        Ok(landing.arrived(span, bytes, &wrong).map(|()| wrong).unwrap_or_default())
    }
}

#[async_trait]
impl KvPath for CudaIpcPath {
    async fn receive(
        self: Arc<Self>,
        frame: KvFrame,
        landing: Option<Arc<OpenLanding>>,
        _reader: &mut FrameReader,
    ) -> Result<Receipt, TransferError> {
        let KvFrame { span, digests, place: KvPlace::Pieces(pieces), .. } = frame else {
            return Err(wrong_place());
        };
        let Some(landing) = landing else { return Ok(Receipt::dropped()) };
        let fetch = async move { self.fetch(&landing, &span, digests, &pieces).await };
        Ok(Receipt::Pending(Box::pin(fetch)))
    }
}

/// Pages on this side, all of one shape, and the location of each at the sender.
#[derive(Debug)]
struct PullJob {
    pages: UniformPages,
    offsets: Vec<u64>,
}

/// Returns the copies that a frame needs.
fn pull_jobs(
    landing: &OpenLanding,
    span: &LaneSpan,
    pieces: &[Piece],
) -> Result<Vec<PullJob>, TransferError> {
    let mut offsets = Offsets::new(pieces);
    let mut jobs = Vec::new();
    for pages in wanted(landing, span) {
        let page_bytes = pages.there().page_bytes();
        let there: Option<Vec<u64>> = pages.places.iter().map(|_| offsets.next(page_bytes)).collect();
        let offsets = there.ok_or(FrameError::Body("a page is not whole in one piece"))?;
        jobs.push(PullJob { pages, offsets });
    }
    if !offsets.is_empty() {
        return Err(FrameError::Body("the pieces are longer than their span").into());
    }
    Ok(jobs)
}
