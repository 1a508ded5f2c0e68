//! Tests of certificates, names and handshakes, mostly without sockets.

use std::path::Path;
use std::time::Duration;

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair, SanType,
    date_time_ymd,
};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex};
use types::{NodeId, Role};

use super::certificate::{CertName, CertRole, ExpectedPeer};
use super::refusals::{Reason, RefusedKind};
use super::tls::{Tls, TlsFileError, TlsFiles, TlsPem};
use super::{Identity, link};
use crate::net::Stream;
use crate::world::World;

/// A CA, and the certificates that it makes.
struct Authority(CertifiedIssuer<'static, KeyPair>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Valid {
    Now,
    UntilLastYear,
    FromNextCentury,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new([]).expect("no names");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, key()).expect("it can sign itself"))
    }

    fn issue(&self, uri: &str, valid: Valid) -> TlsPem {
        let mut params = CertificateParams::new([]).expect("no names");
        params.subject_alt_names = vec![SanType::URI(uri.try_into().expect("ASCII"))];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        match valid {
            Valid::Now => {}
            Valid::UntilLastYear => params.not_after = date_time_ymd(2025, 1, 1),
            Valid::FromNextCentury => params.not_before = date_time_ymd(2101, 1, 1),
        }
        let key = key();
        let cert = params.signed_by(&key, &self.0).expect("the authority can sign").pem();
        TlsPem { ca: self.0.pem().into(), cert: cert.into(), key: key.serialize_pem().into() }
    }

    fn tls(&self, uri: &str) -> Tls {
        Tls::of_pem(&self.issue(uri, Valid::Now)).expect("a certificate")
    }

    fn world(&self, uri: &str) -> World {
        with(self.tls(uri))
    }
}

fn key() -> KeyPair {
    KeyPair::generate().expect("randomness")
}

fn with(tls: Tls) -> World {
    World::seeded(7).with_identity(Identity::default().with_tls(tls))
}

// === names ===

#[test]
fn names_table() {
    for (uri, role, node) in [
        ("baton://c/router/r-0", CertRole::Router, Some("r-0")),
        ("baton://c/prefill/p-0", CertRole::Prefill, Some("p-0")),
        ("baton://c/pool/*", CertRole::Pool, None),
    ] {
        let name = CertName::parse(uri).expect("a name");
        assert_eq!((name.cluster.as_str(), name.role, name.node()), ("c", role, node));
        assert_eq!(name.to_string(), uri);
    }
    for wrong in [
        "",
        "baton://",
        "baton://c",
        "baton://c/router",
        "baton://c/router/",
        "baton:///router/r",
        "baton://c/king/r",
        "baton://c/router/r/s",
        "https://c/router/r",
    ] {
        assert_eq!(CertName::parse(wrong), None, "{wrong}");
    }
}

#[test]
fn expected_table() {
    let id = || NodeId::new("n");
    let nodes = [Role::Prefill, Role::Decode, Role::Both, Role::Pool];
    let node = |role| ExpectedPeer::Node { id: id(), role };
    for (cert, covered) in [
        ("baton://c/prefill/n", vec![Role::Prefill]),
        ("baton://c/decode/*", vec![Role::Decode]),
        ("baton://c/both/n", vec![Role::Prefill, Role::Decode, Role::Both]),
        ("baton://c/pool/n", vec![Role::Pool]),
        ("baton://c/pool/other", vec![]),
        ("baton://c/router/n", vec![]),
        ("baton://c/registry/n", vec![]),
        ("baton://c/operator/n", vec![]),
    ] {
        let name = CertName::parse(cert).expect("a name");
        for role in nodes {
            assert_eq!(node(role).accepts(&name), covered.contains(&role), "{cert} as {role}");
        }
    }
    for (expected, roles) in [
        (ExpectedPeer::Registry, "router"),
        (ExpectedPeer::DecodeNode, "decode both"),
        (ExpectedPeer::KvReceiver, "decode both pool"),
        (ExpectedPeer::NodeProcess, "prefill decode both"),
        (ExpectedPeer::KvSender, "prefill both pool operator"),
    ] {
        for role in CertRole::ALL {
            let name = CertName::parse(&format!("baton://c/{}/n", role.as_str())).expect("a name");
            let is_expected = roles.split(' ').any(|one| one == role.as_str());
            assert_eq!(expected.accepts(&name), is_expected, "{} as {expected}", role.as_str());
        }
    }
}

