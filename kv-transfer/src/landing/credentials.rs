//! The credentials that a sender shows to open a landing, and the receiver's check.

use chassis::guards::{Guard, stands};
use types::{Epoch, Fingerprint, Grant, KvLayout, Landing};

use super::summary;
use crate::error::TransferError;

/// The values that a sender shows to open a landing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Credentials {
    pub grant: Grant,
    pub epoch: Epoch,
    pub n_tokens: u32,
    pub held_tokens: u32,
    /// The number of ranks of the sender.
    pub tp_size: u16,
    /// The summary of the sender's own layout.
    pub layout: u64,
    pub fingerprint: u64,
}

impl Credentials {
    /// Returns the credentials of a node with this layout and fingerprint. Both are the node's own, not
    /// copied from the landing.
    pub fn new(landing: &Landing, layout: &KvLayout, fingerprint: &Fingerprint) -> Self {
        Self {
            grant: landing.grant,
            epoch: landing.epoch,
            n_tokens: landing.n_tokens,
            held_tokens: landing.held_tokens,
            tp_size: layout.shard.tp_size,
            layout: summary::layout(layout),
            fingerprint: summary::fingerprint(fingerprint),
        }
    }
}

/// The summaries that a sender must show to open this node's landings.
#[derive(Debug)]
pub(super) struct ExpectedSummaries {
    layout: u64,
    fingerprint: u64,
}

impl ExpectedSummaries {
    pub(super) fn of(landing: &Landing) -> Self {
        Self {
            layout: summary::layout(&landing.layout),
            fingerprint: summary::fingerprint(&landing.fingerprint),
        }
    }

    /// Refuses a sender with a wrong grant, a grant of another life of the node, or another layout, model or length.
    pub(super) fn check(&self, shown: &Credentials, landing: &Landing) -> Result<(), TransferError> {
        if shown.grant != landing.grant && stands(Guard::Grant) {
            return Err(TransferError::WrongGrant);
        }
        if shown.epoch != landing.epoch && stands(Guard::Epoch) {
            return Err(TransferError::WrongEpoch);
        }
        let refuse = |what: &str| Err(TransferError::Mismatch(format!("the two sides' {what} differ")));
        if shown.layout != self.layout {
            return refuse("layouts");
        }
        if shown.fingerprint != self.fingerprint {
            return refuse("models");
        }
        if (shown.n_tokens, shown.held_tokens) != (landing.n_tokens, landing.held_tokens) {
            return refuse("lengths");
        }
        Ok(())
    }
}
