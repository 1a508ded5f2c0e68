//! Tests of the promises of the tcp connector alone: blocks that are free at once, and detection of dead
//! wires and flipped bits.

mod fake_peer;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use baton_kv_transfer::conformance::node::{BLOCK_TOKENS, Make, Node, Pair, handoff, layout, whole};
use baton_kv_transfer::connectors::tcp::frame::Body;
use baton_kv_transfer::{
    Arrival, ArrivalStatus, ArrivedKv, ConnectorParts, LandRequest, TransferError, TransferSettings, build,
};
use kv_cache::{BlockLease, LayerFence};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use types::{Destination, KvDtype, KvLayout, Landing};

use self::fake_peer::{FakePeer, in_time, make_tcp_with_stall, span_frame, tcp_pair};

const N_TOKENS: u32 = 8 * BLOCK_TOKENS;

// === the proof of quiet ===

/// The sender stops in the middle of a page, as after SIGSTOP, and the request is cancelled. The blocks
/// return at once.
#[tokio::test]
async fn blocks_are_free_at_once_although_the_sender_stands_still_in_a_frame() {
    let pair = tcp_pair().await;
    let from = pair.prefill.computed(N_TOKENS, 1);
    let (landing, arrival) = pair.land(N_TOKENS);
    let mut peer = FakePeer::linked(&pair.decode).await;
    assert_eq!(peer.open(&landing).await, Some(Body::Accepted));
    let span = whole(&landing).swap_remove(0);
    let frame = span_frame(&landing, span, &pair.prefill, &from);
    let middle = frame.len() / 2 + 13;
    peer.write(&frame[..middle]).await;
    // The first pages of the frame are verified only when the frame ends, so the test waits for a byte of the last
    // page read.
    in_time(first_page_written(&pair, &landing)).await;

    drop(arrival);
    assert!(pair.decode.is_at_baseline(), "the drop has returned, so the blocks are back");

    // Another sequence gets the blocks and writes them. Later bytes of the sender do not reach it.
    let next = pair.decode.computed(N_TOKENS, 2);
    peer.write(&frame[middle..]).await;
    let Some(Body::Failed { .. }) = peer.hear().await else { panic!("the sender was not told") };
    assert_alive_link_serves(&pair, &mut peer, &from).await;
    pair.decode.assert_holds(&next, N_TOKENS, 2);
}

/// Waits until the landing's first page differs from fresh memory.
async fn first_page_written(pair: &Pair, landing: &Landing) {
    let place = landing.tables[0][0].0;
    let mut interval = tokio::time::interval(Duration::from_millis(1));
    loop {
        interval.tick().await;
        // The receiver may be writing now, and then the page cannot be read, so the test tries again.
        let Ok(page) = pair.decode.parts.memory.read(types::GroupIdx(0), 0, place..place + 1) else {
            continue;
        };
        if page.iter().any(|byte| *byte != page[0]) {
            return;
        }
    }
}

/// Checks that the link of a cancelled transfer still serves the next one.
async fn assert_alive_link_serves(pair: &Pair, peer: &mut FakePeer, from: &BlockLease) {
    let (landing, arrival) = pair.land(N_TOKENS);
    assert_eq!(peer.open(&landing).await, Some(Body::Accepted));
    for span in whole(&landing) {
        peer.send(&landing, span, &pair.prefill, from).await;
    }
    peer.hand_off(&landing).await;
    pair.check(&in_time(arrival.settle()).await.expect("arrived"), N_TOKENS, 1);
}

// === dead wires ===

#[tokio::test]
async fn sender_that_falls_silent_fails_its_landings_before_their_deadline() {
    let pair = Pair::new(&make_tcp_with_stall(200)).await;
    let (landing, arrival) = pair.land(N_TOKENS);
    let mut peer = FakePeer::linked(&pair.decode).await;
    assert_eq!(peer.open(&landing).await, Some(Body::Accepted));
    let started = pair.decode.parts.world.now();
    let error = in_time(arrival.settle()).await.expect_err("its sender is as good as dead");
    assert!(matches!(error, TransferError::ConnectionLost { .. }), "{error}");
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    in_time(pair.at_baseline()).await;
}

/// Regression test. A sender sent heartbeats at the rate of its own stall time, too rarely for a receiver
/// with a shorter one, so every idle link between the two was lost.
#[tokio::test]
async fn a_patient_sender_keeps_a_link_to_an_impatient_receiver() {
    let mut pair = Pair::new(&make_tcp_with_stall(1_000)).await;
    pair.prefill = Node::new(&make_tcp_with_stall(60_000), Node::parts("prefill", layout())).await;
    let (landing, arrival) = pair.land(N_TOKENS);
    let from = pair.prefill.computed(N_TOKENS, 1);
    let mut sender = pair.open(&landing).await.expect("accepted");
    // The wait is longer than the receiver's stall time, while the KV is still being computed.
    tokio::time::sleep(Duration::from_millis(2_200)).await;
    for span in whole(&landing) {
        sender.send(span, Arc::clone(&from), LayerFence::open()).await.expect("the link lives");
    }
    in_time(sender.finish(handoff(&landing))).await.expect("the link lives");
    pair.check(&in_time(arrival.settle()).await.expect("arrived"), N_TOKENS, 1);
}

