//! A node's settings that are rarely changed: `[expert.node]`, `[expert.transfer]` and so on.

use std::num::NonZero;

use chassis::connections::ConnectionLimits;
use chassis::telemetry::LogExpertSettings;
use kv_transfer::{HostSlots, TransferSettings};
use scheduler::SchedulerSettings;
use serde::{Deserialize, Serialize};

/// A node's `[expert]` tables: settings that are rarely changed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeExpertSettings {
    pub node: WatchdogExpertSettings,
    pub model: ModelExpertSettings,
    pub scheduler: SchedulerExpertSettings,
    pub transfer: TransferExpertSettings,
    pub decode: DecodeExpertSettings,
    pub connections: ConnectionLimits,
    pub log: LogExpertSettings,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct WatchdogExpertSettings {
    /// If the node has work and makes no progress for this long, it is not ready. The default is longer than
    /// the longest step of the engine.
    pub stuck_ms: u64,
}

impl Default for WatchdogExpertSettings {
    fn default() -> Self {
        Self { stuck_ms: 4_000 }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ModelExpertSettings {
    /// The GPU architecture whose kernels are used. Empty: that of this GPU. `sm_90`: kernels that run on
    /// every GPU, for comparison.
    pub gpu_arch: String,
    /// The number of threads that compute; 0: one per core.
    pub threads: usize,
    /// `safetensors` loads the weights; `dummy` makes random ones, to measure speed.
    pub load_format: String,
    /// The input of products with FP8 weights: `full`; `fp8`, rounded to 8 bits, which shortens prompts on Hopper;
    /// `auto` follows the checkpoint. The same on all nodes of a model.
    pub activations: String,
    /// With several GPUs, `cut`: each has columns of all experts of a mixture; `spread`: each has whole experts.
    pub experts: String,
    /// Pipeline stages share the layers: `tp` GPUs each, or groups of threads; 0: one for each process.
    pub stages: u16,
    /// Layers of each stage, as in `[17, 15]`; empty: even.
    pub stage_layers: Vec<u16>,
    /// Processes of the node, each with one stage or an equal part of a stage's ranks; `baton rank` runs the others.
    pub processes: u16,
    /// `host:port` where the others join.
    pub join: String,
    /// How long they wait for each other.
    pub join_ms: u64,
}

impl Default for ModelExpertSettings {
    fn default() -> Self {
        Self {
            gpu_arch: String::new(),
            threads: 0,
            load_format: "safetensors".to_owned(),
            activations: "auto".to_owned(),
            experts: "cut".to_owned(),
            stages: 0,
            stage_layers: Vec::new(),
            processes: 1,
            join: "127.0.0.1:7411".to_owned(),
            join_ms: 120_000,
        }
    }
}

impl ModelExpertSettings {
    /// Returns the number of pipeline stages.
    pub(super) fn n_stages(&self) -> NonZero<u16> {
        NonZero::new(self.stages).or(NonZero::new(self.processes)).unwrap_or(NonZero::<u16>::MIN)
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SchedulerExpertSettings {
    /// The largest number of tokens in one step. With more, prompts finish sooner; with fewer, running
    /// sequences are disturbed less.
    pub step_tokens_max: usize,
    /// The longest gap between two tokens that prompts may cause, in milliseconds; 0: any. Prompts get the tokens
    /// that fit by the learned costs. With it, the policy `cost` lets a decode node compute prompts beside its
    /// sequences.
    pub gap_ms_max: f64,
    /// The largest number of sequences that run at one time.
    pub sequences_max: usize,
    /// The largest number of prompts that wait for KV room; more are refused.
    pub waiting_max: usize,
    /// The largest predicted wait of a new prompt, in milliseconds. A prompt that would wait longer is
    /// refused and waits in the router.
    pub queue_ms_max: f64,
    /// Blocks that stay free for each running sequence to grow into.
    pub growth_blocks: usize,
    /// If true, a GPU step is launched shortly before the running one ends, so that KV which arrives
    /// meanwhile joins it. If false, the next step is queued at once.
    pub launch_late: bool,
}

impl Default for SchedulerExpertSettings {
    fn default() -> Self {
        let settings = SchedulerSettings::default();
        Self {
            step_tokens_max: settings.step_tokens_max,
            gap_ms_max: settings.gap_ms_max,
            sequences_max: settings.sequences_max,
            waiting_max: settings.waiting_max,
            queue_ms_max: settings.queue_ms_max,
            growth_blocks: settings.growth_blocks,
            launch_late: settings.launch_late,
        }
    }
}

impl SchedulerExpertSettings {
    pub(super) fn settings(&self) -> SchedulerSettings {
        SchedulerSettings {
            step_tokens_max: self.step_tokens_max,
            gap_ms_max: self.gap_ms_max,
            sequences_max: self.sequences_max,
            waiting_max: self.waiting_max,
            queue_ms_max: self.queue_ms_max,
            growth_blocks: self.growth_blocks,
            launch_late: self.launch_late,
            ..SchedulerSettings::default()
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TransferExpertSettings {
    /// TCP streams per peer (twice as many over TLS, four times with KV on GPUs), and queue pairs with rdma. More help
    /// where the network limits each flow.
    pub streams: u16,
    /// How long a peer may be silent before the link is closed.
    pub stall_ms: u64,
    /// The largest KV of one frame, in bytes: small enough to stay in a core's cache.
    pub frame_bytes: usize,
    /// GPU multiprocessors that copy and digest KV. 0: 16 for cuda-ipc, 32 for nccl.
    pub gpu_multiprocessors: u32,
    /// Slots of page-locked host memory for KV of GPUs, 1 to 64: with shm 4 MiB each for each peer, with tcp 2 MiB each
    /// at both ends of a link.
    pub host_slots: HostSlots,
    /// Microseconds for which the threads of cuda-ipc and nccl poll after each event, each on one core. 0:
    /// the connectors have no threads of their own.
    pub spin_us: u64,
    /// `host:port` of the rdma control channel. Empty: the host of `transfer.listen`, and a free port.
    pub rdma_listen: String,
    /// The RDMA port: `device`, `device:port` or `device:port:gid`, as in `mlx5_0:1:3`. Empty: the first
    /// active port with a routable address.
    pub rdma_device: String,
}

impl Default for TransferExpertSettings {
    fn default() -> Self {
        let settings = TransferSettings::default();
        Self {
            streams: settings.streams,
            stall_ms: settings.stall_ms,
            frame_bytes: settings.frame_bytes,
            gpu_multiprocessors: settings.gpu_multiprocessors,
            host_slots: settings.host_slots,
            spin_us: settings.spin_us,
            rdma_listen: settings.rdma_listen,
            rdma_device: settings.rdma_device,
        }
    }
}

/// Settings that only decode nodes use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DecodeExpertSettings {
    /// A prompt with at most this many tokens to compute is computed by the decode node, in chunks between
    /// decode steps, because a transfer would cost more.
    pub local_tokens_max: u32,
    /// The largest number of open landings. Beyond it prompts wait in the node's queue.
    pub landings_max: u32,
}

impl Default for DecodeExpertSettings {
    fn default() -> Self {
        Self { local_tokens_max: 16, landings_max: 256 }
    }
}
