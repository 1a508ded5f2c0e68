//! Tests of a prefill node of several processes: its processes fail, stand still or disagree.

mod fake_peer;

use std::num::NonZero;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use baton_kv_transfer::conformance::node::{BLOCK_TOKENS, Make, N_LAYERS, Pair, handoff, layout, whole};
use baton_kv_transfer::conformance::processes::{FollowerPath, LayersOnRanks, ProcessParts};
use baton_kv_transfer::connectors::names;
use baton_kv_transfer::connectors::tcp::listen_double;
use baton_kv_transfer::{
    Fault, FaultKind, Faults, KvConnector, LandOrder, LandingEvent, OtherProcesses, PutOrder, TransferError,
    build,
};
use kv_cache::{FenceSignal, LayerFence};
use tokio::sync::{Semaphore, mpsc};
use types::{Epoch, TransferId};

use self::fake_peer::{in_time, make_tcp, tcp_pair};

const N_TOKENS: u32 = 8 * BLOCK_TOKENS;

/// The followers of a node, with puts that the test holds up.
#[derive(Debug)]
struct HeldUp {
    shares: Vec<LayersOnRanks>,
    /// `None` once the test has killed them.
    followers: Mutex<Option<Arc<dyn OtherProcesses>>>,
    /// A permit for each put.
    permits: Semaphore,
    orders: Mutex<Vec<PutOrder>>,
}

impl HeldUp {
    async fn new(parts: &ProcessParts, n_permits: usize) -> Arc<Self> {
        let (shares, followers) = (parts.shares.clone(), Mutex::new(Some(parts.start_followers().await)));
        Arc::new(Self { shares, followers, permits: Semaphore::new(n_permits), orders: Mutex::default() })
    }

    fn followers(&self) -> Option<Arc<dyn OtherProcesses>> {
        self.followers.lock().expect("no test panics with it").clone()
    }

    fn kill(&self) {
        self.followers.lock().expect("no test panics with it").take();
    }

    fn n_ordered(&self) -> usize {
        self.orders.lock().expect("no test panics with it").len()
    }

