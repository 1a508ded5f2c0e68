//! Tests of the block store, between a prefill node that sends KV and a decode node that receives it.

use std::sync::Arc;
use std::time::Duration;

use baton_pool_node::{BlockStore, Incoming, PutRequest, StoreError, StoredSequence};
use futures::poll;
use kv_cache::{FenceSignal, Holder, Holding, KvMemory, LayerFence};
use kv_transfer::conformance::node::{BLOCK_TOKENS, Make, N_LAYERS, Node, handoff, layout, whole};
use kv_transfer::{
    Arrival, ArrivedKv, ConnectorParts, Fault, FaultKind, KvConnector, LandRequest, TransferError, build,
};
use types::{
    BlockHash, BlockHashKey, CacheSalt, Destination, GroupIdx, Landing, RequestId, Scheme, TenantId, TokenId,
};

const WITHIN: Duration = Duration::from_secs(20);
/// The number of blocks of the pool, small so that it fills quickly: eight blocks of a sequence, which has
/// three groups of layers.
const POOL_BLOCKS: u32 = 24;

struct Cluster {
    prefill: Node,
    decode: Node,
    store: BlockStore,
    pool: ConnectorParts,
}

impl Cluster {
    async fn new(connector: &'static str) -> Self {
        let make: Make = Arc::new(move |parts| Box::pin(built(connector, parts)));
        let memory = KvMemory::host(layout(), POOL_BLOCKS).expect("a few KiB can be mapped");
        let pool = ConnectorParts { memory, ..Node::parts("pool", layout()) };
        let store = BlockStore::new(pool.clone(), vec![built(connector, pool.clone()).await]);
        let prefill = Node::new(&make, Node::parts("prefill", layout())).await;
        let decode = Node::new(&make, Node::parts("decode", layout())).await;
        Self { prefill, decode, store, pool }
    }

    fn request(&self, sequence: u32, n_tokens: u32) -> PutRequest {
        PutRequest {
            transfer: self.pool.world.transfer_id(),
            request: RequestId::new("test"),
            hashes: hashes(sequence, n_tokens),
            n_tokens,
            connector: self.prefill.connector.scheme(),
            deadline: self.pool.world.deadline_in(WITHIN),
        }
    }

    fn put(&self, sequence: u32, n_tokens: u32) -> Result<(Landing, Incoming), StoreError> {
        self.store.put(self.request(sequence, n_tokens))
    }

    /// Computes a sequence's KV and sends the blocks that the landing requests.
    async fn fill(&self, landing: &Landing, sequence: u32) {
        let from = self.prefill.computed(landing.n_tokens, u64::from(sequence));
        let to = Destination::Landing(landing.clone());
        let mut sender = self.prefill.connector.open(&to).await.expect("granted");
        for span in whole(landing) {
            sender.send(span, Arc::clone(&from), LayerFence::open()).await.expect("room");
        }
        sender.finish(handoff(landing)).await.expect("put");
    }

    async fn store(&self, sequence: u32, n_tokens: u32) -> StoredSequence {
        let (landing, incoming) = self.put(sequence, n_tokens).expect("there is room");
        self.fill(&landing, sequence).await;
        in_time(incoming.stored()).await.expect("stored")
    }

    fn n_held(&self, sequence: u32, n_tokens: u32) -> usize {
        self.store.n_held(&hashes(sequence, n_tokens))
    }

    fn land(&self, n_tokens: u32) -> (Landing, Arrival) {
        let request = LandRequest {
            transfer: self.decode.parts.world.transfer_id(),
            lease: self.decode.room(n_tokens),
            n_tokens,
            held_tokens: 0,
            deadline: self.decode.parts.world.deadline_in(WITHIN),
        };
        self.decode.connector.land(request).expect("a proper request")
    }

    async fn fetch(&self, stored: &StoredSequence, n_tokens: u32) -> Result<ArrivedKv, StoreError> {
        let (landing, arrival) = self.land(n_tokens);
        in_time(stored.deliver(landing)).await?;
        Ok(in_time(arrival.settle()).await?)
    }

