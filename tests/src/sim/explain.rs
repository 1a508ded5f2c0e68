//! Decides whether a plan explains that a request was refused: a pure function of the plan, the request and
//! its end.
//!
//! Each fault breaks something from its time until it is mended, and for a bounded time after that, which
//! follows from the settings of the product. A refusal is explained only by an overlap with such an interval
//! on the request's own path: its router, the nodes of its model, and the network between them.
//! `docs/simulation.md` has the rules in a table.

use std::time::Duration;

use router::serve::ServeError;
use types::RefusalKind;

use super::host::{DRAIN_MS, NODES_WAIT_NEW};
use super::net::Crash;
use super::plan::{Ask, Break, Fault, MODELS, NodeShape, POOL, Plan, ROUTERS, TROUBLE};

/// The router's message if every node has left the cluster.
const NONE_KNOWN: &str = "no node is known";
/// The time until a router has a broken status stream again: it waits at most 2 s, and the call takes at most
/// 2 s.
const RECONNECT: Duration = Duration::from_secs(4);
/// The time until a connection that was usable is made again: it starts after 50 ms, and needs a few round
/// trips.
const RESET: Duration = Duration::from_secs(1);
/// The time until a node announces itself again: it tries after at most 1 s, and the call takes at most 3 s.
const REJOIN: Duration = Duration::from_secs(4);
/// The time for which a router that has just started waits for nodes that were there before it.
const SETTLE: Duration = Duration::from_secs(3);
/// The time until a peer that answers no ping is given up: an interval of 2 s, and 3 s for the answer.
const KEEPALIVE: Duration = Duration::from_secs(5);
/// The least time for which a silent node stays a member: a node renews its lease of 10 s every second.
const LEASE: Duration = Duration::from_secs(9);
/// The time that a node may need before it drains for another role: it waits for the change of another node.
const ROLE_WAIT: Duration = Duration::from_secs(3);
/// A time after the end of every request.
const END: Duration = Duration::from_secs(600);
/// The time for which a router waits for KV after it has lost the connection to the sender.
const ARRIVAL_GRACE: Duration = Duration::from_secs(1);
/// The longest pause of a request that waits for a usable node, in which it may miss a node that is usable
/// for a moment.
const LOOK_PAUSE: Duration = Duration::from_millis(200);
/// The number of messages, one after the other, that a new connection and its first answer need.
const ROUND_TRIPS: u32 = 4;
/// The time after the end of all faults at which the operator repeats the request to wake.
const WAKE_AGAIN: Duration = Duration::from_secs(2);
/// The least tokens of a prompt that a step computes, and the steps of a request that compute neither prompt
/// nor answer.
const STEP_TOKENS_MIN: f64 = 16.0;
const STEPS_BESIDE: f64 = 10.0;
/// The factor by which a request beside others may exceed its computed time: blocks do not always fit, and
/// sequences are preempted.
const CROWDED: f64 = 2.0;
/// The time after a request's end for which a node may still hold its blocks.
pub const SLACK: Duration = Duration::from_secs(1);

/// The end of a request that got no whole answer. Times count from the start of the run.
#[derive(Clone, Copy, Debug)]
pub struct End<'a> {
    pub asked: Duration,
    pub at: Duration,
    /// The number of steps that the client has received.
    pub n_steps: u32,
    /// The requests that were active in the meantime.
    pub beside: &'a [Ask],
    pub error: &'a ServeError,
}

/// A time in which something is broken, or has not recovered yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interval {
    pub from: Duration,
    pub to: Duration,
}

impl Interval {
    fn new(from: Duration, to: Duration) -> Self {
        Self { from, to: to.max(from) }
    }

    fn overlaps(&self, from: Duration, to: Duration) -> bool {
        self.from <= to && from <= self.to
    }
}

