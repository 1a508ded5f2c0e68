//! When tokens stop, `/ready` fails within five seconds and names the stage. When they move again, it
//! succeeds.

use std::sync::Arc;
use std::time::Duration;

use baton_tests::fleet::{Fleet, PACED};
use baton_tests::logs::A_NODE_STANDS_STILL;
use baton_tests::{Ask, Client, Stopwatch, eventually, in_time};
use chassis::metrics::Metrics;
use chassis::{Gate, Shutdown, Task, World, spawn_guarded};
use decode_node::DecodeService;
use engine::backend::flaky::{Failures, Flaky};
use engine::{Backend as _, Mock, MockSettings, Pace};
use kv_cache::KvMemory;
use node::{Drive, Lives, NodeConfig, NodeParts, RawNodeConfig};
use registry::RegistryParts;
use router::{RawRouterConfig, Router, RouterConfig};
use rustix::process::Signal;
use tokio::time::{Instant, sleep};
use tonic::service::Routes;
use types::{NodeId, Role};

/// The time within which `/ready` must change.
const SAID_WITHIN: Duration = Duration::from_secs(5);
/// The time for which the engine hangs.
const HANGS_FOR: Duration = Duration::from_secs(9);

/// Starts a router in this process.
async fn router() -> (Client, String, Task<()>, Shutdown) {
    let mut raw = RawRouterConfig::default();
    (raw.router.http, raw.router.grpc) = ("127.0.0.1:0".to_owned(), "127.0.0.1:0".to_owned());
    let config = RouterConfig::resolve(raw).expect("right settings");
    let router = Router::bind(World::real(), config).await.expect("free ports");
    let (client, registry) = (Client::new(router.http_addr()), format!("embedded://{}", router.grpc_addr()));
    let shutdown = Shutdown::new();
    let serving = router.serve(shutdown.clone(), std::future::ready(()));
    let serving = spawn_guarded(&Gate::new("test"), "router", async move { drop(serving.await) });
    (client, registry, serving, shutdown)
}

/// How long the end of the engine takes.
const ENDS_IN: Duration = Duration::from_millis(300);

/// Starts a node for prefill and decode in this process, with a mock whose third step and whose end are late. Also returns the
/// mock's memory.
async fn node_that_hangs(registry: String) -> (Client, Task<()>, Shutdown, KvMemory) {
    let mut raw = RawNodeConfig::default();
    raw.registry.url.clone_from(&registry);
    raw.transfer.connectors = vec!["tcp".to_owned()];
    let config = NodeConfig::resolve(raw).expect("right settings");
    let world = World::real();
    let grpc = world.net().listen("127.0.0.1:0").await.expect("a free port");
    let admin = world.net().listen("127.0.0.1:0").await.expect("a free port");
    let client = Client::new(admin.local_addr().expect("bound"));
    let mock =
        Mock::new("mock", MockSettings::default(), 64, Pace::Sleeping).expect("memory for a few blocks");
    let memory = mock.memory().clone();
    let failures = Failures { hang: [(2, HANGS_FOR)].into(), end_takes: ENDS_IN, ..Failures::default() };
    let (id, backend) = (NodeId::new("hanging"), Box::new(Flaky::new(mock, failures)));
    let shutdown = Shutdown::new();
    let asked = shutdown.clone();
    let living = spawn_guarded(&Gate::new("test"), "node", async move {
        let gate = Gate::new("registry");
        let registry_parts = RegistryParts { world: world.clone(), gate };
        let registry = registry::open(&config.registry_url, registry_parts).expect("an address");
        let services = |_, parts: &NodeParts| {
            Ok(Routes::new(DecodeService::new(parts.clone(), config.decode.clone()).server()))
        };
        let lives = Lives {
            config: &config,
            id,
            role: Role::Decode,
            registry: &*registry,
            services: &services,
            world,
            metrics: Metrics::new("node"),
            drive: Drive::Thread,
            shutdown: asked,
            grpc,
            admin,
            group: None,
        };
        drop(node::lives::run(lives, backend).await);
    });
    (client, living, shutdown, memory)
}

