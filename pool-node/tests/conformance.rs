//! Runs the connectors' conformance suite over a put followed by a delivery, as if they were one connector.
//!
//! [`NOT_OF_TWO_LEGS`] lists the cases that do not apply, mostly because the decode node's landing is opened only when
//! the pool has the whole sequence.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use baton_pool_node::{BlockStore, Incoming, PutRequest, StoreError};
use kv_cache::{BlockLease, KvMemory, LayerFence};
use kv_transfer::conformance::conformance_without;
use kv_transfer::{
    Arrival, ConnectorParts, Faults, KvConnector, KvSender, LandRequest, TransferError, build,
};
use types::{BlockHash, Destination, Handoff, KvSpan, Landing, NodeId, RequestId, Scheme, WireAddress};

/// Enough blocks for all sequences that one test case has at a time.
const POOL_BLOCKS: u32 = 4096;
/// The deadline of a put, set here because a landing carries none.
const PUT_WITHIN: Duration = Duration::from_secs(4);
const AT_THE_END: &str =
    "the landing is checked after the whole sequence is stored, so it is refused at the end";
const NEVER_OPENED: &str =
    "an unopened landing does not learn that its sender gave up; in a cluster its stream ends";
const IN_ONE_PIECE: &str =
    "the second leg begins after the first has ended, so layers do not arrive one by one";
const WHOLE: &str = "the pool requires the whole sequence, though the decode node needs a part";

/// Cases that do not apply, with the reasons: they test the beginning of a transfer, or what its two ends
/// know of each other.
const NOT_OF_TWO_LEGS: &[(&str, &str)] = &[
    ("delivery::nothing_to_send_is_a_transfer", WHOLE),
    ("delivery::layers_leave_as_they_are_computed", IN_ONE_PIECE),
    ("delivery::handoff_arrives_last_and_whole", IN_ONE_PIECE),
    ("feed::a_queue_with_a_wrong_chunk_fails", NEVER_OPENED),
    ("feed::a_queue_that_ends_early_fails_both_sides", NEVER_OPENED),
    ("delivery::interleaved_transfers_do_not_mix", NEVER_OPENED),
    ("refusal::unknown_landing", AT_THE_END),
    ("refusal::wrong_grant", AT_THE_END),
    ("refusal::wrong_epoch", AT_THE_END),
    ("refusal::other_model", AT_THE_END),
    ("refusal::other_layout", AT_THE_END),
    ("refusal::other_lengths", AT_THE_END),
    ("refusal::landing_is_opened_once", AT_THE_END),
    ("refusal::expired_landing", AT_THE_END),
    ("refusal::not_a_landing", AT_THE_END),
    ("refusal::finish_with_pages_missing", NEVER_OPENED),
    ("refusal::handoff_of_another_sequence", NEVER_OPENED),
    ("abort::sender_dropped_at_every_stage", NEVER_OPENED),
    ("abort::arrival_dropped_at_every_stage", AT_THE_END),
    ("abort::broken_fence_fails_both_sides", NEVER_OPENED),
    ("abort::deadline_fails_both_sides", NEVER_OPENED),
    ("abort::receiver_dies", AT_THE_END),
    ("abort::sender_dies", NEVER_OPENED),
    ("fault::flipped_bit_twice_is_a_failure", NEVER_OPENED),
    ("fault::lost_connection_fails_both_and_heals", NEVER_OPENED),
];

/// The transfer into which the suite's faults are injected: the put or the delivery.
#[derive(Clone, Copy)]
enum Leg {
    Put,
    Deliver,
}

/// A connector with a pool node in its middle.
#[derive(Debug)]
struct ThroughPool {
    wire: Arc<dyn KvConnector>,
    store: BlockStore,
    parts: ConnectorParts,
}

