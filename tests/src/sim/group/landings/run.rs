//! One run: executes a plan and checks it.

use std::collections::BTreeSet;
use std::pin::pin;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use chassis::net::MemoryNet;
use chassis::{Gate, Shutdown, World};
use engine::{Backend, SlotId};
use futures::FutureExt as _;
use futures::future::{join, join_all};
use kv_cache::KvMemory;
use kv_transfer::{
    Arrival, ArrivedKv, ConnectorParts, FaultKind, Faults, KvConnector, LandRequest, TransferError,
    TransferMetrics,
};
use node::NodeConfig;
use node::group::{Group, HeadParts, gather};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep};
use types::{Epoch, Landing, NodeId, Role, TransferId, in_full};

use super::super::super::chance::Chance;
use super::super::super::net::{Crash, SimNet};
use super::super::super::run::Report;
use super::super::plan::{Fault, FaultKind as MessageFault, NOTICED_AFTER, ProcessFault};
use super::super::processes::{HEAD, ProcessSettings, Processes, follower_host};
use super::super::reference::{Reference, reference};
use super::super::reports::LandingReports;
use super::super::waits::{LOOK_EVERY, Waits, on_virtual_clock};
use super::super::work::Outcome;
use super::answers::{AnswerThread, AnswerWork};
use super::memory::{NodeMemory, Room};
use super::plan::{Cancel, Event, LONG_DEADLINE, LandingPlan, Path, Plan, TimedFault};
use super::sender::Sender;

/// The blocks of the node: enough for the longest prompt, and too few for all landings at once.
const BLOCKS_MAX: u32 = 24;
/// The longest time from a landing's deadline to its end.
const LATE: Duration = Duration::from_millis(500);
/// A receiver gives a landing up 3 s after its sender has failed or a process of its node was lost.
const N_LOOKS_BEFORE_GIVING_UP: u32 = 60;
/// Limit of sequences whose answers wait for the thread.
const WORKS_MAX: usize = 16;

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
    reference: &'static Reference,
    world: World,
    kv: SimNet,
    reports: LandingReports,
    processes: Arc<Processes>,
    gates: Gates,
    /// Senders whose transfers may fail. Never held across an await.
    disturbed: Mutex<BTreeSet<usize>>,
}

/// The gates of the tasks that must have ended after the run.
#[derive(Debug)]
struct Gates {
    head: Gate,
    /// The head's connector.
    wires: Gate,
    senders: Gate,
}

/// The head.
struct Head {
    group: Arc<Group>,
    memory: NodeMemory,
    connector: Arc<dyn KvConnector>,
    works: SyncSender<AnswerWork>,
}

/// A landing for one sender, and its end at the head.
struct GrantedLanding {
    landing: Landing,
    arrival: Arrival,
}

/// How a landing has ended.
enum Ended {
    Arrived(ArrivedKv),
    Failed(TransferError),
    GivenUp,
    HeadDied,
}

impl Run {
    fn new(seed: u64, plan: Plan, waits: Waits, reference: &'static Reference) -> Self {
        let (world, reports) = (World::seeded(seed), LandingReports::default());
        let kv = SimNet::new(Chance::named(seed, "landings' network"), waits.log.clone());
        let processes = Processes::start(ProcessSettings {
            n_followers: plan.n_followers,
            reference,
            waits: waits.clone(),
            world: world.clone(),
            joining: MemoryNet::new(),
            kv: kv.clone(),
            delay: plan.message_delay,
            faults: plan.messages.clone(),
            reports: reports.clone(),
            own_gate: Gate::new("simulation"),
        });
        let gates =
            Gates { head: Gate::new("head"), wires: Gate::new("wires"), senders: Gate::new("senders") };
        Self { plan, waits, reference, world, kv, reports, processes, gates, disturbed: Mutex::default() }
    }

    async fn play(self) {
        let config = self.reference.config(self.plan.n_followers as u16 + 1, HEAD);
        let joining = Arc::new(self.processes.settings.joining.clone());
        let parts = HeadParts {
            world: self.world.clone().with_net(joining).fork(HEAD),
            gate: self.gates.head.clone(),
            id: NodeId::new(HEAD),
            role: Role::Decode,
            settings: config.group.clone(),
            engine: config.engine.clone(),
        };
        let gathering = self.processes.of_head(gather(parts));
        let gathered = self.waits.in_time("the head gathers its followers", gathering).await.flatten();
        self.waits.progress.note(|seen| seen.is_gathered = true);
        match gathered {
            Some(Ok((group, backend))) => self.serve(&config, group, backend).await,
            Some(Err(error)) => self.waits.expect_failure("the head", in_full(&error)),
            None => return,
        }
        self.waits.log.say("the head has ended");
        self.processes.check_ends().await;
        let Gates { head, wires, senders } = &self.gates;
        for gate in [head, wires, senders] {
            self.waits.all_end(gate).await;
        }
    }

