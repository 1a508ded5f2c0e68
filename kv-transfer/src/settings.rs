//! The settings of KV transfer.

use std::time::Duration;

use device::cuda::PageDigests;
use serde::{Deserialize, Serialize};

/// The `[transfer]` section of a node's configuration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TransferSettings {
    /// `host:port` on which the tcp connector listens; port 0 takes a free one.
    pub listen: String,
    /// The host that peers are told to connect to. Empty: the one in `listen`, which must then not be `0.0.0.0`.
    pub advertise: String,
    /// TCP streams to each peer, twice as many over TLS, four times as many between GPUs. Two streams keep two cores
    /// busy; more streams help where single flows are rate-limited.
    pub streams: u16,
    /// The time without progress, on a silent peer or in a read or write, after which the wire is considered dead.
    pub stall_ms: u64,
    /// Limit of KV bytes in one frame: small enough to stay in a core's cache from digest to copy.
    pub frame_bytes: usize,
    /// Multiprocessors of a GPU that move and digest KV. 0: the number that was measured best for the
    /// connector, 16 for cuda-ipc and 32 for a message of nccl.
    pub gpu_multiprocessors: u32,
    /// Slots in host memory through which KV of GPUs goes, for each peer.
    pub host_slots: HostSlots,
    /// Microseconds for which the own threads of cuda-ipc and nccl spin for the next event before they sleep. 0:
    /// there are no such threads, and each event wakes a thread of the process.
    pub spin_us: u64,
    /// `host:port` on which the rdma connector listens for its peers. Empty: the host of `listen` and a free port.
    pub rdma_listen: String,
    /// `device`, `device:port` or `device:port:gid`; the last part is an index. Empty: the first port that is up and
    /// has a routable address.
    pub rdma_device: String,
    /// Whether a frame has few blocks of all computed layers, for wires that copy rectangles, instead of all
    /// blocks of few layers. Set by the connector.
    #[serde(skip)]
    pub tall_frames: bool,
    /// How the first and last of many tall frames are made smaller, so that the first frame leaves early and little
    /// is left to do after the last one. `None`: the value that was measured best for the connector.
    #[serde(skip)]
    pub taper: Option<FrameSizes>,
    /// NCCL communicators of a pair, used in turn: at most two, and one if NCCL is older than 2.27. Fewer only to
    /// measure the gain of the second one: a node has no such setting.
    #[serde(skip, default = "two")]
    pub nccl_queues: usize,
    /// Whether digests are computed and compared. Off only to measure their cost: a node has no such setting.
    #[serde(skip, default = "on")]
    pub digests: bool,
}

/// A number of slots for each peer, from 1 to [`MAX`](Self::MAX).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "u16", into = "u16")]
pub struct HostSlots(u16);

/// The error of a number of slots that is not allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} slots, 1 to {max} are allowed", max = HostSlots::MAX)]
pub struct HostSlotsOutOfRange(u16);

impl HostSlots {
    /// Limits the memory of a peer that this node's GPUs page-lock.
    pub const MAX: u16 = 64;

    pub fn get(self) -> u16 {
        self.0
    }
}

impl Default for HostSlots {
    /// Enough that each stream fills one slot while the GPU copies others.
    fn default() -> Self {
        Self(16)
    }
}

impl TryFrom<u16> for HostSlots {
    type Error = HostSlotsOutOfRange;

    fn try_from(n_slots: u16) -> Result<Self, HostSlotsOutOfRange> {
        match n_slots {
            1..=Self::MAX => Ok(Self(n_slots)),
            _ => Err(HostSlotsOutOfRange(n_slots)),
        }
    }
}

impl From<HostSlots> for u16 {
    fn from(n_slots: HostSlots) -> Self {
        n_slots.0
    }
}

/// The sizes of consecutive frames: the first are small and double each time, and the last are shares of the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameSizes {
    /// The divisor of the largest size that gives the first frame's size.
    pub first_part: u32,
    /// The divisor of the largest size that gives the smallest of the last frames.
    pub least_part: u32,
    /// The divisor of the rest that gives the largest size of a frame near the end.
    pub share: u32,
}

fn on() -> bool {
    true
}

fn two() -> usize {
    2
}

impl Default for TransferSettings {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1:0".to_owned(),
            advertise: String::new(),
            streams: 2,
            stall_ms: 5_000,
            frame_bytes: 512 << 10,
            gpu_multiprocessors: 0,
            host_slots: HostSlots::default(),
            spin_us: 500,
            rdma_listen: String::new(),
            rdma_device: String::new(),
            tall_frames: false,
            taper: None,
            nccl_queues: two(),
            digests: true,
        }
    }
}

impl TransferSettings {
    /// Returns the multiprocessors of a connector: the setting, or `liked` if the setting is 0.
    pub(crate) fn multiprocessors(&self, liked: u32) -> u32 {
        if self.gpu_multiprocessors == 0 { liked } else { self.gpu_multiprocessors }
    }

    /// Returns whether a GPU that moves KV makes digests.
    pub(crate) fn wanted_digests(&self) -> PageDigests {
        if self.digests { PageDigests::Make } else { PageDigests::Skip }
    }

    pub(crate) fn awake(&self) -> Duration {
        Duration::from_micros(self.spin_us)
    }

    pub fn stall(&self) -> Duration {
        Duration::from_millis(self.stall_ms)
    }
}