    async fn at_baseline(&self) {
        self.prefill.at_baseline().await;
        self.decode.at_baseline().await;
        let mut freed = self.store.pool().freed();
        let quiet = async {
            while self.store.counts().leased + self.store.counts().quarantined > 0 {
                freed.changed().await.expect("the pool lives");
            }
        };
        in_time(quiet).await;
        self.store.pool().integrity().expect("the integrity check passes");
    }

    /// Flips a bit of a stored block in the memory of the pool.
    fn spoil(&self, sequence: u32, n_tokens: u32, ordinal: usize) {
        let lease = self.store.pool().adopt(&hashes(sequence, n_tokens), holder());
        let block = lease.table(GroupIdx(1))[ordinal].0;
        self.pool.memory.write(GroupIdx(1), 1, block..block + 1).expect("no reader")[5] ^= 1;
    }
}

fn holder() -> Holder {
    Holder { what: Holding::Landing, request: RequestId::new("test") }
}

async fn built(name: &'static str, parts: ConnectorParts) -> Arc<dyn KvConnector> {
    build(name, parts).await.expect("it works here")
}

async fn in_time<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(WITHIN, what).await.expect("in time")
}

/// Returns the hashes of a sequence's full blocks.
fn hashes(sequence: u32, n_tokens: u32) -> Vec<BlockHash> {
    let tokens: Vec<TokenId> = (0..n_tokens).map(|nth| TokenId(sequence * 1000 + nth)).collect();
    let (tenant, salt) = (TenantId::new("tenant"), CacheSalt::default());
    BlockHashKey::default().hasher(&tenant, &salt, BLOCK_TOKENS as usize).hashes(&tokens)
}

#[tokio::test]
async fn what_was_put_is_got_on_every_wire() {
    for connector in ["loopback", "shm", "tcp"] {
        let cluster = Cluster::new(connector).await;
        for n_tokens in [1, BLOCK_TOKENS, 4 * BLOCK_TOKENS, 5 * BLOCK_TOKENS + 3] {
            let stored = cluster.store(n_tokens, n_tokens).await;
            for _ in 0..2 {
                let kv = cluster.fetch(&stored, n_tokens).await.expect("it is there");
                cluster.decode.assert_holds(&kv.lease, n_tokens, u64::from(n_tokens));
            }
        }
        cluster.at_baseline().await;
    }
}

/// All sequences with the same beginning share their full blocks. A partly filled last block belongs to one
/// sequence.
#[tokio::test]
async fn what_is_there_is_not_put_again() {
    let cluster = Cluster::new("loopback").await;
    let (short, long) = (3 * BLOCK_TOKENS + 1, 5 * BLOCK_TOKENS + 2);
    drop(cluster.store(1, short).await);
    assert_eq!(cluster.store.counts().cached, 3 * 3, "three full blocks, in three groups");
    let (landing, incoming) = cluster.put(1, long).expect("there is room");
    assert_eq!(landing.wanted_blocks(), 3..6);
    cluster.fill(&landing, 1).await;
    let stored = incoming.stored().await.expect("stored");
    let kv = cluster.fetch(&stored, long).await.expect("it is there");
    cluster.decode.assert_holds(&kv.lease, long, 1);
}

/// The last block is sent even if the pool has the whole sequence, because the handoff comes with it.
#[tokio::test]
async fn the_last_block_is_always_put() {
    let cluster = Cluster::new("loopback").await;
    let n_tokens = 4 * BLOCK_TOKENS;
    drop(cluster.store(1, n_tokens).await);
    let (landing, incoming) = cluster.put(1, n_tokens).expect("there is room");
    assert_eq!(landing.wanted_blocks(), 3..4);
    cluster.fill(&landing, 1).await;
    let stored = incoming.stored().await.expect("stored");
    let kv = cluster.fetch(&stored, n_tokens).await.expect("it is there");
    cluster.decode.assert_holds(&kv.lease, n_tokens, 1);
    drop((stored, kv));
    cluster.at_baseline().await;
    assert_eq!(cluster.n_held(1, n_tokens), 4);
}

