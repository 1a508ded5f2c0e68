//! The members and their states. Only the methods in this file change them, and they need no runtime.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use chassis::Task;
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::{info, warn};
use types::place::keepers;
use types::{BlockHash, BlockHashKey, Epoch, FingerprintDigest, ModelInfo, NodeId, NodeInfo, NodeLoad};

use super::groups::{self, DecisionContext, GroupNode, Reason, Usability};
use super::routable::{Routable, RoutableModel, RoutableNode};
use crate::rpc::{NodeClient, NodeReport};
use crate::text::RouterModels;

/// The time for which a router that has just started waits for nodes that are older than itself before it
/// chooses a group. With the embedded registry a node announces itself again at its next renewal, within a
/// second, and connecting may take a second more.
pub(super) const SETTLE: Duration = Duration::from_secs(3);

/// The longest time for which a change to another group is postponed while a better one may become usable. It is longer
/// than reopening a broken status stream takes, and a decision for the right nodes still comes within five seconds.
const POSTPONE_MAX: Duration = Duration::from_secs(3);

/// Whether a node gets work, as operators see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeState {
    /// The node is announced, but has sent no status report, or the group of its model is not chosen yet.
    Connecting,
    Ready,
    /// The node accepts no new work.
    Draining,
    /// The node's status stream broke; the router reconnects.
    Unreachable,
    /// The node cannot be used, independent of other nodes: another protocol, or not the model that the
    /// operator requires.
    Refused(String),
    /// The node's fingerprint differs from that of the serving group.
    Superseded(String),
}

impl NodeState {
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Connecting => "connecting",
            Self::Ready => "ready",
            Self::Draining => "draining",
            Self::Unreachable => "unreachable",
            Self::Refused(_) => "refused",
            Self::Superseded(_) => "superseded",
        }
    }

    /// Returns the reason why the node gets no work although it is reachable.
    pub fn reason(&self) -> Option<&str> {
        match self {
            Self::Refused(reason) | Self::Superseded(reason) => Some(reason),
            _ => None,
        }
    }
}

/// One node of the group that serves a model, usable or not, with its last report.
#[derive(Clone, Debug)]
pub struct GroupMember {
    pub info: Arc<NodeInfo>,
    pub state: NodeState,
    pub load: NodeLoad,
    /// The time of the report; `None` before the first.
    pub reported: Option<Instant>,
    /// The tokens of assigned prompts that the report does not include.
    pub assigned_tokens: u64,
}

/// The groups of one model's nodes, by fingerprint.
#[derive(Clone, Debug)]
pub struct ModelGroups {
    pub name: String,
    pub in_force: Option<FingerprintDigest>,
    pub why: String,
    pub groups: Vec<Group>,
}

/// The nodes of one model with one fingerprint.
#[derive(Clone, Debug)]
pub struct Group {
    pub model: Arc<NodeInfo>,
    pub fingerprint: FingerprintDigest,
    pub nodes: Vec<NodeId>,
    /// Whether a decode node of the group is usable.
    pub can_decode: bool,
}

/// The fingerprint that the operator requires: nodes with another one are refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WantedFingerprint {
    /// The model that the requirement applies to; empty for every model.
    pub model: String,
    pub fingerprint: FingerprintDigest,
}

/// The router's report to a node about itself: whether the node gets work, and whether a rollout may
/// continue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct WorkStatus {
    /// The reason why the node gets no work. `None`: it is in use, or has left.
    pub(super) refusal: Option<String>,
    /// The reason why a rollout must not replace other nodes yet. `None`: the node serves, or its group could serve.
    pub(super) rollout_waits_for: Option<String>,
}

impl WorkStatus {
    /// Returns the status of a node that was just discovered.
    pub(super) fn unknown() -> Self {
        Self { refusal: None, rollout_waits_for: Some("the router has just discovered the node".to_owned()) }
    }
}

/// The serving group of one model (`in_force`), and the state of a postponed change.
#[derive(Debug)]
struct ModelRecord {
    in_force: Option<FingerprintDigest>,
    reason: Reason,
    /// The period after the router's start in which nodes may still announce themselves.
    settles: Option<SettlePeriod>,
    /// The time since which a change is postponed; `None` if none is.
    postponed_since: Option<Instant>,
}

