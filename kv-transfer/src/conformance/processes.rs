//! Nodes of several processes, for conformance cases: all of them within the test's process.

use std::iter;
use std::num::NonZero;
use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;
use tokio::sync::mpsc;
use types::{KvLayout, ProcessGrid, ProcessShare, StageLayers, StageSplit, TransferId};

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

/// The KV of one process: some layers on some ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayersOnRanks {
    pub layers: Range<u16>,
    pub ranks: Range<u16>,
}

impl LayersOnRanks {
    /// Returns the process that has a rank's KV of a layer.
    pub fn position(all: &[Self], layer: u16, rank: u16) -> Option<usize> {
        all.iter().position(|share| share.layers.contains(&layer) && share.ranks.contains(&rank))
    }

    fn stages(&self) -> StageLayers {
        StageLayers::part(self.layers.clone()).with_ranks(self.ranks.clone())
    }
}

/// The parts of a node's processes. A test may change them before it makes the node.
#[derive(Clone, Debug)]
pub struct ProcessParts {
    pub side: Side,
    pub head: ConnectorParts,
    pub followers: Vec<ConnectorParts>,
    /// The share of each follower.
    pub shares: Vec<LayersOnRanks>,
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
        let split = StageSplit { n_stages: n_processes, layers: Vec::new() };
        let stages = split.over(N_LAYERS).expect("every process has a layer");
        let ranks = 0..layout.shard.tp_size;
        let share = |layers| LayersOnRanks { layers, ranks: ranks.clone() };
        let shares = stages.iter().map(share).collect();
        Self::of_shares(side, shares, &layout)
    }

    /// Like [`of`](Self::of), with `n_stages` stages whose ranks are divided over the processes of each stage.
    ///
    /// # Panics
    /// If they do not divide.
    pub fn with_ranks(side: Side, n_processes: u16, n_stages: NonZero<u16>, layout: &KvLayout) -> Self {
        let stages =
            StageSplit { n_stages, layers: Vec::new() }.over(N_LAYERS).expect("every stage has a layer");
        let layers: Vec<_> = stages.iter().collect();
        let grid = ProcessGrid::new(n_processes, n_stages.get(), layout.shard.tp_size).expect("they divide");
        let share = |process| {
            let ProcessShare { stage, ranks } = grid.share(process);
            LayersOnRanks { layers: layers[stage].clone(), ranks }
        };
        let of_followers = (0..grid.head()).map(share);
        let shares = iter::once(share(grid.head())).chain(of_followers).collect();
        Self::of_shares(side, shares, layout)
    }

    /// The first share is the head's.
    fn of_shares(side: Side, mut shares: Vec<LayersOnRanks>, layout: &KvLayout) -> Self {
        let name = match side {
            Side::Prefill => "prefill",
            Side::Decode => "decode",
        };
        let parts = |share: &LayersOnRanks| Node::parts_of(name, layout.clone(), &share.stages());
        let head = parts(&shares.remove(0));
        let follower = |share| ConnectorParts { memory: parts(share).memory, ..head.clone() };
        let followers = shares.iter().map(follower).collect();
        Self { side, followers, head, shares, follower_path: FollowerPath::OfMemory }
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
        Arc::new(LocalProcesses { shares: self.shares.clone(), followers })
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
    shares: Vec<LayersOnRanks>,
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
    fn process_of(&self, layer: u16, rank: u16) -> Option<usize> {
        LayersOnRanks::position(&self.shares, layer, rank)
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