    // === the head's life ===

    async fn serve(&self, config: &NodeConfig, group: Arc<Group>, backend: Box<dyn Backend>) {
        let (works, to_compute) = sync_channel(WORKS_MAX);
        let head = self.processes.of_head(self.head(config, group, backend.memory(), works)).await;
        let head = head.expect("the head dies later");
        let thread = AnswerThread {
            backend,
            reference: self.reference,
            works: to_compute,
            progress: self.waits.progress.clone(),
            process: self.processes.standstill_of_head(),
        };
        let thread = thread.start();
        let senders = (0..self.plan.n_senders).map(async |nth| self.sender(&format!("sender-{nth}")).await);
        let senders = join_all(senders).await;
        let landings = self.plan.landings.iter().enumerate();
        let landings = landings.map(|(nth, plan)| self.landing(&head, &senders[plan.sender], nth, plan));
        let faults = self.plan.faults.iter().map(|fault| self.fault(fault, &senders));
        join(join_all(landings), join_all(faults)).await;
        self.kv.heal();
        self.check_end(&head, &senders).await;
        drop((head, senders));
        let ended = async {
            while !thread.is_finished() {
                tokio::task::yield_now().await;
            }
        };
        self.waits.soon("the thread of the answers ends", ended).await;
    }

    /// Checks that the node ends if it must. Otherwise it must receive from a new sender, and hold nothing.
    async fn check_end(&self, head: &Head, senders: &[Sender]) {
        let log = &self.waits.log;
        if !self.waits.must_end() {
            let last = self.sender("sender-last").await;
            self.landing(head, &last, self.plan.landings.len(), &LandingPlan::last()).await;
            self.waits.soon("all followers are quiet", self.reports_end()).await;
        }
        // A fault of a message may have come meanwhile.
        if self.waits.must_end() {
            if let Some(lost) = self.waits.in_time("the head notices the fault", head.group.lost()).await {
                log.say(format_args!("the head ends: {lost}"));
            }
        } else if let Some(lost) = head.group.lost().now_or_never() {
            log.accuse(format_args!("the head ends without a fault: {lost}"));
        }
        self.processes.check_end_after_head().await;
        self.waits.soon("all blocks are free", head.memory.is_empty()).await;
        if let Err(error) = head.memory.pool.integrity() {
            log.accuse(format_args!("the pool: {error}"));
        }
        for (nth, sender) in senders.iter().enumerate() {
            log.say(format_args!("{} frames of sender {nth} had a fault", sender.n_frames_hit()));
        }
        let idle = async {
            while !senders.iter().all(Sender::is_idle) {
                sleep(LOOK_EVERY).await;
            }
        };
        self.waits.soon("all senders are idle", idle).await;
    }

    async fn reports_end(&self) {
        while !self.reports.open().is_empty() && !self.waits.must_end() {
            sleep(LOOK_EVERY).await;
        }
    }

    // === landings ===

    async fn landing(&self, head: &Head, sender: &Sender, nth: usize, plan: &LandingPlan) {
        sleep(plan.at).await;
        let granting = self.processes.of_head(self.grant(head, nth, plan));
        let granted = self.waits.in_time("blocks come back", granting).await.flatten().flatten();
        let Some(granted) = granted else { return };
        let transfer = granted.landing.transfer;
        match self.transfer(head, sender, plan, granted).await {
            Ended::HeadDied => self.waits.log.say(format_args!("landing {nth} ends with the head")),
            Ended::Arrived(arrived) => self.answer(head, nth, plan, transfer, arrived).await,
            Ended::Failed(error) if self.may_fail(plan) => {
                self.waits.log.say(format_args!("landing {nth} fails: {}", in_full(&error)));
            }
            Ended::Failed(error) => {
                let error = in_full(&error);
                self.waits.log.accuse(format_args!("landing {nth} fails without a fault: {error}"));
            }
            Ended::GivenUp if self.misses_a_lost_process(plan, transfer) => {
                self.waits.log.accuse(format_args!("landing {nth} outlives a process that it needs"));
            }
            Ended::GivenUp => self.waits.log.say(format_args!("landing {nth} is given up")),
        }
    }