// === links ===

/// Runs both ends of a link. The dialer then sends a byte and waits for one, because it learns of a refusal by reading.
async fn met(dialer: &World, receiver: &World) -> (Result<(), String>, Result<(), String>) {
    let (near, far) = duplex(64 << 10);
    let dial = async {
        let mut stream = link::prove(dialer, Stream::other(near)).await?;
        stream.write_all(b"k").await?;
        stream.read_u8().await
    };
    let admit = async {
        let mut stream = link::admit(receiver, Stream::other(far)).await?;
        stream.read_u8().await?;
        stream.write_all(b"v").await
    };
    let (dialed, admitted) = tokio::join!(dial, admit);
    let text = |error: std::io::Error| error.to_string();
    (dialed.map(drop).map_err(text), admitted.map_err(text))
}

#[tokio::test]
async fn links_with_certificates_table() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let plain = World::seeded(7);
    let dated = |valid| with(Tls::of_pem(&ours.issue("baton://c/prefill/p", valid)).expect("it loads"));
    let node = |uri| ours.world(uri);
    let decode = || ours.world("baton://c/decode/d");
    for (dialer, receiver, refused_by, expected) in [
        (node("baton://c/prefill/p"), decode(), "", None),
        (node("baton://c/pool/p"), decode(), "", None),
        (node("baton://c/prefill/p"), node("baton://c/pool/p"), "", None),
        (node("baton://c/both/a"), node("baton://c/both/b"), "", None),
        (node("baton://c/operator/o"), decode(), "", None),
        (node("baton://c/router/r"), decode(), "receiver", Some(Reason::Role)),
        (node("baton://c/decode/e"), decode(), "receiver", Some(Reason::Role)),
        (node("baton://c/prefill/p"), node("baton://c/router/r"), "dialer", Some(Reason::Role)),
        (node("baton://c/prefill/p"), node("baton://d/decode/d"), "dialer", Some(Reason::Cluster)),
        (theirs.world("baton://c/prefill/p"), decode(), "dialer", Some(Reason::Authority)),
        (dated(Valid::UntilLastYear), decode(), "receiver", Some(Reason::Expired)),
        (dated(Valid::FromNextCentury), decode(), "receiver", Some(Reason::Expired)),
        (plain.clone(), decode(), "receiver", Some(Reason::Plaintext)),
    ] {
        let what = format!("{:?} to {:?}", dialer.identity(), receiver.identity());
        let (dialed, admitted) = met(&dialer, &receiver).await;
        let refuser = match refused_by {
            "dialer" => &dialer,
            "receiver" => &receiver,
            _ => {
                assert_eq!((dialed, admitted), (Ok(()), Ok(())), "{what}");
                continue;
            }
        };
        // A dialer without TLS takes the alert for a byte.
        assert!(dialed.is_err() || dialer.identity().tls().is_none(), "{what}: {dialed:?}");
        assert!(admitted.is_err(), "{what}: {admitted:?}");
        let reason = expected.expect("a refusal has a reason");
        assert_eq!(
            refuser.identity().refusals().get(RefusedKind::Link, reason),
            1,
            "{what}: {dialed:?} {admitted:?}"
        );
        if refused_by == "receiver" && dialer.identity().tls().is_some() {
            let told = dialed.expect_err("it is refused");
            assert!(told.starts_with("the peer refuses this process's certificate"), "{what}: {told}");
        }
    }
}

