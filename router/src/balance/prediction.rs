//! Predicts which ratio of prefill and decode nodes serves the present demand best: a pure function.
//!
//! The load of a kind of node is the demand on it, divided by what its nodes can do: 1 is as much as they can serve. A
//! decode node is full when its step takes twice as long as one without streams, or when its KV blocks are full. The
//! load of a ratio is that of its busier kind.

use std::fmt;

use types::{NodeId, NodeLoad, PromptWork, Role};

use super::demand::Demand;

/// The load at and above which nodes cannot serve the demand. Below it no node is moved.
const OVERLOADED: f64 = 1.0;

/// The most streams of a decode node that count, because the costs of larger steps are not known.
const STREAMS_MAX: f64 = 256.0;

/// The fewest streams that fill a node by the time of its steps. With few streams a node cannot separate the fixed time
/// of a step from that of a stream, and may report hardly any fixed time.
const STREAMS_MIN: f64 = 8.0;

/// The measured numbers of the nodes of one model.
#[derive(Clone, Debug)]
pub(super) struct GroupNumbers {
    pub(super) nodes: Vec<NodeNumbers>,
    /// `None` while it is not measured.
    pub(super) demand: Option<Demand>,
}

/// The measured numbers of one node.
#[derive(Clone, Debug)]
pub(super) struct NodeNumbers {
    pub(super) id: NodeId,
    pub(super) role: Role,
    /// Whether the node refuses another role. It does its work and is never moved.
    pub(super) keeps_role: bool,
    /// The reason why `load` does not count.
    pub(super) missing: Option<String>,
    pub(super) load: NodeLoad,
    /// The tokens of assigned prompts that `load` does not include.
    pub(super) assigned_tokens: u64,
}

/// A node that should have another role.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Move {
    pub(super) node: NodeId,
    pub(super) from: Role,
    pub(super) to: Role,
    pub(super) now: Loads,
    /// The predicted loads after the move.
    pub(super) then: Loads,
}

/// The load of each kind of node.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Loads {
    pub(super) prefill: f64,
    pub(super) decode: f64,
}

/// The reason why no node is moved.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub(super) enum NoMove {
    #[error("the demand is not measured yet")]
    NoDemand,
    #[error("numbers of {node} are missing: {why}")]
    Missing { node: NodeId, why: String },
    #[error("{0} has both roles")]
    Both(NodeId),
    #[error("no {0} node has reported the time of a token")]
    UnknownSpeed(Role),
    #[error("the nodes serve the demand ({0})")]
    Served(Loads),
    #[error("{node} is the last {role} node ({loads})")]
    Last { node: NodeId, role: Role, loads: Loads },
    #[error("no {role} node can change its role ({loads})")]
    RoleKept { role: Role, loads: Loads },
    #[error("no other ratio is better by the margin ({now}; with one more {to} node {then})")]
    NotBetter { to: Role, now: Loads, then: Loads },
}

impl GroupNumbers {
    /// Returns the move of one node that lowers the load by at least `margin`.
    pub(super) fn predict(&self, margin: f64) -> Result<Move, NoMove> {
        for node in &self.nodes {
            if let Some(why) = &node.missing {
                return Err(NoMove::Missing { node: node.id.clone(), why: why.clone() });
            }
            if node.role.prefills() && node.role.decodes() {
                return Err(NoMove::Both(node.id.clone()));
            }
        }
        let now = self.loads(&self.demand.ok_or(NoMove::NoDemand)?)?;
        if now.highest() < OVERLOADED {
            return Err(NoMove::Served(now));
        }
        let (from, to) = match now.prefill > now.decode {
            true => (Role::Decode, Role::Prefill),
            false => (Role::Prefill, Role::Decode),
        };
        let work = |node: &&NodeNumbers| node.work();
        let first = self.of(from).next().ok_or(NoMove::UnknownSpeed(from))?;
        let (n_from, n_to) = (self.of(from).count() as f64, self.of(to).count() as f64);
        if n_from < 2.0 {
            return Err(NoMove::Last { node: first.id.clone(), role: from, loads: now });
        }
        let least = self.of(from).filter(|node| !node.keeps_role).min_by_key(work);
        let least = least.ok_or(NoMove::RoleKept { role: from, loads: now })?;
        let (less, more) = (n_from / (n_from - 1.0), n_to / (n_to + 1.0));
        let then = match to {
            Role::Prefill => Loads { prefill: now.prefill * more, decode: now.decode * less },
            _ => Loads { prefill: now.prefill * less, decode: now.decode * more },
        };
        if then.highest() * (1.0 + margin) > now.highest() {
            return Err(NoMove::NotBetter { to, now, then });
        }
        Ok(Move { node: least.id.clone(), from, to, now, then })
    }

