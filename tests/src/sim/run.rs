//! One run of the simulation: executes a plan and checks it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use chassis::{Gate, Standstill, Task, spawn_guarded};
use router::serve::ServeError;
use tokio::time::{Instant, sleep, sleep_until};
use types::{RefusalKind, Role};

use super::chance::Chance;
use super::client::{ActiveRequests, Client, Ended, LATE, prompt};
use super::death::{DeathStep, DeathWatch};
use super::host::{Hosts, NodeHost, RouterHost, WHOLE_WITHIN, model};
use super::log::EventLog;
use super::net::{Crash, SimNet};
use super::operator::Operator;
use super::oracle::{self, Asked, Lifetimes};
use super::plan::{Ask, Break, Fault, MODELS, Patience, Plan, ROUTERS, TROUBLE, tokens};
use super::reference::Alone;
use super::rogue;
use super::watcher::Watcher;
use super::witness::Witness;

/// The results of a run.
#[derive(Clone, Debug)]
pub struct Report {
    pub seed: u64,
    /// The hash of all events and their times. The same seed must give the same hash.
    pub hash: u64,
    pub lines: Vec<String>,
    /// The failed checks. A good run has none.
    pub faults: Vec<String>,
    pub tally: RunCounts,
}

/// How a run's requests ended, and the rare events of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunCounts {
    pub whole: u32,
    pub refused: u32,
    /// Requests that were refused because no node was usable.
    pub without_node: u32,
    /// Requests that were refused because no node had room.
    pub without_room: u32,
    /// Requests that ended because of their deadline.
    pub late: u32,
    pub left: u32,
    pub steps: u32,
    /// Nodes that died during a change of role that the operator had asked for.
    pub dead_for_operator: u32,
    /// Nodes that died during a change of role that a router had asked for.
    pub dead_for_router: u32,
}

/// Runs the plan of `seed` on a virtual clock, and returns the results.
pub fn run(seed: u64) -> Report {
    play(Plan::draw(seed))
}

/// Runs a plan on a virtual clock, and returns the results.
pub fn play(plan: Plan) -> Report {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    let runtime = runtime.expect("a runtime without sockets");
    runtime.block_on(async {
        let log = EventLog::new();
        let _witness = Witness::of(&log);
        let tally = Run::begin(plan.clone(), log.clone()).await.play().await;
        Report { seed: plan.seed, hash: log.hash(), lines: log.lines(), faults: log.faults(), tally }
    })
}

struct Run {
    plan: Arc<Plan>,
    log: EventLog,
    net: SimNet,
    hosts: Hosts,
    /// The reference of each model, by the model's name.
    alone: BTreeMap<&'static str, Alone>,
    began: Instant,
    clients: Vec<Task<(Ended, u32)>>,
    flights: ActiveRequests,
    /// The time by which each request must be over, on every node.
    lifetimes: Lifetimes,
    watcher: Watcher,
    operator: Operator,
    /// The planned death of a node that changes its role.
    death: Option<DeathWatch>,
    deaths: RunCounts,
    _rogue: Task<()>,
    gate: Gate,
}

/// The number of blocks of the reference, for the longest prompt and its answer.
const N_BLOCKS: u32 = 256;
/// The number of requests that must be answered after all faults are mended, and the time for each.
const PROBES: u64 = 4;
/// A pool of this size has room for all probes at once.
const PROBE_BLOCKS: u32 = 160;
/// The time for which the operator waits for a node before it repeats the request to wake.
const WAKE_AGAIN_AFTER: Duration = Duration::from_secs(2);
const PROBE_WITHIN: Duration = Duration::from_secs(30);
/// The most steps that an engine may still fail after the other faults are mended.
const ENGINE_FAILURES_MAX: u32 = 3;
/// The time within which a silent node is no member: a lease, and the tenth of it by which its end may be
/// noticed late.
const LAPSED_WITHIN: Duration = Duration::from_millis(12_500);
/// The time between two checks that expired requests hold nothing.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// The time between two looks at the nodes, if one of them is to die while it changes its role.
const LOOK_AT_CHANGES_EVERY: Duration = Duration::from_millis(10);
/// The time within which other nodes may change their roles after a node has died in its change: the lease of its lock, and
/// some attempts.
const CHANGES_WITHIN: Duration = Duration::from_secs(20);
/// The time within which all processes of a mended cluster must know each other: a lease, and the pauses
/// between attempts.
const MENDED_WITHIN: Duration = Duration::from_secs(20);