#[tokio::test]
async fn a_process_joins_with_the_certificate_of_its_node() {
    let ours = Authority::new();
    for (name, may_join) in [
        ("prefill/n", true),
        ("decode/n", true),
        ("both/n", true),
        ("pool/n", false),
        ("router/n", false),
        ("operator/n", false),
    ] {
        let (process, head) = (ours.world(&format!("baton://c/{name}")), ours.world("baton://c/decode/n"));
        let (near, far) = duplex(64 << 10);
        let join = link::prove_to_head(&process, Stream::other(near));
        let (_, admitted) = tokio::join!(join, link::admit_process(&head, Stream::other(far)));
        assert_eq!(admitted.is_ok(), may_join, "{name}");
        let n_refused = head.identity().refusals().get(RefusedKind::Link, Reason::Role);
        assert_eq!(n_refused, u64::from(!may_join), "{name}");
    }
}

#[tokio::test]
async fn a_receiver_without_tls_is_named() {
    let ours = Authority::new();
    let secret = super::ClusterSecret::new(b"one secret of a cluster");
    let receiver = World::seeded(7).with_identity(Identity::of_cluster(secret));
    let (dialed, _) = met(&ours.world("baton://c/prefill/p"), &receiver).await;
    assert!(dialed.expect_err("it speaks plaintext").starts_with("the peer speaks plaintext"));
}

/// Copies both directions between a dialer and a receiver, and returns what the dialer sent.
async fn recorded(mut dialer: DuplexStream, mut receiver: DuplexStream) -> Vec<u8> {
    let mut sent = Vec::new();
    let (mut from_dialer, mut from_receiver) = ([0; 4096], [0; 4096]);
    loop {
        tokio::select! {
            n = dialer.read(&mut from_dialer) => {
                let n = n.expect("open");
                if n == 0 {
                    return sent;
                }
                sent.extend(&from_dialer[..n]);
                receiver.write_all(&from_dialer[..n]).await.expect("open");
            }
            n = receiver.read(&mut from_receiver) => {
                let n = n.expect("open");
                if n > 0 {
                    dialer.write_all(&from_receiver[..n]).await.expect("open");
                }
            }
        }
    }
}

#[tokio::test]
async fn a_replayed_handshake_is_refused() {
    let ours = Authority::new();
    let (dialer, receiver) = (ours.world("baton://c/prefill/p"), ours.world("baton://c/decode/d"));
    let ((near, near_tap), (far_tap, far)) = (duplex(64 << 10), duplex(64 << 10));
    let dial = async {
        let mut stream = link::prove(&dialer, Stream::other(near)).await.expect("a good link");
        stream.write_all(b"hello").await.expect("open");
        stream.read_u8().await.expect("an answer");
    };
    let admit = async {
        let mut stream = link::admit(&receiver, Stream::other(far)).await.expect("a good link");
        stream.read_exact(&mut [0; 5]).await.expect("a hello");
        stream.write_all(b"w").await.expect("open");
        stream
    };
    let ((), _open, sent) = tokio::join!(dial, admit, recorded(near_tap, far_tap));
    let (mut stranger, far) = duplex(64 << 10);
    stranger.write_all(&sent).await.expect("room");
    let admitted = tokio::join!(link::admit(&receiver, Stream::other(far)), async {
        let mut heard = Vec::new();
        let _ = tokio::time::timeout(Duration::from_secs(2), stranger.read_to_end(&mut heard)).await;
    });
    admitted.0.expect_err("its keys are others");
    assert_eq!(receiver.identity().refusals().get(RefusedKind::Link, Reason::Handshake), 1);
}

