//! One run: executes a plan and checks it.

use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::Duration;

use chassis::admin::Readiness;
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
use node::group::{FollowerParts, Group, GroupError, HeadParts, follow, gather};
use tokio::sync::mpsc;
use tokio::time::sleep;
use types::{BlockIdx, Destination, Epoch, Landing, NodeId, RequestId, Role, in_full};

use super::super::log::EventLog;
use super::super::run::Report;
use super::clock::Progress;
use super::plan::Plan;
use super::reference::{JOIN, Reference, config, reference};
use super::relay::{ConnectionEnds, FollowerNet};
use super::reports::LandingReports;
use super::waits::{Waits, on_virtual_clock};
use super::work::{CHUNKS_MAX, OUTCOMES_MAX, Outcome, PromptWork, Worker};

/// A landing's own deadline. It must not be what ends a transfer.
const LANDING_FOR: Duration = Duration::from_secs(600);
const DECODE_BLOCKS: u32 = 64;

/// Runs the plan of `seed`, and returns the results.
pub fn run(seed: u64) -> Report {
    let reference = reference();
    let plan = Plan::draw(seed);
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
    net: MemoryNet,
    gates: Gates,
    /// The gate of relays and of the run's own tasks.
    own_gate: Gate,
}

/// The gates of what must have ended after the run.
struct Gates {
    head: Gate,
    /// The head's connector.
    wires: Gate,
    decode: Gate,
    followers: Vec<Gate>,
}

/// A follower's process.
type Follower = Task<Result<(), GroupError>>;

/// A node with its memory.
struct Memory {
    name: &'static str,
    memory: KvMemory,
    pool: BlockPool,
    connector: Arc<dyn KvConnector>,
}

/// The sequences of one wave.
struct Wave {
    works: Vec<PromptWork>,
    transfers: Vec<Task<Result<(), TransferError>>>,
    arrivals: Vec<(usize, Arrival)>,
}

/// Runs the follower of one stage until its head is gone.
pub(super) async fn follower(
    world: World,
    gate: Gate,
    config: NodeConfig,
    nth: usize,
) -> Result<(), GroupError> {
    let parts = FollowerParts {
        world,
        gate,
        config: &config,
        head: JOIN.to_owned(),
        place: nth as u16,
        metrics: TransferMetrics::default(),
        readiness: Readiness::unready("waiting for the head"),
    };
    follow(parts, Shutdown::new()).await
}

impl Run {
    fn new(seed: u64, plan: Plan, waits: Waits, reference: &'static Reference) -> Self {
        let gates = Gates {
            head: Gate::new("head"),
            wires: Gate::new("wires"),
            decode: Gate::new("decode"),
            followers: (0..plan.n_followers).map(|_| Gate::new("follower")).collect(),
        };
        Self {
            log: waits.log.clone(),
            progress: waits.progress.clone(),
            waits,
            plan,
            reference,
            world: World::seeded(seed),
            net: MemoryNet::new(),
            gates,
            own_gate: Gate::new("simulation"),
        }
    }

    async fn play(self) {
        let followers: Vec<Follower> =
            (0..self.plan.n_followers).map(|nth| self.start_follower(nth)).collect();
        let config = self.config("10.0.0.1");
        let parts = HeadParts {
            world: self.world_of("head", Arc::new(self.net.clone())),
            gate: self.gates.head.clone(),
            id: NodeId::new("head"),
            role: Role::Prefill,
            settings: config.group.clone(),
            engine: config.engine.clone(),
        };
        let gathered = self.waits.in_time("the head gathers its followers", gather(parts)).await;
        self.progress.note(|seen| seen.is_gathered = true);
        match gathered {
            Some(Ok((group, backend))) => self.serve(&config, group, backend).await,
            Some(Err(error)) => self.waits.expect_failure("the head", in_full(&error)),
            None => return,
        }
        self.log.say("the head has ended");
        let ended = self.waits.soon("the followers end", join_all(followers)).await;
        for (nth, ended) in ended.into_iter().flatten().enumerate() {
            match ended {
                Ok(Err(error)) => self.log.say(format_args!("follower {nth} ends: {}", in_full(&error))),
                Ok(Ok(())) => self.log.accuse(format_args!("follower {nth} ends without a reason")),
                Err(error) => self.log.accuse(format_args!("follower {nth}: {error:?}")),
            }
        }
        let Gates { head, wires, decode, followers } = &self.gates;
        for gate in [head, wires, decode].into_iter().chain(followers) {
            self.waits.all_end(gate).await;
        }
    }

    fn config(&self, host: &str) -> NodeConfig {
        config(self.plan.n_followers as u16 + 1, host)
    }

    fn world_of(&self, name: &str, net: Arc<dyn Net>) -> World {
        self.world.clone().with_net(net).fork(name)
    }

    fn start_follower(&self, nth: usize) -> Follower {
        let net = FollowerNet {
            joining: self.net.clone(),
            kv: Arc::new(self.net.clone()),
            head: JOIN.to_owned(),
            follower: nth,
            delay: Duration::ZERO,
            faults: self.plan.faults.clone(),
            ends: ConnectionEnds::default(),
            progress: self.progress.clone(),
            reports: LandingReports::default(),
            gate: self.own_gate.clone(),
        };
        let (config, gate) = (self.config("10.0.0.2"), self.gates.followers[nth].clone());
        let world = self.world_of(&format!("follower {nth}"), Arc::new(net));
        spawn_guarded(&self.own_gate, "follower", follower(world, gate, config, nth))
    }