/// The times in which a fault affects a request's path.
#[derive(Clone, Copy, Debug)]
struct Broken {
    all: Interval,
    /// The time at which processes that wait for the broken part know that it is broken.
    noticed: Duration,
}

impl Break {
    /// Returns whether the fault takes a node away from a router.
    fn stops(&self, node: &str, router: &str) -> bool {
        match self {
            Self::Hold(one, other) | Self::Reset(one, other) => {
                [(&**one, &**other), (&**other, &**one)].contains(&(node, router))
            }
            Self::Crash(host, _)
            | Self::Stop(host)
            | Self::Drain(host)
            | Self::Sleep(host)
            | Self::Role(host, _) => host == node,
            _ => false,
        }
    }
}

impl Plan {
    /// Returns whether the plan explains this end of a request.
    pub fn explains(&self, ask: &Ask, end: End<'_>) -> bool {
        use RefusalKind as Kind;
        match end.error {
            ServeError::DeadlinePassed { .. } => self.makes_late(ask, end),
            // Only a request without steps can end this way: a stream that has begun waits for longer than
            // any fault lasts.
            ServeError::NoNodes { reason } => {
                // A router does not wait if all nodes have left, so the wait is zero then.
                let wait = if reason.contains(NONE_KNOWN) { Duration::ZERO } else { NODES_WAIT_NEW };
                end.n_steps == 0 && self.has_no_node(ask, end, wait)
            }
            ServeError::Refused { kind: Kind::Full | Kind::Queue, .. } => self.has_no_room(ask, end),
            ServeError::Refused {
                kind: Kind::Invalid | Kind::TooLong | Kind::Mismatch | Kind::Protocol,
                ..
            } => false,
            ServeError::Refused { reason, .. } if is_told_to_fail(reason) => {
                self.nodes_of(ask.model).any(|node| !node.failing_steps.is_empty())
            }
            ServeError::Refused { .. } => {
                self.broken(ask).iter().any(|broken| broken.overlaps(end.at, end.at))
            }
            ServeError::Overloaded { .. } | ServeError::Draining | ServeError::Failed { .. } => false,
        }
    }

    /// Returns whether the request has waited for a usable node as long as it had to, and each decode node
    /// may have been unusable all that time. A router that has just started may know no node, for which a
    /// request does not wait.
    fn has_no_node(&self, ask: &Ask, end: End<'_>, wait: Duration) -> bool {
        let router = ROUTERS[ask.router];
        if self.starts_of(router).iter().any(|start| start.overlaps(end.at, end.at)) {
            return true;
        }
        let since = end.at.saturating_sub(wait);
        let is_unusable = |node: &NodeShape| {
            let unusable = self.unusable(router, node);
            unusable.iter().any(|broken| broken.overlaps(end.at, end.at)) && cover(unusable, since, end.at)
        };
        let mut decode_nodes = self.nodes_of(ask.model).filter(|node| node.role.decodes());
        end.at.saturating_sub(end.asked) >= wait && decode_nodes.all(is_unusable)
    }

    /// Returns whether the request has waited for room as long as it may, and the active requests may need
    /// more blocks than the smallest node has.
    fn has_no_room(&self, ask: &Ask, end: End<'_>) -> bool {
        let all = of_its_model(ask, end.beside);
        // There may be two copies of a request's blocks: a node that did not get a cancellation keeps the
        // first while the second is reserved.
        let copies =
            if self.broken(ask).iter().any(|broken| broken.overlaps(end.asked, end.at)) { 2 } else { 1 };
        let queued_ms: f64 =
            all.iter().map(|one| self.prefill_ms(one) + self.decode_ms(one, all.len())).sum();
        let is_patient = end.at.saturating_sub(end.asked) >= self.cluster.wait_max;
        let may_be_full = |node: &NodeShape| {
            let blocks: usize = all.iter().map(|ask| blocks_of(ask, node)).sum();
            blocks * copies > node.n_blocks as usize
                || all.len() * copies > node.landings_max as usize
                || queued_ms * copies as f64 > node.queue_ms_max
        };
        is_patient && self.nodes_of(ask.model).any(may_be_full)
    }