/// The kind of registry event that reported a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MemberSource {
    OneEvent,
    /// The member is in the list of all members. Once that list is known, the router waits only for status
    /// streams.
    WholeList,
}

#[derive(Clone, Copy, Debug)]
struct SettlePeriod {
    until: Instant,
    source: MemberSource,
}

pub(super) struct Members {
    pub(super) by_id: BTreeMap<NodeId, Member>,
    by_model: BTreeMap<String, ModelRecord>,
    wanted: Option<WantedFingerprint>,
    /// The router's key of block hashes. A node must have the same.
    block_hash_key: BlockHashKey,
    /// The router's epoch. Nodes with an earlier epoch existed before the router.
    started: Epoch,
}

pub(super) struct Member {
    pub(super) info: Arc<NodeInfo>,
    /// The part of the node's state that routing reads.
    pub(super) node: Arc<RoutableNode>,
    fingerprint: FingerprintDigest,
    /// The state of the node's status stream.
    link: NodeState,
    /// Why there is no status stream; `None` while there is one, or before the first attempt has ended.
    pub(super) no_stream: Option<String>,
    /// Whether the node has sent no report in its current status stream. If the first one is a load, the node accepts
    /// work, even if it drained before: it has changed its role, and back, and the router has missed that.
    stream_is_new: bool,
    /// The reason why the node is refused, independent of other nodes.
    refusal: Option<String>,
    /// Whether the node has failed since its last report.
    pub(super) is_suspect: bool,
    /// Whether the node comes from the members file, without confirmation by the registry.
    pub(super) is_old: bool,
    /// Whether the registry has answered without it.
    is_missing: bool,
    pub(super) client: NodeClient,
    /// The last report for the node. Members are notified in the order of their ids, so that simulations
    /// repeat.
    word: watch::Sender<WorkStatus>,
    /// The tasks that follow the member and report to it. They are aborted when it is dropped.
    _tasks: [Task<()>; 2],
}

impl Member {
    /// Makes a member. `refusal` is the reason why the node cannot be used, independent of other nodes.
    /// `tasks` end with the member.
    pub(super) fn new(
        node: Arc<RoutableNode>,
        refusal: Option<String>,
        client: NodeClient,
        word: watch::Sender<WorkStatus>,
        tasks: [Task<()>; 2],
    ) -> Self {
        let info = Arc::clone(&node.info);
        Self {
            fingerprint: info.model.fingerprint.digest(),
            info,
            node,
            link: NodeState::Connecting,
            no_stream: None,
            stream_is_new: true,
            refusal,
            is_suspect: false,
            is_old: false,
            is_missing: false,
            client,
            word,
            _tasks: tasks,
        }
    }

    /// Notes that the registry lists the node.
    pub(super) fn confirm(&mut self) {
        (self.is_old, self.is_missing) = (false, false);
    }

    fn is_usable(&self) -> bool {
        self.refusal.is_none() && self.link == NodeState::Ready
    }

    /// Returns whether the node takes part in the choice of its model's group: it is not refused, and is no
    /// pool node.
    fn computes(&self) -> bool {
        self.refusal.is_none() && !self.info.role.pools()
    }

    fn group_node(&self) -> GroupNode {
        let link = match self.link {
            NodeState::Ready => Usability::Usable,
            NodeState::Draining => Usability::Leaving,
            _ => Usability::Possible,
        };
        GroupNode { fingerprint: self.fingerprint, role: self.info.role, epoch: self.info.epoch, link }
    }
}

impl Members {
    pub(super) fn new(
        started: Epoch,
        wanted: Option<WantedFingerprint>,
        block_hash_key: BlockHashKey,
    ) -> Self {
        let (by_id, by_model) = (BTreeMap::new(), BTreeMap::new());
        Self { by_id, by_model, wanted, block_hash_key, started }
    }

    /// Returns the usable nodes, for routing.
    pub(super) fn routable(&self) -> Routable {
        let of_model = |(name, record): (&String, &ModelRecord)| {
            let nodes = self.of_model(name).filter(|member| member.is_usable());
            let nodes = nodes.map(|member| (member.fingerprint, Arc::clone(&member.node))).collect();
            (name.clone(), RoutableModel { in_force: record.in_force, nodes })
        };
        Routable { by_model: self.by_model.iter().map(of_model).collect() }
    }

    fn in_force(&self, model: &str) -> Option<FingerprintDigest> {
        self.by_model.get(model)?.in_force
    }