/// More bytes than a socket buffers go both ways at once, and arrive.
#[tokio::test]
async fn writes_need_no_flush() {
    const N_BYTES: usize = 3 << 20;
    let ours = Authority::new();
    let (near, far) = duplex(16 << 10);
    let (dialer, receiver) = (ours.world("baton://c/prefill/p"), ours.world("baton://c/decode/d"));
    let (dialed, admitted) =
        tokio::join!(link::prove(&dialer, Stream::other(near)), link::admit(&receiver, Stream::other(far)));
    let ends = [dialed.expect("proven"), admitted.expect("admitted")].map(Stream::into_split);
    let [(mut near_reader, mut near_writer), (mut far_reader, mut far_writer)] = ends;
    let sent: Vec<u8> = (0..N_BYTES).map(|nth| (nth / 7) as u8).collect();
    let (mut one, mut other) = (vec![0; N_BYTES], vec![0; N_BYTES]);
    let done = async {
        tokio::try_join!(
            near_writer.write_all(&sent),
            far_writer.write_all(&sent),
            async { near_reader.read_exact(&mut one).await.map(drop) },
            async { far_reader.read_exact(&mut other).await.map(drop) },
        )
    };
    tokio::time::timeout(Duration::from_secs(60), done).await.expect("in time").expect("open");
    assert!(one == sent && other == sent);
}

// === files ===

fn write(folder: &Path, pem: &TlsPem) -> TlsFiles {
    let files = TlsFiles { ca: folder.join("ca"), cert: folder.join("cert"), key: folder.join("key") };
    for (file, content) in [(&files.ca, &pem.ca), (&files.cert, &pem.cert), (&files.key, &pem.key)] {
        std::fs::write(file, content).expect("written");
    }
    files
}

#[test]
fn files_table() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let good = || ours.issue("baton://c/prefill/p", Valid::Now);
    let now = World::real().unix_time();
    let folder = tempfile::tempdir().expect("a folder");
    let said = |pem: TlsPem| {
        let loaded = Tls::load(write(folder.path(), &pem));
        loaded.and_then(|tls| tls.check(now)).map_err(|error| types::in_full(&error))
    };
    assert_eq!(said(good()), Ok(()));
    let expired = ours.issue("baton://c/prefill/p", Valid::UntilLastYear);
    for (pem, expected) in [
        (TlsPem { ca: theirs.0.pem().into(), ..good() }, "`tls.cert` is not signed by a CA in `tls.ca`"),
        (TlsPem { key: key().serialize_pem().into(), ..good() }, "`tls.key` is not the key of `tls.cert`"),
        (TlsPem { cert: b"none".to_vec(), ..good() }, "`tls.cert` has no usable PEM content: no certificate"),
        (TlsPem { ca: Vec::new(), ..good() }, "`tls.ca` has no usable PEM content: no certificate"),
        (TlsPem { key: Vec::new(), ..good() }, "`tls.key` has no usable PEM content"),
        (expired, "`tls.cert` has expired"),
        (ours.issue("https://c", Valid::Now), "`tls.cert` has no name"),
    ] {
        let said = said(pem).expect_err(expected);
        assert!(said.starts_with(expected), "{said}");
    }
    let missing = folder.path().join("missing");
    let files = TlsFiles { ca: missing, ..write(folder.path(), &good()) };
    let said = types::in_full(&Tls::load(files).expect_err("there is no file"));
    assert!(said.starts_with("read `tls.ca` = ") && said.contains("No such file"), "{said}");
}

#[test]
fn the_end_of_validity_is_known() {
    let tls =
        Tls::of_pem(&Authority::new().issue("baton://c/prefill/p", Valid::UntilLastYear)).expect("it loads");
    let end = Duration::from_secs(1_735_689_600);
    assert_eq!(tls.not_after(), Some(end));
    let metrics = crate::metrics::Metrics::new("node");
    let identity = Identity::default().with_tls(tls);
    let [own, ca] = identity.expiries().try_into().expect("two certificates");
    assert_eq!((own.setting, own.end, ca.setting), ("tls.cert", end, "tls.ca"));
    assert!(ca.end > end, "the authority is valid for longer: {ca:?}");
    metrics.show_certificates(move || identity.expiries());
    let line = "baton_node_certificate_expiry_timestamp_seconds{setting=\"tls.cert\"} 1735689600\n";
    assert!(metrics.page().contains(line), "{}", metrics.page());
}

