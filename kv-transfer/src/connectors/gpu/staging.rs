//! Hot path. KV between the pages of GPUs and slots, in which it travels.
//!
//! A kernel gathers and digests pages into a slot, and another one scatters a slot into pages. Slots lie on the GPU, or
//! in host memory that GPUs access directly: `docs/decisions/0030-gpus-access-slots-on-the-host.md`.

use std::fmt::Debug;
use std::sync::Arc;

use async_trait::async_trait;
use device::cuda::{CopyDone, PageCopierSize, PageDigests, SlotAt, Slots};
use device::{DeviceMemory, HostMemory, PeerMemory};
use kv_cache::KvMemory;
use tokio::sync::OnceCell;
use tokio::task::spawn_blocking;
use tracing::{trace, warn};
use types::{KvSpan, in_full};

use super::copy_thread::{CopyThreads, Guard, Held, UnderWay};
use super::pages::{card_of, check, sent, wanted};
use crate::connector_parts::ConnectorParts;
use crate::connectors::link::frame::FrameError;
use crate::connectors::link::frame_digests::{FrameDigests, check_count, differing};
use crate::connectors::link::span_out::PagesOut;
use crate::digest::Digest;
use crate::error::TransferError;
use crate::landing::{Claim, OpenLanding};
use crate::lanes::LaneSpan;
use crate::pending_copies::PendingCopy;

/// A place in a slot.
#[derive(Debug)]
pub(in crate::connectors) struct InSlot {
    pub(in crate::connectors) slot: usize,
    pub(in crate::connectors) offset: usize,
    /// It is dropped when no copy job uses the slot any more.
    pub(in crate::connectors) guard: Option<Guard>,
}

impl InSlot {
    /// Returns the start of a slot that its user keeps from others.
    pub(in crate::connectors) fn of(slot: usize) -> Self {
        Self { slot, offset: 0, guard: None }
    }

    /// Counts the copy jobs that use the slot, as one copy.
    pub(in crate::connectors) fn counted(self, pending_copy: PendingCopy) -> Self {
        let guard = self.guard.clone();
        Self { guard: Some(Arc::new((guard, pending_copy))), ..self }
    }
}

/// Copies KV between a node's pages and slots.
#[async_trait]
pub(in crate::connectors) trait PageMover: Debug + Send + Sync {
    /// Starts to gather pages into a slot, one after the other. The slot's guard is dropped when no copy job reads the
    /// pages any more, also after an error or a drop of the future.
    async fn gather(
        &self,
        to: InSlot,
        pages: PagesOut<'_>,
        digests: PageDigests,
    ) -> Result<Gathering, TransferError>;

    /// Scatters a slot into a landing's pages, and returns the digests that it made. Returns `None`, without
    /// touching a page, if the landing is closed.
    async fn scatter(
        &self,
        from: InSlot,
        landing: &OpenLanding,
        span: &LaneSpan,
        digests: PageDigests,
    ) -> Result<Option<Vec<Digest>>, TransferError>;
}

/// Pages that are being gathered into a slot.
#[derive(Debug)]
pub(in crate::connectors) enum Gathering {
    /// The GPU's copy jobs, and the events that mark their ends.
    UnderWay(Vec<(UnderWay, CopyDone)>),
    Done(Vec<Digest>),
}

impl Gathering {
    /// Returns the copy jobs that a message must wait for.
    pub(in crate::connectors) fn before(&self) -> Vec<CopyDone> {
        match self {
            Self::Done(_) => Vec::new(),
            Self::UnderWay(parts) => parts.iter().map(|(_, done)| done.clone()).collect(),
        }
    }

    /// Waits until all pages are gathered. Returns their digests, or none if they were not requested.
    pub(in crate::connectors) async fn digests(self) -> Result<Vec<Digest>, TransferError> {
        let parts = match self {
            Self::Done(digests) => return Ok(digests),
            Self::UnderWay(parts) => parts,
        };
        let mut digests = Vec::new();
        for (part, _) in parts {
            digests.extend(part.digests().await?.into_iter().map(Digest));
        }
        Ok(digests)
    }
}

/// Moves KV between a node's GPUs and one group of slots.
#[derive(Debug)]
pub(in crate::connectors) struct CardMover {
    memory: KvMemory,
    copy_threads: CopyThreads,
    /// `None` only during the drop.
    slots: Option<Arc<Slots>>,
}

