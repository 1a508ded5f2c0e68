//! Chooses the prefill node with the shortest queue, and the decode node whose steps are shortest with one
//! more stream.
//!
//! Loads come from the last status reports. Prompts that they do not include yet are added, so that not all prompts of
//! a burst go to the node that was idle at its beginning. Idle nodes with similar predictions count as equal: equal
//! GPUs learn slightly different times, and at low load one of them would get all prompts.

use super::costs::{queue_ms, similar, step_ms};
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
        let decode = least(view.decode_nodes(ask.prompt).into_iter(), step_ms, draw.rotate_left(32));
        pair(ask, view, prefill, decode)
    }
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
