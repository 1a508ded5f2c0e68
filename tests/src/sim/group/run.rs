//! One run: executes a plan and checks it.

use std::future::pending;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::Duration;

use chassis::net::MemoryNet;
use chassis::{Gate, Net, Shutdown, Task, World, spawn_guarded};
use engine::{Backend, SlotId};
use futures::FutureExt as _;
use futures::future::join_all;
use kv_cache::{BlockLease, BlockPool, Holder, Holding, KvMemory};
use kv_transfer::{
    Arrival, ChunkQueue, ConnectorParts, Faults, KvConnector, LandRequest, TransferError, TransferMetrics,
};
use node::NodeConfig;
use node::group::{Group, HeadParts, gather};
use tokio::sync::mpsc;
use tokio::time::sleep;
use types::{BlockIdx, Destination, Epoch, Landing, NodeId, RequestId, Role, in_full};

use super::super::chance::Chance;
use super::super::log::EventLog;
use super::super::net::SimNet;
use super::super::run::Report;
use super::clock::Progress;
use super::plan::Plan;
use super::processes::{HEAD, ProcessSettings, Processes};
use super::reference::{N_PROMPTS, Reference, reference};
use super::reports::LandingReports;
use super::waits::{Waits, on_virtual_clock};
use super::work::{CHUNKS_MAX, OUTCOMES_MAX, Outcome, PromptWork, Worker};

/// A landing's own deadline. No transfer may end by it.
const LANDING_FOR: Duration = Duration::from_secs(600);
/// The longest time from the begin of a short pause, or from its end at the head, until links of KV are there again.
const LINKS_BACK_WITHIN: Duration = Duration::from_secs(8);
/// The prompts of a wave after a pause.
const LAST_WAVE: [usize; 1] = [N_PROMPTS - 1];
const DECODE: &str = "decode";
const DECODE_BLOCKS: u32 = 64;

/// Runs the plan of `seed`, and returns the results.
pub fn run(seed: u64) -> Report {
    let plan = Plan::draw(seed);
    let reference = reference(plan.n_followers);
    on_virtual_clock(seed, plan.n_followers, async |waits| {
        waits.log.say(format_args!("{plan:?}"));
        Run::new(seed, plan, waits, reference).play().await;
    })
}

struct Run {
    plan: Plan,
    waits: Waits,
    log: EventLog,
    reference: &'static Reference,
    progress: Progress,
    world: World,
    /// The network of KV.
    kv: SimNet,
    processes: Arc<Processes>,
    gates: Gates,
    /// The gate of relays and of the run's own tasks.
    own_gate: Gate,
}

/// The gates of the tasks that must have ended after the run.
struct Gates {
    head: Gate,
    /// The head's connector.
    wires: Gate,
    decode: Gate,
}

/// A node with its memory.
struct Memory {
    name: &'static str,
    memory: KvMemory,
    pool: BlockPool,
    connector: Arc<dyn KvConnector>,
}

/// The nodes that compute waves.
struct Nodes {
    head: Memory,
    decode: Memory,
    waves: SyncSender<Vec<PromptWork>>,
    outcomes: mpsc::Receiver<Outcome>,
}

/// The sequences of one wave.
struct Wave {
    works: Vec<PromptWork>,
    transfers: Vec<Task<Result<(), TransferError>>>,
    arrivals: Vec<ExpectedPrompt>,
}

/// A prompt whose KV the decode node expects.
struct ExpectedPrompt {
    /// The index of the reference's prompt.
    prompt: usize,
    arrival: Arrival,
    /// Triggered when the head's link has opened the landing.
    opened: Shutdown,
}

impl Run {
    fn new(seed: u64, plan: Plan, waits: Waits, reference: &'static Reference) -> Self {
        let (world, own_gate) = (World::seeded(seed), Gate::new("simulation"));
        let kv = SimNet::new(Chance::named(seed, "group's network"), waits.log.clone());
        let processes = Processes::start(ProcessSettings {
            n_followers: plan.n_followers,
            reference,
            waits: waits.clone(),
            world: world.clone(),
            joining: MemoryNet::new(),
            kv: kv.clone(),
            delay: Duration::ZERO,
            faults: plan.faults.clone(),
            reports: LandingReports::default(),
            own_gate: own_gate.clone(),
        });
        Self {
            log: waits.log.clone(),
            progress: waits.progress.clone(),
            waits,
            plan,
            reference,
            world,
            kv,
            processes,
            gates: Gates { head: Gate::new(HEAD), wires: Gate::new("wires"), decode: Gate::new(DECODE) },
            own_gate,
        }
    }

