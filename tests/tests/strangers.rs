//! Tests of a stranger that speaks the protocol without credentials, or with those of another cluster. All
//! its attempts are refused and counted, nothing is sent to it, and answers do not change.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use baton_tests::calls::{CALLS, call};
use baton_tests::check::prompts;
use baton_tests::fleet::{PACED, Settings};
use baton_tests::{Ask, Client, Etcd, Fleet, eventually, executable, free_addr, in_time};
use chassis::World;
use chassis::identity::{ClusterSecret, ExpectedPeer, Identity};
use chassis::rpc::{RpcLimits, channel};
use prost::Message as _;
use proto::v1;
use proto::v1::bootstrap_client::BootstrapClient;
use proto::v1::decode_client::DecodeClient;
use proto::v1::prefill_client::PrefillClient;
use registry::etcd::client::v3::PutRequest;
use registry::etcd::{EtcdClient, EtcdSettings};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tonic::Code;

const CLUSTER: &str = "strangers";
const EXPECTED: &[&str] = &["incoming gRPC call refused", "member ignored: its record is refused"];
/// The expected warnings: a node whose entry is overwritten announces itself again, and processes may start
/// before etcd answers.
const ETCD_IS_ABUSED: &[&str] =
    &["registry watch failed", "announcement in the registry failed, trying again"];
/// How often one member is written, to see that the log is bounded.
const MANY: usize = 50;
const REASONS: [&str; 2] = ["unsigned", "signature"];

/// A cluster with a secret, a pool, and a key on its nodes' admin ports.
struct Guarded {
    fleet: Fleet,
    asks: Vec<Ask>,
    answers: Vec<Vec<u32>>,
    _files: TempDir,
}

impl Guarded {
    async fn start(registry: Option<String>) -> Self {
        let files = tempfile::tempdir().expect("a folder");
        let path = |name: &str| files.path().join(name).display().to_string();
        std::fs::write(path("secret"), "a secret of sixteen bytes and more").expect("written");
        std::fs::write(path("key"), "a key of sixteen bytes and more").expect("written");
        let secret = ("BATON_CLUSTER__SECRET_FILE", path("secret"));
        let registry = registry.map(|url| ("BATON_REGISTRY__URL", url));
        let of_all: Settings = std::iter::once(secret).chain(registry).collect();
        let key = ("BATON_CLUSTER__ADMIN_KEY_FILE", path("key"));
        let of_nodes: Settings = of_all.iter().cloned().chain([key]).collect();
        let order = ("BATON_ROUTER__ORDER", "prefill-first".to_owned());
        let of_router = of_all.into_iter().chain([order]).collect();
        let roles = [("prefill", 1), ("decode", 1), ("pool", 1)];
        let fleet = Fleet::start_all(PACED, &roles, of_router, |_| of_nodes.clone()).await;
        fleet.expect_log(EXPECTED);
        let asks: Vec<Ask> = prompts(7, 6, 200).into_iter().map(|prompt| Ask::new(prompt, 8)).collect();
        let mut guarded = Self { fleet, asks, answers: Vec::new(), _files: files };
        guarded.answers = guarded.ask().await;
        guarded
    }

    async fn ask(&self) -> Vec<Vec<u32>> {
        let client = self.fleet.client();
        let mut answers = Vec::new();
        for ask in &self.asks {
            answers.push(client.ask(ask).await.expect("an answer").tokens);
        }
        answers
    }

    async fn serves_as_before(&self) {
        assert_eq!(self.ask().await, self.answers, "answers changed");
    }

    /// Returns the value of a process's counter, over all reasons.
    async fn refused(&self, client: &Client, what: &str) -> u64 {
        let page = client.get("/metrics").await.1;
        let of = |line: &str| {
            line.contains("_callers_refused_total{") && line.contains(&format!("what=\"{what}\""))
        };
        let counts = page.lines().filter(|line| of(line));
        counts.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).sum()
    }
}

