//! A cluster whose connections are all TLS: it answers, its certificates are renewed under load, and strangers with
//! plaintext, with wrong certificates, or with a recorded handshake are refused and counted. `baton doctor` reports
//! why.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use baton_tests::calls::{self, CALLS};
use baton_tests::check::prompts;
use baton_tests::fleet::{PACED, Settings};
use baton_tests::{Ask, Client, Fleet, Process, eventually, executable, free_addr, in_time};
use chassis::World;
use chassis::identity::{ExpectedPeer, Identity, Tls, TlsPem, link};
use chassis::rpc::{RpcLimits, channel};
use futures::future::join_all;
use proto::v1;
use proto::v1::bootstrap_client::BootstrapClient;
use proto::v1::decode_client::DecodeClient;
use proto::v1::prefill_client::PrefillClient;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, SanType, date_time_ymd};
use serde_json::Value;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tonic::Code;
use types::{NodeId, NodeInfo, Role};

/// Requests at one time.
const CLIENTS: usize = 6;
const REFUSALS: &[&str] =
    &["TLS connection from peer refused", "incoming gRPC call refused", "KV stream from peer refused"];

fn baton(args: &[&str]) -> Output {
    executable::command().args(args).output().expect("baton runs")
}

fn shown(path: &Path) -> String {
    path.display().to_string()
}

/// Makes certificates for every role in `dir`.
fn certs(dir: &Path) {
    let made = baton(&["certs", &shown(dir)]);
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
}

/// The settings of a process with a role's certificate in `dir`.
fn settings(dir: &Path, role: &str) -> Settings {
    vec![
        ("BATON_TLS__CA", shown(&dir.join("ca.pem"))),
        ("BATON_TLS__CERT", shown(&dir.join(format!("{role}.pem")))),
        ("BATON_TLS__KEY", shown(&dir.join(format!("{role}.key")))),
    ]
}

