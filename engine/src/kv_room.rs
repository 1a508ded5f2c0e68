//! The size of KV memory, set or computed.

use device::cuda::MemoryBytes;
use device::memory::available;
use kv_cache::{KvMemory, MemoryError};
use types::{KvLayout, StageLayers, in_full};

use crate::error::OpenError;

/// The size of KV memory of all ranks together, in bytes. The sum of the regions never exceeds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvRoom {
    Bytes(usize),
    /// A size that was computed from host memory. It does not apply to a GPU.
    OnHost(usize),
    Auto(AutoRoom),
}

/// Bounds for a size that depends on the model and the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AutoRoom {
    /// Limit of the bytes in host memory.
    pub host_bytes: usize,
    /// The percentage of each GPU's memory for weights, KV and everything else together.
    pub gpu_percent: usize,
}

/// The smallest computed size: enough for any mock and for small models.
const LEAST_BYTES: usize = 64 << 20;
/// The number of sequences of the longest length for which memory is computed. A CPU computes few at a time.
const SEQUENCES: usize = 4;
/// The usable percentage of a GPU's free memory. The rest is for CUDA's libraries, which are opened after the
/// free memory is measured.
const FREE_PERCENT: usize = 95;

impl KvRoom {
    /// Rejects an amount that the machine does not have, before anything is loaded.
    pub(crate) fn check_on_host(self) -> Result<(), OpenError> {
        match self {
            Self::Bytes(bytes) | Self::OnHost(bytes) => {
                available::check(bytes as u64).map_err(|error| not_taken(&error))
            }
            Self::Auto(_) => Ok(()),
        }
    }

    /// Returns the bytes for a mock.
    pub(crate) fn of_mock(self) -> usize {
        match self {
            Self::Bytes(bytes) | Self::OnHost(bytes) => bytes,
            Self::Auto(_) => LEAST_BYTES,
        }
    }

    /// Returns the bytes for a model in host memory. `context_tokens` is the length of its longest sequence.
    pub(crate) fn on_host(self, layout: &KvLayout, stages: &StageLayers, context_tokens: usize) -> usize {
        match self {
            Self::Bytes(bytes) | Self::OnHost(bytes) => bytes,
            Self::Auto(auto) => {
                let blocks = SEQUENCES * layout.blocks_of_all_groups(context_tokens);
                let wanted = blocks.saturating_mul(KvMemory::block_bytes(layout, stages));
                wanted.min(auto.host_bytes).max(LEAST_BYTES)
            }
        }
    }
}

impl AutoRoom {
    /// Returns the bytes for one GPU of a model with this memory. Everything else needs `taken` bytes. A size that does not
    /// fit is rejected later, with an error that lists the bytes by purpose.
    pub(crate) fn on_gpu(self, memory: MemoryBytes, taken: usize) -> usize {
        let MemoryBytes { free, total } = memory;
        let ours = (total / 100 * self.gpu_percent).min(free / 100 * FREE_PERCENT);
        ours.saturating_sub(taken).max(LEAST_BYTES)
    }
}

/// Returns the number of blocks that fit into `kv_bytes`. Zero is an error.
pub(crate) fn n_blocks(layout: &KvLayout, stages: &StageLayers, kv_bytes: usize) -> Result<u32, OpenError> {
    match KvMemory::blocks_within(layout, stages, kv_bytes) {
        0 => {
            let block_bytes = layout.group_indices().map(|group| layout.block_bytes(group)).sum();
            Err(OpenError::NoKvMemory { bytes: kv_bytes, block_bytes })
        }
        n_blocks => Ok(n_blocks),
    }
}

/// Makes the error for KV memory that could not be allocated on the host.
pub(crate) fn not_taken(error: &MemoryError) -> OpenError {
    OpenError::KvMemory(match error {
        MemoryError::TooMuch { .. } => format!("{error}: set model.kv_memory lower, or to \"auto\""),
        _ => in_full(error),
    })
}

impl From<usize> for KvRoom {
    fn from(bytes: usize) -> Self {
        Self::Bytes(bytes)
    }
}

#[cfg(test)]
mod tests {
    use types::layout::KvDtype;

    use super::*;

    const AUTO: AutoRoom = AutoRoom { host_bytes: 1 << 30, gpu_percent: 45 };

    #[test]
    fn an_amount_is_that_amount_everywhere() {
        let layout = KvLayout::uniform(16, KvDtype::Bf16, 1, 1, 4);
        let room = KvRoom::from(1000);
        assert_eq!((room.of_mock(), room.on_host(&layout, &StageLayers::one(), 512)), (1000, 1000));
    }

    #[test]
    fn a_host_has_room_for_four_of_the_longest_within_bounds() {
        // A token takes 16 KiB: 2 × 4 heads × 64 numbers of 2 bytes in each of 16 layers.
        let layout = KvLayout::uniform(16, KvDtype::Bf16, 16, 4, 64);
        let bytes = |context_tokens| KvRoom::Auto(AUTO).on_host(&layout, &StageLayers::one(), context_tokens);
        assert_eq!(bytes(512), LEAST_BYTES, "32 MiB would do");
        assert_eq!(bytes(4096), 256 << 20);
        assert_eq!(bytes(131_072), 1 << 30, "the limit, where four sequences need 8 GiB");
    }

    #[test]
    fn a_gpu_gives_what_its_share_leaves_and_never_all_that_is_free() {
        let gib = 1 << 30;
        let (total, taken) = (100 * gib, 17 * gib);
        let left = |free| AUTO.on_gpu(MemoryBytes { free, total }, taken).div_ceil(gib);
        assert_eq!(left(total), 28, "45 of 100, less 17");
        assert_eq!(left(40 * gib), 21, "38 of 40, less 17: another program is on the card");
        let empty = MemoryBytes { free: total, total };
        assert_eq!(AUTO.on_gpu(empty, 60 * gib), LEAST_BYTES, "refused later, with the sum");
    }
}