/// Makes a stranger without a secret, and one with another cluster's secret.
fn strangers() -> [World; 2] {
    let other = Identity::of_cluster(ClusterSecret::new(b"the secret of another cluster"));
    [World::real(), World::real().with_identity(other)]
}

/// Tries calls, KV links and admin pages of every process, as each stranger.
async fn tries_everything(guarded: &Guarded) {
    let fleet = &guarded.fleet;
    let mut ports = vec![(fleet.http, fleet.grpc, None)];
    ports.extend(fleet.nodes.iter().map(|node| (node.admin, node.grpc, Some(node.kv))));
    for (admin, grpc, kv) in ports {
        let metrics = Client::new(admin);
        for world in strangers() {
            let calls = guarded.refused(&metrics, "call").await;
            let channel = channel(&world, &grpc.to_string(), ExpectedPeer::Registry, RpcLimits::default());
            for (what, _) in CALLS {
                let answer = in_time("an answer to a stranger", call(what, channel.clone())).await;
                let refused = answer.expect_err(what);
                assert_eq!(refused.code(), Code::Unauthenticated, "{what}: {refused}");
                assert!(refused.message().contains("cluster"), "{what}: {refused}");
            }
            assert_eq!(
                guarded.refused(&metrics, "call").await,
                calls + CALLS.len() as u64,
                "every refusal is counted"
            );
        }
        if let Some(kv) = kv {
            knocks_at_a_kv_port(guarded, &metrics, kv).await;
            tries_the_admin_port(guarded, &metrics).await;
        }
    }
}

async fn knocks_at_a_kv_port(guarded: &Guarded, metrics: &Client, kv: std::net::SocketAddr) {
    let before = guarded.refused(metrics, "link").await;
    let mut stream = TcpStream::connect(kv).await.expect("it listens");
    stream.write_all(&[7; 256]).await.expect("a socket has room");
    let mut heard = Vec::new();
    // The link may end with a reset, because some of the test's bytes were not read, so the result is
    // ignored.
    let _ = in_time("the end of the link", stream.read_to_end(&mut heard)).await;
    assert!(heard.len() <= 36, "a stranger hears the challenge and nothing else: {} bytes", heard.len());
    eventually("the refusal to be counted", async || {
        (guarded.refused(metrics, "link").await > before).then_some(())
    })
    .await;
}

async fn tries_the_admin_port(guarded: &Guarded, admin: &Client) {
    let before = guarded.refused(admin, "page").await;
    let mut tried = 0;
    for page in ["/sleep", "/wake", "/role?role=both"] {
        let (status, _, body) = admin.post(page, "").await;
        // The page of a pool node may be missing, because a pool node does not sleep.
        if status.as_u16() != 404 {
            assert_eq!(status.as_u16(), 401, "{page}: {body}");
            assert!(body.contains("admin_key"), "{page}: {body}");
            tried += 1;
        }
    }
    assert_eq!(guarded.refused(admin, "page").await, before + tried);
    assert_eq!(admin.get("/live").await.0.as_u16(), 200, "probes need no key");
}

/// An announced node that does not exist. Counts the connections to its address.
struct Invented {
    info: v1::NodeInfo,
    connections: Arc<AtomicUsize>,
}