    pub(super) fn keeper(&self, first: BlockHash, model: &ModelInfo) -> Option<Arc<NodeInfo>> {
        let keeps = |member: &&Member| {
            let NodeInfo { role, model: kept, .. } = &*member.info;
            role.pools() && kept.name == model.name && kept.fingerprint == model.fingerprint
        };
        let usable = |member: &&Member| member.is_usable() && !member.is_suspect;
        let ids = self.by_id.values().filter(keeps).filter(usable).map(|member| &member.info.id);
        let keeper = keepers(ids, first).first().copied()?;
        Some(self.by_id.get(keeper)?.info.clone())
    }

    /// Removes members that are not in the registry's list. A member of the file that answers stays until it is silent: it
    /// may announce itself again, because its lease may have ended with the registry's data.
    pub(super) fn retain_listed(&mut self, nodes: &[NodeInfo]) {
        self.by_id.retain(|id, member| {
            member.is_missing = !nodes.iter().any(|node| node.id == *id);
            !member.is_missing || member.is_old && member.is_usable()
        });
    }

    pub(super) fn mark_old(&mut self, id: &NodeId) {
        if let Some(member) = self.by_id.get_mut(id) {
            member.is_old = true;
        }
    }

    /// Returns the models whose serving group has a usable decode node.
    pub(super) fn models(&self) -> Vec<ModelInfo> {
        let model = |(name, record): (&String, &ModelRecord)| {
            let decodes = |member: &&Member| member.is_usable() && member.info.role.decodes();
            let serves = |member: &&Member| record.in_force == Some(member.fingerprint);
            self.of_model(name).filter(decodes).find(serves).map(|member| member.info.model.clone())
        };
        self.by_model.iter().filter_map(model).collect()
    }

    /// Returns the reason why a node cannot be used, independent of other nodes: it speaks another protocol,
    /// its key of block hashes or its tokenizer differs from the router's, or it does not have the weights
    /// that the operator requires.
    pub(super) fn refusal(&self, node: &NodeInfo, models: &RouterModels) -> Option<String> {
        if let Err(mismatch) = types::node::PROTOCOL.agree(node.protocol) {
            return Some(mismatch.to_string());
        }
        if let Err(mismatch) = node.model.fingerprint.agree_on_key(&self.block_hash_key) {
            return Some(format!(
                "{mismatch}: set the same `cluster.secret_file` on the router and on the node"
            ));
        }
        let digest = node.model.fingerprint.digest();
        let wanted = self.wanted.as_ref();
        let wanted = wanted.filter(|wanted| wanted.model.is_empty() || wanted.model == node.model.name);
        if let Some(WantedFingerprint { fingerprint, .. }) = wanted.filter(|it| it.fingerprint != digest) {
            return Some(format!(
                "the router's `model.fingerprint` is {fingerprint}, the node's is {digest}"
            ));
        }
        if node.role.pools() { None } else { models.learn(&node.model).err().map(|error| error.to_string()) }
    }

    /// Adds a member. If the node existed before the router, the decision about its model waits for more
    /// nodes.
    pub(super) fn insert(&mut self, member: Member, source: MemberSource, now: Instant) {
        let (computes, epoch) = (member.computes(), member.info.epoch);
        let name = member.info.model.name.clone();
        self.by_id.insert(member.info.id.clone(), member);
        if computes {
            let settles = (epoch < self.started).then_some(SettlePeriod { until: now + SETTLE, source });
            self.by_model.entry(name).or_insert(ModelRecord {
                in_force: None,
                reason: Reason::NoneServes,
                settles,
                postponed_since: None,
            });
        }
    }

    /// Chooses the serving group of every model again.
    pub(super) fn decide(&mut self, models: &RouterModels, now: Instant) {
        let mut by_model = std::mem::take(&mut self.by_model);
        by_model.retain(|name, _| self.of_model(name).next().is_some());
        for (name, record) in &mut by_model {
            let nodes: Vec<GroupNode> = self.of_model(name).map(Member::group_node).collect();
            record.decide(name, &nodes, now);
        }
        self.by_model = by_model;
        self.fit(models);
        for member in self.by_id.values() {
            let word = self.work_status_of(member);
            member.word.send_if_modified(|told| std::mem::replace(told, word.clone()) != word);
        }
    }

