//! A bounded count of things that are under way, held by values.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Counts. Clones share one count.
#[derive(Clone, Debug, Default)]
pub struct Counter(Arc<AtomicU32>);

/// One of the counted. Not `Clone`; dropping it counts down.
#[derive(Debug)]
pub struct Counted(Counter);

impl Counter {
    /// Counts one more, unless `max` are counted already.
    pub fn enter(&self, max: u32) -> Option<Counted> {
        let below = |count: u32| (count < max).then_some(count + 1);
        self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, below).ok()?;
        Some(Counted(self.clone()))
    }

    pub fn count(&self) -> u32 {
        self.0.load(Ordering::Acquire)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_counts_up_to_its_bound_and_down_again() {
        let counter = Counter::default();
        let one = counter.enter(2).expect("none yet");
        let two = counter.enter(2).expect("one yet");
        assert!(counter.enter(2).is_none());
        drop(one);
        assert_eq!(counter.count(), 1);
        drop(two);
        assert_eq!(counter.count(), 0);
    }
}