async fn fleet(dir: &Path, roles: &[(&'static str, usize)]) -> Fleet {
    let order = ("BATON_ROUTER__ORDER", "prefill-first".to_owned());
    let of_router = settings(dir, "router").into_iter().chain([order]).collect();
    Fleet::start_all(PACED, roles, of_router, |role| settings(dir, role)).await
}

/// The value of a process's counter of refusals.
async fn refused(admin: &Client, what: &str, reason: &str) -> u64 {
    let page = admin.get("/metrics").await.1;
    let parts =
        ["_callers_refused_total{".to_owned(), format!("reason=\"{reason}\""), format!("what=\"{what}\"")];
    let line = page.lines().find(|line| parts.iter().all(|part| line.contains(part)));
    line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap_or(0)
}

async fn is_counted(admin: &Client, what: &str, reason: &str, before: u64) {
    eventually(&format!("the refusal of a {what} as {reason}"), async || {
        (refused(admin, what, reason).await > before).then_some(())
    })
    .await;
}

// === a cluster ===

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_on_tls_loses_no_request_while_all_certificates_change() {
    let folder = tempfile::tempdir().expect("a folder");
    let (dir, next) = (folder.path().join("certs"), folder.path().join("next"));
    certs(&dir);
    let mut fleet = fleet(&dir, &[("prefill", 2), ("decode", 2), ("pool", 1)]).await;
    let client = fleet.client();
    let asks: Vec<Ask> = prompts(7, 12, 200).into_iter().map(|prompt| Ask::new(prompt, 24)).collect();
    let mut expected = Vec::new();
    for ask in &asks {
        expected.push(client.ask(ask).await.expect("an answer").tokens);
    }
    // New leaf certificates of the same CA.
    std::fs::create_dir(&next).expect("made");
    for name in ["ca.pem", "ca.key"] {
        std::fs::copy(dir.join(name), next.join(name)).expect("copied");
    }
    certs(&next);
    let (enough, answered, next_ask) = (AtomicBool::new(false), AtomicUsize::new(0), AtomicUsize::new(0));
    let one = async || {
        while !enough.load(Ordering::Relaxed) {
            let nth = next_ask.fetch_add(1, Ordering::Relaxed) % asks.len();
            let answer = client.ask(&asks[nth]).await.expect("no request is lost");
            assert_eq!(answer.tokens, expected[nth], "answers changed");
            answered.fetch_add(1, Ordering::Relaxed);
        }
    };
    let change = async {
        for entry in std::fs::read_dir(&next).expect("a folder").flatten() {
            std::fs::rename(entry.path(), dir.join(entry.file_name())).expect("replaced");
        }
        for (name, process) in fleet.processes() {
            eventually(&format!("{name} to read its new certificate"), async || {
                process.log().contains("certificates reloaded").then_some(())
            })
            .await;
        }
        let until = answered.load(Ordering::Relaxed) + 2 * CLIENTS;
        eventually("requests after the change", async || {
            (answered.load(Ordering::Relaxed) >= until).then_some(())
        })
        .await;
        enough.store(true, Ordering::Relaxed);
    };
    tokio::join!(join_all((0..CLIENTS).map(|_| one())), change);
    // A node that starts now has a new certificate, and makes new connections to all others.
    fleet.add_with("decode", 2, PACED, settings(&dir, "decode"));
    fleet.all_ready().await;
    for (ask, expected) in asks.iter().zip(&expected) {
        assert_eq!(client.ask(ask).await.expect("an answer").tokens, *expected);
    }
}

// === strangers ===

/// A CA that also makes wrong certificates.
struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new([]).expect("no names");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("randomness");
        Self(CertifiedIssuer::self_signed(params, key).expect("it can sign itself"))
    }

    fn issue(&self, uri: &str, ends: i32) -> TlsPem {
        let mut params = CertificateParams::new([]).expect("no names");
        params.subject_alt_names = vec![SanType::URI(uri.try_into().expect("ASCII"))];
        params.not_after = date_time_ymd(ends, 1, 1);
        let key = KeyPair::generate().expect("randomness");
        let cert = params.signed_by(&key, &self.0).expect("the authority can sign").pem();
        TlsPem { ca: self.0.pem().into(), cert: cert.into(), key: key.serialize_pem().into() }
    }

    fn valid(&self, uri: &str) -> TlsPem {
        self.issue(uri, 2090)
    }

    /// Writes the files of one process into `dir` under `name`.
    fn write(dir: &Path, name: &str, pem: &TlsPem) {
        for (file, content) in [
            ("ca.pem".to_owned(), &pem.ca),
            (format!("{name}.pem"), &pem.cert),
            (format!("{name}.key"), &pem.key),
        ] {
            std::fs::write(dir.join(file), content).expect("written");
        }
    }

    /// A folder with a certificate for each role.
    fn folder(&self) -> TempDir {
        let folder = tempfile::tempdir().expect("a folder");
        for role in ["router", "prefill", "decode", "pool"] {
            Self::write(folder.path(), role, &self.valid(&format!("baton://c/{role}/*")));
        }
        folder
    }
}

fn world(pem: &TlsPem) -> World {
    World::real().with_identity(Identity::default().with_tls(Tls::of_pem(pem).expect("it loads")))
}

/// Calls as a stranger. Returns the text of the refusal.
async fn call(stranger: &World, addr: SocketAddr, expected: ExpectedPeer) -> String {
    // A connection that ends before the call is written cancels the call without a reason. Then the stranger calls again.
    let status = eventually("a refusal with a reason", async || {
        let channel = channel(stranger, &addr.to_string(), expected.clone(), RpcLimits::default());
        let mut client = DecodeClient::new(channel);
        let called = client.run(v1::DecodeRequest::default());
        let status = in_time("an answer to a stranger", called).await.expect_err("it is refused");
        (status.code() != Code::Cancelled).then_some(status)
    })
    .await;
    assert!(
        [Code::Unavailable, Code::Unauthenticated, Code::Unknown, Code::Internal].contains(&status.code()),
        "{status}"
    );
    types::in_full(&status)
}

