//! Sieges: plans in which one fault affects all requests all the time. Random plans would seldom have them.

use std::time::Duration;

use router::balance::BalanceSettings;
use router::policy::Order;
use types::Role;

use super::chance::Chance;
use super::death::DeathInChange;
use super::net::Crash;
use super::plan::{
    ANSWER_TOKENS_MAX, Ask, BLOCKS_MIN, Break, Fault, LONG_PROMPT_TOKENS, MODELS, NodeShape,
    PROMPT_TOKENS_MAX, Patience, Plan, TROUBLE, nap, role_change, tokens,
};

/// The number of planned failures of an engine: more steps than a node runs before it is mended.
const STEPS_OF_A_RUN: u64 = 4_000;

/// Plans what one of the nodes does from one time to the other.
type Turn = fn(&mut Chance, &[NodeShape], Duration, Duration) -> [Fault; 2];

impl Plan {
    /// Returns the plan, or in nine of 14 cases one of the sieges instead.
    pub(super) fn besieged(self) -> Self {
        let mut chance = Chance::named(self.seed, "siege");
        match chance.below(14) {
            0 => self.with_wires_that_break(&mut chance),
            1 => self.with_deaf_nodes(&mut chance),
            2 => self.with_engines_that_fail(),
            3 => self.with_a_crowd(&mut chance),
            4 => self.with_kv_that_trickles(&mut chance),
            5 => self.with_turns(&mut chance, nap),
            6 => self.with_long_prompts(&mut chance),
            7 => self.with_turns(&mut chance, role_change).with_a_death(&[Crash::Process]),
            8 => self.with_moves(&mut chance).with_a_death(&[Crash::Process, Crash::Machine]),
            _ => self,
        }
    }

    /// Makes every transfer fail at once until the faults end.
    fn with_wires_that_break(mut self, chance: &mut Chance) -> Self {
        let names: Vec<String> = self.cluster.nodes.iter().map(|node| node.name.clone()).collect();
        let pairs = names.iter().flat_map(|one| names.iter().map(move |other| (one, other)));
        let cut = |(one, other): (&String, &String)| Fault {
            at: Duration::ZERO,
            what: Break::Cut(one.clone(), other.clone(), chance.within(1..=3) as u32),
        };
        self.faults = pairs.filter(|(one, other)| one != other).map(cut).collect();
        self.asks.truncate(2);
        self.cluster.nodes.iter_mut().for_each(|node| node.local_tokens_max = 0);
        self
    }

    /// Makes every step of every engine fail at once until the engine is replaced.
    fn with_engines_that_fail(mut self) -> Self {
        for node in &mut self.cluster.nodes {
            node.failing_steps = (0..STEPS_OF_A_RUN).collect();
        }
        self.asks.truncate(2);
        let replaced = |node: &NodeShape| Fault { at: TROUBLE, what: Break::Replace(node.name.clone()) };
        self.faults = self.cluster.nodes.iter().map(replaced).collect();
        self
    }

    /// Makes nodes slow and clients impatient, and holds the router's messages, so that nodes do not learn of
    /// cancellations.
    fn with_deaf_nodes(mut self, chance: &mut Chance) -> Self {
        for node in &mut self.cluster.nodes {
            node.step_ms = 150.0;
            node.failing_steps.clear();
        }
        for ask in &mut self.asks {
            ask.at = chance.millis(1_000..=1_100);
            ask.within = chance.millis(1_500..=2_500);
            (ask.max_tokens, ask.ignore_eos) = (ANSWER_TOKENS_MAX as u32, true);
        }
        let names = self.cluster.nodes.iter().map(|node| node.name.clone());
        let held = |name: String| {
            let (at, until) = (Duration::from_millis(1_900), Duration::from_millis(6_800));
            let router = "router".to_owned();
            let hold = Fault { at, what: Break::Hold(router.clone(), name.clone()) };
            [hold, Fault { at: until, what: Break::Release(router, name) }]
        };
        self.faults = names.flat_map(held).collect();
        self.faults.sort_by_key(|fault| fault.at);
        self
    }

