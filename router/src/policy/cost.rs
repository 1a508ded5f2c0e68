//! Compares the predicted cost of all routes, also of those on which the decode node computes the prompt.
//!
//! A cost is the time to the second token plus the delay of the streams on the decode node. The time to the second
//! token is the wait in the queue, the computation of the uncached tokens, the calls, the part of the transfer
//! that the computation does not hide, and the first decode step. The cheapest route that is predicted to meet the
//! request's objective is taken. If there is none, the route that misses it by least is taken.
//!
//! A decode node with streams computes a prompt only if this hardly delays the streams, if it saves many times their
//! delay, or if there is no prefill node. If a node bounds its steps with prompts (`scheduler.gap_ms_max`), delays of
//! its streams within the bound cost nothing. One prompt in [`EXPLORE_ONE_IN`] takes the other arm if that costs little
//! more, so that the router goes on learning its costs.

use std::cmp::{Ordering, Reverse};

use super::costs::{EXPLORE_ONE_IN, Priced, Pricing};
use super::decision::CANDIDATES_MAX;
use super::{
    AllowedArms, Arm, Ask, Choice, ClusterView, ComputingNodes, Decision, NoRoute, NodeView, RoutingPolicy,
};

/// The number of prefill nodes, and of decode nodes, whose routes are compared. They are those with the lowest costs of
/// their own, so the time of a decision grows with the number of nodes and not with that of pairs.
const COMPARED_MAX: usize = 8;

/// The difference up to which costs count as equal: predictions are not exact.
const SIMILAR_MS: f64 = 0.5;
/// The same for routes of one arm, as a share of the cost: the speeds that nodes have learned differ a little.
const SIMILAR_SHARE: f64 = 0.03;
/// The difference for the two arms: then the earlier first token decides, because users wait for it.
const SIMILAR_ARMS_MS: f64 = 3.0;

/// The share by which a local prompt may lengthen the steps of streams on the decode node.
const STEP_SHARE: f64 = 0.05;
/// If a local prompt lengthens steps by more, the delay of the streams counts this many times.
const STREAMS_WEIGHT: f64 = 20.0;
/// The longest step with a local prompt, as a multiple of a step without.
const STEP_MAX: f64 = 2.0;

/// The largest cost of an explored route: this multiple of the lowest cost.
const EXPLORE_COST: f64 = 1.5;

#[derive(Debug)]
pub(super) struct Cost;

impl RoutingPolicy for Cost {
    fn name(&self) -> &'static str {
        "cost"
    }

    fn computing(&self) -> ComputingNodes {
        ComputingNodes::PrefillAndDecode
    }

    fn route(&self, ask: &Ask<'_>, view: &ClusterView, draw: u64) -> Result<Decision, NoRoute> {
        let mut routes = routes(ask, view);
        routes.sort_unstable_by(by_cost);
        let best = routes.first().ok_or(NoRoute::NoDecode)?;
        let (chosen, choice) = match explored(&routes, draw) {
            Some(other) => (other, Choice::Explored),
            None => (similar(&routes, draw), Choice::Cheapest),
        };
        Ok(Decision {
            regret_ms: (weighted_ms(chosen) - weighted_ms(best)).max(0.0),
            candidates: routes.iter().take(CANDIDATES_MAX).map(Priced::candidate).collect(),
            ..chosen.decision(choice)
        })
    }
}

/// Whether a route is worse than others, whatever its cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    Usual,
    /// The streams on the decode node wait long for the prompt.
    Disturbs,
}

/// Orders routes by rank, by how far they miss the request's objective, by weighted cost and by the decode node's last
/// assignment.
fn by_cost(a: &Priced<'_>, b: &Priced<'_>) -> Ordering {
    let by_rank = rank(a).cmp(&rank(b)).then(a.misses.total_cmp(&b.misses));
    let by_cost = by_rank.then(weighted_ms(a).total_cmp(&weighted_ms(b)));
    by_cost.then(a.decode.last_turn.cmp(&b.decode.last_turn))
}

/// Returns whether a route may be taken in place of the best one, if its cost allows it.
fn is_alike(route: &Priced<'_>, best: &Priced<'_>) -> bool {
    rank(route) == rank(best) && route.misses <= best.misses
}

fn rank(route: &Priced<'_>) -> Rank {
    if lengthens_steps(route, STEP_MAX) { Rank::Disturbs } else { Rank::Usual }
}

/// Returns the cost of a route, with the weighted delay of streams.
fn weighted_ms(route: &Priced<'_>) -> f64 {
    if bounds_gaps(route) {
        return route.terms.second_token_ms();
    }
    let is_weighted = lengthens_steps(route, 1.0 + STEP_SHARE);
    route.cost_ms() + if is_weighted { route.terms.streams_ms * (STREAMS_WEIGHT - 1.0) } else { 0.0 }
}

