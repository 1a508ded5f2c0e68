//! Who is usable now: the registry's members, joined with what their status streams say.
//!
//! `Members` is the state and changes only in its own methods, which are tested without a runtime. [`Cluster`] is the
//! handle around it: one task applies the registry's events, and one task per member follows its status stream.

mod cached;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use chassis::{Gate, Task, World, spawn_guarded};
use futures::StreamExt as _;
use registry::{MembershipEvent, Registry, RegistryError};
use tracing::{info, warn};
use types::place::keepers;
use types::{BlockHash, ModelInfo, NodeId, NodeInfo, NodeLoad};

pub use cached::{CachedBlocks, Gap};

use crate::policy::{ClusterView, NodeView, Route};
use crate::rpc::{NodeClient, StatusUpdate};
use crate::text::RouterModels;

/// How long to wait before a broken status stream is opened again: doubling from the first to the last.
const FOLLOW_AGAIN: std::ops::RangeInclusive<Duration> = Duration::from_millis(50)..=Duration::from_secs(2);

/// A handle to the cluster as the router sees it. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Cluster {
    shared: Arc<Shared>,
}

struct Shared {
    world: World,
    gate: Gate,
    /// Learns the models of the nodes that join.
    models: RouterModels,
    /// Held for a look or a change, never across an await.
    members: Mutex<Members>,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cluster").finish_non_exhaustive()
    }
}

impl Cluster {
    pub fn new(world: World, gate: Gate, models: RouterModels) -> Self {
        Self { shared: Arc::new(Shared { world, gate, models, members: Mutex::new(Members::default()) }) }
    }

    /// Follows the registry until the gate closes or the answer is dropped.
    pub async fn follow(&self, registry: &dyn Registry) -> Result<Task<()>, RegistryError> {
        let mut events = registry.watch().await?;
        let cluster = self.clone();
        Ok(spawn_guarded(&self.shared.gate, "membership", async move {
            while let Some(event) = events.next().await {
                cluster.apply(event);
            }
        }))
    }

    /// The usable nodes, without those that a prompt has failed on.
    pub fn view(&self, without: &[NodeId]) -> ClusterView {
        self.members().view(without)
    }

    /// Remembers that a route was taken, so that the next one sees it before the nodes report it.
    pub fn assign(&self, route: &Route, n_tokens: usize) {
        let mut members = self.members();
        for node in route.prefill.iter().chain([&route.decode]) {
            members.assign(&node.id, n_tokens);
        }
    }

    /// The pool node that keeps sequences which begin with this block, for KV of this kind; `None`: there is none.
    pub fn keeper(&self, first: BlockHash, model: &ModelInfo) -> Option<Arc<NodeInfo>> {
        self.members().keeper(first, model)
    }

    /// A pool node has failed. Until it speaks again it keeps nothing more. True if that is news.
    pub fn suspect(&self, id: &NodeId) -> bool {
        let mut members = self.members();
        members.by_id.get_mut(id).is_some_and(|member| !std::mem::replace(&mut member.is_suspect, true))
    }

    /// How to speak to a node; `None` once it has left.
    pub fn client(&self, id: &NodeId) -> Option<NodeClient> {
        self.members().by_id.get(id).map(|member| member.client.clone())
    }

    /// The models that at least one usable node decodes.
    pub fn models(&self) -> Vec<ModelInfo> {
        let mut models: BTreeMap<String, ModelInfo> = BTreeMap::new();
        for node in self.view(&[]).nodes.iter().filter(|node| node.info.role.decodes()) {
            models.entry(node.info.model.name.clone()).or_insert_with(|| node.info.model.clone());
        }
        models.into_values().collect()
    }

    /// Whether tokens can flow; otherwise the reason why not.
    pub fn ready(&self) -> Result<(), String> {
        self.members().ready()
    }

    /// Steps that the members have run, by what they said last. It changes when one of them computes, comes or goes.
    pub fn n_steps(&self) -> u64 {
        self.members().by_id.values().fold(0, |sum, member| sum.wrapping_add(member.load.steps_total))
    }

    /// What a node has cached, as far as it has said so.
    pub fn cached(&self, id: &NodeId) -> CachedBlocks {
        self.members().by_id.get(id).map(|member| member.cached.clone()).unwrap_or_default()
    }

    /// Everyone who is known, usable or not.
    pub fn everyone(&self) -> Vec<(Arc<NodeInfo>, NodeState)> {
        self.members().by_id.values().map(|member| (member.info.clone(), member.state.clone())).collect()
    }

    /// Forgets everyone, and stops following them.
    pub fn forget(&self) {
        self.members().by_id.clear();
    }

