//! Chooses the node whose last assignment is the oldest.

use super::{Ask, ClusterView, Decision, NoRoute, NodeView, RoutingPolicy, pair};

#[derive(Debug)]
pub(super) struct RoundRobin;

impl RoutingPolicy for RoundRobin {
    fn name(&self) -> &'static str {
        "round-robin"
    }

    fn route(&self, ask: &Ask<'_>, view: &ClusterView, _draw: u64) -> Result<Decision, NoRoute> {
        let turn = |node: &&NodeView| (node.last_turn, node.info.id.clone());
        pair(
            ask,
            view,
            view.prefill_nodes().min_by_key(turn),
            view.decode_nodes(ask.prompt).into_iter().min_by_key(turn),
        )
    }
}
