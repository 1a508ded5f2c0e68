//! Hot path. The state of nodes that routing reads, without the members' lock.
//!
//! [`Routable`] is a list of the usable nodes, replaced as a whole when it changes. The parts of a node that change all
//! the time, such as its load, have a lock of their own.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use types::{BlockHash, FingerprintDigest, NodeId, NodeInfo, NodeLoad, PromptWork, RequestedModel};

use super::assigned::{AssignedWork, NodeAssignment};
use super::index::{IndexedNode, PrefixMatches};
use crate::policy::NodeView;

/// The largest age of a load report that counts, in milliseconds. An older report includes what one of this age would.
const AGE_MS_MAX: f32 = 60_000.0;

/// The longest time until a prompt that is sent to a decode node reaches its worker. A report that was made later
/// includes the prompt. A prefill node has no such margin: it makes no report during a step, so the prompts in the step
/// would count twice until its end.
const ARRIVES_WITHIN: Duration = Duration::from_millis(50);

/// A node as routing sees it.
#[derive(Debug)]
pub(super) struct RoutableNode {
    pub(super) info: Arc<NodeInfo>,
    pub(super) assigned: Arc<AssignedWork>,
    pub(super) blocks: Arc<IndexedNode>,
    load: Mutex<NodeLoad>,
    /// The time of the last report; `None` before the first.
    reported: Mutex<Option<Instant>>,
    /// The router's route counter at the node's last assignment; zero if it had none.
    last_turn: AtomicU64,
}

/// The usable nodes by model. A model whose nodes are all unusable may be absent.
#[derive(Debug, Default)]
pub(super) struct Routable {
    pub(super) by_model: BTreeMap<String, RoutableModel>,
}

#[derive(Debug, Default)]
pub(super) struct RoutableModel {
    /// The fingerprint of the serving group.
    pub(super) in_force: Option<FingerprintDigest>,
    /// The usable nodes of all groups, in order of their ids.
    pub(super) nodes: Vec<(FingerprintDigest, Arc<RoutableNode>)>,
}

impl RoutableNode {
    pub(super) fn new(info: Arc<NodeInfo>, blocks: IndexedNode) -> Self {
        Self {
            info,
            assigned: Arc::default(),
            blocks: Arc::new(blocks),
            load: Mutex::default(),
            reported: Mutex::default(),
            last_turn: AtomicU64::new(0),
        }
    }

    pub(super) fn load(&self) -> NodeLoad {
        *self.load.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn reported(&self) -> Option<Instant> {
        *self.reported.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces the load by a report that came at `now`.
    pub(super) fn report(&self, load: NodeLoad, now: Instant) {
        let age = Duration::from_secs_f32(load.age_ms.min(AGE_MS_MAX) / 1e3);
        let arrives_within = if self.info.role.decodes() { ARRIVES_WITHIN } else { Duration::ZERO };
        let made = now.checked_sub(age).unwrap_or(now);
        self.assigned.reported(made, made.checked_sub(arrives_within).unwrap_or(now));
        *self.load.lock().unwrap_or_else(PoisonError::into_inner) = load;
        *self.reported.lock().unwrap_or_else(PoisonError::into_inner) = Some(now);
    }

    /// Counts a prompt against the node: the work that the node is to do, and the blocks that it will have.
    pub(super) fn assign(
        &self,
        hashes: &[BlockHash],
        work: PromptWork,
        turn: u64,
        now: Instant,
    ) -> NodeAssignment {
        self.last_turn.store(turn, Ordering::Relaxed);
        // Blocks after the narrowest attention window are not cached for other prompts.
        let n_kept = self.info.model.layout.blocks_seen_by_all().unwrap_or(usize::MAX);
        self.blocks.expect(&hashes[..hashes.len().min(n_kept)], now);
        self.assigned.assign(work)
    }

    /// Returns the node as policies see it at `now`. The time since its last report is subtracted from the
    /// wait that it has reported.
    pub(super) fn view(&self, matches: &PrefixMatches, now: Instant) -> NodeView {
        let unreported = self.assigned.unreported();
        let n_cached = self.blocks.n_matched(matches) * u32::from(self.info.model.layout.block_tokens);
        let mut load = self.load();
        let since = self.reported().map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        load.queue_ms = (load.queue_ms - load.age_ms - since.as_secs_f32() * 1e3).max(0.0);
        if unreported.n_ended > 0 {
            load.running = load.running.saturating_sub(unreported.n_ended);
            let ended_ms = unreported.n_ended as f32 * load.costs.row_ms;
            load.step_ms = (load.step_ms - ended_ms).max(load.costs.step_ms);
        }
        NodeView {
            info: Arc::clone(&self.info),
            load,
            assigned: unreported.n_prompts,
            assigned_work: unreported.work,
            last_turn: self.last_turn.load(Ordering::Relaxed),
            cached_tokens: n_cached,
        }
    }
}

impl Routable {
    /// Returns the usable nodes for a prompt of this model, except `without`. They have the weights that the
    /// prompt names, or else those of the model's serving group.
    pub(super) fn view(
        &self,
        model: &RequestedModel,
        matches: &PrefixMatches,
        without: &[NodeId],
        now: Instant,
    ) -> Vec<NodeView> {
        let nodes = self.nodes(model).filter(|node| !without.contains(&node.info.id));
        nodes.map(|node| node.view(matches, now)).collect()
    }

    /// Returns the usable nodes for a prompt of this model.
    pub(super) fn nodes(&self, model: &RequestedModel) -> impl Iterator<Item = &Arc<RoutableNode>> {
        let of_model = self.by_model.get(&*model.name);
        let wanted = model.fingerprint.or_else(|| of_model?.in_force);
        let nodes = of_model.map_or(&[][..], |of_model| &of_model.nodes);
        nodes.iter().filter(move |(weights, _)| Some(*weights) == wanted).map(|(_, node)| node)
    }
}

#[cfg(test)]
mod tests {
    use types::Role;
    use types::layout::Attention;

    use super::*;
    use crate::cluster::index::PrefixIndex;
    use crate::fake_node::FakeNode;

    #[test]
    fn blocks_past_the_narrowest_window_are_not_expected() {
        let hashes: Vec<BlockHash> = (1..6).map(BlockHash).collect();
        for (attention, expected) in [(Attention::Full, 5), (Attention::SlidingWindow { tokens: 40 }, 2)] {
            let mut info = FakeNode::new("d", Role::Decode, &[]).info;
            info.model.layout.groups[0].attention = attention;
            let (index, now) = (PrefixIndex::default(), Instant::now());
            let node = RoutableNode::new(Arc::new(info), index.node());
            let assigned = node.assign(&hashes, PromptWork::default(), 1, now);
            assert_eq!(node.blocks.n_matched(&index.matches(&hashes, now)), expected, "{attention:?}");
            drop(assigned);
        }
    }
}
