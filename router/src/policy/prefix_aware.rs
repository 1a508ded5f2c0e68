//! Chooses nodes that have the beginning of the prompt in their caches, unless other nodes are faster without
//! it.
//!
//! The cost of a prefill node is its queue and the computation of the tokens that it lacks. The cost of a decode node
//! is its next steps, and the KV that has to be moved to it, or computed on it. Among nodes with similar costs, the
//! policy chooses the node with the longest cached prefix. Among nodes with equal prefixes it chooses the one whose
//! last assignment is the oldest, so that new prompts spread evenly.

use std::cmp::Reverse;

use super::costs::{compute_ms, queue_ms, similar, step_ms};
use super::{Ask, ClusterView, Decision, NoRoute, NodeView, RoutingPolicy, pair};

/// The time to move a token's KV to a decode node, as a share of the time to compute it.
const MOVE_SHARE: f64 = 0.1;

/// The number of steps of a decode node that are weighed against the cost of moving KV to it: an answer has
/// many steps.
const STEPS: f64 = 8.0;

#[derive(Debug)]
pub(super) struct PrefixAware;

impl RoutingPolicy for PrefixAware {
    fn name(&self) -> &'static str {
        "prefix-aware"
    }

    fn route(&self, ask: &Ask<'_>, view: &ClusterView, draw: u64) -> Result<Decision, NoRoute> {
        let token_ms = view.token_ms();
        let computing =
            |node: &NodeView| queue_ms(node, token_ms) + compute_ms(node, ask.missing(node), token_ms);
        let prefill = nearest(view.prefill_nodes(), computing, draw);
        let decoding = |node: &NodeView| {
            let is_moved = prefill.is_some() && !node.info.role.prefills();
            let moving = ask.missing(node).n_tokens as f64 * token_ms * MOVE_SHARE;
            STEPS * step_ms(node) + if is_moved { moving } else { computing(node) }
        };
        let decode = nearest(view.decode_nodes(ask.prompt).into_iter(), decoding, draw.rotate_left(32));
        pair(ask, view, prefill, decode)
    }
}

/// Returns a node with a cost similar to the lowest. The random draw decides among nodes that had no prompt yet.
fn nearest<'a>(
    nodes: impl Iterator<Item = &'a NodeView>,
    cost: impl Fn(&NodeView) -> f64,
    draw: u64,
) -> Option<&'a NodeView> {
    let rank = |node: &NodeView| (Reverse(node.cached_tokens), node.last_turn);
    let mut best: Vec<&NodeView> = Vec::new();
    for node in similar(nodes, cost) {
        match best.first().map(|first| rank(node).cmp(&rank(first))) {
            Some(std::cmp::Ordering::Greater) => {}
            Some(std::cmp::Ordering::Equal) => best.push(node),
            Some(std::cmp::Ordering::Less) | None => best = vec![node],
        }
    }
    best.get((draw % best.len().max(1) as u64) as usize).copied()
}
