//! Tests of signatures, replays, links and entries, without sockets.

use std::time::Duration;

use axum::body::Body;
use axum::http::{Request, StatusCode};
use axum::routing::get;
use http::{HeaderMap, HeaderValue};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tower::ServiceExt as _;

use super::call::{Accepts, CallRefused, SIGNATURE_HEADER, SignedCall, TARGET_HEADER, sign};
use super::entry::EntryRefused;
use super::refusals::{Reason, RefusedKind};
use super::replay::SeenNonces;
use super::settings::{ClusterSection, TlsSection, is_loopback};
use super::{CLOCK_SKEW_MAX, ClusterSecret, Identity, SecretError, link};
use crate::net::Stream;
use crate::world::{Jumps, World};

const PATH: &str = "/baton.v1.Prefill/Run";

fn world(secret: &str) -> World {
    World::seeded(7).with_identity(Identity::of_cluster(ClusterSecret::new(secret.as_bytes())))
}

/// Returns the headers of a call from `caller` to `target`.
fn signed(caller: &World, target: &str, body: &[u8]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.insert(TARGET_HEADER, HeaderValue::from_str(target).expect("a header"));
    sign(caller, caller.identity().secret().expect("set"), PATH, &mut headers, body);
    headers
}

fn check(node: &World, headers: &HeaderMap, path: &str, body: &[u8]) -> Result<(), CallRefused> {
    let shown = node.identity().check_head(node, headers)?;
    let accepts = Accepts::Address("node:1".to_owned());
    node.identity().check_call(node, shown, SignedCall { path, headers, body }, &accepts)
}

#[tokio::test(start_paused = true)]
async fn calls_table() {
    let (caller, node) = (world("one secret of a cluster"), world("one secret of a cluster"));
    let headers = signed(&caller, "node:1", b"prompt");
    assert_eq!(check(&node, &headers, PATH, b"another prompt"), Err(CallRefused::Signature));
    assert_eq!(check(&node, &headers, "/baton.v1.Decode/Run", b"prompt"), Err(CallRefused::Signature));
    let mut changed = headers.clone();
    changed.insert(crate::rpc::REQUEST_ID_HEADER, HeaderValue::from_static("other"));
    assert_eq!(check(&node, &changed, PATH, b"prompt"), Err(CallRefused::Signature));
    assert_eq!(check(&node, &headers, PATH, b"prompt"), Ok(()));
    assert_eq!(check(&node, &headers, PATH, b"prompt"), Err(CallRefused::Replayed));

    let elsewhere = CallRefused::Target { signed: "node:2".to_owned(), own: "node:1".to_owned() };
    assert_eq!(check(&node, &signed(&caller, "node:2", b""), PATH, b""), Err(elsewhere));
    assert_eq!(check(&node, &HeaderMap::new(), PATH, b""), Err(CallRefused::Unsigned));
    let mut malformed = HeaderMap::new();
    malformed.insert(SIGNATURE_HEADER, HeaderValue::from_static("1-2"));
    assert_eq!(check(&node, &malformed, PATH, b""), Err(CallRefused::Malformed));
    let stranger = signed(&world("the secret of a stranger"), "node:1", b"");
    assert_eq!(check(&node, &stranger, PATH, b""), Err(CallRefused::Signature));
    let count = |reason| node.identity().refusals().get(RefusedKind::Call, reason);
    assert_eq!(
        [Reason::Unsigned, Reason::Signature, Reason::Replayed, Reason::Target].map(count),
        [1, 5, 1, 1]
    );
}

#[tokio::test(start_paused = true)]
async fn a_clock_that_differs_is_named() {
    let jumps = Jumps::default();
    let (caller, node) =
        (world("one secret of a cluster").with_jumps(&jumps), world("one secret of a cluster"));
    for seconds in [95, -95] {
        jumps.jump(seconds);
        let refused =
            check(&node, &signed(&caller, "node:1", b""), PATH, b"").expect_err("95 s are too many");
        assert_eq!(refused, CallRefused::Clock { skew: Duration::from_secs(95) });
        assert!(refused.to_string().contains("differ by 95 s, at most 30 s are allowed"), "{refused}");
        jumps.jump(-seconds);
    }
    jumps.jump(29);
    assert_eq!(check(&node, &signed(&caller, "node:1", b""), PATH, b""), Ok(()));
}

/// No nonce is accepted twice, even if the memory has little room.
#[test]
fn a_full_memory_refuses_old_calls() {
    let seen = SeenNonces::with_room(2);
    let now = 1_000_000;
    for sent in [now, now + 1, now + 2] {
        assert!(seen.is_new(sent, [0; 16], now));
        assert!(!seen.is_new(sent, [0; 16], now));
    }
    assert!(!seen.is_new(now, [0; 16], now), "forgotten, and refused");
    assert!(!seen.is_new(now, [1; 16], now), "as old as what was forgotten");
    assert!(seen.is_new(now + 1, [1; 16], now));
    let later = now + CLOCK_SKEW_MAX.as_millis() as u64 + 10;
    assert!(seen.is_new(later, [0; 16], later));
}