    fn apply(&self, event: MembershipEvent) {
        match event {
            MembershipEvent::Joined(node) => self.join(node),
            MembershipEvent::Left { id, epoch } => {
                let mut members = self.members();
                if members.by_id.get(&id).is_some_and(|member| member.info.epoch == epoch) {
                    info!(node = %id, "node left");
                    members.by_id.remove(&id);
                    members.fit(&self.shared.models);
                }
            }
            MembershipEvent::Snapshot(nodes) => {
                let mut members = self.members();
                members.by_id.retain(|id, _| nodes.iter().any(|node| node.id == *id));
                members.fit(&self.shared.models);
                drop(members);
                nodes.into_iter().for_each(|node| self.join(node));
            }
        }
    }

    /// Takes a node in, or a new life of it. A node that is known already is left as it is.
    fn join(&self, node: NodeInfo) {
        if self.members().by_id.get(&node.id).is_some_and(|member| *member.info == node) {
            return;
        }
        info!(node = %node.id, epoch = %node.epoch, role = %node.role, address = node.address, "node joined");
        let info = Arc::new(node);
        let client = NodeClient::new(&self.shared.world, &info);
        let follower = self.clone().status_of(info.clone(), client.clone());
        let follow = spawn_guarded(&self.shared.gate, "status", follower);
        let mut members = self.members();
        let state = members.admit(&info, &self.shared.models);
        if let NodeState::Refused(reason) = &state {
            warn!(node = %info.id, reason, "node refused");
        }
        members.by_id.insert(info.id.clone(), Member::new(info, state, client, follow));
        members.fit(&self.shared.models);
    }

    /// Follows one node's status stream for as long as the node is a member, opening it again whenever it breaks or has
    /// lost a word: a new stream begins with all that there is to know.
    async fn status_of(self, info: Arc<NodeInfo>, client: NodeClient) {
        let mut pause = *FOLLOW_AGAIN.start();
        loop {
            match self.follow_status(&info, &client, &mut pause).await {
                Ok(()) => self.members().unreachable(&info),
                Err(gap) => warn!(node = %info.id, %gap, "block events have a gap, asking for all blocks"),
            }
            let jitter = pause.mul_f64((self.shared.world.draw() % 1000) as f64 / 1000.0);
            tokio::time::sleep(pause / 2 + jitter / 2).await;
            pause = (pause * 2).min(*FOLLOW_AGAIN.end());
        }
    }

    /// Until the stream breaks, or has lost a word. A word that comes makes the next pause short.
    async fn follow_status(
        &self,
        info: &NodeInfo,
        client: &NodeClient,
        pause: &mut Duration,
    ) -> Result<(), Gap> {
        let Ok(mut updates) = client.status().await else { return Ok(()) };
        while let Ok(Some(update)) = updates.next().await {
            self.members().update(info, update)?;
            *pause = *FOLLOW_AGAIN.start();
        }
        Ok(())
    }

    fn members(&self) -> MutexGuard<'_, Members> {
        self.shared.members.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === state ===

/// How usable a node is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeState {
    /// Announced, but its status stream has not spoken yet.
    Connecting,
    Ready,
    /// It takes no new work.
    Draining,
    /// Its status stream broke; it is tried again.
    Unreachable,
    /// It does not fit to the others.
    Refused(String),
}

impl NodeState {
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Connecting => "connecting",
            Self::Ready => "ready",
            Self::Draining => "draining",
            Self::Unreachable => "unreachable",
            Self::Refused(_) => "refused",
        }
    }
}

#[derive(Default)]
struct Members {
    by_id: BTreeMap<NodeId, Member>,
    /// Counts routes, for whose turn it is.
    turns: u64,
}

struct Member {
    info: Arc<NodeInfo>,
    state: NodeState,
    load: NodeLoad,
    assigned: u32,
    assigned_tokens: u64,
    last_turn: u64,
    /// It has failed since it spoke last.
    is_suspect: bool,
    cached: CachedBlocks,
    client: NodeClient,
    /// Ends with the member.
    _follow: Task<()>,
}

impl Member {
    fn new(info: Arc<NodeInfo>, state: NodeState, client: NodeClient, follow: Task<()>) -> Self {
        Self {
            info,
            state,
            load: NodeLoad::default(),
            assigned: 0,
            assigned_tokens: 0,
            last_turn: 0,
            is_suspect: false,
            cached: CachedBlocks::default(),
            client,
            _follow: follow,
        }
    }

    fn view(&self) -> NodeView {
        NodeView {
            info: self.info.clone(),
            load: self.load,
            assigned: self.assigned,
            assigned_tokens: self.assigned_tokens,
            last_turn: self.last_turn,
        }
    }
}