    /// Waits for the first order.
    async fn ordered(&self) -> PutOrder {
        loop {
            if let Some(order) = self.orders.lock().expect("no test panics with it").first() {
                return order.clone();
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

#[async_trait]
impl OtherProcesses for HeldUp {
    fn process_of(&self, layer: u16, rank: u16) -> Option<usize> {
        LayersOnRanks::position(&self.shares, layer, rank)
    }

    fn n_processes(&self) -> usize {
        self.shares.len()
    }

    async fn put(&self, process: usize, order: PutOrder) -> Result<(), TransferError> {
        self.orders.lock().expect("no test panics with it").push(order.clone());
        self.permits.acquire().await.expect("it is never closed").forget();
        let Some(followers) = self.followers() else { return Err(TransferError::Closed) };
        followers.put(process, order).await
    }

    fn endpoint(&self, process: usize) -> String {
        self.followers().map(|followers| followers.endpoint(process)).unwrap_or_default()
    }

    fn land(&self, process: usize, order: LandOrder) -> mpsc::Receiver<LandingEvent> {
        let dead = || mpsc::channel(1).1;
        self.followers().map_or_else(dead, |followers| followers.land(process, order))
    }

    fn end_landing(&self, process: usize, link: u64, transfer: TransferId) {
        if let Some(followers) = self.followers() {
            followers.end_landing(process, link, transfer);
        }
    }

    fn close_link(&self, link: u64) {
        if let Some(followers) = self.followers() {
            followers.close_link(link);
        }
    }
}

fn parts_of(n_processes: u16) -> ProcessParts {
    ProcessParts::new(NonZero::new(n_processes).expect("some"), layout())
}

/// Returns a pair whose prefill node has these parts.
async fn pair_of(parts: ProcessParts) -> Pair {
    parts.start(&make_tcp(), tcp_pair().await).await
}

/// Returns a pair whose prefill node has two processes, and the follower of it.
async fn held_up_pair(parts: ProcessParts, n_permits: usize) -> (Pair, Arc<HeldUp>) {
    let held_up = HeldUp::new(&parts, n_permits).await;
    let mut pair = tcp_pair().await;
    pair.prefill = parts.node(&make_tcp(), Arc::clone(&held_up) as _).await;
    (pair, held_up)
}

#[tokio::test]
async fn a_bit_that_a_follower_flips_is_sent_again_by_the_follower() {
    for follower_path in [FollowerPath::OfMemory, FollowerPath::DoubleSlots] {
        let (mut parts, faults) = (parts_of(3), Faults::programmable());
        parts.followers[1].faults = faults.clone();
        let pair = pair_of(ProcessParts { follower_path, ..parts }).await;
        for (nth, kind) in [FaultKind::FlipBit(77), FaultKind::WrongDigest].into_iter().enumerate() {
            faults.inject(Fault::once(kind).after(1_000));
            in_time(pair.transfer(N_TOKENS, 1)).await;
            assert_eq!(faults.n_hit(), nth as u64 + 1, "{follower_path:?}");
        }
        in_time(pair.at_baseline()).await;
    }
}

/// A head with slots has larger frames and more streams than the settings.
#[tokio::test]
async fn followers_have_large_frames_and_a_stream_beside_the_most_streams_of_a_head() {
    let mut parts = parts_of(N_LAYERS);
    for parts in parts.followers.iter_mut().chain([&mut parts.head]) {
        parts.settings.frame_bytes = 1 << 20;
        parts.settings.streams = u16::MAX;
    }
    let parts = ProcessParts { follower_path: FollowerPath::DoubleSlots, ..parts };
    let make: Make = Arc::new(|parts| {
        Box::pin(async { listen_double(parts).await.expect("a free port") as Arc<dyn KvConnector> })
    });
    let pair = parts.start(&make, tcp_pair().await).await;
    in_time(pair.transfer(300 * BLOCK_TOKENS, 1)).await;
    in_time(pair.at_baseline()).await;
}

#[tokio::test]
async fn a_follower_that_loses_its_stream_fails_the_transfer_and_the_next_one_arrives() {
    let (mut parts, faults) = (parts_of(2), Faults::programmable());
    parts.followers[0].faults = faults.clone();
    let pair = pair_of(parts).await;
    for after_bytes in [0, 2_000] {
        faults.inject(Fault::once(FaultKind::Lose).after(after_bytes));
        let from = pair.prefill.computed(N_TOKENS, 2);
        let (landing, arrival) = pair.land(N_TOKENS);
        let error = in_time(pair.deliver(&landing, &from)).await.expect_err("the stream is lost");
        assert!(matches!(error, TransferError::ConnectionLost { .. }), "{error}");
        in_time(arrival.settle()).await.expect_err("the stream is lost");
        drop(from);
        in_time(pair.at_baseline()).await;
        in_time(pair.transfer(N_TOKENS, 3)).await;
    }
}

/// The head waits for layers that are not computed yet, and has nothing to order.
#[tokio::test]
async fn a_stream_that_ends_between_two_puts_fails_the_transfer_at_once() {
    for end in
        [|followers: &HeldUp, link| followers.close_link(link), |followers: &HeldUp, _| followers.kill()]
    {
        let (pair, followers) = held_up_pair(parts_of(2), Semaphore::MAX_PERMITS).await;
        let from = pair.prefill.computed(N_TOKENS, 4);
        let (landing, arrival) = pair.land(N_TOKENS);
        let (signal, fence) = FenceSignal::new();
        let mut sender = pair.open(&landing).await.expect("granted");
        // The last group has layers of the follower only.
        for span in whole(&landing).into_iter().rev() {
            sender.send(span, Arc::clone(&from), fence.clone()).await.expect("room");
        }
        signal.layers_done(N_LAYERS - 1);
        let order = in_time(followers.ordered()).await;
        in_time(arrival.progress(0)).await;
        end(&followers, order.link());
        let finished = in_time(sender.finish(handoff(&landing))).await;
        let error = finished.expect_err("the link is lost");
        assert!(matches!(error, TransferError::ConnectionLost { .. }), "{error}");
        in_time(arrival.settle()).await.expect_err("the link is lost");
        drop(from);
        in_time(pair.at_baseline()).await;
    }
}

#[tokio::test]
async fn a_lease_outlasts_the_puts_that_read_its_pages() {
    let (pair, followers) = held_up_pair(parts_of(2), 0).await;
    let from = pair.prefill.computed(N_TOKENS, 5);
    let (landing, arrival) = pair.land(N_TOKENS);
    let mut sender = pair.open(&landing).await.expect("granted");
    for span in whole(&landing) {
        sender.send(span, Arc::clone(&from), LayerFence::open()).await.expect("room");
    }
    in_time(followers.ordered()).await;
    drop((sender, from));
    in_time(arrival.settle()).await.expect_err("it was given up");
    // The drop of the connector loses the link, but the follower may still read the pages.
    let Pair { prefill, decode, .. } = pair;
    let (pool, connector) = (prefill.pool.clone(), prefill.connector);
    drop(connector);
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(pool.counts().free < pool.counts().total, "a put is under way");
    let n_ordered = followers.n_ordered();
    followers.permits.add_permits(n_ordered);
    let mut freed = pool.freed();
    while pool.counts().free < pool.counts().total {
        in_time(freed.changed()).await.expect("the pool lives");
    }
    assert_eq!(followers.n_ordered(), n_ordered, "no order follows the loss of the link");
    in_time(decode.at_baseline()).await;
}

#[tokio::test]
async fn a_process_that_stands_still_fails_the_transfer_after_its_deadline() {
    let mut parts = parts_of(2);
    parts.head.settings.stall_ms = 400;
    let (pair, followers) = held_up_pair(parts, 0).await;
    let from = pair.prefill.computed(N_TOKENS, 6);
    let (landing, arrival) = pair.land(N_TOKENS);
    let error = in_time(pair.deliver(&landing, &from)).await.expect_err("nothing is written");
    assert!(matches!(error, TransferError::Stalled { what: "another process of this node", .. }), "{error}");
    in_time(arrival.settle()).await.expect_err("nothing comes");
    assert!(followers.n_ordered() <= 4, "few puts are in flight");
    drop(from);
    in_time(pair.at_baseline()).await;
}

#[tokio::test]
async fn processes_that_disagree_about_their_layers_fail_the_transfer() {
    let mut parts = parts_of(3);
    let followers = {
        parts.followers.swap(0, 1);
        parts.start_followers().await
    };
    parts.followers.swap(0, 1);
    let mut pair = tcp_pair().await;
    pair.prefill = parts.node(&make_tcp(), followers).await;
    let error = refused(&pair).await;
    assert!(error.to_string().contains("an order of layers that this process does not have"), "{error}");
}

#[tokio::test]
async fn a_follower_of_another_life_of_the_node_refuses_orders() {
    let mut parts = parts_of(2);
    parts.followers[0].epoch = Epoch(parts.head.epoch.0 ^ 1);
    let pair = pair_of(parts).await;
    let error = refused(&pair).await;
    assert!(error.to_string().contains("another life of this node"), "{error}");
}

/// Returns the error of a transfer that a follower refuses.
async fn refused(pair: &Pair) -> TransferError {
    let from = pair.prefill.computed(N_TOKENS, 7);
    let (landing, arrival) = pair.land(N_TOKENS);
    let error = in_time(pair.deliver(&landing, &from)).await.expect_err("the follower refuses");
    in_time(arrival.settle()).await.expect_err("the follower refuses");
    drop(from);
    in_time(pair.at_baseline()).await;
    error
}

#[tokio::test]
async fn only_tcp_serves_several_processes() {
    let parts = parts_of(2);
    let mut head = parts.head.clone();
    head.processes = Some(parts.start_followers().await);
    for name in names() {
        let built = build(name, head.clone()).await.map(|_| ());
        if name == "tcp" {
            built.expect("tcp does");
            continue;
        }
        let error = built.expect_err("it does not");
        let expected =
            format!("{name} does not move KV of a node of several processes: set connectors to tcp");
        assert_eq!(error.to_string(), expected);
    }
}