    /// Returns whether the request had no undisturbed stretch of time that was long enough to serve it from
    /// the start beside the others.
    fn makes_late(&self, ask: &Ask, end: End<'_>) -> bool {
        let all = of_its_model(ask, end.beside);
        let n_failing: usize = self.nodes_of(ask.model).map(|node| node.failing_steps.len()).sum();
        let needed_ms = self.crowded_ms(ask, &all) + n_failing as f64 * self.undisturbed_ms(ask, &all);
        let needed = SLACK + self.slowness_of(ask) + Duration::from_secs_f64(needed_ms / 1000.0);
        longest_gap(self.delays(ask), end.asked, end.asked + ask.within) < needed
    }

    /// Returns the time that the request needs if it gets room at once: all prompts may be computed before
    /// it, and its answer beside all others.
    fn undisturbed_ms(&self, ask: &Ask, all: &[&Ask]) -> f64 {
        let prompts_ms: f64 = all.iter().map(|ask| self.prefill_ms(ask)).sum();
        prompts_ms + self.decode_ms(ask, all.len())
    }

    /// Returns the time that the request needs with the wait for room: until other requests have released
    /// their blocks.
    fn crowded_ms(&self, ask: &Ask, all: &[&Ask]) -> f64 {
        let one_ms = |ask: &&Ask| self.prefill_ms(ask) + self.decode_ms(ask, all.len());
        let held = |node: &NodeShape| {
            all.iter().map(|ask| blocks_of(ask, node) as f64 * one_ms(ask)).sum::<f64>()
                / f64::from(node.n_blocks)
        };
        CROWDED * (self.undisturbed_ms(ask, all) + self.nodes_of(ask.model).map(held).fold(0.0, f64::max))
    }

    fn prefill_ms(&self, ask: &Ask) -> f64 {
        let prompt = ask.tokens.len() as f64;
        let token_ms = self.slowest(ask.model, |node| node.prefill_token_ms);
        (1.0 + prompt / STEP_TOKENS_MIN) * self.slowest(ask.model, |node| node.step_ms) + prompt * token_ms
    }

    /// Returns the time of the request's decode steps. Each other sequence in the batch makes a step a twentieth
    /// longer.
    fn decode_ms(&self, ask: &Ask, n_beside: usize) -> f64 {
        let step_ms = self.slowest(ask.model, |node| node.step_ms) * (1.0 + n_beside as f64 / 20.0);
        (f64::from(ask.max_tokens) + STEPS_BESIDE) * step_ms
    }

    fn slowest(&self, model: &str, cost: fn(&NodeShape) -> f64) -> f64 {
        self.nodes_of(model).map(cost).fold(0.0, f64::max)
    }

    /// Returns how much longer one attempt takes on slow paths.
    fn slowness_of(&self, ask: &Ask) -> Duration {
        let hosts = || self.nodes_of(ask.model).map(|node| &*node.name).chain([ROUTERS[ask.router], POOL]);
        hosts()
            .flat_map(|one| hosts().map(move |other| (one, other)))
            .map(|(one, other)| self.slowness(one, other))
            .sum::<Duration>()
            / 2
    }

    /// Returns the longest time for which any message may be held.
    pub fn held_for(&self) -> Duration {
        let holds = |fault: &&Fault| matches!(fault.what, Break::Hold(..) | Break::Stop(_));
        self.faults.iter().filter(holds).map(|fault| self.mended(fault) - fault.at).max().unwrap_or_default()
    }

    fn nodes_of(&self, model: &str) -> impl Iterator<Item = &NodeShape> {
        self.cluster.nodes.iter().filter(move |node| node.model == model)
    }

    // === what is broken, and when ===

