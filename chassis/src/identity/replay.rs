//! The memory of accepted calls' nonces, so that a recorded call is not accepted again.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use super::CLOCK_SKEW_MAX;

pub(super) type Nonce = [u8; 16];

/// The number of remembered nonces: about 4,000 calls per second for the time that nonces are valid.
const NONCES_MAX: usize = 1 << 18;

/// Nonces by the time in their call. When the memory is full, calls older than all remembered nonces are refused.
#[derive(Debug)]
pub(super) struct SeenNonces {
    nonces_max: usize,
    /// The mutex is held for one look-up, never across an await.
    seen: Mutex<Seen>,
}

#[derive(Debug, Default)]
struct Seen {
    nonces: BTreeSet<(u64, Nonce)>,
    /// Nonces with times up to this one may be forgotten, so calls with such times are refused.
    forgotten_to_ms: u64,
}

impl Default for SeenNonces {
    fn default() -> Self {
        Self::with_room(NONCES_MAX)
    }
}

impl SeenNonces {
    pub(super) fn with_room(nonces_max: usize) -> Self {
        Self { nonces_max, seen: Mutex::default() }
    }

    /// Returns whether the call is new. The caller has checked that `sent_ms` is within the allowed skew of
    /// `now_ms`.
    pub(super) fn is_new(&self, sent_ms: u64, nonce: Nonce, now_ms: u64) -> bool {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let oldest_allowed = now_ms.saturating_sub(CLOCK_SKEW_MAX.as_millis() as u64);
        while seen.nonces.first().is_some_and(|(sent, _)| *sent < oldest_allowed) {
            seen.nonces.pop_first();
        }
        if sent_ms <= seen.forgotten_to_ms || !seen.nonces.insert((sent_ms, nonce)) {
            return false;
        }
        if seen.nonces.len() > self.nonces_max
            && let Some((forgotten, _)) = seen.nonces.pop_first()
        {
            seen.forgotten_to_ms = forgotten;
        }
        true
    }
}
