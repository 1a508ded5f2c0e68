//! Tests of policies. A view and a draw determine the route.

use std::time::Duration;

use types::layout::KvDtype;
use types::*;

use super::*;

/// Makes an idle node.
pub(crate) fn node(id: &str, role: Role) -> NodeView {
    let info = NodeInfo {
        id: NodeId::new(id),
        epoch: Epoch(1),
        role,
        pid: 1,
        host: "h".to_owned(),
        address: "a".to_owned(),
        admin: "b".to_owned(),
        wires: vec![],
        without: vec![],
        keeps_role: false,
        model: ModelInfo {
            name: "m".to_owned(),
            context_tokens: 1024,
            vocab: 300,
            eos_tokens: vec![],
            layout: KvLayout::uniform(16, KvDtype::F32, 2, 2, 4),
            fingerprint: Fingerprint::default(),
        },
        protocol: types::node::PROTOCOL,
    };
    let blocks = BlockCounts { total: 100, free: 100, ..BlockCounts::default() };
    let load = NodeLoad { blocks, step_ms: 5.0, ..NodeLoad::default() };
    NodeView {
        info: Arc::new(info),
        load,
        assigned: 0,
        assigned_work: PromptWork::default(),
        last_turn: 0,
        cached_tokens: 0,
    }
}

fn view(nodes: Vec<NodeView>) -> ClusterView {
    ClusterView { nodes, ..ClusterView::default() }
}

pub(crate) fn prompt(n_tokens: usize) -> Prompt {
    let now = tokio::time::Instant::now().into_std();
    Prompt {
        id: RequestId::new("r"),
        tenant: TenantId::default(),
        cache_salt: types::CacheSalt::default(),
        model: types::RequestedModel::named("mock"),
        tokens: vec![TokenId(1); n_tokens].into(),
        n_generated: 0,
        sampling: Sampling::default(),
        stop: StopRules::default(),
        priority: types::prompt::Priority(0),
        deadline: Deadline::at(now + Duration::from_secs(1)),
    }
}

fn two_and_two() -> ClusterView {
    view(vec![
        node("p0", Role::Prefill),
        node("p1", Role::Prefill),
        node("d0", Role::Decode),
        node("d1", Role::Decode),
    ])
}

/// Routes a prompt whose blocks have these hashes.
fn decided(
    policy: &dyn RoutingPolicy,
    prompt: &Prompt,
    hashes: &[BlockHash],
    view: &ClusterView,
    draw: u64,
) -> Result<Decision, NoRoute> {
    policy.route(&Ask::new(prompt, hashes), view, draw)
}

/// Routes a prompt without known blocks.
fn routed(name: &str, prompt: &Prompt, view: &ClusterView, draw: u64) -> Result<Route, NoRoute> {
    let policy = by_name(name).expect("in the table");
    decided(&*policy, prompt, &[], view, draw).map(|decision| decision.route)
}

fn ids(route: &Route) -> (Option<&str>, &str) {
    (route.prefill.as_ref().map(|node| node.id.as_str()), route.decode.id.as_str())
}

#[test]
fn every_name_is_in_the_table() {
    for name in NAMES {
        assert_eq!(by_name(name).map(|policy| policy.name()), Some(*name));
    }
    assert!(by_name("best").is_none());
}

#[test]
fn every_policy_is_pure_and_needs_a_decode_node() {
    for name in NAMES {
        let view = two_and_two();
        assert_eq!(routed(name, &prompt(9), &view, 77), routed(name, &prompt(9), &view, 77), "{name}");
        let only_prefill = super::tests::view(vec![node("p0", Role::Prefill)]);
        assert_eq!(routed(name, &prompt(9), &only_prefill, 1), Err(NoRoute::NoDecode), "{name}");
    }
}

