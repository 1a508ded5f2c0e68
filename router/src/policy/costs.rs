//! Predicted times on one node, in milliseconds. Policies compare them.

use super::{ClusterView, NodeView};

/// The time of a prompt token on a node whose speed is unknown, if no node's speed is known. It is small, and
/// enough to spread prompts over idle nodes.
const UNKNOWN_TOKEN_MS: f64 = 1e-3;

/// Returns the predicted wait of a new prompt until the node begins to compute it.
pub(super) fn queue_ms(node: &NodeView) -> f64 {
    let unknown_ms = node.assigned_tokens as f64 * UNKNOWN_TOKEN_MS;
    f64::from(node.load.queue_ms) + node.load.costs.prompt_ms(node.assigned_tokens).max(unknown_ms)
}

/// Returns the predicted time to compute this number of prompt tokens. `token_ms` is the time of a token on a
/// node whose speed is unknown.
pub(super) fn compute_ms(node: &NodeView, n_tokens: u64, token_ms: f64) -> f64 {
    let costs = &node.load.costs;
    if costs.prompt_token_ms > 0.0 { costs.prompt_ms(n_tokens) } else { n_tokens as f64 * token_ms }
}

/// Returns the predicted step time of a decode node, with all sequences that are assigned to it. Among nodes
/// with equal step times, a node with fewer streams costs less.
pub(super) fn step_ms(node: &NodeView) -> f64 {
    let load = &node.load;
    let coming = load.waiting + load.arriving + node.assigned;
    let ms_per_stream = f64::from(load.step_ms) / f64::from(load.running + 1);
    f64::from(load.step_ms) + f64::from(coming) * ms_per_stream + f64::from(load.running + coming) * 1e-3
}

impl ClusterView {
    /// Returns the time of a prompt token on the fastest node whose speed is known. A node that has computed no
    /// prompt counts as fast as this, so that it gets some.
    pub(super) fn token_ms(&self) -> f64 {
        let known = self.nodes.iter().map(|node| f64::from(node.load.costs.prompt_token_ms));
        known.filter(|ms| *ms > 0.0).reduce(f64::min).unwrap_or(UNKNOWN_TOKEN_MS)
    }
}