#[async_trait]
impl PageMover for CardMover {
    async fn gather(
        &self,
        to: InSlot,
        pages: PagesOut<'_>,
        digests: PageDigests,
    ) -> Result<Gathering, TransferError> {
        let rank = pages.piece.lane.from;
        let (mut offset, mut parts) = (to.offset, Vec::new());
        for pages in sent(&self.memory, pages) {
            let card = card_of(&self.memory, rank, pages.stage)?;
            let copy_thread = self.copy_threads.of(rank, pages.stage);
            let room = copy_thread.room().await?;
            let slot = SlotAt { slots: self.slots(), slot: to.slot, offset };
            let copy_job = copy_thread.copier().gather(card.memory(), pages.some(), slot, digests);
            let copy_job = copy_job.map_err(TransferError::device)?;
            let done = copy_job.done();
            parts.push((room.fill(copy_job, self.held(&to, None)), done));
            offset += pages.bytes();
        }
        Ok(Gathering::UnderWay(parts))
    }

    async fn scatter(
        &self,
        from: InSlot,
        landing: &OpenLanding,
        span: &LaneSpan,
        digests: PageDigests,
    ) -> Result<Option<Vec<Digest>>, TransferError> {
        let rank = span.lane.to;
        let (mut offset, mut here) = (from.offset, Vec::new());
        for pages in wanted(landing, span) {
            let copy_thread = self.copy_threads.of(rank, pages.stage);
            let room = copy_thread.room().await?;
            let slot = SlotAt { slots: self.slots(), slot: from.slot, offset };
            let start = |memory: &KvMemory| {
                let card = card_of(memory, rank, pages.stage)?.memory();
                copy_thread.copier().scatter(slot, card, pages.some(), digests).map_err(TransferError::device)
            };
            let Some((copy_job, pending_copy)) = landing.begin_copy(start) else { return Ok(None) };
            here.extend(room.take(copy_job?, self.held(&from, Some(pending_copy))).await?);
            offset += pages.bytes();
        }
        Ok(Some(here.into_iter().map(Digest).collect()))
    }
}

impl CardMover {
    pub(in crate::connectors) fn new(memory: KvMemory, copy_threads: CopyThreads, slots: Slots) -> Self {
        Self { memory, copy_threads, slots: Some(Arc::new(slots)) }
    }

    pub(in crate::connectors) fn slots(&self) -> &Arc<Slots> {
        self.slots.as_ref().expect("the slots are there until the drop")
    }

    /// Returns the values that must live until a copy job is done: the slots, the slot's guard and the landing's count
    /// of copies.
    fn held(&self, place: &InSlot, pending_copy: Option<PendingCopy>) -> Held {
        Held { pending_copy, slots: Some(Arc::clone(self.slots()) as Guard), slot: place.guard.clone() }
    }
}

impl Drop for CardMover {
    fn drop(&mut self) {
        // Giving back slots waits for the GPU, so the copy thread does it.
        if let Some(slots) = self.slots.take() {
            self.copy_threads.any().release(slots);
        }
    }
}

/// Takes the KV of one frame from a slot into the landing's pages and verifies it. Returns the pages that failed
/// verification, which must be sent again.
pub(in crate::connectors) async fn take_slot(
    mover: &dyn PageMover,
    from: InSlot,
    landing: &OpenLanding,
    span: &LaneSpan,
    bytes: usize,
    digests: FrameDigests,
) -> Result<Vec<KvSpan>, TransferError> {
    let (transfer, blocks) = (landing.landing().transfer, &span.blocks);
    let here = mover.scatter(from, landing, span, digests.wanted_here()).await?;
    let Some(here) = here else { return Ok(Vec::new()) };
    trace!(target: "walk", %transfer, ?blocks, "KV of a slot scattered into pages");
    let Some(said) = digests.wait().await else { return Ok(Vec::new()) };
    check_count(&said, &here)?;
    let wrong = differing(landing, span, &said, &here);
    // A landing that has just failed requests no page again, so the list is empty then.
    Ok(landing.arrived(span, bytes, &wrong).map(|()| wrong).unwrap_or_default())
}

