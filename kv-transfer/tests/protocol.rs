//! The tcp connector's reaction to peers that use another version, break the protocol, or replay frames.

mod fake_peer;

use baton_kv_transfer::TransferError;
use baton_kv_transfer::conformance::node::{BLOCK_TOKENS, Pair, pages, whole};
use baton_kv_transfer::connectors::tcp::frame::{Body, Frame, HEADER_BYTES, KvPlace, PAYLOAD_BYTES_MAX};
use baton_kv_transfer::landing::Credentials;
use baton_kv_transfer::reshard::Lane;
use chassis::telemetry::Capture;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;
use types::node::{PROTOCOL, ProtocolRange};
use types::{Epoch, Grant, Landing, TransferId};

use self::fake_peer::{FakePeer, credentials, encoded, hello, in_time, span_frame, tcp_pair};

const N_TOKENS: u32 = 3 * BLOCK_TOKENS;

// === versions ===

#[tokio::test]
async fn an_old_version_is_refused_with_both_ranges_named() {
    let capture = Capture::spans("decode");
    let _listening = capture.listen();
    let pair = tcp_pair().await;
    let mut peer = FakePeer::connect(&pair.decode).await;
    peer.say(Body::Hello(hello(1, 2))).await;
    let refusal = peer.hear().await;
    assert_eq!(refusal, Some(Body::Incompatible { protocol: PROTOCOL }));
    assert_eq!(peer.hear().await, None, "the connection is closed");
    assert_serves_on(&pair).await;
    let logged = refusals(&capture);
    assert_eq!(logged.len(), 1, "{logged:?}");
    assert!(logged[0].contains("this side speaks 3..7, the peer 1..2"), "{logged:?}");
}

#[tokio::test]
async fn the_highest_common_version_is_spoken() {
    let pair = tcp_pair().await;
    for (range, expected) in [((3, 3), 3), ((3, 4), 4), ((4, 5), 5), ((4, 6), 6), ((4, 9), 7)] {
        let mut peer = FakePeer::connect(&pair.decode).await;
        peer.say(Body::Hello(hello(range.0, range.1))).await;
        assert!(
            matches!(peer.hear().await, Some(Body::Welcome { version, .. }) if version == expected),
            "{range:?}"
        );
        assert_a_transfer(&pair, &mut peer).await;
    }
}

/// Checks that a whole transfer, sent by a linked fake peer, arrives.
async fn assert_a_transfer(pair: &Pair, peer: &mut FakePeer) {
    let from = pair.prefill.computed(N_TOKENS, 1);
    let (landing, arrival) = pair.land(N_TOKENS);
    assert_eq!(peer.open(&landing).await, Some(Body::Accepted));
    for span in whole(&landing) {
        peer.send(&landing, span, &pair.prefill, &from).await;
    }
    peer.hand_off(&landing).await;
    assert_eq!(peer.hear().await, Some(Body::Done));
    pair.check(&in_time(arrival.settle()).await.expect("arrived"), N_TOKENS, 1);
}

#[tokio::test]
async fn sender_names_both_ranges_too() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let pair = tcp_pair().await;
    let (mut landing, _arrival) = pair.land(N_TOKENS);
    landing.wire.endpoint = listener.local_addr().expect("bound").to_string();
    let refuse = async {
        let mut peer = FakePeer { socket: listener.accept().await.expect("it connects").0 };
        assert!(matches!(peer.hear().await, Some(Body::Hello(_))));
        peer.say(Body::Incompatible { protocol: ProtocolRange { min: 8, max: 10 } }).await;
    };
    let (opened, ()) = in_time(async { tokio::join!(pair.open(&landing), refuse) }).await;
    let error = opened.map(|_| ()).expect_err("there is no common version");
    assert_eq!(error.to_string(), "no common protocol version: this side speaks 3..7, the peer 8..10");
}

// === invalid frames ===

/// Checks that the connection is closed, that one log line has the reason, and that all other peers are
/// served.
async fn is_refused(bytes: &[u8], after_hello: bool, reason: &str) {
    let capture = Capture::spans("decode");
    let _listening = capture.listen();
    let pair = tcp_pair().await;
    let mut peer = if after_hello {
        FakePeer::linked(&pair.decode).await
    } else {
        FakePeer::connect(&pair.decode).await
    };
    peer.write(bytes).await;
    assert_eq!(peer.hear().await, None, "the connection is closed: {reason}");
    assert_serves_on(&pair).await;
    let logged = refusals(&capture);
    assert_eq!(logged.len(), 1, "{logged:?}");
    assert!(logged[0].contains(reason), "{logged:?}");
}

async fn assert_serves_on(pair: &Pair) {
    in_time(pair.transfer(N_TOKENS, 99)).await;
    in_time(pair.at_baseline()).await;
}

