//! Hot path. The receiver's end of a pair: asks for messages in the order of the sender's frames, and lays them into pages.

use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use tokio::sync::oneshot;
use tracing::trace;
use types::KvSpan;

use super::cable::{Cable, Slot};
use super::cables::Cables;
use crate::connectors::link::frame::{FrameError, Piece};
use crate::connectors::link::medium::{Fetch, Posts};
use crate::connectors::link::said::{Said, differing, said_as_many};
use crate::error::TransferError;
use crate::landing::{Claim, OpenLanding};
use crate::lanes::LaneSpan;
use crate::reshard::Lane;

/// See the module.
#[derive(Debug)]
pub(super) struct Receiving(pub(super) Cables);

/// A message that was asked for. Dropped, it is received all the same, and forgotten.
#[derive(Debug)]
struct Posted {
    cable: Arc<Cable>,
    slot: Arc<Slot>,
    bytes: usize,
    /// Taken once. Held for a look.
    received: Mutex<Option<oneshot::Receiver<Result<(), TransferError>>>>,
}

#[async_trait]
impl Posts for Receiving {
    fn n_lanes(&self) -> usize {
        self.0.len()
    }

    fn expect(&self) {
        self.0.expect();
    }

    async fn post(&self, lane: Lane, number: u64, bytes: u32) -> Result<Arc<dyn Fetch>, TransferError> {
        let (line, bytes) = (self.0.of(lane)?, bytes as usize);
        if line.number() != number {
            return Err(FrameError::Unexpected("a message out of its turn").into());
        }
        let cable = Arc::clone(&line.cable);
        if bytes == 0 || bytes > cable.stage().slot_bytes() {
            return Err(FrameError::Body("a message of a length that no slot has").into());
        }
        let slot = Arc::new(cable.slot().await?);
        let received = cable.put(Arc::clone(&slot), bytes, Vec::new()).await?;
        Ok(Arc::new(Posted { cable, slot, bytes, received: Mutex::new(Some(received)) }))
    }
}

#[async_trait]
impl Fetch for Posted {
    async fn fetch(
        &self,
        landing: &OpenLanding,
        span: &LaneSpan,
        said: Said,
        _pieces: &[Piece],
    ) -> Result<Vec<KvSpan>, TransferError> {
        let claim = landing.claim_said(span, &said)?;
        if landing.runs(span).bytes() != self.bytes {
            return Err(FrameError::Body("the message is not as long as its span").into());
        }
        let received = self.received.lock().unwrap_or_else(PoisonError::into_inner).take();
        received.ok_or(TransferError::Closed)?.await.map_err(|_| TransferError::Closed)??;
        if claim == Claim::Skip {
            return Ok(Vec::new());
        }
        let (transfer, blocks) = (landing.landing().transfer, &span.blocks);
        trace!(target: "walk", %transfer, ?blocks, "message taken");
        let here = self.cable.stage().scatter(self.slot.nth, landing, span, said.is_something()).await?;
        let Some(here) = here else { return Ok(Vec::new()) };
        trace!(target: "walk", %transfer, ?blocks, "scattered");
        let Some(said) = said.heard().await else { return Ok(Vec::new()) };
        said_as_many(&said, &here)?;
        let wrong = differing(landing, span, &said, &here);
        // A landing that has just failed has nothing to ask for.
        Ok(landing.arrived(span, self.bytes, &wrong).map(|()| wrong).unwrap_or_default())
    }
}
