//! A test double of a GPU that moves KV: the processor copies between pages and slots.

use std::sync::Arc;

use async_trait::async_trait;
use device::cuda::PageDigests;
use kv_cache::KvMemory;

use super::staging::{Gathering, HostStaging, InSlot, PageMover, SlotMemory};
use crate::connectors::link::span_in::busy;
use crate::connectors::link::span_out::{PagesOut, copy_out};
use crate::digest::Digest;
use crate::error::TransferError;
use crate::landing::{OpenLanding, PageAt};
use crate::lanes::LaneSpan;
use crate::runs::Runs;

/// The staging of a node whose KV is in host memory.
#[derive(Debug)]
pub(in crate::connectors) struct DoubleStaging(pub(in crate::connectors) KvMemory);

impl HostStaging for DoubleStaging {
    fn mover(&self, slots: &SlotMemory) -> Result<Arc<dyn PageMover>, TransferError> {
        Ok(Arc::new(DoubleMover::new(self.0.clone(), slots.clone())))
    }
}

/// Copies between a node's pages in host memory and slots in host memory.
#[derive(Debug)]
pub(in crate::connectors) struct DoubleMover {
    memory: KvMemory,
    slots: SlotMemory,
}

impl DoubleMover {
    pub(in crate::connectors) fn new(memory: KvMemory, slots: SlotMemory) -> Self {
        Self { memory, slots }
    }
}

#[async_trait]
impl PageMover for DoubleMover {
    async fn gather(
        &self,
        to: InSlot,
        pages: PagesOut<'_>,
        digests: PageDigests,
    ) -> Result<Gathering, TransferError> {
        let SlotMemory::Own(slots) = &self.slots else { unreachable!("the slots of a peer are only read") };
        let slot = to.slot as u32;
        let mut slot = slots.write(0, slot..slot + 1).map_err(busy)?;
        gathered(&self.memory, pages, digests, &mut slot[to.offset..]).map(Gathering::Done)
    }

    async fn scatter(
        &self,
        from: InSlot,
        landing: &OpenLanding,
        span: &LaneSpan,
        digests: PageDigests,
    ) -> Result<Option<Vec<Digest>>, TransferError> {
        // A GPU takes a while, in which other tasks run.
        tokio::task::yield_now().await;
        let mut bytes = vec![0; landing.runs(span).bytes()];
        match &self.slots {
            SlotMemory::Own(slots) => {
                let slot = from.slot as u32;
                let slot = slots.read(0, slot..slot + 1).map_err(busy)?;
                let end = from.offset + bytes.len();
                bytes.copy_from_slice(&slot[from.offset..end]);
            }
            SlotMemory::Peer(peer) => peer
                .copy(from.offset as u64, &mut bytes)
                .map_err(|error| TransferError::Memory(error.to_string()))?,
        }
        scattered(&bytes, landing, span, digests)
    }
}

/// Copies pages into a slot, and returns their digests.
fn gathered(
    memory: &KvMemory,
    pages: PagesOut<'_>,
    digests: PageDigests,
    slot: &mut [u8],
) -> Result<Vec<Digest>, TransferError> {
    let runs = pages.runs(memory);
    copy_out(memory, &runs, &mut slot[..runs.bytes()])?;
    match digests {
        PageDigests::Make => pages.digests(memory),
        PageDigests::Skip => Ok(Vec::new()),
    }
}

/// Copies a slot's bytes into a landing's pages, and returns the digests of the pages; `None` if the landing is closed.
fn scattered(
    slot: &[u8],
    landing: &OpenLanding,
    span: &LaneSpan,
    digests: PageDigests,
) -> Result<Option<Vec<Digest>>, TransferError> {
    let table = &landing.landing().tables[usize::from(span.group.0)];
    let runs = landing.runs(span);
    let mut here = Vec::new();
    let laid = landing.while_open(|memory| {
        lay(slot, memory, &runs)?;
        for at in PageAt::all(span).filter(|_| digests == PageDigests::Make) {
            let place = table[at.block as usize].0;
            let memory = memory.rank(span.lane.to);
            let page = memory.read(at.group, at.layer_pos, place..place + 1).map_err(busy)?;
            let heads = landing.heads(span.lane, at.group, at.layer_pos).range();
            let n_tokens = landing.landing().valid_tokens(at.block);
            landing.shape(at.group, at.layer_pos).digest_heads(&page, heads, n_tokens, &mut here);
        }
        Ok(())
    });
    laid.transpose().map(|laid| laid.map(|()| here))
}

fn lay(slot: &[u8], memory: &KvMemory, runs: &Runs) -> Result<(), TransferError> {
    let mut done = 0;
    while done < runs.bytes() {
        let mut pages = runs.write(memory, done).map_err(busy)?;
        for mut slice in pages.slices() {
            let end = done + slice.len();
            slice.copy_from_slice(&slot[done..end]);
            done = end;
        }
    }
    Ok(())
}