fn refusals(capture: &Capture) -> Vec<String> {
    let lines = capture.lines().into_iter().map(|line| line.to_string());
    lines.filter(|line| line.contains("KV stream from peer refused")).collect()
}

fn with(offset: usize, value: u32) -> Vec<u8> {
    let span = types::KvSpan { group: types::GroupIdx(0), blocks: 0..1, layers: 0..1 };
    let mut bytes =
        encoded(&Frame::of_link(Body::Kv { span, digests: Some(vec![]), place: KvPlace::Inline }));
    bytes[offset..offset + 4].copy_from_slice(&value.to_le_bytes());
    bytes
}

#[tokio::test]
async fn garbage_is_refused() {
    is_refused(&[0x47; 4096], false, "not a frame of this protocol").await;
    is_refused(&[0x47; 4096], true, "not a frame of this protocol").await;
}

#[tokio::test]
async fn streams_that_are_refused_for_one_reason_have_one_line_a_minute() {
    let capture = Capture::spans("decode");
    let _listening = capture.listen();
    let pair = tcp_pair().await;
    for _ in 0..1000 {
        let mut peer = FakePeer::connect(&pair.decode).await;
        peer.write(&[0x47; 64]).await;
        assert_eq!(peer.hear().await, None, "the connection is closed");
    }
    assert_serves_on(&pair).await;
    let logged = refusals(&capture);
    assert_eq!(logged.len(), 1, "{logged:?}");
}

#[tokio::test]
async fn oversized_lengths_are_refused_before_their_bytes_come() {
    is_refused(
        &with(8, u32::MAX)[..HEADER_BYTES],
        true,
        "the body of 4294967295 bytes exceeds the limit of 81984",
    )
    .await;
    let payload = PAYLOAD_BYTES_MAX as u32 + 1;
    is_refused(&with(12, payload)[..HEADER_BYTES], true, "the payload of 16777217 bytes").await;
}

#[tokio::test]
async fn flipped_header_bit_is_refused() {
    let mut bytes = encoded(&Frame::of_link(Body::Alive));
    bytes[20] ^= 1;
    is_refused(&bytes, true, "the checksum is wrong").await;
}

#[tokio::test]
async fn frames_out_of_place_are_refused() {
    is_refused(&encoded(&Frame::of_link(Body::Alive)), false, "a first frame that is not a hello").await;
    is_refused(&encoded(&Frame::of_link(Body::Done)), true, "a frame that only receivers send").await;
}

/// Such a stream is not reported as a warning, because its link may have ended while the sender still made
/// its streams.
#[tokio::test]
async fn a_stream_without_its_link_is_closed() {
    let capture = Capture::spans("decode");
    let _listening = capture.listen();
    let pair = tcp_pair().await;
    let mut peer = FakePeer::connect(&pair.decode).await;
    let other = Body::Hello(baton_kv_transfer::connectors::tcp::frame::Hello { stream: 1, ..hello(3, 3) });
    peer.write(&encoded(&Frame::of_link(other))).await;
    assert_eq!(peer.hear().await, None);
    assert_serves_on(&pair).await;
    assert_eq!(refusals(&capture), Vec::<String>::new());
    let lines: Vec<_> = capture.lines().into_iter().map(|line| line.to_string()).collect();
    assert!(lines.iter().any(|line| line.contains("its link has ended or never existed")), "{lines:?}");
}

#[tokio::test]
async fn span_outside_its_landing_loses_the_link() {
    let pair = tcp_pair().await;
    let from = pair.prefill.computed(2 * N_TOKENS, 1);
    let (landing, arrival) = pair.land(N_TOKENS);
    let mut peer = FakePeer::linked(&pair.decode).await;
    assert_eq!(peer.open(&landing).await, Some(Body::Accepted));
    let longer = Landing { n_tokens: 2 * N_TOKENS, ..landing.clone() };
    let outside = whole(&longer).swap_remove(0);
    peer.write(&span_frame(&longer, outside, &pair.prefill, &from)).await;
    let error = in_time(arrival.settle()).await.expect_err("its sender broke the protocol");
    assert!(matches!(error, TransferError::ConnectionLost { .. }), "{error}");
    drop(from);
    assert_serves_on(&pair).await;
}

/// KV of ranks that the sender did not announce, or that this side does not have, ends the link.
#[tokio::test]
async fn span_on_no_lane_loses_the_link() {
    let pair = tcp_pair().await;
    for lane in [Lane { from: 1, to: 0 }, Lane { from: 0, to: 1 }, Lane { from: 255, to: 255 }] {
        let (landing, arrival) = pair.land(N_TOKENS);
        let mut peer = FakePeer::linked(&pair.decode).await;
        assert_eq!(peer.open(&landing).await, Some(Body::Accepted));
        let span = pages(&landing).swap_remove(0);
        let body = Body::Kv { span, digests: Some(Vec::new()), place: KvPlace::Inline };
        peer.write(&encoded(&Frame::new(landing.transfer, body).on(lane))).await;
        let error = in_time(arrival.settle()).await.expect_err("its sender broke the protocol");
        assert!(matches!(error, TransferError::ConnectionLost { .. }), "{error}");
    }
    assert_serves_on(&pair).await;
}

