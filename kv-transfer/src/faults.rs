//! Faults that a test plays on a wire, between the digest and the peer.
//!
//! Every connector asks its [`Faults`] once per frame of KV what shall become of it. In production there are none and
//! the answer costs one comparison. [`Flaky`](crate::connectors::flaky::Flaky) is the way to set them.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// One fault: what, from which byte on, and how often.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    pub kind: FaultKind,
    /// Bytes of KV that go through unharmed first, counted from when the fault comes first in line.
    pub after_bytes: u64,
    /// Frames that are hit.
    pub times: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// One bit of the frame's KV is flipped behind the digest. Counted modulo the frame's bits.
    FlipBit(u64),
    /// The first digest of the frame is wrong.
    WrongDigest,
    /// The connection is lost before the frame is written.
    Lose,
    /// The frame leaves late.
    Delay(Duration),
    /// The frame, and all that waits behind it, never leaves.
    Stall,
    /// The frame is sent twice.
    Duplicate,
}

impl Fault {
    /// Hits the next frame, once.
    pub fn once(kind: FaultKind) -> Self {
        Self { kind, after_bytes: 0, times: 1 }
    }

    #[must_use]
    pub fn after(self, after_bytes: u64) -> Self {
        Self { after_bytes, ..self }
    }

    #[must_use]
    pub fn times(self, times: u32) -> Self {
        Self { times, ..self }
    }
}

/// The faults of one connector, played in the order in which they were injected. Clones are the same faults.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// `None` is production: there is nothing to lock. Held for one look, never across an await.
    queue: Option<Arc<Mutex<VecDeque<Fault>>>>,
}

impl Faults {
    /// No faults, ever.
    pub fn none() -> Self {
        Self::default()
    }

    /// No faults yet.
    pub fn programmable() -> Self {
        Self { queue: Some(Arc::default()) }
    }

    /// # Panics
    /// If these are [`Faults::none`].
    pub fn inject(&self, fault: Fault) {
        let queue = self.queue.as_ref().expect("faults are injected into a flaky connector");
        queue.lock().unwrap_or_else(PoisonError::into_inner).push_back(fault);
    }

    /// Faults that were not played yet.
    pub fn n_left(&self) -> usize {
        let Some(queue) = &self.queue else { return 0 };
        queue.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// What happens to a frame of `bytes` bytes of KV that is about to leave.
    pub(crate) fn next(&self, bytes: usize) -> Option<FaultKind> {
        let mut queue = self.queue.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner);
        let first = queue.front_mut()?;
        if first.after_bytes > 0 {
            first.after_bytes = first.after_bytes.saturating_sub(bytes as u64);
            return None;
        }
        let kind = first.kind.clone();
        first.times -= 1;
        if first.times == 0 {
            queue.pop_front();
        }
        Some(kind)
    }
}

/// Flips one bit of `bytes`, counted modulo their number.
pub(crate) fn flip(bytes: &mut [u8], bit: u64) {
    let bit = (bit % (bytes.len() as u64 * 8)) as usize;
    bytes[bit / 8] ^= 1 << (bit % 8);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_played_in_order_and_as_often_as_asked() {
        let faults = Faults::programmable();
        faults.inject(Fault::once(FaultKind::Lose).after(150));
        faults.inject(Fault::once(FaultKind::Stall).times(2));
        let played: Vec<_> = (0..6).map(|_| faults.next(100)).collect();
        let (lose, stall) = (Some(FaultKind::Lose), Some(FaultKind::Stall));
        assert_eq!(played, [None, None, lose, stall.clone(), stall, None]);
        assert_eq!(faults.n_left(), 0);
    }

    #[test]
    fn production_has_none() {
        assert_eq!(Faults::none().next(1), None);
    }

    #[test]
    fn a_bit_is_flipped_and_flipped_back() {
        let mut bytes = [0u8; 4];
        flip(&mut bytes, 32 + 9);
        assert_eq!(bytes, [0, 2, 0, 0]);
        flip(&mut bytes, 9);
        assert_eq!(bytes, [0; 4]);
    }
}