impl Run {
    /// Starts a cluster and waits until every member knows every other.
    async fn begin(plan: Plan, log: EventLog) -> Self {
        let net = SimNet::new(Chance::named(plan.seed, "net"), log.clone());
        let hosts = Hosts::start(&plan.cluster, &net, plan.seed).await;
        let alone = MODELS.into_iter().map(|name| (name, Alone::new(name, model(name), N_BLOCKS))).collect();
        let (gate, began) = (Gate::new("clients"), Instant::now());
        let watcher = Watcher::start(&net, plan.seed, &gate).await;
        let operator = Operator::new(&net, &gate);
        let rogue = rogue::intrude(net.clone(), log.clone());
        let rogue = spawn_guarded(&gate, "rogue", rogue);
        let (clients, lifetimes) = (Vec::new(), Lifetimes::default());
        let mut run = Self {
            death: plan.cluster.dies_in_change.map(DeathWatch::new),
            deaths: RunCounts::default(),
            plan: Arc::new(plan),
            log,
            net,
            hosts,
            alone,
            began,
            clients,
            flights: ActiveRequests::default(),
            lifetimes,
            watcher,
            operator,
            _rogue: rogue,
            gate,
        };
        run.become_whole(WHOLE_WITHIN).await;
        run.began = Instant::now();
        run
    }

    /// Waits until the router knows every node. A delayed request to sleep may arrive after the request to wake, so
    /// the latter is repeated.
    async fn become_whole(&mut self, within: Duration) {
        let give_up = Instant::now() + within;
        let mut wake_again = Instant::now() + WAKE_AGAIN_AFTER;
        while !self.hosts.is_whole() || self.with_another_role().next().is_some() {
            if Instant::now() >= wake_again {
                wake_again += WAKE_AGAIN_AFTER;
                self.wake_all();
                self.restore_roles();
            }
            if Instant::now() > give_up {
                let clusters = self.hosts.routers.iter().filter_map(|router| router.cluster());
                let nodes = clusters.flat_map(router::Cluster::everyone);
                let states: Vec<_> = nodes.map(|(info, state)| format!("{} {state:?}", info.id)).collect();
                return self.log.accuse(format_args!("the cluster is not whole: {states:?}"));
            }
            sleep(Duration::from_millis(50)).await;
        }
        self.log.say("all processes know each other");
    }

    async fn play(mut self) -> RunCounts {
        self.trouble().await;
        self.net.heal();
        self.stop_balancing();
        // Nothing dies after the end of all faults.
        self.death.take_if(|watch| watch.victim().is_none());
        self.hosts.start_all().await;
        self.wake_all();
        self.log.say("mended");
        let is_asked = |fault: &Fault| matches!(fault.what, Break::Sleep(_) | Break::Role(..));
        if self.plan.faults.iter().any(is_asked) {
            // Waits until delayed requests of the operator have arrived, and then repeats the requests to wake: a node
            // obeys the last request that it received.
            self.look_until(Instant::now() + WAKE_AGAIN_AFTER).await;
            self.wake_all();
        }
        let mut tally = std::mem::take(&mut self.deaths);
        for client in std::mem::take(&mut self.clients) {
            while !client.is_finished() {
                self.look_until(Instant::now() + LOOK_EVERY).await;
            }
            tally.add(client.await.ok());
        }
        self.restore_roles();
        self.become_whole(MENDED_WITHIN).await;
        self.the_victim_changes_again().await;
        self.probe().await;
        oracle::attempts(&self.hosts.routers, &self.plan, tally, PROBES + 1, &self.log);
        oracle::everything_is_given_back(&self.hosts, &self.log).await;
        oracle::mirrored(&self.hosts, &self.log).await;
        oracle::watched(&self.hosts.routers[0], &self.watcher, &self.log).await;
        if Chance::named(self.plan.seed, "end").one_in(4) {
            self.one_dies_for_good().await;
        }
        tally
    }