impl Invented {
    /// Makes a node that claims all properties of a node of the cluster, except its name and address.
    async fn like(id: &str, epoch: u64) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound").to_string();
        let connections = Arc::<AtomicUsize>::default();
        let count = Arc::clone(&connections);
        #[allow(clippy::disallowed_methods, reason = "it ends with the test")]
        tokio::spawn(async move {
            while listener.accept().await.is_ok() {
                count.fetch_add(1, Ordering::Relaxed);
            }
        });
        let protocol = Some(v1::ProtocolRange { min: 1, max: 2 });
        let (id, admin) = (id.to_owned(), free_addr().to_string());
        let role = v1::Role::Prefill.into();
        let info = v1::NodeInfo { id, epoch, role, address, admin, protocol, ..v1::NodeInfo::default() };
        Self { info, connections }
    }

    fn was_not_called(&self) {
        assert_eq!(self.connections.load(Ordering::Relaxed), 0, "{} was called", self.info.id);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strangers_are_refused_with_the_embedded_registry() {
    let guarded = Guarded::start(None).await;
    tries_everything(&guarded).await;
    let invented = [Invented::like("invented", 1).await, Invented::like("prefill-0", u64::MAX).await];
    for world in strangers() {
        for node in &invented {
            let channel = channel(
                &world,
                &guarded.fleet.grpc.to_string(),
                ExpectedPeer::Registry,
                RpcLimits::default(),
            );
            let announce = v1::AnnounceRequest { node: Some(node.info.clone()) };
            let refused = BootstrapClient::new(channel).announce(announce).await.expect_err("a stranger");
            assert_eq!(refused.code(), Code::Unauthenticated, "{refused}");
        }
    }
    guarded.serves_as_before().await;
    invented.iter().for_each(Invented::was_not_called);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strangers_are_refused_with_etcd() {
    let etcd = Etcd::start();
    let guarded = Guarded::start(Some(etcd.url(CLUSTER))).await;
    guarded.fleet.expect_log(ETCD_IS_ABUSED);
    tries_everything(&guarded).await;
    let invented = [Invented::like("invented", 1).await, Invented::like("prefill-0", u64::MAX).await];
    let client =
        EtcdClient::connect(&EtcdSettings::new(etcd.endpoints(), CLUSTER)).await.expect("etcd is up");
    let router = guarded.fleet.client();
    let mut expected = guarded.refused(&router, "entry").await;
    for (node, n_times) in invented.iter().zip([MANY, 1]) {
        let key = format!("/baton/{CLUSTER}/nodes/{}", node.info.id).into_bytes();
        let signed_elsewhere = Identity::of_cluster(ClusterSecret::new(b"the secret of another cluster"));
        let unsigned = node.info.encode_to_vec();
        let signed = signed_elsewhere.sign_entry(&key, unsigned.clone());
        for value in [unsigned, signed].into_iter().cycle().take(2 * n_times) {
            let put = PutRequest { key: key.clone(), value, lease: 0 };
            in_time("etcd's answer", client.kv().put(put)).await.expect("etcd lets anyone write here");
        }
        expected += 2 * n_times as u64;
        eventually("the entries to be refused", async || {
            (guarded.refused(&router, "entry").await >= expected).then_some(())
        })
        .await;
    }
    let log = guarded.fleet.router.log();
    let n_lines = log.matches("member ignored").count();
    assert!((1..=4).contains(&n_lines), "a line for each member and cause: {log}");
    let page = router.get("/metrics").await.1;
    for reason in REASONS {
        let metric = format!("baton_router_callers_refused_total{{reason=\"{reason}\",what=\"entry\"}}");
        assert!(page.contains(&metric), "{metric} is missing in {page}");
    }
    guarded.serves_as_before().await;
    invented.iter().for_each(Invented::was_not_called);
    let cluster = router.get_json("/debug/cluster").await;
    let ids: Vec<_> =
        cluster["nodes"].as_array().expect("a list").iter().map(|node| node["id"].clone()).collect();
    assert!(!ids.contains(&"invented".into()), "{ids:?}");
}

/// A router of the cluster confuses two prompts: it names the landing of one for the KV of the other. That KV
/// is refused.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kv_of_one_prompt_does_not_land_for_another() {
    let mut fleet = Fleet::start(PACED, 1, 1).await;
    fleet.nodes.sort_by_key(|node| node.role);
    let [decode, prefill] = &fleet.nodes[..] else { panic!("two nodes") };
    let world = World::real();
    let channel_to = |addr: std::net::SocketAddr| {
        channel(&world, &addr.to_string(), ExpectedPeer::Registry, RpcLimits::default())
    };
    let (mut at_decode, mut at_prefill) =
        (DecodeClient::new(channel_to(decode.grpc)), PrefillClient::new(channel_to(prefill.grpc)));
    let prompt = |first: u32| v1::Prompt {
        request_id: format!("prompt-{first}"),
        tenant: "tenant".to_owned(),
        tokens: std::iter::once(first).chain(10..200).collect(),
        sampling: Some(v1::Sampling { top_p: 1.0, repetition_penalty: 1.0, ..v1::Sampling::default() }),
        stop: Some(v1::StopRules { max_tokens: 4, ..v1::StopRules::default() }),
        timeout_ms: 30_000,
        ..v1::Prompt::default()
    };
    for (computed, lands) in [(1, false), (2, true)] {
        let wires = vec![v1::WireAddress {
            scheme: "tcp".to_owned(),
            endpoint: prefill.kv.to_string(),
            within_host: false,
        }];
        let peer = v1::Peer { node: prefill.name.clone(), host: "elsewhere".to_owned(), wires };
        let offered = Some(v1::decode_request::Prefill::Offered(peer));
        let request = v1::DecodeRequest { prompt: Some(prompt(2)), prefill: offered, explain: false };
        let mut events = at_decode.run(request).await.expect("accepted").into_inner();
        let opening =
            in_time("a landing", events.message()).await.expect("a stream").and_then(|one| one.event);
        let Some(v1::decode_event::Event::Landing(landing)) = opening else { panic!("{opening:?}") };
        let destination = Some(v1::prefill_request::Destination::Landing(landing));
        let request = v1::PrefillRequest { prompt: Some(prompt(computed)), destination };
        let mut answers = at_prefill.run(request).await.expect("accepted").into_inner();
        let mut refusal = None;
        while let Some(answer) = in_time("an answer", answers.message()).await.expect("a stream") {
            if let Some(v1::prefill_answer::Answer::Refused(refused)) = answer.answer {
                refusal = Some(refused);
            }
        }
        if lands {
            assert_eq!(refusal, None, "its own KV lands");
            let arrived =
                in_time("the KV", events.message()).await.expect("a stream").and_then(|one| one.event);
            assert!(matches!(arrived, Some(v1::decode_event::Event::Arrived(_))), "{arrived:?}");
        } else {
            let refusal = refusal.expect("the other prompt's KV is refused");
            assert_eq!(refusal.code, "landing", "{refusal:?}");
            assert!(futures::poll!(Box::pin(events.message())).is_pending(), "nothing has arrived");
        }
    }
}

#[test]
fn a_process_that_others_reach_needs_a_secret() {
    let group: &[_] = &[
        ("BATON_EXPERT__MODEL__PROCESSES", "2"),
        ("BATON_EXPERT__MODEL__JOIN", "0.0.0.0:0"),
        ("BATON_EXPERT__MODEL__JOIN_MS", "100"),
        ("BATON_MODEL__DEVICE", "cpu"),
    ];
    for (role, settings) in [
        ("prefill", &[("BATON_NODE__LISTEN", "0.0.0.0:0")][..]),
        ("decode", &[("BATON_TRANSFER__LISTEN", "[::]:0")]),
        ("pool", &[("BATON_NODE__LISTEN", "0.0.0.0:0")]),
        ("router", &[("BATON_ROUTER__GRPC", "0.0.0.0:0")]),
        ("prefill", group),
    ] {
        let output = std::process::Command::new(executable::baton())
            .arg(role)
            .envs(settings.iter().copied())
            .output()
            .expect("baton starts");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{role}: {said}");
        assert!(said.contains("`cluster.secret_file`"), "{role}: {said}");
        assert!(said.contains("`cluster.insecure = true`"), "{role}: {said}");
    }
}