#[test]
fn without_prefill_nodes_decode_computes_by_itself() {
    for name in NAMES {
        for view in [view(vec![node("d0", Role::Decode)]), view(vec![node("d0", Role::Both)])] {
            let route = routed(name, &prompt(9), &view, 3).expect("decode is there");
            assert_eq!(ids(&route), (None, "d0"), "{name}");
        }
    }
}

#[test]
fn random_reaches_every_pair() {
    let view = two_and_two();
    let draws = (0..64u64).map(|n| n.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let routes: Vec<Route> =
        draws.map(|draw| routed("random", &prompt(9), &view, draw).expect("usable")).collect();
    let pairs: std::collections::BTreeSet<_> = routes.iter().map(ids).collect();
    assert_eq!(pairs.len(), 4);
}

#[test]
fn round_robin_takes_turns() {
    let mut view = two_and_two();
    let mut seen = Vec::new();
    for turn in 1..=4 {
        let route = routed("round-robin", &prompt(9), &view, 0).expect("usable");
        for node in &mut view.nodes {
            if node.info.id == route.decode.id
                || Some(&node.info.id) == route.prefill.as_ref().map(|node| &node.id)
            {
                node.last_turn = turn;
            }
        }
        seen.push(format!("{:?}", ids(&route)));
    }
    assert_eq!(seen[0], seen[2]);
    assert_eq!(seen[1], seen[3]);
    assert_ne!(seen[0], seen[1]);
}

#[test]
fn least_loaded_prefers_the_short_queue_and_the_short_step() {
    let mut view = two_and_two();
    view.nodes[0].load.queue_ms = 80.0;
    view.nodes[0].load.queued_tokens = 800;
    view.nodes[3].load.step_ms = 9.0;
    assert_eq!(ids(&routed("least-loaded", &prompt(9), &view, 5).expect("usable")), (Some("p1"), "d0"));
    // Prompts assigned since the report count too, so the other nodes are chosen.
    view.nodes[1].assigned_work = PromptWork::of(0..1_000_000);
    view.nodes[2].assigned = 8;
    assert_eq!(ids(&routed("least-loaded", &prompt(9), &view, 5).expect("usable")), (Some("p0"), "d1"));
}

/// Equal GPUs learn slightly different times. At low load, all of them get prompts.
#[test]
fn least_loaded_takes_idle_nodes_with_similar_times_alike() {
    let mut view = two_and_two();
    view.nodes[1].load.queue_ms = 0.3;
    view.nodes[3].load.step_ms = 5.4;
    let draws = (0..64u64).map(|n| n.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let routes: Vec<Route> =
        draws.map(|draw| routed("least-loaded", &prompt(9), &view, draw).expect("usable")).collect();
    let pairs: std::collections::BTreeSet<_> = routes.iter().map(ids).collect();
    assert_eq!(pairs.len(), 4);
    // The time decides between a node with a sequence and an idle one.
    view.nodes[3].load.running = 1;
    for draw in 0..8 {
        assert_eq!(ids(&routed("least-loaded", &prompt(9), &view, draw << 32).expect("usable")).1, "d0");
    }
}

/// A decode node that had one slow moment learns at low load that it is fast again.
#[test]
fn least_loaded_gives_a_few_prompts_to_an_idle_node_that_was_slow() {
    let mut view = two_and_two();
    view.nodes[3].load.step_ms = 50.0;
    view.nodes[2].last_turn = 9;
    let mut n_taken = || {
        let draws = (0..4096u64).map(|n| n.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let takes =
            |draw: &u64| ids(&routed("least-loaded", &prompt(9), &view, *draw).expect("usable")).1 == "d1";
        let n_taken = draws.filter(takes).count();
        view.nodes[3].load.running = 1;
        n_taken
    };
    let n_idle = n_taken();
    assert!((8..=32).contains(&n_idle), "{n_idle} of 4096");
    assert_eq!(n_taken(), 0, "it is not idle any more");
}

#[test]
fn a_burst_of_unlike_prompts_spreads_over_idle_nodes() {
    let mut view = two_and_two();
    let mut counts = std::collections::BTreeMap::new();
    for draw in 0..40u64 {
        let draw = draw.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let route = routed("least-loaded", &prompt(9), &view, draw).expect("usable");
        for node in &mut view.nodes {
            if node.info.id == route.decode.id
                || Some(&node.info.id) == route.prefill.as_ref().map(|node| &node.id)
            {
                node.assigned += 1;
                node.assigned_work += PromptWork::of(0..9);
                *counts.entry(node.info.id.clone()).or_insert(0) += 1;
            }
        }
    }
    assert!(counts.values().all(|count| *count == 20), "{counts:?}");
}

#[test]
fn a_decode_node_with_a_line_is_left_alone_while_another_has_none() {
    for name in NAMES {
        let mut view = two_and_two();
        view.nodes[2].load.waiting = 1;
        for draw in (0..16u64).map(|n| n.wrapping_mul(0x9e37_79b9_7f4a_7c15)) {
            assert_eq!(ids(&routed(name, &prompt(40), &view, draw).expect("usable")).1, "d1", "{name}");
        }
        view.nodes[3].load.waiting = 1;
        routed(name, &prompt(40), &view, 1).expect("both have lines, and one must do");
    }
}

#[test]
fn a_full_decode_node_is_left_alone_while_another_has_room() {
    for name in NAMES {
        let mut view = two_and_two();
        view.nodes[2].load.blocks = BlockCounts { total: 100, leased: 100, ..BlockCounts::default() };
        for draw in 0..16u64 {
            let route = routed(name, &prompt(100), &view, draw << 28).expect("usable");
            assert_eq!(route.decode.id.as_str(), "d1", "{name}");
        }
    }
}

/// Gives a node the costs of a mock: 0.05 ms per prompt token, 5 ms per step.
fn paced(node: &mut NodeView) {
    node.load.costs = LearnedCosts {
        prompt_token_ms: 0.05,
        step_ms: 5.0,
        row_ms: 0.1,
        step_tokens: 512,
        ..LearnedCosts::default()
    };
}

/// A node: its queue in milliseconds, the tokens assigned to it, the prompt's tokens that it has cached, and its
/// last turn.
type PrefixRow = (f32, u64, u32, u64);

#[test]
fn prefix_aware_weighs_what_is_cached_against_the_queue() {
    let cases: &[(&str, [PrefixRow; 2], &str)] = &[
        ("nothing is cached: the oldest turn", [(0.0, 0, 0, 7), (0.0, 0, 0, 3)], "p1"),
        ("the cached prefix", [(0.0, 0, 1920, 7), (0.0, 0, 0, 3)], "p0"),
        ("the longer one", [(0.0, 0, 960, 3), (0.0, 0, 1920, 7)], "p1"),
        ("a queue that costs less than the prefix", [(60.0, 0, 1920, 7), (0.0, 0, 0, 3)], "p0"),
        ("a queue that costs more", [(200.0, 0, 1920, 7), (0.0, 0, 0, 3)], "p1"),
        ("a queue that is not reported yet", [(0.0, 4000, 1920, 7), (0.0, 0, 0, 3)], "p1"),
        ("similar costs: what is cached", [(0.0, 0, 64, 7), (0.0, 0, 0, 3)], "p0"),
    ];
    let policy = by_name("prefix-aware").expect("in the table");
    for (what, rows, expected) in cases {
        let mut view = two_and_two();
        for (node, (queue_ms, assigned_tokens, cached_tokens, last_turn)) in view.nodes.iter_mut().zip(rows) {
            paced(node);
            (node.load.queue_ms, node.assigned_work) = (*queue_ms, PromptWork::of(0..*assigned_tokens));
            (node.cached_tokens, node.last_turn) = (*cached_tokens, *last_turn);
        }
        let decision = decided(&*policy, &prompt(2000), &[], &view, 5).expect("usable");
        assert_eq!(ids(&decision.route).0, Some(*expected), "{what}");
        let chosen = view.nodes.iter().find(|node| node.info.id.as_str() == *expected).expect("a node");
        assert_eq!(decision.terms.cached_tokens, chosen.cached_tokens, "{what}");
    }
}

/// A decode node computes small remainders of prompts alone, so its time per token is long. It says nothing about
/// prefill nodes that have computed no prompt yet.
#[test]
fn prefix_aware_gives_prompts_to_a_node_whose_speed_is_unknown() {
    let policy = by_name("prefix-aware").expect("in the table");
    let mut view = two_and_two();
    paced(&mut view.nodes[0]);
    paced(&mut view.nodes[2]);
    view.nodes[2].load.costs.prompt_token_ms = 1.0;
    view.nodes[0].last_turn = 7;
    let decision = decided(&*policy, &prompt(2000), &[], &view, 5).expect("usable");
    assert_eq!(ids(&decision.route).0, Some("p1"));
}

/// A node predicts no wait before it has computed a prompt. Its prompts count at the speed of the fastest node.
#[test]
fn a_queue_counts_on_a_node_whose_speed_is_unknown() {
    for name in ["prefix-aware", "cost"] {
        let policy = by_name(name).expect("in the table");
        for (queued_tokens, assigned_tokens, expected) in [(0, 0, "p1"), (8_000, 0, "p0"), (0, 8_000, "p0")] {
            let mut view = two_and_two();
            paced(&mut view.nodes[0]);
            view.nodes[0].load.queue_ms = 150.0;
            view.nodes[2..].iter_mut().for_each(|node| node.load.running = 40);
            (view.nodes[1].load.queued_tokens, view.nodes[1].assigned_work) =
                (queued_tokens, PromptWork::of(0..assigned_tokens));
            let decision = decided(&*policy, &prompt(2000), &[], &view, NO_EXPLORING).expect("usable");
            assert_eq!(ids(&decision.route).0, Some(expected), "{name}: {queued_tokens} {assigned_tokens}");
        }
    }
}

/// The decode node that gave the last answer has its KV. It is chosen again, unless its steps are much longer.
#[test]
fn prefix_aware_returns_to_the_decode_node_that_has_the_answer() {
    let policy = by_name("prefix-aware").expect("in the table");
    for (step_ms, expected) in [(5.0, "d1"), (6.0, "d1"), (20.0, "d0")] {
        let mut view = two_and_two();
        view.nodes.iter_mut().for_each(paced);
        view.nodes[3].cached_tokens = 1920;
        view.nodes[3].load.step_ms = step_ms;
        let decision = decided(&*policy, &prompt(2000), &[], &view, 5).expect("usable");
        assert_eq!(ids(&decision.route).1, expected, "{step_ms} ms");
    }
    let mut both = view(vec![node("b0", Role::Both), node("b1", Role::Both)]);
    both.nodes.iter_mut().for_each(paced);
    both.nodes[1].cached_tokens = 1920;
    let decision = decided(&*policy, &prompt(2000), &[], &both, 5).expect("usable");
    assert_eq!((ids(&decision.route), decision.terms.cached_tokens), ((None, "b1"), 1920));
}

#[test]
fn session_affinity_keeps_a_beginning_on_its_nodes_while_they_are_not_overloaded() {
    let policy = by_name("session-affinity").expect("in the table");
    let hashes = |of: u128| (0..20).map(|nth| BlockHash((of << 64) + nth.min(15) + 1)).collect::<Vec<_>>();
    let route = |view: &ClusterView, of, draw| {
        decided(&*policy, &prompt(320), &hashes(of), view, draw).expect("usable").route
    };
    let mut view = two_and_two();
    view.nodes.iter_mut().for_each(paced);
    let of_one = route(&view, 1, 0);
    for draw in 0..16 {
        assert_eq!(route(&view, 1, draw << 28), of_one, "the draw does not matter");
    }
    let pairs: std::collections::BTreeSet<_> =
        (0..40).map(|of| format!("{:?}", ids(&route(&view, of, 0)))).collect();
    assert_eq!(pairs.len(), 4, "other beginnings have other nodes");
    let usual = of_one.prefill.clone().expect("a prefill node").id.clone();
    let busy = view.nodes.iter_mut().find(|node| node.info.id == usual).expect("a node");
    busy.load.queue_ms = 15.0;
    assert_eq!(route(&view, 1, 0), of_one, "a queue as long as the prompt is no overload");
    let busy = view.nodes.iter_mut().find(|node| node.info.id == usual).expect("a node");
    busy.load.queue_ms = 400.0;
    assert_ne!(route(&view, 1, 0).prefill, of_one.prefill, "an overload is");
    let short = decided(&*policy, &prompt(9), &[], &view, 0).expect("usable").route;
    assert_ne!(ids(&short).0, Some(usual.as_str()), "a short prompt goes where the load is least");
}

/// A case of the policy `cost`: a name, the queue of the prefill node and the streams of the decode node, what each has
/// cached of 2,000 tokens, and the expected arm.
type CostRow = (&'static str, f32, u32, [u32; 2], Arm);

/// Returns a draw that does not explore.
pub(crate) const NO_EXPLORING: u64 = 1 << 32;

#[test]
fn cost_spares_streams_and_uses_idle_decode_nodes() {
    let cases: &[CostRow] = &[
        ("an idle decode node saves the transfer", 0.0, 0, [0, 0], Arm::Local),
        ("streams are not to wait", 0.0, 3, [0, 0], Arm::Remote),
        ("whatever the queue", 9_000.0, 3, [0, 0], Arm::Remote),
        ("a short remainder hardly delays them", 0.0, 3, [0, 1_998], Arm::Local),
        ("a remainder that saves many times what they lose", 0.0, 1, [0, 1_960], Arm::Local),
        ("a remainder that saves too little for ten streams", 0.0, 10, [0, 1_960], Arm::Remote),
        ("a remainder that makes a step twice as long", 500.0, 1, [0, 1_800], Arm::Remote),
        ("what the prefill node has cached", 0.0, 0, [1_920, 0], Arm::Remote),
    ];
    let policy = by_name("cost").expect("in the table");
    for (what, queue_ms, running, cached, expected) in cases {
        let mut view = view(vec![node("p", Role::Prefill), node("d", Role::Decode)]);
        view.nodes.iter_mut().for_each(paced);
        view.nodes[0].load.queue_ms = *queue_ms;
        view.nodes[1].load.running = *running;
        view.nodes.iter_mut().zip(cached).for_each(|(node, cached)| node.cached_tokens = *cached);
        let mut learned = RouteCosts::default();
        learned.learn_calls(Arm::Remote, 2.0);
        learned.learn_calls(Arm::Local, 1.0);
        view.learned = learned.into();
        let decision = decided(&*policy, &prompt(2000), &[], &view, NO_EXPLORING).expect("usable");
        assert_eq!(decision.arm, *expected, "{what}: {decision:?}");
        assert_eq!((decision.choice, decision.regret_ms), (Choice::Cheapest, 0.0), "{what}");
        assert_eq!(decision.candidates.len(), 2, "{what}");
        assert_eq!(decision.route.prefill.is_some(), *expected == Arm::Remote, "{what}");
    }
}

/// A decode node that bounds its steps with prompts computes some beside its streams, whatever these lose.
#[test]
fn cost_lets_streams_wait_within_a_bound() {
    let policy = by_name("cost").expect("in the table");
    for (what, gap_ms_max, queue_ms, expected) in [
        ("no bound", 0.0, 500.0, Arm::Remote),
        ("a queue that takes longer than chunks between steps", 20.0, 500.0, Arm::Local),
        ("an idle prefill node", 20.0, 0.0, Arm::Remote),
        ("steps are beyond the bound without the prompt", 4.0, 500.0, Arm::Remote),
    ] {
        let mut view = view(vec![node("p", Role::Prefill), node("d", Role::Decode)]);
        view.nodes.iter_mut().for_each(paced);
        (view.nodes[0].load.queue_ms, view.nodes[1].load.running) = (queue_ms, 10);
        let costs = &mut view.nodes[1].load.costs;
        (costs.gap_ms_max, costs.step_tokens) = (gap_ms_max, 10 + 300);
        let decision = decided(&*policy, &prompt(2000), &[], &view, NO_EXPLORING).expect("usable");
        assert_eq!(decision.arm, expected, "{what}: {decision:?}");
    }
}

/// One decode node has long steps; on the other the first step is late, because it computes a prompt.
#[test]
fn cost_takes_the_cheapest_route_that_holds_the_objective_or_the_nearest() {
    let policy = by_name("cost").expect("in the table");
    let longest = |token_gap: u64| Objective {
        first_token: Some(Duration::from_secs(1)),
        token_gap: Some(Duration::from_millis(token_gap)),
    };
    for (what, objective, expected) in [
        ("none: the cheapest", Objective::default(), "d0"),
        ("both hold it: the cheapest", longest(50), "d0"),
        ("only one holds it", longest(7), "d1"),
        ("both miss it: the nearest", longest(1), "d1"),
    ] {
        let mut view = two_and_two();
        view.nodes.iter_mut().for_each(paced);
        view.nodes[2..].iter_mut().for_each(|node| node.load.running = 40);
        view.nodes[2].load.step_ms = 8.0;
        view.nodes[3].load.queued_tokens = 400;
        let prompt = prompt(2000);
        let ask = Ask { objective, ..Ask::new(&prompt, &[]) };
        let decision = policy.route(&ask, &view, NO_EXPLORING).expect("usable");
        assert_eq!(ids(&decision.route).1, expected, "{what}: {decision:?}");
    }
}

#[test]
fn cost_compares_pairs_by_queue_cache_and_step() {
    let policy = by_name("cost").expect("in the table");
    let route = |change: fn(&mut ClusterView)| {
        let mut view = two_and_two();
        view.nodes.iter_mut().for_each(paced);
        view.nodes[2..].iter_mut().for_each(|node| node.load.running = 4);
        change(&mut view);
        let decision = decided(&*policy, &prompt(2000), &[], &view, NO_EXPLORING).expect("usable");
        let (prefill, decode) = ids(&decision.route);
        format!("{} {decode}", prefill.expect("a prefill node"))
    };
    assert_eq!(route(|view| view.nodes[0].load.queue_ms = 80.0), "p1 d0");
    assert_eq!(route(|view| view.nodes[1].cached_tokens = 960), "p1 d0");
    assert_eq!(route(|view| view.nodes[2].load.step_ms = 9.0), "p0 d1");
    assert_eq!(route(|view| view.nodes[3].cached_tokens = 960), "p0 d1", "it has the last answer");
    assert_eq!(route(|view| view.nodes[0].last_turn = 7), "p1 d0", "equal costs: the oldest turn");
}

/// Nodes with both roles have no other arm, so streams there may wait.
#[test]
fn cost_without_prefill_nodes_weighs_streams_against_the_cache() {
    let policy = by_name("cost").expect("in the table");
    for (running, expected) in [(0, "b1"), (1, "b1"), (200, "b0")] {
        let mut view = view(vec![node("b0", Role::Both), node("b1", Role::Both)]);
        view.nodes.iter_mut().for_each(paced);
        (view.nodes[1].cached_tokens, view.nodes[1].load.running) = (1_920, running);
        let decision = decided(&*policy, &prompt(2000), &[], &view, NO_EXPLORING).expect("usable");
        assert_eq!(ids(&decision.route), (None, expected), "{running} streams");
    }
}

#[test]
fn cost_explores_the_other_arm_if_that_costs_little() {
    let policy = by_name("cost").expect("in the table");
    let mut view = view(vec![node("p", Role::Prefill), node("d", Role::Decode)]);
    view.nodes.iter_mut().for_each(paced);
    view.nodes[0].load.queue_ms = 10.0;
    let explored = decided(&*policy, &prompt(2000), &[], &view, 0).expect("usable");
    assert_eq!((explored.arm, explored.choice), (Arm::Remote, Choice::Explored));
    assert!((5.0..15.0).contains(&explored.regret_ms), "{explored:?}");
    view.nodes[0].load.queue_ms = 1_000.0;
    let decision = decided(&*policy, &prompt(2000), &[], &view, 0).expect("usable");
    assert_eq!((decision.arm, decision.choice), (Arm::Local, Choice::Cheapest));
}

/// Both arms have the first token after about 135 ms and the second one after about 145.
#[test]
fn cost_takes_the_earlier_first_token_among_similar_arms() {
    let policy = by_name("cost").expect("in the table");
    for (queue_ms, expected) in [(0.0, Arm::Remote), (13.0, Arm::Remote), (18.0, Arm::Local)] {
        let mut view = view(vec![node("p", Role::Prefill), node("d", Role::Decode)]);
        view.nodes.iter_mut().for_each(paced);
        view.nodes[0].load.queue_ms = queue_ms;
        let decode = &mut view.nodes[1].load;
        (decode.running, decode.step_ms, decode.costs.gap_ms_max) = (4, 8.0, 1e3);
        let decision = decided(&*policy, &prompt(2000), &[], &view, NO_EXPLORING).expect("usable");
        assert_eq!((decision.arm, decision.choice), (expected, Choice::Cheapest), "{queue_ms} ms");
        let terms = |arm| decision.candidates.iter().find(|one| one.arm == arm).expect("compared").terms;
        let (remote, local) = (terms(Arm::Remote), terms(Arm::Local));
        let first_is_remote = remote.first_token_ms() < local.first_token_ms();
        assert_eq!(first_is_remote, expected == Arm::Remote, "{queue_ms} ms");
        assert_eq!(remote.second_token_ms() < local.second_token_ms(), queue_ms == 0.0, "{queue_ms} ms");
    }
}

#[test]
fn cost_lists_a_bounded_number_of_candidates_the_cheapest_first() {
    let policy = by_name("cost").expect("in the table");
    let nodes =
        (0..40).map(|nth| node(&format!("n{nth}"), if nth < 20 { Role::Prefill } else { Role::Decode }));
    let mut view = view(nodes.collect());
    for (nth, node) in view.nodes.iter_mut().enumerate() {
        paced(node);
        (node.load.running, node.load.queue_ms) = (1, (nth % 20) as f32);
    }
    let decision = decided(&*policy, &prompt(2000), &[], &view, NO_EXPLORING).expect("usable");
    assert_eq!(ids(&decision.route).0, Some("n0"));
    let costs: Vec<f64> = decision.candidates.iter().map(|one| one.terms.cost_ms()).collect();
    assert!(costs.len() == 8 && costs.is_sorted(), "{costs:?}");
}

/// The holder of KV is given; only the decode node is chosen.
#[test]
fn every_policy_chooses_a_decode_node_for_held_kv() {
    let (view, prompt) = (two_and_two(), prompt(2000));
    let by = Arc::clone(&view.nodes[0].info);
    for name in NAMES {
        let ask = Ask { arms: AllowedArms::OnlyHeld { by: &by }, ..Ask::new(&prompt, &[]) };
        let decision = by_name(name).expect("in the table").route(&ask, &view, 3).expect("usable");
        assert_eq!((decision.arm, decision.route.prefill), (Arm::Held, None), "{name}");
        let ask = Ask { arms: AllowedArms::OnlyLocal, ..ask };
        let decision = by_name(name).expect("in the table").route(&ask, &view, 3).expect("usable");
        assert_eq!((decision.arm, decision.route.prefill), (Arm::Local, None), "{name}");
    }
}
