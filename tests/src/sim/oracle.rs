//! Checks during and after a run.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::{Instant, sleep};
use types::{BlockChange, NodeId, Role};

use super::host::{Hosts, LifeSeen, NodeHost, RouterHost};
use super::log::EventLog;
use super::plan::{MODELS, Plan};
use super::run::RunCounts;
use super::watcher::Watcher;

/// The time within which blocks must come back after the last request. An ended life may keep blocks for its
/// requests until their deadlines.
const GIVEN_BACK_WITHIN: Duration = Duration::from_secs(20);

/// Checks that every block of every life is back, and that no node and no router has work.
pub async fn everything_is_given_back(hosts: &Hosts, log: &EventLog) {
    let give_up = Instant::now() + GIVEN_BACK_WITHIN;
    loop {
        let of_routers = hosts.routers.iter().filter_map(RouterHost::left_over);
        let missing: Vec<String> = hosts.nodes.iter().flat_map(missing).chain(of_routers).collect();
        if missing.is_empty() {
            break;
        }
        if Instant::now() > give_up {
            missing.iter().for_each(|what| log.accuse(what));
            break;
        }
        sleep(Duration::from_millis(250)).await;
    }
    for LifeSeen { name, pool, .. } in hosts.nodes.iter().flat_map(NodeHost::lives) {
        if let Err(error) = pool.integrity() {
            log.accuse(format_args!("{name}: block pool integrity check failed: {error}"));
        }
    }
}

fn missing(node: &NodeHost) -> Vec<String> {
    let lives = node.lives();
    let of_pools = lives.iter().filter_map(missing_blocks);
    of_pools.chain(node.life().as_ref().and_then(work_left)).collect()
}

fn missing_blocks(LifeSeen { name, pool, .. }: &LifeSeen) -> Option<String> {
    let counts = pool.counts();
    if counts.leased == 0 && counts.quarantined == 0 && counts.adds_up() {
        return None;
    }
    let held = pool.ledger().into_iter().filter_map(|entry| entry.holder).collect::<Vec<_>>();
    Some(format!("{name}: blocks are not given back: {counts:?}, held by {held:?}"))
}

fn work_left(life: &LifeSeen) -> Option<String> {
    let load = life.worker.load().borrow().node;
    let holders = life.gate.holders();
    let is_idle = load.running == 0 && load.waiting == 0 && life.arriving.count() == 0;
    let left = || format!("work is left: {load:?}, arriving {}, {holders:?}", life.arriving.count());
    (!is_idle || !holders.is_empty()).then(left)
}

/// Checks that no router exceeds its retry budget. The budget bounds the failed attempts between two steps,
/// for the step itself and for finding a decode node for held KV.
pub fn attempts(routers: &[RouterHost], plan: &Plan, tally: RunCounts, n_probes: u64, log: &EventLog) {
    let n_requests = u64::from(tally.n_requests()) + n_probes;
    // Steps count at most once per request: a step that arrives gives its request a new budget, but only
    // failures use it, and most steps come without a failure.
    let chances = u64::from(tally.steps).min(n_requests) + n_requests;
    let (failed, bound) = (
        routers.iter().map(RouterHost::n_failed_attempts).sum::<u64>(),
        2 * u64::from(plan.cluster.attempts_max) * chances,
    );
    let continued = routers.iter().map(RouterHost::n_continuations).sum::<u64>();
    if failed + continued > 0 && !plan.attempts_may_fail {
        log.accuse(format_args!(
            "{failed} attempts failed and {continued} streams were continued; nothing was broken"
        ));
    }
    if failed > bound {
        log.accuse(format_args!("{failed} attempts failed, {bound} may for {n_requests} requests"));
    }
}

/// Checks that each model has a node that prefills and one that decodes, whatever routers move.
pub fn every_kind_is_there(hosts: &Hosts, log: &EventLog) {
    for model in MODELS {
        let nodes = || hosts.nodes.iter().filter(|node| node.shape.model == model);
        let is_there =
            |does: fn(Role) -> bool| nodes().any(|node| node.life().is_some_and(|life| does(life.role)));
        if nodes().next().is_some() && !(is_there(Role::prefills) && is_there(Role::decodes)) {
            log.accuse(format_args!("no node of {model} prefills, or none decodes"));
        }
    }
}

/// Returns whether a running node is no member: it sleeps, drains or changes its role, or has just begun. `false` while
/// there is no registry.
pub fn has_left(hosts: &Hosts, node: &NodeHost) -> bool {
    let registry = hosts.routers.first().filter(|router| router.cluster().is_some());
    let is_missing = |router: &RouterHost, life: &LifeSeen| {
        !router
            .members()
            .iter()
            .any(|member| member.id.as_str() == node.shape.name && member.epoch == life.epoch)
    };
    let life = node.life().filter(|_| node.is_running());
    registry.zip(life).is_some_and(|(router, life)| is_missing(router, &life))
}

/// The time within which a request's blocks must be back after its deadline, whatever the faults.
const OUTLIVES_BY: Duration = Duration::from_secs(1);

/// A request that a client has sent to a router.
#[derive(Debug)]
pub struct Asked {
    pub router: &'static str,
    /// Time since the start of the run.
    pub at: Duration,
    pub within: Duration,
}

