//! Tests of predictions as a table, and of the controller's delay over simulated time.

use types::{BlockCounts, LearnedCosts, NodeLoad};

use super::demand::Demand;
use super::prediction::{Loads, NoMove};
use super::*;
use crate::admission::Arrived;

/// The costs of the mocks in `bench/scenarios/mocks/wave.toml`.
const COSTS: LearnedCosts = LearnedCosts {
    prompt_token_ms: 0.045,
    prompt_context_ms: 0.0,
    prompt_step_ms: 0.0,
    step_ms: 6.0,
    row_ms: 0.25,
    context_ms: 0.0,
    step_tokens: 0,
    gap_ms_max: 0.0,
};

const SETTINGS: BalanceSettings =
    BalanceSettings { margin: 0.25, window: Duration::from_secs(10), pause: Duration::from_secs(10) };

fn node(id: &str, role: Role) -> NodeNumbers {
    let blocks = BlockCounts { total: 1000, free: 1000, ..BlockCounts::default() };
    let load =
        NodeLoad { costs: COSTS, blocks, step_ms: COSTS.step_ms + COSTS.row_ms, ..NodeLoad::default() };
    NodeNumbers { id: NodeId::new(id), role, keeps_role: false, missing: None, load, assigned_tokens: 0 }
}

/// Sets the streams of a node.
fn running(node: &mut NodeNumbers, n: u32) {
    node.load.running = n;
    node.load.step_ms = COSTS.step_ms + COSTS.row_ms * (n + 1) as f32;
}

/// Makes a group of `n_prefill` and `n_decode` nodes.
fn group(n_prefill: usize, n_decode: usize, demand: Option<Demand>) -> GroupNumbers {
    let of = |role: Role, n| (0..n).map(move |nth| node(&format!("{role}-{nth}"), role));
    GroupNumbers { nodes: of(Role::Prefill, n_prefill).chain(of(Role::Decode, n_decode)).collect(), demand }
}

/// Returns the demand of requests with prompts and answers of this length.
fn demand(per_second: f64, prompt: f64, answer: f64) -> Option<Demand> {
    Some(Demand {
        prompt_tokens: per_second * prompt / 1e3,
        answer_tokens: per_second * answer / 1e3,
        window_ms: 10_000.0,
        ..Demand::default()
    })
}

/// Returns the move as `NODE to ROLE`, or the reason for none.
fn said(group: &GroupNumbers) -> String {
    match group.predict(0.25) {
        Ok(Move { node, to, .. }) => format!("{node} to {to}"),
        Err(reason) => reason.to_string(),
    }
}

#[test]
fn a_node_moves_to_the_kind_that_lacks_one() {
    for (what, ratio, demand, says) in [
        ("long prompts", (2, 2), demand(6.0, 8192.0, 16.0), "decode-0 to prefill"),
        ("long answers", (2, 2), demand(11.0, 256.0, 512.0), "prefill-0 to decode"),
        ("the ratio is right", (3, 1), demand(6.0, 8192.0, 16.0), "the nodes serve the demand"),
        ("the last decode node", (3, 1), demand(12.0, 8192.0, 16.0), "decode-0 is the last decode node"),
        ("the last prefill node", (1, 3), demand(20.0, 256.0, 512.0), "prefill-0 is the last prefill node"),
        ("both kinds lack nodes", (2, 2), demand(10.0, 5000.0, 450.0), "no other ratio is better"),
        ("idle", (2, 2), demand(0.0, 0.0, 0.0), "the nodes serve the demand"),
        ("not measured", (2, 2), None, "the demand is not measured yet"),
    ] {
        let said = said(&group(ratio.0, ratio.1, demand));
        assert!(said.starts_with(says), "{what}: {said}");
    }
}

