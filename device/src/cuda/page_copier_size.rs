//! How much of a card a page copier uses.

/// How much of a card a page copier takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageCopierSize {
    /// Streams, and so copy jobs under way at one time.
    pub n_lanes: usize,
    /// Multiprocessors of each.
    pub lane_multiprocessors: u32,
    /// Copy engines that one copy job keeps busy.
    pub n_engines: usize,
    /// Multiprocessors that digest what copy engines have moved, and what a sender shows.
    pub digest_multiprocessors: u32,
    /// The smallest rectangle, on average, that is worth an engine's while: to begin one takes 3.5 microseconds.
    pub engine_bytes_min: usize,
}

impl PageCopierSize {
    /// This number of multiprocessors, in four parts: the others fill the wire while one begins or ends a copy job. Digests alone go
    /// one copy job after the other: what counts there is when the last one is done.
    pub fn of(multiprocessors: u32) -> Self {
        Self {
            n_lanes: 4,
            lane_multiprocessors: multiprocessors.div_ceil(4),
            n_engines: 2,
            digest_multiprocessors: multiprocessors,
            engine_bytes_min: 8 << 20,
        }
    }
}

impl Default for PageCopierSize {
    fn default() -> Self {
        Self::of(16)
    }
}