/// The deadlines of requests, and the times since when nodes hold blocks for them.
#[derive(Debug, Default)]
pub struct Lifetimes {
    pub asked: BTreeMap<String, Asked>,
    /// The time at which a holder was first seen, by node life and holder.
    held_since: BTreeMap<(String, String), Duration>,
}

impl Lifetimes {
    /// Checks the routers' lines, and that no node keeps blocks for a request past its end, or needs new work to notice the end.
    pub fn check(&mut self, hosts: &Hosts, plan: &Plan, now: Duration, log: &EventLog) {
        for router in &hosts.routers {
            if let Err(error) = router.integrity() {
                log.accuse(format_args!("{}: integrity check of the lines failed: {error}", router.name));
            }
        }
        let mut held_since = BTreeMap::new();
        for node in &hosts.nodes {
            for life in node.lives() {
                for holder in holders(&life) {
                    let key = (life.name.clone(), holder);
                    let seen = self.held_since.get(&key).copied().unwrap_or(now);
                    // A second try that waited for a stopped node has the same holder as the first.
                    let went_on = node.went_on_ago().map_or(Duration::ZERO, |ago| now.saturating_sub(ago));
                    let since = seen.max(went_on);
                    let is_over =
                        self.must_be_over(plan, &node.shape.name, &key.1, since).is_some_and(|at| at < now);
                    if is_over && node.keeps_time(OUTLIVES_BY) {
                        log.accuse(format_args!(
                            "{}: blocks outlive their request, held since {since:?}: {}",
                            key.0, key.1
                        ));
                    }
                    held_since.insert(key, since);
                }
            }
        }
        self.held_since = held_since;
    }

    /// Returns the time by which a node must have released blocks that it holds since `since`.
    fn must_be_over(&self, plan: &Plan, node: &str, holder: &str, since: Duration) -> Option<Duration> {
        let name = holder.find("request ").or_else(|| holder.find("probe ")).map(|at| &holder[at..])?;
        let Asked { router, at, within } = self.asked.get(name)?;
        Some(*at + *within + plan.late_by((router, node), *at, since) + OUTLIVES_BY)
    }
}

/// Returns the holders of blocks in a node's life.
fn holders(life: &LifeSeen) -> BTreeSet<String> {
    if life.pool.counts().leased == 0 {
        return BTreeSet::new();
    }
    life.pool.ledger().into_iter().filter_map(|entry| entry.holder).collect()
}

/// The time for which a watcher may be wrong: a lease, for members that a new registry does not know yet.
const WATCHED_WITHIN: Duration = Duration::from_secs(15);

/// Checks that a remote watcher knows the same members as the registry.
pub async fn watched(router: &RouterHost, watcher: &Watcher, log: &EventLog) {
    let give_up = Instant::now() + WATCHED_WITHIN;
    loop {
        let lives = |node: &types::NodeInfo| (node.id.clone(), node.epoch);
        let known: BTreeSet<_> = watcher.members().iter().map(lives).collect();
        let members: BTreeSet<_> = router.members().iter().map(lives).collect();
        if known == members {
            return;
        }
        if Instant::now() > give_up {
            return log.accuse(format_args!("a watcher knows {known:?} instead of {members:?}"));
        }
        sleep(Duration::from_millis(250)).await;
    }
}

/// The time for which the router may be wrong about cached blocks: within it a broken status stream is opened
/// again.
const MIRRORED_WITHIN: Duration = Duration::from_secs(10);

/// Checks that the router's copy of every prefix cache equals the cache.
pub async fn mirrored(hosts: &Hosts, log: &EventLog) {
    let give_up = Instant::now() + MIRRORED_WITHIN;
    loop {
        let pairs =
            hosts.routers.iter().flat_map(|router| hosts.nodes.iter().map(move |node| (router, node)));
        let wrong: Vec<String> = pairs.filter_map(|(router, node)| unlike(router, node)).collect();
        if wrong.is_empty() {
            return;
        }
        if Instant::now() > give_up {
            return wrong.iter().for_each(|what| log.accuse(what));
        }
        sleep(Duration::from_millis(250)).await;
    }
}

fn unlike(router: &RouterHost, node: &NodeHost) -> Option<String> {
    let (life, cluster) = (node.life()?, router.cluster()?);
    let first = life.pool.events().try_next().map(|first| first.event.change);
    let Some(BlockChange::Snapshot(held)) = first else {
        return Some(format!("{}: its events do not begin with a snapshot", node.shape.name));
    };
    let cache = cluster.cache(&NodeId::new(node.shape.name.clone()));
    if cache.as_ref().is_some_and(|cache| cache.has_exactly(&held)) {
        return None;
    }
    let known = cache.and_then(|cache| cache.n_cached());
    Some(format!("{}: the router knows {known:?} cached blocks of {}", node.shape.name, held.len()))
}

/// Checks that a node that was silent for a whole lease is not a member.
pub fn is_gone(router: &RouterHost, name: &str, log: &EventLog) {
    let is_it = |node: &types::NodeInfo| node.id.as_str() == name;
    let followed = router.cluster().map(router::Cluster::everyone).unwrap_or_default();
    if router.members().iter().any(is_it) || followed.iter().any(|(node, _)| is_it(node)) {
        log.accuse(format_args!("{name} is gone for a whole lease, and still a member"));
    }
}