    /// Returns the nodes of a model that may be in a group.
    fn of_model(&self, name: &str) -> impl Iterator<Item = &Member> {
        self.by_id.values().filter(move |member| member.computes() && member.info.model.name == *name)
    }

    /// Returns whether a decision is postponed, so that time alone may change it.
    pub(super) fn is_postponed(&self) -> bool {
        self.by_model.values().any(|record| record.reason.is_postponed())
    }

    /// Adapts the router's models to the serving groups. A request is accepted if a node of its group could
    /// serve it.
    fn fit(&self, models: &RouterModels) {
        for (name, record) in &self.by_model {
            let chosen = |member: &&Member| record.in_force == Some(member.fingerprint);
            if let Some(member) = self.of_model(name).find(chosen) {
                models.replace_learned(&member.info.model);
            }
        }
        let chosen = |member: &&Member| {
            let in_force = self.in_force(&member.info.model.name);
            member.computes() && in_force.is_none_or(|digest| digest == member.fingerprint)
        };
        models.fit(self.by_id.values().filter(chosen).map(|member| &member.info.model));
    }

    /// Applies an update from a node's status stream. An update of another life of the node is ignored.
    /// Returns true if the node's usability changed.
    pub(super) fn update(&mut self, info: &NodeInfo, update: NodeReport, now: Instant) -> bool {
        let Some(member) = self.life_of(info) else { return false };
        let before = member.link.clone();
        match update {
            NodeReport::Load(load) => {
                member.node.report(load, now);
                member.is_suspect = false;
                if member.link != NodeState::Draining || member.stream_is_new {
                    member.link = NodeState::Ready;
                }
            }
            NodeReport::Draining => member.link = NodeState::Draining,
        }
        member.stream_is_new = false;
        member.no_stream = None;
        member.link != before
    }

    /// Notes that a node's status stream has ended, for any reason.
    pub(super) fn stream_ended(&mut self, info: &NodeInfo) {
        if let Some(member) = self.life_of(info) {
            member.stream_is_new = true;
        }
    }

    /// Notes why there is no status stream, and marks the node as unreachable. Returns true if it was usable before.
    pub(super) fn unreachable(&mut self, info: &NodeInfo, reason: String) -> bool {
        let Some(member) = self.life_of(info) else { return false };
        let is_new = member.no_stream.as_ref() != Some(&reason);
        if member.link == NodeState::Connecting && is_new {
            info!(node = %info.id, address = info.address, reason, "status stream from node cannot be opened");
        }
        member.no_stream = Some(reason);
        if member.link != NodeState::Ready {
            return false;
        }
        warn!(node = %info.id, reason = member.no_stream, "status stream from node lost");
        member.link = NodeState::Unreachable;
        if member.is_missing {
            info!(node = %info.id, "node of the members file has left the cluster");
            self.by_id.remove(&info.id);
        }
        true
    }

    /// Returns the member with this id, if its epoch is the same.
    fn life_of(&mut self, info: &NodeInfo) -> Option<&mut Member> {
        self.by_id.get_mut(&info.id).filter(|member| member.info.epoch == info.epoch)
    }

    pub(super) fn ready(&self) -> Result<(), String> {
        if !self.models().is_empty() {
            return Ok(());
        }
        let states: Vec<String> = self
            .by_id
            .values()
            .map(|member| format!("{} is {}", member.info.id, self.state(member).as_str()))
            .collect();
        let known = if states.is_empty() { "no node is known".to_owned() } else { states.join(", ") };
        Err(format!("no decode node is ready: {known}"))
    }

    // === reports to operators and nodes ===

    pub(super) fn state(&self, member: &Member) -> NodeState {
        if let Some(refusal) = &member.refusal {
            return NodeState::Refused(refusal.clone());
        }
        let record = self.by_model.get(&member.info.model.name);
        match record.map(|record| (record.in_force, record.reason)) {
            Some((None, Reason::SettlePeriod)) if member.link == NodeState::Ready => NodeState::Connecting,
            Some((Some(in_force), reason)) if in_force != member.fingerprint => {
                NodeState::Superseded(self.difference(member, in_force, reason))
            }
            _ => member.link.clone(),
        }
    }