/// Claims a frame's span. Returns an error if the frame's KV does not have the length of its span.
pub(in crate::connectors) fn claim_slot(
    landing: &OpenLanding,
    span: &LaneSpan,
    bytes: usize,
    digests: &FrameDigests,
) -> Result<Claim, TransferError> {
    let claim = landing.claim_frame(span, digests)?;
    if landing.runs(span).bytes() != bytes {
        return Err(FrameError::Body("the KV does not have the length of its span").into());
    }
    Ok(claim)
}

// === slots in host memory ===

/// Host memory with slots.
#[derive(Clone, Debug)]
pub(in crate::connectors) enum SlotMemory {
    /// This process's, with one region whose pages are the slots.
    Own(Arc<HostMemory>),
    /// Another process's, all of it one slot that is only read.
    Peer(Arc<PeerMemory>),
}

/// Lets a node's GPUs access slots in host memory.
pub(in crate::connectors) trait HostStaging: Debug + Send + Sync {
    /// Makes the mover for some slots. It may take some milliseconds.
    fn mover(&self, memory: &SlotMemory) -> Result<Arc<dyn PageMover>, TransferError>;
}

/// The staging of a node's GPUs.
#[derive(Debug)]
struct CardStaging {
    memory: KvMemory,
    copy_threads: CopyThreads,
}

/// The multiprocessors that gather and scatter: enough to saturate PCIe.
const MULTIPROCESSORS: u32 = 16;

/// Returns the staging of a node whose KV is on GPUs; `None` if it is in host memory, or if the GPU cannot move it 16
/// bytes at a time.
pub(in crate::connectors) fn of_cards(
    parts: &ConnectorParts,
) -> Result<Option<Arc<dyn HostStaging>>, TransferError> {
    if !parts.memory.is_on_cards() {
        return Ok(None);
    }
    if let Err(error) = check(&parts.memory) {
        warn_of(&error);
        return Ok(None);
    }
    let size = PageCopierSize::of(parts.settings.multiprocessors(MULTIPROCESSORS));
    let copy_threads = CopyThreads::start(&parts.memory, size, &parts.gate)?;
    Ok(Some(Arc::new(CardStaging { memory: parts.memory.clone(), copy_threads })))
}

pub(super) fn warn_of(error: &TransferError) {
    warn!(error = in_full(error), "GPUs cannot access slots in host memory, the processor copies KV");
}

impl HostStaging for CardStaging {
    fn mover(&self, memory: &SlotMemory) -> Result<Arc<dyn PageMover>, TransferError> {
        let users: Vec<&DeviceMemory> = self.memory.on_cards().map(|card| card.memory()).collect();
        let slots = match memory {
            SlotMemory::Own(memory) => Slots::in_host_memory(memory, &users),
            SlotMemory::Peer(memory) => Slots::in_peer_memory(Arc::clone(memory), &users),
        };
        let slots = slots.map_err(TransferError::device)?;
        Ok(Arc::new(CardMover::new(self.memory.clone(), self.copy_threads.clone(), slots)))
    }
}

/// The mover of some slots, made at the first use. `None` if the GPU cannot access the slots: then the processor
/// copies.
#[derive(Debug)]
pub(in crate::connectors) struct LazyMover {
    /// `None` if the processor copies.
    staging: Option<Arc<dyn HostStaging>>,
    slots: SlotMemory,
    mover: OnceCell<Option<Arc<dyn PageMover>>>,
}

impl LazyMover {
    pub(in crate::connectors) fn new(staging: Option<Arc<dyn HostStaging>>, slots: SlotMemory) -> Self {
        Self { staging, slots, mover: OnceCell::new() }
    }

    /// Returns the mover. The first call page-locks the slots, on a blocking thread.
    pub(in crate::connectors) async fn get(&self) -> Result<Option<&Arc<dyn PageMover>>, TransferError> {
        let Some(staging) = &self.staging else { return Ok(None) };
        let make = || async {
            let (staging, slots) = (Arc::clone(staging), self.slots.clone());
            let made = spawn_blocking(move || staging.mover(&slots)).await;
            made.map_err(|_| TransferError::Closed).map(|made| match made {
                Ok(mover) => Some(mover),
                Err(error) => {
                    warn_of(&error);
                    None
                }
            })
        };
        Ok(self.mover.get_or_try_init(make).await?.as_ref())
    }
}