#[test]
fn what_waits_counts() {
    let change = |change: fn(&mut GroupNumbers)| {
        let mut group = group(2, 2, demand(1.0, 100.0, 10.0));
        change(&mut group);
        said(&group)
    };
    assert_eq!(change(|group| group.nodes[0].load.queued_tokens = 600_000), "decode-0 to prefill");
    assert_eq!(change(|group| group.nodes[1].assigned_tokens = 600_000), "decode-0 to prefill");
    assert_eq!(
        change(|group| group.demand.as_mut().expect("a demand").waiting_tokens = 6e5),
        "decode-0 to prefill"
    );
    assert_eq!(
        change(|group| group.demand.as_mut().expect("a demand").waiting_answer_tokens = 6e4),
        "prefill-0 to decode"
    );
    // 24 streams are a full node: the step is twice as long as without streams.
    assert_eq!(change(|group| running(&mut group.nodes[2], 60)), "prefill-0 to decode");
    assert!(change(|group| running(&mut group.nodes[2], 40)).starts_with("the nodes serve"));
    let full = |group: &mut GroupNumbers| {
        for node in &mut group.nodes[2..] {
            running(node, 10);
            node.load.blocks = BlockCounts { total: 1000, leased: 1000, ..BlockCounts::default() };
        }
    };
    assert_eq!(change(full), "prefill-0 to decode", "no KV room is left");
}

#[test]
fn the_node_with_the_least_work_moves() {
    let mut group = group(2, 2, demand(6.0, 8192.0, 16.0));
    running(&mut group.nodes[2], 3);
    assert_eq!(said(&group), "decode-1 to prefill");
}

#[test]
fn a_node_that_keeps_its_role_is_not_moved() {
    let (prompts, answers) = (|| demand(9.0, 8192.0, 16.0), || demand(15.0, 256.0, 512.0));
    for (what, keep, demand, says) in [
        ("the first decode node", &["decode-0"][..], prompts(), "decode-1 to prefill"),
        ("the first prefill node", &["prefill-0"], answers(), "prefill-1 to decode"),
        ("all but one prefill node", &["prefill-0", "prefill-1"], answers(), "prefill-2 to decode"),
        ("all but one decode node", &["decode-0", "decode-1"], prompts(), "decode-2 to prefill"),
        (
            "all prefill nodes",
            &["prefill-0", "prefill-1", "prefill-2"],
            answers(),
            "no prefill node can change",
        ),
        ("nodes of the other kind", &["prefill-0", "prefill-1"], prompts(), "decode-0 to prefill"),
    ] {
        let mut group = group(3, 3, demand);
        let keeps = |node: &&mut NodeNumbers| keep.contains(&node.id.as_str());
        group.nodes.iter_mut().filter(keeps).for_each(|node| node.keeps_role = true);
        let said = said(&group);
        assert!(said.starts_with(says), "{what}: {said}");
    }
}

#[test]
fn missing_numbers_are_not_idleness() {
    for (what, change, says) in [
        (
            "an old report",
            (|node| node.missing = Some("its last report is old".to_owned())) as fn(&mut NodeNumbers),
            "numbers of decode-1 are missing: its last report is old",
        ),
        ("both roles", |node| node.role = Role::Both, "decode-1 has both roles"),
    ] {
        let mut group = group(2, 2, demand(6.0, 8192.0, 16.0));
        change(group.nodes.last_mut().expect("a node"));
        assert_eq!(said(&group), says, "{what}");
    }
    for (role, per_second) in [(Role::Prefill, 6.0), (Role::Decode, 6.0), (Role::Decode, 0.0)] {
        let mut group = group(2, 2, demand(per_second, 8192.0, 16.0));
        let of_role = |node: &&mut NodeNumbers| node.role == role;
        group.nodes.iter_mut().filter(of_role).for_each(|node| node.load.costs = LearnedCosts::default());
        assert_eq!(group.predict(0.25), Err(NoMove::UnknownSpeed(role)));
    }
    // A node that was moved a moment ago has computed no prompt yet, and its peer has.
    let mut group = group(2, 2, demand(6.0, 8192.0, 16.0));
    group.nodes[0].load.costs = LearnedCosts::default();
    assert_eq!(said(&group), "decode-0 to prefill");
}

