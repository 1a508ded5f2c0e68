//! Hot path. What a receiver sees of a sender's card, and how it pulls KV from there.

use std::sync::Arc;

use async_trait::async_trait;
use kernels::cuda::RemoteMemory;
use kv_cache::KvMemory;
use types::KvSpan;

use super::carrier::Carrier;
use super::on_card;
use super::pages::{Alike, Offsets, alike};
use crate::connectors::link::frame::{FrameError, Piece};
use crate::connectors::link::medium::Fetch;
use crate::connectors::link::said::{Said, differing};
use crate::digest::Digest;
use crate::error::TransferError;
use crate::landing::{Claim, OpenLanding};
use crate::lanes::LaneSpan;

/// A sender's memory, mapped for as long as its link lives.
#[derive(Debug)]
pub(super) struct Pulled {
    remote: Arc<RemoteMemory>,
    carrier: Arc<Carrier>,
}

impl Pulled {
    pub(super) fn new(remote: Arc<RemoteMemory>, carrier: Arc<Carrier>) -> Self {
        Self { remote, carrier }
    }

    /// Pulls pages that are alike. Answers their digests as they are here; `None` once the landing is closed.
    async fn pull(
        &self,
        landing: &OpenLanding,
        pages: &Alike,
        offsets: &[u64],
        verifies: bool,
    ) -> Result<Option<Vec<u64>>, TransferError> {
        let room = self.carrier.room().await?;
        let courier = self.carrier.courier();
        let start = |memory: &KvMemory| {
            let memory = on_card(memory)?.memory();
            courier
                .fetch(&self.remote, offsets, memory, pages.some(), verifies)
                .map_err(TransferError::device)
        };
        let Some((errand, flight)) = landing.take_off(start) else { return Ok(None) };
        room.take(errand?, Some(flight)).await.map(Some)
    }
}

impl Drop for Pulled {
    fn drop(&mut self) {
        self.carrier.unmap(Arc::clone(&self.remote));
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
        let claim = match &said {
            Said::Here(digests) => landing.claim(span, digests.len())?,
            Said::Later(_) => landing.claim_promised(span)?,
        };
        let errands = errands(landing, span, pieces)?;
        if claim == Claim::Skip {
            return Ok(Vec::new());
        }
        let (mut bytes, mut here) = (0, Vec::new());
        for (pages, offsets) in &errands {
            match self.pull(landing, pages, offsets, said.is_something()).await? {
                Some(digests) => here.extend(digests.into_iter().map(Digest)),
                None => return Ok(Vec::new()),
            }
            bytes += offsets.len() * pages.page_bytes();
        }
        let Some(said) = said.heard().await else { return Ok(Vec::new()) };
        if said.len() != here.len() {
            return Err(FrameError::Body("not as many digests as were promised").into());
        }
        let wrong = differing(landing, span, &said, &here);
        // A landing that has just failed has nothing to ask for.
        Ok(landing.arrived(span, bytes, &wrong).map(|()| wrong).unwrap_or_default())
    }
}

/// The pages here, and where each of them lies at the sender.
fn errands(
    landing: &OpenLanding,
    span: &KvSpan,
    pieces: &[Piece],
) -> Result<Vec<(Alike, Vec<u64>)>, TransferError> {
    let table = &landing.landing().tables[usize::from(span.group.0)];
    let mut offsets = Offsets::new(pieces);
    let mut errands = Vec::new();
    for pages in alike(on_card(landing.memory())?, landing.landing(), table, span) {
        let of_page = |_: &(u32, u32)| offsets.next(pages.page_bytes());
        let there: Option<Vec<u64>> = pages.places.iter().map(of_page).collect();
        errands.push((pages, there.ok_or(FrameError::Body("a page is not whole in one piece"))?));
    }
    if !offsets.is_empty() {
        return Err(FrameError::Body("the pieces are longer than their span").into());
    }
    Ok(errands)
}
