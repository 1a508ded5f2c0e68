//! Tests of the queues of each pair of nodes, with the test double instead of a GPU and NCCL.

use std::sync::Arc;
use std::time::Duration;

use baton_kv_transfer::conformance::node::{BLOCK_TOKENS, Make, Node, Pair, layout, whole};
use baton_kv_transfer::connectors::nccl::{self, double::Double};
use baton_kv_transfer::{ConnectorParts, KvConnector, TransferError, TransferSettings};
use futures::future::join_all;
use kv_cache::LayerFence;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

const N_TOKENS: u32 = 5 * BLOCK_TOKENS;
/// The stall time, and the time without a heartbeat after which a link is lost. It is long because a loaded
/// machine may pause this process for hundreds of milliseconds.
const STALL_MS: u64 = 2000;
const WITHIN: Duration = Duration::from_secs(40);
/// The number of queues of a pair.
const QUEUES: usize = 2;

async fn pair_over(double: &Double) -> Pair {
    pair_of(double, (QUEUES, QUEUES)).await
}

/// Makes a pair of nodes with the limits of queues of the sender and of the receiver.
async fn pair_of(double: &Double, (of_sender, of_receiver): (usize, usize)) -> Pair {
    let double = double.clone();
    let make: Make = Arc::new(move |parts: ConnectorParts| {
        let (double, settings) = (double.clone(), parts.settings.clone());
        let nccl_queues = if parts.node.as_str() == "decode" { of_receiver } else { of_sender };
        // A message is many times larger than the setting, so the setting is small: messages have a few
        // pages.
        let settings = TransferSettings { stall_ms: STALL_MS, frame_bytes: 16, nccl_queues, ..settings };
        let parts = ConnectorParts { settings, ..parts };
        Box::pin(async move {
            nccl::listen_double(parts, &double).await.expect("a free port") as Arc<dyn KvConnector>
        })
    });
    Pair::new(&make).await
}

/// Bounds a wait. The panic names the caller, because each test has more than one wait.
#[track_caller]
fn in_time<T>(what: impl Future<Output = T>) -> impl Future<Output = T> {
    let caller = std::panic::Location::caller();
    async move {
        let done = tokio::time::timeout(WITHIN, what).await;
        done.unwrap_or_else(|_| panic!("not in time: {caller}"))
    }
}

/// Waits for the threads that end pairs.
async fn until(what: impl Fn() -> bool) {
    in_time(async {
        while !what() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    })
    .await;
}

