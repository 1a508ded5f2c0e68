//! Predicted times on nodes and between them, in milliseconds. Policies compare them.

use std::time::Duration;

use types::{NodeInfo, PromptWork};

use super::decision::{Candidate, Terms};
use super::{Arm, Ask, Choice, ClusterView, Decision, NodeView, Route};
use crate::admission::Objective;

/// The time of a prompt token on a node whose speed is unknown, if no node's speed is known. It is small, and
/// enough to spread prompts over idle nodes.
const UNKNOWN_TOKEN_MS: f64 = 1e-3;

/// A node that has computed only remainders of prompts has learned a long time per token. This multiple of the fastest
/// node's time is the longest that counts.
const SLOWEST_NODE: f64 = 4.0;

/// The difference up to which the costs of two nodes count as similar: predictions are not exact.
const SIMILAR: f64 = 1.1;
const SIMILAR_MS: f64 = 0.5;

/// One prompt in this number takes a route that looks worse, so that its learned costs stay up to date.
pub(super) const EXPLORE_ONE_IN: u64 = 256;

/// Returns the nodes whose costs are similar to the lowest, in their order.
pub(super) fn similar<'a>(
    nodes: impl Iterator<Item = &'a NodeView>,
    cost: impl Fn(&NodeView) -> f64,
) -> Vec<&'a NodeView> {
    let nodes: Vec<(f64, &NodeView)> = nodes.map(|node| (cost(node), node)).collect();
    let lowest = nodes.iter().map(|(cost, _)| *cost).fold(f64::INFINITY, f64::min);
    let is_similar = |(cost, _): &(f64, &NodeView)| *cost <= lowest * SIMILAR + SIMILAR_MS;
    nodes.into_iter().filter(is_similar).map(|(_, node)| node).collect()
}

/// Returns the predicted wait of a new prompt until the node begins to compute it. `token_ms` is the time of a token on
/// a node whose speed is unknown: such a node predicts no wait for the prompts that it has.
pub(crate) fn queue_ms(node: &NodeView, token_ms: f64) -> f64 {
    let is_known = node.load.costs.prompt_token_ms > 0.0;
    let mut unpredicted = node.assigned_work;
    unpredicted.n_tokens += if is_known { 0 } else { node.load.queued_tokens };
    f64::from(node.load.queue_ms) + compute_ms(node, unpredicted, token_ms)
}

/// Returns the predicted time to compute prompt tokens. `token_ms` is the time of a token on a node whose speed is unknown.
pub(crate) fn compute_ms(node: &NodeView, work: PromptWork, token_ms: f64) -> f64 {
    let costs = &node.load.costs;
    if costs.prompt_token_ms > 0.0 { costs.prompt_ms(work) } else { work.n_tokens as f64 * token_ms }
}

/// Returns the predicted step time of a decode node, with all sequences that are assigned to it. Among nodes
/// with equal step times, a node with fewer streams costs less.
pub(crate) fn step_ms(node: &NodeView) -> f64 {
    let load = &node.load;
    let coming = node.n_coming();
    let ms_per_stream = f64::from(load.step_ms) / f64::from(load.running + 1);
    f64::from(load.step_ms) + f64::from(coming) * ms_per_stream + f64::from(node.n_sequences()) * 1e-3
}

impl ClusterView {
    /// Returns the time of a prompt token on the fastest node whose speed is known. A node that has computed no
    /// prompt counts as fast as this, so that it gets some.
    pub(crate) fn token_ms(&self) -> f64 {
        let known = self.nodes.iter().map(|node| f64::from(node.load.costs.prompt_token_ms));
        known.filter(|ms| *ms > 0.0).reduce(f64::min).unwrap_or(UNKNOWN_TOKEN_MS)
    }
}

/// The prediction of one prompt's times on the routes of a view.
#[derive(Debug)]
pub(super) struct Pricing<'a> {
    ask: Ask<'a>,
    view: &'a ClusterView,
    token_ms: f64,
}

