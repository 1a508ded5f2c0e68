//! What a seed means: a cluster, what its clients ask, and what breaks when. All of it is drawn before the run begins.

use std::fmt;
use std::num::NonZero;
use std::time::Duration;

use router::dispatch::Order;
use types::Role;

use super::chance::Chance;
use super::net::Crash;
use super::watcher::WATCHER;

/// Faults begin in this time, and everything is mended at its end.
pub const TROUBLE: Duration = Duration::from_secs(8);
/// The largest prompt and answer, which fit into the smallest pool.
pub const PROMPT_TOKENS_MAX: u64 = 200;
pub const ANSWER_TOKENS_MAX: u64 = 40;
/// Blocks of the smallest pool: one of the largest sequences, and a little.
pub(super) const BLOCKS_MIN: u32 = 64;

#[derive(Clone, Debug)]
pub struct Plan {
    pub seed: u64,
    pub cluster: Shape,
    pub asks: Vec<Ask>,
    /// In order of time.
    pub faults: Vec<Fault>,
}

/// What the cluster is.
#[derive(Clone, Debug)]
pub struct Shape {
    pub order: Order,
    pub policy: &'static str,
    pub attempts_max: u32,
    pub wait_max: Duration,
    pub nodes: Vec<NodeShape>,
}

/// What one node is.
#[derive(Clone, Debug)]
pub struct NodeShape {
    pub name: String,
    pub role: Role,
    pub n_blocks: u32,
    /// Tensor-parallel ranks.
    pub ranks: NonZero<u16>,
    pub step_ms: f64,
    pub prefill_token_ms: f64,
    pub growth_blocks: usize,
    pub local_tokens_max: u32,
    pub landings_max: u32,
    pub queue_ms_max: f64,
    pub streams: u16,
    pub stall_ms: u64,
    /// The most KV in one frame.
    pub frame_bytes: usize,
    /// Steps that fail, counted from the node's first one.
    pub failing_steps: Vec<u64>,
}

/// One request.
#[derive(Clone, Debug)]
pub struct Ask {
    pub at: Duration,
    pub tokens: Vec<u32>,
    pub max_tokens: u32,
    pub ignore_eos: bool,
    /// `None` is greedy.
    pub sampling_seed: Option<u64>,
    pub within: Duration,
    pub patience: Patience,
    /// Nothing that the plan breaks stands in its way: it must be answered.
    pub must_be_answered: bool,
}

/// When a client goes away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    Endless,
    /// Counted from the request.
    Until(Duration),
    /// After so many steps.
    Steps(u32),
}

#[derive(Clone, Debug)]
pub struct Fault {
    pub at: Duration,
    pub what: Break,
}

/// What is done to the cluster.
#[derive(Clone, Debug)]
pub enum Break {
    Hold(String, String),
    Release(String, String),
    Slow(String, String, Duration),
    /// From now on writes arrive one after the other, so far apart: little bandwidth.
    Trickle(String, String, Duration),
    /// Connections made from now on break after so many writes.
    Cut(String, String, u32),
    /// One write in so many arrives with a bit turned, where KV travels.
    Corrupt(String, String, u64),
    /// Connections break now.
    Reset(String, String),
    Crash(String, Crash),
    /// Asked to stop.
    Drain(String),
    /// A new life at the same address.
    Start(String),
    /// A new life, with an engine that does not fail.
    Replace(String),
    /// Asked to sleep.
    Sleep(String),
    /// Woken, in another role or in its own.
    Wake(String, Option<Role>),
    /// The machine's calendar, in seconds.
    Jump(String, i64),
}

impl fmt::Display for Break {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Hold(from, to) => write!(f, "hold {from} to {to}"),
            Self::Release(from, to) => write!(f, "release {from} to {to}"),
            Self::Slow(from, to, delay) => write!(f, "slow {from} to {to}: {delay:?}"),
            Self::Trickle(from, to, gap) => write!(f, "trickle {from} to {to}: a write in {gap:?}"),
            Self::Cut(from, to, writes) => write!(f, "cut {from} to {to} after {writes} writes"),
            Self::Corrupt(from, to, n) => write!(f, "corrupt {from} to {to}: one write in {n}"),
            Self::Reset(one, other) => write!(f, "reset {one} and {other}"),
            Self::Crash(host, how) => write!(f, "crash {host}: {how:?}"),
            Self::Drain(host) => write!(f, "drain {host}"),
            Self::Replace(host) => write!(f, "replace the engine of {host}"),
            Self::Start(host) => write!(f, "start {host}"),
            Self::Sleep(host) => write!(f, "{host} shall sleep"),
            Self::Wake(host, None) => write!(f, "wake {host}"),
            Self::Wake(host, Some(role)) => write!(f, "wake {host} as {role}"),
            Self::Jump(host, seconds) => write!(f, "jump {host} by {seconds} s"),
        }
    }
}

// === drawing ===

