//! Chooses the prefill node with the shortest queue, and the decode node whose steps are shortest with one
//! more stream.
//!
//! Loads come from the last status reports. Prompts that they do not include yet are added, so that not all prompts of
//! a burst go to the node that was idle at its beginning. Idle nodes with similar predictions count as equal: equal
//! GPUs learn slightly different times, and at low load one of them would get all prompts.

use super::costs::{EXPLORE_ONE_IN, queue_ms, similar, step_ms};
use super::{Ask, ClusterView, Decision, NoRoute, NodeView, RoutingPolicy, pair};

#[derive(Debug)]
pub(super) struct LeastLoaded;

impl RoutingPolicy for LeastLoaded {
    fn name(&self) -> &'static str {
        "least-loaded"
    }

    fn route(&self, ask: &Ask<'_>, view: &ClusterView, draw: u64) -> Result<Decision, NoRoute> {
        let token_ms = view.token_ms();
        let prefill = least(view.prefill_nodes(), |node| queue_ms(node, token_ms), draw);
        let decode = view.decode_nodes(ask.prompt);
        let neglected = (draw >> 48).is_multiple_of(EXPLORE_ONE_IN).then(|| longest_idle(&decode)).flatten();
        let decode = neglected.or_else(|| least(decode.into_iter(), step_ms, draw.rotate_left(32)));
        pair(ask, view, prefill, decode)
    }
}

/// Returns the idle node whose last assignment is the oldest. What a node has learned of its speed stays until it gets
/// work: after one slow moment it would get none at low load.
fn longest_idle<'a>(nodes: &[&'a NodeView]) -> Option<&'a NodeView> {
    let idle = nodes.iter().filter(|node| node.n_sequences() == 0);
    idle.min_by_key(|node| node.last_turn).copied()
}

/// Returns the node with the lowest cost. The random draw decides among equal nodes. Idle nodes with similar costs are
/// equal.
fn least<'a>(
    nodes: impl Iterator<Item = &'a NodeView>,
    cost: impl Fn(&NodeView) -> f64,
    draw: u64,
) -> Option<&'a NodeView> {
    let similar = similar(nodes, &cost);
    let lowest = similar.iter().copied().min_by(|a, b| cost(a).total_cmp(&cost(b)))?;
    let is_equal =
        |node: &&NodeView| cost(node) <= cost(lowest) || node.n_sequences() + lowest.n_sequences() == 0;
    let equal: Vec<&NodeView> = similar.into_iter().filter(is_equal).collect();
    equal.get((draw % equal.len() as u64) as usize).copied()
}
