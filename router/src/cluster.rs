//! The usable nodes: the registry's members, combined with their status streams.
//!
//! `Members` is the state, and `groups` decides which nodes serve a model. [`Cluster`] is the handle to both.
//! One task applies the registry's events. Two tasks per member follow its status stream and report to it
//! whether it gets work.

mod assigned;
mod groups;
pub mod index;
mod members;
mod members_file;
mod mirror;
mod routable;

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use chassis::{Gate, Task, World, spawn_guarded};
use futures::StreamExt as _;
use registry::{MembersFile, MembershipEvent, OldMembers, Registry, RegistryError};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tracing::{debug, info, warn};
use types::{BlockHash, Epoch, ModelInfo, NodeId, NodeInfo, NodeLoad, Prompt, PromptWork, RequestedModel};

pub use assigned::{Assignment, RunningStream};
pub use index::{CacheKnowledge, IndexedNode};
pub use members::{Group, GroupMember, ModelGroups, NodeState, WantedFingerprint};
pub use mirror::Gap;

use crate::policy::{Arm, Ask, ClusterView, Decision};
use crate::predictions::RouteLearner;
use crate::rpc::{NodeClient, NodeReport, Standing, StatusUpdate};
use crate::text::RouterModels;
use index::PrefixIndex;
use members::{Member, MemberSource, Members, WorkStatus};
use members_file::{MembersFileTask, due};
use mirror::CacheMirror;
use routable::{Routable, RoutableNode};

/// The pauses before a broken status stream is opened again: they double from the first value to the last.
const FOLLOW_AGAIN: std::ops::RangeInclusive<Duration> =
    Duration::from_millis(50)..=Duration::from_millis(500);

/// The interval at which a postponed decision is made again.
const DECIDE_AGAIN: Duration = Duration::from_millis(100);

/// The interval of reports to a node, and the time for which a report is valid.
const TELL_AGAIN: Duration = Duration::from_secs(2);
const BELIEVED_FOR: Duration = Duration::from_secs(6);

/// The largest number of a prompt's blocks that the router hashes, so that a long prompt delays no other. Routing
/// ignores cached blocks after them.
const HASHED_BLOCKS_MAX: usize = 8192;

/// A handle to the router's view of the cluster. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Cluster {
    shared: Arc<Shared>,
}

struct Shared {
    world: World,
    gate: Gate,
    /// The router's models. Nodes that join may add some.
    models: RouterModels,
    /// The mutex is held for one look-up or change, never across an await.
    members: Mutex<Members>,
    /// The blocks of all nodes. Routing reads it without the members' lock.
    index: PrefixIndex,
    /// The usable nodes. Routing reads them without the members' lock.
    routable: RwLock<Arc<Routable>>,
    /// The costs of routes, learned from requests.
    learner: RouteLearner,
    /// A counter of routes. It orders the last uses of nodes.
    turns: AtomicU64,
    /// A counter of changes of the set of usable nodes.
    decided: watch::Sender<u64>,
    /// A signal that the load of a node, or the set of usable nodes, has changed.
    reported: Arc<Notify>,
    /// The router's name, by which nodes distinguish routers.
    router: String,
    started: Instant,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cluster").finish_non_exhaustive()
    }
}

impl Cluster {
    /// Makes the view of a cluster without nodes. `wanted` is the fingerprint that the operator requires, if
    /// any.
    pub fn new(world: World, gate: Gate, models: RouterModels, wanted: Option<WantedFingerprint>) -> Self {
        let epoch: Epoch = world.epoch();
        let members = Mutex::new(Members::new(epoch, wanted, world.identity().block_hash_key()));
        let router = format!("router-{epoch}");
        let started = world.now();
        let learner = RouteLearner::default();
        let shared = Shared {
            world,
            gate,
            models,
            members,
            index: PrefixIndex::default(),
            routable: RwLock::default(),
            learner,
            turns: AtomicU64::new(0),
            decided: watch::Sender::new(0),
            reported: Arc::default(),
            router,
            started,
        };
        Self { shared: Arc::new(shared) }
    }

