//! A model of two nodes in simulated time, under the router's own policies and bookkeeping.
//!
//! Times are microseconds. The costs are those of Llama-3.1-8B, as in docs/measurements.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};
use std::iter::repeat;
use std::time::Duration;

use chassis::metrics::Metrics;
use tokio::time::Instant;
use types::prompt::Priority;
use types::{
    BlockCounts, BlockHash, CacheSalt, Deadline, KvDtype, KvLayout, LearnedCosts, NodeInfo, NodeLoad, Prompt,
    PromptWork, RequestId, RequestedModel, Role, Sampling, Scheme, StopRules, TenantId, TokenId, WireAddress,
};

use super::Outcome;
use super::load::{Fleet, Load, Machine, Shape};
use crate::cluster::assigned::{Assignment, RunningStream};
use crate::cluster::index::PrefixIndex;
use crate::cluster::routable::RoutableNode;
use crate::fake_node::info;
use crate::metrics::RouterMetrics;
use crate::policy::{AllowedArms, Arm, Ask, ClusterView, RoutingPolicy, by_name};
use crate::predictions::{Prediction, RouteLearner};

/// Bytes of KV per microsecond, over NVLink.
const RATE: f64 = 355e3;
const N_LAYERS: u16 = 32;
const BLOCK_TOKENS: usize = 16;
const STEP_TOKENS: usize = 2048;
/// A decode node computes a remainder of this length itself, as `decode.local_tokens_max` says.
const LOCAL_TOKENS_MAX: usize = 16;
/// One message between two processes.
const CALL_US: u64 = 500;
/// The time between two load reports.
const REPORT_US: u64 = 20_000;
/// The longest time between an answer and the client's next request.
const THINK_US: u64 = 8_000;
/// The share of the longest gap that steps are planned to take, as in `scheduler/src/worker/launching.rs`.
const GAP_SHARE: f64 = 0.75;
/// The time by which KV may arrive earlier than expected, as in that file.
const EARLY_ARRIVAL_US: f64 = 2_000.0;

const PREFILL: usize = 0;
const DECODE: usize = 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum SimulatedEvent {
    Ask { client: usize },
    Reserve { request: usize },
    CallPrefill { request: usize },
    Queue { node: usize, request: usize },
    StepEnd { node: usize },
    FirstToken { request: usize },
    KvArrived { request: usize },
    KvSeen { request: usize },
    LastToken { request: usize },
    Report { node: usize },
}

#[derive(Debug)]
struct Node {
    routed: RoutableNode,
    queue: VecDeque<Job>,
    streams: Vec<usize>,
    step: Option<Step>,
    machine: Machine,
    step_tokens_max: usize,
    /// The longest gap that prompts may cause; zero: any.
    gap_us: f64,
    /// The prefixes in the cache.
    prefixes: BTreeSet<usize>,
    arriving: u32,
    /// The last report that the worker has made.
    made: (u64, NodeLoad),
    reported: u64,
    report_is_due: bool,
}

/// A prompt on the node that computes it.
#[derive(Debug)]
struct Job {
    request: usize,
    n_tokens: usize,
    queued: u64,
    /// The begin of its first step, and the tokens that are left after the steps so far.
    begun: Option<u64>,
    left: usize,
}

#[derive(Debug)]
struct Step {
    begun: u64,
    took: f64,
    /// The prompts in the step, with their tokens. All are at the front of the queue.
    chunks: Vec<usize>,
    n_streams: usize,
}

#[derive(Debug)]
struct Request {
    client: usize,
    shape: Shape,
    decode: usize,
    arrived: u64,
    arm: Arm,
    assigned: Option<Assignment>,
    stream: Option<RunningStream>,
    prediction: Prediction,
    timing: (u64, u64),
    n_tokens: u32,
    last_token: u64,
    /// The time at which the KV arrived from another node; zero: the prompt was computed here.
    arrived_at: u64,
    bytes: f64,
    bytes_left: f64,
    sent_from: Option<u64>,
}

