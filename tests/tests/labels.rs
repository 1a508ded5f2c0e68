//! Names in requests become no metric labels, and stay in no process's memory.

use std::collections::BTreeSet;

use baton_tests::process::resident_kib;
use baton_tests::{Ask, Client, Fleet, Up, eventually};
use futures::future::join_all;

/// The number of requests, each with different names.
const REQUESTS: usize = 4_000;
/// The number of concurrent requests.
const AT_ONCE: usize = 50;
/// The largest growth of the router's memory in KiB. If the names of requests were kept, it would be 16 MiB
/// and more.
const GROWTH_KIB: u64 = 8 << 10;

/// Makes a request with new names only, of 4 KiB together.
fn ask(nth: usize) -> Ask {
    let long = |name: &str| format!("{name}-{nth}-{}", "x".repeat(1_000));
    let tenant = format!("tenant-{nth}");
    let ask = Ask::new(vec![(nth % 256) as u32; 8], 2).header("x-request-id", format!("id-{nth}"));
    let ask = ask.header("x-baton-tenant", tenant).with("user", long("user").into());
    let ask = ask.with("metadata", serde_json::json!({ "a": long("a"), "b": long("b") }));
    if nth.is_multiple_of(3) {
        ask.with("model", long("model").into())
    } else {
        ask.with("stop", [long("stop")].into_iter().collect())
    }
}

async fn wave(client: &Client, from: usize, count: usize) {
    for first in (from..from + count).step_by(AT_ONCE) {
        let asks: Vec<Ask> = (first..first + AT_ONCE).map(ask).collect();
        for (nth, answer) in join_all(asks.iter().map(|ask| client.ask(ask))).await.into_iter().enumerate() {
            let is_known = !(first + nth).is_multiple_of(3);
            assert_eq!(answer.is_ok(), is_known, "{:?}", answer.map(|answer| answer.tokens));
        }
    }
}

/// Returns every series of a page, without its value.
async fn series(clients: &[Client]) -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    for (nth, client) in clients.iter().enumerate() {
        let page = client.get("/metrics").await.1;
        let lines = page.lines().filter(|line| !line.starts_with('#'));
        all.extend(lines.filter_map(|line| Some(format!("{nth} {}", line.rsplit_once(' ')?.0))));
    }
    all
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_that_requests_choose_make_no_series_and_no_memory() {
    let up = Up::start_with(&["--colocated"], &[("BATON_ROUTER__TRUSTED_PROXIES", "[\"127.0.0.1\"]")]).await;
    let nodes = up.nodes().await;
    let of_nodes = nodes.iter().map(|node| Client::new(node.admin.parse().expect("an address")));
    let clients: Vec<Client> = std::iter::once(up.client()).chain(of_nodes).collect();
    wave(&up.client(), 0, 10 * AT_ONCE).await;
    let before = (series(&clients).await, resident_kib(up.pid()).expect("the router lives"));
    wave(&up.client(), 10 * AT_ONCE, REQUESTS).await;
    let after = (series(&clients).await, resident_kib(up.pid()).expect("the router lives"));
    assert!(before.0.len() > 100, "{:?}", before.0);
    let new: Vec<_> = after.0.difference(&before.0).collect();
    assert!(new.is_empty(), "{new:?}");
    assert!(after.1 < before.1 + GROWTH_KIB, "{} KiB, and {} KiB before", after.1, before.1);
}

/// Models that are served one after the other, each by a node that comes and goes: first as many as the
/// router counts by name, and a few more, then the others.
const MODELS: (usize, usize) = (35, 15);

/// Starts a node that serves a new model, sends it a request, and stops it.
async fn serve_for_a_moment(fleet: &mut Fleet, nth: usize) {
    let model = format!("model-{nth}-{}", "x".repeat(200));
    fleet.add_with("decode", nth, "mock", vec![("BATON_MODEL__NAME", model.clone())]);
    fleet.all_ready().await;
    let ask = Ask::new(vec![(nth % 256) as u32; 40], 2).with("model", model.as_str().into());
    let client = fleet.client();
    eventually("the model to answer", async || client.ask(&ask).await.ok()).await;
    let mut node = fleet.nodes.pop().expect("it was added");
    node.process.stop().await;
    eventually("the model to be forgotten", async || {
        let models = client.get_json("/v1/models").await;
        models["data"].as_array().is_some_and(Vec::is_empty).then_some(())
    })
    .await;
}

/// F31: names of models are on pages while nodes serve them, and in no memory afterwards, but for a bounded
/// number of series.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn models_that_come_and_go_leave_no_memory() {
    let mut fleet = Fleet::start("mock", 0, 0).await;
    let clients = [Client::new(fleet.http)];
    for nth in 0..MODELS.0 {
        serve_for_a_moment(&mut fleet, nth).await;
    }
    let resident = |fleet: &Fleet| resident_kib(fleet.router.pid()).expect("the router lives");
    let before = (series(&clients).await, resident(&fleet));
    for nth in MODELS.0..MODELS.0 + MODELS.1 {
        serve_for_a_moment(&mut fleet, nth).await;
    }
    let after = (series(&clients).await, resident(&fleet));
    let new: Vec<_> = after.0.difference(&before.0).collect();
    assert!(new.is_empty(), "{new:?}");
    assert!(after.1 < before.1 + GROWTH_KIB, "{} KiB, and {} KiB before", after.1, before.1);
}