/// Dials a KV port as a stranger, and reads until it is refused. Returns the error, or the reason for its absence.
async fn dial(stranger: &World, addr: SocketAddr) -> String {
    let linked = async {
        let mut stream = link::dial(stranger, &addr.to_string()).await?;
        stream.write_all(b"a frame of a stranger").await?;
        let mut heard = Vec::new();
        stream.read_to_end(&mut heard).await?;
        Ok::<_, std::io::Error>(heard)
    };
    match in_time("an answer to a stranger", linked).await {
        Err(error) => error.to_string(),
        Ok(heard) => {
            assert!(heard.len() <= 7, "a stranger gets an alert and nothing else: {heard:?}");
            "the end of the connection".to_owned()
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strangers_are_refused_with_their_reason() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let folder = ours.folder();
    let fleet = fleet(folder.path(), &[("prefill", 1), ("decode", 1), ("pool", 1)]).await;
    fleet.expect_log(REFUSALS);
    let decode = fleet.nodes.iter().find(|node| node.role == "decode").expect("one");
    let admin = Client::new(decode.admin);
    let other_ca = TlsPem { ca: ours.valid("baton://c/x/x").ca, ..theirs.valid("baton://c/prefill/p") };
    for (stranger, call_reason, link_reason) in [
        (World::real(), "plaintext", "plaintext"),
        (world(&other_ca), "authority", "authority"),
        (world(&ours.issue("baton://c/prefill/p", 2025)), "expired", "expired"),
        (world(&ours.valid("baton://d/prefill/p")), "", ""),
        (world(&ours.valid("baton://c/decode/e")), "role", "role"),
        (world(&ours.valid("baton://c/registry/e")), "role", "role"),
    ] {
        let what = format!("{:?}", stranger.identity().tls());
        if call_reason.is_empty() {
            // A stranger of another cluster refuses this cluster first.
            let said = call(&stranger, decode.grpc, ExpectedPeer::DecodeNode).await;
            assert!(said.contains("belongs to the cluster d"), "{said}");
            continue;
        }
        let calls_are = if call_reason == "role" { "call" } else { "connection" };
        let before =
            (refused(&admin, calls_are, call_reason).await, refused(&admin, "link", link_reason).await);
        let said = call(&stranger, decode.grpc, ExpectedPeer::DecodeNode).await;
        is_counted(&admin, calls_are, call_reason, before.0).await;
        let told = dial(&stranger, decode.kv).await;
        is_counted(&admin, "link", link_reason, before.1).await;
        if stranger.identity().tls().is_some() {
            assert!(said.contains("certificate"), "{what}: {said}");
            assert!(told.contains("refuses this process's certificate"), "{what}: {told}");
        }
    }
    announces_another_node(&ours, &fleet).await;
    Box::pin(does_anothers_job(&ours, &fleet)).await;
    Box::pin(replays_a_handshake(&ours, decode.kv, &admin)).await;
    let answer = fleet.client().ask(&Ask::new((10..200).collect(), 8)).await.expect("the cluster serves");
    assert_eq!(answer.tokens.len(), 8);
}

/// A node with a good certificate announces another node, or another role.
async fn announces_another_node(ours: &Authority, fleet: &Fleet) {
    let stranger = world(&ours.valid("baton://c/prefill/p"));
    let router = Client::new(fleet.admin);
    for (id, role) in [("prefill-0", Role::Prefill), ("p", Role::Decode)] {
        let before = refused(&router, "call", "role").await;
        let info =
            NodeInfo { role, address: free_addr().to_string(), ..registry::conformance::node(id, u64::MAX) };
        let channel =
            channel(&stranger, &fleet.grpc.to_string(), ExpectedPeer::Registry, RpcLimits::default());
        let announce = v1::AnnounceRequest { node: Some((&info).into()) };
        let status = BootstrapClient::new(channel).announce(announce).await.expect_err("it is refused");
        assert_eq!(status.code(), Code::Unauthenticated, "{status}");
        assert!(status.message().contains("names baton://c/prefill/p"), "{status}");
        is_counted(&router, "call", "role", before).await;
    }
    let channel =
        channel(&stranger, &fleet.nodes[0].grpc.to_string(), ExpectedPeer::Registry, RpcLimits::default());
    let status = PrefillClient::new(channel).run(v1::PrefillRequest::default()).await.expect_err("no router");
    let said = types::in_full(&status);
    assert!(said.contains("expected is a router"), "a node is not taken for a registry: {said}");
}

/// Every role makes the calls of all other roles, to every process.
async fn does_anothers_job(ours: &Authority, fleet: &Fleet) {
    let mut processes = vec![(fleet.admin, fleet.grpc, ExpectedPeer::Registry)];
    processes.extend(fleet.nodes.iter().map(|node| {
        let role = match node.role {
            "prefill" => Role::Prefill,
            "decode" => Role::Decode,
            _ => Role::Pool,
        };
        (node.admin, node.grpc, ExpectedPeer::Node { id: NodeId::new(node.name.as_str()), role })
    }));
    for role in ["router", "prefill", "decode", "pool", "operator"] {
        let name = format!("baton://c/{role}/another");
        let stranger = world(&ours.valid(&name));
        for (admin, grpc, expected) in &processes {
            let admin = Client::new(*admin);
            let before = refused(&admin, "call", "role").await;
            let channel = channel(&stranger, &grpc.to_string(), expected.clone(), RpcLimits::default());
            let anothers = CALLS.iter().filter(|(_, callers)| !callers.contains(&role));
            let mut n_refused = 0;
            for (what, _) in anothers {
                let answer = in_time("an answer to a stranger", calls::call(what, channel.clone())).await;
                let status = answer.expect_err("it is refused");
                assert_eq!(status.code(), Code::Unauthenticated, "{what} by a {role}: {status}");
                assert!(status.message().contains(&format!("names {name}")), "{what}: {status}");
                n_refused += 1;
            }
            assert_eq!(refused(&admin, "call", "role").await, before + n_refused, "{role} at {expected:?}");
        }
    }
}

/// Records the dialer's bytes of a good link, and sends them again.
async fn replays_a_handshake(ours: &Authority, kv: SocketAddr, admin: &Client) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let proxy = listener.local_addr().expect("bound").to_string();
    let dialer = world(&ours.valid("baton://c/prefill/p"));
    let dial = async {
        let mut stream = link::dial(&dialer, &proxy).await.expect("a good link");
        stream.write_all(&[7; 64]).await.expect("open");
        // The bytes are no frame: the node ends the link.
        let _ = stream.read_u8().await;
    };
    let record = async {
        let (mut near, _) = listener.accept().await.expect("a connection");
        let mut far = TcpStream::connect(kv).await.expect("it listens");
        let (mut sent, mut from_near, mut from_far) = (Vec::new(), [0; 4096], [0; 4096]);
        loop {
            tokio::select! {
                n = near.read(&mut from_near) => match n {
                    Ok(n) if n > 0 => {
                        sent.extend(&from_near[..n]);
                        let _ = far.write_all(&from_near[..n]).await;
                    }
                    _ => return sent,
                },
                n = far.read(&mut from_far) => match n {
                    Ok(n) if n > 0 => near.write_all(&from_far[..n]).await.expect("open"),
                    _ => return sent,
                },
            }
        }
    };
    let both = Box::pin(async { tokio::join!(dial, record) });
    let ((), sent) = in_time("a good link", both).await;
    let before = refused(admin, "link", "handshake").await;
    let mut stranger = TcpStream::connect(kv).await.expect("it listens");
    stranger.write_all(&sent).await.expect("a socket has room");
    is_counted(admin, "link", "handshake", before).await;
}

// === the doctor ===

/// The texts of the findings that stand in the way, except those about ports and models.
fn doctor(file: &Path) -> Vec<String> {
    let output = baton(&["doctor", "--config", &shown(file), "--json"]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let report: Value = serde_json::from_str(&text)
        .unwrap_or_else(|error| panic!("{error}: {text}{}", String::from_utf8_lossy(&output.stderr)));
    let findings = report["findings"].as_array().expect("findings");
    let stands_in_the_way = |finding: &&Value| {
        finding["level"] == "bad" && (finding["group"] == "tls" || finding["group"] == "registry")
    };
    let found = |finding: &Value| finding["found"].as_str().expect("a text").to_owned();
    findings.iter().filter(stands_in_the_way).map(found).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_doctor_tells_which_certificate_problem_it_is() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let folder = ours.folder();
    let logs = tempfile::tempdir().expect("a folder");
    let router = |name: &str, more: Settings| {
        let (http, grpc) = (free_addr(), free_addr());
        let listens = [("BATON_ROUTER__HTTP", http.to_string()), ("BATON_ROUTER__GRPC", grpc.to_string())];
        let settings = listens.into_iter().chain(more).collect();
        (Process::start(logs.path(), name, "router", settings), grpc)
    };
    let (secure, secure_grpc) = router("secure", settings(folder.path(), "router"));
    let (plain, plain_grpc) = router("plain", Vec::new());
    for (process, grpc) in [(&secure, secure_grpc), (&plain, plain_grpc)] {
        process.expect_log(REFUSALS);
        eventually("the router to listen", async || TcpStream::connect(grpc).await.ok()).await;
    }
    let good = || ours.valid("baton://c/prefill/*");
    let mixed = |ca: &Authority, pem: TlsPem| TlsPem { ca: ca.valid("baton://c/x/x").ca, ..pem };
    for (name, pem, grpc, expected) in [
        ("good", Some(good()), secure_grpc, None),
        (
            "expired",
            Some(ours.issue("baton://c/prefill/*", 2025)),
            secure_grpc,
            Some("`tls.cert` has expired"),
        ),
        (
            "role",
            Some(ours.valid("baton://c/router/*")),
            secure_grpc,
            Some("`tls.cert` names baton://c/router/*, and this process is a prefill or decode node"),
        ),
        (
            "own CA",
            Some(mixed(&theirs, good())),
            secure_grpc,
            Some("`tls.cert` is not signed by a CA in `tls.ca`"),
        ),
        (
            "another CA",
            Some(theirs.valid("baton://c/prefill/*")),
            secure_grpc,
            Some("the peer's certificate is not signed by a CA in `tls.ca`"),
        ),
        (
            "another cluster",
            Some(ours.valid("baton://d/prefill/*")),
            secure_grpc,
            Some("and this process belongs to the cluster d"),
        ),
        ("plaintext peer", Some(good()), plain_grpc, Some("the peer speaks plaintext")),
        ("plaintext", None, secure_grpc, Some("the router expects TLS, and this process speaks plaintext")),
    ] {
        let dir = tempfile::tempdir().expect("a folder");
        let file = node_file(dir.path(), grpc, pem.as_ref());
        let found = doctor(&file);
        match expected {
            None => assert!(found.is_empty(), "{name}: {found:?}"),
            Some(text) => assert!(found.iter().any(|found| found.contains(text)), "{name}: {found:?}"),
        }
    }
    let dir = tempfile::tempdir().expect("a folder");
    let file = node_file(dir.path(), secure_grpc, Some(&good()));
    std::fs::remove_file(dir.path().join("node.key")).expect("it is there");
    let found = doctor(&file);
    assert!(found.iter().any(|found| found.starts_with("read `tls.key` = ")), "{found:?}");
}

/// A node's file in `dir`, with the registry at `grpc`.
fn node_file(dir: &Path, grpc: SocketAddr, pem: Option<&TlsPem>) -> PathBuf {
    let mut text = format!("[registry]\nurl = \"embedded://{grpc}\"\n");
    if let Some(pem) = pem {
        Authority::write(dir, "node", pem);
        let path = |name: &str| shown(&dir.join(name));
        let (ca, cert, key) = (path("ca.pem"), path("node.pem"), path("node.key"));
        text += &format!("[tls]\nca = \"{ca}\"\ncert = \"{cert}\"\nkey = \"{key}\"\n");
    }
    let file = dir.join("node.toml");
    std::fs::write(&file, text).expect("written");
    file
}

// === starts ===

#[test]
fn a_process_does_not_start_with_a_certificate_that_peers_refuse() {
    let ours = Authority::new();
    for (role, uri, ends, more, expected) in [
        ("router", "baton://c/prefill/*", 2090, ("", ""), "this process is a router"),
        ("prefill", "baton://c/decode/*", 2090, ("", ""), "this process is a prefill"),
        ("decode", "baton://c/decode/*", 2025, ("", ""), "`tls.cert` has expired"),
        ("pool", "baton://c/pool/a", 2090, ("BATON_NODE__ID", "b"), "and `node.id` is b"),
        (
            "prefill",
            "baton://c/prefill/*",
            2090,
            ("BATON_REGISTRY__URL", "etcd://127.0.0.1:1/c"),
            "set `cluster.secret_file` besides `[tls]`",
        ),
    ] {
        let dir = tempfile::tempdir().expect("a folder");
        Authority::write(dir.path(), role, &ours.issue(uri, ends));
        let mut command = executable::command();
        command.arg(role).envs(settings(dir.path(), role));
        if !more.0.is_empty() {
            command.env(more.0, more.1);
        }
        let output = command.output().expect("baton starts");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(expected), "{role} {uri}: {said}");
    }
}
