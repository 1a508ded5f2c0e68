//! Sends prompts with the same beginning to the same nodes, without knowledge of their caches.
//!
//! The beginning is hashed, and every router computes the same order of nodes from the hash. The first node in this
//! order that is not overloaded is chosen. When a node joins or leaves, only its own share of beginnings moves. A
//! prompt that is too short to have a hash goes to the least loaded nodes.

use types::place::keepers;
use types::{BlockHash, NodeId, PromptWork};

use super::costs::{compute_ms, queue_ms, step_ms};
use super::least_loaded::LeastLoaded;
use super::{Ask, ClusterView, Decision, NoRoute, NodeView, RoutingPolicy, pair};

/// The number of tokens that identify a beginning. Conversations that share more than this share their nodes.
const BEGINNING_TOKENS: usize = 256;

/// A node is overloaded if its cost exceeds the mean by this factor, and by the cost of the prompt itself.
const OVERLOAD: f64 = 1.25;

#[derive(Debug)]
pub(super) struct SessionAffinity;

impl RoutingPolicy for SessionAffinity {
    fn name(&self) -> &'static str {
        "session-affinity"
    }

    fn route(&self, ask: &Ask<'_>, view: &ClusterView, draw: u64) -> Result<Decision, NoRoute> {
        let Some(beginning) = beginning(ask, view) else { return LeastLoaded.route(ask, view, draw) };
        let token_ms = view.token_ms();
        let own_ms = |node: &NodeView| compute_ms(node, PromptWork::of(0..ask.n_tokens()), token_ms);
        let prefill = own(view.prefill_nodes().collect(), beginning, |node| queue_ms(node, token_ms), own_ms);
        let stream_ms = |node: &NodeView| step_ms(node) / 4.0;
        let decode = own(view.decode_nodes(ask.prompt), beginning, step_ms, stream_ms);
        pair(ask, view, prefill, decode)
    }
}

/// Returns the hash of the prompt's beginning; `None` if it fills no block.
fn beginning(ask: &Ask<'_>, view: &ClusterView) -> Option<BlockHash> {
    let block_tokens = usize::from(view.nodes.first()?.info.model.layout.block_tokens);
    let n_blocks = ask.hashes.len().min((BEGINNING_TOKENS / block_tokens).max(1));
    ask.hashes.get(n_blocks.checked_sub(1)?).copied()
}

/// Returns the first node in the order of this beginning that is not overloaded. `slack` is the cost of the
/// prompt itself.
fn own(
    nodes: Vec<&NodeView>,
    beginning: BlockHash,
    cost: impl Fn(&NodeView) -> f64,
    slack: impl Fn(&NodeView) -> f64,
) -> Option<&NodeView> {
    let mean = nodes.iter().map(|node| cost(node)).sum::<f64>() / nodes.len().max(1) as f64;
    let order = keepers(nodes.iter().map(|node| &node.info.id), beginning);
    let find = |id: &NodeId| nodes.iter().find(|node| node.info.id == *id).copied();
    let is_free = |node: &&NodeView| cost(node) <= mean * OVERLOAD + slack(node);
    let mut ranked = order.into_iter().filter_map(find);
    let first = ranked.next()?;
    Some(if is_free(&first) { first } else { ranked.find(is_free).unwrap_or(first) })
}