/// A route with its predicted times.
#[derive(Clone, Copy, Debug)]
pub(super) struct Priced<'a> {
    pub(super) prefill: Option<&'a NodeView>,
    pub(super) decode: &'a NodeView,
    pub(super) arm: Arm,
    pub(super) terms: Terms,
    /// A step of the decode node without prompts.
    pub(super) step_ms: f64,
    /// The predicted time as a multiple of the request's objective, the larger of both multiples; zero if both
    /// objectives are met.
    pub(super) misses: f64,
}

/// The predicted times of a decode node.
#[derive(Clone, Copy, Debug)]
struct DecodeTimes {
    /// The sequences that run there, and those that are on their way.
    streams: f64,
    /// A step with all of them.
    step_ms: f64,
    /// The wait for the end of the present step.
    wait_ms: f64,
    token_ms: f64,
    /// The prompt tokens in one step.
    step_tokens: f64,
}

impl<'a> Pricing<'a> {
    pub(super) fn new(ask: &Ask<'a>, view: &'a ClusterView) -> Self {
        Self { ask: *ask, view, token_ms: view.token_ms() }
    }

    /// Returns the time of the prompt on a prefill node, to the first token.
    pub(super) fn prefill_ms(&self, node: &NodeView) -> f64 {
        queue_ms(node, self.token_ms) + compute_ms(node, self.ask.missing(node), self.token_ms)
    }

    /// Returns the time of a decode node for KV that is sent to it, without the time of the connector.
    pub(super) fn receive_ms(&self, node: &NodeView) -> f64 {
        self.decode_times(node).first_step_ms()
    }