    /// Takes blocks, and begins the landing. Returns `None` if the node ends first.
    async fn grant(&self, head: &Head, nth: usize, plan: &LandingPlan) -> Option<GrantedLanding> {
        let transfer = self.world.transfer_id();
        let room = tokio::select! {
            biased;
            // The node takes no more landings.
            _ = head.group.lost() => None,
            room = head.memory.room(transfer, plan.prompt, plan.cache) => Some(room),
        };
        let Room { lease, n_held } = room?;
        if n_held > 0 {
            self.waits.log.say(format_args!("landing {nth} holds blocks of the prompt"));
        }
        let layout = head.memory.memory.layout();
        let request = LandRequest {
            transfer,
            lease,
            n_tokens: self.reference.prompts[plan.prompt].tokens.len() as u32,
            held_tokens: (n_held * usize::from(layout.block_tokens)) as u32,
            deadline: self.world.deadline_in(plan.within),
        };
        let (landing, arrival) = head.connector.land(request).expect("a proper request");
        Some(GrantedLanding { landing, arrival })
    }

    /// Sends and receives, until both sides have ended.
    async fn transfer(
        &self,
        head: &Head,
        sender: &Sender,
        plan: &LandingPlan,
        granted: GrantedLanding,
    ) -> Ended {
        let GrantedLanding { landing, arrival } = granted;
        let has_failed = Shutdown::new();
        let (begun, failed) = (Instant::now(), has_failed.clone());
        let give_up = async {
            if let Some(Cancel::Receiver(after)) = plan.cancel {
                return sleep(after).await;
            }
            tokio::select! {
                _ = head.group.lost() => {}
                () = failed.wait() => {}
            }
            // Only the time in which the head runs counts.
            for _ in 0..N_LOOKS_BEFORE_GIVING_UP {
                sleep(LOOK_EVERY).await;
            }
        };
        let receiving = async {
            let ending = async {
                tokio::select! {
                    biased;
                    ended = arrival.settle() => ended.map_or_else(Ended::Failed, Ended::Arrived),
                    () = give_up => Ended::GivenUp,
                }
            };
            let ended = self.processes.of_head(ending).await.unwrap_or(Ended::HeadDied);
            if begun.elapsed() > plan.within + LATE + self.plan.head_pauses() {
                self.waits.log.accuse(format_args!("a landing ends {:?} after its begin", begun.elapsed()));
            }
            ended
        };
        let sending = async {
            let sent = sender.send(plan, landing).await;
            if sent.is_err() {
                has_failed.trigger();
            }
            sent
        };
        let (mut receiving, mut sending) = (pin!(receiving), pin!(sending));
        let (ended, sent) = tokio::select! {
            biased;
            ended = &mut receiving => (ended, self.waits.soon("a sender hears of the end", sending).await),
            sent = &mut sending => (receiving.await, Some(sent)),
        };
        if let Some(Err(error)) = sent
            && !self.may_fail(plan)
        {
            self.waits.log.accuse(format_args!("a sender fails without a fault: {}", in_full(&error)));
        }
        ended
    }

    /// Returns whether a landing should have ended, because a process was lost that has not verified its pages.
    fn misses_a_lost_process(&self, plan: &LandingPlan, transfer: TransferId) -> bool {
        let connections = self.waits.progress.seen().connections;
        let is_lost = |follower: usize| connections[follower].is_closed;
        !matches!(plan.cancel, Some(Cancel::Receiver(_)))
            && (0..connections.len()).any(|of| is_lost(of) && self.reports.may_write(transfer, of))
    }

    /// Returns whether the plan explains that a landing fails.
    fn may_fail(&self, plan: &LandingPlan) -> bool {
        let is_held = |fault: &Fault| matches!(fault.what, MessageFault::Hold(time) if time > NOTICED_AFTER);
        plan.cancel.is_some()
            || plan.within < LONG_DEADLINE
            || self.waits.must_end()
            || self.disturbed().contains(&plan.sender)
            || self.waits.progress.seen().last_fault.is_some() && self.plan.messages.iter().any(is_held)
    }

    /// Checks KV that has arrived, and computes the answer with it.
    async fn answer(
        &self,
        head: &Head,
        nth: usize,
        plan: &LandingPlan,
        transfer: TransferId,
        arrived: ArrivedKv,
    ) {
        for follower in (0..self.plan.n_followers).filter(|of| !self.reports.has_landed(transfer, *of)) {
            self.waits.log.accuse(format_args!(
                "landing {nth} has arrived before follower {follower} has verified its pages"
            ));
        }
        head.memory.check_arrived(plan.prompt, &arrived.lease);
        let (outcome_in, outcome) = oneshot::channel();
        let work = AnswerWork {
            slot: SlotId(nth as u64),
            prompt: plan.prompt,
            lease: Arc::new(arrived.lease),
            n_decoded: plan.n_decoded,
            outcome: outcome_in,
        };
        self.waits.progress.note(|seen| seen.n_waves += 1);
        head.works.try_send(work).expect("the queue is long, and its thread lives");
        match self.waits.in_time("an answer ends", outcome).await {
            Some(Ok(Outcome::WaveDone)) => self.waits.log.say(format_args!("landing {nth} is answered")),
            Some(Ok(Outcome::Failed(error))) => self.waits.expect_failure("a step", error),
            Some(Ok(Outcome::Wrong(what))) => self.waits.log.accuse(format_args!("wrong KV is read: {what}")),
            Some(Err(_)) => self.waits.log.accuse("the answers' thread has panicked"),
            None => {}
        }
    }

