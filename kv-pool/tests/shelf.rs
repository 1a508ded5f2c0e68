//! A prefill node puts, a decode node gets, and neither has ever met the other.

use std::sync::Arc;
use std::time::Duration;

use baton_kv_pool::{Delivery, PoolError, Put, PutRequest, Shelf};
use futures::poll;
use kv_cache::{FenceSignal, KvMemory, LayerFence};
use kv_transfer::conformance::node::{BLOCK_TOKENS, Make, Node, handoff, layout, whole};
use kv_transfer::{
    ArrivedKv, ConnectorParts, Fault, FaultKind, KvConnector, LandRequest, Source, TransferError, build,
};
use types::{BlockHash, BlockHasher, Destination, GroupIdx, Landing, TenantId, TokenId};

const WITHIN: Duration = Duration::from_secs(20);
/// The pool of these tests is small, so that it is soon full: eight blocks of a sequence, which has two groups of layers.
const POOL_BLOCKS: u32 = 16;

struct Cluster {
    prefill: Node,
    decode: Node,
    shelf: Shelf,
    pool: ConnectorParts,
}

impl Cluster {
    async fn new(connector: &'static str) -> Self {
        let make: Make = Arc::new(move |parts| Box::pin(built(connector, parts)));
        let memory = KvMemory::host(layout(), POOL_BLOCKS).expect("a few KiB can be mapped");
        let pool = ConnectorParts { memory, ..Node::parts("pool", layout()) };
        let shelf = Shelf::new(pool.clone(), vec![built(connector, pool.clone()).await]);
        let prefill = Node::new(&make, Node::parts("prefill", layout())).await;
        let decode = Node::new(&make, Node::parts("decode", layout())).await;
        Self { prefill, decode, shelf, pool }
    }

    fn put_request(&self, hashes: &[BlockHash]) -> PutRequest {
        PutRequest {
            transfer: self.pool.world.transfer_id(),
            hashes: hashes.to_vec(),
            connector: self.prefill.connector.scheme(),
            deadline: self.pool.world.deadline_in(WITHIN),
        }
    }

    fn put(&self, hashes: &[BlockHash]) -> Result<Put, PoolError> {
        self.shelf.put(self.put_request(hashes))
    }

    /// Computes a sequence's KV and sends what the pool has not.
    async fn fill(&self, landing: &Landing, sequence: u64) {
        let from = self.prefill.computed(landing.n_tokens, sequence);
        let to = Destination::Landing(landing.clone());
        let mut sender = self.prefill.connector.open(&to).await.expect("granted");
        for span in whole(landing) {
            sender.send(span, Arc::clone(&from), LayerFence::open()).await.expect("room");
        }
        sender.finish(handoff(landing)).await.expect("put");
    }

    async fn store(&self, hashes: &[BlockHash], sequence: u64) -> Landing {
        let Put::Landing(landing) = self.put(hashes).expect("there is room") else {
            panic!("it is not there")
        };
        self.fill(&landing, sequence).await;
        self.until_held(hashes).await;
        landing
    }

    async fn until_held(&self, hashes: &[BlockHash]) {
        let mut freed = self.shelf.pool().freed();
        let held = async {
            while self.shelf.n_held(hashes) < hashes.len() {
                freed.changed().await.expect("the pool lives");
            }
        };
        in_time(held).await;
    }

    fn land(&self, n_blocks: usize) -> (Landing, kv_transfer::Arrival) {
        let n_tokens = n_blocks as u32 * BLOCK_TOKENS;
        let request = LandRequest {
            transfer: self.decode.parts.world.transfer_id(),
            lease: self.decode.room(n_tokens),
            n_tokens,
            held_tokens: 0,
            source: Source::Peer,
            deadline: self.decode.parts.world.deadline_in(WITHIN),
        };
        self.decode.connector.land(request).expect("a proper request")
    }

    async fn fetch(&self, hashes: &[BlockHash]) -> Result<ArrivedKv, PoolError> {
        let (landing, arrival) = self.land(hashes.len());
        let handoff = handoff(&landing);
        self.shelf.deliver(Delivery { hashes: hashes.to_vec(), landing, handoff }).await?;
        Ok(arrival.settle().await?)
    }

