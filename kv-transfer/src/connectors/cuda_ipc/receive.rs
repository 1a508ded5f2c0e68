//! Hot path. The receiver's end of a cuda-ipc link: copies KV from the sender's GPUs.

use std::sync::Arc;

use async_trait::async_trait;
use device::cuda::{PageDigests, RemoteMemory, RemotePages};
use kv_cache::KvMemory;
use tracing::trace;
use types::KvSpan;

use super::shared::{SharedPlace, StageSizes};
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
    remotes: Vec<RemoteRank>,
    sizes: StageSizes,
    copy_threads: CopyThreads,
}

/// The memory of a lane's sending rank, mapped for one GPU of its receiving rank.
#[derive(Debug)]
pub(super) struct RemoteRank {
    pub(super) lane: Lane,
    /// The pipeline stage of the receiving GPU.
    pub(super) stage: usize,
    /// The memory of each pipeline stage of the sender.
    pub(super) of_stages: Vec<Arc<RemoteMemory>>,
}

impl CudaIpcPath {
    pub(super) fn new(remotes: Vec<RemoteRank>, sizes: StageSizes, copy_threads: CopyThreads) -> Self {
        Self { remotes, sizes, copy_threads }
    }

    /// Returns the memory that a job reads, mapped for the GPU that it writes.
    fn remote(&self, lane: Lane, job: &PullJob) -> Result<&RemoteMemory, FrameError> {
        let found = self.remotes.iter().find(|of| (of.lane, of.stage) == (lane, job.pages.stage));
        let remote = found.and_then(|of| of.of_stages.get(job.from_stage));
        remote.map(|remote| &**remote).ok_or(FrameError::Unexpected("KV of a GPU that is not shared"))
    }

