//! A bounded counter whose counts are held by values.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// A bounded counter. Clones share one count.
#[derive(Clone, Debug, Default)]
pub struct Counter(Arc<AtomicU32>);

/// One unit of a [`Counter`]. Not `Clone`; dropping it decrements the counter.
#[derive(Debug)]
pub struct CounterGuard(Counter);

impl Counter {
    /// Increments the counter. Returns `None` if it is at `max`.
    pub fn enter(&self, max: u32) -> Option<CounterGuard> {
        let below = |count: u32| (count < max).then_some(count + 1);
        self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, below).ok()?;
        Some(CounterGuard(self.clone()))
    }

    pub fn count(&self) -> u32 {
        self.0.load(Ordering::Acquire)
    }
}

impl Drop for CounterGuard {
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
