//! The decision of a policy for a prompt, and the times that it predicts.

use std::sync::Arc;

use types::NodeInfo;

/// The nodes that are to serve a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// The node that computes the prompt; `None`: the decode node computes it alone, or the KV is there already.
    pub prefill: Option<Arc<NodeInfo>>,
    pub decode: Arc<NodeInfo>,
}

/// The way in which a decode node gets the KV of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arm {
    /// A prefill node computes the prompt and sends the KV.
    Remote,
    /// The decode node computes the prompt itself.
    Local,
    /// A node has computed the prompt and holds the KV.
    Held,
}

/// The arms that a prompt may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AllowedArms<'a> {
    RemoteOrLocal,
    OnlyLocal,
    /// `by` holds the KV.
    OnlyHeld {
        by: &'a NodeInfo,
    },
}

/// The reason for a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// The policy compares no costs of routes.
    Rule,
    /// The lowest cost.
    Cheapest,
    /// A route of the other arm, so that the router learns its costs.
    Explored,
}

/// A route, and the policy's prediction for it.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    pub route: Route,
    pub arm: Arm,
    pub choice: Choice,
    /// The terms of the route.
    pub terms: Terms,
    /// The cost of the route less the lowest cost, in milliseconds.
    pub regret_ms: f64,
    /// The routes with the lowest costs, the cheapest first, at most `CANDIDATES_MAX`. Empty if the policy
    /// compares no costs of routes.
    pub candidates: Vec<Candidate>,
}

/// A route that a policy has compared with others.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    pub route: Route,
    pub arm: Arm,
    pub terms: Terms,
}

/// The largest number of candidates in a decision.
pub const CANDIDATES_MAX: usize = 8;

/// The predicted times of one route, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Terms {
    /// The leading tokens of the prompt whose KV the node that computes it is expected to have.
    pub cached_tokens: u32,
    /// The wait until the prompt's first step.
    pub queue_ms: f64,
    /// The computation of the uncached tokens. On a decode node it includes the streams in the same steps.
    pub compute_ms: f64,
    /// The calls between router and nodes.
    pub calls_ms: f64,
    /// The part of the KV transfer that the computation does not hide.
    pub transfer_ms: f64,
    /// The wait for the decode node's present step, and the first decode step.
    pub first_step_ms: f64,
    /// The total delay of the streams on the decode node.
    pub streams_ms: f64,
    /// The longest step of the decode node while it computes the prompt.
    pub gap_ms: f64,
}

impl Arm {
    pub const ALL: [Self; 3] = [Self::Remote, Self::Local, Self::Held];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Remote => "remote",
            Self::Local => "local",
            Self::Held => "held",
        }
    }
}

impl Choice {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Rule => "rule",
            Self::Cheapest => "cheapest",
            Self::Explored => "explored",
        }
    }
}

impl Terms {
    /// Returns the predicted time from the decision to the first token.
    pub fn first_token_ms(&self) -> f64 {
        self.queue_ms + self.compute_ms + self.calls_ms
    }

    /// Returns the predicted time from the decision to the second token.
    pub fn second_token_ms(&self) -> f64 {
        self.first_token_ms() + self.transfer_ms + self.first_step_ms
    }

    /// Returns the cost by which routes are compared.
    pub fn cost_ms(&self) -> f64 {
        self.second_token_ms() + self.streams_ms
    }
}
