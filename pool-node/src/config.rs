//! A pool node's configuration: [`RawPoolConfig`] is the file, [`PoolConfig`] the checked form.

use std::time::Duration;

use chassis::byte_size::ByteSize;
use chassis::config::{Shown, check_listening};
use chassis::connections::ConnectionLimits;
use chassis::identity::settings::{ClusterSection, TlsSection};
use chassis::telemetry::{LogExpertSettings, LogSection, LogSettings};
use kv_transfer::TransferSettings;
use node::KvMemorySize;
use node::config::{NodeSection, RegistrySection, TransferExpertSettings, TransferSection, listening};
use serde::{Deserialize, Serialize};
use types::NodeId;

use crate::error::PoolNodeError;

/// A pool node's TOML file.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RawPoolConfig {
    pub pool: PoolSection,
    pub node: NodeSection,
    pub registry: RegistrySection,
    pub transfer: TransferSection,
    pub cluster: ClusterSection,
    pub tls: TlsSection,
    pub log: LogSection,
    pub expert: PoolExpertSettings,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PoolSection {
    /// The memory for KV: `4GiB`, or a share of the free memory of the machine or container at the start,
    /// `60%`.
    pub memory: KvMemorySize,
    /// The model whose KV is kept, by its name in requests. Empty: the model of the first node in the
    /// registry. A pool node keeps the KV of one model, with the weights of that node.
    pub model: String,
    /// The largest number of incoming and stored sequences. Above it the node refuses sequences, and prefill
    /// nodes hold their KV.
    pub sequences_max: u32,
}

impl Default for PoolSection {
    fn default() -> Self {
        Self { memory: KvMemorySize::Bytes(ByteSize(1 << 30)), model: String::new(), sequences_max: 1024 }
    }
}

/// A pool node's `[expert]` tables: settings that are rarely changed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PoolExpertSettings {
    pub transfer: TransferExpertSettings,
    pub connections: ConnectionLimits,
    pub log: LogExpertSettings,
}

/// A pool node's checked configuration.
#[derive(Clone, Debug)]
pub struct PoolConfig {
    pub memory: KvMemorySize,
    /// The model whose KV is kept; `None`: the model of the first node in the registry.
    pub model: Option<String>,
    pub sequences_max: u32,
    /// The node's name; `None`: a name made of the role, the host name and the bound port.
    pub id: Option<NodeId>,
    pub listen: String,
    pub admin: String,
    pub advertise: Option<String>,
    pub drain: Duration,
    pub registry_url: String,
    pub connectors: Vec<String>,
    pub transfer: TransferSettings,
    pub cluster: ClusterSection,
    pub tls: TlsSection,
    pub connections: ConnectionLimits,
    pub log: LogSettings,
    /// The settings as written, without passwords, for `/debug/config`.
    pub shown: Shown,
}

impl PoolConfig {
    pub fn resolve(raw: RawPoolConfig) -> Result<Self, PoolNodeError> {
        let shown = chassis::config::shown(&raw);
        let RawPoolConfig { pool, node, registry, transfer, cluster, tls, log, expert } = raw;
        if transfer.connectors.is_empty() {
            return Err(PoolNodeError::Config("transfer.connectors names no connector".to_owned()));
        }
        if pool.sequences_max == 0 {
            return Err(PoolNodeError::Config("pool.sequences_max must be at least 1".to_owned()));
        }
        let advertise = node.advertised().map_err(PoolNodeError::Config)?;
        let config = Self {
            memory: pool.memory,
            model: (!pool.model.is_empty()).then_some(pool.model),
            sequences_max: pool.sequences_max,
            id: (!node.id.is_empty()).then(|| NodeId::new(node.id)),
            listen: node.listen,
            admin: node.admin,
            transfer: transfer.settings(&expert.transfer, &node.advertise),
            advertise,
            drain: Duration::from_millis(node.drain_ms),
            registry_url: registry.url,
            connectors: transfer.connectors,
            cluster,
            tls,
            connections: expert.connections,
            log: log.settings(&expert.log),
            shown,
        };
        check_listening(&config.listening()).map_err(|error| PoolNodeError::Config(error.to_string()))?;
        Ok(config)
    }

    /// Returns the addresses on which the node listens, each after its setting.
    pub fn listening(&self) -> Vec<(&'static str, &str)> {
        listening(&self.listen, &self.admin, &self.transfer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_a_configuration() {
        let config = PoolConfig::resolve(RawPoolConfig::default()).expect("the defaults are valid");
        assert_eq!((config.model, config.sequences_max), (None, 1024));
    }

    #[test]
    fn what_means_nothing_is_refused() {
        let mut raw = RawPoolConfig::default();
        raw.transfer.connectors.clear();
        PoolConfig::resolve(raw).expect_err("no connector");
        let mut raw = RawPoolConfig::default();
        raw.pool.sequences_max = 0;
        PoolConfig::resolve(raw).expect_err("no sequence");
    }
}