    /// Returns when an attempt to serve a request may fail, because of its router, nodes of its model, the
    /// pool, or the paths between them.
    pub fn broken(&self, ask: &Ask) -> Vec<Interval> {
        let faults = self.faults.iter().filter_map(|fault| self.breaks(ask, fault).map(|broken| broken.all));
        let absences = self.nodes_of(ask.model).flat_map(|node| self.lapses(node));
        faults.chain(absences).chain(self.starts_of(ROUTERS[ask.router])).collect()
    }

    /// Returns when a request may make no progress. A node that has failed delays a request only until that
    /// is noticed, if another one can do its work.
    fn delays(&self, ask: &Ask) -> Vec<Interval> {
        let router = ROUTERS[ask.router];
        let delay = |fault: &Fault| {
            let Broken { all, noticed } = self.breaks(ask, fault)?;
            let node = self.nodes_of(ask.model).find(|node| fault.what.stops(&node.name, router));
            let has_substitute = node.is_some_and(|node| self.has_substitute(router, node, all));
            if has_substitute {
                return Some(Interval::new(all.from, noticed.min(all.to)));
            }
            // A node with another role may keep it, and the node that does its work may be broken later.
            Some(node.and_then(|node| self.decodes_no_more(node, fault)).unwrap_or(all))
        };
        self.faults.iter().filter_map(delay).chain(self.starts_of(router)).collect()
    }

    /// Returns whether another node can do a node's work all the time. Without a prefill node, decode nodes
    /// compute prompts.
    fn has_substitute(&self, router: &str, node: &NodeShape, during: Interval) -> bool {
        let is_usable = |other: &NodeShape| {
            !self.unusable(router, other).iter().any(|unusable| unusable.overlaps(during.from, during.to))
        };
        let mut others = self.nodes_of(node.model).filter(|other| other.name != node.name);
        !node.role.decodes() || others.any(|other| other.role.decodes() && is_usable(other))
    }

    /// Returns when a fault may fail an attempt to serve this request; `None` if it is not on its path.
    fn breaks(&self, ask: &Ask, fault: &Fault) -> Option<Broken> {
        let router = ROUTERS[ask.router];
        let stall = self.nodes_of(ask.model).map(|node| node.stall_ms).max().unwrap_or_default();
        let stall = Duration::from_millis(stall);
        let sends_kv = |host: &str| {
            (host == POOL && ask.model == MODELS[0]) || self.nodes_of(ask.model).any(|node| node.name == host)
        };
        let is_on_path = |host: &str| host == router || sends_kv(host);
        let (after, then) = match &fault.what {
            Break::Reset(one, other) | Break::Cut(one, other, _) if is_on_path(one) && is_on_path(other) => {
                (Duration::ZERO, self.slowness(one, other))
            }
            Break::Corrupt(one, other, _) | Break::Trickle(one, other, _)
                if sends_kv(one) && sends_kv(other) =>
            {
                (Duration::ZERO, Duration::ZERO)
            }
            Break::Hold(one, other) if sends_kv(one) && sends_kv(other) => (stall, Duration::ZERO),
            Break::Hold(one, other) if is_on_path(one) && is_on_path(other) => (KEEPALIVE, Duration::ZERO),
            Break::Stop(host) if is_on_path(host) => (KEEPALIVE + stall, Duration::ZERO),
            Break::Crash(host, Crash::Machine) if is_on_path(host) => (KEEPALIVE + stall, REJOIN),
            Break::Crash(host, Crash::Process) | Break::Replace(host) if is_on_path(host) => {
                (Duration::ZERO, REJOIN)
            }
            Break::Drain(host) | Break::Sleep(host) if is_on_path(host) => {
                (Duration::from_millis(DRAIN_MS), REJOIN)
            }
            Break::Role(host, _) if is_on_path(host) => (self.role_ends(fault) - fault.at, REJOIN),
            _ => return None,
        };
        let (at, grace) = (fault.at, RESET + ARRIVAL_GRACE);
        let all = Interval::new(at, self.mended(fault).max(at + after) + grace + then);
        Some(Broken { all, noticed: at + after + grace })
    }

