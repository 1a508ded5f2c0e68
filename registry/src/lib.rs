//! The registry: nodes announce themselves as members, and routers and nodes watch the members.
//!
//! Suggested reading order: the contract [`Registry`]; its common implementation ([`announcement`], [`lock`], and
//! [`watch`] over [`known`]); the registry as a table in memory ([`table`], [`memory`]); the same table
//! served over gRPC ([`embedded`]); and [`etcd`].
#![forbid(unsafe_code)]

pub mod announcement;
pub mod lock;
pub mod members;
pub mod known;
pub mod watch;
pub mod backoff;
pub mod table;
pub mod memory;
pub mod members_file;
pub mod embedded;
pub mod etcd;
pub mod url;
pub mod open;
#[cfg(any(test, feature = "test-support"))]
pub mod flaky;
#[cfg(any(test, feature = "test-support"))]
pub mod conformance;
pub mod error;

use std::fmt::Debug;

use async_trait::async_trait;
use futures::stream::BoxStream;
use types::{Epoch, NodeId, NodeInfo};

pub use announcement::{Announcement, AnnouncementState};
pub use error::{RegistryError, RegistryProblem};
pub use lock::{Lock, LockName};
pub use members::Members;
pub use members_file::{MembersFile, OldMembers};
pub use memory::MemoryRegistry;
pub use open::{RegistryParts, ask_once, open};

/// The list of the cluster's members, without their load.
///
/// A registry is advice. A member may have died a moment ago, so its peers must expect errors. Members that are already
/// known stay usable while the registry is unreachable.
///
/// # Members
///
/// A node is a member from its announcement until it withdraws, or until its lease expires without renewal. An id has
/// one member at a time: the life with the greatest [`Epoch`]. A newer life replaces an older one at once, without
/// waiting for its lease. An older life can neither replace a newer one nor remove it by withdrawing or expiring.
/// (Epochs grow with the clock. If a node restarts after its clock was set back, it waits until its former life has
/// withdrawn or expired.)
///
/// # Use
///
/// ```no_run
/// # use baton_registry as registry;
/// # use futures::StreamExt as _;
/// # async fn example(registry: &dyn registry::Registry, me: types::NodeInfo) -> Result<(), registry::RegistryError> {
/// let announcement = registry.announce(me).await?; // keep it: dropping it withdraws
/// let mut members = registry::Members::default();
/// let mut events = registry.watch().await?;
/// while let Some(event) = events.next().await {
///     members.apply(&event);
/// }
/// # drop(announcement); Ok(()) }
/// ```
///
/// Wrong: `let _ = registry.announce(me).await?` withdraws at once. Also wrong: a reader that applies `Joined` and `Left`
/// but skips later `Snapshot`s keeps nodes that left during a gap.
#[async_trait]
pub trait Registry: Debug + Send + Sync + 'static {
    /// Makes `node` a member until the returned announcement is dropped.
    ///
    /// Returns when the node is a member, or as soon as it is clear that this takes time. An unreachable registry is no
    /// error: the announcement retries in the background ([`Announcement::announced`] waits for success). It also
    /// announces again whenever the registry has lost the lease. Errors are only those that no retry can resolve: an
    /// invalid node, or a registry that refuses the call.
    ///
    /// Cancel-safe: if the future is dropped, the node is withdrawn.
    async fn announce(&self, node: NodeInfo) -> Result<Announcement, RegistryError>;

    /// Returns the members, followed by every change.
    ///
    /// The first event is a [`MembershipEvent::Snapshot`], and so is the first one after every gap (a lost connection, or
    /// a reader that was too slow). An unreachable registry sends nothing; in particular, it sends no empty snapshot. A
    /// registry that restarted without its data has lost members that still exist. They stay in the snapshot and have one
    /// lease's time to announce themselves again before they are reported as left.
    ///
    /// The stream never ends and never fails. It makes progress only while it is polled.
    async fn watch(&self) -> Result<BoxStream<'static, MembershipEvent>, RegistryError>;

    /// Takes a lock until the returned value is dropped. Returns `None` if another process of the cluster has it.
    ///
    /// Asks once, without a retry. If the future is dropped, a lock that it took is free when its lease ends. A registry
    /// that restarts without its data has lost its locks too: their holders notice it at the next renewal.
    async fn lock(&self, name: LockName) -> Result<Option<Lock>, RegistryError>;
}

/// A change of the members. Few events exist at a time, so the size of the largest variant does not matter.
#[allow(clippy::large_enum_variant)]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MembershipEvent {
    /// The complete list of members. It replaces the result of all earlier events.
    Snapshot(Vec<NodeInfo>),
    /// A new member, or new data of a known member with the same id and epoch.
    /// A new epoch is reported as `Left` of the old life followed by `Joined` of the new one.
    Joined(NodeInfo),
    /// A life of a node has withdrawn, or its lease has expired.
    Left { id: NodeId, epoch: Epoch },
}
