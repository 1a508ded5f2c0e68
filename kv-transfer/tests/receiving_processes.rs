//! Tests of a decode node of several processes: its processes write for long, die, or are asked by strangers.

mod fake_peer;

use std::num::NonZero;
use std::sync::Arc;

use async_trait::async_trait;
use baton_kv_transfer::conformance::node::{BLOCK_TOKENS, Pair, layout, spread_layout};
use baton_kv_transfer::conformance::processes::{ProcessParts, Side};
use baton_kv_transfer::connectors::tcp::frame::{Body, Hello};
use baton_kv_transfer::{LandOrder, LandingEvent, OtherProcesses, PutOrder, TransferError};
use chassis::{Gate, spawn_guarded};
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, mpsc};
use tokio_util::sync::CancellationToken;
use types::TransferId;

use self::fake_peer::{FakePeer, hello, in_time, make_tcp, tcp_pair};

const N_TOKENS: u32 = 8 * BLOCK_TOKENS;

/// The followers of a node, whose last reports the test holds up, and which it can kill.
#[derive(Debug)]
struct HeldUp {
    followers: Arc<dyn OtherProcesses>,
    /// A permit for each last report.
    quiet: Arc<Semaphore>,
    killed: CancellationToken,
}

#[async_trait]
impl OtherProcesses for HeldUp {
    fn process_of(&self, layer: u16, rank: u16) -> Option<usize> {
        self.followers.process_of(layer, rank)
    }

    fn n_processes(&self) -> usize {
        self.followers.n_processes()
    }

    async fn put(&self, process: usize, order: PutOrder) -> Result<(), TransferError> {
        self.followers.put(process, order).await
    }

    fn endpoint(&self, process: usize) -> String {
        self.followers.endpoint(process)
    }

    fn land(&self, process: usize, order: LandOrder) -> mpsc::Receiver<LandingEvent> {
        let mut events = self.followers.land(process, order);
        let (queue, held_up) = mpsc::channel(64);
        let (quiet, killed) = (Arc::clone(&self.quiet), self.killed.clone());
        let forward = async move {
            while let Some(event) = events.recv().await {
                if matches!(event, LandingEvent::Quiet) {
                    quiet.acquire().await.expect("it is never closed").forget();
                }
                // The landing may have ended, so a failed send is ignored.
                let _ = queue.send(event).await;
            }
        };
        let forward = killed.run_until_cancelled_owned(forward);
        spawn_guarded(&Gate::new("test"), "held up reports", forward).detach();
        held_up
    }

    fn end_landing(&self, process: usize, link: u64, transfer: TransferId) {
        self.followers.end_landing(process, link, transfer);
    }

    fn close_link(&self, link: u64) {
        self.followers.close_link(link);
    }
}

fn parts() -> ProcessParts {
    ProcessParts::of(Side::Decode, NonZero::new(3).expect("some"), layout())
}

/// Returns a pair whose decode node has three processes, and the followers of it.
async fn held_up_pair() -> (Pair, Arc<HeldUp>) {
    let parts = parts();
    let held_up = Arc::new(HeldUp {
        followers: parts.start_followers().await,
        quiet: Arc::new(Semaphore::new(0)),
        killed: CancellationToken::new(),
    });
    let mut pair = tcp_pair().await;
    pair.decode = parts.node(&make_tcp(), Arc::clone(&held_up) as _).await;
    (pair, held_up)
}

#[tokio::test]
async fn blocks_wait_for_every_process() {
    let (pair, held_up) = held_up_pair().await;
    let (landing, arrival) = pair.land(N_TOKENS);
    let sender = in_time(pair.open(&landing)).await.expect("granted");
    drop(arrival);
    for _ in 0..2 {
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        let counts = pair.decode.pool.counts();
        assert!(counts.quarantined > 0 && counts.leased == 0, "{counts:?}");
        held_up.quiet.add_permits(1);
    }
    drop(sender);
    in_time(pair.at_baseline()).await;
    held_up.quiet.add_permits(2);
    in_time(pair.transfer(N_TOKENS, 1)).await;
    in_time(pair.at_baseline()).await;
}

/// A landing that was not opened is in no process's hands.
#[tokio::test]
async fn a_landing_without_a_sender_is_free_at_once() {
    let (pair, _held_up) = held_up_pair().await;
    let (landing, arrival) = pair.land(N_TOKENS);
    drop(arrival);
    assert!(pair.decode.is_at_baseline());
    in_time(pair.open(&landing)).await.map(|_| ()).expect_err("it has ended");
}

#[tokio::test]
async fn a_receiver_that_loses_a_process_fails_its_landings() {
    let (pair, held_up) = held_up_pair().await;
    let (landing, arrival) = pair.land(N_TOKENS);
    let sender = in_time(pair.open(&landing)).await.expect("granted");
    held_up.killed.cancel();
    let error = in_time(arrival.settle()).await.expect_err("a process is lost");
    assert!(matches!(error, TransferError::SeveralProcesses(_)), "{error}");
    drop(sender);
    in_time(pair.at_baseline()).await;
}

/// Without the head's secret, if there is one, a stranger gets no further than its first bytes. Without a secret it may
/// connect, and opens no landing here.
#[tokio::test]
async fn a_process_that_grants_no_landings_makes_no_link() {
    let parts = parts();
    let followers = parts.start_followers().await;
    let connect = async || FakePeer {
        socket: in_time(TcpStream::connect(followers.endpoint(0))).await.expect("it listens"),
    };
    let mut stranger = connect().await;
    stranger.say(Body::Hello(hello(3, 6))).await;
    assert_eq!(stranger.hear().await, None);
    let mut stranger = connect().await;
    stranger.say(Body::Hello(Hello { stream: 1, ..hello(3, 6) })).await;
    let welcome = stranger.hear().await;
    let Some(Body::Welcome { node, epoch, others, .. }) = welcome else { panic!("{welcome:?}") };
    assert_eq!((node, epoch, others), (parts.head.node.clone(), parts.head.epoch, Vec::new()));
    stranger.say(Body::Alive).await;
    stranger.say(Body::Done).await;
    assert_eq!(stranger.hear().await, None, "a frame that only receivers send");
}

/// A sender of an older version knows no further processes, or not their ranks. It gets an error that names both ranges.
#[tokio::test]
async fn senders_of_older_versions_are_refused_with_both_ranges() {
    let of_ranks = ProcessParts::with_ranks(Side::Decode, 2, NonZero::<u16>::MIN, &spread_layout(2));
    for (parts, first) in [(parts(), 6), (of_ranks, 7)] {
        let pair = parts.start(&make_tcp(), tcp_pair().await).await;
        let mut peer = FakePeer::connect(&pair.decode).await;
        peer.say(Body::Hello(hello(3, first - 1))).await;
        let refusal = peer.hear().await;
        let Some(Body::Incompatible { protocol }) = refusal else { panic!("{refusal:?}") };
        assert_eq!((protocol.min, protocol.max), (first, 7));
        assert_eq!(peer.hear().await, None, "the connection is closed");
        in_time(pair.at_baseline()).await;
    }
    let pair = self::parts().start(&make_tcp(), tcp_pair().await).await;
    in_time(pair.transfer(N_TOKENS, 1)).await;
    in_time(pair.at_baseline()).await;
}