    async fn play(self) {
        let config = self.reference.config(self.plan.n_followers as u16 + 1, HEAD);
        let parts = HeadParts {
            world: self.world_of(HEAD, Arc::new(self.processes.settings.joining.clone())),
            gate: self.gates.head.clone(),
            id: NodeId::new(HEAD),
            role: Role::Prefill,
            settings: config.group.clone(),
            engine: config.engine.clone(),
        };
        let gathering = self.processes.of_head(gather(parts));
        let gathered = self.waits.in_time("the head gathers its followers", gathering).await;
        self.progress.note(|seen| seen.is_gathered = true);
        match gathered {
            Some(Some(Ok((group, backend)))) => self.serve(&config, group, backend).await,
            Some(Some(Err(error))) => self.waits.expect_failure("the head", in_full(&error)),
            Some(None) => self.processes.check_end_after_head().await,
            None => return,
        }
        self.log.say("the head has ended");
        self.processes.check_ends().await;
        let Gates { head, wires, decode } = &self.gates;
        for gate in [head, wires, decode] {
            self.waits.all_end(gate).await;
        }
    }

    fn world_of(&self, name: &str, net: Arc<dyn Net>) -> World {
        self.world.clone().with_net(net).fork(name)
    }

    // === the head's life ===

    async fn serve(&self, config: &NodeConfig, group: Arc<Group>, backend: Box<dyn Backend>) {
        let head = self.processes.of_head(self.head(config, &group, backend.memory())).await;
        let Some(head) = head else { return self.processes.check_end_after_head().await };
        let (waves, to_compute) = sync_channel(1);
        let (outcomes_in, outcomes) = mpsc::channel(OUTCOMES_MAX);
        let worker = Worker {
            backend,
            reference: self.reference,
            chunk_blocks: self.plan.chunk_blocks.clone(),
            n_sets: self.plan.n_sets,
            waves: to_compute,
            outcomes: outcomes_in,
            progress: self.progress.clone(),
            process: self.processes.standstill_of_head(),
        };
        let worker = worker.start();
        let mut nodes = Nodes { head, decode: self.decode().await, waves, outcomes };
        if self.compute(&mut nodes).await {
            sleep(self.plan.idle).await;
        }
        self.processes.all_go_on().await;
        self.check_lost(&group).await;
        self.check_free(&nodes).await;
        drop((nodes, group));
        let ended = async {
            while !worker.is_finished() {
                tokio::task::yield_now().await;
            }
        };
        self.waits.soon("the threads of the pipeline end", ended).await;
    }

    /// Checks that the blocks of both nodes return.
    async fn check_free(&self, nodes: &Nodes) {
        for node in [&nodes.head, &nodes.decode] {
            self.waits.soon(&format!("all blocks of {} are free", node.name), node.is_empty()).await;
            if let Err(error) = node.pool.integrity() {
                self.log.accuse(format_args!("the pool of {}: {error}", node.name));
            }
        }
    }

    /// Checks that the node ends if it must, and only then.
    async fn check_lost(&self, group: &Group) {
        if self.waits.must_end() {
            if let Some(lost) = self.waits.in_time("the head notices the fault", group.lost()).await {
                self.log.say(format_args!("the head ends: {lost}"));
            }
        } else if let Some(lost) = group.lost().now_or_never() {
            self.log.accuse(format_args!("the head ends without a fault: {lost}"));
        }
        self.processes.check_end_after_head().await;
    }

    /// Computes all waves, and sends their KV. Returns false if the node has failed.
    async fn compute(&self, nodes: &mut Nodes) -> bool {
        let n_waves = self.plan.waves.len();
        for (nth, prompts) in self.plan.waves.iter().enumerate() {
            if !self.compute_wave(nodes, nth, prompts).await {
                return false;
            }
        }
        if !self.plan.has_noticed_pause() {
            return true;
        }
        // All links must be there again.
        sleep(LINKS_BACK_WITHIN).await;
        !self.waits.must_end() && self.compute_wave(nodes, n_waves, &LAST_WAVE).await
    }

