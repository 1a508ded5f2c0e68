//! A model of one prefill and one decode node in simulated time, under the router's own policies and bookkeeping.
//!
//! Times are microseconds. The costs are those of Llama-3.1-8B on an H200, as in docs/measurements.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::time::Duration;

use chassis::metrics::Metrics;
use tokio::time::Instant;
use types::prompt::Priority;
use types::{
    BlockCounts, BlockHash, CacheSalt, Deadline, KvDtype, KvLayout, LearnedCosts, NodeInfo, NodeLoad, Prompt,
    RequestId, RequestedModel, Role, Sampling, Scheme, StopRules, TenantId, TokenId, WireAddress,
};

use super::{Cell, Outcome};
use crate::cluster::assigned::{Assignment, RunningStream};
use crate::cluster::index::PrefixIndex;
use crate::cluster::routable::RoutableNode;
use crate::fake_node::info;
use crate::metrics::RouterMetrics;
use crate::policy::{AllowedArms, Arm, Ask, ClusterView, RoutingPolicy, by_name};
use crate::predictions::{Prediction, RouteLearner};

const STEP_US: f64 = 4_000.0;
const ROW_US: f64 = 35.0;
const PROMPT_TOKEN_US: f64 = 23.0;
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
    has_prefix: bool,
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
    queued: u64,
    /// The begin of its first step, and the tokens that are left after the steps so far.
    begun: Option<u64>,
    left: usize,
}

#[derive(Debug)]
struct Step {
    begun: u64,
    /// The prompts in the step, with their tokens. All are at the front of the queue.
    chunks: Vec<usize>,
    n_streams: usize,
}

#[derive(Debug)]
struct Request {
    client: usize,
    arrived: u64,
    arm: Arm,
    assigned: Option<Assignment>,
    stream: Option<RunningStream>,
    prediction: Prediction,
    timing: (u64, u64),
    n_tokens: u32,
    last_token: u64,
    bytes: f64,
    bytes_left: f64,
    sent_from: Option<u64>,
}

/// The simulation of one cell under one way to choose routes.
pub(super) struct Model {
    cell: Cell,
    policy: Box<dyn RoutingPolicy>,
    arms: AllowedArms<'static>,
    now: u64,
    start: Instant,
    events: BinaryHeap<Reverse<(u64, u64, SimulatedEvent)>>,
    n_events: u64,
    random: u64,
    nodes: [Node; 2],
    index: PrefixIndex,
    hashes: Vec<BlockHash>,
    prompt: Prompt,
    learner: RouteLearner,
    metrics: RouterMetrics,
    requests: Vec<Request>,
    n_asked: usize,
    turn: u64,
    wire_free: u64,
    outcome: Outcome,
}

