//! The plan of a seed: a cluster, the requests of its clients, and the faults with their times. All of it is drawn
//! before the run begins.

use std::fmt;
use std::num::NonZero;
use std::ops::RangeInclusive;
use std::time::Duration;

use router::balance::BalanceSettings;
use router::policy::Order;
use types::Role;

use super::chance::Chance;
use super::death::DeathInChange;
use super::host::DRAIN_MS;
use super::net::Crash;
use super::watcher::WATCHER;

/// The time within which faults begin. At its end all of them are mended.
pub const TROUBLE: Duration = Duration::from_secs(8);
/// The longest prompt and the longest answer, in tokens. Together they fit into the smallest pool.
pub const PROMPT_TOKENS_MAX: u64 = 200;
pub const ANSWER_TOKENS_MAX: u64 = 40;
/// The length of a long prompt, which does not fit into the queue between a prefill node and its wire.
pub(super) const LONG_PROMPT_TOKENS: RangeInclusive<u64> = 600..=900;
/// The two models that a cluster may serve.
pub const MODELS: [&str; 2] = ["mock", "other"];
/// The routers of a cluster. The first one has the registry.
pub const ROUTERS: [&str; 2] = ["router", "router-1"];
pub const POOL: &str = "pool-0";
/// The number of blocks of the smallest pool: one of the largest sequences and a little more.
pub(super) const BLOCKS_MIN: u32 = 64;

#[derive(Clone, Debug)]
pub struct Plan {
    pub seed: u64,
    pub cluster: Shape,
    pub asks: Vec<Ask>,
    /// The faults, in order of time.
    pub faults: Vec<Fault>,
    /// Whether an attempt to serve a request may fail, so that another attempt must serve it.
    pub attempts_may_fail: bool,
}

/// The processes of the cluster.
#[derive(Clone, Debug)]
pub struct Shape {
    pub order: Order,
    pub policy: &'static str,
    pub attempts_max: u32,
    pub wait_max: Duration,
    /// The number of routers: one, or two that share the registry in the first of them.
    pub n_routers: usize,
    /// Whether a pool node keeps KV of the first model.
    pub has_pool: bool,
    /// How routers move nodes between roles; `None`: they do not.
    pub balance: Option<BalanceSettings>,
    /// How a node dies while it changes its role.
    pub dies_in_change: Option<DeathInChange>,
    pub nodes: Vec<NodeShape>,
}

/// The properties of one node.
#[derive(Clone, Debug)]
pub struct NodeShape {
    pub name: String,
    pub role: Role,
    pub model: &'static str,
    pub n_blocks: u32,
    /// The number of tensor-parallel ranks.
    pub ranks: NonZero<u16>,
    pub step_ms: f64,
    pub step_tokens_max: usize,
    pub prefill_token_ms: f64,
    pub growth_blocks: usize,
    pub local_tokens_max: u32,
    pub landings_max: u32,
    pub queue_ms_max: f64,
    pub streams: u16,
    pub stall_ms: u64,
    /// The largest number of KV bytes in one frame.
    pub frame_bytes: usize,
    /// The steps that fail, counted from the node's first one.
    pub failing_steps: Vec<u64>,
}

/// One request of a client.
#[derive(Clone, Debug, PartialEq)]
pub struct Ask {
    pub at: Duration,
    pub model: &'static str,
    /// The index of the request's router. If there is only one router, that one gets the request.
    pub router: usize,
    pub tokens: Vec<u32>,
    pub max_tokens: u32,
    pub ignore_eos: bool,
    /// The seed of sampling; `None` is greedy.
    pub sampling_seed: Option<u64>,
    /// The temperature of sampling that is not greedy.
    pub temperature: f32,
    pub priority: i8,
    pub tenant: &'static str,
    pub within: Duration,
    pub patience: Patience,
    /// Whether the request must be answered, because no planned fault affects it.
    pub must_be_answered: bool,
}

/// The time at which a client leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    Endless,
    /// The client leaves after this time, counted from the request.
    Until(Duration),
    /// The client leaves after this number of steps.
    Steps(u32),
}

#[derive(Clone, Debug)]
pub struct Fault {
    pub at: Duration,
    pub what: Break,
}

