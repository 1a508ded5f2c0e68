//! Hot path. What a receiver sees of a sender's cards, and how it pulls KV from there.

use std::sync::Arc;

use async_trait::async_trait;
use kernels::cuda::{RemoteMemory, RemotePages};
use kv_cache::KvMemory;
use tracing::trace;
use types::KvSpan;

use super::carrier::Carriers;
use super::pages::{Alike, Offsets, card_of, wanted};
use crate::connectors::link::frame::{FrameError, Piece};
use crate::connectors::link::medium::Fetch;
use crate::connectors::link::said::{Said, differing, said_as_many};
use crate::digest::Digest;
use crate::error::TransferError;
use crate::landing::{Claim, OpenLanding};
use crate::lanes::LaneSpan;
use crate::reshard::Lane;

/// A sender's memory, mapped for as long as its link lives.
#[derive(Debug)]
pub(super) struct Pulled {
    /// For each lane the card that sends on it, as the card sees it that receives.
    remotes: Vec<(Lane, Arc<RemoteMemory>)>,
    carriers: Carriers,
}

impl Pulled {
    pub(super) fn new(remotes: Vec<(Lane, Arc<RemoteMemory>)>, carriers: Carriers) -> Self {
        Self { remotes, carriers }
    }

    fn remote(&self, lane: Lane) -> Result<&RemoteMemory, FrameError> {
        let found = self.remotes.iter().find(|(of, _)| *of == lane);
        found.map(|(_, remote)| &**remote).ok_or(FrameError::Unexpected("KV of a card that was not shown"))
    }

    /// Pulls pages that are alike. Answers their digests as they are here; `None` once the landing is closed.
    async fn pull(
        &self,
        landing: &OpenLanding,
        lane: Lane,
        (pages, offsets): (&Alike, &[u64]),
        verifies: bool,
    ) -> Result<Option<Vec<u64>>, TransferError> {
        let (remote, carrier) = (self.remote(lane)?, self.carriers.of(lane.to));
        let room = carrier.room().await?;
        let from = RemotePages { memory: remote, offsets, runs: pages.there() };
        let start = |memory: &KvMemory| {
            let memory = card_of(memory, lane.to)?.memory();
            carrier.courier().fetch(from, memory, pages.some(), verifies).map_err(TransferError::device)
        };
        let Some((errand, flight)) = landing.take_off(start) else { return Ok(None) };
        trace!(target: "walk", transfer = %landing.landing().transfer, "copy launched");
        room.take(errand?, Some(flight)).await.map(Some)
    }
}

impl Drop for Pulled {
    fn drop(&mut self) {
        for (lane, remote) in self.remotes.drain(..) {
            self.carriers.of(lane.to).unmap(remote);
        }
    }
}

#[async_trait]
impl Fetch for Pulled {
    async fn fetch(
        &self,
        landing: &OpenLanding,
        span: &LaneSpan,
        said: Said,
        pieces: &[Piece],
    ) -> Result<Vec<KvSpan>, TransferError> {
        let claim = landing.claim_said(span, &said)?;
        let errands = errands(landing, span, pieces)?;
        if claim == Claim::Skip {
            return Ok(Vec::new());
        }
        let (transfer, blocks) = (landing.landing().transfer, &span.blocks);
        trace!(target: "walk", %transfer, ?blocks, "copy begins");
        let (mut bytes, mut here) = (0, Vec::new());
        for (pages, offsets) in &errands {
            match self.pull(landing, span.lane, (pages, offsets), said.is_something()).await? {
                Some(digests) => here.extend(digests.into_iter().map(Digest)),
                None => return Ok(Vec::new()),
            }
            bytes += pages.bytes();
        }
        trace!(target: "walk", %transfer, ?blocks, "copy done");
        let Some(said) = said.heard().await else { return Ok(Vec::new()) };
        said_as_many(&said, &here)?;
        let wrong = differing(landing, span, &said, &here);
        // A landing that has just failed has nothing to ask for.
        Ok(landing.arrived(span, bytes, &wrong).map(|()| wrong).unwrap_or_default())
    }
}

/// The pages here, and where each of them lies at the sender.
fn errands(
    landing: &OpenLanding,
    span: &LaneSpan,
    pieces: &[Piece],
) -> Result<Vec<(Alike, Vec<u64>)>, TransferError> {
    let mut offsets = Offsets::new(pieces);
    let mut errands = Vec::new();
    for pages in wanted(landing, span)? {
        let page_bytes = pages.there().page_bytes();
        let there: Option<Vec<u64>> = pages.places.iter().map(|_| offsets.next(page_bytes)).collect();
        errands.push((pages, there.ok_or(FrameError::Body("a page is not whole in one piece"))?));
    }
    if !offsets.is_empty() {
        return Err(FrameError::Body("the pieces are longer than their span").into());
    }
    Ok(errands)
}