#[test]
fn a_report_must_be_fresh_and_its_node_ready() {
    let now = Instant::now() + Duration::from_secs(60);
    let member = |state, age: Option<u64>| GroupMember {
        info: crate::policy::tests::node("a", Role::Decode).info,
        state,
        load: NodeLoad::default(),
        reported: age.map(|age| now - Duration::from_secs(age)),
        assigned_tokens: 0,
    };
    for (state, age, missing) in [
        (NodeState::Ready, Some(1), None),
        (NodeState::Ready, Some(4), Some("its last report is old")),
        (NodeState::Ready, None, Some("it has not reported")),
        (NodeState::Draining, Some(1), Some("it is draining")),
        (NodeState::Unreachable, Some(1), Some("it is unreachable")),
    ] {
        let numbers = numbers(&member(state.clone(), age), now);
        assert_eq!(numbers.missing.as_deref(), missing, "{state:?} {age:?}");
    }
}

#[test]
fn demand_is_measured_over_a_whole_window() {
    let (mut window, began) = (DemandWindow::new(Duration::from_secs(10)), Instant::now());
    let at = |seconds: u64| {
        let (prompt_tokens, answer_tokens) = (100 * seconds, 10 * seconds);
        let (waiting_tokens, waiting_answer_tokens) = (7, 0);
        Arrived { prompt_tokens, answer_tokens, waiting_tokens, waiting_answer_tokens }
    };
    for seconds in 0..10 {
        let measured = window.measure(at(seconds), began + Duration::from_secs(seconds));
        assert_eq!(measured, None, "{seconds} s");
    }
    let idle = |seconds| began + Duration::from_secs(seconds);
    let measured = window.measure(at(10), idle(10)).expect("a whole window");
    assert_eq!((measured.prompt_tokens, measured.answer_tokens), (0.1, 0.01));
    assert_eq!(measured.waiting_tokens, 7.0);
    for seconds in 11..=20 {
        window.measure(at(10), idle(seconds));
    }
    assert_eq!(window.measure(at(10), idle(21)).expect("a whole window").prompt_tokens, 0.0, "it forgets");
}

// === simulated time ===

/// A cluster in which requests arrive at random, nodes compute them, and moves take two seconds.
#[derive(Debug)]
struct Simulation {
    began: Instant,
    seconds: f64,
    random: u64,
    n_prefill: usize,
    n_decode: usize,
    arrived: Arrived,
    /// Prompt tokens that are not computed.
    queued: f64,
    /// The answer tokens that are left of each stream.
    streams: Vec<f64>,
    demand: DemandWindow,
    delay: MoveDelay,
    moving: Option<(Role, f64)>,
    moves: Vec<(f64, Role)>,
}

/// The step of the simulation, in seconds.
const TICK: f64 = 0.5;

impl Simulation {
    fn new(n_prefill: usize, n_decode: usize, seed: u64) -> Self {
        let began = Instant::now();
        Self {
            began,
            seconds: 0.0,
            random: seed,
            n_prefill,
            n_decode,
            arrived: Arrived::default(),
            queued: 0.0,
            streams: Vec::new(),
            demand: DemandWindow::new(SETTINGS.window),
            delay: MoveDelay::new(SETTINGS, began),
            moving: None,
            moves: Vec::new(),
        }
    }

