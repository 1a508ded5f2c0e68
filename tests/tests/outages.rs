//! Tests of outages of etcd: it is away for a second and for ten, comes back with and without its data, or
//! loses leases, its history, or one of its members. Requests continue, no node is forgotten, and every node
//! announces itself again.

#![allow(clippy::large_futures, reason = "a test awaits them a few times")]

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use baton_tests::check::prompts;
use baton_tests::logs::THE_REGISTRY_IS_AWAY;
use baton_tests::{Ask, Etcd, Node, Up, Wire, eventually, executable, undisturbed};
use futures::future::join_all;
use registry::etcd::client::{prefix_end, v3};
use registry::etcd::{EtcdClient, EtcdSettings};
use tokio::time::{Instant, sleep};

/// A mock whose steps take time, so that there is always a stream in the middle.
const PACED: &str = concat!("mock:", env!("CARGO_MANIFEST_DIR"), "/mocks/paced.toml");
const CLUSTER: &str = "outages";
/// The number of streams at one time.
const CLIENTS: usize = 4;
/// The longest outage in seconds; `TEST_OUTAGE_S` sets a longer one.
const OUTAGE_S: u64 = 10;

fn outage() -> Duration {
    let asked = std::env::var("TEST_OUTAGE_S").ok();
    Duration::from_secs(asked.map_or(OUTAGE_S, |text| text.parse().expect("TEST_OUTAGE_S is a number")))
}

fn url(endpoint: impl std::fmt::Display) -> String {
    format!("etcd://{endpoint}/{CLUSTER}")
}

/// Starts two nodes of each kind that find each other at `url`.
async fn cluster(url: &str) -> Up {
    let up = Up::start(&["--model", PACED, "--prefill", "2", "--decode", "2", "--registry", url]).await;
    up.expect_log(THE_REGISTRY_IS_AWAY);
    up
}

fn asks() -> Vec<Ask> {
    prompts(23, 12, 120)
        .into_iter()
        .map(|prompt| Ask::new(prompt, 40).with("ignore_eos", true.into()))
        .collect()
}

/// Sends requests while `trouble` runs. A wrong answer fails the test, and so does a change of the cluster's
/// state as seen from outside.
async fn through(up: &Up, trouble: impl Future<Output = ()>) {
    let asks = asks();
    let expected = undisturbed(&asks).await;
    let before = up.nodes().await;
    let (over, next) = (AtomicBool::new(false), AtomicUsize::new(0));
    let one = async || {
        while !over.load(Ordering::Relaxed) {
            let idx = next.fetch_add(1, Ordering::Relaxed) % asks.len();
            let answer = up.client().ask(&asks[idx]).await.expect("etcd is not on the way of a request");
            assert_eq!(answer.tokens, expected[idx].tokens, "request {idx}");
        }
    };
    let look = async {
        while !over.load(Ordering::Relaxed) {
            assert_eq!(up.nodes().await, before, "the same nodes, in the same lives, and all usable");
            sleep(Duration::from_millis(200)).await;
        }
    };
    let trouble = async {
        trouble.await;
        over.store(true, Ordering::Relaxed);
    };
    tokio::join!(join_all((0..CLIENTS).map(|_| one())), look, trouble);
    assert!(next.into_inner() > CLIENTS, "requests ran meanwhile");
}

async fn etcd_client(etcd: &Etcd) -> EtcdClient {
    eventually("etcd to answer", async || {
        let client = EtcdClient::connect(&EtcdSettings::new(etcd.endpoints(), CLUSTER)).await.ok()?;
        tokio::time::timeout(Duration::from_secs(2), announced(&client)).await.ok()??;
        Some(client)
    })
    .await
}

/// Returns the keys of the members, and etcd's revision; `None` if the requested etcd member is away.
async fn announced(client: &EtcdClient) -> Option<(Vec<Vec<u8>>, i64)> {
    let prefix = format!("/baton/{CLUSTER}/nodes/");
    let range_end = prefix_end(&prefix);
    let members = v3::RangeRequest { key: prefix.into_bytes(), range_end, keys_only: true };
    let answer = client.kv().range(members).await.ok()?.into_inner();
    let keys = answer.kvs.into_iter().map(|entry| entry.key).collect();
    Some((keys, answer.header.expect("it has one").revision))
}

/// Waits until all nodes have announced themselves. Returns the number of writes.
async fn all_announced(etcd: &Etcd, nodes: &[Node]) -> i64 {
    let client = etcd_client(etcd).await;
    eventually("everybody to be announced", async || {
        let (keys, revision) = announced(&client).await?;
        (keys.len() == nodes.len()).then_some(revision)
    })
    .await
}