    async fn at_baseline(&self) {
        self.prefill.at_baseline().await;
        self.decode.at_baseline().await;
        let mut freed = self.shelf.pool().freed();
        let quiet = async {
            while self.shelf.counts().leased + self.shelf.counts().quarantined > 0 {
                freed.changed().await.expect("the pool lives");
            }
        };
        in_time(quiet).await;
        self.shelf.pool().integrity().expect("the books are right");
    }
}

async fn built(name: &'static str, parts: ConnectorParts) -> Arc<dyn KvConnector> {
    build(name, parts).await.expect("it works here")
}

async fn in_time<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(WITHIN, what).await.expect("in time")
}

/// The hashes of a sequence's blocks.
fn hashes(sequence: u32, n_blocks: u32) -> Vec<BlockHash> {
    let tokens: Vec<TokenId> =
        (0..n_blocks * BLOCK_TOKENS).map(|nth| TokenId(sequence * 1000 + nth)).collect();
    BlockHasher::hashes(&TenantId::new("tenant"), BLOCK_TOKENS as usize, &tokens)
}

#[tokio::test]
async fn what_was_put_is_got_on_every_wire() {
    for connector in ["loopback", "shm", "tcp"] {
        let cluster = Cluster::new(connector).await;
        let hashes = hashes(1, 5);
        cluster.store(&hashes, 1).await;
        for _ in 0..2 {
            let kv = cluster.fetch(&hashes).await.expect("it is there");
            cluster.decode.assert_holds(&kv.lease, 5 * BLOCK_TOKENS, 1);
        }
        cluster.at_baseline().await;
    }
}

#[tokio::test]
async fn a_part_of_a_sequence_is_got_too() {
    let cluster = Cluster::new("loopback").await;
    let hashes = hashes(1, 5);
    cluster.store(&hashes, 1).await;
    let kv = cluster.fetch(&hashes[..3]).await.expect("it is there");
    cluster.decode.assert_holds(&kv.lease, 3 * BLOCK_TOKENS, 1);
}

#[tokio::test]
async fn what_is_there_is_not_put_again() {
    let cluster = Cluster::new("loopback").await;
    let longer = hashes(1, 5);
    cluster.store(&longer[..3], 1).await;
    assert_eq!(cluster.put(&longer[..3]).expect("no room is needed"), Put::Held);
    let landing = cluster.store(&longer, 1).await;
    assert_eq!(landing.wanted_blocks(), 3..5);
    let kv = cluster.fetch(&longer).await.expect("it is there");
    cluster.decode.assert_holds(&kv.lease, 5 * BLOCK_TOKENS, 1);
}

/// Blocks arrive layer by layer, and are found when all of them have.
#[tokio::test]
async fn nothing_is_found_before_it_is_whole() {
    let cluster = Cluster::new("loopback").await;
    let hashes = hashes(1, 4);
    let Put::Landing(landing) = cluster.put(&hashes).expect("there is room") else {
        panic!("it is not there")
    };
    let from = cluster.prefill.computed(landing.n_tokens, 1);
    let (signal, fence) = FenceSignal::new();
    let mut sender =
        cluster.prefill.connector.open(&Destination::Landing(landing.clone())).await.expect("granted");
    for span in whole(&landing) {
        sender.send(span, Arc::clone(&from), fence.clone()).await.expect("room");
    }
    signal.layers_done(3);
    assert_eq!(cluster.shelf.n_held(&hashes), 0);
    let error = cluster.fetch(&hashes).await.expect_err("it is not whole");
    assert!(matches!(error, PoolError::Missing { have: 0, wanted: 4 }), "{error}");
    signal.layers_done(5);
    in_time(sender.finish(handoff(&landing))).await.expect("put");
    cluster.until_held(&hashes).await;
}

#[tokio::test]
async fn a_put_that_is_given_up_leaves_nothing() {
    let cluster = Cluster::new("loopback").await;
    let hashes = hashes(1, 4);
    let Put::Landing(landing) = cluster.put(&hashes).expect("there is room") else {
        panic!("it is not there")
    };
    let sender = cluster.prefill.connector.open(&Destination::Landing(landing)).await.expect("granted");
    drop(sender);
    cluster.at_baseline().await;
    assert_eq!((cluster.shelf.n_held(&hashes), cluster.shelf.counts().cached), (0, 0));
}