    /// Spawns the task that follows the registry, until the gate closes or the returned task is dropped.
    /// `file` provides the last known members while the registry is unreachable.
    pub async fn follow(
        &self,
        registry: &dyn Registry,
        file: Option<MembersFile>,
    ) -> Result<Task<()>, RegistryError> {
        let mut events = registry.watch().await?;
        let cluster = self.clone();
        Ok(spawn_guarded(&self.shared.gate, "membership", async move {
            let mut members_file = file.map(MembersFileTask::new);
            let mut decided = cluster.shared.decided.subscribe();
            loop {
                decided.borrow_and_update();
                let is_postponed = cluster.members().is_postponed();
                tokio::select! {
                    biased;
                    event = events.next() => match event {
                        Some(event) => {
                            cluster.apply(event);
                            members_file.iter_mut().for_each(MembersFileTask::changed);
                        }
                        None => return,
                    },
                    // Another task has made a decision, which may have been postponed, so the loop checks
                    // again.
                    _ = decided.changed() => {}
                    () = due(&members_file) => cluster.remember(&mut members_file).await,
                    () = tokio::time::sleep(DECIDE_AGAIN), if is_postponed => cluster.decide(&mut cluster.members()),
                }
            }
        }))
    }

    /// Returns the usable nodes for a prompt, except `without`, with what each of them has of its KV.
    pub fn view(&self, ask: &Ask<'_>, without: &[NodeId]) -> ClusterView {
        let now = self.shared.world.now();
        let matches = self.shared.index.matches(ask.hashes, now);
        let nodes = self.routable().view(&ask.prompt.model, &matches, without, now);
        ClusterView { nodes, learned: self.shared.learner.costs() }
    }

    /// Returns the costs of routes, learned from requests.
    pub fn learner(&self) -> &RouteLearner {
        &self.shared.learner
    }

    /// Returns the hashes of a prompt's full blocks before its last token, which no node takes from its cache.
    /// Returns none while no node of the model is usable.
    pub fn hashes(&self, prompt: &Prompt) -> Vec<BlockHash> {
        let routable = self.routable();
        let layout = routable.nodes(&prompt.model).next().map(|node| &node.info.model.layout);
        let (Some(layout), Some((_, cacheable))) = (layout, prompt.tokens.split_last()) else {
            return Vec::new();
        };
        let block_tokens = usize::from(layout.block_tokens);
        let n_tokens = cacheable.len().min(HASHED_BLOCKS_MAX * block_tokens);
        let key = self.shared.world.identity().block_hash_key();
        prompt.hasher(&key, block_tokens).hashes(&cacheable[..n_tokens])
    }

    /// Counts a prompt against the nodes of its route until the returned value is dropped, or the nodes report
    /// the prompt themselves. The node that computes the prompt is expected to have its blocks before it computes a later
    /// prompt. A node that receives them does not wait for them, so they count when it reports them.
    pub fn assign(&self, ask: &Ask<'_>, decision: &Decision) -> Assignment {
        let Decision { route, arm, terms, .. } = decision;
        let missing = PromptWork::of(u64::from(terms.cached_tokens)..ask.n_tokens());
        let computes = |id| (id, ask.hashes, missing);
        let receives = |id| (id, &[][..], PromptWork::default());
        let prefill = route.prefill.as_ref().map(|node| computes(&node.id));
        let decode = &route.decode.id;
        let decode = if *arm == Arm::Local { computes(decode) } else { receives(decode) };
        let now = self.shared.world.now();
        let share = |(id, blocks, work)| {
            let turn = self.shared.turns.fetch_add(1, Ordering::Relaxed) + 1;
            Some(self.node(id)?.assign(blocks, work, turn, now))
        };
        Assignment { prefill: prefill.and_then(share), decode: share(decode) }
    }

