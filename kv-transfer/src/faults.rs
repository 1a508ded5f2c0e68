//! Faults that a test injects into a wire, after the digests are computed.
//!
//! Every connector asks its [`Faults`] once per KV frame for the next fault. In production there are no
//! faults, and the call costs one comparison. `connectors::flaky::Flaky` adds them.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// One fault: its kind, the first byte that it applies to, and the number of frames that it applies to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    pub kind: FaultKind,
    /// The number of KV bytes before the byte that is hit, counted from the moment at which the fault became
    /// the first in the queue. So the size of frames does not matter.
    pub after_bytes: u64,
    /// The number of consecutive frames that are hit.
    pub times: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// Flips one bit of the frame's KV after the digest is computed. The number is taken modulo the frame's bits.
    FlipBit(u64),
    /// The first digest of the frame is wrong.
    WrongDigest,
    /// The connection breaks before the frame is written.
    Lose,
    /// The frame is sent late.
    Delay(Duration),
    /// The frame is never sent, nor is any frame behind it.
    Stall,
    /// The frame is sent twice.
    Duplicate,
}

impl Fault {
    /// Makes a fault that hits the next frame, once.
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

/// The faults of one connector, applied in the order of injection. Clones share their faults.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// The faults to come; `None` in production, where there is no lock to take. The lock is never held
    /// across an await.
    programme: Option<Arc<Mutex<Programme>>>,
}

#[derive(Debug, Default)]
struct Programme {
    faults: VecDeque<Fault>,
    /// The number of frames that were hit so far.
    n_hit: u64,
}

impl Faults {
    /// Returns faults for production, to which nothing can be added.
    pub fn none() -> Self {
        Self::default()
    }

    /// Returns an empty list that tests inject faults into.
    pub fn programmable() -> Self {
        Self { programme: Some(Arc::default()) }
    }

    /// Adds a fault to the queue.
    ///
    /// # Panics
    /// If these are [`Faults::none`].
    pub fn inject(&self, fault: Fault) {
        let programme = self.programme.as_ref().expect("faults are injected into a flaky connector");
        programme.lock().unwrap_or_else(PoisonError::into_inner).faults.push_back(fault);
    }

    /// Returns whether faults can be injected. In production they cannot.
    #[cfg(feature = "rdma")]
    pub(crate) fn can_be_injected(&self) -> bool {
        self.programme.is_some()
    }

    /// Returns the number of frames that were hit so far.
    pub fn n_hit(&self) -> u64 {
        let Some(programme) = &self.programme else { return 0 };
        programme.lock().unwrap_or_else(PoisonError::into_inner).n_hit
    }

    /// Returns the fault that hits the next frame, if any. The frame carries `bytes` bytes of KV.
    pub(crate) fn next(&self, bytes: usize) -> Option<FaultKind> {
        self.programme.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner).next(bytes as u64)
    }
}

impl Programme {
    fn next(&mut self, bytes: u64) -> Option<FaultKind> {
        let first = self.faults.front_mut()?;
        if first.after_bytes >= bytes {
            first.after_bytes -= bytes;
            return None;
        }
        let kind = first.kind.clone();
        (first.after_bytes, first.times) = (0, first.times - 1);
        if first.times == 0 {
            self.faults.pop_front();
        }
        self.n_hit += 1;
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
        assert_eq!(played, [None, lose, stall.clone(), stall, None, None]);
        assert_eq!(faults.n_hit(), 3);
    }

    #[test]
    fn the_frame_that_has_the_byte_is_hit() {
        for (bytes, hit) in [(50, 3), (75, 2), (150, 1), (151, 0), (1_000, 0)] {
            let faults = Faults::programmable();
            faults.inject(Fault::once(FaultKind::Lose).after(150));
            let first = (0..5).position(|_| faults.next(bytes).is_some());
            assert_eq!(first, Some(hit), "frames of {bytes} bytes");
        }
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