    /// Executes the plan's requests and faults, each at its time.
    async fn trouble(&mut self) {
        let (asks, faults) = (self.plan.asks.clone(), self.plan.faults.clone());
        let mut asks = asks.into_iter().enumerate().peekable();
        let mut faults = faults.into_iter().peekable();
        loop {
            let next_ask = asks.peek().map(|(_, ask)| ask.at);
            let next_fault = faults.peek().map(|fault| fault.at);
            let Some(at) = next_ask.into_iter().chain(next_fault).min() else { break };
            self.look_until(self.began + at).await;
            if next_fault == Some(at) {
                let fault = faults.next().expect("it was peeked at");
                self.break_it(fault.what).await;
            } else {
                let (nth, ask) = asks.next().expect("it was peeked at");
                self.ask(format!("request {nth}"), ask);
            }
        }
        self.look_until(self.began + TROUBLE).await;
    }

    /// Waits until `until`, and checks meanwhile that no node keeps blocks of ended requests.
    async fn look_until(&mut self, until: Instant) {
        let every = if self.death.is_some() { LOOK_AT_CHANGES_EVERY } else { LOOK_EVERY };
        while Instant::now() < until {
            sleep_until(until.min(Instant::now() + every)).await;
            self.follow_changes().await;
            self.lifetimes.check(&self.hosts, &self.plan, self.began.elapsed(), &self.log);
            if self.plan.cluster.balance.is_some() {
                oracle::every_kind_is_there(&self.hosts, &self.log);
            }
        }
    }

    /// Kills a node during a change of its role, and starts it again, as planned. Plans with such a death have no other
    /// fault that takes a node out of the registry.
    async fn follow_changes(&mut self) {
        let Some(watch) = &mut self.death else { return };
        let changing = self.hosts.nodes.iter().find(|node| oracle::has_left(&self.hosts, node));
        match watch.look(changing.map(|node| node.shape.name.clone()), Instant::now()) {
            None => {}
            Some(DeathStep::Dies(node, how)) => self.break_it(Break::Crash(node, how)).await,
            Some(DeathStep::StartsAgain(node)) => self.break_it(Break::Start(node)).await,
        }
    }

    /// Counts the crash of a node that changes its role.
    fn count_death(&mut self, name: &str) {
        let Some(node) = self.hosts.nodes.iter().find(|node| node.shape.name == name) else { return };
        let (count, who) = match (self.operator.waits_for(name), self.plan.cluster.balance) {
            (true, _) => (&mut self.deaths.dead_for_operator, "the operator"),
            (false, Some(_)) => (&mut self.deaths.dead_for_router, "a router"),
            (false, None) => return,
        };
        if oracle::has_left(&self.hosts, node) {
            *count += 1;
            self.log.say(format_args!("{name} dies in the change that {who} asked for"));
        }
    }

    /// Checks that a node that has died in its change does not keep the right to change roles. It was started again, and
    /// takes another role for a while.
    async fn the_victim_changes_again(&mut self) {
        let Some(victim) = self.death.as_ref().and_then(DeathWatch::victim).map(str::to_owned) else {
            return;
        };
        let role_of = |run: &Self| {
            let mut nodes = run.hosts.nodes.iter().filter(|node| node.shape.name == victim);
            nodes.find_map(|node| node.life()).map(|life| life.role)
        };
        let give_up = Instant::now() + CHANGES_WITHIN;
        while role_of(self) != Some(Role::Both) {
            if Instant::now() > give_up {
                return self
                    .log
                    .accuse(format_args!("{victim} has died in its change, and cannot change its role"));
            }
            if !self.operator.waits_for(&victim) {
                self.operator.role(&victim, Role::Both);
            }
            sleep(LOOK_EVERY).await;
        }
        self.log.say(format_args!("{victim} has died in its change, and has changed its role again"));
        self.restore_roles();
        self.become_whole(MENDED_WITHIN).await;
    }

    /// Crashes a machine for good, and checks that it is no member after a whole lease.
    async fn one_dies_for_good(&mut self) {
        let name = self.plan.cluster.nodes[0].name.clone();
        self.break_it(Break::Crash(name.clone(), Crash::Machine)).await;
        sleep(LAPSED_WITHIN).await;
        self.hosts.routers.iter().for_each(|router| oracle::is_gone(router, &name, &self.log));
        oracle::watched(&self.hosts.routers[0], &self.watcher, &self.log).await;
    }

    /// Wakes every node that was asked to sleep, because the planned request to wake may have been lost.
    fn wake_all(&self) {
        let asked = |fault: &Fault| match &fault.what {
            Break::Sleep(node) => Some(node.clone()),
            _ => None,
        };
        let nodes: BTreeSet<String> = self.plan.faults.iter().filter_map(asked).collect();
        nodes.iter().for_each(|node| self.operator.wake(node, None));
    }

