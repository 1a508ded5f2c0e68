//! A GPU that computes: a card with this crate's programs, and the counters that their kernels share.

use std::fmt;
use std::ops::Deref;
use std::path::Path;

use device::cuda::{Buffer, Cache, Card, CudaError, Programs};

use super::ops::{MEETING_PARTS, shared_bytes_of};
use super::source::SOURCES;

/// A GPU with all kernels of [`SOURCES`] loaded.
///
/// All work goes into the GPU's one stream, in the order of the calls.
pub struct ComputeCard {
    card: Card,
    /// Counters from which the blocks of a kernel draw pieces of work. One kernel uses them at a time; they
    /// are zero between kernels.
    tickets: Buffer<u32>,
    /// Partial sums of blocks of threads that share tiles, and counters of these blocks. One kernel uses them
    /// at a time. The counters are zero between kernels.
    meeting: (Buffer<f32>, Buffer<u32>),
}

impl ComputeCard {
    /// Opens a GPU: loads the libraries, compiles kernels missing from the cache and loads all kernels.
    ///
    /// `nvrtc_folder` names the folder of NVRTC if the loader does not find it, for example with CUDA from
    /// Python packages.
    pub fn open(ordinal: usize, nvrtc_folder: Option<&Path>, cache: &Cache) -> Result<Self, CudaError> {
        Self::open_as(ordinal, nvrtc_folder, cache, None)
    }

    /// Like [`open`](Self::open), with kernels for another architecture that this GPU can run. For example,
    /// `sm_90` on Hopper leaves out Hopper's own kernels and runs the general ones.
    pub fn open_as(
        ordinal: usize,
        nvrtc_folder: Option<&Path>,
        cache: &Cache,
        arch_instead: Option<&str>,
    ) -> Result<Self, CudaError> {
        let programs = Programs { sources: SOURCES, shared_bytes: shared_bytes_of };
        let card = Card::open_with(ordinal, nvrtc_folder, cache, arch_instead, programs)?;
        let tickets = zeroed(&card, 2)?;
        let places = card.n_multiprocessors() as usize;
        let meeting = (card.buffer(places * MEETING_PARTS)?, zeroed(&card, places)?);
        Ok(Self { card, tickets, meeting })
    }

    /// Returns the address of the work counters. Kernels of one stream use them one after the other and leave
    /// them zero.
    pub(super) fn tickets(&self) -> u64 {
        self.tickets.view().address()
    }

    /// Returns the addresses of the partial sums and counters of blocks that share tiles. Kernels of this
    /// stream use them one after the other and leave all counters zero. A kernel on another stream must not
    /// use them.
    pub(super) fn meeting(&self) -> (u64, u64) {
        (self.meeting.0.view().address(), self.meeting.1.view().address())
    }
}

impl Deref for ComputeCard {
    type Target = Card;

    fn deref(&self) -> &Card {
        &self.card
    }
}

impl fmt::Debug for ComputeCard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.card.fmt(f)
    }
}

/// Allocates counters that start at zero.
fn zeroed(card: &Card, n: usize) -> Result<Buffer<u32>, CudaError> {
    let mut counters = card.buffer(n)?;
    card.fill(counters.view_mut(), 0)?;
    Ok(counters)
}