/// Returns whether streams on a decode node have to wait for a prompt, for longer than `times` the duration
/// of a step.
fn lengthens_steps(route: &Priced<'_>, times: f64) -> bool {
    route.arm == Arm::Local
        && !route.decode.info.role.prefills()
        && route.terms.streams_ms > 0.0
        && !bounds_gaps(route)
        && route.terms.gap_ms > route.step_ms * times
}

/// Returns whether the node that computes the prompt bounds its steps with prompts. Its streams may be delayed up
/// to the bound.
fn bounds_gaps(route: &Priced<'_>) -> bool {
    route.arm == Arm::Local && route.step_ms < f64::from(route.decode.load.costs.gap_ms_max)
}

/// Returns the routes to compare.
fn routes<'a>(ask: &Ask<'a>, view: &'a ClusterView) -> Vec<Priced<'a>> {
    let pricing = Pricing::new(ask, view);
    let decode = view.decode_nodes(ask.prompt);
    if let AllowedArms::OnlyHeld { by } = ask.arms {
        return decode.into_iter().map(|node| pricing.held(by, node)).collect();
    }
    let mut routes: Vec<Priced<'a>> = decode.iter().map(|node| pricing.local(node)).collect();
    if routes.len() > COMPARED_MAX {
        routes.select_nth_unstable_by(COMPARED_MAX, by_cost);
        routes.truncate(COMPARED_MAX);
    }
    if ask.arms == AllowedArms::RemoteOrLocal {
        let prefill = cheapest(view.prefill_nodes().collect(), |node| pricing.prefill_ms(node));
        let receivers = decode.into_iter().filter(|node| !node.info.role.prefills()).collect();
        let receivers = cheapest(receivers, |node| pricing.receive_ms(node));
        let pairs = prefill.iter().flat_map(|from| receivers.iter().map(move |to| (*from, *to)));
        routes.extend(pairs.map(|(from, to)| pricing.remote(from, to)));
    }
    routes
}

/// Returns the nodes with the lowest costs of their own.
fn cheapest(nodes: Vec<&NodeView>, cost: impl Fn(&NodeView) -> f64) -> Vec<&NodeView> {
    if nodes.len() <= COMPARED_MAX {
        return nodes;
    }
    let mut ranked: Vec<(f64, u64, &NodeView)> =
        nodes.into_iter().map(|node| (cost(node), node.last_turn, node)).collect();
    ranked.select_nth_unstable_by(COMPARED_MAX, |a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    ranked.truncate(COMPARED_MAX);
    ranked.into_iter().map(|(_, _, node)| node).collect()
}

/// Returns the route to take among those with similar costs. The arm with the earlier first token comes first. Within
/// the arm these decide, in this order: the most cached tokens on the node that computes the prompt, then on the decode
/// node, and the oldest last assignment of the computing node, then of the decode node. The random draw decides among
/// nodes that had no prompt yet.
fn similar<'r, 'a>(routes: &'r [Priced<'a>], draw: u64) -> &'r Priced<'a> {
    let best = &routes[0];
    let is_similar = |route: &&Priced<'a>| {
        let of_arm_ms = (weighted_ms(best) * SIMILAR_SHARE).max(SIMILAR_MS);
        let similar_ms = if route.arm == best.arm { of_arm_ms } else { SIMILAR_ARMS_MS };
        is_alike(route, best) && weighted_ms(route) <= weighted_ms(best) + similar_ms
    };
    let time_ms = |route: &Priced<'_>| {
        route.terms.first_token_ms() + if route.arm == best.arm { 0.0 } else { SIMILAR_MS }
    };
    let earliest = routes.iter().filter(is_similar).min_by(|a, b| time_ms(a).total_cmp(&time_ms(b)));
    let arm = earliest.map_or(best.arm, |route| route.arm);
    let order = |route: &Priced<'_>| {
        let computing = route.prefill.unwrap_or(route.decode);
        let cached = [route.terms.cached_tokens, route.decode.cached_tokens];
        (Reverse(cached), computing.last_turn, route.decode.last_turn)
    };
    let of_arm = || routes.iter().filter(is_similar).filter(|route| route.arm == arm);
    let first = of_arm().map(order).min().unwrap_or_else(|| order(best));
    let equal: Vec<&Priced<'a>> = of_arm().filter(|route| order(route) == first).collect();
    equal.get((draw % equal.len().max(1) as u64) as usize).copied().unwrap_or(best)
}

/// Returns the best route of the other arm, if it is this prompt's turn to explore and the route costs little more.
fn explored<'r, 'a>(routes: &'r [Priced<'a>], draw: u64) -> Option<&'r Priced<'a>> {
    let best = &routes[0];
    let other = routes.iter().find(|route| route.arm != best.arm)?;
    let costs_little = weighted_ms(other) <= weighted_ms(best) * EXPLORE_COST && is_alike(other, best);
    ((draw >> 32).is_multiple_of(EXPLORE_ONE_IN) && costs_little).then_some(other)
}