// === links ===

/// Runs the identity exchange of a link between two worlds. Returns the dialer's and the receiver's result.
async fn met(dialer: &World, receiver: &World) -> (std::io::Result<()>, std::io::Result<()>) {
    let (near, far) = tokio::io::duplex(4096);
    let dial = async {
        let mut proven = link::prove(dialer, Stream::other(near)).await;
        if let (Ok(near), None) = (&mut proven, dialer.identity().secret()) {
            // The first message of a KV link, longer than the receiver's read.
            near.write_all(&[7; 128]).await.expect("room");
        }
        proven
    };
    let (dialed, admitted) = tokio::join!(dial, link::admit(receiver, Stream::other(far)));
    (dialed.map(drop), admitted.map(drop))
}

#[tokio::test(start_paused = true)]
async fn links_table() {
    let (open, one, other) =
        (World::seeded(3), world("one secret of a cluster"), world("the secret of another one"));
    let (dialed, admitted) = met(&one, &one).await;
    assert!(dialed.is_ok() && admitted.is_ok(), "{dialed:?} {admitted:?}");
    let (dialed, admitted) = met(&open, &open).await;
    assert!(dialed.is_ok() && admitted.is_ok(), "{dialed:?} {admitted:?}");
    let (dialed, admitted) = met(&other, &one).await;
    assert!(dialed.is_err() && admitted.is_err(), "{dialed:?} {admitted:?}");
    let (_, admitted) = met(&open, &one).await;
    let refused = admitted.expect_err("it has shown nothing");
    assert_eq!(refused.to_string(), "the peer did not prove that it has the cluster's secret");
    assert_eq!(one.identity().refusals().get(RefusedKind::Link, Reason::Signature), 2);
}

#[tokio::test(start_paused = true)]
async fn a_replayed_link_is_refused() {
    let (dialer, receiver) = (world("one secret of a cluster"), World::seeded(8));
    let receiver = receiver.with_identity(dialer.identity().clone());
    let (near, far) = tokio::io::duplex(4096);
    // A proxy between dialer and receiver records the dialer's bytes.
    let (mut tap_in, tap_out) = tokio::io::duplex(4096);
    let tap = async {
        let mut far = far;
        let mut challenge = [0; 36];
        tap_in.read_exact(&mut challenge).await.expect("the receiver's");
        far.write_all(&challenge).await.expect("room");
        let mut recorded = vec![0; 64];
        far.read_exact(&mut recorded).await.expect("the dialer's");
        tap_in.write_all(&recorded).await.expect("room");
        let mut answer = [0; 32];
        tap_in.read_exact(&mut answer).await.expect("the receiver's");
        far.write_all(&answer).await.expect("room");
        recorded
    };
    let (near, tap_out) = (Stream::other(near), Stream::other(tap_out));
    let (dialed, admitted, recorded) =
        tokio::join!(link::prove(&dialer, near), link::admit(&receiver, tap_out), tap);
    assert!(dialed.is_ok() && admitted.is_ok(), "the recorded link is a good one");
    let (mut stranger, far) = tokio::io::duplex(4096);
    stranger.write_all(&recorded).await.expect("room");
    let refused = link::admit(&receiver, Stream::other(far)).await.expect_err("its challenge is another");
    assert_eq!(refused.kind(), std::io::ErrorKind::PermissionDenied);
}

// === entries ===

#[test]
fn entries_table() {
    let one = Identity::of_cluster(ClusterSecret::new(b"one secret of a cluster"));
    let other = Identity::of_cluster(ClusterSecret::new(b"the secret of another"));
    let written = one.sign_entry(b"/baton/c/nodes/p0", b"entry".to_vec());
    assert_eq!(one.check_entry(b"/baton/c/nodes/p0", &written), Ok(()));
    assert_eq!(one.check_entry(b"/baton/c/nodes/p1", &written), Err(EntryRefused::Signature));
    assert_eq!(other.check_entry(b"/baton/c/nodes/p0", &written), Err(EntryRefused::Signature));
    let mut changed = written.clone();
    changed[0] ^= 1;
    assert_eq!(one.check_entry(b"/baton/c/nodes/p0", &changed), Err(EntryRefused::Signature));
    for unsigned in [&b""[..], b"entry", &[7; 64]] {
        assert_eq!(one.check_entry(b"/baton/c/nodes/p0", unsigned), Err(EntryRefused::Unsigned));
    }
    assert_eq!(Identity::default().check_entry(b"key", b"entry"), Ok(()));
    assert_eq!(Identity::default().sign_entry(b"key", b"entry".to_vec()), b"entry");
}

// === settings ===