    /// Lets routers move no more nodes. Their moves were not planned, so no later check expects certain roles before all
    /// nodes have their own again.
    fn stop_balancing(&mut self) {
        let n_moves: u64 = self.hosts.routers.iter().map(RouterHost::n_moves).sum();
        if n_moves > 0 {
            self.log.say(format_args!("routers have moved {n_moves} nodes"));
        }
        self.hosts.routers.iter_mut().for_each(RouterHost::stop_balancing);
    }

    /// Returns the nodes that may have been asked to change their role and do not have their own.
    fn with_another_role(&self) -> impl Iterator<Item = &NodeHost> {
        let asked = |fault: &Fault| match &fault.what {
            Break::Role(node, _) => Some(node.clone()),
            _ => None,
        };
        let asked: BTreeSet<String> = self.plan.faults.iter().filter_map(asked).collect();
        let has_another = |node: &NodeHost| node.life().is_none_or(|life| life.role != node.shape.role);
        let are_balanced = self.plan.cluster.balance.is_some();
        let may_be_asked = move |node: &NodeHost| are_balanced || asked.contains(&node.shape.name);
        self.hosts.nodes.iter().filter(move |node| may_be_asked(node) && has_another(node))
    }

    /// Gives every node its own role again, whatever the others do: a node that restarts has its own role at once, so
    /// there may be no node of a kind left.
    fn restore_roles(&self) {
        self.with_another_role().for_each(|node| self.operator.force_role(&node.shape.name, node.shape.role));
    }

    async fn break_it(&mut self, what: Break) {
        self.log.say(&what);
        let net = &self.net;
        match what {
            Break::Hold(from, to) => net.hold(&from, &to),
            Break::Release(from, to) => net.release(&from, &to),
            Break::Slow(from, to, delay) => net.slow(&from, &to, delay),
            Break::Trickle(from, to, gap) => net.trickle(&from, &to, gap),
            Break::Corrupt(from, to, one_in) => net.corrupt(&from, &to, one_in),
            Break::Cut(from, to, writes) => net.cut_after(&from, &to, writes),
            Break::Reset(one, other) => net.reset(&one, &other),
            Break::Crash(host, how) => {
                self.count_death(&host);
                self.hosts.crash(&host, how);
            }
            Break::Stop(host) => self.hosts.stop(&host),
            Break::GoOn(host) => self.hosts.go_on(&host),
            Break::Drain(host) => self.hosts.drain(&host),
            Break::Start(host) => self.hosts.start_one(&host).await,
            Break::Replace(host) => {
                if let Some(node) = self.hosts.node(&host) {
                    node.shape.failing_steps.clear();
                    node.crash(Crash::Process);
                    node.start();
                }
            }
            Break::Sleep(host) => self.operator.sleep(&host),
            Break::Wake(host, role) => self.operator.wake(&host, role),
            Break::Role(host, role) => self.operator.role(&host, role),
            Break::Jump(host, by) => self.hosts.node(&host).into_iter().for_each(|node| node.jumps.jump(by)),
        }
    }

    fn ask(&mut self, name: String, ask: Ask) {
        let router = &self.hosts.routers[ask.router];
        let Some((dispatch, process)) = router.dispatch() else {
            return self.log.say(format_args!("{name} finds no router"));
        };
        let asked = self.began.elapsed();
        let lifetime = Asked { router: router.name, at: asked, within: ask.within };
        self.lifetimes.asked.insert(name.clone(), lifetime);
        let client = self.client(name, ask, asked, process);
        self.clients.push(spawn_guarded(&self.gate, "client", client.run(dispatch)));
    }

    fn client(&mut self, name: String, ask: Ask, asked: Duration, router: Standstill) -> Client {
        let alone = self.alone.get_mut(ask.model).expect("one of the models");
        let reference = alone.answer(&prompt(&name, &ask));
        let late = LATE + self.plan.stands_still(ROUTERS[ask.router]);
        let plan = Arc::clone(&self.plan);
        let (log, flights) = (self.log.clone(), self.flights.clone());
        Client { name, ask, reference, log, plan, asked, flights, router, late }
    }

