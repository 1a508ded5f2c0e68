//! The progress of a landing: its pages, its handoff, its sender, and its outcome.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use chassis::guards::{Guard, stands};
use tokio::time::Instant;
use types::{Handoff, TransferId};

use crate::arrived::ArrivedKv;
use crate::error::TransferError;
use crate::lanes::LaneSpan;
use crate::pages::Pages;
use crate::processes::LandedPart;

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
    /// Whether each other process of this node has verified all pages of its layers.
    landed: Vec<bool>,
    /// The number of pages that other processes have verified.
    pages_elsewhere: usize,
    pub(super) opener: Option<Arc<dyn Opener>>,
    pub(super) outcome: Option<Outcome>,
}

/// How a landing ended.
#[derive(Debug)]
pub(crate) enum Outcome {
    Arrived(ArrivedKv),
    /// The landing succeeded, and its arrival or the head has the KV already.
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
    /// `n_others` is the number of other processes that take KV of their layers.
    pub(super) fn new(pages: Pages, n_others: usize) -> Self {
        let landed = vec![false; n_others];
        Self {
            pages,
            first_byte: None,
            bytes: 0,
            handoff: None,
            landed,
            pages_elsewhere: 0,
            opener: None,
            outcome: None,
        }
    }

    /// Notes that another process of this node has verified all pages of its layers.
    pub(super) fn landed_elsewhere(&mut self, process: usize, landed: &LandedPart) {
        let LandedPart { pages, bytes, moved } = *landed;
        if std::mem::replace(&mut self.landed[process], true) {
            return;
        }
        self.pages_elsewhere += pages as usize;
        self.bytes += bytes;
        let now = Instant::now();
        let first = now.checked_sub(moved).unwrap_or(now);
        if bytes > 0 {
            self.first_byte = Some(self.first_byte.map_or(first, |ours| ours.min(first)));
        }
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

    /// Returns the number of received bytes, and the time from the first one until now; no time if nothing was
    /// sent.
    pub(super) fn moved(&self) -> (u64, Duration) {
        (self.bytes, self.first_byte.map(|first| first.elapsed()).unwrap_or_default())
    }

    /// Returns the number of verified pages of all processes.
    pub(super) fn n_verified(&self) -> usize {
        self.pages.n_verified() + self.pages_elsewhere
    }

    pub(super) fn has_landed(&self, process: usize) -> bool {
        self.landed[process]
    }

    /// Returns whether all pages of all processes are verified.
    pub(super) fn all_verified(&self) -> bool {
        let all_landed = self.landed.iter().all(|landed| *landed) || !stands(Guard::AllLanded);
        self.pages.all_verified() && all_landed
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