/// A change to the cluster: a fault or its end.
#[derive(Clone, Debug)]
pub enum Break {
    Hold(String, String),
    Release(String, String),
    Slow(String, String, Duration),
    /// Two writes from one host to the other arrive at least this far apart from now on: low bandwidth.
    Trickle(String, String, Duration),
    /// Connections made from now on break after this number of writes.
    Cut(String, String, u32),
    /// One write in this number arrives with a flipped bit on the KV port.
    Corrupt(String, String, u64),
    /// Connections between the two hosts break now.
    Reset(String, String),
    Crash(String, Crash),
    /// The process drains and ends.
    Drain(String),
    /// A new life starts at the same address.
    Start(String),
    /// A new life starts, with an engine that does not fail.
    Replace(String),
    /// The node is asked to sleep.
    Sleep(String),
    /// The node is woken, in another role or in its own.
    Wake(String, Option<Role>),
    /// The node is asked to take another role. Its next process has its own role again.
    Role(String, Role),
    /// The machine's calendar jumps by this number of seconds.
    Jump(String, i64),
    /// The process is stopped, with its timers.
    Stop(String),
    /// The stopped process continues.
    GoOn(String),
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
            Self::Role(host, role) => write!(f, "{host} shall become {role}"),
            Self::Stop(host) => write!(f, "{host} stands still"),
            Self::GoOn(host) => write!(f, "{host} goes on"),
            Self::Jump(host, seconds) => write!(f, "jump {host} by {seconds} s"),
        }
    }
}

// === drawing ===

impl Plan {
    pub fn draw(seed: u64) -> Self {
        let mut cluster = shape(&mut Chance::named(seed, "cluster"));
        spread(&mut Chance::named(seed, "ranks"), &mut cluster.nodes);
        let mut asks = asks(&mut Chance::named(seed, "asks"));
        more_hosts(&mut Chance::named(seed, "hosts"), &mut cluster, &mut asks);
        callers(&mut Chance::named(seed, "callers"), &mut asks);
        temperatures(&mut Chance::named(seed, "temperatures"), &mut asks);
        several_answers(&mut Chance::named(seed, "answers"), &mut asks);
        let mut faults = faults(&mut Chance::named(seed, "faults"), &cluster);
        naps(&mut Chance::named(seed, "naps"), &cluster, &mut faults);
        role_changes(&mut Chance::named(seed, "roles"), &cluster, &mut faults);
        Self { seed, cluster, asks, faults, attempts_may_fail: true }.besieged().unhurried()
    }

    /// Returns how late a message of the router from `asked` may have been when the node received it at
    /// `heard`.
    ///
    /// A deadline travels as the remaining time, because clocks need not agree. If the link was held or slow, or the
    /// router or the node stopped, the node receives the request later and also lets it live longer.
    pub fn late_by(&self, (router, node): (&str, &str), asked: Duration, heard: Duration) -> Duration {
        let end = |from: Duration, ends: &dyn Fn(&Break) -> bool| {
            let mut after = self.faults.iter().filter(|fault| fault.at > from && ends(&fault.what));
            // The end of all faults releases everything, so it bounds the time.
            after.next().map_or(TROUBLE, |fault| fault.at)
        };
        let late = |fault: &Fault| {
            let ends = match &fault.what {
                Break::Hold(from, to) if from == router && to == node => end(
                    fault.at,
                    &|what| matches!(what, Break::Release(one, other) if one == from && other == to),
                ),
                Break::Stop(host) if host == node || host == router => {
                    end(fault.at, &|what| matches!(what, Break::GoOn(other) if other == host))
                }
                Break::Slow(from, to, delay) if from == router && to == node && fault.at <= heard => {
                    return *delay;
                }
                _ => return Duration::ZERO,
            };
            if ends <= heard { ends.saturating_sub(fault.at.max(asked)) } else { Duration::ZERO }
        };
        self.faults.iter().map(late).sum()
    }

    /// Returns how long a host is stopped in total.
    pub fn stands_still(&self, host: &str) -> Duration {
        let mut stopped = None;
        let mut total = Duration::ZERO;
        for fault in &self.faults {
            match &fault.what {
                Break::Stop(one) if one == host => stopped = stopped.or(Some(fault.at)),
                Break::GoOn(one) if one == host => {
                    total += stopped.take().map_or(Duration::ZERO, |at| fault.at - at);
                }
                _ => {}
            }
        }
        // A host that is still stopped continues at the end of all faults.
        total + stopped.map_or(Duration::ZERO, |at| TROUBLE.saturating_sub(at))
    }

    /// Returns whether no fault occurs until `at`.
    pub fn is_calm_until(&self, at: Duration) -> bool {
        self.faults.iter().all(|fault| fault.at > at)
            && self.cluster.nodes.iter().all(|node| node.failing_steps.is_empty())
    }