    /// Returns when a router may see a node as unusable.
    pub fn unusable(&self, router: &str, node: &NodeShape) -> Vec<Interval> {
        let name = &*node.name;
        let slowness = self.slowness(router, name).max(self.slowness(ROUTERS[0], name));
        let joins = |one: &str, other: &str| [(one, other), (other, one)].contains(&(router, name));
        let interval = |fault: &Fault| {
            let mended = self.mended(fault);
            let to = match &fault.what {
                Break::Reset(one, other) if joins(one, other) => mended + RESET,
                Break::Hold(one, other) | Break::Cut(one, other, _) if joins(one, other) => {
                    mended + RECONNECT
                }
                Break::Stop(host) if host == name || host == router => mended + RECONNECT,
                Break::Crash(host, _) | Break::Drain(host) | Break::Replace(host) if host == name => {
                    mended + REJOIN
                }
                Break::Sleep(host) if host == name => mended + Duration::from_millis(DRAIN_MS) + REJOIN,
                Break::Role(host, _) if host == name => match self.decodes_no_more(node, fault) {
                    Some(interval) => interval.to,
                    None => mended.max(self.role_ends(fault)) + REJOIN,
                },
                _ => return None,
            };
            Some(Interval::new(fault.at, to + slowness))
        };
        let faults = self.faults.iter().filter_map(interval);
        faults.chain(self.lapses(node)).chain(self.starts_of(router)).collect()
    }

    /// Returns when a node may not decode because of a fault that gives it another role; `None` if it decodes in that role
    /// too. It may keep the role: the request to take its own one again may be refused.
    fn decodes_no_more(&self, node: &NodeShape, fault: &Fault) -> Option<Interval> {
        match &fault.what {
            Break::Role(host, role) if *host == node.name && node.role.decodes() && !role.decodes() => {
                Some(Interval::new(fault.at, END))
            }
            _ => None,
        }
    }

    /// Returns the time by which a node has drained for another role. It handles one request after the other.
    fn role_ends(&self, fault: &Fault) -> Duration {
        let Break::Role(node, _) = &fault.what else { return fault.at };
        let of_the_node = |other: &&Fault| matches!(&other.what, Break::Role(host, _) if host == node);
        let until_now = self.faults.iter().filter(of_the_node).filter(|other| other.at <= fault.at);
        let one = ROLE_WAIT + Duration::from_millis(DRAIN_MS);
        until_now.fold(Duration::ZERO, |end, other| end.max(other.at) + one)
    }

    /// Returns when a node may be no member although it runs, because the registry heard nothing from it for
    /// a lease.
    fn lapses(&self, node: &NodeShape) -> Vec<Interval> {
        let registry = ROUTERS[0];
        let interval = |fault: &Fault| {
            let is_silent = match &fault.what {
                Break::Hold(one, other) | Break::Cut(one, other, _) => {
                    [(&**one, &**other), (&**other, &**one)].contains(&(&*node.name, registry))
                }
                Break::Stop(host) => host == registry || *host == node.name,
                _ => false,
            };
            let back = self.mended(fault) + REJOIN + self.slowness(registry, &node.name);
            (is_silent && fault.at + LEASE < back).then(|| Interval::new(fault.at + LEASE, back))
        };
        self.faults.iter().filter_map(interval).collect()
    }

    /// Returns when a router may know no node because it has crashed, and has to learn its nodes again.
    fn starts_of(&self, router: &str) -> Vec<Interval> {
        let slowest = self.nodes_with_slowness(router);
        let interval = |fault: &Fault| match &fault.what {
            Break::Crash(host, _) if host == router => {
                Some(Interval::new(fault.at, self.mended(fault) + REJOIN + SETTLE + slowest))
            }
            _ => None,
        };
        self.faults.iter().filter_map(interval).collect()
    }

