//! One run: a plan is played, and judged.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use chassis::{Gate, Task, spawn_guarded};
use tokio::time::{Instant, sleep, sleep_until};

use super::chance::Chance;
use super::client::{Client, Ended, prompt};
use super::host::{Hosts, WHOLE_WITHIN, model};
use super::log::EventLog;
use super::net::{Crash, SimNet};
use super::operator::Operator;
use super::oracle;
use super::plan::{ANSWER_TOKENS_MAX, Ask, Break, Fault, PROMPT_TOKENS_MAX, Patience, Plan, TROUBLE, tokens};
use super::reference::Alone;
use super::rogue;
use super::watcher::Watcher;
use super::witness::Witness;

/// What a run leaves.
#[derive(Clone, Debug)]
pub struct Report {
    pub seed: u64,
    /// Of everything that happened and when. The same seed must give the same.
    pub hash: u64,
    pub lines: Vec<String>,
    /// What was wrong. None in a good run.
    pub faults: Vec<String>,
    pub tally: Tally,
}

/// How a run's requests ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    pub whole: u32,
    pub refused: u32,
    pub left: u32,
    pub steps: u32,
}

/// Plays the plan of `seed`, on a clock of its own.
pub fn run(seed: u64) -> Report {
    play(Plan::draw(seed))
}

/// Plays a plan.
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
    plan: Plan,
    log: EventLog,
    net: SimNet,
    hosts: Hosts,
    alone: Alone,
    began: Instant,
    clients: Vec<Task<(Ended, u32)>>,
    /// When each request must be over, everywhere.
    deadlines: BTreeMap<String, Instant>,
    watcher: Watcher,
    operator: Operator,
    _rogue: Task<()>,
    gate: Gate,
}

/// How many requests must be answered at once when all is mended, and how long each may take.
const PROBES: u64 = 3;
const PROBE_WITHIN: Duration = Duration::from_secs(30);
/// Steps that an engine may still be about to fail when all else is mended.
const ENGINE_FAILURES_MAX: u32 = 3;
/// A lease, and the tenth of one by which its end may be noticed late.
const LAPSED_WITHIN: Duration = Duration::from_millis(12_500);
/// How often it is looked whether anything lives too long.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// How long a mended cluster may need until everybody knows everybody: a lease, and the pauses of those who try again.
const MENDED_WITHIN: Duration = Duration::from_secs(20);

impl Run {
    /// A cluster of which every member knows every other.
    async fn begin(plan: Plan, log: EventLog) -> Self {
        let net = SimNet::new(Chance::named(plan.seed, "net"), log.clone());
        let hosts = Hosts::start(&plan.cluster, &net, plan.seed).await;
        let n_blocks = (PROMPT_TOKENS_MAX + ANSWER_TOKENS_MAX).div_ceil(4) as u32 + 1;
        let alone = Alone::new(model(), n_blocks);
        let (gate, began) = (Gate::new("clients"), Instant::now());
        let watcher = Watcher::start(&net, plan.seed, &gate).await;
        let operator = Operator::new(&net, &gate);
        let rogue = rogue::intrude(net.clone(), log.clone());
        let rogue = spawn_guarded(&gate, "rogue", rogue);
        let (clients, deadlines) = (Vec::new(), BTreeMap::new());
        let mut run = Self {
            plan,
            log,
            net,
            hosts,
            alone,
            began,
            clients,
            deadlines,
            watcher,
            operator,
            _rogue: rogue,
            gate,
        };
        run.become_whole(WHOLE_WITHIN).await;
        run.began = Instant::now();
        run
    }

    async fn become_whole(&mut self, within: Duration) {
        let give_up = Instant::now() + within;
        while !self.hosts.is_whole() {
            if Instant::now() > give_up {
                let everyone = self.hosts.router.cluster().map(router::Cluster::everyone);
                let states = everyone.unwrap_or_default();
                let states: Vec<_> = states.iter().map(|(info, state)| (&info.id, state)).collect();
                return self.log.accuse(format_args!("the cluster is not whole: {states:?}"));
            }
            sleep(Duration::from_millis(50)).await;
        }
        self.log.say("everybody knows everybody");
    }

    async fn play(mut self) -> Tally {
        self.trouble().await;
        self.net.heal();
        self.hosts.start_all().await;
        self.wake_all();
        self.log.say("mended");
        let mut tally = Tally::default();
        for client in std::mem::take(&mut self.clients) {
            while !client.is_finished() {
                self.look_until(Instant::now() + LOOK_EVERY).await;
            }
            tally.add(client.await.ok());
        }
        self.become_whole(MENDED_WITHIN).await;
        self.probe().await;
        oracle::attempts(&self.hosts.router, &self.plan, tally, PROBES, &self.log);
        oracle::everything_is_given_back(&self.hosts, &self.log).await;
        oracle::mirrored(&self.hosts, &self.log).await;
        oracle::watched(&self.hosts.router, &self.watcher, &self.log).await;
        if Chance::named(self.plan.seed, "end").one_in(4) {
            self.one_dies_for_good().await;
        }
        tally
    }

