//! Chooses nodes at random with equal probability. It is the baseline for the other policies.

use super::{Ask, ClusterView, Decision, NoRoute, NodeView, RoutingPolicy, pair};

#[derive(Debug)]
pub(super) struct Random;

impl RoutingPolicy for Random {
    fn name(&self) -> &'static str {
        "random"
    }

    fn route(&self, ask: &Ask<'_>, view: &ClusterView, draw: u64) -> Result<Decision, NoRoute> {
        let prefill: Vec<&NodeView> = view.prefill_nodes().collect();
        let decode = view.decode_nodes(ask.prompt);
        pair(ask, view, pick(&prefill, draw >> 32), pick(&decode, draw & 0xffff_ffff))
    }
}

/// Picks one of `nodes` by 32 random bits.
fn pick<'a>(nodes: &[&'a NodeView], bits: u64) -> Option<&'a NodeView> {
    nodes.get(((bits * nodes.len() as u64) >> 32) as usize).copied()
}
