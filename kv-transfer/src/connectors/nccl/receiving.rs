//! Hot path. The receiver's end of a pair: asks for messages in the order of the sender's frames, and lays them into pages.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use tokio::sync::oneshot;
use types::KvSpan;

use super::cable::{Cable, Slot};
use crate::connectors::link::frame::{FrameError, Piece};
use crate::connectors::link::medium::{Fetch, Posts};
use crate::connectors::link::said::{Said, differing};
use crate::error::TransferError;
use crate::landing::{Claim, OpenLanding};
use crate::lanes::LaneSpan;

/// See the module.
#[derive(Debug)]
pub(super) struct Receiving {
    cable: Arc<Cable>,
    /// Messages so far.
    n_messages: AtomicU64,
}

/// A message that was asked for. Dropped, it is received all the same, and forgotten.
#[derive(Debug)]
struct Posted {
    cable: Arc<Cable>,
    slot: Arc<Slot>,
    bytes: usize,
    /// Taken once. Held for a look.
    received: Mutex<Option<oneshot::Receiver<Result<(), TransferError>>>>,
}

impl Receiving {
    pub(super) fn over(cable: Cable) -> Self {
        Self { cable: Arc::new(cable), n_messages: AtomicU64::new(0) }
    }
}

#[async_trait]
impl Posts for Receiving {
    async fn post(&self, number: u64, bytes: u32) -> Result<Arc<dyn Fetch>, TransferError> {
        let bytes = bytes as usize;
        if self.n_messages.fetch_add(1, Ordering::Relaxed) != number {
            return Err(FrameError::Unexpected("a message out of its turn").into());
        }
        if bytes == 0 || bytes > self.cable.stage().slot_bytes() {
            return Err(FrameError::Body("a message of a length that no slot has").into());
        }
        let slot = Arc::new(self.cable.slot().await?);
        let received = self.cable.put(Arc::clone(&slot), bytes).await?;
        let received = Mutex::new(Some(received));
        Ok(Arc::new(Posted { cable: Arc::clone(&self.cable), slot, bytes, received }))
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
        let Said::Here(said) = said else { return Err(FrameError::Unexpected("a promise").into()) };
        let claim = landing.claim(span, said.len())?;
        if landing.runs(span).bytes() != self.bytes {
            return Err(FrameError::Body("the message is not as long as its span").into());
        }
        let received = self.received.lock().unwrap_or_else(PoisonError::into_inner).take();
        received.ok_or(TransferError::Closed)?.await.map_err(|_| TransferError::Closed)??;
        if claim == Claim::Skip {
            return Ok(Vec::new());
        }
        let here = self.cable.stage().scatter(self.slot.nth, landing, span, !said.is_empty()).await?;
        let Some(here) = here else { return Ok(Vec::new()) };
        let wrong = differing(landing, span, &said, &here);
        // A landing that has just failed has nothing to ask for.
        Ok(landing.arrived(span, self.bytes, &wrong).map(|()| wrong).unwrap_or_default())
    }
}
