//! The connectors that one node has, best first.

use std::fmt;
use std::sync::Arc;

use engine::backend::mock::Costs;
use kv_transfer::{ConnectorParts, KvConnector};
use proto::v1;
use types::{KvLayout, NodeId, Scheme, WireAddress};

use crate::error::NodeError;
use crate::paced::Paced;

/// What `auto` stands for: all connectors that work on any machine, fastest first.
const AUTO: &[&str] = &["tcp"];
/// Connectors that only reach a node on the same machine.
const SAME_HOST_ONLY: &[&str] = &["loopback", "shm", "cuda-ipc"];

/// The connectors of one node. Cheap to clone.
#[derive(Clone)]
pub struct Connectors {
    host: Arc<str>,
    best_first: Arc<[Arc<dyn KvConnector>]>,
}

/// As much of a peer as the choice of a wire needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerWires {
    pub node: NodeId,
    pub host: String,
    pub wires: Vec<WireAddress>,
}

impl Connectors {
    /// Builds the connectors called `names`, in this order of preference.
    pub async fn build(names: &[String], host: &str, parts: &ConnectorParts) -> Result<Self, NodeError> {
        let mut best_first = Vec::new();
        for name in names.iter().flat_map(|name| expand(name)) {
            let connector = kv_transfer::build(name, parts.clone()).await;
            best_first.push(connector.map_err(NodeError::Connector)?);
        }
        Ok(Self { host: host.into(), best_first: best_first.into() })
    }

    /// The same connectors, each as slow as `costs` say.
    #[must_use]
    pub fn paced(self, costs: Costs, layout: &KvLayout) -> Self {
        let layout = Arc::new(layout.clone());
        let pace = |inner: &Arc<dyn KvConnector>| -> Arc<dyn KvConnector> {
            Arc::new(Paced { inner: inner.clone(), costs, layout: layout.clone() })
        };
        Self { host: self.host, best_first: self.best_first.iter().map(pace).collect() }
    }

    /// Where this node can be reached, best first.
    pub fn addresses(&self) -> Vec<WireAddress> {
        self.best_first.iter().map(|connector| connector.address()).collect()
    }

    pub fn by_scheme(&self, scheme: &Scheme) -> Option<Arc<dyn KvConnector>> {
        self.best_first.iter().find(|connector| connector.scheme() == *scheme).cloned()
    }

    /// The best connector that this node and `peer` both have.
    pub fn shared_with(&self, peer: &PeerWires) -> Option<Arc<dyn KvConnector>> {
        let theirs = |scheme: &Scheme| peer.wires.iter().any(|wire| wire.scheme == *scheme);
        let reaches =
            |scheme: &Scheme| *self.host == *peer.host || !SAME_HOST_ONLY.contains(&scheme.as_str());
        let usable =
            |connector: &&Arc<dyn KvConnector>| theirs(&connector.scheme()) && reaches(&connector.scheme());
        self.best_first.iter().find(usable).cloned()
    }
}

/// The connectors that a configured name stands for.
fn expand(name: &str) -> Vec<&str> {
    if name == "auto" { AUTO.to_vec() } else { vec![name] }
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
