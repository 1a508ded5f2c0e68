//! The check before an awake node changes its role: another node answers and does the work that this node would stop
//! doing.
//!
//! Nodes change their roles one at a time, under a lock in the registry, so that each check sees the result of the
//! change before.

use std::time::Duration;

use chassis::World;
use chassis::identity::ExpectedPeer;
use chassis::rpc::{RpcLimits, channel, check_health};
use futures::{StreamExt as _, stream};
use registry::{Lock, LockName, MembershipEvent, Registry};
use tokio::time::Instant;
use tracing::warn;
use types::{ModelInfo, NodeId, NodeInfo, Role};

use crate::switch::SwitchRefusal;

/// The longest wait for the registry's list of members.
const MEMBERS_WITHIN: Duration = Duration::from_secs(3);

/// The longest wait for another node's change of role, and the pause between two looks.
const LOCK_WITHIN: Duration = Duration::from_secs(3);
const LOCK_AGAIN: Duration = Duration::from_millis(50);

/// The longest wait for the answer of one other node, and of all that are asked. A router waits 10 s for the begin of a
/// change: for the lock, the members and the answers.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);
const ANSWERS_WITHIN: Duration = Duration::from_secs(3);

/// The number of nodes that are asked at one time.
const ASKED_AT_ONCE: usize = 32;

/// A requested change of a node's role.
#[derive(Debug)]
pub(crate) struct RoleChange<'a> {
    pub(crate) id: &'a NodeId,
    pub(crate) model: &'a ModelInfo,
    pub(crate) from: Role,
    pub(crate) to: Role,
    pub(crate) world: &'a World,
}

impl RoleChange<'_> {
    /// Waits for the right to change roles and checks the change under it. The right must be kept until the new role is
    /// announced.
    pub(crate) async fn begin(&self, registry: &dyn Registry) -> Result<Lock, SwitchRefusal> {
        let give_up = Instant::now() + LOCK_WITHIN;
        let lock = loop {
            let taken = registry.lock(LockName::RoleChange).await;
            let taken = taken.map_err(|error| SwitchRefusal::CannotChangeRole {
                role: self.from,
                why: format!("the registry does not answer: {}", types::in_full(&error)),
            })?;
            match taken {
                Some(lock) => break lock,
                None if Instant::now() >= give_up => return Err(SwitchRefusal::AnotherChanges),
                None => tokio::time::sleep(LOCK_AGAIN).await,
            }
        };
        self.check(registry).await?;
        Ok(lock)
    }

    /// Returns an error if no other member does the work that the node would stop doing, or if the registry does not
    /// list the members in time. A member that does not answer does not count: it is dead, and its lease has not ended.
    async fn check(&self, registry: &dyn Registry) -> Result<(), SwitchRefusal> {
        let members = self.members(registry).await?;
        let last_of_kind =
            |work, silent| Err(SwitchRefusal::LastOfKind { work, model: self.model.name.clone(), silent });
        if let Some(work) = self.lost(&members) {
            return last_of_kind(work, Vec::new());
        }
        let answered = self.answering(&members).await;
        let Some(work) = self.lost(&answered) else { return Ok(()) };
        let is_silent = |node: &&NodeInfo| !answered.iter().any(|answered| answered.id == node.id);
        let silent = members.iter().filter(|node| self.is_peer(node)).filter(is_silent);
        last_of_kind(work, silent.map(|node| node.id.clone()).collect())
    }

    async fn members(&self, registry: &dyn Registry) -> Result<Vec<NodeInfo>, SwitchRefusal> {
        let cannot = |why: String| SwitchRefusal::CannotChangeRole { role: self.from, why };
        let members = async {
            let mut events = registry.watch().await.map_err(|error| cannot(error.to_string()))?;
            match events.next().await {
                Some(MembershipEvent::Snapshot(members)) => Ok(members),
                _ => Err(cannot("the registry does not list its members".to_owned())),
            }
        };
        let late = |_| cannot("the registry does not answer, so other nodes are unknown".to_owned());
        tokio::time::timeout(MEMBERS_WITHIN, members).await.map_err(late)?
    }

    /// Asks the members that do the same work, until those that have answered do all of it.
    async fn answering(&self, members: &[NodeInfo]) -> Vec<NodeInfo> {
        let mut answered = Vec::new();
        let peers: Vec<NodeInfo> = members.iter().filter(|node| self.is_peer(node)).cloned().collect();
        let world = self.world.clone();
        let asked = peers.into_iter().map(move |peer| ask(world.clone(), peer));
        let mut answers = stream::iter(asked).buffer_unordered(ASKED_AT_ONCE);
        let asking = async {
            while self.lost(&answered).is_some()
                && let Some(answer) = answers.next().await
            {
                answered.extend(answer);
            }
        };
        if tokio::time::timeout(ANSWERS_WITHIN, asking).await.is_err() {
            warn!("the other nodes were not all asked in time before the change of role");
        }
        answered
    }

    /// Returns whether a member does some of this node's work for its model.
    fn is_peer(&self, node: &NodeInfo) -> bool {
        let is_shared = |does: fn(Role) -> bool| does(self.from) && does(node.role);
        node.id != *self.id
            && node.model.name == self.model.name
            && node.model.fingerprint == self.model.fingerprint
            && (is_shared(Role::prefills) || is_shared(Role::decodes))
    }

    /// Returns the kind of work that only this node does for its model, and that it would stop doing. A node that changes
    /// its role drains first, so the last one that decodes stops even if it decodes afterwards. Prompts are computed by
    /// decode nodes meanwhile.
    fn lost(&self, members: &[NodeInfo]) -> Option<&'static str> {
        let is_done =
            |does: fn(Role) -> bool| members.iter().any(|node| self.is_peer(node) && does(node.role));
        let is_only = |does: fn(Role) -> bool| does(self.from) && !is_done(does);
        let stops_prefill = is_only(Role::prefills) && !self.to.prefills();
        let work = [("prefills", stops_prefill), ("decodes", is_only(Role::decodes))];
        work.into_iter().find(|(_, is_lost)| *is_lost).map(|(work, _)| work)
    }
}