    async fn compute_wave(&self, nodes: &mut Nodes, nth: usize, prompts: &[usize]) -> bool {
        let Wave { works, transfers, arrivals } = self.wave(&nodes.head, &nodes.decode, nth, prompts);
        self.progress.note(|seen| seen.n_waves = 1);
        if nodes.waves.send(works).is_err() {
            self.log.accuse("the worker's thread has ended unasked");
            return false;
        }
        let outcome = self.waits.in_time("steps end", nodes.outcomes.recv()).await;
        let Some(outcome) = outcome else { return false };
        let is_computed = self.check_outcome(outcome);
        let mut is_whole = true;
        let sent = self.waits.in_time("KV orders end", join_all(transfers)).await;
        for sent in sent.into_iter().flatten() {
            match sent {
                Ok(Ok(())) => {}
                Ok(Err(error)) => {
                    is_whole = false;
                    self.expect_lost_kv("a transfer", &error);
                }
                Err(error) => self.log.accuse(format_args!("a transfer: {error:?}")),
            }
        }
        is_whole &= self.check_arrivals(&nodes.decode, arrivals).await;
        self.check_free(nodes).await;
        is_computed && (is_whole || !self.waits.must_end())
    }

    fn wave(&self, head: &Memory, decode: &Memory, nth: usize, prompts: &[usize]) -> Wave {
        let mut wave = Wave { works: Vec::new(), transfers: Vec::new(), arrivals: Vec::new() };
        for (place, prompt) in prompts.iter().enumerate() {
            let n_tokens = self.reference.prompts[*prompt].tokens.len();
            let n_blocks = head.memory.layout().blocks_for(n_tokens);
            let request = LandRequest {
                transfer: self.world.transfer_id(),
                lease: decode.lease(n_blocks),
                n_tokens: n_tokens as u32,
                held_tokens: 0,
                deadline: self.world.deadline_in(LANDING_FOR),
            };
            let transfer = request.transfer;
            let (landing, arrival) = decode.connector.land(request).expect("a proper request");
            let (chunks, queue) = mpsc::channel(CHUNKS_MAX);
            let opened = Shutdown::new();
            let connector = Arc::clone(&head.connector);
            let send = send(connector, landing, ChunkQueue::new(queue, || {}), opened.clone());
            let send = self.processes.standstill_of_head().run(send);
            wave.transfers.push(spawn_guarded(&self.own_gate, "transfer", send));
            wave.arrivals.push(ExpectedPrompt { prompt: *prompt, arrival, opened });
            let answers = &self.plan.answers;
            wave.works.push(PromptWork {
                slot: SlotId((nth * 100 + place) as u64),
                prompt: *prompt,
                lease: Arc::new(head.lease(n_blocks + 1)),
                transfer,
                n_decoded: answers[(nth + place) % answers.len()],
                chunks,
            });
        }
        wave
    }

    fn check_outcome(&self, outcome: Option<Outcome>) -> bool {
        match outcome {
            Some(Outcome::WaveDone) => return true,
            Some(Outcome::Failed(error)) => self.waits.expect_failure("a step", error),
            Some(Outcome::Wrong(what)) => self.log.accuse(format_args!("a step is wrong: {what}")),
            None => self.log.accuse("the worker's thread has panicked"),
        }
        false
    }

    /// Checks that a fault explains why KV has not arrived. A pause can end the links to the decode node, and not the node.
    fn expect_lost_kv(&self, what: &str, error: &TransferError) {
        let last_fault = self.progress.seen().last_fault;
        let is_recent = last_fault.is_some_and(|fault| fault.elapsed() < LINKS_BACK_WITHIN);
        match self.plan.has_noticed_pause() && is_recent {
            true => self.log.say(format_args!("{what} fails: {}", in_full(error))),
            false => self.waits.expect_failure(what, in_full(error)),
        }
    }