    fn difference(&self, member: &Member, in_force: FingerprintDigest, reason: Reason) -> String {
        let ModelInfo { name, fingerprint, .. } = &member.info.model;
        let chosen: Vec<&Member> =
            self.of_model(name).filter(|other| other.fingerprint == in_force).collect();
        let mismatch = chosen.first().and_then(|other| other.info.model.fingerprint.agree(fingerprint).err());
        let mismatch = mismatch.map(|mismatch| format!(": {mismatch}")).unwrap_or_default();
        let (n, own) = (chosen.len(), member.fingerprint);
        format!("`{name}` is served by {n} nodes with {in_force} ({reason}), this node has {own}{mismatch}")
    }

    /// Returns the router's report to the member: its refusal, and whether a rollout must wait.
    fn work_status_of(&self, member: &Member) -> WorkStatus {
        let state = self.state(member);
        let refusal = state.reason().map(str::to_owned);
        let rollout_waits_for = match &state {
            NodeState::Ready => None,
            NodeState::Superseded(reason) if member.link == NodeState::Ready => {
                let nodes: Vec<GroupNode> =
                    self.of_model(&member.info.model.name).map(Member::group_node).collect();
                groups::missing(&nodes, member.fingerprint)
                    .map(|missing| format!("{reason}; no usable {missing} node agrees with it"))
            }
            NodeState::Refused(reason) | NodeState::Superseded(reason) => Some(reason.clone()),
            other => Some(format!("the router sees the node as {}", other.as_str())),
        };
        WorkStatus { refusal, rollout_waits_for }
    }

    /// Returns the nodes of the group that serves each model.
    pub(super) fn groups_in_force(&self) -> Vec<(String, Vec<GroupMember>)> {
        let member = |member: &Member| GroupMember {
            info: Arc::clone(&member.info),
            state: self.state(member),
            load: member.node.load(),
            reported: member.node.reported(),
            assigned_tokens: member.node.assigned.unreported().work.n_tokens,
        };
        let of_model = |(name, record): (&String, &ModelRecord)| {
            let serves = |one: &&Member| record.in_force == Some(one.fingerprint);
            (name.clone(), self.of_model(name).filter(serves).map(member).collect())
        };
        self.by_model.iter().map(of_model).collect()
    }

    pub(super) fn groups(&self) -> Vec<ModelGroups> {
        let of_model = |(name, record): (&String, &ModelRecord)| {
            let nodes: Vec<GroupNode> = self.of_model(name).map(Member::group_node).collect();
            let group = |summarize: groups::GroupSummary| {
                let members: Vec<&Member> = self
                    .of_model(name)
                    .filter(|member| member.fingerprint == summarize.fingerprint)
                    .collect();
                Some(Group {
                    model: members.first()?.info.clone(),
                    fingerprint: summarize.fingerprint,
                    nodes: members.iter().map(|member| member.info.id.clone()).collect(),
                    can_decode: summarize.can_decode(),
                })
            };
            ModelGroups {
                name: name.clone(),
                in_force: record.in_force,
                why: record.reason.to_string(),
                groups: groups::summarize(&nodes).into_iter().filter_map(group).collect(),
            }
        };
        self.by_model.iter().map(of_model).collect()
    }
}

impl ModelRecord {
    fn decide(&mut self, name: &str, nodes: &[GroupNode], now: Instant) {
        let is_connecting = nodes.iter().any(|node| node.link == Usability::Possible);
        let is_settling = self
            .settles
            .is_some_and(|it| now < it.until && (it.source == MemberSource::OneEvent || is_connecting));
        if !is_settling {
            self.settles = None;
        }
        let postponed_too_long = self.postponed_since.is_some_and(|since| now >= since + POSTPONE_MAX);
        let known = DecisionContext { in_force: self.in_force, is_settling, postponed_too_long };
        let decision = groups::decide(nodes, known);
        self.postponed_since =
            (decision.reason == Reason::Expecting).then(|| self.postponed_since.unwrap_or(now));
        self.reason = decision.reason;
        let before = std::mem::replace(&mut self.in_force, decision.in_force);
        match (before, decision.in_force) {
            (before, after) if before == after => {}
            (Some(before), Some(after)) => {
                info!(model = name, %before, %after, why = %decision.reason, "another group of nodes now serves the model");
            }
            (None, Some(after)) => {
                info!(model = name, group = %after, why = %decision.reason, "group of nodes chosen to serve the model")
            }
            (_, None) => info!(model = name, why = %decision.reason, "no group of nodes serves the model"),
        }
    }
}