    /// Returns a random number from 0 to 1.
    fn draw(&mut self) -> f64 {
        self.random =
            self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 11) as f64 / (1u64 << 53) as f64
    }

    fn run(&mut self, seconds: f64, per_second: f64, prompt: u64, answer: u64) {
        let end = self.seconds + seconds;
        let mut next = self.seconds;
        while self.seconds < end {
            while next < self.seconds + TICK {
                next -= (1.0 - self.draw()).ln() / per_second;
                self.arrived.prompt_tokens += prompt;
                self.arrived.answer_tokens += answer;
                self.queued += prompt as f64;
                self.streams.push(answer as f64);
            }
            self.seconds += TICK;
            self.compute();
            self.balance();
        }
    }

    fn compute(&mut self) {
        let prompt_tokens = TICK * 1e3 / f64::from(COSTS.prompt_token_ms) * self.n_prefill as f64;
        self.queued = (self.queued - prompt_tokens).max(0.0);
        let rows = self.streams.len() as f64 / self.n_decode as f64;
        let n_steps = TICK * 1e3 / (f64::from(COSTS.step_ms) + rows * f64::from(COSTS.row_ms));
        self.streams.iter_mut().for_each(|left| *left -= n_steps);
        self.streams.retain(|left| *left > 0.0);
    }

    fn balance(&mut self) {
        if let Some((to, until)) = self.moving {
            if self.seconds < until {
                return;
            }
            *(if to == Role::Prefill { &mut self.n_prefill } else { &mut self.n_decode }) += 1;
            self.moving = None;
        }
        let now = self.began + Duration::from_secs_f64(self.seconds);
        let mut group = group(self.n_prefill, self.n_decode, self.demand.measure(self.arrived, now));
        group.nodes[0].load.queued_tokens = self.queued as u64;
        running(group.nodes.last_mut().expect("a decode node"), self.streams.len() as u32);
        let roles = group.nodes.iter().map(|node| (node.id.clone(), node.role)).collect();
        let Some(wanted) = self.delay.due(roles, group.predict(SETTINGS.margin).ok(), now) else { return };
        *(if wanted.from == Role::Prefill { &mut self.n_prefill } else { &mut self.n_decode }) -= 1;
        self.moving = Some((wanted.to, self.seconds + 2.0));
        self.moves.push((self.seconds, wanted.to));
    }
}

/// Returns the rate at which the busier kind has this load.
fn rate(load: f64, ratio: (usize, usize), prompt: u64, answer: u64) -> f64 {
    let one = group(ratio.0, ratio.1, demand(1.0, prompt as f64, answer as f64));
    let Err(NoMove::Served(Loads { prefill, decode })) = one.predict(0.0) else {
        panic!("one per second is little")
    };
    load / prefill.max(decode)
}

#[test]
fn ten_minutes_of_a_constant_load_of_70_percent_move_no_node() {
    for (ratio, prompt, answer) in [
        ((2, 2), 8192, 16),
        ((2, 2), 256, 512),
        ((2, 2), 2000, 250),
        ((3, 1), 8192, 16),
        ((1, 3), 256, 512),
        ((1, 1), 2000, 250),
        ((6, 2), 4000, 100),
        ((2, 6), 500, 400),
    ] {
        for seed in 0..20 {
            let mut simulation = Simulation::new(ratio.0, ratio.1, seed);
            simulation.run(600.0, rate(0.7, ratio, prompt, answer), prompt, answer);
            assert_eq!(simulation.moves, [], "{ratio:?} {prompt}/{answer} seed {seed}");
        }
    }
}

#[test]
fn a_square_wave_moves_nodes_to_the_kind_that_needs_them() {
    let mut simulation = Simulation::new(2, 2, 1);
    for wave in 0..3 {
        simulation.run(60.0, 6.5, 8192, 16);
        assert_eq!((simulation.n_prefill, simulation.n_decode), (3, 1), "wave {wave}: long prompts");
        simulation.run(60.0, 11.0, 256, 512);
        assert_eq!((simulation.n_prefill, simulation.n_decode), (1, 3), "wave {wave}: long answers");
    }
    // One move in the first half-wave, and two in each later one.
    assert_eq!(simulation.moves.len(), 11, "{:?}", simulation.moves);
}

