//! The connectors of one node, in order of preference.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use engine::backend::mock::Costs;
use kv_cache::KvMemory;
use kv_transfer::{Auto, ConnectorParts, KvConnector, TransferError, WireKind};
use proto::v1;
use tracing::{info, warn};
use types::{KvLayout, MissingWire, NodeId, Scheme, WireAddress, in_full};

use crate::error::NodeError;
use crate::paced::PacedConnector;

const NOT_ON_A_GPU: &str = "its KV is not on a GPU";
/// The most peers for which a fallback warning is remembered. Above it the memory is cleared and warnings
/// repeat.
const FALLBACKS_MAX: usize = 1024;

/// The connectors of one node. Cheap to clone.
#[derive(Clone)]
pub struct Connectors {
    host: Arc<str>,
    best_first: Arc<[Arc<dyn KvConnector>]>,
    /// The connectors that the node does not offer.
    missing: Arc<[MissingWire]>,
    /// The pairs of peer and connector for which a fallback warning was logged. The mutex is held for one
    /// look-up.
    fallbacks: Arc<Mutex<BTreeSet<(NodeId, Scheme)>>>,
}

/// A peer's host and connectors, from which a common connector is chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerWires {
    pub node: NodeId,
    pub host: String,
    pub wires: Vec<WireAddress>,
}

impl Connectors {
    /// Builds the connectors in `names`, in this order of preference.
    ///
    /// A connector named explicitly must start. A connector that only `auto` includes may be missing; this is
    /// a warning if the machine seems to support it. The memory of slots must be there for both.
    pub async fn build(names: &[String], host: &str, parts: &ConnectorParts) -> Result<Self, NodeError> {
        let mut best_first: Vec<Arc<dyn KvConnector>> = Vec::new();
        let mut missing = not_named(names);
        for (name, is_needed) in names.iter().flat_map(|name| expand(name)) {
            if let Some(why) = not_on_gpus(name, &parts.memory).filter(|_| !is_needed) {
                missing.push(MissingWire { scheme: Scheme::new(name), why: why.to_owned() });
                continue;
            }
            match kv_transfer::build(name, parts.clone()).await {
                Ok(connector) => best_first.push(connector),
                // Too little memory for slots is an error here, because otherwise a slower connector would be used
                // unnoticed.
                Err(error @ TransferError::Slots { .. }) => return Err(NodeError::Connector(error)),
                Err(error) if is_needed => return Err(NodeError::Connector(error)),
                Err(error @ TransferError::SeveralProcesses(_)) => {
                    missing.push(MissingWire { scheme: Scheme::new(name), why: in_full(&error) });
                }
                // The log level is info, because most machines lack the hardware.
                Err(error) if error.is_of_the_machine() => {
                    info!(
                        connector = name,
                        error = in_full(&error),
                        "connector is not supported on this machine"
                    );
                    missing.push(MissingWire { scheme: Scheme::new(name), why: in_full(&error) });
                }
                Err(error) => {
                    warn!(
                        connector = name,
                        error = in_full(&error),
                        "connector failed to start and is not offered"
                    );
                    missing.push(MissingWire { scheme: Scheme::new(name), why: in_full(&error) });
                }
            }
        }
        Ok(Self::of(host.into(), best_first.into(), missing.into()))
    }

    fn of(host: Arc<str>, best_first: Arc<[Arc<dyn KvConnector>]>, missing: Arc<[MissingWire]>) -> Self {
        Self { host, best_first, missing, fallbacks: Arc::default() }
    }

    /// Returns the same connectors, slowed down when they send to the speed of `costs`.
    #[must_use]
    pub fn paced(self, costs: Costs, layout: &KvLayout) -> Self {
        let layout = Arc::new(layout.clone());
        let pace = |inner: &Arc<dyn KvConnector>| -> Arc<dyn KvConnector> {
            Arc::new(PacedConnector { inner: inner.clone(), costs, layout: layout.clone() })
        };
        Self::of(self.host, self.best_first.iter().map(pace).collect(), self.missing)
    }