    /// Plays the plan's requests and faults, each at its time.
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

    /// Waits, and looks meanwhile whether anything lives longer than it may.
    async fn look_until(&self, until: Instant) {
        while Instant::now() < until {
            sleep_until(until.min(Instant::now() + LOOK_EVERY)).await;
            oracle::nothing_outlives_its_request(&self.hosts, &self.deadlines, &self.log);
        }
    }

    /// A node that is gone for a whole lease is gone for everybody.
    async fn one_dies_for_good(&mut self) {
        let name = self.plan.cluster.nodes[0].name.clone();
        self.break_it(Break::Crash(name.clone(), Crash::Machine)).await;
        sleep(LAPSED_WITHIN).await;
        oracle::is_gone(&self.hosts.router, &name, &self.log);
        oracle::watched(&self.hosts.router, &self.watcher, &self.log).await;
    }

    /// Whoever was asked to sleep is woken: the word for it may not have come through.
    fn wake_all(&self) {
        let asked = |fault: &Fault| match &fault.what {
            Break::Sleep(node) => Some(node.clone()),
            _ => None,
        };
        let nodes: BTreeSet<String> = self.plan.faults.iter().filter_map(asked).collect();
        nodes.iter().for_each(|node| self.operator.wake(node, None));
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
            Break::Crash(host, how) => match self.hosts.node(&host) {
                Some(node) => node.crash(how),
                None => self.hosts.router.crash(how),
            },
            Break::Drain(host) => self.hosts.node(&host).into_iter().for_each(|node| node.drain()),
            Break::Start(host) => match self.hosts.node(&host) {
                Some(node) => node.start(),
                None => self.hosts.router.start().await,
            },
            Break::Replace(host) => {
                if let Some(node) = self.hosts.node(&host) {
                    node.shape.failing_steps.clear();
                    node.crash(Crash::Process);
                    node.start();
                }
            }
            Break::Sleep(host) => self.operator.sleep(&host),
            Break::Wake(host, role) => self.operator.wake(&host, role),
            Break::Jump(host, by) => self.hosts.node(&host).into_iter().for_each(|node| node.jumps.jump(by)),
        }
    }

    fn ask(&mut self, name: String, ask: Ask) {
        let Some(dispatch) = self.hosts.router.dispatch() else {
            return self.log.say(format_args!("{name} finds no router"));
        };
        let asked = self.began.elapsed();
        let on_its_way = self.plan.held_until(asked).saturating_sub(asked);
        self.deadlines.insert(name.clone(), Instant::now() + ask.within + on_its_way);
        let client = self.client(name, ask);
        self.clients.push(spawn_guarded(&self.gate, "client", client.run(dispatch)));
    }

    fn client(&mut self, name: String, ask: Ask) -> Client {
        let reference = self.alone.answer(&prompt(&name, &ask));
        Client { name, ask, reference, log: self.log.clone(), is_calm: self.plan.is_calm() }
    }

    /// The cluster serves the next requests.
    async fn probe(&mut self) {
        let mut chance = Chance::named(self.plan.seed, "probes");
        let mut asks: Vec<(u64, Ask)> = (0..PROBES).map(|nth| (nth, probe(&mut chance, nth))).collect();
        for round in 0..=ENGINE_FAILURES_MAX {
            let asked = std::mem::take(&mut asks);
            for (nth, ask) in &asked {
                let name =
                    if round == 0 { format!("probe {nth}") } else { format!("probe {nth} again {round}") };
                self.ask(name, ask.clone());
            }
            for (probe, ask) in std::mem::take(&mut self.clients).into_iter().zip(asked) {
                match probe.await {
                    Ok((Ended::Whole, _)) => {}
                    // An engine is mended when it has failed all the steps that it was told to fail, and no sooner.
                    Ok((Ended::Refused(error), _)) if is_told(&error) && round < ENGINE_FAILURES_MAX => {
                        asks.push(ask);
                    }
                    other => self.log.accuse(format_args!("a probe ended with {other:?}")),
                }
            }
        }
    }
}

fn probe(chance: &mut Chance, nth: u64) -> Ask {
    Ask {
        at: Duration::ZERO,
        tokens: tokens(chance, 30 + 50 * nth),
        max_tokens: 8,
        ignore_eos: true,
        sampling_seed: None,
        within: PROBE_WITHIN,
        patience: Patience::Endless,
        must_be_answered: false,
    }
}

/// Whether an engine failed because the plan says so.
fn is_told(error: &router::serve::ServeError) -> bool {
    error.to_string().contains("told to fail")
}

impl Tally {
    fn add(&mut self, ended: Option<(Ended, u32)>) {
        let Some((ended, steps)) = ended else { return };
        self.steps += steps;
        match ended {
            Ended::Whole => self.whole += 1,
            Ended::Refused(_) => self.refused += 1,
            Ended::Left | Ended::Hanging => self.left += 1,
        }
    }

    pub fn n_requests(&self) -> u32 {
        self.whole + self.refused + self.left
    }
}
