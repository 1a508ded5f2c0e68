//! Room for one prompt of 160 tokens (11 blocks of 16 with its first token), beside nodes of 100 blocks.

use std::sync::Arc;

use types::{BlockCounts, LearnedCosts, PromptWork, Role};

use super::*;
use crate::policy::tests::{node, prompt};

const N_TOKENS: usize = 160;

fn decode(id: &str, change: impl FnOnce(&mut NodeView)) -> NodeView {
    changed(node(id, Role::Decode), change)
}

fn prefill(id: &str, change: impl FnOnce(&mut NodeView)) -> NodeView {
    changed(node(id, Role::Prefill), change)
}

fn changed(mut node: NodeView, change: impl FnOnce(&mut NodeView)) -> NodeView {
    change(&mut node);
    node
}

fn free(n_free: u32) -> impl FnOnce(&mut NodeView) {
    move |node| node.load.blocks = BlockCounts { total: 100, free: n_free, ..BlockCounts::default() }
}

/// Returns the nodes that have room, as `prefill decode`; `none` if the prompt must wait.
fn room(nodes: Vec<NodeView>, admitted: &UnassignedAdmissions, order: Order) -> String {
    let (prompt, view) = (prompt(N_TOKENS), ClusterView { nodes, learned: Arc::default() });
    let ask = Ask::new(&prompt, &[]);
    let question = RoomQuestion { ask, view: &view, admitted, order, computing: ComputingNodes::Prefill };
    named(question.room())
}

fn named(room: Option<UnassignedAdmission>) -> String {
    let name = |node: Option<NodeId>| node.map_or("-".to_owned(), |node| node.to_string());
    room.map_or("none".to_owned(), |room| format!("{} {}", name(room.prefill), name(room.decode)))
}

fn idle(_: &mut NodeView) {}

#[test]
fn room_is_kv_room() {
    let first = Order::DecodeFirst;
    for (what, nodes, order, expected) in [
        ("no decode node: dispatch knows the reason", vec![prefill("p", idle)], first, "- -"),
        ("idle nodes", vec![prefill("p", idle), decode("d", idle)], first, "p d"),
        (
            "the decode node with more room",
            vec![decode("d0", free(20)), decode("d1", free(30))],
            first,
            "- d1",
        ),
        ("exactly enough", vec![decode("d", free(11))], first, "- d"),
        ("one block too few", vec![decode("d", free(10))], first, "none"),
        (
            "cached blocks are not needed again",
            vec![decode("d", |node| {
                free(10)(node);
                node.cached_tokens = 16
            })],
            first,
            "- d",
        ),
        ("others wait there", vec![decode("d", |node| node.load.waiting = 1)], first, "none"),
        (
            "assigned work takes room",
            vec![decode("d", |node| {
                free(21)(node);
                (node.assigned, node.assigned_work) = (1, PromptWork::of(0..160))
            })],
            first,
            "none",
        ),
        (
            "a node that is too small refuses it",
            vec![decode("d", |node| {
                node.load.blocks = BlockCounts { total: 10, free: 10, ..BlockCounts::default() }
            })],
            first,
            "- d",
        ),
        ("the prefill node is full", vec![prefill("p", free(3)), decode("d", idle)], first, "none"),
    ] {
        assert_eq!(room(nodes, &UnassignedAdmissions::default(), order), expected, "{what}");
    }
}

#[test]
fn room_is_a_short_queue() {
    let slow_queue = |node: &mut NodeView| {
        node.load.costs = LearnedCosts { prompt_token_ms: 0.1, ..LearnedCosts::default() };
        (node.load.queue_ms, node.load.queued_tokens) = (501.0, 5_010);
    };
    let first = Order::DecodeFirst;
    for (what, nodes, order, expected) in [
        (
            "the prefill node's queue is long",
            vec![prefill("p", slow_queue), decode("d", idle)],
            first,
            "none",
        ),
        (
            "another one's is not",
            vec![prefill("p0", slow_queue), prefill("p1", idle), decode("d", idle)],
            first,
            "p1 d",
        ),
        (
            "a queue of unknown speed",
            vec![prefill("p", |node| node.load.queued_tokens = (1 << 16) + 1), decode("d", idle)],
            first,
            "none",
        ),
        (
            "a node of both roles needs no other",
            vec![prefill("p", slow_queue), node("b", Role::Both)],
            first,
            "- b",
        ),
        (
            "prefill first: decode is chosen later",
            vec![prefill("p", idle), decode("d", free(0))],
            Order::PrefillFirst,
            "p -",
        ),
        (
            "and the queue counts",
            vec![prefill("p", slow_queue), decode("d", idle)],
            Order::PrefillFirst,
            "none",
        ),
    ] {
        assert_eq!(room(nodes, &UnassignedAdmissions::default(), order), expected, "{what}");
    }
}