    /// Returns the addresses of this node's connectors, best first.
    pub fn addresses(&self) -> Vec<WireAddress> {
        self.best_first.iter().map(|connector| connector.address()).collect()
    }

    /// Returns the connectors that the node does not offer, with the reasons.
    pub fn missing(&self) -> Vec<MissingWire> {
        self.missing.to_vec()
    }

    /// Returns all connectors, best first.
    pub fn all(&self) -> &[Arc<dyn KvConnector>] {
        &self.best_first
    }

    pub fn by_scheme(&self, scheme: &Scheme) -> Option<Arc<dyn KvConnector>> {
        self.best_first.iter().find(|connector| connector.scheme() == *scheme).cloned()
    }

    /// Returns the best connector that this node and `peer` both have and that reaches the peer.
    ///
    /// If a better connector should reach the peer and does not, a warning is logged once per peer.
    pub fn shared_with(&self, peer: &PeerWires) -> Option<Arc<dyn KvConnector>> {
        for connector in self.best_first.iter().filter(|connector| self.is_for(connector, peer)) {
            let scheme = connector.scheme();
            match peer.wires.iter().find(|wire| wire.scheme == scheme) {
                Some(wire) if connector.reaches(wire) => return Some(Arc::clone(connector)),
                Some(_) => self.fall_back(peer, scheme, "it does not reach the peer"),
                None => self.fall_back(peer, scheme, "the peer has none"),
            }
        }
        None
    }

    /// Returns whether the host ids of the node and the peer allow the connector.
    fn is_for(&self, connector: &Arc<dyn KvConnector>, peer: &PeerWires) -> bool {
        *self.host == *peer.host || !connector.address().within_host
    }

    fn fall_back(&self, peer: &PeerWires, scheme: Scheme, why: &'static str) {
        let mut told = self.fallbacks.lock().unwrap_or_else(PoisonError::into_inner);
        if told.len() >= FALLBACKS_MAX {
            told.clear();
        }
        if told.insert((peer.node.clone(), scheme.clone())) {
            warn!(peer = %peer.node, connector = %scheme, why, "connector cannot be used with the peer, falling back to another connector");
        }
    }
}

/// Returns the connectors that `auto` includes: all that need no setup, fastest first.
fn automatic() -> impl Iterator<Item = &'static WireKind> {
    kv_transfer::connectors().iter().filter(|wire| wire.auto != Auto::No)
}

/// Returns the reason why a connector between GPUs cannot use this memory.
fn not_on_gpus(name: &str, memory: &KvMemory) -> Option<&'static str> {
    let needs_gpus = automatic().any(|wire| wire.name == name && wire.auto == Auto::IfOnGpus);
    (needs_gpus && !memory.is_on_cards()).then_some(NOT_ON_A_GPU)
}

/// Returns the connectors that `auto` includes and that the configuration excludes.
fn not_named(names: &[String]) -> Vec<MissingWire> {
    let is_named = |name: &str| names.iter().any(|named| named == name || named == "auto");
    let why = format!("transfer.connectors is {}", names.join(", "));
    let unnamed = automatic().filter(|wire| !is_named(wire.name));
    unnamed.map(|wire| MissingWire { scheme: Scheme::new(wire.name), why: why.clone() }).collect()
}

/// Returns the connectors that a configured name includes. The flag says whether the node requires the
/// connector.
fn expand(name: &str) -> Vec<(&str, bool)> {
    match name {
        "auto" => automatic().map(|wire| (wire.name, wire.auto == Auto::Needed)).collect(),
        name => vec![(name, true)],
    }
}

impl fmt::Debug for Connectors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.best_first.iter().map(|connector| connector.scheme())).finish()
    }
}

impl From<v1::Peer> for PeerWires {
    fn from(peer: v1::Peer) -> Self {
        let wires = peer.wires.into_iter().map(Into::into).collect();
        Self { node: NodeId::new(peer.node), host: peer.host, wires }
    }
}

#[cfg(test)]
mod tests;
