//! Prefill nodes of several processes, for conformance cases: all of them within the test's process.

use std::num::NonZero;
use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;
use types::{KvLayout, StageLayers, StageSplit};

use super::node::{Make, N_LAYERS, Node, Pair};
use crate::connector_parts::ConnectorParts;
use crate::connectors::follower::FollowerStreams;
use crate::error::TransferError;
use crate::processes::{OtherProcesses, PutOrder};

/// How followers send their KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FollowerPath {
    /// Through slots if the followers' memory is on GPUs; otherwise the processor copies the KV. Nodes do the same.
    OfMemory,
    /// Through slots, over the double of a GPU.
    DoubleSlots,
}

/// The parts of a prefill node's processes. A test may change them before it makes the node.
#[derive(Clone, Debug)]
pub struct ProcessParts {
    pub head: ConnectorParts,
    pub followers: Vec<ConnectorParts>,
    /// The layers of each follower.
    pub layers: Vec<Range<u16>>,
    pub follower_path: FollowerPath,
}

impl ProcessParts {
    /// Makes the parts of a node with [`layout`](super::node::layout)'s layers. All processes share their faults.
    ///
    /// # Panics
    /// If there are more processes than layers.
    pub fn new(n_processes: NonZero<u16>, layout: KvLayout) -> Self {
        let split = StageSplit { n_stages: n_processes, layers: Vec::new() };
        let layers: Vec<_> = split.over(N_LAYERS).expect("every process has a layer").iter().collect();
        let parts = |layers: &Range<u16>| {
            Node::parts_of("prefill", layout.clone(), &StageLayers::part(layers.clone()))
        };
        let head = parts(&layers[0]);
        let follower = |layers| ConnectorParts { memory: parts(layers).memory, ..head.clone() };
        let followers = layers[1..].iter().map(follower).collect();
        Self { followers, head, layers: layers[1..].to_vec(), follower_path: FollowerPath::OfMemory }
    }

    /// Makes the followers. Orders go to them as bytes.
    ///
    /// # Panics
    /// If a follower has no room for slots.
    pub async fn start_followers(&self) -> Arc<dyn OtherProcesses> {
        let mut followers = Vec::new();
        for parts in self.followers.iter().cloned() {
            let follower = match self.follower_path {
                FollowerPath::OfMemory => FollowerStreams::start(parts).await,
                FollowerPath::DoubleSlots => FollowerStreams::start_double(parts).await,
            };
            followers.push(follower.expect("there is room for its slots"));
        }
        Arc::new(LocalProcesses { layers: self.layers.clone(), followers })
    }

    /// Makes the node, with `processes` as its head's other processes.
    pub async fn node(self, make: &Make, processes: Arc<dyn OtherProcesses>) -> Node {
        let others = self.followers.into_iter().map(|parts| parts.memory).collect();
        let head = ConnectorParts { processes: Some(processes), ..self.head };
        Node::of_processes(make, head, others).await
    }

    /// Replaces the prefill node of a pair by this node.
    pub async fn start(self, make: &Make, mut pair: Pair) -> Pair {
        let processes = self.start_followers().await;
        pair.prefill = self.node(make, processes).await;
        pair
    }
}

/// The followers of one node.
#[derive(Debug)]
struct LocalProcesses {
    layers: Vec<Range<u16>>,
    followers: Vec<FollowerStreams>,
}

#[async_trait]
impl OtherProcesses for LocalProcesses {
    fn of_layer(&self, layer: u16) -> Option<usize> {
        self.layers.iter().position(|layers| layers.contains(&layer))
    }

    fn n_processes(&self) -> usize {
        self.followers.len()
    }

    async fn put(&self, process: usize, order: PutOrder) -> Result<(), TransferError> {
        self.followers[process].put(PutOrder::decode(&order.encode())?).await
    }

    fn close_link(&self, link: u64) {
        for follower in &self.followers {
            follower.close_link(link);
        }
    }
}