    /// Gives every request of a plan without faults the time that all of them take one after the other. Then
    /// each must be answered.
    fn unhurried(mut self) -> Self {
        if self.is_calm_until(Duration::MAX) {
            let enough = self.one_after_the_other();
            self.cluster.wait_max = enough;
            self.asks.iter_mut().for_each(|ask| (ask.within, ask.must_be_answered) = (enough, true));
        }
        self
    }

    /// Returns more time than the slowest nodes need for all requests, if they run one at a time.
    pub fn one_after_the_other(&self) -> Duration {
        let slowest = |cost: fn(&NodeShape) -> f64| self.cluster.nodes.iter().map(cost).fold(0.0, f64::max);
        let (step_ms, token_ms) = (slowest(|node| node.step_ms), slowest(|node| node.prefill_token_ms));
        let ms = |ask: &Ask| {
            let (prompt, answer) = (ask.tokens.len() as f64, f64::from(ask.max_tokens));
            // The factors are upper bounds: a chunk has at least eight tokens, and a preempted sequence is
            // computed again.
            2.0 * ((prompt / 8.0 + answer + 10.0) * step_ms + prompt * token_ms)
        };
        Duration::from_secs_f64(1.0 + self.asks.iter().map(ms).sum::<f64>() / 1000.0)
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
        policy: chance.pick::<&'static str>(router::policy::NAMES),
        attempts_max: chance.within(2..=4) as u32,
        wait_max: chance.millis(2_000..=30_000),
        n_routers: 1,
        has_pool: false,
        balance: None,
        dies_in_change: None,
        nodes,
    }
}

/// Gives some clusters a second router, a pool node, or a second model with its own nodes.
fn more_hosts(chance: &mut Chance, cluster: &mut Shape, asks: &mut [Ask]) {
    if chance.one_in(4) {
        cluster.n_routers = ROUTERS.len();
        asks.iter_mut().for_each(|ask| ask.router = chance.below(2) as usize);
    }
    cluster.has_pool = chance.one_in(4);
    if chance.one_in(4) {
        for role in [Role::Prefill, Role::Decode] {
            let mut node = node(chance, format!("other-{}", role.as_str()), role);
            node.model = MODELS[1];
            cluster.nodes.push(node);
        }
        asks.iter_mut().for_each(|ask| ask.model = chance.pick::<&'static str>(&MODELS));
    }
}

/// Gives nodes ranks in half of the clusters, each node its own number: with four, two ranks hold the same
/// head.
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
        model: MODELS[0],
        n_blocks: *chance.pick(&[BLOCKS_MIN, BLOCKS_MIN + 20, 160, 400]),
        ranks: NonZero::<u16>::MIN,
        step_ms,
        step_tokens_max: 64,
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

/// Gives requests several tenants and priorities, in half of the runs.
fn callers(chance: &mut Chance, asks: &mut [Ask]) {
    if chance.one_in(2) {
        for ask in asks {
            ask.priority = *chance.pick(&[-1, 0, 0, 5]);
            ask.tenant = chance.pick::<&'static str>(&["default", "acme", "zenith"]);
        }
    }
}

/// Draws a temperature for each request, so that some distributions are flat and some steep.
fn temperatures(chance: &mut Chance, asks: &mut [Ask]) {
    asks.iter_mut().for_each(|ask| ask.temperature = *chance.pick(&[0.2, 0.7, 1.0, 1.6]));
}

/// Makes one request want several answers to its prompt, in some runs: further requests have the same prompt
/// and other seeds.
fn several_answers(chance: &mut Chance, asks: &mut Vec<Ask>) {
    if !chance.one_in(4) || asks.is_empty() {
        return;
    }
    let nth = chance.below(asks.len() as u64) as usize;
    let first = asks[nth].clone();
    let seed = first.sampling_seed.unwrap_or_else(|| chance.draw());
    for answer in 1..=chance.within(1..=3) {
        let ask = Ask { sampling_seed: Some(seed.wrapping_add(answer)), ..first.clone() };
        asks.insert(nth + answer as usize, ask);
    }
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
        model: MODELS[0],
        router: 0,
        tokens,
        max_tokens: if chance.one_in(8) { 1 } else { chance.within(1..=ANSWER_TOKENS_MAX) as u32 },
        ignore_eos: chance.one_in(2),
        sampling_seed: chance.one_in(3).then(|| chance.draw()),
        temperature: 1.0,
        priority: 0,
        tenant: "default",
        within,
        patience,
        must_be_answered: false,
    }
}

/// Draws a prompt of letters.
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

/// Adds sleep of nodes to a quarter of the plans, whatever other faults they have.
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