    fn of(&self, role: Role) -> impl Iterator<Item = &NodeNumbers> {
        self.nodes.iter().filter(move |node| node.role == role)
    }

    fn loads(&self, demand: &Demand) -> Result<Loads, NoMove> {
        let queued: u64 =
            self.of(Role::Prefill).map(|node| node.load.queued_tokens + node.assigned_tokens).sum();
        let waiting = demand.waiting_tokens + queued as f64;
        let prompts = demand.prompt_tokens + waiting / demand.window_ms;
        let full = self.full_step()?;
        let streams: u32 = self.of(Role::Decode).map(|node| node.load.running + node.load.arriving).sum();
        let arriving = demand.answer_tokens + demand.waiting_answer_tokens / demand.window_ms;
        // The streams that run now need a token in each step.
        let answers = arriving.max(f64::from(streams) / full.ms);
        Ok(Loads {
            prefill: prompts * self.prompt_token_ms()? / self.of(Role::Prefill).count() as f64,
            decode: answers * full.ms / full.streams / self.of(Role::Decode).count() as f64,
        })
    }

    /// Returns the mean time of a prompt token on the prefill nodes whose speed is known.
    fn prompt_token_ms(&self) -> Result<f64, NoMove> {
        let token_ms = |node: &NodeNumbers| {
            let costs = &node.load.costs;
            let n_tokens = u64::from(costs.step_tokens.max(1));
            (costs.prompt_token_ms > 0.0)
                .then(|| costs.prompt_ms(PromptWork::of(0..n_tokens)) / n_tokens as f64)
        };
        mean(self.of(Role::Prefill).filter_map(token_ms)).ok_or(NoMove::UnknownSpeed(Role::Prefill))
    }

    /// Returns the step of a decode node that is full.
    fn full_step(&self) -> Result<FullStep, NoMove> {
        let known = || self.of(Role::Decode).map(|node| &node.load).filter(|load| load.costs.step_ms > 0.0);
        let step_ms = mean(known().map(|load| f64::from(load.costs.step_ms)));
        let step_ms = step_ms.ok_or(NoMove::UnknownSpeed(Role::Decode))?;
        // The predicted step has one more stream of the usual length.
        let stream_ms = |load: &NodeLoad| {
            f64::from((load.step_ms - load.costs.step_ms).max(0.0)) / f64::from(load.running + 1)
        };
        let stream_ms = mean(known().map(stream_ms)).unwrap_or_default();
        let by_time = if stream_ms > 0.0 { (step_ms / stream_ms).max(STREAMS_MIN) } else { STREAMS_MAX };
        let streams = by_time.min(self.streams_by_room()).clamp(1.0, STREAMS_MAX);
        Ok(FullStep { streams, ms: step_ms + streams * stream_ms })
    }

    /// Returns the number of streams for which a decode node has KV blocks, if they are as long as the present ones.
    fn streams_by_room(&self) -> f64 {
        let sum =
            |of: fn(&NodeLoad) -> u32| self.of(Role::Decode).map(|node| f64::from(of(&node.load))).sum();
        let (streams, leased, total): (f64, f64, f64) = (
            sum(|load| load.running + load.arriving),
            sum(|load| load.blocks.leased),
            sum(|load| load.blocks.total),
        );
        if leased == 0.0 || streams == 0.0 {
            return STREAMS_MAX;
        }
        streams * total / leased / self.of(Role::Decode).count() as f64
    }
}

/// A decode step with as many streams as a node should have.
#[derive(Clone, Copy, Debug)]
struct FullStep {
    streams: f64,
    ms: f64,
}

impl NodeNumbers {
    /// Returns the work that a move would end or hand on.
    fn work(&self) -> u64 {
        let NodeLoad { running, arriving, queued_tokens, .. } = self.load;
        u64::from(running + arriving) + queued_tokens + self.assigned_tokens
    }
}

impl Loads {
    fn highest(self) -> f64 {
        self.prefill.max(self.decode)
    }
}

impl fmt::Display for Loads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "load of prefill {:.2}, of decode {:.2}", self.prefill, self.decode)
    }
}

impl fmt::Display for Move {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { node, from, to, now, then } = self;
        write!(f, "{node} from {from} to {to}: {now}; afterwards {then}")
    }
}

fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (sum, n) = values.fold((0.0, 0), |(sum, n), value| (sum + value, n + 1));
    (n > 0).then(|| sum / f64::from(n))
}