    fn nodes_with_slowness(&self, router: &str) -> Duration {
        self.cluster.nodes.iter().map(|node| self.slowness(router, &node.name)).max().unwrap_or_default()
    }

    /// Returns how much longer a new connection between two hosts takes.
    fn slowness(&self, one: &str, other: &str) -> Duration {
        let one_way = |from: &str, to: &str| {
            let delays = self.faults.iter().filter_map(|fault| match &fault.what {
                Break::Slow(a, b, delay) if a == from && b == to => Some(*delay),
                _ => None,
            });
            delays.max().unwrap_or_default()
        };
        (one_way(one, other) + one_way(other, one)) * ROUND_TRIPS
    }

    /// Returns when the plan itself ends a fault. The end of all faults ends every one.
    fn mended(&self, fault: &Fault) -> Duration {
        let ends = |later: &Break| match (&fault.what, later) {
            (Break::Hold(a, b), Break::Release(c, d)) => (a, b) == (c, d),
            (Break::Crash(a, _) | Break::Drain(a), Break::Start(b)) => a == b,
            (Break::Stop(a), Break::GoOn(b)) => a == b,
            (Break::Sleep(a), Break::Wake(b, _)) => a == b,
            _ => false,
        };
        match &fault.what {
            Break::Reset(..) | Break::Replace(_) | Break::Jump(..) => return fault.at,
            // Requests of an operator to a node that is away may arrive late, and in another order, so the
            // wake may come after all faults.
            Break::Sleep(node) | Break::Role(node, _) if self.is_away(node) => return TROUBLE + WAKE_AGAIN,
            Break::Role(..) => return fault.at,
            _ => {}
        }
        let mut later = self.faults.iter().filter(|later| later.at >= fault.at && ends(&later.what));
        later.next().map_or(TROUBLE, |later| later.at).max(fault.at)
    }

    fn is_away(&self, node: &str) -> bool {
        self.faults.iter().any(|fault| match &fault.what {
            Break::Crash(host, Crash::Process | Crash::Machine) | Break::Stop(host) | Break::Drain(host) => {
                host == node
            }
            _ => false,
        })
    }
}

/// Returns a request with those beside it that need the same nodes.
fn of_its_model<'a>(ask: &'a Ask, beside: &'a [Ask]) -> Vec<&'a Ask> {
    beside.iter().filter(|other| other.model == ask.model).chain([ask]).collect()
}

fn is_told_to_fail(reason: &str) -> bool {
    reason.contains("told to fail")
}

/// Returns the number of blocks that a request may need on a node, with those that it may grow into.
fn blocks_of(ask: &Ask, node: &NodeShape) -> usize {
    (ask.tokens.len() + ask.max_tokens as usize).div_ceil(super::host::BLOCK_TOKENS) + 1 + node.growth_blocks
}

/// Returns whether the intervals leave no gap between `from` and `to` in which a request would find a usable
/// node.
fn cover(mut intervals: Vec<Interval>, from: Duration, to: Duration) -> bool {
    intervals.sort_by_key(|interval| interval.from);
    let mut covered = from;
    for interval in intervals {
        if interval.from <= covered + LOOK_PAUSE {
            covered = covered.max(interval.to);
        }
    }
    covered + LOOK_PAUSE >= to
}

/// Returns the longest part of a time that no interval covers.
fn longest_gap(mut intervals: Vec<Interval>, from: Duration, to: Duration) -> Duration {
    intervals.sort_by_key(|interval| interval.from);
    let (mut covered, mut longest) = (from, Duration::ZERO);
    for interval in intervals {
        longest = longest.max(interval.from.min(to).saturating_sub(covered));
        covered = covered.max(interval.to);
    }
    longest.max(to.saturating_sub(covered))
}