#[tokio::test]
async fn the_longest_unused_is_evicted() {
    let cluster = Cluster::new("loopback").await;
    let (old, used, new) = (hashes(1, 4), hashes(2, 4), hashes(3, 4));
    cluster.store(&old, 1).await;
    cluster.store(&used, 2).await;
    cluster.fetch(&old).await.expect("it is there");
    cluster.store(&new, 3).await;
    assert_eq!(cluster.shelf.n_held(&old), 4, "it was used last");
    assert!(cluster.shelf.n_held(&used) < 4);
    let kv = cluster.fetch(&new).await.expect("it is there");
    cluster.decode.assert_holds(&kv.lease, 4 * BLOCK_TOKENS, 3);
}

#[tokio::test]
async fn what_is_being_read_is_not_evicted() {
    let cluster = Cluster::new("loopback").await;
    let hashes_read = hashes(1, 6);
    cluster.store(&hashes_read, 1).await;
    cluster.pool.faults.inject(Fault::once(FaultKind::Stall).times(u32::MAX));
    let (landing, arrival) = cluster.land(6);
    let handoff = handoff(&landing);
    let delivery = Delivery { hashes: hashes_read.clone(), landing, handoff };
    let mut reading = Box::pin(cluster.shelf.deliver(delivery));
    while cluster.shelf.counts().leased == 0 {
        assert!(poll!(&mut reading).is_pending());
    }
    let error = cluster.put(&hashes(2, 3)).expect_err("six of eight are being read");
    assert!(matches!(error, PoolError::Full { wanted: 3, .. }), "{error}");
    drop((reading, arrival));
    cluster.at_baseline().await;
    assert!(matches!(cluster.put(&hashes(2, 3)), Ok(Put::Landing(_))), "nobody reads it any more");
}

/// A bit that flips while nobody looks is found when the block is wanted, and is never served.
#[tokio::test]
async fn a_block_that_is_spoilt_is_not_served() {
    let cluster = Cluster::new("loopback").await;
    let hashes = hashes(1, 3);
    cluster.store(&hashes, 1).await;
    let block = cluster.shelf.pool().adopt(&hashes, holder()).table(GroupIdx(1))[1].0;
    cluster.pool.memory.write(GroupIdx(1), 1, block..block + 1).expect("nobody reads it")[5] ^= 1;
    let error = cluster.fetch(&hashes).await.expect_err("it is spoilt");
    assert!(matches!(error, PoolError::Spoilt { ordinal: 1 }), "{error}");
    cluster.fetch(&hashes[..1]).await.expect("the block before it is whole");
}

fn holder() -> kv_cache::Holder {
    kv_cache::Holder { what: kv_cache::Holding::Landing, request: types::RequestId::new("test") }
}

#[tokio::test]
async fn what_cannot_be_is_refused() {
    let cluster = Cluster::new("loopback").await;
    let hashes = hashes(1, 3);
    cluster.store(&hashes, 1).await;
    let (landing, arrival) = cluster.land(2);
    let handoff = handoff(&landing);
    let error = cluster.shelf.deliver(Delivery { hashes: hashes.clone(), landing, handoff }).await;
    assert!(matches!(error, Err(PoolError::OtherLength { landing: 8, blocks: 12 })), "{error:?}");
    drop(arrival);
    let other =
        PutRequest { connector: types::Scheme::new("tcp"), ..cluster.put_request(&self::hashes(2, 1)) };
    assert!(matches!(cluster.shelf.put(other), Err(PoolError::NoConnector(_))));
    let (landing, arrival) = cluster.land(3);
    drop(arrival);
    let handoff = kv_transfer::conformance::node::handoff(&landing);
    let error = cluster.shelf.deliver(Delivery { hashes, landing, handoff }).await.expect_err("it is gone");
    assert!(matches!(error, PoolError::Transfer(TransferError::UnknownLanding)), "{error}");
    cluster.at_baseline().await;
}