/// Plans that one node sleeps and wakes again. One in three wakes in another role.
pub(super) fn nap(chance: &mut Chance, nodes: &[NodeShape], at: Duration, until: Duration) -> [Fault; 2] {
    let node = chance.pick(nodes).name.clone();
    let role = chance.one_in(3).then_some(Role::Both);
    let sleep = Fault { at, what: Break::Sleep(node.clone()) };
    [sleep, Fault { at: until, what: Break::Wake(node, role) }]
}

/// Adds changes of roles to a third of the plans that have faults. In one of three of them the node dies during the change.
fn role_changes(chance: &mut Chance, cluster: &Shape, faults: &mut Vec<Fault>) {
    // A node that naps cannot change its role meanwhile, and its caller learns that.
    let naps = |node: &NodeShape| {
        faults.iter().any(|fault| matches!(&fault.what, Break::Sleep(host) if *host == node.name))
    };
    let nodes: Vec<NodeShape> = cluster.nodes.iter().filter(|node| !naps(node)).cloned().collect();
    if faults.is_empty() || nodes.is_empty() || !chance.one_in(3) {
        return;
    }
    for _ in 0..chance.within(1..=3) {
        let at = chance.millis(0..=TROUBLE.as_millis() as u64 - 1);
        let until = (at + chance.millis(0..=5_000)).min(TROUBLE);
        let change = role_change(chance, &nodes, at, until);
        if let Break::Role(node, _) = &change[0].what
            && chance.one_in(3)
        {
            let died = (at + chance.millis(0..=DRAIN_MS)).min(TROUBLE);
            let how = *chance.pick(&[Crash::Process, Crash::Machine]);
            faults.push(Fault { at: died, what: Break::Crash(node.clone(), how) });
            faults.push(Fault { at: until.max(died), what: Break::Start(node.clone()) });
        }
        faults.extend(change);
    }
    faults.sort_by_key(|fault| fault.at);
}

/// Plans that one node takes another role, and later its own again.
pub(super) fn role_change(
    chance: &mut Chance,
    nodes: &[NodeShape],
    at: Duration,
    until: Duration,
) -> [Fault; 2] {
    let node = chance.pick(nodes);
    let others: Vec<Role> =
        [Role::Prefill, Role::Decode, Role::Both].into_iter().filter(|role| *role != node.role).collect();
    let role = *chance.pick(&others);
    let change = Fault { at, what: Break::Role(node.name.clone(), role) };
    [change, Fault { at: until, what: Break::Role(node.name.clone(), node.role) }]
}

fn one_fault(chance: &mut Chance, cluster: &Shape, at: Duration, until: Duration, faults: &mut Vec<Fault>) {
    let node = |chance: &mut Chance| chance.pick(&cluster.nodes).name.clone();
    let router = |chance: &mut Chance| (*chance.pick(&ROUTERS[..cluster.n_routers])).to_owned();
    let mut push = |at, what| faults.push(Fault { at, what });
    let (one, other) = pair(chance, cluster);
    match chance.below(15) {
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
        12 => {
            let host = if chance.one_in(2) { router(chance) } else { node(chance) };
            push(at, Break::Stop(host.clone()));
            push(until, Break::GoOn(host));
        }
        13 if cluster.has_pool => {
            let pool = POOL.to_owned();
            let (breaks, mends) = match chance.below(4) {
                0 => (Break::Crash(pool.clone(), Crash::Process), Break::Start(pool)),
                1 => (Break::Crash(pool.clone(), Crash::Machine), Break::Start(pool)),
                2 => (Break::Drain(pool.clone()), Break::Start(pool)),
                _ => (Break::Stop(pool.clone()), Break::GoOn(pool)),
            };
            push(at, breaks);
            push(until, mends);
        }
        _ => {
            let host = router(chance);
            push(at, Break::Crash(host.clone(), *chance.pick(&[Crash::Process, Crash::Machine])));
            push(until, Break::Start(host));
        }
    }
}

/// Draws two hosts that communicate.
fn pair(chance: &mut Chance, cluster: &Shape) -> (String, String) {
    if chance.one_in(10) {
        return ("router".to_owned(), WATCHER.to_owned());
    }
    let one = chance.pick(&cluster.nodes).name.clone();
    let mut others: Vec<&str> =
        cluster.nodes.iter().map(|node| &*node.name).filter(|name| *name != one).collect();
    if cluster.has_pool {
        others.push(POOL);
    }
    match others.is_empty() || chance.one_in(2) {
        true => ((*chance.pick(&ROUTERS[..cluster.n_routers])).to_owned(), one),
        false => (one, (*chance.pick(&others)).to_owned()),
    }
}