    /// Returns the signal that a node may have room again. It wakes one task.
    pub fn reported(&self) -> Arc<Notify> {
        Arc::clone(&self.shared.reported)
    }

    /// Returns the number of prompts that are assigned to members and not in their reports.
    pub fn n_assigned(&self) -> u32 {
        let members = self.members();
        members.by_id.values().map(|member| member.node.assigned.unreported().n_prompts).sum()
    }

    /// Returns the number of nodes for each [`CacheKnowledge`]. Pool nodes are not counted: they report no
    /// blocks.
    pub fn n_known(&self) -> [(CacheKnowledge, usize); 3] {
        let members = self.members();
        let computes = members.by_id.values().filter(|member| !member.info.role.pools());
        let known: Vec<CacheKnowledge> = computes.map(|member| member.node.blocks.knowledge()).collect();
        CacheKnowledge::ALL.map(|kind| (kind, known.iter().filter(|known| **known == kind).count()))
    }

    fn routable(&self) -> Arc<Routable> {
        self.shared.routable.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn node(&self, id: &NodeId) -> Option<Arc<RoutableNode>> {
        self.members().by_id.get(id).map(|member| Arc::clone(&member.node))
    }

    /// Returns the pool node that keeps sequences that begin with this block, for KV of this model; `None` if
    /// there is no such node.
    pub fn keeper(&self, first: BlockHash, model: &ModelInfo) -> Option<Arc<NodeInfo>> {
        self.members().keeper(first, model)
    }

    /// Marks a pool node as failed: it gets no KV until its next report. Returns true if it was not marked
    /// before.
    pub fn suspect(&self, id: &NodeId) -> bool {
        let mut members = self.members();
        members.by_id.get_mut(id).is_some_and(|member| !std::mem::replace(&mut member.is_suspect, true))
    }

    /// Returns the client of a node; `None` if the node has left.
    pub fn client(&self, id: &NodeId) -> Option<NodeClient> {
        self.members().by_id.get(id).map(|member| member.client.clone())
    }

    /// Returns the models for which a usable decode node exists.
    pub fn models(&self) -> Vec<ModelInfo> {
        self.members().models()
    }

    /// Returns the groups of all models, with the serving group of each.
    pub fn groups(&self) -> Vec<ModelGroups> {
        self.members().groups()
    }

    /// Returns the nodes of the group that serves each model, usable or not.
    pub(crate) fn groups_in_force(&self) -> Vec<(String, Vec<GroupMember>)> {
        self.members().groups_in_force()
    }

    /// Returns the load of a node according to its last report.
    pub fn load(&self, id: &NodeId) -> NodeLoad {
        self.members().by_id.get(id).map(|member| member.node.load()).unwrap_or_default()
    }

    /// Checks that requests can be served. An error is the reason why not.
    pub fn ready(&self) -> Result<(), String> {
        self.members().ready()
    }

    /// Checks that the router has discovered all nodes that existed before it. Only then does a model without
    /// a node count as nonexistent.
    pub fn knows_nodes(&self) -> Result<(), String> {
        self.ready()?;
        let settled = self.shared.started + members::SETTLE;
        if self.shared.world.now() < settled {
            return Err("the router has just started, and may not know all nodes yet".to_owned());
        }
        Ok(())
    }

    /// Returns the reason why there is no node for a prompt of this model.
    pub fn why_no_node(&self, model: &RequestedModel) -> String {
        match (&model.fingerprint, self.ready()) {
            (Some(begun), _) => {
                let name = &model.name;
                format!(
                    "the answer began with `{name}` {begun}, and no decode node with these weights is ready"
                )
            }
            (None, Err(reason)) => reason,
            (None, Ok(())) => format!("no decode node of `{}` is ready", model.name),
        }
    }

    /// Returns the sum of all members' engine steps by their last reports. It changes when a member computes,
    /// joins or leaves.
    pub fn n_steps(&self) -> u64 {
        self.members().by_id.values().fold(0, |sum, member| sum.wrapping_add(member.node.load().steps_total))
    }

    /// Returns a node's prefix cache as the index has it; `None` if the node is no member.
    pub fn cache(&self, id: &NodeId) -> Option<Arc<IndexedNode>> {
        self.node(id).map(|node| Arc::clone(&node.blocks))
    }

    /// Returns whether a member is known only from the members file, without confirmation by the registry.
    pub fn is_old(&self, id: &NodeId) -> bool {
        self.members().by_id.get(id).is_some_and(|member| member.is_old)
    }

    /// Returns why there is no status stream from a member, if the last attempt to open one failed.
    pub fn no_stream(&self, id: &NodeId) -> Option<String> {
        self.members().by_id.get(id)?.no_stream.clone()
    }

    /// Returns all members, usable or not.
    pub fn everyone(&self) -> Vec<(Arc<NodeInfo>, NodeState)> {
        let members = self.members();
        members.by_id.values().map(|member| (member.info.clone(), members.state(member))).collect()
    }

    /// Removes all members and stops following them.
    pub fn forget(&self) {
        let mut members = self.members();
        members.by_id.clear();
        self.publish(&members);
    }

    fn apply(&self, event: MembershipEvent) {
        match event {
            MembershipEvent::Joined(node) => self.join(node, MemberSource::OneEvent),
            MembershipEvent::Left { id, epoch } => {
                let mut members = self.members();
                if members.by_id.get(&id).is_some_and(|member| member.info.epoch == epoch) {
                    info!(node = %id, "node left the cluster");
                    members.by_id.remove(&id);
                    self.decide(&mut members);
                }
            }
            MembershipEvent::Snapshot(nodes) => {
                self.members().retain_listed(&nodes);
                nodes.into_iter().for_each(|node| self.join(node, MemberSource::WholeList));
                self.decide(&mut self.members());
            }
        }
    }

    /// Reads the members file while the registry gives no answer, and writes it after changes.
    async fn remember(&self, members_file: &mut Option<MembersFileTask>) {
        let Some(members_file) = members_file else { return };
        if members_file.heard_registry() {
            let nodes = self.everyone().into_iter().map(|(info, _)| (*info).clone()).collect();
            return members_file.write(OldMembers { nodes, written: self.shared.world.unix_time() }).await;
        }
        let Some(old) = members_file.read().await else { return };
        let age = self.shared.world.unix_time().saturating_sub(old.written);
        warn!(
            n_members = old.nodes.len(),
            age_s = age.as_secs(),
            "registry gives no answer, using the members from the file"
        );
        let ids: Vec<NodeId> = old.nodes.iter().map(|node| node.id.clone()).collect();
        old.nodes.into_iter().for_each(|node| self.join(node, MemberSource::OneEvent));
        let mut members = self.members();
        ids.iter().for_each(|id| members.mark_old(id));
    }

    /// Adds a node, or a new life of it. A node that is already a member is not changed.
    fn join(&self, node: NodeInfo, source: MemberSource) {
        if let Some(member) = self.members().by_id.get_mut(&node.id).filter(|member| *member.info == node) {
            member.confirm();
            return;
        }
        info!(node = %node.id, epoch = %node.epoch, role = %node.role, address = node.address, "node joined the cluster");
        let info = Arc::new(node);
        let client = NodeClient::new(&self.shared.world, &self.shared.gate, &info);
        let node = Arc::new(RoutableNode::new(info.clone(), self.shared.index.node()));
        let mirror = CacheMirror::new(Arc::clone(&node.blocks));
        let follow = self.clone().status_of(info.clone(), client.clone(), mirror);
        let (word, told) = watch::channel(WorkStatus::unknown());
        let tell = self.clone().tell(info.clone(), client.clone(), told);
        let mut members = self.members();
        let refusal = members.refusal(&info, &self.shared.models);
        if let Some(reason) = &refusal {
            warn!(node = %info.id, reason, "node refused by the router");
        }
        let tasks = [
            spawn_guarded(&self.shared.gate, "status", follow),
            spawn_guarded(&self.shared.gate, "standing", tell),
        ];
        members.insert(Member::new(node, refusal, client, word, tasks), source, self.shared.world.now());
        self.decide(&mut members);
    }

    /// Chooses again which group of nodes serves each model.
    fn decide(&self, members: &mut Members) {
        members.decide(&self.shared.models, self.shared.world.now());
        self.publish(members);
        self.shared.decided.send_modify(|count| *count += 1);
    }

    /// Makes the usable nodes known to routing.
    fn publish(&self, members: &Members) {
        let routable = Arc::new(members.routable());
        *self.shared.routable.write().unwrap_or_else(PoisonError::into_inner) = routable;
        self.shared.reported.notify_one();
    }

    /// Reports to a node whether it gets work: at every change, and again before the last report expires.
    async fn tell(self, info: Arc<NodeInfo>, client: NodeClient, mut word: watch::Receiver<WorkStatus>) {
        loop {
            let WorkStatus { refusal, rollout_waits_for } = word.borrow_and_update().clone();
            let router = self.shared.router.clone();
            let standing = Standing { router, refusal, rollout_waits_for, believed_for: BELIEVED_FOR };
            if let Err(failure) = client.tell(standing).await {
                debug!(node = %info.id, refusal = %failure.refusal, "could not report to the node whether this router sends it requests");
            }
            let _ = tokio::time::timeout(TELL_AGAIN, word.changed()).await;
        }
    }

    /// Follows one node's status stream while the node is a member. Opens the stream again when it breaks or
    /// has a gap; a new stream begins with the complete state.
    async fn status_of(self, info: Arc<NodeInfo>, client: NodeClient, mut mirror: CacheMirror) {
        let mut pause = *FOLLOW_AGAIN.start();
        loop {
            let followed = self.follow_status(&info, &client, &mut mirror, &mut pause).await;
            mirror.forget();
            self.members().stream_ended(&info);
            match followed {
                Ok(reason) => self.unreachable(&info, reason),
                Err(gap) => {
                    warn!(node = %info.id, %gap, "block events from the node have a gap, asking for all blocks")
                }
            }
            let jitter = pause.mul_f64((self.shared.world.draw() % 1000) as f64 / 1000.0);
            tokio::time::sleep(pause / 2 + jitter / 2).await;
            pause = (pause * 2).min(*FOLLOW_AGAIN.end());
        }
    }

    /// Reads one status stream until it breaks or has a gap. Returns why it broke. Every update resets the pause.
    async fn follow_status(
        &self,
        info: &NodeInfo,
        client: &NodeClient,
        mirror: &mut CacheMirror,
        pause: &mut Duration,
    ) -> Result<String, Gap> {
        let mut updates = match client.status().await {
            Ok(updates) => updates,
            Err(failure) => return Ok(failure.refusal.reason),
        };
        loop {
            match updates.next().await {
                Ok(Some(StatusUpdate::Report(report))) => self.update(info, report),
                Ok(Some(StatusUpdate::Blocks(number, event))) => mirror.apply(number, &event)?,
                Ok(None) => return Ok("the node has ended it".to_owned()),
                Err(failure) => return Ok(failure.refusal.reason),
            }
            *pause = *FOLLOW_AGAIN.start();
        }
    }

    fn update(&self, info: &NodeInfo, report: NodeReport) {
        let mut members = self.members();
        if members.update(info, report, self.shared.world.now()) {
            self.decide(&mut members);
        }
        drop(members);
        self.shared.reported.notify_one();
    }

    fn unreachable(&self, info: &NodeInfo, reason: String) {
        let mut members = self.members();
        if members.unreachable(info, reason) {
            self.decide(&mut members);
        }
    }

    fn members(&self) -> MutexGuard<'_, Members> {
        self.shared.members.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod never_worse;
#[cfg(test)]
mod tests;