    /// Makes landings of other requests take all blocks while one request decodes and needs more, and their
    /// KV does not come. The first request must be answered: a waiting request must not starve a running one.
    fn with_a_crowd(mut self, chance: &mut Chance) -> Self {
        self.be_one_pair();
        let decode = &mut self.cluster.nodes[1];
        (decode.n_blocks, decode.step_ms, decode.growth_blocks) = (BLOCKS_MIN, 120.0, 2);
        (decode.landings_max, decode.stall_ms) = (256, 20_000);
        let first = chance.within(20..=40);
        let (at, within) = (Duration::ZERO, Duration::from_secs(8));
        self.asks = vec![Ask { must_be_answered: true, ..long_ask(chance, at, first, within) }];
        for _ in 0..12 {
            let (at, length) = (chance.millis(1_300..=1_600), chance.within(4..=48));
            self.asks.push(long_ask(chance, at, length, Duration::from_secs(14)));
        }
        self.asks.sort_by_key(|ask| ask.at);
        let (from, to) = (self.cluster.nodes[0].name.clone(), self.cluster.nodes[1].name.clone());
        let hold = Break::Hold(from.clone(), to.clone());
        self.faults = vec![
            Fault { at: Duration::from_millis(1_200), what: hold },
            Fault { at: TROUBLE, what: Break::Release(from, to) },
        ];
        self
    }

    /// Makes KV come so slowly that clients leave in the middle of a frame. Other requests get the blocks at
    /// once.
    fn with_kv_that_trickles(mut self, chance: &mut Chance) -> Self {
        self.be_one_pair();
        let mut second = self.cluster.nodes[0].clone();
        second.name = "prefill-1".to_owned();
        self.cluster.nodes.push(second);
        self.cluster.policy = "round-robin";
        let decode = &mut self.cluster.nodes[1];
        (decode.n_blocks, decode.step_ms, decode.landings_max) = (BLOCKS_MIN, 25.0, 256);
        self.asks = (0..14)
            .map(|nth| {
                let (at, length) = (chance.millis(0..=5_000), chance.within(60..=PROMPT_TOKENS_MAX));
                let ask = long_ask(chance, at, length, Duration::from_secs(12));
                let leaves = Patience::Until(chance.millis(150..=900));
                Ask { patience: if nth % 2 == 0 { leaves } else { Patience::Endless }, ..ask }
            })
            .collect();
        self.asks.sort_by_key(|ask| ask.at);
        let (from, to) = (self.cluster.nodes[0].name.clone(), self.cluster.nodes[1].name.clone());
        let trickle = Break::Trickle(from, to, chance.millis(40..=120));
        self.faults = vec![Fault { at: Duration::ZERO, what: trickle }];
        self
    }

    /// Makes every node sleep, or have another role, for a while, so that one of each kind always works. No request may
    /// be lost.
    fn with_turns(mut self, chance: &mut Chance, turn: Turn) -> Self {
        self.be_two_pairs();
        self.cluster.nodes.iter_mut().for_each(|node| node.step_ms = *chance.pick(&[2.0, 25.0, 70.0]));
        (self.cluster.attempts_max, self.cluster.wait_max) = (4, Duration::from_secs(10));
        self.asks = (0..14)
            .map(|_| {
                let (at, length) = (chance.millis(0..=7_000), chance.within(4..=PROMPT_TOKENS_MAX));
                Ask { must_be_answered: true, ..long_ask(chance, at, length, Duration::from_secs(15)) }
            })
            .collect();
        self.asks.sort_by_key(|ask| ask.at);
        self.faults.clear();
        for (nth, node) in (0..).zip(&self.cluster.nodes) {
            let at = Duration::from_secs(2) * nth + chance.millis(0..=500);
            let until = at + chance.millis(0..=1_400);
            self.faults.extend(turn(chance, std::slice::from_ref(node), at, until));
        }
        self
    }

    /// Lets routers move nodes, without other faults. First prompts are long and answers short, then it is the other way
    /// around. No request may be lost.
    fn with_moves(mut self, chance: &mut Chance) -> Self {
        self.be_two_pairs();
        let window = chance.millis(500..=1_000);
        let settings = BalanceSettings { margin: 0.0, window, pause: chance.millis(0..=500) };
        self.cluster.balance = Some(settings);
        // A move ends transfers to the node, and a planned death costs one attempt more.
        self.cluster.attempts_max = 4;
        self.cluster.nodes.iter_mut().for_each(|node| (node.step_ms, node.prefill_token_ms) = (40.0, 4.0));
        let ask = |nth: u64| {
            let (is_early, at) = (nth.is_multiple_of(2), chance.millis(0..=3_500));
            let at = if is_early { at } else { at + Duration::from_millis(3_500) };
            let length = if is_early { PROMPT_TOKENS_MAX } else { 8 };
            let ask = long_ask(chance, at, length, Duration::from_secs(15));
            Ask { max_tokens: if is_early { 3 } else { ask.max_tokens }, ..ask }
        };
        self.asks = (0..60).map(ask).collect();
        self.asks.sort_by_key(|ask| ask.at);
        self.faults.clear();
        self
    }