impl Plan {
    pub fn draw(seed: u64) -> Self {
        let mut cluster = shape(&mut Chance::named(seed, "cluster"));
        spread(&mut Chance::named(seed, "ranks"), &mut cluster.nodes);
        let asks = asks(&mut Chance::named(seed, "asks"));
        let mut faults = faults(&mut Chance::named(seed, "faults"), &cluster);
        naps(&mut Chance::named(seed, "naps"), &cluster, &mut faults);
        Self { seed, cluster, asks, faults }.besieged()
    }

    /// Until when a word of the router that is said at `at` may be held on its way to a node.
    ///
    /// Deadlines travel as the time that is left, because clocks need not agree: a node that hears of a request so much
    /// later also lets it live so much longer.
    pub fn held_until(&self, at: Duration) -> Duration {
        let released = |to: &String| {
            let releases = |fault: &&Fault| matches!(&fault.what, Break::Release(from, node) if from == "router" && node == to);
            self.faults.iter().filter(releases).map(|fault| fault.at).find(|until| *until > at)
        };
        let held = self.faults.iter().filter(|fault| fault.at <= at).filter_map(|fault| match &fault.what {
            Break::Hold(from, to) if from == "router" => released(to),
            _ => None,
        });
        held.max().unwrap_or(at)
    }

    /// Nothing breaks: then every request must be answered.
    pub fn is_calm(&self) -> bool {
        self.faults.is_empty() && self.cluster.nodes.iter().all(|node| node.failing_steps.is_empty())
    }
}

fn shape(chance: &mut Chance) -> Shape {
    let order = if chance.one_in(4) { Order::PrefillFirst } else { Order::DecodeFirst };
    let mut names: Vec<(String, Role)> = Vec::new();
    let mut add = |role: Role, count: u64| {
        names.extend((0..count).map(|nth| (format!("{}-{nth}", role.as_str()), role)));
    };
    if chance.one_in(8) {
        add(Role::Both, chance.within(1..=2));
    } else {
        add(Role::Prefill, chance.within(1..=2));
        add(Role::Decode, chance.within(1..=2));
    }
    let nodes = names.into_iter().map(|(name, role)| node(chance, name, role)).collect();
    Shape {
        order,
        policy: chance.pick::<&'static str>(&["random", "round-robin", "least-loaded"]),
        attempts_max: chance.within(2..=4) as u32,
        wait_max: chance.millis(2_000..=30_000),
        nodes,
    }
}

/// In half of the clusters nodes have ranks, each its own number of them: of four, two hold the same head.
fn spread(chance: &mut Chance, nodes: &mut [NodeShape]) {
    if chance.one_in(2) {
        for node in nodes {
            node.ranks = NonZero::new(*chance.pick(&[1, 2, 4])).expect("none is zero");
        }
    }
}

fn node(chance: &mut Chance, name: String, role: Role) -> NodeShape {
    let is_slow = chance.one_in(6);
    let step_ms = *chance.pick(&[2.0, 8.0, 25.0]) * if is_slow { 6.0 } else { 1.0 };
    let failing_steps = match chance.one_in(8) {
        true => (0..chance.within(1..=3)).map(|_| chance.below(60)).collect(),
        false => Vec::new(),
    };
    NodeShape {
        name,
        role,
        n_blocks: *chance.pick(&[BLOCKS_MIN, BLOCKS_MIN + 20, 160, 400]),
        ranks: NonZero::<u16>::MIN,
        step_ms,
        prefill_token_ms: *chance.pick(&[0.05, 0.5, 2.0]),
        growth_blocks: chance.below(4) as usize,
        local_tokens_max: *chance.pick(&[0, 16, 40]),
        landings_max: *chance.pick(&[1, 4, 256]),
        queue_ms_max: *chance.pick(&[200.0, 2000.0]),
        streams: chance.within(1..=3) as u16,
        stall_ms: *chance.pick(&[800, 2000, 5000]),
        frame_bytes: 4 << 10,
        failing_steps,
    }
}

fn asks(chance: &mut Chance) -> Vec<Ask> {
    let shared: Vec<Vec<u32>> = (0..2).map(|_| tokens(chance, 120)).collect();
    let count = chance.within(4..=14);
    let is_burst = chance.one_in(4);
    let mut asks: Vec<Ask> = (0..count)
        .map(|_| {
            let at = if is_burst { chance.millis(1_000..=1_200) } else { chance.millis(0..=7_000) };
            ask(chance, at, &shared)
        })
        .collect();
    asks.sort_by_key(|ask| ask.at);
    asks
}

