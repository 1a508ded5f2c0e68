//! The share of a GPU that a page copier uses.

/// The resources of a page copier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageCopierSize {
    /// The number of streams, which is the number of concurrent copy jobs.
    pub n_lanes: usize,
    /// The number of multiprocessors of each stream.
    pub lane_multiprocessors: u32,
    /// The number of copy engines for one copy job.
    pub n_engines: usize,
    /// The number of multiprocessors that digest pages: those that copy engines have moved, and those that a
    /// sender describes.
    pub digest_multiprocessors: u32,
    /// The smallest mean rectangle for which copy engines are used, in bytes. Starting one copy takes 3.5
    /// microseconds.
    pub engine_bytes_min: usize,
}

impl PageCopierSize {
    /// Divides this number of multiprocessors over four streams, so that other streams fill the link while
    /// one starts or ends a copy job. Digest jobs run one after the other, because only the end of the last
    /// one matters.
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
