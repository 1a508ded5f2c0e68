//! What a sender shows to be let into a landing, and the receiver's check of it.

use chassis::guards::{Guard, stands};
use types::{Epoch, Fingerprint, Grant, KvLayout, Landing};

use super::summary;
use crate::error::TransferError;

/// What a sender shows to be let in.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Credentials {
    pub grant: Grant,
    pub epoch: Epoch,
    pub n_tokens: u32,
    pub held_tokens: u32,
    /// The ranks that share the sender's heads.
    pub tp_size: u16,
    /// Summaries of the sender's own layout and fingerprint.
    pub layout: u64,
    pub fingerprint: u64,
}

impl Credentials {
    /// What a node with this layout and fingerprint shows. They are its own, and not those that the landing claims.
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

/// What a landing demands of its sender.
#[derive(Debug)]
pub(super) struct Demands {
    layout: u64,
    fingerprint: u64,
}

impl Demands {
    pub(super) fn of(landing: &Landing) -> Self {
        Self {
            layout: summary::layout(&landing.layout),
            fingerprint: summary::fingerprint(&landing.fingerprint),
        }
    }

    /// Refuses a sender without the grant, of another life of the node, or with another layout, model or length.
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