    // === faults ===

    async fn fault(&self, fault: &TimedFault, senders: &[Sender]) {
        sleep(fault.at).await;
        self.waits.log.say(format_args!("{:?}", fault.what));
        let both_ways = |Path { sender, follower }: Path| {
            [format!("sender-{sender}"), follower.map_or_else(|| HEAD.to_owned(), follower_host)]
        };
        match fault.what {
            Event::Hold(path, time) => {
                if time > NOTICED_AFTER {
                    self.disturb([path.sender]);
                }
                let [one, other] = both_ways(path);
                let directions = [(&one, &other), (&other, &one)];
                directions.iter().for_each(|(from, to)| self.kv.hold(from, to));
                sleep(time).await;
                directions.iter().for_each(|(from, to)| self.kv.release(from, to));
            }
            Event::Reset(path) => {
                self.disturb([path.sender]);
                let [one, other] = both_ways(path);
                self.kv.reset(&one, &other);
            }
            Event::Trickle(path, gap) => {
                let [from, to] = both_ways(path);
                self.kv.trickle(&from, &to, gap);
            }
            Event::SenderDies(sender, how) => self.sender_dies(sender, &senders[sender], how),
            Event::Process(what) => {
                if matches!(what, ProcessFault::Pauses(_, time) if time > NOTICED_AFTER) {
                    self.disturb(0..self.plan.n_senders);
                }
                self.processes.apply(what).await;
            }
            Event::FlipBits(sender, n_frames) => {
                // A page that arrives wrong twice ends its landing.
                if n_frames > 1 {
                    self.disturb([sender]);
                }
                senders[sender].inject(FaultKind::FlipBit(fault.at.as_nanos() as u64), n_frames);
            }
            Event::DoubleFrame(sender) => senders[sender].inject(FaultKind::Duplicate, 1),
            Event::LateFrame(sender, by) => senders[sender].inject(FaultKind::Delay(by), 1),
        }
    }

    fn sender_dies(&self, nth: usize, sender: &Sender, how: Crash) {
        self.disturb([nth]);
        self.kv.crash(&format!("sender-{nth}"), how);
        sender.die();
    }

    fn disturb(&self, senders: impl IntoIterator<Item = usize>) {
        self.disturbed.lock().unwrap_or_else(PoisonError::into_inner).extend(senders);
    }

    fn disturbed(&self) -> BTreeSet<usize> {
        self.disturbed.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    // === nodes ===

    async fn head(
        &self,
        config: &NodeConfig,
        group: Arc<Group>,
        memory: &KvMemory,
        works: SyncSender<AnswerWork>,
    ) -> Head {
        let parts = ConnectorParts {
            node: NodeId::new(HEAD),
            epoch: group.epoch(),
            memory: memory.clone(),
            settings: config.transfer.clone(),
            processes: Some(Arc::clone(&group) as _),
            gate: self.gates.wires.clone(),
            ..self.parts(HEAD, memory.clone())
        };
        let connector = kv_transfer::build("tcp", parts).await.expect("the connector starts");
        let memory = NodeMemory::new(
            memory.clone(),
            BLOCKS_MAX,
            self.reference,
            self.waits.clone(),
            self.reports.clone(),
        );
        Head { group, memory, connector, works }
    }

    async fn sender(&self, host: &str) -> Sender {
        let layout = &self.reference.model.layout;
        let of_prompt = |tokens: usize| layout.blocks_for(tokens) * layout.groups.len();
        let n_blocks: usize =
            self.reference.prompts.iter().map(|prompt| of_prompt(prompt.tokens.len())).sum();
        let memory = KvMemory::host(layout.clone(), n_blocks as u32).expect("memory for some blocks");
        Sender::start(self.reference, self.parts(host, memory), self.gates.senders.clone()).await
    }

    /// Makes the parts of a connector of one process.
    fn parts(&self, host: &str, memory: KvMemory) -> ConnectorParts {
        ConnectorParts {
            node: NodeId::new(host),
            epoch: Epoch(1),
            memory,
            fingerprint: self.reference.model.fingerprint.clone(),
            world: self.world.clone().with_net(self.kv.host(host)).fork(host),
            gate: self.gates.senders.clone(),
            settings: self.reference.config(1, host).transfer,
            metrics: TransferMetrics::default(),
            faults: Faults::programmable(),
            processes: None,
        }
    }
}