/// A receiver that accepts, and then neither reads nor sends anything, fails its senders.
#[tokio::test]
async fn receiver_that_falls_silent_fails_its_senders() {
    check_silent_receiver(false).await;
}

/// A receiver that sends heartbeats but does not read, so that the wire stays full, fails its senders.
#[tokio::test]
async fn receiver_that_stops_reading_fails_its_senders() {
    check_silent_receiver(true).await;
}

async fn check_silent_receiver(says_that_it_lives: bool) {
    // The sequence has 64 MiB, more than sockets buffer without a reader.
    let layout = KvLayout::uniform(16, KvDtype::Bf16, 1, 8, 128);
    let parts = Node::parts("prefill", layout.clone());
    let settings = TransferSettings { stall_ms: 300, streams: 1, ..TransferSettings::default() };
    let prefill = Node::new(&fake_peer::make_tcp(), ConnectorParts { settings, ..parts }).await;
    let decode = Node::new(&fake_peer::make_tcp(), Node::parts("decode", layout)).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let (landing, _arrival) = land_at(&decode, listener.local_addr().expect("bound"), 16 * 1024);
    let from = Arc::new(prefill.room(landing.n_tokens));
    let deliver = async {
        let mut sender = prefill.connector.open(&Destination::Landing(landing.clone())).await?;
        for span in whole_of(&landing) {
            sender.send(span, Arc::clone(&from), LayerFence::open()).await?;
        }
        sender.finish(handoff(&landing)).await
    };
    let receive = silent_receiver(&listener, &landing, says_that_it_lives);
    let delivered = tokio::select! {
        delivered = in_time(deliver) => delivered,
        () = receive => panic!("the peer never ends"),
    };
    let error = delivered.expect_err("nothing reads");
    assert!(matches!(error, TransferError::Stalled { .. }), "{error}");
    drop(from);
    in_time(prefill.at_baseline()).await;
}

async fn silent_receiver(listener: &TcpListener, landing: &Landing, says_that_it_lives: bool) {
    let mut peer = FakePeer { socket: listener.accept().await.expect("it connects").0 };
    assert!(matches!(peer.hear().await, Some(Body::Hello(_))));
    let (node, epoch) = (landing.node.clone(), landing.epoch);
    peer.say(Body::Welcome { version: 3, node, epoch, others: Vec::new() }).await;
    assert!(matches!(peer.hear().await, Some(Body::Open(_))));
    peer.say_of(landing.transfer, Body::Accepted).await;
    let mut alive = tokio::time::interval(Duration::from_millis(20));
    loop {
        alive.tick().await;
        if says_that_it_lives {
            peer.say(Body::Alive).await;
        }
    }
}

/// Grants a landing and changes its address to that of a fake peer.
fn land_at(decode: &Node, at: SocketAddr, n_tokens: u32) -> (Landing, Arrival) {
    let world = &decode.parts.world;
    let request = LandRequest {
        transfer: world.transfer_id(),
        lease: decode.room(n_tokens),
        n_tokens,
        held_tokens: 0,
        deadline: world.deadline_in(fake_peer::WITHIN),
    };
    let (mut landing, arrival) = decode.connector.land(request).expect("a proper request");
    landing.wire.endpoint = at.to_string();
    (landing, arrival)
}

fn whole_of(landing: &Landing) -> Vec<types::KvSpan> {
    vec![types::KvSpan { group: types::GroupIdx(0), blocks: landing.wanted_blocks(), layers: 0..1 }]
}

// === restarts ===

/// A second life of the node listens at the same port. A new landing is filled at once, and the old one is
/// refused.
#[tokio::test]
async fn restart_at_the_same_address_is_a_new_node_at_once() {
    let pair = tcp_pair().await;
    let mortal = pair.third(Node::parts("mortal", layout())).await;
    let old = land_on(&mortal);
    drop(pair.open(&old.0).await.expect("granted"));
    let (address, parts) = (mortal.connector.address(), mortal.parts.clone());
    drop((old.1, mortal));
    let settings = TransferSettings { listen: address.endpoint.clone(), ..parts.settings.clone() };
    let parts = ConnectorParts { epoch: parts.world.epoch(), settings, ..parts };
    let again = in_time(Node::new(&make_once_free(), parts)).await;
    assert_eq!(again.connector.address(), address);
    // The prefill node may not have noticed that its link is dead: the new epoch reveals it.
    let (landing, arrival) = land_on(&again);
    let from = pair.prefill.computed(N_TOKENS, 1);
    in_time(pair.deliver(&landing, &from)).await.expect("delivered");
    again.assert_holds(&in_time(arrival.settle()).await.expect("arrived").lease, N_TOKENS, 1);
    let error = pair.open(&old.0).await.map(|_| ()).expect_err("it was granted by an earlier life");
    assert!(matches!(error, TransferError::WrongEpoch), "{error}");
}