    // === the head's life ===

    async fn serve(&self, config: &NodeConfig, group: Arc<Group>, backend: Box<dyn Backend>) {
        let head = self.head(config, &group, backend.memory()).await;
        let decode = self.decode().await;
        let (waves, to_compute) = sync_channel(1);
        let (outcomes_in, mut outcomes) = mpsc::channel(OUTCOMES_MAX);
        let worker = Worker {
            backend,
            reference: self.reference,
            chunk_blocks: self.plan.chunk_blocks.clone(),
            n_sets: self.plan.n_sets,
            waves: to_compute,
            outcomes: outcomes_in,
            progress: self.progress.clone(),
        };
        let worker = worker.start();
        let is_whole = self.compute(&head, &decode, &waves, &mut outcomes).await;
        if is_whole {
            sleep(self.plan.idle).await;
        }
        if self.waits.must_end() {
            if let Some(lost) = self.waits.in_time("the head notices the fault", group.lost()).await {
                self.log.say(format_args!("the head ends: {lost}"));
            }
        } else if let Some(lost) = group.lost().now_or_never() {
            self.log.accuse(format_args!("the head ends without a fault: {lost}"));
        }
        for node in [&head, &decode] {
            self.waits.soon(&format!("all blocks of {} are free", node.name), node.is_empty()).await;
        }
        drop((waves, head, decode, group));
        let ended = async {
            while !worker.is_finished() {
                tokio::task::yield_now().await;
            }
        };
        self.waits.soon("the threads of the pipeline end", ended).await;
    }

    /// Computes all waves, and sends their KV. Returns false if the node has failed.
    async fn compute(
        &self,
        head: &Memory,
        decode: &Memory,
        waves: &SyncSender<Vec<PromptWork>>,
        outcomes: &mut mpsc::Receiver<Outcome>,
    ) -> bool {
        for (nth, prompts) in self.plan.waves.iter().enumerate() {
            let Wave { works, transfers, arrivals } = self.wave(head, decode, nth, prompts);
            self.progress.note(|seen| seen.n_waves = 1);
            if waves.send(works).is_err() {
                self.log.accuse("the worker's thread has ended unasked");
                return false;
            }
            let Some(outcome) = self.waits.in_time("steps end", outcomes.recv()).await else { return false };
            let mut is_whole = self.check_outcome(outcome);
            let sent = self.waits.in_time("KV orders end", join_all(transfers)).await;
            for sent in sent.into_iter().flatten() {
                match sent {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => {
                        is_whole = false;
                        self.waits.expect_failure("a transfer", in_full(&error));
                    }
                    Err(error) => self.log.accuse(format_args!("a transfer: {error:?}")),
                }
            }
            is_whole &= self.check_arrivals(decode, arrivals).await;
            self.waits.soon("all blocks of the wave are free", head.is_empty()).await;
            if !is_whole {
                return false;
            }
        }
        true
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
            let send = send(Arc::clone(&head.connector), landing, ChunkQueue::new(queue, || {}));
            wave.transfers.push(spawn_guarded(&self.own_gate, "transfer", send));
            wave.arrivals.push((*prompt, arrival));
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

    /// Compares every page that arrives with the KV of one process.
    async fn check_arrivals(&self, decode: &Memory, arrivals: Vec<(usize, Arrival)>) -> bool {
        let mut is_whole = true;
        for (prompt, arrival) in arrivals {
            match self.waits.in_time("landings end", arrival.settle()).await {
                None => is_whole = false,
                Some(Err(error)) => {
                    is_whole = false;
                    self.waits.expect_failure("a landing", in_full(&error));
                }
                Some(Ok(arrived)) => {
                    let groups = self.reference.model.layout.group_indices();
                    let tables: Vec<&[BlockIdx]> = groups.map(|group| arrived.lease.table(group)).collect();
                    let pages = self.reference.pages(&decode.memory, &tables);
                    if pages != self.reference.prompts[prompt].pages {
                        self.log.accuse(format_args!("prompt {prompt} arrives with other KV"));
                    }
                }
            }
        }
        is_whole
    }

    async fn head(&self, config: &NodeConfig, group: &Arc<Group>, memory: &KvMemory) -> Memory {
        let parts = ConnectorParts {
            node: NodeId::new("head"),
            epoch: group.epoch(),
            memory: memory.clone(),
            world: self.world_of("wires", Arc::new(self.net.clone())),
            gate: self.gates.wires.clone(),
            settings: config.transfer.clone(),
            processes: Some(Arc::clone(group) as _),
            ..self.decode_parts()
        };
        Memory::new("head", parts).await
    }

    async fn decode(&self) -> Memory {
        Memory::new("decode", self.decode_parts()).await
    }

    fn decode_parts(&self) -> ConnectorParts {
        let model = &self.reference.model;
        ConnectorParts {
            node: NodeId::new("decode"),
            epoch: Epoch(1),
            memory: KvMemory::host(model.layout.clone(), DECODE_BLOCKS).expect("memory for some blocks"),
            fingerprint: model.fingerprint.clone(),
            world: self.world_of("decode", Arc::new(self.net.clone())),
            gate: self.gates.decode.clone(),
            settings: self.config("10.0.0.9").transfer,
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

async fn send(
    connector: Arc<dyn KvConnector>,
    landing: Landing,
    chunks: ChunkQueue,
) -> Result<(), TransferError> {
    connector.open(&Destination::Landing(landing)).await?.feed(chunks).await
}