    /// Lets one node die during a change of its role, in half of the plans.
    fn with_a_death(mut self, kinds: &[Crash]) -> Self {
        let mut chance = Chance::named(self.seed, "death");
        self.cluster.dies_in_change = chance.one_in(2).then(|| DeathInChange {
            n_changes_before: chance.below(2) as u32,
            after: chance.millis(0..=600),
            how: *chance.pick(kinds),
            down: chance.millis(50..=3_000),
        });
        self
    }

    /// Makes prompts longer than the queue to the wire, and the wire slow. The prefill node must stop
    /// computing them until there is room. The first attempt must succeed, because a second one would find
    /// the KV cached.
    fn with_long_prompts(mut self, chance: &mut Chance) -> Self {
        self.be_one_pair();
        self.attempts_may_fail = false;
        self.asks = (0..chance.within(1..=3))
            .map(|_| {
                let (at, length) = (chance.millis(0..=3_000), chance.within(LONG_PROMPT_TOKENS));
                Ask { must_be_answered: true, ..long_ask(chance, at, length, Duration::from_secs(40)) }
            })
            .collect();
        self.asks.sort_by_key(|ask| ask.at);
        self.cluster.wait_max = Duration::from_secs(40);
        self.cluster.nodes.iter_mut().for_each(|node| (node.n_blocks, node.step_tokens_max) = (800, 20));
        self.cluster.nodes.iter_mut().for_each(|node| node.stall_ms = 30_000);
        self.cluster.nodes.iter_mut().for_each(|node| node.frame_bytes = 1 << 10);
        let (from, to) = (self.cluster.nodes[0].name.clone(), self.cluster.nodes[1].name.clone());
        let trickle = Break::Trickle(from, to, chance.millis(20..=80));
        self.faults = vec![Fault { at: Duration::ZERO, what: trickle }];
        self
    }

    /// Reduces the cluster to two such pairs.
    fn be_two_pairs(&mut self) {
        self.be_one_pair();
        let second = |node: &NodeShape| NodeShape { name: format!("{}-1", node.role), ..node.clone() };
        let seconds: Vec<_> = self.cluster.nodes.iter().map(second).collect();
        self.cluster.nodes.extend(seconds);
    }

    /// Reduces the cluster to a prefill node and a decode node without faults, which share all work.
    fn be_one_pair(&mut self) {
        self.cluster.order = Order::DecodeFirst;
        (self.cluster.n_routers, self.cluster.has_pool) = (1, false);
        self.cluster.nodes.truncate(2);
        for (node, role) in self.cluster.nodes.iter_mut().zip([Role::Prefill, Role::Decode]) {
            (node.name, node.role, node.model) = (format!("{}-0", role.as_str()), role, MODELS[0]);
            (node.n_blocks, node.step_ms, node.prefill_token_ms) = (400, 2.0, 0.05);
            (node.local_tokens_max, node.queue_ms_max, node.stall_ms) = (0, 2_000.0, 5_000);
            node.frame_bytes = 16 << 10;
            node.failing_steps.clear();
        }
        if let [node] = &mut self.cluster.nodes[..] {
            let decode = NodeShape { name: "decode-0".to_owned(), role: Role::Decode, ..node.clone() };
            self.cluster.nodes.push(decode);
        }
    }
}

/// Makes a request with the longest answer and a patient client.
fn long_ask(chance: &mut Chance, at: Duration, length: u64, within: Duration) -> Ask {
    Ask {
        at,
        model: MODELS[0],
        router: 0,
        tokens: tokens(chance, length),
        max_tokens: ANSWER_TOKENS_MAX as u32,
        ignore_eos: true,
        sampling_seed: None,
        temperature: 1.0,
        priority: 0,
        tenant: "default",
        within,
        patience: Patience::Endless,
        must_be_answered: false,
    }
}