impl ThroughPool {
    async fn over(name: &'static str, parts: ConnectorParts, leg: Leg) -> Arc<dyn KvConnector> {
        let (put, deliver) = match leg {
            Leg::Put => (parts.faults.clone(), Faults::none()),
            Leg::Deliver => (Faults::none(), parts.faults.clone()),
        };
        let memory = KvMemory::host(parts.memory.layout().clone(), POOL_BLOCKS).expect("a few MiB");
        let node = NodeId::new(format!("pool of {}", parts.node));
        let pool =
            ConnectorParts { node, memory, epoch: parts.world.epoch(), faults: deliver, ..parts.clone() };
        let own = ConnectorParts { faults: put, ..parts };
        let wire = build(name, own.clone()).await.expect("it works here");
        let store = BlockStore::new(pool.clone(), vec![build(name, pool).await.expect("it works here")]);
        Arc::new(Self { wire, store, parts: own })
    }

    /// Stores a sequence in the pool. Each sequence has its own hashes, so none of its blocks is cached.
    fn put(&self, landing: &Landing) -> Result<(Landing, Incoming), TransferError> {
        let n_blocks = u128::from(landing.n_tokens / u32::from(landing.layout.block_tokens));
        let hash = |nth| BlockHash(landing.transfer.0.wrapping_mul(3).wrapping_add(nth));
        let request = PutRequest {
            transfer: self.parts.world.transfer_id(),
            request: RequestId::new("conformance"),
            hashes: (0..n_blocks).map(hash).collect(),
            n_tokens: landing.n_tokens,
            connector: self.scheme(),
            deadline: self.parts.world.deadline_in(PUT_WITHIN),
        };
        self.store.put(request).map_err(of_wire)
    }
}

fn of_wire(error: StoreError) -> TransferError {
    match error {
        StoreError::Transfer(error) => error,
        error => TransferError::Peer(error.to_string()),
    }
}

#[async_trait]
impl KvConnector for ThroughPool {
    fn scheme(&self) -> Scheme {
        self.wire.scheme()
    }

    fn address(&self) -> WireAddress {
        self.wire.address()
    }

    fn reaches(&self, wire: &WireAddress) -> bool {
        self.wire.reaches(wire)
    }

    fn land(&self, request: LandRequest) -> Result<(Landing, Arrival), TransferError> {
        self.wire.land(request)
    }

    async fn open(&self, to: &Destination) -> Result<Box<dyn KvSender>, TransferError> {
        let Destination::Landing(landing) = to else { return self.wire.open(to).await };
        let (put, incoming) = self.put(landing)?;
        let sender = self.wire.open(&Destination::Landing(put)).await?;
        Ok(Box::new(TwoLegs { sender, incoming, landing: landing.clone() }))
    }
}

/// A sender to the pool, and the decode node's landing for the delivery from the pool.
#[derive(Debug)]
struct TwoLegs {
    sender: Box<dyn KvSender>,
    incoming: Incoming,
    landing: Landing,
}

#[async_trait]
impl KvSender for TwoLegs {
    async fn send(
        &mut self,
        span: KvSpan,
        from: Arc<BlockLease>,
        ready: LayerFence,
    ) -> Result<(), TransferError> {
        self.sender.send(span, from, ready).await
    }

    async fn finish(self: Box<Self>, handoff: Handoff) -> Result<(), TransferError> {
        let Self { sender, incoming, landing } = *self;
        sender.finish(Handoff { transfer: incoming.transfer(), ..handoff }).await?;
        let stored = incoming.stored().await.map_err(of_wire)?;
        stored.deliver(landing).await.map_err(of_wire)
    }
}

#[tokio::test(start_paused = true)]
async fn through_the_pool_on_loopback() {
    conformance_without(NOT_OF_TWO_LEGS, |parts| ThroughPool::over("loopback", parts, Leg::Put)).await;
}

#[tokio::test]
async fn through_the_pool_on_tcp() {
    conformance_without(NOT_OF_TWO_LEGS, |parts| ThroughPool::over("tcp", parts, Leg::Put)).await;
}

#[tokio::test]
async fn through_the_pool_with_faults_behind_it() {
    conformance_without(NOT_OF_TWO_LEGS, |parts| ThroughPool::over("tcp", parts, Leg::Deliver)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn through_the_pool_on_shm() {
    conformance_without(NOT_OF_TWO_LEGS, |parts| ThroughPool::over("shm", parts, Leg::Put)).await;
}
