//! The progress of a landing: its pages, its handoff, its sender, and its outcome.

use std::fmt::Debug;
use std::sync::Arc;

use tokio::time::Instant;
use types::{Handoff, TransferId};

use crate::arrived::ArrivedKv;
use crate::error::TransferError;
use crate::lanes::LaneSpan;
use crate::pages::Pages;

/// The sender's side of a landing. It is notified once, when the landing ends.
pub trait Opener: Debug + Send + Sync {
    /// Called from the code that ends the landing, which may be a drop, so it must not wait.
    fn ended(&self, transfer: TransferId, outcome: Result<(), &TransferError>);
}

/// The progress of one landing.
#[derive(Debug)]
pub(super) struct Progress {
    pub(super) pages: Pages,
    pub(super) first_byte: Option<Instant>,
    pub(super) bytes: u64,
    pub(super) handoff: Option<Handoff>,
    pub(super) opener: Option<Arc<dyn Opener>>,
    pub(super) outcome: Option<Outcome>,
}

/// How a landing ended.
#[derive(Debug)]
pub(crate) enum Outcome {
    Arrived(ArrivedKv),
    /// The landing succeeded, and its arrival has the KV already.
    Taken,
    Failed(TransferError),
}

/// The answer to a frame that wants to write a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// The pages are claimed for this frame: write them.
    Write,
    /// The span is a repetition, or the landing has ended: read the bytes and drop them.
    Skip,
}

// === impl Progress ===

impl Progress {
    pub(super) fn new(pages: Pages) -> Self {
        Self { pages, first_byte: None, bytes: 0, handoff: None, opener: None, outcome: None }
    }

    /// Registers the sender, once.
    pub(super) fn let_in(&mut self, opener: Arc<dyn Opener>) -> Result<(), TransferError> {
        match &self.outcome {
            Some(Outcome::Failed(error)) => Err(error.clone()),
            Some(Outcome::Arrived(_) | Outcome::Taken) => Err(TransferError::AlreadyOpened),
            None if self.opener.is_some() => Err(TransferError::AlreadyOpened),
            None => {
                self.opener = Some(opener);
                Ok(())
            }
        }
    }

    /// Claims a span's pages if they are still wanted.
    pub(super) fn claim(&mut self, span: &LaneSpan) -> Claim {
        if self.outcome.is_some() || !self.pages.claim(span) {
            return Claim::Skip;
        }
        self.first_byte.get_or_insert_with(Instant::now);
        Claim::Write
    }

    /// Returns whether all pages are verified and the handoff has come.
    pub(super) fn is_whole(&self) -> bool {
        self.pages.all_verified() && self.handoff.is_some()
    }

    /// Returns the outcome, if the landing has ended. `Arrived` is returned once.
    pub(super) fn take_outcome(&mut self) -> Option<Outcome> {
        match &self.outcome {
            None => None,
            Some(Outcome::Failed(error)) => Some(Outcome::Failed(error.clone())),
            Some(_) => self.outcome.replace(Outcome::Taken),
        }
    }
}