#[test]
fn a_prediction_must_stand_for_the_whole_time() {
    let began = Instant::now();
    let at = |seconds| began + Duration::from_secs(seconds);
    let roles = |prefill: &[&str]| -> BTreeMap<NodeId, Role> {
        prefill.iter().map(|id| (NodeId::new(*id), Role::Prefill)).collect()
    };
    let predicted = |to| {
        let long = to == Role::Prefill;
        let demand = if long { demand(6.0, 8192.0, 16.0) } else { demand(11.0, 256.0, 512.0) };
        Some(group(2, 2, demand).predict(0.25).expect("a move"))
    };
    let mut delay = MoveDelay::new(SETTINGS, began);
    let mut due = |ids: &[&str], wanted, seconds| delay.due(roles(ids), wanted, at(seconds)).is_some();
    assert!(!due(&["a"], predicted(Role::Prefill), 0));
    assert!(!due(&["a"], predicted(Role::Prefill), 9));
    assert!(due(&["a"], predicted(Role::Prefill), 10));
    assert!(!due(&["a"], None, 11), "a gap");
    assert!(!due(&["a"], predicted(Role::Prefill), 12));
    assert!(!due(&["a"], predicted(Role::Prefill), 21));
    assert!(!due(&["a"], predicted(Role::Decode), 22), "another direction");
    assert!(!due(&["a"], predicted(Role::Decode), 31));
    assert!(due(&["a"], predicted(Role::Decode), 32));
    assert!(!due(&["a", "b"], predicted(Role::Decode), 33), "a node has come");
    assert!(!due(&["a", "b"], predicted(Role::Decode), 42));
    assert!(due(&["a", "b"], predicted(Role::Decode), 43));
}

/// Node "d" is asked at second 0 to prefill. It is seen once a second, as a letter: "d" drains, "m" has moved, "k" is ready
/// in its old role, "n" is another process in its old role, "-" is no registration, and "a" is an answer without one.
#[test]
fn a_move_ends_when_the_node_is_there_or_gone() {
    for (what, seen, expected) in [
        ("it moves", "ddd-m".to_owned(), Some((4, MoveOutcome::Moved))),
        (
            "the exchange of the registration takes time",
            format!("d{}m", "-".repeat(14)),
            Some((15, MoveOutcome::Moved)),
        ),
        ("its registration has ended", format!("ddd{}", "-".repeat(20)), Some((17, MoveOutcome::Lost))),
        (
            "it drains for long, then it is gone",
            format!("{}{}", "a".repeat(60), "-".repeat(20)),
            Some((74, MoveOutcome::Lost)),
        ),
        (
            "it drains for long, then it moves",
            format!("d{}{}m", "a".repeat(60), "-".repeat(14)),
            Some((75, MoveOutcome::Moved)),
        ),
        ("it was started again", "dd--n".to_owned(), Some((4, MoveOutcome::Lost))),
        ("it keeps its role", "kkkkkkkk".to_owned(), Some((5, MoveOutcome::Kept))),
        ("it still drains", "d".repeat(299), None),
        ("it drains for ever", "d".repeat(302), Some((300, MoveOutcome::Lost))),
        ("it drains for ever, without a registration", "a".repeat(302), Some((300, MoveOutcome::Lost))),
    ] {
        let (start, info) = (Instant::now(), crate::fake_node::info("d", Role::Decode));
        let (from, to, epoch) = (Role::Decode, Role::Prefill, info.epoch);
        let node = info.id.clone();
        let mut under_way = MoveUnderWay { node, from, to, epoch, began: start, heard: start };
        let mut outcome = |second: usize, letter: char| {
            let other = Epoch(epoch.0 + 1);
            let (role, epoch) =
                (if letter == 'm' { to } else { from }, if letter == 'n' { other } else { epoch });
            let info = NodeInfo { role, epoch, ..info.clone() };
            let state = if letter == 'd' { NodeState::Draining } else { NodeState::Ready };
            let seen = (!"-a".contains(letter)).then_some((&info, &state));
            let now = start + Duration::from_secs(second as u64);
            if letter != '-' {
                under_way.heard = now;
            }
            under_way.outcome(seen, now)
        };
        let ended =
            seen.chars().enumerate().find_map(|(second, letter)| Some((second, outcome(second, letter)?)));
        assert_eq!(ended, expected, "{what}");
    }
}