/// Checks that the nodes stop writing, because each is announced once.
async fn is_calm(etcd: &Etcd) {
    let client = etcd_client(etcd).await;
    let (_, before) = announced(&client).await.expect("etcd answers");
    sleep(Duration::from_secs(3)).await;
    let (_, after) = announced(&client).await.expect("etcd answers");
    assert_eq!(after, before, "signs of life write nothing");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_may_be_away_for_seconds_and_come_back_with_its_data() {
    let mut etcd = Etcd::start();
    let up = cluster(&url(etcd.endpoints()[0].as_str())).await;
    let nodes = up.nodes().await;
    let trouble = async {
        for away in [Duration::from_secs(1), outage()] {
            etcd.kill();
            sleep(away).await;
            etcd.restart();
            all_announced(&etcd, &nodes).await;
        }
        is_calm(&etcd).await;
    };
    through(&up, trouble).await;
    up.baseline().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_role_that_no_router_knows_yet_is_told_as_such() {
    let mut etcd = Etcd::start();
    let up = cluster(&url(etcd.endpoints()[0].as_str())).await;
    let decode = up.of_role("decode").await.swap_remove(0);
    etcd.kill();
    let said = executable::run(&["admin", "role", &decode.admin, "both", "--force"]).stdout;
    assert!(
        said.contains("role changed after") && said.contains("routers get the change when it does"),
        "{said}"
    );
    let role = async || up.nodes().await.into_iter().find(|node| node.id == decode.id).map(|node| node.role);
    assert_eq!(role().await.as_deref(), Some("decode"), "the router does not know");
    etcd.restart();
    eventually("the router to know", async || (role().await? == "both").then_some(())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_empty_etcd_is_told_of_everybody_again() {
    let mut etcd = Etcd::start();
    let up = cluster(&url(etcd.endpoints()[0].as_str())).await;
    let nodes = up.nodes().await;
    let trouble = async {
        etcd.kill();
        sleep(Duration::from_secs(1)).await;
        etcd.restart_empty();
        let writes = all_announced(&etcd, &nodes).await;
        // Each node writes its key at most twice, because a lease that was granted while etcd still started may be
        // lost.
        assert!(writes <= 2 + 2 * nodes.len() as i64, "{writes} writes for {} nodes", nodes.len());
        is_calm(&etcd).await;
    };
    through(&up, trouble).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_leases_and_a_forgotten_history_change_nothing() {
    let etcd = Etcd::start();
    let wire = Wire::to(etcd.endpoints()[0].clone()).await;
    let up = cluster(&url(wire.addr)).await;
    let nodes = up.nodes().await;
    let client = etcd_client(&etcd).await;
    let leases = client.lease().lease_leases(v3::LeaseLeasesRequest {}).await.expect("etcd answers");
    let leases = leases.into_inner().leases;
    assert_eq!(leases.len(), nodes.len(), "a lease for each");
    for v3::LeaseStatus { id } in leases {
        client.lease().lease_revoke(v3::LeaseRevokeRequest { id }).await.expect("it is there");
    }
    // The nodes must announce themselves again, because etcd itself has removed them.
    all_announced(&etcd, &nodes).await;
    eventually("everybody to be usable", async || {
        let now = up.nodes().await;
        (now.len() == nodes.len() && now.iter().all(|node| node.state == "ready")).then_some(())
    })
    .await;
    let trouble = async {
        let (_, revision) = announced(&client).await.expect("etcd answers");
        let key = b"/elsewhere".to_vec();
        let put = v3::PutRequest { key, value: b"a later revision".to_vec(), lease: 0 };
        client.kv().put(put).await.expect("etcd answers");
        client.kv().compact(v3::CompactionRequest { revision }).await.expect("there is history");
        wire.cut();
        all_announced(&etcd, &nodes).await;
        is_calm(&etcd).await;
    };
    through(&up, trouble).await;
    assert_eq!(up.nodes().await, nodes, "in the lives that they had");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_of_three_members_are_enough() {
    let mut etcd = Etcd::of(3);
    drop(etcd_client(&etcd).await);
    let up = cluster(&etcd.url(CLUSTER)).await;
    let nodes = up.nodes().await;
    for nth in 0..2 {
        let trouble = async {
            etcd.kill_one(nth);
            sleep(Duration::from_secs(3)).await;
            if nth == 0 {
                all_announced(&etcd, &nodes).await;
                etcd.restart();
                all_announced(&etcd, &nodes).await;
            }
        };
        through(&up, trouble).await;
    }
}

/// The bytes and the connections that one node may use for its registry per second: keep-alives, and attempts
/// while etcd is away.
const BYTES_PER_SECOND_MAX: f64 = 2_000.0;
const CONNECTIONS_PER_SECOND_MAX: f64 = 4.0;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn traffic_with_the_registry_is_bounded() {
    let mut etcd = Etcd::start();
    let wire = Wire::to(etcd.endpoints()[0].clone()).await;
    let up = cluster(&url(wire.addr)).await;
    let n_peers = (up.nodes().await.len() + 1) as f64;
    let count = async |during: Duration| {
        let (began, before) = (Instant::now(), wire.traffic());
        sleep(during).await;
        let (took, after) = (began.elapsed().as_secs_f64(), wire.traffic());
        let per_peer = |before: u64, after: u64| (after - before) as f64 / took / n_peers;
        (per_peer(before.connections, after.connections), per_peer(before.bytes, after.bytes))
    };
    // The traffic is measured under load, because requests must make no calls to the registry.
    let client = up.client();
    let asks = asks();
    let load = join_all(asks.iter().map(|ask| client.ask(ask)));
    let ((connections, bytes), answers) = tokio::join!(count(Duration::from_secs(6)), load);
    assert!(answers.iter().all(Result::is_ok));
    eprintln!("with etcd: {connections:.2} connections and {bytes:.0} bytes a second for each");
    assert!(connections < 0.1 && bytes < BYTES_PER_SECOND_MAX, "{connections} connections, {bytes} bytes");
    etcd.kill();
    let (connections, bytes) = count(Duration::from_secs(6)).await;
    eprintln!("without it: {connections:.2} connections and {bytes:.0} bytes a second for each");
    assert!(connections < CONNECTIONS_PER_SECOND_MAX, "{connections} connections a second");
    assert!(bytes < BYTES_PER_SECOND_MAX, "{bytes} bytes a second");
}