impl Model {
    pub(super) fn new(cell: Cell, seed: u64, policy: &str, arms: AllowedArms<'static>) -> Self {
        let index = PrefixIndex::default();
        let node = |id, role| {
            let indexed = index.node();
            indexed.begin();
            indexed.set_complete();
            Node::new(RoutableNode::new(node_info(id, role).into(), indexed))
        };
        let nodes = [node("p", Role::Prefill), node("d", Role::Decode)];
        let prefix_blocks = cell.prompt_tokens * cell.shared_percent / 100 / BLOCK_TOKENS;
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
            hashes: (1..=prefix_blocks as u128).map(|nth| BlockHash(nth << 70 | nth)).collect(),
            index,
            prompt: prompt(cell.prompt_tokens, start),
            learner: RouteLearner::default(),
            metrics: RouterMetrics::new(&Metrics::new("router")),
            requests: Vec::new(),
            n_asked: 0,
            turn: 0,
            wire_free: 0,
            outcome: Outcome::default(),
            cell,
        };
        (0..2).for_each(|node| model.turn(node));
        (0..2).for_each(|node| model.report(node));
        for client in 0..cell.concurrency {
            let first = model.draw() % cell.start_us();
            model.at(first, SimulatedEvent::Ask { client });
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
        if self.n_asked == self.cell.n_requests() {
            return;
        }
        self.n_asked += 1;
        let (draw, now) = (self.draw(), self.instant());
        let prompt = self.prompt.clone();
        let ask = Ask { arms: self.arms, ..Ask::new(&prompt, &self.hashes) };
        let matches = self.index.matches(&self.hashes, now);
        let nodes = self.nodes.iter().map(|node| node.routed.view(&matches)).collect();
        let view = ClusterView { nodes, learned: self.learner.costs() };
        let decision = self.policy.route(&ask, &view, draw).expect("two nodes");
        let missing = ask.n_tokens() - u64::from(decision.terms.cached_tokens);
        let mut share = |node: usize, n_tokens| {
            self.turn += 1;
            // The index knows the blocks of a node that has the prefix.
            let expected = if self.nodes[node].has_prefix { &[][..] } else { &self.hashes };
            self.nodes[node].routed.assign(expected, n_tokens, self.turn, now)
        };
        let is_remote = decision.arm == Arm::Remote;
        let assigned = Assignment {
            prefill: is_remote.then(|| share(PREFILL, missing)),
            decode: Some(share(DECODE, if is_remote { 0 } else { missing })),
        };
        assigned.decode_called(now);
        let (learner, metrics) = (self.learner.clone(), self.metrics.predictions.clone());
        self.outcome.arms[decision.arm as usize] += 1;
        self.requests.push(Request {
            client,
            arrived: self.now,
            arm: decision.arm,
            assigned: Some(assigned),
            stream: None,
            prediction: Prediction::new(&decision, learner, metrics, now),
            timing: (0, 0),
            n_tokens: 0,
            last_token: 0,
            bytes: 0.0,
            bytes_left: 0.0,
            sent_from: None,
        });
        self.at(CALL_US, SimulatedEvent::Reserve { request: self.requests.len() - 1 });
    }

    fn reserve(&mut self, request: usize) {
        let missing = self.cell.prompt_tokens - self.held(DECODE);
        if self.requests[request].arm == Arm::Remote && missing > LOCAL_TOKENS_MAX {
            let bytes = (missing * token_bytes()) as f64;
            (self.requests[request].bytes, self.requests[request].bytes_left) = (bytes, bytes);
            self.nodes[DECODE].arriving += 1;
            self.turn(DECODE);
            return self.at(CALL_US, SimulatedEvent::CallPrefill { request });
        }
        self.queue(DECODE, request);
    }

    fn first_token(&mut self, request: usize) {
        let now = self.instant();
        let record = &mut self.requests[request];
        record.stream = record.assigned.take().and_then(Assignment::into_stream);
        let (queued, computed) = record.timing;
        record.prediction.first_token(Duration::from_micros(queued), Duration::from_micros(computed), now);
        let took = self.now - record.arrived;
        if request >= self.cell.n_warm_up() {
            self.outcome.first.push(took);
        }
    }

    // === the nodes ===

    fn queue(&mut self, node: usize, request: usize) {
        let left = self.cell.prompt_tokens;
        self.nodes[node].queue.push_back(Job { request, queued: self.now, begun: None, left });
        self.turn(node);
    }

    /// Makes a load report, and begins a step if there is work and none runs.
    fn turn(&mut self, node: usize) {
        if self.nodes[node].step.is_some() {
            return;
        }
        self.begin_step(node);
        let it = &mut self.nodes[node];
        it.made = (self.now, it.load());
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
        let (now, held) = (self.now, self.held(node));
        let it = &mut self.nodes[node];
        let n_streams = it.streams.len();
        let mut room = STEP_TOKENS - n_streams;
        let mut chunks = Vec::new();
        for job in &mut it.queue {
            if room == 0 {
                break;
            }
            if job.begun.is_none() {
                (job.begun, job.left) = (Some(now), job.left - held);
            }
            chunks.push(job.left.min(room));
            room -= job.left.min(room);
        }
        if n_streams + chunks.len() == 0 {
            return;
        }
        let n_prompt: usize = chunks.iter().sum();
        let took = STEP_US + ROW_US * n_streams as f64 + PROMPT_TOKEN_US * n_prompt as f64;
        it.step = Some(Step { begun: now, chunks, n_streams });
        self.at(took as u64, SimulatedEvent::StepEnd { node });
    }

