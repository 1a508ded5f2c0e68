//! Whether nodes have room for a prompt: KV room, and a short queue of prompts to compute.
//!
//! The decision uses nodes' reports and their assigned work. Admitted prompts that have no node yet count too, as
//! [`UnassignedAdmission`], so that the same room is not given twice.

use std::collections::BTreeMap;
use std::time::Duration;

use types::{NodeId, PromptWork};

use super::line::{PredictedService, TicketId};
use crate::policy::costs::{compute_ms, queue_ms, step_ms};
use crate::policy::{Ask, ClusterView, ComputingNodes, NodeView, Order};

/// The longest predicted queue of a prefill node that gets one more prompt. It is long enough to keep the node busy
/// between two of its reports. An idle node gets any prompt.
const QUEUE_MS_MAX: f64 = 500.0;

/// The longest queue, in tokens, of a node whose speed is unknown.
const UNKNOWN_QUEUE_TOKENS_MAX: u64 = 1 << 16;

/// The rooms of admitted tickets for which no node is assigned yet.
#[derive(Debug, Default)]
pub(super) struct UnassignedAdmissions(BTreeMap<TicketId, UnassignedAdmission>);

/// The nodes that had room for an admitted prompt. Its route may use others.
#[derive(Clone, Debug, Default)]
pub(super) struct UnassignedAdmission {
    prefill: Option<NodeId>,
    decode: Option<NodeId>,
    n_tokens: u64,
}

impl UnassignedAdmissions {
    pub(super) fn insert(&mut self, id: TicketId, room: UnassignedAdmission) {
        self.0.insert(id, room);
    }

    pub(super) fn remove(&mut self, id: TicketId) {
        self.0.remove(&id);
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns the number of admitted tokens on a node.
    fn n_tokens(&self, node: &NodeId) -> u64 {
        let is_on = |room: &&UnassignedAdmission| {
            room.prefill.as_ref() == Some(node) || room.decode.as_ref() == Some(node)
        };
        self.0.values().filter(is_on).map(|room| room.n_tokens).sum()
    }
}

/// The nodes of one model, for one prompt.
#[derive(Clone, Copy, Debug)]
pub(super) struct RoomQuestion<'a> {
    pub(super) ask: Ask<'a>,
    pub(super) view: &'a ClusterView,
    pub(super) admitted: &'a UnassignedAdmissions,
    pub(super) order: Order,
    pub(super) computing: ComputingNodes,
}

