//! Tests of breakers: a table of events, and views.

use std::cell::RefCell;

use prometheus::{IntCounterVec, IntGauge, Opts};
use types::{Epoch, Role};

use super::*;
use crate::policy::tests::node as idle_node;
use crate::policy::{Arm, Choice, Decision, NoRoute, Terms};

fn at(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// An event of a breaker in a row of the table.
#[derive(Clone, Copy, Debug)]
enum Event {
    Fail,
    Begin,
    Abandon,
}

/// A row of the table: its name, events with their milliseconds, and the state after them.
type Row = (&'static str, &'static [(u64, Event)], BreakerState);

#[tokio::test(start_paused = true)]
async fn a_breaker_follows_the_table() {
    use Event::{Abandon, Begin, Fail};
    let start = Instant::now();
    let open = |ms| BreakerState::Open { until: start + at(ms) };
    let (closed, half) = (BreakerState::Closed, BreakerState::HalfOpen);
    let rows: &[Row] = &[
        ("two failures", &[(0, Fail), (0, Fail)], closed),
        ("three failures", &[(0, Fail), (0, Fail), (10, Fail)], open(1_010)),
        ("later failures of running work", &[(0, Fail), (0, Fail), (0, Fail), (500, Fail)], open(1_000)),
        ("a request before its time", &[(0, Fail), (0, Fail), (0, Fail), (999, Begin)], open(1_000)),
        ("a trial", &[(0, Fail), (0, Fail), (0, Fail), (1_000, Begin)], half),
        ("a second request", &[(0, Fail), (0, Fail), (0, Fail), (1_000, Begin), (1_001, Begin)], half),
        ("a failed trial", &[(0, Fail), (0, Fail), (0, Fail), (1_000, Begin), (1_100, Fail)], open(3_100)),
        (
            "a trial without a verdict",
            &[(0, Fail), (0, Fail), (0, Fail), (1_000, Begin), (1_200, Abandon)],
            open(1_200),
        ),
    ];
    for (name, events, expected) in rows {
        let mut breaker = Breaker::new(start);
        for (ms, event) in *events {
            let now = start + at(*ms);
            match event {
                Fail => _ = breaker.failed(now),
                Begin => _ = breaker.begin(now),
                Abandon => breaker.abandoned(now),
            }
        }
        assert_eq!(breaker.state(), *expected, "{name}");
    }
}

#[tokio::test(start_paused = true)]
async fn failed_trials_wait_longer_up_to_a_bound() {
    let mut breaker = Breaker::new(Instant::now());
    (0..FAILURES_MAX).for_each(|_| _ = breaker.failed(Instant::now()));
    let mut waits = Vec::new();
    for _ in 0..7 {
        let BreakerState::Open { until } = breaker.state() else { panic!("{breaker:?}") };
        waits.push((until - Instant::now()).as_secs());
        tokio::time::sleep_until(until).await;
        assert!(breaker.begin(Instant::now()));
        breaker.failed(Instant::now());
    }
    assert_eq!(waits, [1, 2, 4, 8, 16, 30, 30]);
}

fn node(id: &str, role: Role, epoch: u64) -> Arc<NodeInfo> {
    let info = NodeInfo::clone(&idle_node(id, role).info);
    Arc::new(NodeInfo { epoch: Epoch(epoch), ..info })
}

fn view(nodes: &[&Arc<NodeInfo>]) -> ClusterView {
    let seen = |info: &&Arc<NodeInfo>| NodeView { info: Arc::clone(info), ..idle_node("", info.role) };
    ClusterView { nodes: nodes.iter().map(seen).collect(), ..ClusterView::default() }
}

fn breakers() -> Breakers {
    let changes = IntCounterVec::new(Opts::new("changes", "c"), &["state"]).expect("a counter");
    Breakers::new(changes, IntGauge::new("open", "o").expect("a gauge"))
}

/// Chooses the first node of each kind.
fn first(view: &ClusterView) -> Result<Decision, NoRoute> {
    let decode = view.nodes.iter().find(|node| node.info.role.decodes()).ok_or(NoRoute::NoDecode)?;
    let prefill = view.prefill_nodes().next().map(|node| Arc::clone(&node.info));
    let route = Route { prefill, decode: Arc::clone(&decode.info) };
    let (arm, choice, terms) = (Arm::Remote, Choice::Rule, Terms::default());
    Ok(Decision { route, arm, choice, terms, regret_ms: 0.0, candidates: Vec::new() })
}

/// Routes to the first node of each kind, and returns the nodes that the policy saw.
fn route(breakers: &Breakers, view: ClusterView) -> (Vec<String>, Vec<Trial>) {
    let seen = RefCell::new(Vec::new());
    let chosen = breakers.route(view, Instant::now(), None, |view| {
        seen.borrow_mut().extend(view.nodes.iter().map(|node| node.info.id.to_string()));
        first(view)
    });
    (seen.into_inner(), chosen.expect("a route").1)
}

fn fail(breakers: &Breakers, node: &Arc<NodeInfo>, kind: RefusalKind, route: Option<&Route>) {
    breakers.failed(node, &Refusal::new(kind, "x"), route, Instant::now());
}

#[tokio::test(start_paused = true)]
async fn one_request_tries_the_node_and_its_success_closes_the_breaker() {
    let (breakers, a, b) = (breakers(), node("a", Role::Decode, 1), node("b", Role::Decode, 1));
    let both = || view(&[&a, &b]);
    for kind in [RefusalKind::Full, RefusalKind::Queue, RefusalKind::Draining, RefusalKind::Deadline] {
        (0..5).for_each(|_| fail(&breakers, &a, kind, None));
    }
    assert_eq!(route(&breakers, both()).0, ["a", "b"], "a node without room works well");
    (0..3).for_each(|_| fail(&breakers, &a, RefusalKind::Failed, None));
    assert_eq!(route(&breakers, both()).0, ["b"]);
    assert_eq!(breakers.0.n_open.get(), 1);
    tokio::time::sleep(at(1_000)).await;
    let (seen, trials) = route(&breakers, both());
    assert_eq!((seen, trials.len()), (vec!["a".to_owned(), "b".to_owned()], 1));
    assert_eq!(route(&breakers, both()).0, ["b"], "one request tries the node");
    drop(trials);
    let (seen, trials) = route(&breakers, both());
    assert_eq!((seen.len(), trials.len()), (2, 1), "the trial ended without a verdict");
    breakers.succeeded(&a.id);
    drop(trials);
    let (seen, trials) = route(&breakers, both());
    assert_eq!((seen.len(), trials.len()), (2, 0));
    assert_eq!(breakers.0.n_open.get(), 0);
}

#[tokio::test(start_paused = true)]
async fn the_last_of_a_kind_and_a_new_life_get_work() {
    let breakers = breakers();
    let (p, a, b) = (node("p", Role::Prefill, 1), node("a", Role::Decode, 1), node("b", Role::Both, 1));
    let all = || view(&[&p, &a, &b]);
    for node in [&p, &a] {
        (0..3).for_each(|_| fail(&breakers, node, RefusalKind::Failed, None));
    }
    assert_eq!(route(&breakers, all()).0, ["p", "b"], "p is the only prefill node");
    assert_eq!(route(&breakers, view(&[&p, &a])).0, ["p", "a"], "a is the last decode node");
    let reborn = node("a", Role::Decode, 2);
    assert_eq!(route(&breakers, view(&[&p, &reborn, &b])).0, ["p", "a", "b"]);
    fail(&breakers, &reborn, RefusalKind::Failed, None);
    assert_eq!(breakers.of(&reborn).map(|breaker| breaker.failures()), Some(1));
}

#[tokio::test(start_paused = true)]
async fn kv_that_is_lost_counts_against_both_nodes() {
    let breakers = breakers();
    let (p, d) = (node("p", Role::Prefill, 1), node("d", Role::Decode, 1));
    let route = Route { prefill: Some(Arc::clone(&p)), decode: Arc::clone(&d) };
    fail(&breakers, &p, RefusalKind::Wire, Some(&route));
    fail(&breakers, &p, RefusalKind::Failed, Some(&route));
    let failures = |node| breakers.of(node).map_or(0, |breaker| breaker.failures());
    assert_eq!((failures(&p), failures(&d)), (2, 1));
    tokio::time::sleep(FORGOTTEN_AFTER).await;
    fail(&breakers, &d, RefusalKind::Failed, None);
    assert_eq!((failures(&p), failures(&d)), (0, 1), "old failures are forgotten");
}

/// Routes to the first node of each kind. Returns their ids, and the trials.
fn ends(breakers: &Breakers, nodes: &[&Arc<NodeInfo>]) -> (String, Vec<Trial>) {
    let chosen = breakers.route(view(nodes), Instant::now(), None, first);
    let (Decision { route: Route { prefill, decode }, .. }, trials) = chosen.expect("a route");
    (format!("{} {}", prefill.map_or("-".to_owned(), |node| node.id.to_string()), decode.id), trials)
}

#[tokio::test(start_paused = true)]
async fn a_path_that_lost_kv_is_left_out_while_another_pair_exists() {
    let breakers = breakers();
    let [p, q] = ["p", "q"].map(|id| node(id, Role::Prefill, 1));
    let [d, e] = ["d", "e"].map(|id| node(id, Role::Decode, 1));
    let lose = |prefill: &Arc<NodeInfo>, decode: &Arc<NodeInfo>| {
        let route = Route { prefill: Some(Arc::clone(prefill)), decode: Arc::clone(decode) };
        fail(&breakers, prefill, RefusalKind::Wire, Some(&route));
        // Both work with others.
        [prefill, decode].into_iter().for_each(|node| breakers.succeeded(&node.id));
    };
    let all = [&p, &q, &d, &e];
    assert_eq!(ends(&breakers, &all).0, "p d");
    lose(&p, &d);
    let shown: Vec<[String; 2]> =
        breakers.paths().into_iter().map(|(ends, _)| ends.map(|id| id.to_string())).collect();
    assert_eq!(shown, [["p", "d"]]);
    assert_eq!(ends(&breakers, &all).0, "p e", "the other decode node");
    assert_eq!(ends(&breakers, &[&p, &q, &d]).0, "q d", "there is no other decode node");
    assert_eq!(ends(&breakers, &[&p, &d]).0, "p d", "the last pair, and not the decode node alone");
    assert_eq!(ends(&breakers, &[&p, &node("d", Role::Decode, 2)]).0, "p d", "another life");
    lose(&p, &e);
    assert_eq!(ends(&breakers, &all).0, "q d");
    tokio::time::sleep(at(1_000)).await;
    let (path, trial) = ends(&breakers, &all);
    assert_eq!((path.as_str(), trial.len()), ("p d", 1));
    assert_eq!(ends(&breakers, &[&p, &q, &d]).0, "q d", "one request tries the path");
    lose(&p, &d);
    drop(trial);
    tokio::time::sleep(at(1_999)).await;
    assert_eq!(ends(&breakers, &[&p, &q, &d]).0, "q d", "the time doubles");
    tokio::time::sleep(at(1)).await;
    let (path, trial) = ends(&breakers, &all);
    assert_eq!((path.as_str(), trial.len()), ("p d", 1));
    trial[0].kv_arrived();
    drop(trial);
    let (path, trial) = ends(&breakers, &all);
    assert_eq!((path.as_str(), trial.len()), ("p d", 0), "it works");
}

#[tokio::test(start_paused = true)]
async fn the_memory_of_paths_is_bounded_and_forgets() {
    let breakers = breakers();
    let d = node("d", Role::Decode, 1);
    for idx in 0..2_000 {
        let route =
            Route { prefill: Some(node(&format!("p{idx}"), Role::Prefill, 1)), decode: Arc::clone(&d) };
        fail(&breakers, &d, RefusalKind::Wire, Some(&route));
    }
    assert_eq!(breakers.failing().paths.len(), 1024);
    tokio::time::sleep(FORGOTTEN_AFTER).await;
    let route = Route { prefill: Some(node("p", Role::Prefill, 1)), decode: d.clone() };
    fail(&breakers, &d, RefusalKind::Wire, Some(&route));
    assert_eq!(breakers.failing().paths.len(), 1);
}
