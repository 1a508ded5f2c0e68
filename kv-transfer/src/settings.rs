//! What an operator can say about KV transfer.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The `[transfer]` section of a node's configuration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TransferSettings {
    /// `host:port` on which the tcp connector listens; port 0 takes a free one.
    pub listen: String,
    /// The host that peers are told to connect to. Empty: the one in `listen`, which must then not be `0.0.0.0`.
    pub advertise: String,
    /// TCP streams to each peer. Two keep two cores busy; more help where one flow is shaped.
    pub streams: u16,
    /// How long a peer may be silent, or a read or write stand still, before the wire is taken for dead.
    pub stall_ms: u64,
    /// The most KV in one frame: small enough to stay in a core's cache from digest to copy.
    pub frame_bytes: usize,
    /// Multiprocessors of a GPU on which KV is moved and digested. 0: as many as the connector was measured best with,
    /// 16 for cuda-ipc and 32 for a message of nccl.
    pub gpu_multiprocessors: u32,
    /// Microseconds that cuda-ipc and nccl look for what comes next, on threads of their own, before those sleep. 0: they
    /// have none, and every hop wakes one of the process's.
    pub spin_us: u64,
    /// `host:port` on which the rdma connector meets its peers. Empty: the host of `listen`, and a port that is free.
    pub rdma_listen: String,
    /// `device`, `device:port` or `device:port:gid`, the last being an index. Empty: the first port that is up and has an
    /// address that can be routed to.
    pub rdma_device: String,
    /// Whether a frame is few blocks of all layers that are computed, and not all blocks of few layers: for wires that copy
    /// rectangles. Set by the connector.
    #[serde(skip)]
    pub tall_frames: bool,
    /// How the first and the last of many tall frames are made smaller, so that the wait is short for the first and for what
    /// becomes of the last. `None`: as the connector was measured best with.
    #[serde(skip)]
    pub taper: Option<Taper>,
    /// NCCL communicators of a pair, used in turns: two at most, and one where NCCL is older than 2.27. Fewer only
    /// to measure what the second one gives: a node has no such setting.
    #[serde(skip, default = "two")]
    pub nccl_queues: usize,
    /// Whether digests are made and compared. Off only to measure what they cost: a node has no such setting.
    #[serde(skip, default = "on")]
    pub digests: bool,
}

/// In a row of frames the first are small, each twice as large as the one before; the last ones are shares of what is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Taper {
    /// The first frame is this part of the largest.
    pub first_part: u32,
    /// The smallest of the last ones is this part of the largest.
    pub least_part: u32,
    /// A frame is no more than this part of what is left.
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
    /// The multiprocessors of a connector: the setting, or `liked` if the setting is 0.
    pub(crate) fn multiprocessors(&self, liked: u32) -> u32 {
        if self.gpu_multiprocessors == 0 { liked } else { self.gpu_multiprocessors }
    }

    pub(crate) fn awake(&self) -> Duration {
        Duration::from_micros(self.spin_us)
    }

    pub fn stall(&self) -> Duration {
        Duration::from_millis(self.stall_ms)
    }
}