#[tokio::test(start_paused = true)]
async fn changed_files_are_taken_over() {
    let ours = Authority::new();
    let folder = tempfile::tempdir().expect("a folder");
    let files = write(folder.path(), &ours.issue("baton://c/prefill/p", Valid::Now));
    let tls = Tls::load(files).expect("a certificate");
    let world = World::real();
    let peer = ours.world("baton://c/decode/d");
    let own = with(tls.clone());
    let wait = || tokio::time::sleep(Duration::from_secs(5));
    let follow = tls.clone().follow(world);
    let look = async {
        let shown = || tls.not_after();
        let first = shown();
        // An expired one, one with another name, and one whose key has not been written yet: none is taken over.
        write(folder.path(), &ours.issue("baton://c/prefill/p", Valid::UntilLastYear));
        wait().await;
        assert_eq!(shown(), first, "the expired one");
        write(folder.path(), &ours.issue("baton://c/decode/p", Valid::Now));
        wait().await;
        assert_eq!(tls.name().to_string(), "baton://c/prefill/p");
        let next = ours.issue_until(2090);
        std::fs::write(folder.path().join("cert"), &next.cert).expect("written");
        wait().await;
        assert_eq!(shown(), first, "half of a pair");
        write(folder.path(), &next);
        wait().await;
        assert_ne!(shown(), first, "the new one is in force");
        assert_eq!(met(&own, &peer).await, (Ok(()), Ok(())));
    };
    tokio::select! {
        () = follow => panic!("it follows until it is dropped"),
        () = look => {}
    }
}

impl Authority {
    fn issue_until(&self, year: i32) -> TlsPem {
        let mut params = CertificateParams::new([]).expect("no names");
        params.subject_alt_names = vec![SanType::URI("baton://c/prefill/p".try_into().expect("ASCII"))];
        params.not_after = date_time_ymd(year, 1, 1);
        let key = key();
        let cert = params.signed_by(&key, &self.0).expect("the authority can sign").pem();
        TlsPem { ca: self.0.pem().into(), cert: cert.into(), key: key.serialize_pem().into() }
    }
}

#[test]
fn a_section_is_whole_or_empty() {
    use super::settings::{ClusterSection, TlsSection};
    let section = TlsSection { ca: "ca.pem".to_owned(), key: "key.pem".to_owned(), ..TlsSection::default() };
    let error = ClusterSection::default().identity(&section).expect_err("it is half");
    assert_eq!(types::in_full(&error), "`[tls]`: `[tls]` needs `ca`, `cert` and `key`: `cert` is empty");
    assert!(matches!(
        Tls::of_pem(&TlsPem { ca: Vec::new(), cert: Vec::new(), key: Vec::new() }),
        Err(TlsFileError::Content { setting: "tls.ca", .. })
    ));
}

/// The head of a node that computes prompts receives no KV, and the other processes of the node join it all the same.
#[tokio::test]
async fn a_process_joins_the_head_of_its_node_only() {
    let ours = Authority::new();
    let follower = ours.world("baton://c/prefill/f");
    for (role, is_head) in
        [("prefill", true), ("decode", true), ("both", true), ("router", false), ("pool", false)]
    {
        let head = ours.world(&format!("baton://c/{role}/h"));
        let mut listener = head.net().listen("127.0.0.1:0").await.expect("a free port");
        let addr = listener.local_addr().expect("an address").to_string();
        let admit = async {
            let (stream, _) = listener.accept().await?;
            link::admit(&head, stream).await?.write_all(b"v").await
        };
        let dial = async { link::dial_head(&follower, &addr).await?.read_u8().await };
        let (dialed, _) = tokio::join!(dial, admit);
        assert_eq!(dialed.is_ok(), is_head, "{role}: {dialed:?}");
    }
}