/// With a policy that lets decode nodes compute prompts, a prompt does not wait for a prefill node if a decode node has time.
#[test]
fn a_decode_node_that_may_compute_is_room() {
    use ComputingNodes::{Prefill, PrefillAndDecode};
    let queued = |node: &mut NodeView, queue_ms: f32| {
        node.load.costs.prompt_token_ms = 0.1;
        (node.load.queue_ms, node.load.queued_tokens) = (queue_ms, 10 * queue_ms as u64);
    };
    for (what, running, gap_ms_max, queues_ms, computing, expected) in [
        ("streams would wait", 4, 0.0, [501.0, 0.0], PrefillAndDecode, "none"),
        ("no streams", 0, 0.0, [501.0, 0.0], PrefillAndDecode, "- d"),
        ("bounded gaps", 4, 25.0, [501.0, 0.0], PrefillAndDecode, "- d"),
        ("its queue is long too", 4, 25.0, [501.0, 501.0], PrefillAndDecode, "none"),
        ("another policy", 4, 25.0, [501.0, 0.0], Prefill, "none"),
        ("the prefill node has time", 4, 25.0, [0.0, 0.0], PrefillAndDecode, "p d"),
    ] {
        let decode = decode("d", |node| {
            (node.load.running, node.load.costs.gap_ms_max) = (running, gap_ms_max);
            queued(node, queues_ms[1]);
        });
        let nodes = vec![prefill("p", |node| queued(node, queues_ms[0])), decode];
        let (prompt, view) = (prompt(N_TOKENS), ClusterView { nodes, learned: Arc::default() });
        let (ask, admitted) = (Ask::new(&prompt, &[]), &UnassignedAdmissions::default());
        let question = RoomQuestion { ask, view: &view, admitted, order: Order::DecodeFirst, computing };
        assert_eq!(named(question.room()), expected, "{what}");
    }
}

#[test]
fn one_room_is_given_once() {
    let mut admitted = UnassignedAdmissions::default();
    let of_decode =
        |admitted: &UnassignedAdmissions| room(vec![decode("d", free(20))], admitted, Order::DecodeFirst);
    assert_eq!(of_decode(&admitted), "- d");
    let id = TicketId::first();
    admitted.insert(
        id,
        UnassignedAdmission { prefill: None, decode: Some(NodeId::new("d")), n_tokens: N_TOKENS as u64 },
    );
    assert_eq!(of_decode(&admitted), "none");
    admitted.remove(id);
    assert_eq!(of_decode(&admitted), "- d");
}

#[test]
fn times_are_predicted_from_learned_costs() {
    let costs = LearnedCosts { prompt_token_ms: 0.5, ..LearnedCosts::default() };
    let busy = prefill("p", |node| (node.load.costs, node.load.queue_ms) = (costs, 40.0));
    let prompt = prompt(N_TOKENS);
    let ask = Ask::new(&prompt, &[]);
    let view = ClusterView {
        nodes: vec![busy, decode("d", |node| node.load.step_ms = 12.0)],
        learned: Arc::default(),
    };
    let question = RoomQuestion {
        ask,
        view: &view,
        admitted: &UnassignedAdmissions::default(),
        order: Order::DecodeFirst,
        computing: ComputingNodes::Prefill,
    };
    let PredictedService { first_token, token_gap } = question.predicted();
    assert_eq!((first_token.as_millis(), token_gap.as_millis()), (120, 12));
}