/// The frame is cut off at every length, and then the peer is silent or gone. Nothing leaks.
#[tokio::test]
async fn truncated_frames_leave_nothing() {
    let pair = tcp_pair().await;
    let from = pair.prefill.computed(N_TOKENS, 1);
    for cut in [1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 5, HEADER_BYTES + 200] {
        let (landing, arrival) = pair.land(N_TOKENS);
        let mut peer = FakePeer::linked(&pair.decode).await;
        assert_eq!(peer.open(&landing).await, Some(Body::Accepted));
        let frame = span_frame(&landing, pages(&landing).swap_remove(0), &pair.prefill, &from);
        peer.write(&frame[..cut]).await;
        peer.socket.shutdown().await.expect("it is connected");
        let error = in_time(arrival.settle()).await.expect_err("its sender is gone");
        assert!(matches!(error, TransferError::ConnectionLost { .. }), "{cut}: {error}");
    }
    drop(from);
    assert_serves_on(&pair).await;
}

// === rights ===

/// Returns the text of a refusal.
async fn refused(pair: &Pair, landing: &Landing, shown: Credentials) -> String {
    let mut peer = FakePeer::linked(&pair.decode).await;
    peer.say_of(landing.transfer, Body::Open(shown)).await;
    match peer.hear().await {
        Some(Body::Failed { detail, .. }) => detail,
        other => panic!("not refused: {other:?}"),
    }
}

#[tokio::test]
async fn receiver_checks_rights_itself() {
    let pair = tcp_pair().await;
    let (landing, _arrival) = pair.land(N_TOKENS);
    let right = credentials(&landing);
    for (shown, reason) in [
        (Credentials { grant: Grant::from_bytes([0; 16]), ..right }, "the grant does not match the landing"),
        (Credentials { epoch: Epoch(1), ..right }, "the landing belongs to another life of the node"),
        (Credentials { layout: 0, ..right }, "the two sides' layouts differ"),
        (Credentials { fingerprint: 0, ..right }, "the two sides' models differ"),
        (Credentials { n_tokens: 1, ..right }, "the two sides' lengths differ"),
        (Credentials { tp_size: 0, ..right }, "2 KV heads do not spread over 0 ranks"),
        (Credentials { tp_size: 3, ..right }, "2 KV heads do not spread over 3 ranks"),
        (Credentials { tp_size: 65_534, ..right }, "2 KV heads do not spread over 65534 ranks"),
    ] {
        assert_eq!(refused(&pair, &landing, shown).await, reason);
    }
    let unknown = Landing { transfer: TransferId(1), ..landing.clone() };
    assert_eq!(refused(&pair, &unknown, right).await, "no such landing");
}

/// An attacker records a whole transfer and replays it, during the transfer and after it.
#[tokio::test]
async fn replayed_frames_are_refused() {
    let pair = tcp_pair().await;
    let (first, second) = (pair.prefill.computed(N_TOKENS, 1), pair.prefill.computed(N_TOKENS, 2));
    let (landing, arrival) = pair.land(N_TOKENS);
    let mut sender = FakePeer::linked(&pair.decode).await;
    let mut thief = FakePeer::linked(&pair.decode).await;
    assert_eq!(sender.open(&landing).await, Some(Body::Accepted));
    let spans = whole(&landing);
    sender.send(&landing, spans[0].clone(), &pair.prefill, &first).await;
    in_time(arrival.progress(0)).await;
    // Replays the opening from another link, spans from a link that opened nothing, and a span with other KV.
    assert!(matches!(thief.open(&landing).await, Some(Body::Failed { .. })));
    for span in &spans {
        thief.send(&landing, span.clone(), &pair.prefill, &second).await;
    }
    sender.send(&landing, spans[0].clone(), &pair.prefill, &second).await;
    for span in &spans[1..] {
        sender.send(&landing, span.clone(), &pair.prefill, &first).await;
    }
    sender.hand_off(&landing).await;
    assert_eq!(sender.hear().await, Some(Body::Done));
    let kv = in_time(arrival.settle()).await.expect("arrived");
    pair.check(&kv, N_TOKENS, 1);
    for peer in [&mut sender, &mut thief] {
        let Some(Body::Failed { detail, .. }) = peer.open(&landing).await else { panic!("opened again") };
        assert_eq!(detail, "no such landing");
    }
    drop((first, second, kv));
    in_time(pair.at_baseline()).await;
}