fn land_on(node: &Node) -> (Landing, Arrival) {
    let at = node.connector.address().endpoint.parse().expect("an address");
    land_at(node, at, N_TOKENS)
}

/// Makes a connector that tries again until the port is free: the tasks of the earlier life end a moment
/// later.
fn make_once_free() -> Make {
    Arc::new(|parts: ConnectorParts| {
        Box::pin(async move {
            loop {
                match build("tcp", parts.clone()).await {
                    Ok(connector) => return connector,
                    Err(_) => tokio::task::yield_now().await,
                }
            }
        })
    })
}

// === bits ===

/// Flips one bit of the forwarded bytes, `at` bytes into the stream, and forwards everything else.
struct FlippingProxy {
    listener: TcpListener,
    target: String,
}

impl FlippingProxy {
    async fn before(target: String) -> Self {
        Self { listener: TcpListener::bind("127.0.0.1:0").await.expect("a free port"), target }
    }

    fn endpoint(&self) -> String {
        self.listener.local_addr().expect("bound").to_string()
    }

    async fn run(&self, flip_at: usize) {
        let (near, _) = self.listener.accept().await.expect("it connects");
        let far = TcpStream::connect(&self.target).await.expect("it listens");
        let ((mut near_in, mut near_out), (mut far_in, mut far_out)) = (near.into_split(), far.into_split());
        let forward = async {
            let (mut seen, mut buffer) = (0, vec![0; 16 << 10]);
            while let Ok(n @ 1..) = near_in.read(&mut buffer).await {
                if (seen..seen + n).contains(&flip_at) {
                    buffer[flip_at - seen] ^= 1 << (flip_at % 8);
                }
                seen += n;
                if far_out.write_all(&buffer[..n]).await.is_err() {
                    return;
                }
            }
        };
        let back = tokio::io::copy(&mut far_in, &mut near_out);
        tokio::select! { () = forward => (), _ = back => () }
    }
}

/// A bit is flipped anywhere on the wire: hello, headers, digests, KV, handoff. The KV arrives right, or not at all.
#[tokio::test]
async fn a_bit_flipped_anywhere_on_the_wire_is_caught() {
    let make: Make = Arc::new(|parts: ConnectorParts| {
        let settings = TransferSettings { streams: 1, stall_ms: 500, ..parts.settings.clone() };
        Box::pin(
            async move { build("tcp", ConnectorParts { settings, ..parts }).await.expect("a free port") },
        )
    });
    let n_tokens = 2 * BLOCK_TOKENS;
    let (mut arrived, mut failed) = (0, 0);
    for nth in 0..1_000 {
        // Each round has a new pair of nodes, so that the offset counts from the hello on.
        let pair = Pair::new(&make).await;
        let from = pair.prefill.computed(n_tokens, nth);
        let (mut landing, arrival) = pair.land(n_tokens);
        let proxy = FlippingProxy::before(landing.wire.endpoint.clone()).await;
        landing.wire.endpoint = proxy.endpoint();
        let flip_at = nth as usize * 7 % 4_200;
        let outcome = tokio::select! {
            outcome = in_time(transferred(&pair, &landing, arrival, &from)) => outcome,
            () = async { proxy.run(flip_at).await; std::future::pending().await } => unreachable!(),
        };
        match outcome {
            Some(kv) => {
                pair.check(&kv, n_tokens, nth);
                assert_eq!(kv.handoff, handoff(&landing), "byte {flip_at}");
                arrived += 1;
            }
            None => failed += 1,
        }
    }
    assert!(
        arrived > 0 && failed > 0,
        "{arrived} arrived, {failed} failed: some bits must hit KV, some a header"
    );
}

/// Returns the receiver's state when the sender's part has ended. A landing that was never opened, because
/// the bit hit the hello, or that still waits, has nothing.
async fn transferred(
    pair: &Pair,
    landing: &Landing,
    mut arrival: Arrival,
    from: &Arc<BlockLease>,
) -> Option<ArrivedKv> {
    if pair.deliver(landing, from).await.is_ok() {
        return Some(arrival.settle().await.expect("the sender was told that it is there"));
    }
    match arrival.poll() {
        ArrivalStatus::Arrived(kv) => Some(kv),
        ArrivalStatus::Waiting { .. } | ArrivalStatus::Failed(_) => None,
    }
}