    /// Checks the landings of transfers that have ended. Returns false if one has not arrived.
    async fn check_arrivals(&self, decode: &Memory, arrivals: Vec<ExpectedPrompt>) -> bool {
        let checks = arrivals.into_iter().map(|expected| self.check_arrival(decode, expected));
        join_all(checks).await.into_iter().all(|has_arrived| has_arrived)
    }

    async fn check_arrival(&self, decode: &Memory, expected: ExpectedPrompt) -> bool {
        let ExpectedPrompt { prompt, arrival, opened } = expected;
        let settled = async {
            tokio::select! {
                biased;
                settled = arrival.settle() => Some(settled),
                () = give_up(&opened) => None,
            }
        };
        match self.waits.in_time("landings end", settled).await {
            Some(Some(Ok(arrived))) => {
                self.compare(decode, prompt, &arrived.lease);
                return true;
            }
            Some(Some(Err(error))) => self.expect_lost_kv("a landing", &error),
            Some(None) => self.log.say(format_args!("prompt {prompt} is given up")),
            None => {}
        }
        false
    }

    /// Compares every page that has arrived with the KV of one process.
    fn compare(&self, decode: &Memory, prompt: usize, lease: &BlockLease) {
        let groups = self.reference.model.layout.group_indices();
        let tables: Vec<&[BlockIdx]> = groups.map(|group| lease.table(group)).collect();
        if self.reference.pages(&decode.memory, &tables) != self.reference.prompts[prompt].pages {
            self.log.accuse(format_args!("prompt {prompt} arrives with other KV"));
        }
    }

    async fn head(&self, config: &NodeConfig, group: &Arc<Group>, memory: &KvMemory) -> Memory {
        let parts = ConnectorParts {
            epoch: group.epoch(),
            gate: self.gates.wires.clone(),
            settings: config.transfer.clone(),
            processes: Some(Arc::clone(group) as _),
            ..self.parts(HEAD, memory.clone())
        };
        Memory::new(HEAD, parts).await
    }

    async fn decode(&self) -> Memory {
        let layout = self.reference.model.layout.clone();
        let memory = KvMemory::host(layout, DECODE_BLOCKS).expect("memory for some blocks");
        Memory::new(DECODE, self.parts(DECODE, memory)).await
    }

    /// Makes the parts of a connector of one process.
    fn parts(&self, host: &str, memory: KvMemory) -> ConnectorParts {
        ConnectorParts {
            node: NodeId::new(host),
            epoch: Epoch(1),
            memory,
            fingerprint: self.reference.model.fingerprint.clone(),
            world: self.world_of(host, self.kv.host(host)),
            gate: self.gates.decode.clone(),
            settings: self.reference.config(1, host).transfer,
            metrics: TransferMetrics::default(),
            faults: Faults::none(),
            processes: None,
        }
    }
}

impl Memory {
    async fn new(name: &'static str, parts: ConnectorParts) -> Self {
        let memory = parts.memory.clone();
        let pool = BlockPool::new(memory.layout(), memory.n_blocks());
        let connector = kv_transfer::build("tcp", parts).await.expect("the connector starts");
        Self { name, memory, pool, connector }
    }

    /// Waits until nothing holds blocks.
    async fn is_empty(&self) {
        let mut freed = self.pool.freed();
        while self.pool.counts().free != self.pool.counts().total {
            freed.changed().await.expect("the pool lives");
        }
    }

    fn lease(&self, n_blocks: usize) -> BlockLease {
        let holder = Holder { what: Holding::Sequence, request: RequestId::new("simulated") };
        self.pool.reserve(n_blocks, holder).expect("there is room for a wave")
    }
}

/// Ends for a landing that its transfer, which has ended, never opened. A router gives it up then: the decode node would wait
/// until the deadline. Landings that were open end by themselves.
async fn give_up(opened: &Shutdown) {
    if opened.requested() {
        pending::<()>().await;
    }
}

async fn send(
    connector: Arc<dyn KvConnector>,
    landing: Landing,
    chunks: ChunkQueue,
    opened: Shutdown,
) -> Result<(), TransferError> {
    let transfer = connector.open(&Destination::Landing(landing)).await?;
    opened.trigger();
    transfer.feed(chunks).await
}