    /// Checks that the cluster serves the next requests, and one of them again: its prompt fills whole
    /// blocks, so all of it is cached.
    async fn probe(&mut self) {
        let mut chance = Chance::named(self.plan.seed, "probes");
        let asks: Vec<(String, Ask)> =
            (0..PROBES).map(|nth| (format!("probe {nth}"), self.a_probe(&mut chance, nth))).collect();
        let whole_blocks = asks
            .iter()
            .find(|(_, ask)| ask.tokens.len().is_multiple_of(model(MODELS[0]).layout.block_tokens.into()));
        let (name, ask) = whole_blocks.cloned().expect("one of the probes fills whole blocks");
        self.served(asks).await;
        self.served(vec![(format!("{name} cached"), ask)]).await;
    }

    /// Draws the request of a probe. Probes go to every router and to every model.
    fn a_probe(&self, chance: &mut Chance, nth: u64) -> Ask {
        let cluster = &self.plan.cluster;
        let is_served = |name: &&&'static str| cluster.nodes.iter().any(|node| node.model == **name);
        let models: Vec<&'static str> = MODELS.iter().filter(is_served).copied().collect();
        let nth_router = nth as usize % cluster.n_routers;
        Ask {
            at: Duration::ZERO,
            model: models[nth as usize / cluster.n_routers % models.len()],
            router: nth_router,
            tokens: tokens(chance, 30 + 50 * nth),
            max_tokens: 8,
            ignore_eos: true,
            sampling_seed: None,
            temperature: 1.0,
            priority: 0,
            tenant: "default",
            within: PROBE_WITHIN,
            patience: Patience::Endless,
            must_be_answered: false,
        }
    }

    /// Sends these requests. Every one must be answered. A request that is refused for a reason that passes is sent again
    /// in the next round: an engine is mended only after it has failed all its planned steps, and a small pool has no room
    /// while other probes run.
    async fn served(&mut self, mut asks: Vec<(String, Ask)>) {
        let is_small = self.plan.cluster.nodes.iter().any(|node| node.n_blocks < PROBE_BLOCKS);
        for round in 0.. {
            let asked = std::mem::take(&mut asks);
            let (n_asked, mut n_full) = (asked.len(), 0);
            for (name, ask) in &asked {
                let name = if round == 0 { name.clone() } else { format!("{name} again {round}") };
                self.ask(name, ask.clone());
            }
            for (probe, (name, ask)) in std::mem::take(&mut self.clients).into_iter().zip(asked) {
                match probe.await {
                    Ok((Ended::Whole, _)) => {}
                    Ok((Ended::Refused(error), _)) if is_told(&error) && round < ENGINE_FAILURES_MAX => {
                        asks.push((name, ask));
                    }
                    Ok((Ended::Refused(error), _)) if is_full(&error) && is_small => {
                        n_full += 1;
                        asks.push((name, ask));
                    }
                    other => self.log.accuse(format_args!("{name} ended with {other:?}")),
                }
            }
            match n_full {
                _ if asks.is_empty() => return,
                n if n == n_asked => {
                    return self.log.accuse(format_args!("{n} probes find no room, and none is served"));
                }
                _ => {}
            }
        }
    }
}

fn is_full(error: &ServeError) -> bool {
    matches!(error, ServeError::Refused { kind: RefusalKind::Full, .. })
}

/// Returns whether the plan explains the failure of an engine.
fn is_told(error: &ServeError) -> bool {
    error.to_string().contains("told to fail")
}

impl RunCounts {
    fn add(&mut self, ended: Option<(Ended, u32)>) {
        let Some((ended, steps)) = ended else { return };
        self.steps += steps;
        match ended {
            Ended::Whole => self.whole += 1,
            Ended::Refused(error) => self.add_refused(&error),
            Ended::Left | Ended::Hanging => self.left += 1,
        }
    }

    fn add_refused(&mut self, error: &ServeError) {
        self.refused += 1;
        match error {
            ServeError::NoNodes { .. } => self.without_node += 1,
            ServeError::Refused { kind: RefusalKind::Full | RefusalKind::Queue, .. } => {
                self.without_room += 1
            }
            ServeError::DeadlinePassed { .. } => self.late += 1,
            _ => {}
        }
    }

    /// Adds the counts of another run.
    pub fn merge(&mut self, other: Self) {
        self.whole += other.whole;
        self.refused += other.refused;
        self.without_node += other.without_node;
        self.without_room += other.without_room;
        self.late += other.late;
        self.left += other.left;
        self.steps += other.steps;
        self.dead_for_operator += other.dead_for_operator;
        self.dead_for_router += other.dead_for_router;
    }

    pub fn n_requests(&self) -> u32 {
        self.whole + self.refused + self.left
    }
}