    /// A prefill node computes the prompt.
    pub(super) fn remote(&self, from: &'a NodeView, to: &'a NodeView) -> Priced<'a> {
        let compute_ms = compute_ms(from, self.ask.missing(from), self.token_ms);
        let times = self.decode_times(to);
        let terms = Terms {
            cached_tokens: from.cached_tokens,
            queue_ms: queue_ms(from, self.token_ms),
            compute_ms,
            calls_ms: self.view.learned.calls(Arm::Remote).ms,
            transfer_ms: self.transfer_ms(&from.info, to, compute_ms),
            first_step_ms: times.first_step_ms(),
            streams_ms: 0.0,
            gap_ms: times.step_ms,
        };
        self.priced(Arm::Remote, Some(from), to, times.step_ms, terms)
    }

    /// The decode node computes the prompt, in chunks beside its streams.
    pub(super) fn local(&self, node: &'a NodeView) -> Priced<'a> {
        let times = self.decode_times(node);
        let missing = self.ask.missing(node);
        let n_missing = missing.n_tokens as f64;
        let costs = &node.load.costs;
        let n_steps = costs.prompt_steps(missing, node.load.running).max(1.0);
        // A node that bounds gaps computes nothing of the prompt in the first step of KV that arrives, and half as much in the
        // step before. In the worst case every second step computes a part of the prompt.
        let n_arriving = if costs.gap_ms_max > 0.0 { f64::from(node.load.arriving) } else { 0.0 };
        let n_for_arrivals = (1.5 * n_arriving).min(n_steps);
        let prompt_step_ms = f64::from(costs.prompt_step_ms);
        let prompt_ms =
            missing.takes_ms(times.token_ms, costs.prompt_context_ms.into()) + n_steps * prompt_step_ms;
        let terms = Terms {
            cached_tokens: node.cached_tokens,
            queue_ms: queue_ms(node, self.token_ms).max(times.wait_ms),
            compute_ms: prompt_ms + (n_steps + n_for_arrivals) * times.step_ms,
            calls_ms: self.view.learned.calls(Arm::Local).ms,
            transfer_ms: 0.0,
            first_step_ms: times.step_ms,
            streams_ms: times.streams * prompt_ms,
            gap_ms: times.step_ms + prompt_step_ms + n_missing.min(times.step_tokens) * times.token_ms,
        };
        self.priced(Arm::Local, None, node, times.step_ms, terms)
    }

    /// `by` has computed the prompt.
    pub(super) fn held(&self, by: &NodeInfo, node: &'a NodeView) -> Priced<'a> {
        let times = self.decode_times(node);
        let terms = Terms {
            cached_tokens: node.cached_tokens,
            transfer_ms: self.transfer_ms(by, node, 0.0),
            first_step_ms: times.first_step_ms(),
            gap_ms: times.step_ms,
            ..Terms::default()
        };
        self.priced(Arm::Held, None, node, times.step_ms, terms)
    }

    fn priced(
        &self,
        arm: Arm,
        prefill: Option<&'a NodeView>,
        decode: &'a NodeView,
        step_ms: f64,
        terms: Terms,
    ) -> Priced<'a> {
        let Objective { first_token, token_gap } = self.ask.objective;
        let ratio = |ms: f64, longest: Option<Duration>| {
            longest.map_or(0.0, |longest| ms / (longest.as_secs_f64() * 1e3).max(1e-3))
        };
        let worse = ratio(terms.first_token_ms(), first_token).max(ratio(step_ms, token_gap));
        Priced { prefill, decode, arm, terms, step_ms, misses: if worse > 1.0 { worse } else { 0.0 } }
    }

    /// Returns the part of the transfer to a decode node that the computation does not hide.
    fn transfer_ms(&self, from: &NodeInfo, to: &NodeView, computed_ms: f64) -> f64 {
        let bytes = self.ask.missing(to).n_tokens * token_bytes(&to.info);
        self.view.learned.between(from, &to.info).unhidden_ms(bytes, computed_ms)
    }

    fn decode_times(&self, node: &NodeView) -> DecodeTimes {
        let (load, costs) = (&node.load, &node.load.costs);
        let coming = node.n_coming();
        let context_ms = f64::from(costs.context_ms) * self.ask.n_tokens() as f64 / 1e3;
        let step_ms = f64::from(load.step_ms) + f64::from(coming) * (f64::from(costs.row_ms) + context_ms);
        let known_ms = f64::from(costs.prompt_token_ms);
        let token_ms =
            if known_ms > 0.0 { known_ms.min(self.token_ms * SLOWEST_NODE) } else { self.token_ms };
        let step_tokens = f64::from(costs.step_tokens.saturating_sub(load.running).max(1));
        let step_tokens = if costs.step_tokens == 0 { f64::INFINITY } else { step_tokens };
        let prompts = (load.queued_tokens + node.assigned_work.n_tokens) as f64;
        let present_ms = step_ms + prompts.min(step_tokens) * token_ms;
        let is_busy = load.running > 0 || prompts > 0.0;
        DecodeTimes {
            streams: f64::from(load.running + coming),
            step_ms,
            wait_ms: if is_busy { present_ms / 2.0 } else { 0.0 },
            token_ms,
            step_tokens,
        }
    }
}

impl DecodeTimes {
    fn first_step_ms(&self) -> f64 {
        self.wait_ms + self.step_ms
    }
}

impl Priced<'_> {
    pub(super) fn cost_ms(&self) -> f64 {
        self.terms.cost_ms()
    }

    pub(super) fn candidate(&self) -> Candidate {
        Candidate { route: self.route(), arm: self.arm, terms: self.terms }
    }

    /// Returns the decision for this route, without other candidates.
    pub(super) fn decision(&self, choice: Choice) -> Decision {
        let (route, arm, terms) = (self.route(), self.arm, self.terms);
        Decision { route, arm, choice, terms, regret_ms: 0.0, candidates: Vec::new() }
    }

    fn route(&self) -> Route {
        Route { prefill: self.prefill.map(|node| node.info.clone()), decode: self.decode.info.clone() }
    }
}

/// Returns the bytes of one token's KV.
fn token_bytes(info: &NodeInfo) -> u64 {
    let layout = &info.model.layout;
    let block_bytes: usize = layout.group_indices().map(|group| layout.block_bytes(group)).sum();
    (block_bytes / usize::from(layout.block_tokens)) as u64
}
