//! Chooses the prefill node with the shortest queue, and the decode node whose steps are shortest with one
//! more stream.
//!
//! Loads come from the last status reports. Prompts assigned since then are added, so that not all prompts of
//! a burst go to the node that was idle at its beginning.

use types::Prompt;

use super::{ClusterView, NoRoute, NodeView, Route, RoutingPolicy, pair};

#[derive(Debug)]
pub(super) struct LeastLoaded;

impl RoutingPolicy for LeastLoaded {
    fn name(&self) -> &'static str {
        "least-loaded"
    }

    fn route(&self, prompt: &Prompt, view: &ClusterView, draw: u64) -> Result<Route, NoRoute> {
        let prefill = least(view.prefill_nodes(), queue_cost, draw);
        let decode = least(view.decode_nodes(prompt).into_iter(), step_cost, draw.rotate_left(32));
        pair(prefill, decode)
    }
}

/// Returns the predicted wait at a prefill node. While its speed is unknown, a token counts as a microsecond,
/// which is enough to spread prompts over idle nodes.
fn queue_cost(node: &NodeView) -> f64 {
    let load = &node.load;
    let ms_per_token =
        if load.queued_tokens > 0 { f64::from(load.queue_ms) / load.queued_tokens as f64 } else { 1e-3 };
    f64::from(load.queue_ms) + node.assigned_tokens as f64 * ms_per_token.max(1e-3)
}

/// Returns the predicted step time of a decode node, with all sequences that are assigned to it. Among nodes
/// with equal step times, a node with fewer streams costs less.
fn step_cost(node: &NodeView) -> f64 {
    let load = &node.load;
    let coming = load.waiting + load.arriving + node.assigned;
    let ms_per_stream = f64::from(load.step_ms) / f64::from(load.running + 1);
    f64::from(load.step_ms) + f64::from(coming) * ms_per_stream + f64::from(load.running + coming) * 1e-3
}

/// Returns the node with the lowest cost. The random draw decides among equal nodes.
fn least<'a>(
    nodes: impl Iterator<Item = &'a NodeView>,
    cost: fn(&NodeView) -> f64,
    draw: u64,
) -> Option<&'a NodeView> {
    let nodes: Vec<(f64, &NodeView)> = nodes.map(|node| (cost(node), node)).collect();
    let lowest = nodes.iter().map(|(cost, _)| *cost).fold(f64::INFINITY, f64::min);
    let cheapest: Vec<&NodeView> =
        nodes.iter().filter(|(cost, _)| *cost <= lowest).map(|(_, node)| *node).collect();
    cheapest.get((draw % cheapest.len().max(1) as u64) as usize).copied()
}
