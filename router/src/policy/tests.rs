//! Tests of policies. A view and a draw determine the route.

use std::time::Duration;

use types::layout::KvDtype;
use types::*;

use super::*;

fn node(id: &str, role: Role) -> NodeView {
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
    NodeView { info: Arc::new(info), load, assigned: 0, assigned_tokens: 0, last_turn: 0 }
}

fn view(nodes: Vec<NodeView>) -> ClusterView {
    ClusterView { nodes }
}

fn prompt(n_tokens: usize) -> Prompt {
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
        let policy = by_name(name).expect("in the table");
        let view = two_and_two();
        assert_eq!(policy.route(&prompt(9), &view, 77), policy.route(&prompt(9), &view, 77), "{name}");
        let only_prefill = super::tests::view(vec![node("p0", Role::Prefill)]);
        assert_eq!(policy.route(&prompt(9), &only_prefill, 1), Err(NoRoute::NoDecode), "{name}");
    }
}

#[test]
fn without_prefill_nodes_decode_computes_by_itself() {
    for name in NAMES {
        let policy = by_name(name).expect("in the table");
        for view in [view(vec![node("d0", Role::Decode)]), view(vec![node("d0", Role::Both)])] {
            let route = policy.route(&prompt(9), &view, 3).expect("decode is there");
            assert_eq!(ids(&route), (None, "d0"), "{name}");
        }
    }
}

#[test]
fn random_reaches_every_pair() {
    let (policy, view) = (by_name("random").expect("in the table"), two_and_two());
    let draws = (0..64u64).map(|n| n.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let routes: Vec<Route> =
        draws.map(|draw| policy.route(&prompt(9), &view, draw).expect("usable")).collect();
    let pairs: std::collections::BTreeSet<_> = routes.iter().map(ids).collect();
    assert_eq!(pairs.len(), 4);
}

#[test]
fn round_robin_takes_turns() {
    let policy = by_name("round-robin").expect("in the table");
    let mut view = two_and_two();
    let mut seen = Vec::new();
    for turn in 1..=4 {
        let route = policy.route(&prompt(9), &view, 0).expect("usable");
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
    let policy = by_name("least-loaded").expect("in the table");
    let mut view = two_and_two();
    view.nodes[0].load.queue_ms = 80.0;
    view.nodes[0].load.queued_tokens = 800;
    view.nodes[3].load.step_ms = 9.0;
    assert_eq!(ids(&policy.route(&prompt(9), &view, 5).expect("usable")), (Some("p1"), "d0"));
    // Prompts assigned since the report count too, so the other nodes are chosen.
    view.nodes[1].assigned_tokens = 1_000_000;
    view.nodes[2].assigned = 8;
    assert_eq!(ids(&policy.route(&prompt(9), &view, 5).expect("usable")), (Some("p0"), "d1"));
}

#[test]
fn a_burst_of_unlike_prompts_spreads_over_idle_nodes() {
    let policy = by_name("least-loaded").expect("in the table");
    let mut view = two_and_two();
    let mut counts = std::collections::BTreeMap::new();
    for draw in 0..40u64 {
        let route =
            policy.route(&prompt(9), &view, draw.wrapping_mul(0x9e37_79b9_7f4a_7c15)).expect("usable");
        for node in &mut view.nodes {
            if node.info.id == route.decode.id
                || Some(&node.info.id) == route.prefill.as_ref().map(|node| &node.id)
            {
                node.assigned += 1;
                node.assigned_tokens += 9;
                *counts.entry(node.info.id.clone()).or_insert(0) += 1;
            }
        }
    }
    assert!(counts.values().all(|count| *count == 20), "{counts:?}");
}

#[test]
fn a_decode_node_with_a_line_is_left_alone_while_another_has_none() {
    for name in NAMES {
        let policy = by_name(name).expect("in the table");
        let mut view = two_and_two();
        view.nodes[2].load.waiting = 1;
        for draw in (0..16u64).map(|n| n.wrapping_mul(0x9e37_79b9_7f4a_7c15)) {
            assert_eq!(ids(&policy.route(&prompt(40), &view, draw).expect("usable")).1, "d1", "{name}");
        }
        view.nodes[3].load.waiting = 1;
        policy.route(&prompt(40), &view, 1).expect("both have lines, and one must do");
    }
}

#[test]
fn a_full_decode_node_is_left_alone_while_another_has_room() {
    for name in NAMES {
        let policy = by_name(name).expect("in the table");
        let mut view = two_and_two();
        view.nodes[2].load.blocks = BlockCounts { total: 100, leased: 100, ..BlockCounts::default() };
        for draw in 0..16u64 {
            let route = policy.route(&prompt(100), &view, draw << 28).expect("usable");
            assert_eq!(route.decode.id.as_str(), "d1", "{name}");
        }
    }
}
