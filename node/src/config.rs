//! What a node is told: [`RawNodeConfig`] as written, [`NodeConfig`] as meant.

use std::num::NonZero;
use std::time::Duration;

use chassis::connections::ConnectionLimits;
use chassis::telemetry::LogSettings;
use engine::load::Quantize;
use engine::{CpuSettings, Device, EngineSettings, KvRoom, LoadFormat, Pace, StepLimits};
use kv_transfer::TransferSettings;
use scheduler::SchedulerSettings;
use serde::{Deserialize, Serialize};
use types::layout::RANKS_MAX;
use types::{KvDtype, NodeId};

use crate::error::NodeError;
use crate::kv_memory::ModelKvMemory;

/// A node's TOML file.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RawNodeConfig {
    pub node: NodeSection,
    pub registry: RegistrySection,
    pub model: ModelSection,
    pub scheduler: SchedulerSection,
    pub transfer: TransferSection,
    pub decode: DecodeSection,
    pub connections: ConnectionLimits,
    pub log: LogSettings,
}

/// What only decode nodes read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DecodeSection {
    /// A prompt of which no more than so many tokens are to be computed is computed by the decode node itself, in chunks
    /// between decode steps: below this a transfer costs more than it spares.
    pub local_tokens_max: u32,
    /// Landings that may be open at one time. Beyond it the node refuses, and the router waits or goes elsewhere.
    pub landings_max: u32,
}