fn ask(chance: &mut Chance, at: Duration, shared: &[Vec<u32>]) -> Ask {
    let length = match chance.below(4) {
        0 => chance.within(1..=12),
        1 => chance.within(1..=PROMPT_TOKENS_MAX / 4) / 4 * 4 + 4,
        _ => chance.within(20..=PROMPT_TOKENS_MAX),
    };
    let mut tokens = tokens(chance, length);
    if chance.one_in(2) {
        let prefix = chance.pick(shared);
        let n = prefix.len().min(tokens.len());
        tokens[..n].copy_from_slice(&prefix[..n]);
    }
    let within = if chance.one_in(5) { chance.millis(50..=1_500) } else { chance.millis(4_000..=12_000) };
    let patience = match chance.below(6) {
        0 => Patience::Until(chance.millis(0..=1_500)),
        1 => Patience::Steps(chance.within(1..=10) as u32),
        _ => Patience::Endless,
    };
    Ask {
        at,
        tokens,
        max_tokens: if chance.one_in(8) { 1 } else { chance.within(1..=ANSWER_TOKENS_MAX) as u32 },
        ignore_eos: chance.one_in(2),
        sampling_seed: chance.one_in(3).then(|| chance.draw()),
        within,
        patience,
        must_be_answered: false,
    }
}

/// Letters.
pub fn tokens(chance: &mut Chance, length: u64) -> Vec<u32> {
    (0..length).map(|_| 97 + chance.below(26) as u32).collect()
}

fn faults(chance: &mut Chance, cluster: &Shape) -> Vec<Fault> {
    if chance.one_in(8) {
        return Vec::new();
    }
    let mut faults = Vec::new();
    for _ in 0..chance.within(1..=6) {
        let at = chance.millis(0..=TROUBLE.as_millis() as u64 - 1);
        let until = (at + chance.millis(50..=5_000)).min(TROUBLE);
        one_fault(chance, cluster, at, until, &mut faults);
    }
    faults.sort_by_key(|fault| fault.at);
    faults
}

/// In a quarter of the clusters nodes sleep, whatever else happens.
fn naps(chance: &mut Chance, cluster: &Shape, faults: &mut Vec<Fault>) {
    if !chance.one_in(4) {
        return;
    }
    for _ in 0..chance.within(1..=3) {
        let at = chance.millis(0..=TROUBLE.as_millis() as u64 - 1);
        let until = (at + chance.millis(0..=5_000)).min(TROUBLE);
        faults.extend(nap(chance, &cluster.nodes, at, until));
    }
    faults.sort_by_key(|fault| fault.at);
}

/// One node sleeps, and one in three is something more when it wakes.
pub(super) fn nap(chance: &mut Chance, nodes: &[NodeShape], at: Duration, until: Duration) -> [Fault; 2] {
    let node = chance.pick(nodes).name.clone();
    let role = chance.one_in(3).then_some(Role::Both);
    let sleep = Fault { at, what: Break::Sleep(node.clone()) };
    [sleep, Fault { at: until, what: Break::Wake(node, role) }]
}

fn one_fault(chance: &mut Chance, cluster: &Shape, at: Duration, until: Duration, faults: &mut Vec<Fault>) {
    let node = |chance: &mut Chance| chance.pick(&cluster.nodes).name.clone();
    let mut push = |at, what| faults.push(Fault { at, what });
    let (one, other) = pair(chance, cluster);
    match chance.below(13) {
        0 | 1 => {
            push(at, Break::Hold(one.clone(), other.clone()));
            push(at, Break::Hold(other.clone(), one.clone()));
            push(until, Break::Release(one.clone(), other.clone()));
            push(until, Break::Release(other, one));
        }
        2 => {
            push(at, Break::Hold(one.clone(), other.clone()));
            push(until, Break::Release(one, other));
        }
        3 => push(at, Break::Slow(one, other, chance.millis(20..=600))),
        4 => push(at, Break::Reset(one, other)),
        5 => {
            push(at, Break::Cut(one.clone(), other.clone(), chance.within(1..=60) as u32));
            push(at, Break::Reset(one, other));
        }
        6..=8 => {
            let (host, how) = (node(chance), *chance.pick(&[Crash::Process, Crash::Machine]));
            push(at, Break::Crash(host.clone(), how));
            push(until, Break::Start(host));
        }
        9 => {
            let host = node(chance);
            push(at, Break::Drain(host.clone()));
            push(until, Break::Start(host));
        }
        10 => push(at, Break::Corrupt(one, other, chance.within(1..=20))),
        11 => push(at, Break::Jump(node(chance), *chance.pick(&[-3600, 3600, -5, 86_400]))),
        _ => {
            push(at, Break::Crash("router".to_owned(), *chance.pick(&[Crash::Process, Crash::Machine])));
            push(until, Break::Start("router".to_owned()));
        }
    }
}

/// Two hosts that speak to each other.
fn pair(chance: &mut Chance, cluster: &Shape) -> (String, String) {
    if chance.one_in(10) {
        return ("router".to_owned(), WATCHER.to_owned());
    }
    let one = chance.pick(&cluster.nodes).name.clone();
    let others: Vec<&String> =
        cluster.nodes.iter().map(|node| &node.name).filter(|name| **name != one).collect();
    match others.is_empty() || chance.one_in(2) {
        true => ("router".to_owned(), one),
        false => (one, (*chance.pick(&others)).clone()),
    }
}
