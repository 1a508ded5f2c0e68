//! Nodes of several processes, for conformance cases: all of them within the test's process.

use std::num::NonZero;
use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;
use tokio::sync::mpsc;
use types::{KvLayout, StageLayers, StageSplit, TransferId};

use super::node::{Make, N_LAYERS, Node, Pair};
use crate::connector_parts::ConnectorParts;
use crate::connectors::follower::FollowerStreams;
use crate::connectors::follower_landings::FollowerLandings;
use crate::error::TransferError;
use crate::processes::{
    LandOrder, LandingEvent, LandingQueues, LandingReport, OtherProcesses, PutOrder, ReportLandings,
};

/// The node of a pair that has several processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Prefill,
    Decode,
}

/// How followers send and receive their KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FollowerPath {
    /// Through slots if the followers' memory is on GPUs; otherwise the processor copies the KV. Nodes do the same.
    OfMemory,
    /// Through slots, over the double of a GPU.
    DoubleSlots,
}

/// The parts of a node's processes. A test may change them before it makes the node.
#[derive(Clone, Debug)]
pub struct ProcessParts {
    pub side: Side,
    pub head: ConnectorParts,
    pub followers: Vec<ConnectorParts>,
    /// The layers of each follower.
    pub layers: Vec<Range<u16>>,
    pub follower_path: FollowerPath,
}

impl ProcessParts {
    /// Makes the parts of a prefill node with [`layout`](super::node::layout)'s layers. All processes share their faults.
    ///
    /// # Panics
    /// If there are more processes than layers.
    pub fn new(n_processes: NonZero<u16>, layout: KvLayout) -> Self {
        Self::of(Side::Prefill, n_processes, layout)
    }

    /// Like [`new`](Self::new), for either node of a pair.
    ///
    /// # Panics
    /// Like `new`.
    pub fn of(side: Side, n_processes: NonZero<u16>, layout: KvLayout) -> Self {
        let name = match side {
            Side::Prefill => "prefill",
            Side::Decode => "decode",
        };
        let split = StageSplit { n_stages: n_processes, layers: Vec::new() };
        let layers: Vec<_> = split.over(N_LAYERS).expect("every process has a layer").iter().collect();
        let parts =
            |layers: &Range<u16>| Node::parts_of(name, layout.clone(), &StageLayers::part(layers.clone()));
        let head = parts(&layers[0]);
        let follower = |layers| ConnectorParts { memory: parts(layers).memory, ..head.clone() };
        let followers = layers[1..].iter().map(follower).collect();
        Self { side, followers, head, layers: layers[1..].to_vec(), follower_path: FollowerPath::OfMemory }
    }

    /// Makes the followers. Orders go to them as bytes.
    ///
    /// # Panics
    /// If a follower has no room for slots.
    pub async fn start_followers(&self) -> Arc<dyn OtherProcesses> {
        let mut followers = Vec::new();
        for parts in self.followers.iter().cloned() {
            let reports = Arc::new(Reports::default());
            let to_head = Arc::clone(&reports) as _;
            let streams = match self.follower_path {
                FollowerPath::OfMemory => FollowerStreams::start(parts).await,
                FollowerPath::DoubleSlots => FollowerStreams::start_double(parts).await,
            };
            let streams = streams.expect("there is room for its slots");
            let landings = streams.listen(to_head).await.expect("there are ports");
            followers.push(Follower { streams, landings, reports });
        }
        Arc::new(LocalProcesses { layers: self.layers.clone(), followers })
    }

    /// Makes the node, with `processes` as its head's other processes.
    pub async fn node(self, make: &Make, processes: Arc<dyn OtherProcesses>) -> Node {
        let others = self.followers.into_iter().map(|parts| parts.memory).collect();
        let head = ConnectorParts { processes: Some(processes), ..self.head };
        Node::of_processes(make, head, others).await
    }

    /// Replaces a node of a pair by this node.
    pub async fn start(self, make: &Make, mut pair: Pair) -> Pair {
        let (side, processes) = (self.side, self.start_followers().await);
        let node = self.node(make, processes).await;
        match side {
            Side::Prefill => pair.prefill = node,
            Side::Decode => pair.decode = node,
        }
        pair
    }
}

/// The followers of one node.
#[derive(Debug)]
struct LocalProcesses {
    layers: Vec<Range<u16>>,
    followers: Vec<Follower>,
}

#[derive(Debug)]
struct Follower {
    streams: FollowerStreams,
    landings: FollowerLandings,
    reports: Arc<Reports>,
}

/// Reports that go to the head as bytes.
#[derive(Debug, Default)]
struct Reports(LandingQueues);

impl ReportLandings for Reports {
    fn report(&self, report: LandingReport) {
        self.0.take(LandingReport::decode(&report.encode()).expect("a report is read as it is written"));
    }
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
        self.followers[process].streams.put(PutOrder::decode(&order.encode())?).await
    }

    fn endpoint(&self, process: usize) -> String {
        self.followers[process].landings.endpoint().to_owned()
    }

    fn land(&self, process: usize, order: LandOrder) -> mpsc::Receiver<LandingEvent> {
        let Follower { landings, reports, .. } = &self.followers[process];
        let events = reports.0.begin(order.transfer);
        landings.land(&LandOrder::decode(&order.encode()).expect("an order is read as it is written"));
        events
    }

    fn end_landing(&self, process: usize, link: u64, transfer: TransferId) {
        self.followers[process].landings.end(link, transfer);
    }

    fn close_link(&self, link: u64) {
        for follower in &self.followers {
            follower.streams.close_link(link);
            follower.landings.close_link(link);
        }
    }
}
