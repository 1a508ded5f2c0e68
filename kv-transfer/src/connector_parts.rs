//! The parts from which a connector is built.

use std::sync::Arc;

use chassis::{Gate, World};
use kv_cache::KvMemory;
use types::{Epoch, Fingerprint, NodeId};

use crate::faults::Faults;
use crate::metrics::TransferMetrics;
use crate::processes::OtherProcesses;
use crate::settings::TransferSettings;

/// The parts of the node that a connector is built from.
#[derive(Clone, Debug)]
pub struct ConnectorParts {
    pub node: NodeId,
    pub epoch: Epoch,
    pub memory: KvMemory,
    pub fingerprint: Fingerprint,
    pub world: World,
    pub gate: Gate,
    pub settings: TransferSettings,
    pub metrics: TransferMetrics,
    /// Faults that a test injects. Empty in production.
    pub faults: Faults,
    /// The other processes of the node, if it has several. `None` if this process has the KV of all layers.
    pub processes: Option<Arc<dyn OtherProcesses>>,
}