/// The simulation of one cell under one way to choose routes.
pub(super) struct Model {
    load: Load,
    policy: Box<dyn RoutingPolicy>,
    arms: AllowedArms<'static>,
    now: u64,
    start: Instant,
    events: BinaryHeap<Reverse<(u64, u64, SimulatedEvent)>>,
    n_events: u64,
    random: u64,
    nodes: [Node; 2],
    index: PrefixIndex,
    learner: RouteLearner,
    metrics: RouterMetrics,
    requests: Vec<Request>,
    /// The times at which KV is expected on the decode node, by request: of prompts whose last chunk is being computed.
    expected: BTreeMap<usize, u64>,
    n_asked: usize,
    turn: u64,
    wire_free: u64,
    outcome: Outcome,
}

impl Model {
    pub(super) fn new(load: Load, seed: u64, policy: &str, arms: AllowedArms<'static>) -> Self {
        let index = PrefixIndex::default();
        let node = |id, role| {
            let indexed = index.node();
            indexed.begin();
            indexed.set_complete();
            let gap_us = if role == Role::Decode { load.gap_us } else { 0.0 };
            let step_tokens_max = if role == Role::Prefill { load.prefill_step_tokens } else { STEP_TOKENS };
            let routed = RoutableNode::new(node_info(id, role).into(), indexed);
            Node::new(routed, load.machine, step_tokens_max, gap_us)
        };
        let nodes = match load.fleet {
            Fleet::Pair => [node("p", Role::Prefill), node("d", Role::Decode)],
            Fleet::Colocated => [node("a", Role::Both), node("b", Role::Both)],
        };
        let (start, random) = (Instant::now(), seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let mut model = Self {
            policy: by_name(policy).expect("in the table"),
            arms,
            now: 0,
            start,
            events: BinaryHeap::new(),
            n_events: 0,
            random,
            nodes,
            index,
            learner: RouteLearner::default(),
            metrics: RouterMetrics::new(&Metrics::new("router")),
            requests: Vec::new(),
            expected: BTreeMap::new(),
            n_asked: 0,
            turn: 0,
            wire_free: 0,
            outcome: Outcome::default(),
            load,
        };
        (0..2).for_each(|node| model.turn(node));
        (0..2).for_each(|node| model.report(node));
        for client in 0..model.load.concurrency {
            let first = model.draw() % model.load.start_us;
            model.at(first, SimulatedEvent::Ask { client });
        }
        for nth in 0..model.load.arrivals.len() {
            model.at(model.load.arrivals[nth], SimulatedEvent::Ask { client: nth });
        }
        model
    }

    pub(super) fn run(mut self) -> Outcome {
        while let Some(Reverse((at, _, event))) = self.events.pop() {
            self.now = at;
            match event {
                SimulatedEvent::Ask { client } => self.ask(client),
                SimulatedEvent::Reserve { request } => self.reserve(request),
                SimulatedEvent::CallPrefill { request } => {
                    let now = self.instant();
                    self.requests[request].assigned.iter().for_each(|it| it.prefill_called(now));
                    self.at(CALL_US, SimulatedEvent::Queue { node: PREFILL, request });
                }
                SimulatedEvent::Queue { node, request } => self.queue(node, request),
                SimulatedEvent::StepEnd { node } => self.step_end(node),
                SimulatedEvent::FirstToken { request } => self.first_token(request),
                SimulatedEvent::KvArrived { request } => {
                    self.nodes[DECODE].arriving -= 1;
                    self.requests[request].arrived_at = self.now;
                    self.expected.remove(&request);
                    self.decode(request);
                    self.turn(DECODE);
                    self.at(CALL_US, SimulatedEvent::KvSeen { request });
                }
                SimulatedEvent::KvSeen { request } => {
                    let request = &self.requests[request];
                    let moved = Duration::from_micros(self.now - request.sent_from.unwrap_or(self.now));
                    let bytes = request.bytes as u64;
                    request.prediction.kv_arrived("tcp", bytes, moved, self.instant());
                }
                SimulatedEvent::LastToken { request } => self.requests[request].stream = None,
                SimulatedEvent::Report { node } => {
                    self.nodes[node].report_is_due = false;
                    self.report(node);
                }
            }
        }
        self.outcome
    }

    // === the router ===

    fn ask(&mut self, client: usize) {
        let Some(&shape) = self.load.shapes.get(self.n_asked) else { return };
        self.n_asked += 1;
        let (draw, now) = (self.draw(), self.instant());
        let (prompt, hashes) = (prompt(shape.prompt_tokens, self.start), self.hashes(shape.prefix));
        let ask = Ask { arms: self.arms, ..Ask::new(&prompt, &hashes) };
        let matches = self.index.matches(&hashes, now);
        let nodes = self.nodes.iter().map(|node| node.routed.view(&matches, now)).collect();
        let view = ClusterView { nodes, learned: self.learner.costs() };
        let decision = self.policy.route(&ask, &view, draw).expect("two nodes");
        let missing = PromptWork::of(u64::from(decision.terms.cached_tokens)..ask.n_tokens());
        let is_remote = decision.arm == Arm::Remote;
        let decode = if decision.route.decode.id.as_str() == "a" { PREFILL } else { DECODE };
        let mut share = |node: usize| {
            self.turn += 1;
            let receives = is_remote && node == decode;
            // The index knows the blocks of a node that has the prefix.
            let is_known = receives || self.nodes[node].prefixes.contains(&shape.prefix);
            let expected = if is_known { &[][..] } else { &hashes };
            let work = if receives { PromptWork::default() } else { missing };
            self.nodes[node].routed.assign(expected, work, self.turn, now)
        };
        let assigned = Assignment { prefill: is_remote.then(|| share(PREFILL)), decode: Some(share(decode)) };
        assigned.decode_called(now);
        let (learner, metrics) = (self.learner.clone(), self.metrics.predictions.clone());
        self.outcome.arms[decision.arm as usize] += 1;
        self.requests.push(Request {
            client,
            shape,
            decode,
            arrived: self.now,
            arm: decision.arm,
            assigned: Some(assigned),
            stream: None,
            prediction: Prediction::new(&decision, learner, metrics, now),
            timing: (0, 0),
            n_tokens: 0,
            last_token: 0,
            arrived_at: 0,
            bytes: 0.0,
            bytes_left: 0.0,
            sent_from: None,
        });
        self.at(CALL_US, SimulatedEvent::Reserve { request: self.requests.len() - 1 });
    }

    fn reserve(&mut self, request: usize) {
        let (shape, decode) = (self.requests[request].shape, self.requests[request].decode);
        let missing = shape.prompt_tokens - self.held(decode, shape.prefix);
        if self.requests[request].arm == Arm::Remote && missing > LOCAL_TOKENS_MAX {
            let bytes = (missing * token_bytes()) as f64;
            (self.requests[request].bytes, self.requests[request].bytes_left) = (bytes, bytes);
            self.nodes[DECODE].arriving += 1;
            self.turn(DECODE);
            return self.at(CALL_US, SimulatedEvent::CallPrefill { request });
        }
        self.queue(decode, request);
    }

    fn first_token(&mut self, request: usize) {
        let now = self.instant();
        let record = &mut self.requests[request];
        record.stream = record.assigned.take().and_then(Assignment::into_stream);
        let (queued, computed) = record.timing;
        record.prediction.first_token(Duration::from_micros(queued), Duration::from_micros(computed), now);
        let took = self.now - record.arrived;
        if request >= self.load.n_warm_up {
            self.outcome.first.push(took);
        }
    }

    // === the nodes ===

    fn queue(&mut self, node: usize, request: usize) {
        let n_tokens = self.requests[request].shape.prompt_tokens;
        let job = Job { request, n_tokens, queued: self.now, begun: None, left: n_tokens };
        self.nodes[node].queue.push_back(job);
        self.turn(node);
    }

    /// Makes a load report, and begins a step if there is work and none runs.
    fn turn(&mut self, node: usize) {
        if self.nodes[node].step.is_some() {
            return;
        }
        self.begin_step(node);
        let running_us = self.running_us(node);
        let it = &mut self.nodes[node];
        it.made = (self.now, it.load(running_us));
        if !it.report_is_due {
            it.report_is_due = true;
            let wait = (it.reported + REPORT_US).saturating_sub(self.now);
            self.at(wait, SimulatedEvent::Report { node });
        }
    }

    fn report(&mut self, node: usize) {
        let now = self.instant();
        let it = &mut self.nodes[node];
        let (made, load) = it.made;
        it.reported = self.now;
        it.routed.report(NodeLoad { age_ms: (self.now - made) as f32 / 1e3, ..load }, now);
    }

    fn begin_step(&mut self, node: usize) {
        let now = self.now;
        let held =
            self.nodes[node].queue.iter().map(|job| self.held(node, self.requests[job.request].shape.prefix));
        let held: Vec<usize> = held.collect();
        let n_streams = self.nodes[node].streams.len();
        let running_us = self.running_us(node);
        let mut prompt_us = self.prompt_us_max(node, running_us);
        let it = &mut self.nodes[node];
        let mut room = it.step_tokens_max - n_streams;
        let (mut chunks, mut took) = (Vec::new(), running_us);
        for (job, held) in it.queue.iter_mut().zip(held) {
            if job.begun.is_none() {
                (job.begun, job.left) = (Some(now), job.left - held);
            }
            let fits = it.machine.tokens_within(prompt_us, job.n_tokens - job.left);
            let n_tokens = job.left.min(room).min(fits);
            if n_tokens == 0 {
                break;
            }
            let takes = it.machine.prompt_us(job.n_tokens - job.left, n_tokens);
            chunks.push(n_tokens);
            (room, prompt_us, took) = (room - n_tokens, prompt_us - takes, took + takes);
        }
        if n_streams + chunks.len() == 0 {
            return;
        }
        if node == PREFILL {
            let ending = it.queue.iter().zip(&chunks).filter(|(job, n_tokens)| job.left == **n_tokens);
            self.expected.extend(ending.map(|(job, _)| (job.request, now + took as u64 + CALL_US)));
        }
        it.step = Some(Step { begun: now, took, chunks, n_streams });
        self.at(took as u64, SimulatedEvent::StepEnd { node });
    }

    /// Returns the time of a step of the node's streams without prompts.
    fn running_us(&self, node: usize) -> f64 {
        let streams = &self.nodes[node].streams;
        let context = |request: &usize| {
            let request = &self.requests[*request];
            request.shape.prompt_tokens + request.n_tokens as usize
        };
        self.nodes[node].machine.running_us(streams.len(), streams.iter().map(context).sum())
    }

    /// Returns the time that prompts may take in the node's next step, as `Worker::step_tokens` plans it.
    fn prompt_us_max(&self, node: usize, running_us: f64) -> f64 {
        let it = &self.nodes[node];
        if it.gap_us == 0.0 {
            return f64::INFINITY;
        }
        let waits = |request: &usize| {
            let request = &self.requests[*request];
            (request.n_tokens == 1 && request.arrived_at > 0).then(|| self.now - request.arrived_at)
        };
        let waited = it.streams.iter().filter_map(waits).max().unwrap_or_default() as f64;
        let next = self.expected.values().min().map_or(0.0, |at| {
            running_us + it.machine.row_us + EARLY_ARRIVAL_US - at.saturating_sub(self.now) as f64
        });
        (it.gap_us * GAP_SHARE - running_us - waited.max(next)).max(0.0)
    }

    fn step_end(&mut self, node: usize) {
        let step = self.nodes[node].step.take().expect("a step ends");
        let streams: Vec<usize> = self.nodes[node].streams[..step.n_streams].to_vec();
        streams.into_iter().for_each(|request| self.token(request));
        for (nth, n_tokens) in step.chunks.iter().enumerate() {
            let job = &mut self.nodes[node].queue[nth];
            job.left -= n_tokens;
            let (request, left) = (job.request, job.left);
            if node != self.requests[request].decode {
                self.send(request, step.begun, *n_tokens, left);
            }
        }
        while self.nodes[node].queue.front().is_some_and(|job| job.left == 0) {
            let job = self.nodes[node].queue.pop_front().expect("a front");
            let begun = job.begun.expect("computed");
            self.requests[job.request].timing = (begun - job.queued, self.now - begun);
            self.requests[job.request].last_token = self.now;
            self.requests[job.request].n_tokens = 1;
            self.store(node, job.request);
            self.at(CALL_US, SimulatedEvent::FirstToken { request: job.request });
            if node == self.requests[job.request].decode {
                self.decode(job.request);
            }
        }
        self.turn(node);
    }

    /// Sends the KV of a chunk layer by layer, as the layers are computed. The last chunk, after which no
    /// token is `left`, also sends the cached KV.
    fn send(&mut self, request: usize, begun: u64, n_tokens: usize, left: usize) {
        let record = &mut self.requests[request];
        record.sent_from.get_or_insert(begun);
        let of_chunk = (n_tokens * token_bytes()) as f64;
        let bytes = if left == 0 { record.bytes_left } else { of_chunk.min(record.bytes_left) };
        record.bytes_left -= bytes;
        let layer = f64::from(N_LAYERS);
        let first_layer = begun as f64 + (self.now - begun) as f64 / layer;
        let streamed = first_layer.max(self.wire_free as f64) + bytes / RATE;
        let last_layer = self.now as f64 + bytes / layer / RATE;
        self.wire_free = streamed.max(last_layer) as u64;
        if left == 0 {
            let arrives = self.wire_free + CALL_US - self.now;
            self.expected.insert(request, self.now + arrives);
            self.at(arrives, SimulatedEvent::KvArrived { request });
        }
    }

    /// Adds a request whose KV is there to the streams.
    fn decode(&mut self, request: usize) {
        let node = self.requests[request].decode;
        self.store(node, request);
        self.nodes[node].streams.push(request);
    }

    /// Puts the prefix of a request's prompt into a node's cache.
    fn store(&mut self, node: usize, request: usize) {
        let prefix = self.requests[request].shape.prefix;
        let hashes = self.hashes(prefix);
        let it = &mut self.nodes[node];
        if it.prefixes.insert(prefix) && !hashes.is_empty() {
            it.routed.blocks.store(&hashes);
        }
    }

    fn token(&mut self, request: usize) {
        let record = &mut self.requests[request];
        record.n_tokens += 1;
        let gap = self.now - std::mem::replace(&mut record.last_token, self.now);
        let (client, n_tokens) = (record.client, record.n_tokens);
        if request >= self.load.n_warm_up {
            let gaps = if n_tokens == 2 { &mut self.outcome.second } else { &mut self.outcome.gaps };
            gaps.push(gap);
        }
        if n_tokens == record.shape.answer_tokens {
            let node = record.decode;
            self.nodes[node].streams.retain(|stream| *stream != request);
            let think = self.draw() % THINK_US;
            self.at(CALL_US, SimulatedEvent::LastToken { request });
            if self.load.arrivals.is_empty() {
                self.at(CALL_US + think, SimulatedEvent::Ask { client });
            }
        }
    }

    /// Returns the number of tokens of a prefix that a node has.
    fn held(&self, node: usize, prefix: usize) -> usize {
        let n_blocks = self.load.prefix_tokens / BLOCK_TOKENS;
        if self.nodes[node].prefixes.contains(&prefix) { n_blocks * BLOCK_TOKENS } else { 0 }
    }

    fn hashes(&self, prefix: usize) -> Vec<BlockHash> {
        let n_blocks = (self.load.prefix_tokens / BLOCK_TOKENS) as u128;
        (1..=n_blocks).map(|nth| BlockHash(nth << 70 | (prefix as u128) << 40 | nth)).collect()
    }

    // === time and chance ===

    fn at(&mut self, wait: u64, event: SimulatedEvent) {
        self.n_events += 1;
        self.events.push(Reverse((self.now + wait, self.n_events, event)));
    }

    fn instant(&self) -> Instant {
        self.start + Duration::from_micros(self.now)
    }

    fn draw(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
}

impl Node {
    fn new(routed: RoutableNode, machine: Machine, step_tokens_max: usize, gap_us: f64) -> Self {
        Self {
            routed,
            queue: VecDeque::new(),
            streams: Vec::new(),
            step: None,
            machine,
            step_tokens_max,
            gap_us,
            prefixes: BTreeSet::new(),
            arriving: 0,
            made: (0, NodeLoad::default()),
            reported: 0,
            report_is_due: false,
        }
    }

    /// Returns the load report that the worker makes when it has begun a step. The step's tokens are not queued any more.
    /// Its streams take `running_us` of the step.
    fn load(&self, running_us: f64) -> NodeLoad {
        let (machine, running) = (self.machine, self.streams.len() + self.queue.len());
        let row_us = machine.row_us;
        let in_step = self.step.iter().flat_map(|step| step.chunks.iter().copied()).chain(repeat(0));
        let left = self.queue.iter().zip(in_step).map(|(job, in_step)| {
            PromptWork::of((job.n_tokens - job.left + in_step) as u64..job.n_tokens as u64)
        });
        let left: PromptWork = left.sum();
        let has_prompts = |step: &&Step| !step.chunks.is_empty();
        let step_us = self.step.as_ref().filter(has_prompts).map_or(0.0, |step| step.took);
        let fits = machine.tokens_within((self.gap_us * GAP_SHARE - running_us).max(0.0), 0);
        let chunk = if self.gap_us > 0.0 { fits.max(BLOCK_TOKENS) } else { usize::MAX };
        let costs = LearnedCosts {
            prompt_token_ms: (machine.prompt_token_us / 1e3) as f32,
            prompt_context_ms: (machine.rise_us / 1e3) as f32,
            prompt_step_ms: 0.0,
            step_ms: (machine.step_us / 1e3) as f32,
            row_ms: (row_us / 1e3) as f32,
            context_ms: (machine.context_us / 1e3) as f32,
            step_tokens: self.step_tokens_max.min(chunk.saturating_add(running)) as u32,
            gap_ms_max: (self.gap_us / 1e3) as f32,
        };
        let steps_us = costs.prompt_steps(left, running as u32) * running_us;
        let queue_us = step_us + costs.tokens_ms(left) * 1e3 + steps_us;
        NodeLoad {
            running: running as u32,
            arriving: self.arriving,
            queued_tokens: left.n_tokens,
            queue_ms: (queue_us / 1e3) as f32,
            step_ms: ((running_us + row_us * (self.queue.len() + 1) as f64) / 1e3) as f32,
            blocks: BlockCounts { total: 1 << 20, free: 1 << 20, ..BlockCounts::default() },
            costs,
            ..NodeLoad::default()
        }
    }
}

fn layout() -> KvLayout {
    KvLayout::uniform(BLOCK_TOKENS as u16, KvDtype::Bf16, N_LAYERS, 8, 128)
}

/// Returns the bytes of one token's KV.
fn token_bytes() -> usize {
    layout().block_bytes(types::GroupIdx(0)) / BLOCK_TOKENS
}

fn node_info(id: &str, role: Role) -> NodeInfo {
    let wire = WireAddress { scheme: Scheme::new("tcp"), endpoint: String::new(), within_host: false };
    let mut info = NodeInfo { wires: vec![wire], ..info(id, role) };
    info.model.layout = layout();
    info
}

fn prompt(n_tokens: usize, start: Instant) -> Prompt {
    Prompt {
        id: RequestId::new("r"),
        tenant: TenantId::default(),
        cache_salt: CacheSalt::default(),
        model: RequestedModel::named("mock"),
        tokens: vec![TokenId(1); n_tokens].into(),
        n_generated: 0,
        sampling: Sampling::default(),
        stop: StopRules::default(),
        priority: Priority(0),
        deadline: Deadline::at((start + Duration::from_secs(60)).into()),
    }
}