    /// Copies pages of one shape from the sender's GPU and returns the digests of the copies; `None` once the landing is closed.
    async fn pull(
        &self,
        landing: &OpenLanding,
        lane: Lane,
        job: &PullJob,
        digests: PageDigests,
    ) -> Result<Option<Vec<u64>>, TransferError> {
        let PullJob { pages, offsets, .. } = job;
        let (remote, copy_thread) = (self.remote(lane, job)?, self.copy_threads.of(lane.to, pages.stage));
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
        for RemoteRank { lane, stage, of_stages } in self.remotes.drain(..) {
            let copy_thread = self.copy_threads.of(lane.to, stage);
            of_stages.into_iter().for_each(|remote| copy_thread.release(remote));
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
        let jobs = pull_jobs(&self.sizes, wanted(landing, span), pieces)?;
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

/// Pages on one GPU of this side, all of one shape, and the location of each on one GPU of the sender.
#[derive(Debug)]
struct PullJob {
    pages: UniformPages,
    from_stage: usize,
    /// The offset of each page in the memory of `from_stage`.
    offsets: Vec<u64>,
}

/// Returns the copies that a frame needs.
fn pull_jobs(
    sizes: &StageSizes,
    wanted: Vec<UniformPages>,
    pieces: &[Piece],
) -> Result<Vec<PullJob>, FrameError> {
    let mut offsets = Offsets::new(pieces);
    let mut jobs = Vec::new();
    for pages in wanted {
        let page_bytes = pages.there().page_bytes();
        let place = |_: &_| {
            let offset = offsets.next(page_bytes).ok_or("a page is not whole in one piece")?;
            sizes.place(offset, page_bytes).ok_or("a page is outside of the shared memory")
        };
        let there: Result<Vec<SharedPlace>, _> = pages.places.iter().map(place).collect();
        add_jobs(&pages, &there.map_err(FrameError::Body)?, &mut jobs)?;
    }
    if !offsets.is_empty() {
        return Err(FrameError::Body("the pieces are longer than their span"));
    }
    Ok(jobs)
}

/// Adds a job for each run of layers that are on one GPU of the sender.
fn add_jobs(pages: &UniformPages, there: &[SharedPlace], jobs: &mut Vec<PullJob>) -> Result<(), FrameError> {
    let mut start = 0;
    for run in there.chunk_by(|one, next| one.stage == next.stage) {
        if !run.len().is_multiple_of(pages.n_blocks()) {
            return Err(FrameError::Body("the pages of a layer are on several GPUs"));
        }
        let end = start + run.len() / pages.n_blocks();
        let offsets = run.iter().map(|place| place.offset).collect();
        jobs.push(PullJob { pages: pages.layers(start..end), from_stage: run[0].stage, offsets });
        start = end;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use types::{BlockIdx, GroupIdx, KvDtype, KvLayout};

    use super::*;
    use crate::connectors::gpu::pages::tests::{memory_of_stages, pages_here};

    const N_BLOCKS: u32 = 8;
    const N_LAYERS: u16 = 5;

    /// One side: a node's memory, and the blocks of the sequence in it.
    struct Side {
        memory: KvMemory,
        table: [BlockIdx; 3],
    }

    impl Side {
        fn new(counts: &[u16], table: [u32; 3]) -> Self {
            Self { memory: memory_of_stages(&layout(), counts, N_BLOCKS), table: table.map(BlockIdx) }
        }

        /// Returns the pages of a span of all blocks, as this side has them.
        fn pages(&self, layers: std::ops::Range<u16>) -> Vec<UniformPages> {
            let span = KvSpan { group: GroupIdx(0), blocks: 0..3, layers };
            pages_here(&self.memory, &self.table, &span)
        }

        /// Returns the sizes of the stages, each with some bytes at the end that are no page.
        fn sizes(&self) -> StageSizes {
            let bytes = self.memory.stage_bytes().into_iter().map(|bytes| bytes as u64 + 48);
            StageSizes::new(bytes).expect("small")
        }

        /// Returns the pieces that this side sends for a span.
        fn pieces(&self, layers: std::ops::Range<u16>) -> Vec<Piece> {
            let (sizes, mut pieces) = (self.sizes(), Vec::new());
            for pages in self.pages(layers) {
                let start = sizes.start(pages.stage);
                pages.pieces(|region, page| start + offset(region, page), &mut pieces);
            }
            pieces
        }
    }

    fn layout() -> KvLayout {
        KvLayout::uniform(16, KvDtype::Bf16, N_LAYERS, 2, 8)
    }

    fn page_bytes() -> u64 {
        layout().rank_page_bytes(layout().group(GroupIdx(0)).layers[0]) as u64
    }

    /// Returns the offset of a page in the memory of its stage.
    fn offset(region: u32, page: u32) -> u64 {
        u64::from(region * N_BLOCKS + page) * page_bytes()
    }

    /// Every layer is copied from the sender's stage that has it to the receiver's, whatever the numbers of stages.
    #[test]
    fn layers_are_copied_between_any_two_stages() {
        for (from, to, layers, expected) in [
            (&[5][..], &[5][..], 0..5, &[(0, 0, 5)][..]),
            (&[3, 2], &[5], 0..5, &[(0, 0, 3), (1, 0, 2)]),
            (&[5], &[3, 2], 0..5, &[(0, 0, 3), (0, 1, 2)]),
            (&[3, 2], &[3, 2], 1..5, &[(0, 0, 2), (1, 1, 2)]),
            (&[3, 2], &[2, 3], 0..5, &[(0, 0, 2), (0, 1, 1), (1, 1, 2)]),
            (&[2, 2, 1], &[3, 2], 0..5, &[(0, 0, 2), (1, 0, 1), (1, 1, 1), (2, 1, 1)]),
            (&[2, 2, 1], &[3, 2], 2..4, &[(1, 0, 1), (1, 1, 1)]),
        ] {
            let (from, to) = (Side::new(from, [5, 6, 2]), Side::new(to, [1, 2, 3]));
            let jobs = pull_jobs(&from.sizes(), to.pages(layers.clone()), &from.pieces(layers.clone()));
            let jobs = jobs.expect("they fit");
            let found: Vec<_> =
                jobs.iter().map(|job| (job.from_stage, job.pages.stage, job.offsets.len() / 3)).collect();
            assert_eq!(found, expected, "{layers:?}");
            let mut copies = jobs.iter().flat_map(|job| {
                let here = job.pages.places.iter().map(|place| (job.pages.stage, *place));
                here.zip(job.offsets.iter().map(|offset| (job.from_stage, *offset)))
            });
            for layer in layers {
                let (from_stage, from_region) = from.memory.region_in_stage(GroupIdx(0), layer);
                let (to_stage, to_region) = to.memory.region_in_stage(GroupIdx(0), layer);
                for (there, here) in from.table.iter().zip(to.table) {
                    let expected =
                        ((to_stage, (to_region, here.0)), (from_stage, offset(from_region, there.0)));
                    assert_eq!(copies.next(), Some(expected), "layer {layer}, block {there:?}");
                }
            }
            assert!(copies.next().is_none());
        }
    }

    #[test]
    fn pieces_that_are_not_the_pages_of_their_span_are_refused() {
        let (from, to) = (Side::new(&[3, 2], [5, 6, 2]), Side::new(&[5], [1, 2, 3]));
        let sizes = from.sizes();
        let piece = |offset: u64, pages: u64| Piece { offset, bytes: (pages * page_bytes()) as u32 };
        let second = sizes.start(1);
        for (pieces, expected) in [
            (vec![piece(0, 2)], "a page is not whole in one piece"),
            (vec![piece(0, 4)], "the pieces are longer than their span"),
            (vec![piece(second - 16, 3)], "a page is outside of the shared memory"),
            (vec![piece(second + sizes.bytes(1), 3)], "a page is outside of the shared memory"),
            (vec![piece(0, 1), piece(second, 2)], "the pages of a layer are on several GPUs"),
        ] {
            let error = pull_jobs(&sizes, to.pages(0..1), &pieces).expect_err("they do not fit");
            assert!(error.to_string().contains(expected), "{pieces:?}: {error}");
        }
    }
}