impl Members {
    fn view(&self, without: &[NodeId]) -> ClusterView {
        let usable =
            |member: &&Member| member.state == NodeState::Ready && !without.contains(&member.info.id);
        ClusterView { nodes: self.by_id.values().filter(usable).map(Member::view).collect() }
    }

    fn keeper(&self, first: BlockHash, model: &ModelInfo) -> Option<Arc<NodeInfo>> {
        let keeps = |member: &&Member| {
            let NodeInfo { role, model: kept, .. } = &*member.info;
            role.pools() && kept.name == model.name && kept.fingerprint == model.fingerprint
        };
        let usable = |member: &&Member| member.state == NodeState::Ready && !member.is_suspect;
        let ids = self.by_id.values().filter(keeps).filter(usable).map(|member| &member.info.id);
        let keeper = keepers(ids, first).first().copied()?;
        Some(self.by_id.get(keeper)?.info.clone())
    }

    fn assign(&mut self, id: &NodeId, n_tokens: usize) {
        self.turns += 1;
        if let Some(member) = self.by_id.get_mut(id) {
            member.assigned += 1;
            member.assigned_tokens += n_tokens as u64;
            member.last_turn = self.turns;
        }
    }

    /// Refuses a node that speaks another protocol, whose KV the others of its model could not read, or whose tokens mean
    /// something else to the router.
    fn admit(&self, node: &NodeInfo, models: &RouterModels) -> NodeState {
        let learned = || if node.role.pools() { Ok(()) } else { models.learn(&node.model) };
        let refusal = self.refusal(node).or_else(|| Some(learned().err()?.to_string()));
        refusal.map_or(NodeState::Connecting, NodeState::Refused)
    }

    /// Requests are taken that any of the nodes that compute could serve, and no longer ones.
    fn fit(&self, models: &RouterModels) {
        let computes =
            |member: &&Member| !member.info.role.pools() && !matches!(member.state, NodeState::Refused(_));
        models.fit(self.by_id.values().filter(computes).map(|member| &member.info.model));
    }

    /// Why the node does not fit to this build, or to the other nodes.
    fn refusal(&self, node: &NodeInfo) -> Option<String> {
        if let Err(mismatch) = types::node::PROTOCOL.agree(node.protocol) {
            return Some(mismatch.to_string());
        }
        let alike = |member: &&Member| {
            member.info.id != node.id
                && !member.info.role.pools()
                && member.info.model.name == node.model.name
                && !matches!(member.state, NodeState::Refused(_))
        };
        let other = self.by_id.values().find(alike)?;
        let mismatch = other.info.model.fingerprint.agree(&node.model.fingerprint).err()?;
        Some(format!("against {}: {mismatch}", other.info.id))
    }

    /// A word from the status stream of this life of the node; another life's is ignored.
    fn update(&mut self, info: &NodeInfo, update: StatusUpdate) -> Result<(), Gap> {
        let Some(member) = self.life_of(info) else { return Ok(()) };
        match update {
            StatusUpdate::Load(load) => {
                member.load = load;
                member.assigned = 0;
                member.assigned_tokens = 0;
                member.is_suspect = false;
                if matches!(member.state, NodeState::Connecting | NodeState::Unreachable) {
                    member.state = NodeState::Ready;
                }
            }
            StatusUpdate::Draining => member.state = NodeState::Draining,
            StatusUpdate::Blocks(number, event) => member.cached.apply(number, event)?,
        }
        Ok(())
    }

    fn unreachable(&mut self, info: &NodeInfo) {
        if let Some(member) = self.life_of(info)
            && member.state == NodeState::Ready
        {
            warn!(node = %info.id, "status stream broke");
            member.state = NodeState::Unreachable;
        }
    }

    /// The member, if it is still in this life and was not refused.
    fn life_of(&mut self, info: &NodeInfo) -> Option<&mut Member> {
        let member = self.by_id.get_mut(&info.id)?;
        let same_life = member.info.epoch == info.epoch;
        (same_life && !matches!(member.state, NodeState::Refused(_))).then_some(member)
    }

    fn ready(&self) -> Result<(), String> {
        let view = self.view(&[]);
        if view.nodes.iter().any(|node| node.info.role.decodes()) {
            return Ok(());
        }
        let states: Vec<String> = self
            .by_id
            .values()
            .map(|member| format!("{} is {}", member.info.id, member.state.as_str()))
            .collect();
        let known = if states.is_empty() { "no node is known".to_owned() } else { states.join(", ") };
        Err(format!("no decode node is ready: {known}"))
    }
}

#[cfg(test)]
mod tests;