#[test]
fn only_loopback_needs_no_secret() {
    for (address, loopback) in [
        ("127.0.0.1:0", true),
        ("localhost:8000", true),
        ("[::1]:7000", true),
        ("", true),
        ("0.0.0.0:7000", false),
        ("[::]:7000", false),
        ("10.0.0.7:7000", false),
        ("node-1:7000", false),
    ] {
        assert_eq!(is_loopback(address), loopback, "{address}");
    }
    let open = [("node.listen", "127.0.0.1:0"), ("transfer.listen", "0.0.0.0:7002")];
    let none = TlsSection::default();
    let refused = ClusterSection::default().check(&none, None, &open).expect_err("other machines reach it");
    let text = refused.to_string();
    assert!(
        text.starts_with("`transfer.listen` = \"0.0.0.0:7002\" is reached from other machines"),
        "{text}"
    );
    assert!(text.contains("`cluster.secret_file`") && text.contains("`cluster.insecure = true`"), "{text}");
    ClusterSection { insecure: true, ..ClusterSection::default() }
        .check(&none, None, &open)
        .expect("the operator wants it");
    let secret_file = "secret".to_owned();
    let secret = ClusterSection { secret_file, ..ClusterSection::default() };
    secret.check(&none, None, &open).expect("there is a secret");
    let tls = TlsSection { ca: "ca.pem".to_owned(), ..TlsSection::default() };
    ClusterSection::default().check(&tls, Some("embedded://a:1"), &open).expect("there are certificates");
    let etcd = Some("etcd://a:1/c");
    let refused = ClusterSection::default().check(&tls, etcd, &open).expect_err("entries are unsigned");
    assert!(refused.to_string().contains("`cluster.secret_file` besides `[tls]`"), "{refused}");
    secret.check(&tls, etcd, &open).expect("entries are signed");
}

#[test]
fn secrets_are_read_and_short_ones_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("secret");
    let section = ClusterSection { secret_file: file.display().to_string(), ..ClusterSection::default() };
    let none = TlsSection::default();
    assert!(section.identity(&none).is_err(), "there is no file");
    std::fs::write(&file, "short\n").expect("written");
    assert!(matches!(ClusterSecret::read(&file), Err(SecretError::TooShort { bytes: 5, .. })));
    std::fs::write(&file, "0123456789abcdef\n").expect("written");
    let signed = section.identity(&none).expect("long enough").sign_entry(b"key", Vec::new());
    assert_eq!(
        signed,
        Identity::of_cluster(ClusterSecret::new(b"0123456789abcdef")).sign_entry(b"key", Vec::new())
    );
}

// === the admin key ===

#[tokio::test]
async fn pages_table() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("key");
    std::fs::write(&file, "0123456789abcdef\n").expect("written");
    let section = ClusterSection { admin_key_file: file.display().to_string(), ..ClusterSection::default() };
    let key = section.admin_key("127.0.0.1:0").expect("a key");
    let open = ClusterSection::default();
    let missing = open.admin_key("0.0.0.0:7001").expect("no file is named");
    let not_needed = open.admin_key("127.0.0.1:7001").expect("no file is named");
    let identity = Identity::default();
    for (key, shown, status) in [
        (&key, None, StatusCode::UNAUTHORIZED),
        (&key, Some("Bearer 0123456789abcdee"), StatusCode::UNAUTHORIZED),
        (&key, Some("0123456789abcdef"), StatusCode::UNAUTHORIZED),
        (&key, Some("Bearer 0123456789abcdef"), StatusCode::OK),
        (&missing, Some("Bearer 0123456789abcdef"), StatusCode::FORBIDDEN),
        (&not_needed, None, StatusCode::OK),
    ] {
        let pages = axum::Router::new().route("/debug/kv", get(|| async { "kv" }));
        let pages = key.clone().guard(pages, identity.refusals().clone());
        let request = Request::get("/debug/kv");
        let request =
            shown.into_iter().fold(request, |request, shown| request.header("authorization", shown));
        let answer =
            pages.oneshot(request.body(Body::empty()).expect("a request")).await.expect("it answers");
        assert_eq!(answer.status(), status, "{key:?} {shown:?}");
    }
    assert_eq!(identity.refusals().get(RefusedKind::Page, Reason::Unsigned), 3);
    assert_eq!(identity.refusals().get(RefusedKind::Page, Reason::Signature), 1);
}

/// The fastest call counts, because a machine may stop this process for a second. A prompt of 8,000 tokens is about 24 KiB.
#[test]
fn signing_and_checking_a_long_prompt_takes_less_than_a_millisecond() {
    const N_CALLS: u32 = 200;
    let identity = Identity::of_cluster(ClusterSecret::new(b"one secret of a cluster"));
    let world = World::real().with_identity(identity);
    let body = vec![7; 24 << 10];
    let call = |_| {
        let start = tokio::time::Instant::now();
        let headers = signed(&world, "node:1", &body);
        check(&world, &headers, PATH, &body).expect("signed with the same secret");
        start.elapsed()
    };
    let each = (0..N_CALLS).map(call).min().expect("some calls");
    eprintln!("a call of {} bytes: {each:?} for both ends", body.len());
    assert!(each < Duration::from_millis(1), "{each:?} for each call");
}
