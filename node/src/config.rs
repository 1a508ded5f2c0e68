//! A node's configuration: [`RawNodeConfig`] is the file, [`NodeConfig`] the checked form.

mod expert;

use std::net::IpAddr;
use std::num::NonZero;
use std::ops::Range;
use std::time::Duration;

use chassis::config::{Shown, check_listening};
use chassis::connections::ConnectionLimits;
use chassis::identity::settings::{ClusterSection, TlsSection};
use chassis::telemetry::{LogSection, LogSettings};
use engine::load::{Activations, Quantize};
use engine::{CpuSettings, Device, EngineSettings, ExpertPlacement, KvRoom, LoadFormat, Pace, StepLimits};
use kv_transfer::TransferSettings;
use scheduler::SchedulerSettings;
use serde::{Deserialize, Serialize};
use types::layout::RANKS_MAX;
use types::{KvDtype, NodeId, ProcessGrid, StageSplit};

use crate::error::NodeError;
use crate::group::GroupSettings;
use crate::kv_memory::ModelKvMemory;
pub use expert::{DecodeExpertSettings, ModelExpertSettings, NodeExpertSettings, TransferExpertSettings};

/// A node's TOML file.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RawNodeConfig {
    pub node: NodeSection,
    pub registry: RegistrySection,
    pub model: ModelSection,
    pub transfer: TransferSection,
    pub cluster: ClusterSection,
    pub tls: TlsSection,
    pub log: LogSection,
    pub expert: NodeExpertSettings,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeSection {
    /// The node's name, the same after every restart: it decides which sequences a pool node keeps. Empty: the
    /// machine's name and the gRPC port.
    pub id: String,
    /// `host:port` of the gRPC services; port 0 takes a free port.
    pub listen: String,
    /// `host:port` of the admin pages.
    pub admin: String,
    /// The host that routers and peers connect to. Empty: the host in `listen`.
    pub advertise: String,
    /// The longest time after a stop request for running requests to end, and for a pool node's stored
    /// sequences to be fetched.
    pub drain_ms: u64,
}

impl Default for NodeSection {
    fn default() -> Self {
        Self {
            id: String::new(),
            listen: "127.0.0.1:0".to_owned(),
            admin: "127.0.0.1:0".to_owned(),
            advertise: String::new(),
            drain_ms: 30_000,
        }
    }
}

