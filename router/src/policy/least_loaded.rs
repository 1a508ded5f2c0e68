//! The prefill node whose queue is shortest, and the decode node whose steps would be shortest with one stream more.
//!
//! Loads are as old as the last status report; what was assigned since is added, so that a burst does not all go to
//! the node that happened to be idle when it began.

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

/// Predicted wait in front of a prefill node. While it has not told its speed, a token counts as a microsecond:
/// enough to spread prompts over idle nodes.
fn queue_cost(node: &NodeView) -> f64 {
    let load = &node.load;
    let ms_per_token =
        if load.queued_tokens > 0 { f64::from(load.queue_ms) / load.queued_tokens as f64 } else { 1e-3 };
    f64::from(load.queue_ms) + node.assigned_tokens as f64 * ms_per_token.max(1e-3)
}

/// Predicted step time of a decode node once everything that is on its way there runs too.
/// Among nodes whose steps take the same time, the one with fewer streams.
fn step_cost(node: &NodeView) -> f64 {
    let load = &node.load;
    let coming = load.waiting + load.arriving + node.assigned;
    let ms_per_stream = f64::from(load.step_ms) / f64::from(load.running + 1);
    f64::from(load.step_ms) + f64::from(coming) * ms_per_stream + f64::from(load.running + coming) * 1e-3
}

/// The cheapest node; of equals, one by the draw.
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