/// Waits until `/ready` has this status. Returns the time that it took, and the text.
async fn says(client: &Client, status: u16) -> (Duration, String) {
    let watch = Stopwatch::start();
    let body = eventually("health to change", async || {
        let (now, body) = client.get("/ready").await;
        (now.as_u16() == status).then_some(body)
    })
    .await;
    (watch.elapsed(), body)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_engine_that_hangs_is_named_and_left_out() {
    let (at_router, registry, serving, router_down) = router().await;
    let (at_node, living, node_down, memory) = node_that_hangs(registry).await;
    says(&at_node, 200).await;
    says(&at_router, 200).await;
    let ask = Arc::new(Ask::new((0..40).collect(), 8).with("ignore_eos", true.into()));
    let asked = async { in_time("an answer", at_router.ask(&ask)).await.expect("it was only late") };
    let watched = async {
        let node = async {
            let (took, reason) = says(&at_node, 503).await;
            assert!(took < SAID_WITHIN, "the node took {took:?}");
            assert!(reason.contains("step: the engine step has not returned"), "{reason}");
        };
        let router = async {
            let (took, reason) = says(&at_router, 503).await;
            assert!(took < SAID_WITHIN, "the router took {took:?}");
            let is_named = reason.contains("wait at decode") || reason.contains("hanging is unreachable");
            assert!(is_named, "{reason}");
        };
        tokio::join!(node, router);
        eventually("no request to be sent to the node", async || {
            let cluster = at_router.get_json("/debug/cluster").await;
            (cluster["nodes"][0]["state"] == "unreachable").then_some(())
        })
        .await;
    };
    let (answer, ()) = tokio::join!(asked, watched);
    assert_eq!(answer.tokens.len(), 8);
    says(&at_node, 200).await;
    says(&at_router, 200).await;
    at_router.ask(&ask).await.expect("it serves again");
    node_down.trigger();
    living.await.expect("the node ends");
    // A GPU's libraries crash if the process ends before the engine.
    assert_eq!(memory.n_holders(), 1, "the engine has ended before the node");
    router_down.trigger();
    serving.await.expect("the router ends");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stopped_peers_are_named_within_five_seconds() {
    for role in ["decode", "prefill"] {
        // The limit is shorter than the time after which the router takes a silent peer for dead, possibly
        // three seconds.
        let sooner = vec![("BATON_EXPERT__ROUTER__STUCK_MS", "2000".to_owned())];
        let fleet = Fleet::start_with(PACED, 1, 1, sooner).await;
        let client = fleet.client();
        let victim = fleet.nodes.iter().find(|node| node.role == role).expect("there is one");
        fleet.expect_log(A_NODE_STANDS_STILL);
        victim.process.signal(Signal::STOP);
        let ask = Ask::new((0..200).collect(), 8).header("x-baton-timeout-ms", 20_000);
        let asked = async { in_time("an end", client.ask(&ask)).await };
        let watched = async {
            let (took, reason) = says(&client, 503).await;
            assert!(took < SAID_WITHIN, "{role}: it took {took:?}");
            // The reason is the stage where requests wait, or the missing node.
            let places = ["wait at reserve", "wait at prefill", "wait at decode", "is unreachable"];
            assert!(places.iter().any(|place| reason.contains(place)), "{role}: {reason}");
        };
        let (ended, ()) = tokio::join!(asked, watched);
        if let Err(failed) = ended {
            assert!(["no_nodes", "failed", "wire", "deadline"].contains(&failed.code.as_str()), "{failed:?}");
        }
        victim.process.signal(Signal::CONT);
        says(&client, 200).await;
        fleet.all_ready().await;
        client.ask(&ask).await.expect("it serves again");
        fleet.baseline().await;
    }
}

/// A client that does not read does not make a node stuck, so `/ready` stays 200.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_that_sleeps_is_no_standstill() {
    let fleet = Fleet::start(PACED, 1, 1).await;
    let ask = Ask::new((0..40).collect(), 3_000).with("ignore_eos", true.into());
    let stream = fleet.client().stream(&ask).await.expect("a stream");
    let until = Instant::now() + Duration::from_secs(8);
    while Instant::now() < until {
        let (status, body) = fleet.client().get("/ready").await;
        assert_eq!(status, 200, "{body}");
        for node in &fleet.nodes {
            assert_eq!(node.readiness().await.0, 200, "{}", node.name);
        }
        sleep(Duration::from_millis(200)).await;
    }
    drop(stream);
    fleet.baseline().await;
}