impl NodeSection {
    /// Returns the host that other processes connect to, if one is set. Each port adds its own number.
    pub fn advertised(&self) -> Result<Option<String>, String> {
        let host = self.advertise.as_str();
        let is_address = host.trim_matches(['[', ']']).parse::<IpAddr>().is_ok();
        match host {
            "" => Ok(None),
            _ if is_address || !host.contains([':', '/', ' ']) => Ok(Some(host.to_owned())),
            _ => Err(format!(
                "`node.advertise` = {host:?} is no host: set a name or an address, without a port"
            )),
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
    /// The model: a Hugging Face folder, GGUF, `demo` (bundled), `org/name[@revision]` on a hub, `mock`, or
    /// `mock:NAME` with step costs.
    pub path: String,
    /// The model's name in requests, the same on all its nodes and the router. Empty: the folder's name.
    pub name: String,
    /// `auto` (the first GPU, else the CPU), `cpu`, `cuda`, or `cuda:1`. With `tp`, that GPU and the GPUs
    /// after it.
    pub device: String,
    /// If true, a sequence gets bit-identical results in any batch and any chunks, recomputed, or on another
    /// GPU of the same kind, but more slowly. CPUs and mocks always do this. The same on all nodes of a
    /// model, on GPUs with the same `tp`.
    pub deterministic: bool,
    /// Memory for KV of all ranks: `4GiB`; on a CPU also a share of free memory at the start, `60%`; or `auto`:
    /// a GPU uses up to 90 % of its memory for weights and KV, a CPU takes room for four of the longest
    /// sequences, at least 64 MiB and at most 40 % of free memory. `auto/2` is half, for a device that two
    /// nodes share.
    pub kv_memory: ModelKvMemory,
    /// The number format of KV: `bf16`; `fp8`, with a checkpoint's scales, for twice the tokens with less
    /// precision; or `f32` on a CPU. The same on all nodes of a model.
    pub kv_dtype: String,
    /// Tensor-parallel ranks: groups of threads, or GPUs, each with its share of the heads. Prefill and decode
    /// nodes may differ.
    pub tp: u16,
    /// The format of the weights: `no`, as in the checkpoint; `q8`, on a CPU, 8-bit blocks, faster and less
    /// exact; `fp8`, 8 bits with a scale per row. FP8 checkpoints need no setting. The same on all nodes of a
    /// model.
    pub quantize: String,
}

impl Default for ModelSection {
    fn default() -> Self {
        Self {
            path: "mock".to_owned(),
            name: String::new(),
            device: "auto".to_owned(),
            deterministic: false,
            kv_memory: ModelKvMemory::Auto { nodes: NonZero::<u16>::MIN },
            kv_dtype: "bf16".to_owned(),
            tp: 1,
            quantize: "no".to_owned(),
        }
    }
}

impl ModelSection {
    fn engine(&self, expert: &NodeExpertSettings) -> Result<EngineSettings, NodeError> {
        let device: Device =
            self.device.parse().map_err(|error| NodeError::Config(format!("model.device: {error}")))?;
        let kv = self.kv(device)?;
        let cpu = CpuSettings {
            threads: NonZero::new(expert.model.threads),
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
            activations: choice(
                "expert.model.activations",
                &expert.model.activations,
                &[("auto", Activations::Auto), ("full", Activations::Full), ("fp8", Activations::Fp8)],
            )?,
            load_format: choice(
                "expert.model.load_format",
                &expert.model.load_format,
                &[
                    ("safetensors", LoadFormat::Safetensors),
                    ("dummy", LoadFormat::Dummy { seed: DUMMY_SEED }),
                ],
            )?,
            ..CpuSettings::default()
        };
        let experts = choice(
            "expert.model.experts",
            &expert.model.experts,
            &[("cut", ExpertPlacement::Cut), ("spread", ExpertPlacement::Spread)],
        )?;
        let limits =
            StepLimits { tokens: expert.scheduler.step_tokens_max, rows: expert.scheduler.sequences_max };
        let gpu_arch = (!expert.model.gpu_arch.is_empty()).then(|| expert.model.gpu_arch.clone());
        let model = self.path.clone();
        let ranks = NonZero::new(self.tp).filter(|ranks| ranks.get() <= RANKS_MAX);
        let ranks = ranks.ok_or_else(|| {
            NodeError::Config(format!("model.tp: {} ranks, 1 to {RANKS_MAX} are allowed", self.tp))
        })?;
        let stages = expert.model.n_stages();
        Ok(EngineSettings {
            model,
            device,
            gpu_arch,
            deterministic: self.deterministic,
            limits,
            ranks,
            stages: StageSplit { n_stages: stages, layers: expert.model.stage_layers.clone() },
            experts,
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
            return Err(refused("a percentage is of the host's memory; give an amount for a GPU".to_owned()));
        }
        Ok(room)
    }
}

/// Makes the settings of a node of several processes. Each process has one stage, or some ranks of one.
fn group(model: &ModelSection, expert: &NodeExpertSettings) -> Result<GroupSettings, NodeError> {
    let ModelExpertSettings { processes, join, join_ms, .. } = &expert.model;
    let refused = |why: String| NodeError::Config(format!("expert.model.processes: {why}"));
    let n_stages = match *processes {
        0 => return Err(refused("0 processes, at least 1 is needed".to_owned())),
        // One process may have several stages.
        1 => 1,
        n if model.device == "auto" => {
            return Err(refused(format!(
                "{n} processes need a device: set model.device to \"cpu\" or \"cuda:N\""
            )));
        }
        _ => expert.model.n_stages().get(),
    };
    let grid =
        ProcessGrid::new(*processes, n_stages, model.tp).map_err(|error| refused(error.to_string()))?;
    let join_within = Duration::from_millis(*join_ms);
    Ok(GroupSettings { grid, listen: join.clone(), join_within })
}

/// The seed of dummy weights. It is the same on every node, because nodes exchange their KV.
const DUMMY_SEED: u64 = 1;

/// Returns the value that a setting's word selects, or an error that lists the known words.
fn choice<T: Copy>(key: &str, word: &str, known: &[(&str, T)]) -> Result<T, NodeError> {
    let found = known.iter().find(|(name, _)| *name == word).map(|(_, value)| *value);
    let names: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
    found.ok_or_else(|| NodeError::Config(format!("`{key}`: {word:?} is not one of {}", names.join(", "))))
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct TransferSection {
    /// Connectors in order of preference; `auto` means all that work here, fastest first.
    pub connectors: Vec<String>,
    /// `host:port` of the tcp connector; port 0 takes a free port.
    pub listen: String,
}

impl Default for TransferSection {
    fn default() -> Self {
        Self { connectors: vec!["auto".to_owned()], listen: TransferSettings::default().listen }
    }
}

impl TransferSection {
    /// Makes the connectors' settings. Connectors are advertised under the host `advertise`, as the node's
    /// gRPC services are.
    pub fn settings(&self, expert: &TransferExpertSettings, advertise: &str) -> TransferSettings {
        TransferSettings {
            listen: self.listen.clone(),
            advertise: advertise.to_owned(),
            streams: expert.streams,
            stall_ms: expert.stall_ms,
            frame_bytes: expert.frame_bytes,
            gpu_multiprocessors: expert.gpu_multiprocessors,
            host_slots: expert.host_slots,
            spin_us: expert.spin_us,
            rdma_listen: expert.rdma_listen.clone(),
            rdma_device: expert.rdma_device.clone(),
            ..TransferSettings::default()
        }
    }
}

/// The setting of the address where a node of several processes waits for the others.
pub const JOIN: &str = "expert.model.join";

/// Returns the addresses on which every node listens, each after its setting.
pub fn listening<'a>(
    listen: &'a str,
    admin: &'a str,
    transfer: &'a TransferSettings,
) -> Vec<(&'static str, &'a str)> {
    let own = [("node.listen", listen), ("node.admin", admin), ("transfer.listen", &transfer.listen)];
    let rdma = ("expert.transfer.rdma_listen", &*transfer.rdma_listen);
    own.into_iter().chain((!rdma.1.is_empty()).then_some(rdma)).collect()
}

/// A node's checked configuration.
#[derive(Clone, Debug)]
pub struct NodeConfig {
    /// The node's name; `None`: a name made of the role, the host name and the bound port.
    pub id: Option<NodeId>,
    pub listen: String,
    pub admin: String,
    pub advertise: Option<String>,
    pub drain: Duration,
    pub stuck_after: Duration,
    pub registry_url: String,
    /// The model's name in requests; `None`: the name of the model's folder.
    pub model_name: Option<String>,
    pub engine: EngineSettings,
    /// The other processes of the node.
    pub group: GroupSettings,
    pub scheduler: SchedulerSettings,
    pub connectors: Vec<String>,
    pub transfer: TransferSettings,
    pub decode: DecodeExpertSettings,
    pub cluster: ClusterSection,
    pub tls: TlsSection,
    pub connections: ConnectionLimits,
    pub log: LogSettings,
    /// The settings as written, without passwords, for `/debug/config`.
    pub shown: Shown,
}

impl NodeConfig {
    /// Returns the numbers of the GPUs that this process uses.
    pub fn gpus(&self) -> Range<usize> {
        let of_all = self.engine.gpus();
        of_all.start..of_all.start + of_all.len() / self.group.grid.n_processes()
    }

    pub fn resolve(raw: RawNodeConfig) -> Result<Self, NodeError> {
        let shown = chassis::config::shown(&raw);
        let RawNodeConfig { node, registry, model, transfer, cluster, tls, log, expert } = raw;
        if transfer.connectors.is_empty() {
            return Err(NodeError::Config("transfer.connectors names no connector".to_owned()));
        }
        if expert.decode.landings_max == 0 {
            return Err(NodeError::Config(
                "expert.decode.landings_max is zero: no KV could arrive".to_owned(),
            ));
        }
        check_connectors(&transfer.connectors)?;
        for (setting, value) in [
            ("expert.node.stuck_ms", expert.node.stuck_ms),
            ("expert.connections.admin_max", expert.connections.admin_max as u64),
        ] {
            if value == 0 {
                return Err(NodeError::Config(format!("{setting} is zero: the node would never be ready")));
            }
        }
        let advertise = node.advertised().map_err(NodeError::Config)?;
        let settings = transfer.settings(&expert.transfer, &node.advertise);
        let config = Self {
            id: (!node.id.is_empty()).then(|| NodeId::new(node.id)),
            listen: node.listen,
            admin: node.admin,
            advertise,
            drain: Duration::from_millis(node.drain_ms),
            stuck_after: Duration::from_millis(expert.node.stuck_ms),
            registry_url: registry.url,
            group: group(&model, &expert)?,
            engine: model.engine(&expert)?,
            model_name: (!model.name.is_empty()).then_some(model.name),
            scheduler: expert.scheduler.settings(),
            transfer: settings,
            connectors: transfer.connectors,
            decode: expert.decode,
            cluster,
            tls,
            connections: expert.connections,
            log: log.settings(&expert.log),
            shown,
        };
        check_listening(&config.listening()).map_err(|error| NodeError::Config(error.to_string()))?;
        Ok(config)
    }

    /// Returns the addresses on which the node listens, each after its setting.
    pub fn listening(&self) -> Vec<(&'static str, &str)> {
        let mut listening = listening(&self.listen, &self.admin, &self.transfer);
        if self.group.grid.n_processes() > 1 {
            listening.push((JOIN, &self.group.listen));
        }
        listening
    }
}

/// Refuses a connector that would be made twice, and would listen twice on `transfer.listen`.
fn check_connectors(names: &[String]) -> Result<(), NodeError> {
    let mut once = std::collections::BTreeSet::new();
    let is_double = names.iter().any(|name| !once.insert(name.as_str()));
    if is_double || once.contains("auto") && once.len() > 1 {
        let names = names.join(", ");
        let reason = format!("transfer.connectors is {names}: give each name once, and auto alone");
        return Err(NodeError::Config(reason));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_with_which_no_node_works_are_refused() {
        let refused = |change: fn(&mut RawNodeConfig)| {
            let mut raw = RawNodeConfig::default();
            change(&mut raw);
            NodeConfig::resolve(raw).expect_err("it is refused").to_string()
        };
        for (change, reason) in [
            (
                (|raw| raw.transfer.connectors = vec!["tcp".to_owned(), "tcp".to_owned()])
                    as fn(&mut RawNodeConfig),
                "transfer.connectors is tcp, tcp: give each name once, and auto alone",
            ),
            (
                |raw| raw.transfer.connectors = vec!["auto".to_owned(), "tcp".to_owned()],
                "transfer.connectors is auto, tcp: give each name once, and auto alone",
            ),
            (
                |raw| raw.expert.node.stuck_ms = 0,
                "expert.node.stuck_ms is zero: the node would never be ready",
            ),
            (
                |raw| raw.expert.connections.admin_max = 0,
                "expert.connections.admin_max is zero: the node would never be ready",
            ),
        ] {
            let refused = refused(change);
            assert!(refused.ends_with(reason), "{refused}");
        }
        let connectors = vec!["shm".to_owned(), "tcp".to_owned()];
        assert!(check_connectors(&connectors).is_ok());
    }

    #[test]
    fn an_advertised_host_has_no_port() {
        let advertised = |advertise: &str| {
            NodeSection { advertise: advertise.to_owned(), ..NodeSection::default() }.advertised()
        };
        for host in ["10.0.0.5", "fd00::2", "[fd00::2]", "decode-0.decode"] {
            assert_eq!(advertised(host), Ok(Some(host.to_owned())));
        }
        assert_eq!(advertised(""), Ok(None));
        for wrong in ["10.0.0.5:7000", "[fd00::2]:7000", "decode-0:7000", "http://decode-0", "decode 0"] {
            let error = advertised(wrong).expect_err(wrong);
            assert!(error.contains(wrong) && error.contains("without a port"), "{error}");
        }
    }
}