    fn step_end(&mut self, node: usize) {
        let step = self.nodes[node].step.take().expect("a step ends");
        let streams: Vec<usize> = self.nodes[node].streams[..step.n_streams].to_vec();
        streams.into_iter().for_each(|request| self.token(request));
        for (nth, n_tokens) in step.chunks.iter().enumerate() {
            let job = &mut self.nodes[node].queue[nth];
            job.left -= n_tokens;
            let (request, left) = (job.request, job.left);
            if node == PREFILL {
                self.send(request, step.begun, *n_tokens, left);
            }
        }
        while self.nodes[node].queue.front().is_some_and(|job| job.left == 0) {
            let job = self.nodes[node].queue.pop_front().expect("a front");
            let begun = job.begun.expect("computed");
            self.requests[job.request].timing = (begun - job.queued, self.now - begun);
            self.requests[job.request].last_token = self.now;
            self.requests[job.request].n_tokens = 1;
            self.nodes[node].stores(&self.hashes);
            self.at(CALL_US, SimulatedEvent::FirstToken { request: job.request });
            if node == DECODE {
                self.decode(job.request);
            }
        }
        self.turn(node);
    }

    /// Sends the KV of a chunk layer by layer, as the layers are computed. The last chunk, after which no
    /// token is `left`, takes along what was cached.
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
            self.at(arrives, SimulatedEvent::KvArrived { request });
        }
    }

    /// Adds a request whose KV is there to the streams.
    fn decode(&mut self, request: usize) {
        self.nodes[DECODE].stores(&self.hashes);
        self.nodes[DECODE].streams.push(request);
    }

    fn token(&mut self, request: usize) {
        let record = &mut self.requests[request];
        record.n_tokens += 1;
        let gap = self.now - std::mem::replace(&mut record.last_token, self.now);
        let (client, n_tokens) = (record.client, record.n_tokens);
        if request >= self.cell.n_warm_up() {
            let gaps = if n_tokens == 2 { &mut self.outcome.second } else { &mut self.outcome.gaps };
            gaps.push(gap);
        }
        if n_tokens == self.cell.answer_tokens {
            self.nodes[DECODE].streams.retain(|stream| *stream != request);
            let think = self.draw() % THINK_US;
            self.at(CALL_US, SimulatedEvent::LastToken { request });
            self.at(CALL_US + think, SimulatedEvent::Ask { client });
        }
    }

    fn held(&self, node: usize) -> usize {
        if self.nodes[node].has_prefix { self.hashes.len() * BLOCK_TOKENS } else { 0 }
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
    fn new(routed: RoutableNode) -> Self {
        Self {
            routed,
            queue: VecDeque::new(),
            streams: Vec::new(),
            step: None,
            has_prefix: false,
            arriving: 0,
            made: (0, NodeLoad::default()),
            reported: 0,
            report_is_due: false,
        }
    }

    fn stores(&mut self, hashes: &[BlockHash]) {
        if !std::mem::replace(&mut self.has_prefix, true) && !hashes.is_empty() {
            self.routed.blocks.store(hashes);
        }
    }

    fn load(&self) -> NodeLoad {
        let (step_ms, row_ms, token_ms) = (STEP_US / 1e3, ROW_US / 1e3, PROMPT_TOKEN_US / 1e3);
        let queued: usize = self.queue.iter().map(|job| job.left).sum();
        let running = self.streams.len() + self.queue.len();
        let n_steps = queued.div_ceil(STEP_TOKENS - running);
        let running_ms = step_ms + row_ms * running as f64;
        NodeLoad {
            running: running as u32,
            arriving: self.arriving,
            queued_tokens: queued as u64,
            queue_ms: (queued as f64 * token_ms + n_steps as f64 * running_ms) as f32,
            step_ms: (running_ms + row_ms) as f32,
            blocks: BlockCounts { total: 1 << 20, free: 1 << 20, ..BlockCounts::default() },
            costs: LearnedCosts {
                prompt_token_ms: token_ms as f32,
                step_ms: step_ms as f32,
                row_ms: row_ms as f32,
                step_tokens: STEP_TOKENS as u32,
                ..LearnedCosts::default()
            },
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