impl Default for DecodeSection {
    fn default() -> Self {
        Self { local_tokens_max: 16, landings_max: 256 }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SchedulerSection {
    /// Tokens that one step computes at most. Larger: prompts are done sooner; smaller: running sequences are
    /// disturbed less.
    pub step_tokens_max: usize,
    /// Sequences that run at one time.
    pub sequences_max: usize,
    /// Prompts that wait for room; more are refused.
    pub waiting_max: usize,
    /// Predicted work that may be queued before a prompt; beyond it the prompt waits in the router.
    pub queue_ms_max: f64,
    /// Blocks that are left free for each running sequence to grow into.
    pub growth_blocks: usize,
    /// On a GPU, a step is launched shortly before the one before it ends, so that KV which arrives meanwhile is part of
    /// it. `false`: a step always waits behind the one that runs.
    pub launch_late: bool,
}

impl Default for SchedulerSection {
    fn default() -> Self {
        let settings = SchedulerSettings::default();
        Self {
            step_tokens_max: settings.step_tokens_max,
            sequences_max: settings.sequences_max,
            waiting_max: settings.waiting_max,
            queue_ms_max: settings.queue_ms_max,
            growth_blocks: settings.growth_blocks,
            launch_late: settings.launch_late,
        }
    }
}

impl SchedulerSection {
    fn settings(&self) -> SchedulerSettings {
        SchedulerSettings {
            step_tokens_max: self.step_tokens_max,
            sequences_max: self.sequences_max,
            waiting_max: self.waiting_max,
            queue_ms_max: self.queue_ms_max,
            growth_blocks: self.growth_blocks,
            launch_late: self.launch_late,
            ..SchedulerSettings::default()
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeSection {
    /// The node's name, the same after every restart. Empty: the machine's name and the gRPC port.
    pub id: String,
    /// `host:port` of the gRPC services; port 0 takes a free one.
    pub listen: String,
    /// `host:port` of the admin pages.
    pub admin: String,
    /// The host that routers and peers are told to connect to. Empty: the one in `listen`.
    pub advertise: String,
    /// How long requests under way may go on after the node was asked to stop.
    pub drain_ms: u64,
    /// With work to do, and nothing that moved for so long, the node is not ready, and routers leave it out. Longer than
    /// the longest step of the engine.
    pub stuck_ms: u64,
}

impl Default for NodeSection {
    fn default() -> Self {
        Self {
            id: String::new(),
            listen: "127.0.0.1:0".to_owned(),
            admin: "127.0.0.1:0".to_owned(),
            advertise: String::new(),
            drain_ms: 30_000,
            stuck_ms: 4_000,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RegistrySection {
    /// `embedded://router:50051`, or `etcd://host:2379,host:2379/cluster`.
    pub url: String,
}

impl Default for RegistrySection {
    fn default() -> Self {
        Self { url: "embedded://127.0.0.1:50051".to_owned() }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ModelSection {
    /// A model's folder, as Hugging Face lays it out; `demo`, the bundled one; `org/name[@revision]` on a hub; `mock`, or
    /// `mock:NAME` for one that takes its time.
    pub path: String,
    /// What requests call the model. Empty: the folder's name. The same on all nodes of a model, and on the router.
    pub name: String,
    /// What computes: `auto` (the first GPU, or the CPU where there is none), `cpu`, `cuda`, or `cuda:1` for a certain GPU.
    /// With `tp`, that GPU and those after it.
    pub device: String,
    /// Which of a GPU's kernels are used. Empty: its own. `sm_90`: those of every card from there on, for comparison.
    pub gpu_arch: String,
    /// A sequence's tokens are exactly the same alone and in any company, in whatever chunks, computed again or elsewhere, on
    /// GPUs of one kind; that takes time. Without it they are as near as bf16 has them. CPUs and mocks always are exact. The
    /// same on all nodes of a model, and on GPUs the same `tp`.
    pub deterministic: bool,
    /// Memory for KV, of all ranks together: `4GiB`; on a CPU also a share of the machine's (or container's) free memory
    /// when the node starts, `60%`; or `auto`: up to 90 % of a GPU's memory goes to weights and KV, and on a CPU KV gets
    /// room for four of the model's longest sequences, 64 MiB at least and 40 % of what is free at most. `auto/2` is half
    /// as much, for a device that two nodes share. A request that can never fit is refused.
    pub kv_memory: ModelKvMemory,
    /// `bf16`; `fp8`, for twice as many tokens and a loss of exactness; or, on a CPU, `f32`. A mock has its own. The same
    /// on all nodes of a model.
    pub kv_dtype: String,
    /// Threads that compute; 0: as many as there are cores.
    pub threads: usize,
    /// Tensor-parallel ranks: so many groups of threads, or so many GPUs, each with its share of the heads and memory of its
    /// own for their KV. Prefill and decode nodes may differ in it.
    pub tp: u16,
    /// `no`; `q8`, on a CPU: weights as blocks of 8-bit numbers, quicker and less exact; or `fp8`: those of the
    /// layers as 8-bit numbers with a scale for each row. What a checkpoint has in FP8 is so anyhow. The same on all nodes
    /// of a model.
    pub quantize: String,
    /// `safetensors`, or `dummy`: random weights from the config alone, for measuring speed.
    pub load_format: String,
}

impl Default for ModelSection {
    fn default() -> Self {
        Self {
            path: "mock".to_owned(),
            name: String::new(),
            device: "auto".to_owned(),
            gpu_arch: String::new(),
            deterministic: false,
            kv_memory: ModelKvMemory::Auto { nodes: NonZero::<u16>::MIN },
            kv_dtype: "bf16".to_owned(),
            threads: 0,
            tp: 1,
            quantize: "no".to_owned(),
            load_format: "safetensors".to_owned(),
        }
    }
}

impl ModelSection {
    fn engine(&self, scheduler: &SchedulerSection) -> Result<EngineSettings, NodeError> {
        let device: Device =
            self.device.parse().map_err(|error| NodeError::Config(format!("model.device: {error}")))?;
        let kv = self.kv(device)?;
        let cpu = CpuSettings {
            threads: NonZero::new(self.threads),
            kv_dtype: choice(
                "model.kv_dtype",
                &self.kv_dtype,
                &[("bf16", KvDtype::Bf16), ("f32", KvDtype::F32), ("fp8", KvDtype::Fp8E4m3)],
            )?,
            quantize: choice(
                "model.quantize",
                &self.quantize,
                &[("no", Quantize::No), ("q8", Quantize::Q8), ("fp8", Quantize::Fp8)],
            )?,
            load_format: choice(
                "model.load_format",
                &self.load_format,
                &[
                    ("safetensors", LoadFormat::Safetensors),
                    ("dummy", LoadFormat::Dummy { seed: DUMMY_SEED }),
                ],
            )?,
            ..CpuSettings::default()
        };
        let limits = StepLimits { tokens: scheduler.step_tokens_max, rows: scheduler.sequences_max };
        let gpu_arch = (!self.gpu_arch.is_empty()).then(|| self.gpu_arch.clone());
        let model = self.path.clone();
        let ranks = NonZero::new(self.tp).filter(|ranks| ranks.get() <= RANKS_MAX);
        let ranks = ranks.ok_or_else(|| {
            NodeError::Config(format!("model.tp: {} ranks, of which there can be 1 to {RANKS_MAX}", self.tp))
        })?;
        Ok(EngineSettings {
            model,
            device,
            gpu_arch,
            deterministic: self.deterministic,
            limits,
            ranks,
            kv,
            pace: Pace::Sleeping,
            cpu,
        })
    }
}

impl ModelSection {
    fn kv(&self, device: Device) -> Result<KvRoom, NodeError> {
        let refused = |why: String| NodeError::Config(format!("model.kv_memory: {why}"));
        let room = self.kv_memory.room().map_err(|error| refused(error.to_string()))?;
        if let (KvRoom::OnHost(_), Device::Cuda(_)) = (room, device) {
            return Err(refused("a share is of the machine's memory: name an amount for a GPU".to_owned()));
        }
        Ok(room)
    }
}

/// Dummy weights are the same on every node, or their KV would not mean the same.
const DUMMY_SEED: u64 = 1;

/// The value that a word stands for.
fn choice<T: Copy>(key: &str, word: &str, known: &[(&str, T)]) -> Result<T, NodeError> {
    let found = known.iter().find(|(name, _)| *name == word).map(|(_, value)| *value);
    let names: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
    found.ok_or_else(|| NodeError::Config(format!("`{key}`: {word:?} is not one of {}", names.join(", "))))
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct TransferSection {
    /// Connectors in order of preference; `auto` is all that work here, fastest first.
    pub connectors: Vec<String>,
    /// `host:port` on which the tcp connector listens; port 0 takes a free one.
    pub listen: String,
    /// TCP streams to each peer, and queue pairs with rdma. Two keep two cores busy; more help where one flow is shaped.
    pub streams: u16,
    /// How long a peer may be silent before the wire is taken for dead.
    pub stall_ms: u64,
    /// The most KV in one frame: small enough to stay in a core's cache from digest to copy.
    pub frame_bytes: usize,
    /// Multiprocessors of a GPU on which KV is moved and digested. 0: as many as the connector was measured best with, 16
    /// for cuda-ipc and 32 for a message of nccl.
    pub gpu_multiprocessors: u32,
    /// Microseconds that cuda-ipc and nccl look for what comes next, each on threads of its own, before those sleep: so long
    /// is a core busy after all that happens to a transfer. 0: no thread of their own, and every hop wakes another one.
    pub awake_us: u64,
    /// `host:port` on which the rdma connector meets its peers. Empty: the host of `listen`, and a port that is free.
    pub rdma_listen: String,
    /// The RDMA port that KV goes over: `device`, `device:port` or `device:port:gid`, the last being an index into the
    /// port's table, as in `mlx5_0:1:3`. Empty: the first port that is up and has an address that can be routed to.
    pub rdma_device: String,
}

impl Default for TransferSection {
    fn default() -> Self {
        let settings = TransferSettings::default();
        Self {
            connectors: vec!["auto".to_owned()],
            listen: settings.listen,
            streams: settings.streams,
            stall_ms: settings.stall_ms,
            frame_bytes: settings.frame_bytes,
            gpu_multiprocessors: settings.gpu_multiprocessors,
            awake_us: settings.awake_us,
            rdma_listen: settings.rdma_listen,
            rdma_device: settings.rdma_device,
        }
    }
}

impl TransferSection {
    /// The wires are reached at the same host as the node, which others are told is `advertise`.
    pub fn settings(&self, advertise: &str) -> TransferSettings {
        TransferSettings {
            listen: self.listen.clone(),
            advertise: advertise.to_owned(),
            streams: self.streams,
            stall_ms: self.stall_ms,
            frame_bytes: self.frame_bytes,
            gpu_multiprocessors: self.gpu_multiprocessors,
            awake_us: self.awake_us,
            rdma_listen: self.rdma_listen.clone(),
            rdma_device: self.rdma_device.clone(),
            ..TransferSettings::default()
        }
    }
}

/// A node's configuration, checked.
#[derive(Clone, Debug)]
pub struct NodeConfig {
    /// `None`: named after the machine and the port, once that is known.
    pub id: Option<NodeId>,
    pub listen: String,
    pub admin: String,
    pub advertise: Option<String>,
    pub drain: Duration,
    pub stuck_after: Duration,
    pub registry_url: String,
    /// `None`: the model's own name.
    pub model_name: Option<String>,
    pub engine: EngineSettings,
    pub scheduler: SchedulerSettings,
    pub connectors: Vec<String>,
    pub transfer: TransferSettings,
    pub decode: DecodeSection,
    pub connections: ConnectionLimits,
    pub log: LogSettings,
}

impl NodeConfig {
    pub fn resolve(raw: RawNodeConfig) -> Result<Self, NodeError> {
        let RawNodeConfig { node, registry, model, scheduler, transfer, decode, connections, log } = raw;
        if transfer.connectors.is_empty() {
            return Err(NodeError::Config("transfer.connectors names no connector".to_owned()));
        }
        let settings = transfer.settings(&node.advertise);
        Ok(Self {
            id: (!node.id.is_empty()).then(|| NodeId::new(node.id)),
            listen: node.listen,
            admin: node.admin,
            advertise: (!node.advertise.is_empty()).then_some(node.advertise),
            drain: Duration::from_millis(node.drain_ms),
            stuck_after: Duration::from_millis(node.stuck_ms),
            registry_url: registry.url,
            engine: model.engine(&scheduler)?,
            model_name: (!model.name.is_empty()).then_some(model.name),
            scheduler: scheduler.settings(),
            transfer: settings,
            connectors: transfer.connectors,
            decode,
            connections,
            log,
        })
    }
}