/// Returns the member if it answers.
async fn ask(world: World, peer: NodeInfo) -> Option<NodeInfo> {
    let expected = ExpectedPeer::Node { id: peer.id.clone(), role: peer.role };
    let channel = channel(&world, &peer.address, expected, RpcLimits::default());
    match check_health(channel, ANSWER_WITHIN).await {
        Ok(()) => Some(peer),
        Err(status) => {
            warn!(node = %peer.id, reason = status.message(), "node does not answer, its work does not count");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use registry::conformance::node as any_node;
    use types::Fingerprint;

    use super::*;

    fn model(name: &str, weights: &str) -> ModelInfo {
        let fingerprint = Fingerprint::new([("weights".to_owned(), weights.to_owned())]);
        ModelInfo { name: name.to_owned(), fingerprint, ..any_node("any", 1).model }
    }

    fn node(id: &str, role: Role, model: ModelInfo) -> NodeInfo {
        NodeInfo { role, model, ..any_node(id, 1) }
    }

    #[test]
    fn another_node_must_do_the_work_that_ends() {
        use Role::{Both, Decode, Pool, Prefill};
        let own = || model("m", "a");
        for (from, to, other, lost) in [
            (Prefill, Decode, node("p", Prefill, own()), None),
            (Prefill, Decode, node("b", Both, own()), None),
            (Prefill, Decode, node("d", Decode, own()), Some("prefills")),
            (Prefill, Decode, node("k", Pool, own()), Some("prefills")),
            (Prefill, Both, node("d", Decode, own()), None),
            (Decode, Prefill, node("d", Decode, own()), None),
            (Decode, Prefill, node("p", Prefill, own()), Some("decodes")),
            (Decode, Prefill, node("d", Decode, model("n", "a")), Some("decodes")),
            (Decode, Prefill, node("d", Decode, model("m", "b")), Some("decodes")),
            (Both, Prefill, node("p", Prefill, own()), Some("decodes")),
            (Decode, Both, node("p", Prefill, own()), Some("decodes")),
            (Decode, Both, node("d", Decode, own()), None),
            (Both, Decode, node("p", Prefill, own()), Some("decodes")),
            (Both, Prefill, node("b", Both, own()), None),
        ] {
            let id = NodeId::new("x");
            let members = [node("x", from, own()), other];
            let change = RoleChange { id: &id, model: &own(), from, to, world: &World::seeded(1) };
            assert_eq!(change.lost(&members), lost, "{change:?} beside {:?}", members[1]);
        }
    }
}
