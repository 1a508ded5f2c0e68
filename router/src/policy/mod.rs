//! The choice of nodes for a prompt.
//!
//! A route is advice: the nodes' own reservations decide, and a node that refuses is left out of the next route.
//! A new policy is one file and one line in [`by_name`].

mod cost;
pub(crate) mod costs;
mod decision;
mod learned;
mod least_loaded;
mod prefix_aware;
mod random;
mod round_robin;
mod session_affinity;

use std::fmt::Debug;
use std::sync::Arc;

use types::{BlockHash, NodeInfo, NodeLoad, Prompt, PromptWork};

use crate::admission::Objective;
use costs::Pricing;
pub use decision::{AllowedArms, Arm, Candidate, Choice, Decision, Route, Terms};
pub use learned::{CallTime, ConnectorCosts, RouteCosts, SeenTransfer};

/// A policy that chooses routes. The same prompt, view and draw must give the same route, so that a seed
/// repeats a run.
///
/// The router calls the policy once per attempt, with a view without the nodes that have failed this prompt.
pub trait RoutingPolicy: Debug + Send + Sync + 'static {
    fn name(&self) -> &'static str;
    fn route(&self, ask: &Ask<'_>, view: &ClusterView, draw: u64) -> Result<Decision, NoRoute>;

    /// Returns which nodes may compute prompts if there are prefill nodes.
    fn computing(&self) -> ComputingNodes {
        ComputingNodes::Prefill
    }
}

/// The nodes that may compute prompts if there are prefill nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ComputingNodes {
    Prefill,
    /// Also decode nodes whose streams do not wait long for it.
    PrefillAndDecode,
}

/// A prompt that needs a route.
#[derive(Clone, Copy, Debug)]
pub struct Ask<'a> {
    pub prompt: &'a Prompt,
    /// The hashes of the prompt's full blocks before its last token.
    pub hashes: &'a [BlockHash],
    pub arms: AllowedArms<'a>,
    /// The latency that the request must have, with the time that is left for its first token.
    pub objective: Objective,
}

impl<'a> Ask<'a> {
    /// Any arm, and no objective.
    pub fn new(prompt: &'a Prompt, hashes: &'a [BlockHash]) -> Self {
        Self { prompt, hashes, arms: AllowedArms::RemoteOrLocal, objective: Objective::default() }
    }

    pub fn n_tokens(&self) -> u64 {
        self.prompt.tokens.len() as u64
    }

    /// Returns the part of the prompt that a node has to compute.
    pub(crate) fn missing(&self, node: &NodeView) -> PromptWork {
        PromptWork::of(u64::from(node.cached_tokens)..self.n_tokens())
    }
}

/// Which node gets a prompt first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// The decode node reserves room before the prompt is computed: for connectors from node to node.
    DecodeFirst,
    /// The prompt is computed first, and a decode node is chosen when its KV is ready.
    PrefillFirst,
}

/// The reason for the absence of a route.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoRoute {
    #[error("no decode node is ready")]
    NoDecode,
}

/// The usable nodes at one moment, as a policy sees them.
#[derive(Clone, Debug, Default)]
pub struct ClusterView {
    pub nodes: Vec<NodeView>,
    /// The costs that the router has learned from earlier requests.
    pub learned: Arc<RouteCosts>,
}

/// One usable node: its last report, and the prompts assigned to it that the report does not include.
#[derive(Clone, Debug)]
pub struct NodeView {
    pub info: Arc<NodeInfo>,
    pub load: NodeLoad,
    /// The number of prompts assigned to the node that `load` does not include.
    pub assigned: u32,
    /// The work that the node is to do for the assigned prompts.
    pub assigned_work: PromptWork,
    /// The router's route counter at the node's last assignment; zero if it had none.
    pub last_turn: u64,
    /// The number of the prompt's leading tokens whose KV the node has, or is about to have.
    pub cached_tokens: u32,
}

impl ClusterView {
    /// Returns the nodes that only prefill. A node with both roles counts as a decode node that needs no
    /// prefill node.
    pub fn prefill_nodes(&self) -> impl Iterator<Item = &NodeView> {
        self.nodes.iter().filter(|node| node.info.role.prefills() && !node.info.role.decodes())
    }

    /// Returns the nodes that decode, with or without room.
    pub(crate) fn all_decode_nodes(&self) -> impl Iterator<Item = &NodeView> {
        self.nodes.iter().filter(|node| node.info.role.decodes())
    }

    /// Returns the decode nodes with room for the prompt and no waiting prompts, by their last reports. If
    /// there are none, returns all decode nodes.
    pub fn decode_nodes(&self, prompt: &Prompt) -> Vec<&NodeView> {
        let with_room: Vec<&NodeView> =
            self.all_decode_nodes().filter(|node| node.has_room(prompt)).collect();
        if with_room.is_empty() { self.all_decode_nodes().collect() } else { with_room }
    }
}

impl NodeView {
    /// Returns the number of sequences that wait on the node, or are on their way to it.
    fn n_coming(&self) -> u32 {
        self.load.waiting + self.load.arriving + self.assigned
    }

    /// Returns the number of sequences that the node has, and of those on their way to it.
    fn n_sequences(&self) -> u32 {
        self.load.running + self.n_coming()
    }

    fn has_room(&self, prompt: &Prompt) -> bool {
        let needed = self.info.model.layout.blocks_of_all_groups(prompt.tokens.len() + 1);
        self.load.waiting == 0 && self.load.blocks.available() as usize >= needed
    }
}

/// Makes a decision of two chosen nodes. Without a prefill node the decode node computes the prompt, which is
/// slower but works.
fn pair(
    ask: &Ask<'_>,
    view: &ClusterView,
    prefill: Option<&NodeView>,
    decode: Option<&NodeView>,
) -> Result<Decision, NoRoute> {
    let (decode, pricing) = (decode.ok_or(NoRoute::NoDecode)?, Pricing::new(ask, view));
    let priced = match (ask.arms, prefill.filter(|_| !decode.info.role.prefills())) {
        (AllowedArms::OnlyHeld { by }, _) => pricing.held(by, decode),
        (AllowedArms::RemoteOrLocal, Some(prefill)) => pricing.remote(prefill, decode),
        (AllowedArms::OnlyLocal, _) | (_, None) => pricing.local(decode),
    };
    Ok(priced.decision(Choice::Rule))
}

/// The names that [`by_name`] accepts.
pub const NAMES: &[&str] =
    &["random", "round-robin", "least-loaded", "session-affinity", "prefix-aware", "cost"];

/// Returns the policy with this name.
pub fn by_name(name: &str) -> Option<Box<dyn RoutingPolicy>> {
    match name {
        "random" => Some(Box::new(random::Random)),
        "round-robin" => Some(Box::new(round_robin::RoundRobin)),
        "least-loaded" => Some(Box::new(least_loaded::LeastLoaded)),
        "session-affinity" => Some(Box::new(session_affinity::SessionAffinity)),
        "prefix-aware" => Some(Box::new(prefix_aware::PrefixAware)),
        "cost" => Some(Box::new(cost::Cost)),
        _ => None,
    }
}

#[cfg(test)]
pub(crate) mod tests;