impl RoomQuestion<'_> {
    /// Returns the room for the prompt; `None` if it must wait. Without decode nodes no wait helps: dispatch refuses the
    /// prompt, or waits for a node.
    pub(super) fn room(&self) -> Option<UnassignedAdmission> {
        let n_tokens = self.ask.n_tokens();
        let room = |prefill: Option<&NodeView>, decode: Option<&NodeView>| {
            let id = |node: &NodeView| node.info.id.clone();
            Some(UnassignedAdmission { prefill: prefill.map(id), decode: decode.map(id), n_tokens })
        };
        let token_ms = self.view.token_ms();
        let mut decode = self.view.all_decode_nodes().peekable();
        let prefill = self
            .view
            .prefill_nodes()
            .filter(|node| self.has_queue_room(node, token_ms) && self.has_kv_room(node));
        let queue_ms = |node: &NodeView| queue_ms(node, token_ms);
        let prefill = prefill.min_by(|one, other| queue_ms(one).total_cmp(&queue_ms(other)));
        if decode.peek().is_none() {
            return room(None, None);
        }
        if self.order == Order::PrefillFirst && self.has_prefill_nodes() {
            // The decode node is chosen when the KV is computed.
            return prefill.and_then(|prefill| room(Some(prefill), None));
        }
        let with_room = decode.filter(|node| self.has_kv_room(node));
        let is_received = |node: &NodeView| prefill.is_some() && !node.info.role.prefills();
        let usable = with_room
            .filter(|node| is_received(node) || (self.computes(node) && self.has_queue_room(node, token_ms)));
        let decode = usable.max_by_key(|node| self.n_free_blocks(node))?;
        room(prefill.filter(|_| is_received(decode)), Some(decode))
    }

    /// Predicts the times of the prompt after its admission, on the nodes that serve it soonest. A queue counts as at
    /// most [`QUEUE_MS_MAX`], because admission keeps it below.
    pub(super) fn predicted(&self) -> PredictedService {
        let token_ms = self.view.token_ms();
        let first_ms = |node: &NodeView| {
            queue_ms(node, token_ms).min(QUEUE_MS_MAX) + compute_ms(node, self.ask.missing(node), token_ms)
        };
        let least = |times: &mut dyn Iterator<Item = f64>| times.reduce(f64::min).unwrap_or_default();
        let gap_ms = least(&mut self.view.all_decode_nodes().map(step_ms));
        let first_ms = least(&mut self.view.nodes.iter().filter(|node| self.computes(node)).map(first_ms));
        PredictedService { first_token: duration(first_ms), token_gap: duration(gap_ms) }
    }

    /// Returns the largest number of the prompt's tokens that a node has cached.
    pub(super) fn cached_tokens(&self) -> u32 {
        self.view.nodes.iter().map(|node| node.cached_tokens).max().unwrap_or_default()
    }

    /// Returns whether the node computes prompts: without a prefill node every node does, and with some policies a node
    /// without streams, or one that bounds their gaps.
    fn computes(&self, node: &NodeView) -> bool {
        let costs_little = node.load.running == 0 || node.load.costs.gap_ms_max > 0.0;
        node.info.role.prefills()
            || !self.has_prefill_nodes()
            || (self.computing == ComputingNodes::PrefillAndDecode && costs_little)
    }

    fn has_prefill_nodes(&self) -> bool {
        self.view.prefill_nodes().next().is_some()
    }

    /// Returns whether the node has KV room. A node that is too small even when it is empty counts, because it refuses
    /// the prompt with the right reason; so does a node that reports no blocks.
    fn has_kv_room(&self, node: &NodeView) -> bool {
        let n_cached = node.cached_tokens / u32::from(node.info.model.layout.block_tokens);
        let n_blocks = node.info.model.layout.blocks_of_all_groups(self.ask.prompt.tokens.len() + 1) as u64;
        let n_needed = n_blocks.saturating_sub(u64::from(n_cached));
        n_blocks > u64::from(node.load.blocks.total)
            || (node.load.waiting == 0 && self.n_free_blocks(node) >= n_needed)
    }

    fn n_free_blocks(&self, node: &NodeView) -> u64 {
        let layout = &node.info.model.layout;
        let n_tokens = node.assigned_work.n_tokens + self.admitted.n_tokens(&node.info.id);
        let coming = layout.blocks_of_all_groups(n_tokens as usize) + node.assigned as usize;
        u64::from(node.load.blocks.available()).saturating_sub(coming as u64)
    }

    fn has_queue_room(&self, node: &NodeView, token_ms: f64) -> bool {
        let admitted = self.admitted.n_tokens(&node.info.id);
        let coming = node.assigned_work.n_tokens + admitted;
        let costs = &node.load.costs;
        if node.load.queued_tokens + coming == 0 {
            return true;
        }
        match costs.prompt_token_ms > 0.0 {
            true => queue_ms(node, token_ms) + costs.prompt_ms(PromptWork::of(0..admitted)) <= QUEUE_MS_MAX,
            false => node.load.queued_tokens + coming <= UNKNOWN_QUEUE_TOKENS_MAX,
        }
    }
}

fn duration(ms: f64) -> Duration {
    Duration::try_from_secs_f64(ms / 1e3).unwrap_or_default()
}

#[cfg(test)]
mod tests;
