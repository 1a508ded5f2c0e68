//! The members of the cluster: nodes announce themselves, and routers and nodes watch.
//!
//! Suggested reading order: the contract below, what keeps it on either side ([`announcement`], [`watch`] over
//! [`known`]), the registry that is a table in memory ([`table`], [`memory`]), the same served over gRPC
//! ([`embedded`]), and [`etcd`].
#![forbid(unsafe_code)]

pub mod announcement;
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

pub use announcement::{Announcement, Standing};
pub use error::{RegistryError, Trouble};
pub use members::Members;
pub use members_file::{MembersFile, OldMembers};
pub use memory::MemoryRegistry;
pub use open::{RegistryParts, ask_once, open};

/// Who is in the cluster, never how busy they are.
///
/// A registry is advice. A member may have died a moment ago, so a caller must expect to be refused; and
/// a registry that is away changes nothing for members that are known already.
///
/// # Members
///
/// A node is a member from its announcement until it withdraws, or until its lease lapses because nothing keeps it
/// alive. One id is one member: the life with the greatest [`Epoch`] holds the place. A newer life takes it at
/// once, without waiting for the old lease; an older one can neither take it back nor, when it withdraws or lapses,
/// take the newer one with it. (An epoch grows with the clock. A node that restarts after its clock was set back
/// waits until its former life has withdrawn or lapsed, no longer.)
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
/// Wrong: `let _ = registry.announce(me).await?` withdraws at once; and treating `Joined` and `Left` as the whole
/// story while skipping later `Snapshot`s keeps nodes that left during a gap for ever.
#[async_trait]
pub trait Registry: Debug + Send + Sync + 'static {
    /// Makes `node` a member for as long as the answer lives.
    ///
    /// Returns when the node is a member, or as soon as it is clear that this needs time: an unreachable registry
    /// is no error, the announcement then goes on trying by itself ([`Announcement::announced`] waits for it). It
    /// also announces again, without being asked, whenever the registry has lost it. Errors are only those that no
    /// waiting mends: a node that cannot be announced, or a registry that denies us.
    ///
    /// Cancel-safe: dropped half-way, the node is withdrawn.
    async fn announce(&self, node: NodeInfo) -> Result<Announcement, RegistryError>;

    /// The members, and then every change.
    ///
    /// The first event is a [`MembershipEvent::Snapshot`], and so is the first after every gap (a lost connection,
    /// a reader that was too slow). A registry that cannot be reached sends nothing: no snapshot, and above all not
    /// an empty one. A registry that was restarted without its data has forgotten members who are still there;
    /// they stay in the snapshot and get one lease's time to announce themselves again before they are said to
    /// have left.
    ///
    /// The stream never ends and never fails. It does its work while it is polled, and nothing when it is not.
    async fn watch(&self) -> Result<BoxStream<'static, MembershipEvent>, RegistryError>;
}

/// A change of who is in the cluster. Few of them are alive at once, so a large variant costs nothing.
#[allow(clippy::large_enum_variant)]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MembershipEvent {
    /// Everyone who is a member, in place of all that was said before.
    Snapshot(Vec<NodeInfo>),
    /// A new member. With the id and epoch of a member that is known: what it now says of itself.
    /// A new epoch comes as `Left` of the old life and `Joined` of the new one, in this order.
    Joined(NodeInfo),
    /// This life of this node is over, or its lease has lapsed.
    Left { id: NodeId, epoch: Epoch },
}
