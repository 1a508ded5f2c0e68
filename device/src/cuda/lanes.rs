//! Hot path. Assigns copy jobs to a page copier's streams: the stream with the fewest bytes gets the next
//! one.
//!
//! Each stream moves pages at the rate of its own few multiprocessors. A stream with more bytes than the
//! others would finish last, while the others are idle.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::CudaStream;

pub(super) struct Lanes {
    streams: Vec<Arc<CudaStream>>,
    loads: Arc<Mutex<Loads>>,
}

/// The bytes on each stream, which all its copy jobs share. The lock is held briefly.
struct Loads {
    /// The bytes given to each stream since all streams were last idle.
    given: Vec<usize>,
    n_under_way: usize,
}

/// The bytes of one copy job on a stream. The drop counts the job as done.
pub(super) struct Load(Arc<Mutex<Loads>>);

impl Lanes {
    /// Distributes copy jobs over `streams`.
    ///
    /// # Panics
    /// If there are no streams.
    pub(super) fn over(streams: Vec<Arc<CudaStream>>) -> Self {
        assert!(!streams.is_empty(), "a copier has a lane");
        let loads = Arc::new(Mutex::new(Loads::of(streams.len())));
        Self { streams, loads }
    }

    /// Returns the stream for work that is not a copy job.
    pub(super) fn first(&self) -> &CudaStream {
        &self.streams[0]
    }

    pub(super) fn give(&self, bytes: usize) -> (&CudaStream, Load) {
        let nth = locked(&self.loads).give(bytes);
        (&self.streams[nth], Load(Arc::clone(&self.loads)))
    }
}

impl Loads {
    fn of(n_lanes: usize) -> Self {
        Self { given: vec![0; n_lanes], n_under_way: 0 }
    }

    /// Adds a copy job of `bytes` to the stream with the fewest bytes, and returns the stream's index.
    fn give(&mut self, bytes: usize) -> usize {
        let least = (0..self.given.len()).min_by_key(|nth| self.given[*nth]).unwrap_or(0);
        self.given[least] += bytes;
        self.n_under_way += 1;
        least
    }

    fn done(&mut self) {
        self.n_under_way -= 1;
        if self.n_under_way == 0 {
            self.given.fill(0);
        }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        locked(&self.0).done();
    }
}

fn locked(loads: &Mutex<Loads>) -> MutexGuard<'_, Loads> {
    loads.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_that_grow_and_shrink_are_spread_evenly() {
        let frames = [&[4, 8, 16][..], &[24; 17], &[19, 14, 10, 8, 6, 4, 4, 4, 4, 3]].concat();
        let mut loads = Loads::of(4);
        for bytes in &frames {
            loads.give(*bytes);
        }
        // The loads are nearly even; a round-robin choice would give 129, 125, 126 and 132.
        assert_eq!(loads.given, [129, 129, 126, 128]);
    }

    #[test]
    fn what_is_done_counts_until_all_is() {
        let mut loads = Loads::of(2);
        assert_eq!([5, 1, 1, 5].map(|bytes| loads.give(bytes)), [0, 1, 1, 1]);
        (0..3).for_each(|_| loads.done());
        assert_eq!(loads.give(1), 0, "it has been given less in all");
        (0..2).for_each(|_| loads.done());
        assert_eq!(loads.given, [0, 0], "nothing is under way");
    }
}
