//! Chooses the prefill node with the shortest queue, and the decode node whose steps are shortest with one
//! more stream.
//!
//! Loads come from the last status reports. Prompts that they do not include yet are added, so that not all prompts of
//! a burst go to the node that was idle at its beginning.

use super::costs::{queue_ms, step_ms};
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

/// Returns the node with the lowest cost. The random draw decides among equal nodes.
fn least<'a>(
    nodes: impl Iterator<Item = &'a NodeView>,
    cost: impl Fn(&NodeView) -> f64,
    draw: u64,
) -> Option<&'a NodeView> {
    let nodes: Vec<(f64, &NodeView)> = nodes.map(|node| (cost(node), node)).collect();
    let lowest = nodes.iter().map(|(cost, _)| *cost).fold(f64::INFINITY, f64::min);
    let cheapest: Vec<&NodeView> =
        nodes.iter().filter(|(cost, _)| *cost <= lowest).map(|(_, node)| *node).collect();
    cheapest.get((draw % cheapest.len().max(1) as u64) as usize).copied()
}