/// KV arrives layer by layer, and its blocks are found when all layers have arrived.
#[tokio::test]
async fn nothing_is_found_before_it_is_whole() {
    let cluster = Cluster::new("loopback").await;
    let n_tokens = 4 * BLOCK_TOKENS;
    let (landing, incoming) = cluster.put(1, n_tokens).expect("there is room");
    let from = cluster.prefill.computed(n_tokens, 1);
    let (signal, fence) = FenceSignal::new();
    let mut sender =
        cluster.prefill.connector.open(&Destination::Landing(landing.clone())).await.expect("granted");
    for span in whole(&landing) {
        sender.send(span, Arc::clone(&from), fence.clone()).await.expect("room");
    }
    signal.layers_done(3);
    let mut stored = Box::pin(incoming.stored());
    assert!(poll!(&mut stored).is_pending());
    assert_eq!(cluster.n_held(1, n_tokens), 0);
    signal.layers_done(N_LAYERS);
    in_time(sender.finish(handoff(&landing))).await.expect("put");
    in_time(stored).await.expect("stored");
    assert_eq!(cluster.n_held(1, n_tokens), 4);
}

#[tokio::test]
async fn a_put_that_is_given_up_leaves_nothing() {
    let cluster = Cluster::new("loopback").await;
    let n_tokens = 4 * BLOCK_TOKENS;
    let (landing, incoming) = cluster.put(1, n_tokens).expect("there is room");
    let sender = cluster.prefill.connector.open(&Destination::Landing(landing)).await.expect("granted");
    drop(sender);
    incoming.stored().await.expect_err("the sender gave it up");
    let (landing, incoming) = cluster.put(1, n_tokens).expect("there is room");
    drop(incoming);
    let gone = cluster.prefill.connector.open(&Destination::Landing(landing)).await;
    assert!(matches!(gone.map(|_| ()), Err(TransferError::UnknownLanding)));
    cluster.at_baseline().await;
    assert_eq!((cluster.n_held(1, n_tokens), cluster.store.counts().cached), (0, 0));
}

#[tokio::test]
async fn the_longest_unused_is_evicted() {
    let cluster = Cluster::new("loopback").await;
    let n_tokens = 4 * BLOCK_TOKENS;
    let (old, used, new) = (1, 2, 3);
    drop(cluster.store(old, n_tokens).await);
    drop(cluster.store(used, n_tokens).await);
    assert_eq!(cluster.n_held(old, n_tokens), 4, "this was a use");
    let stored = cluster.store(new, n_tokens).await;
    assert_eq!(cluster.n_held(old, n_tokens), 4, "it was used last");
    assert!(cluster.n_held(used, n_tokens) < 4);
    let kv = cluster.fetch(&stored, n_tokens).await.expect("it is there");
    cluster.decode.assert_holds(&kv.lease, n_tokens, 3);
}

#[tokio::test]
async fn what_is_being_read_is_not_evicted() {
    let cluster = Cluster::new("loopback").await;
    let n_tokens = 6 * BLOCK_TOKENS;
    let stored = cluster.store(1, n_tokens).await;
    cluster.pool.faults.inject(Fault::once(FaultKind::Stall).times(u32::MAX));
    let (landing, arrival) = cluster.land(n_tokens);
    let mut reading = Box::pin(stored.deliver(landing));
    assert!(poll!(&mut reading).is_pending());
    let error = cluster.put(2, 3 * BLOCK_TOKENS).expect_err("six of eight are being read");
    assert!(matches!(error, StoreError::Full { wanted: 3, .. }), "{error}");
    drop((reading, arrival));
    drop(stored);
    cluster.at_baseline().await;
    cluster.put(2, 3 * BLOCK_TOKENS).expect("no reader is left");
}