/// Transfers a sequence whose receiver cancels after a few polls. Messages in progress still arrive, and are
/// dropped.
async fn cancelled(pair: &Pair, nth: u64) {
    let from = pair.prefill.computed(N_TOKENS, nth);
    let (landing, arrival) = pair.land(N_TOKENS);
    let mut sender = pair.open(&landing).await.expect("granted");
    for span in whole(&landing) {
        sender.send(span, Arc::clone(&from), LayerFence::open()).await.expect("room");
    }
    in_time(arrival.progress(nth as usize % 3)).await;
    drop(arrival);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn interleaved_transfers_share_a_pair_and_a_third_of_them_is_cancelled() {
    let double = Double::default();
    let pair = Arc::new(pair_over(&double).await);
    let one = |nth: u64| {
        let pair = Arc::clone(&pair);
        async move {
            match nth % 3 {
                0 => cancelled(&pair, nth).await,
                _ => pair.transfer(N_TOKENS, nth).await,
            }
        }
    };
    in_time(join_all((0..64).map(one))).await;
    pair.at_baseline().await;
    assert_eq!((double.n_queues(), double.n_given_up()), (QUEUES, 0), "a cancelled transfer costs no pair");
}

#[tokio::test]
async fn a_message_that_stands_still_costs_the_pair_and_the_next_transfer_has_a_new_one() {
    let double = Double::default();
    let pair = pair_over(&double).await;
    pair.transfer(N_TOKENS, 1).await;
    let from = pair.prefill.computed(N_TOKENS, 2);
    // The landings are opened before messages stall: the receiver learns the end of the link of those it opened.
    let mut opened = Vec::new();
    for _ in 0..3 {
        let (landing, arrival) = pair.land(N_TOKENS);
        opened.push((pair.open(&landing).await.expect("granted"), landing, arrival));
    }
    double.stall();
    let began = tokio::time::Instant::now();
    let all = opened.into_iter().map(|(sender, landing, arrival)| {
        let (pair, from) = (&pair, &from);
        async move { tokio::join!(pair.fill(sender, &landing, from), arrival.settle()) }
    });
    for (delivered, arrived) in in_time(join_all(all)).await {
        delivered.expect_err("nothing came through");
        let error = arrived.expect_err("nothing came");
        assert!(matches!(error, TransferError::ConnectionLost { .. } | TransferError::Peer(_)), "{error}");
    }
    assert!(began.elapsed() < Duration::from_millis(4 * STALL_MS), "{:?}", began.elapsed());
    drop(from);
    pair.at_baseline().await;
    until(|| double.n_given_up() + double.n_ended() == 2 * QUEUES).await;
    assert!(double.n_given_up() > 0);
    double.resume();
    pair.transfer(N_TOKENS, 3).await;
    assert_eq!(double.n_queues(), 2 * QUEUES);
}

/// Only this node writes a landing's pages, out of a slot, so they are quiet without the peer.
#[tokio::test]
async fn blocks_are_free_at_once_although_messages_stand_still() {
    let double = Double::default();
    let pair = pair_over(&double).await;
    pair.transfer(N_TOKENS, 1).await;
    double.stall();
    let from = pair.prefill.computed(N_TOKENS, 2);
    let (landing, arrival) = pair.land(N_TOKENS);
    let mut sender = pair.open(&landing).await.expect("granted");
    for span in whole(&landing) {
        sender.send(span, Arc::clone(&from), LayerFence::open()).await.expect("room");
    }
    drop(arrival);
    assert!(pair.decode.is_at_baseline());
    double.resume();
    drop(sender);
    pair.transfer(N_TOKENS, 3).await;
    assert_eq!((double.n_queues(), double.n_given_up()), (QUEUES, 0));
}

#[tokio::test]
async fn each_pair_of_nodes_has_queues_of_its_own() {
    let double = Double::default();
    let pair = pair_over(&double).await;
    let third = pair.third(Node::parts("prefill-1", layout())).await;
    for (nth, sender) in [&pair.prefill, &third, &pair.prefill, &third].into_iter().enumerate() {
        let from = sender.computed(N_TOKENS, nth as u64);
        let (landing, arrival) = pair.land(N_TOKENS);
        let to = types::Destination::Landing(landing.clone());
        let mut kv = in_time(sender.connector.open(&to)).await.expect("granted");
        for span in whole(&landing) {
            kv.send(span, Arc::clone(&from), LayerFence::open()).await.expect("room");
        }
        let handoff = baton_kv_transfer::conformance::node::handoff(&landing);
        let (delivered, arrived) = tokio::join!(kv.finish(handoff), arrival.settle());
        delivered.expect("delivered");
        pair.check(&arrived.expect("arrived"), N_TOKENS, nth as u64);
    }
    assert_eq!(double.n_queues(), 2 * QUEUES);
}

#[tokio::test]
async fn a_pair_ends_in_good_order_with_its_nodes() {
    let double = Double::default();
    let pair = pair_over(&double).await;
    pair.transfer(N_TOKENS, 1).await;
    drop(pair);
    until(|| double.n_ended() + double.n_given_up() == 2 * QUEUES).await;
    assert_eq!(double.n_given_up(), 0);
}

#[tokio::test]
async fn a_pair_has_as_many_queues_as_both_its_nodes_can_have() {
    for n_queues in [(1, 1), (1, 2), (2, 1)] {
        let double = Double::default();
        let pair = pair_of(&double, n_queues).await;
        for nth in 0..3 {
            pair.transfer(N_TOKENS, nth).await;
        }
        assert_eq!((double.n_queues(), double.n_given_up()), (1, 0), "{n_queues:?}");
    }
}

/// A peer whose first bytes are invalid is refused.
#[tokio::test]
async fn pairs_of_no_queue_or_of_more_than_were_offered_are_refused() {
    let double = Double::default();
    let pair = pair_over(&double).await;
    let (landing, _arrival) = pair.land(N_TOKENS);
    for greeting in [[b'N', 1, 0, 2], [b'Q', 1, 0, 0]] {
        let mut stream = TcpStream::connect(&landing.wire.endpoint).await.expect("it listens");
        stream.write_all(&greeting).await.expect("it reads");
        let mut answer = Vec::new();
        let read = in_time(stream.read_to_end(&mut answer)).await;
        assert!(read.is_err() || answer.is_empty(), "{greeting:?} was answered: {answer:?}");
    }
    for n_queues in [0, QUEUES as u8 + 1] {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let mut elsewhere = landing.clone();
        elsewhere.wire.endpoint = listener.local_addr().expect("it has one").to_string();
        let answer = async {
            let (mut stream, _) = listener.accept().await.expect("the sender comes");
            let mut greeting = [0; 4];
            stream.read_exact(&mut greeting).await.expect("it greets");
            assert_eq!(greeting, [b'Q', 1, 0, QUEUES as u8]);
            stream.write_all(&[1, 0, n_queues]).await.expect("it reads");
            let mut ids = Vec::new();
            let read = stream.read_to_end(&mut ids).await;
            assert!(read.is_err() || ids.is_empty(), "{n_queues} queues were accepted");
        };
        let (opened, ()) = in_time(async { tokio::join!(pair.open(&elsewhere), answer) }).await;
        opened.expect_err("that is no answer");
    }
    assert_eq!(double.n_queues(), 0);
}