/// A flipped bit is found when the block is read. The block is not served until it is stored again.
#[tokio::test]
async fn a_block_that_is_spoilt_is_not_served() {
    let cluster = Cluster::new("loopback").await;
    let n_tokens = 3 * BLOCK_TOKENS + 1;
    drop(cluster.store(1, n_tokens).await);
    cluster.spoil(1, n_tokens, 1);
    let stored = cluster.store(1, n_tokens).await;
    for _ in 0..2 {
        let (landing, arrival) = cluster.land(n_tokens);
        let error = in_time(stored.deliver(landing)).await.expect_err("it is spoilt");
        assert!(matches!(error, StoreError::Spoilt { ordinal: 1 }), "{error}");
        drop(arrival);
    }
    drop(stored);
    assert_eq!(cluster.n_held(1, n_tokens), 1, "what comes after it is of no use");
    let (landing, incoming) = cluster.put(1, n_tokens).expect("there is room");
    assert_eq!(landing.wanted_blocks(), 1..4);
    cluster.fill(&landing, 1).await;
    let stored = incoming.stored().await.expect("stored");
    let kv = cluster.fetch(&stored, n_tokens).await.expect("it is there");
    cluster.decode.assert_holds(&kv.lease, n_tokens, 1);
    drop((stored, kv));
    cluster.at_baseline().await;
    assert_eq!(cluster.n_held(1, n_tokens), 3);
}

/// KV that the connection corrupts is sent again, on put and on delivery. If it is corrupted twice, the
/// transfer fails.
#[tokio::test]
async fn a_bit_that_a_wire_flips_is_noticed_on_both_ways() {
    let cluster = Cluster::new("tcp").await;
    let n_tokens = 5 * BLOCK_TOKENS + 1;
    cluster.prefill.parts.faults.inject(Fault::once(FaultKind::FlipBit(77)));
    cluster.pool.faults.inject(Fault::once(FaultKind::FlipBit(77)));
    let stored = cluster.store(1, n_tokens).await;
    let kv = cluster.fetch(&stored, n_tokens).await.expect("fetched again");
    cluster.decode.assert_holds(&kv.lease, n_tokens, 1);
    cluster.pool.faults.inject(Fault::once(FaultKind::FlipBit(77)).times(u32::MAX));
    let (landing, arrival) = cluster.land(n_tokens);
    let error = in_time(stored.deliver(landing)).await.expect_err("spoilt twice");
    assert!(matches!(error, StoreError::Transfer(TransferError::Corrupted { .. })), "{error}");
    in_time(arrival.settle()).await.expect_err("it is never delivered");
    drop((stored, kv));
    cluster.at_baseline().await;
}

#[tokio::test]
async fn what_cannot_be_is_refused() {
    let cluster = Cluster::new("loopback").await;
    let stored = cluster.store(1, 12).await;
    let (landing, arrival) = cluster.land(8);
    let error = stored.deliver(landing).await;
    assert!(matches!(error, Err(StoreError::OtherLength { landing: 8, stored: 12 })), "{error:?}");
    drop(arrival);
    let other = PutRequest { connector: Scheme::new("tcp"), ..cluster.request(2, 4) };
    assert!(matches!(cluster.store.put(other), Err(StoreError::NoConnector(_))));
    for (n_tokens, hashes) in [(0, vec![]), (4, vec![]), (9, hashes(2, 12))] {
        let other = PutRequest { n_tokens, hashes, ..cluster.request(2, 4) };
        assert!(matches!(cluster.store.put(other), Err(StoreError::OtherHashes { .. })));
    }
    let (landing, arrival) = cluster.land(12);
    drop(arrival);
    let error = stored.deliver(landing).await.expect_err("it is gone");
    assert!(matches!(error, StoreError::Transfer(TransferError::UnknownLanding)), "{error}");
    drop(stored);
    cluster.at_baseline().await;
}
