//! The conformance suite of registries: the same tests run on every implementation.
//!
//! ```text
//! async fn subject() -> registry::conformance::Subject { … }
//! registry::conformance!(#[tokio::test] subject);
//! ```

use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use futures::stream::{BoxStream, StreamExt as _};
use tokio::time::timeout;
use types::{
    Epoch, Fingerprint, KvDtype, KvLayout, MissingWire, ModelInfo, NodeId, NodeInfo, Role, Scheme, TokenId,
    WireAddress,
};

use crate::{
    Announcement, AnnouncementState, Lock, LockName, Members, MembershipEvent, Registry, RegistryError,
};

/// The timeout of every wait in a case. The longest wait is for a lease to expire.
const WITHIN: Duration = Duration::from_secs(60);

/// An empty registry under test, used by two members of one cluster.
#[derive(Debug)]
pub struct RegistryUnderTest {
    pub one: Arc<dyn Registry>,
    pub two: Arc<dyn Registry>,
    /// Resources that must live as long as the test, such as servers and folders.
    pub keep: Box<dyn KeptAlive>,
}

/// A value that a [`RegistryUnderTest`] keeps alive, of any type.
pub trait KeptAlive: Any + Debug + Send + Sync {}

impl<T: Any + Debug + Send + Sync> KeptAlive for T {}

/// Declares one test per case. `$subject` is an async function that makes a [`RegistryUnderTest`].
#[macro_export]
macro_rules! conformance {
    ($(#[$attribute:meta])* $subject:path) => {
        $crate::conformance!(@cases [$(#[$attribute])*] $subject:
            the_first_event_is_a_snapshot,
            a_node_joins_and_leaves,
            a_dropped_announcement_withdraws,
            an_abandoned_lease_lapses,
            a_newer_life_takes_the_place_at_once,
            an_older_life_waits_for_its_place,
            all_watchers_see_the_same,
            what_is_announced_is_what_is_seen,
            an_impossible_node_is_refused,
            a_lock_has_one_holder,
            a_lock_of_a_dead_holder_is_free_after_its_lease,
        );
    };
    (@cases $attributes:tt $subject:path: $($case:ident,)*) => {
        $($crate::conformance!(@case $attributes $subject, $case);)*
    };
    (@case [$(#[$attribute:meta])*] $subject:path, $case:ident) => {
        $(#[$attribute])*
        async fn $case() {
            $crate::conformance::$case($subject().await).await;
        }
    };
}

// === cases ===

pub async fn the_first_event_is_a_snapshot(subject: RegistryUnderTest) {
    let mut early = Watcher::of(&*subject.one).await;
    assert_eq!(early.next().await, MembershipEvent::Snapshot(vec![]));
    let _a = announced(&*subject.two, node("a", 1)).await;
    let mut late = Watcher::of(&*subject.one).await;
    assert_eq!(late.next().await, MembershipEvent::Snapshot(vec![node("a", 1)]));
}

pub async fn a_node_joins_and_leaves(subject: RegistryUnderTest) {
    let mut watcher = Watcher::of(&*subject.one).await;
    assert_eq!(watcher.next().await, MembershipEvent::Snapshot(vec![]));
    let announcement = announced(&*subject.two, node("a", 1)).await;
    assert_eq!(watcher.next().await, MembershipEvent::Joined(node("a", 1)));
    in_time(announcement.withdraw()).await;
    assert_eq!(watcher.next().await, left("a", 1));
}

pub async fn a_dropped_announcement_withdraws(subject: RegistryUnderTest) {
    let mut watcher = Watcher::of(&*subject.one).await;
    let announcement = announced(&*subject.one, node("a", 1)).await;
    let mut standing = announcement.standings();
    watcher.sees(&[node("a", 1)]).await;
    drop(announcement);
    in_time(standing.wait_for(|standing| *standing == AnnouncementState::Withdrawn))
        .await
        .expect("it is told before it ends");
    watcher.sees(&[]).await;
}

pub async fn an_abandoned_lease_lapses(subject: RegistryUnderTest) {
    let mut watcher = Watcher::of(&*subject.one).await;
    let alive = announced(&*subject.one, node("alive", 1)).await;
    announced(&*subject.two, node("dead", 1)).await.abandon();
    watcher.sees(&[node("alive", 1), node("dead", 1)]).await;
    assert_eq!(watcher.next().await, left("dead", 1));
    assert_eq!(alive.standing(), AnnouncementState::Member);
}

pub async fn a_newer_life_takes_the_place_at_once(subject: RegistryUnderTest) {
    let mut watcher = Watcher::of(&*subject.one).await;
    let old = announced(&*subject.one, node("a", 1)).await;
    watcher.sees(&[node("a", 1)]).await;
    let _new = announced(&*subject.two, node("a", 2)).await;
    assert_eq!(watcher.next().await, left("a", 1));
    assert_eq!(watcher.next().await, MembershipEvent::Joined(node("a", 2)));
    in_time(old.withdraw()).await;
    let _next = announced(&*subject.one, node("b", 1)).await;
    assert_eq!(
        watcher.next().await,
        MembershipEvent::Joined(node("b", 1)),
        "the old life took nothing with it"
    );
}

pub async fn an_older_life_waits_for_its_place(subject: RegistryUnderTest) {
    let mut watcher = Watcher::of(&*subject.one).await;
    let new = announced(&*subject.one, node("a", 2)).await;
    watcher.sees(&[node("a", 2)]).await;
    let mut old = in_time(subject.two.announce(node("a", 1))).await.expect("to wait is no error");
    assert_eq!(old.standing(), AnnouncementState::Superseded);
    in_time(new.withdraw()).await;
    assert_eq!(watcher.next().await, left("a", 2));
    in_time(old.announced()).await;
    assert_eq!(watcher.next().await, MembershipEvent::Joined(node("a", 1)));
}

pub async fn all_watchers_see_the_same(subject: RegistryUnderTest) {
    let mut early = Watcher::of(&*subject.one).await;
    let a = announced(&*subject.one, node("a", 1)).await;
    let _b = announced(&*subject.two, node("b", 1)).await;
    let mut late = Watcher::of(&*subject.two).await;
    let _c = announced(&*subject.one, node("c", 1)).await;
    drop(a);
    for watcher in [&mut early, &mut late] {
        watcher.sees(&[node("b", 1), node("c", 1)]).await;
    }
}

pub async fn what_is_announced_is_what_is_seen(subject: RegistryUnderTest) {
    let _a = announced(&*subject.one, node("a", 7)).await;
    let mut watcher = Watcher::of(&*subject.two).await;
    watcher.sees(&[node("a", 7)]).await;
    assert_eq!(watcher.members.get(&NodeId::new("a")), Some(&node("a", 7)));
}

pub async fn an_impossible_node_is_refused(subject: RegistryUnderTest) {
    for id in ["", "a/b", "a b", "ä", &"x".repeat(129)] {
        let refused = in_time(subject.one.announce(node(id, 1))).await.expect_err("such an id");
        assert!(matches!(refused, RegistryError::InvalidNode { .. }), "{id}: {refused}");
        assert!(refused.is_final());
    }
    let nowhere = NodeInfo { address: String::new(), ..node("a", 1) };
    let refused = in_time(subject.one.announce(nowhere)).await.expect_err("it has no address");
    assert!(matches!(refused, RegistryError::InvalidNode { .. }), "{refused}");
}

pub async fn a_lock_has_one_holder(subject: RegistryUnderTest) {
    let taken = async |registry: &dyn Registry, name| {
        in_time(registry.lock(name)).await.expect("the registry answers")
    };
    let lock = taken(&*subject.one, LockName::Balance).await.expect("it is free");
    assert!(lock.is_held());
    for registry in [&*subject.one, &*subject.two] {
        assert!(taken(registry, LockName::Balance).await.is_none(), "it has a holder");
    }
    let other = taken(&*subject.two, LockName::RoleChange).await;
    assert!(other.is_some_and(|other| other.is_held()), "another lock");
    drop(lock);
    let mut watcher = Watcher::of(&*subject.one).await;
    let next = free(&*subject.two, LockName::Balance).await;
    assert!(next.is_held());
    assert_eq!(watcher.next().await, MembershipEvent::Snapshot(vec![]), "a lock is no member");
    // The lock outlives its first lease.
    announced(&*subject.one, node("dead", 1)).await.abandon();
    watcher.sees(&[node("dead", 1)]).await;
    watcher.sees(&[]).await;
    assert!(next.is_held());
    assert!(taken(&*subject.one, LockName::Balance).await.is_none(), "its holder has renewed it");
}

pub async fn a_lock_of_a_dead_holder_is_free_after_its_lease(subject: RegistryUnderTest) {
    let lock = in_time(subject.one.lock(LockName::RoleChange)).await.expect("the registry answers");
    lock.expect("it is free").abandon();
    let early = in_time(subject.two.lock(LockName::RoleChange)).await.expect("the registry answers");
    assert!(early.is_none(), "the lease has not ended");
    assert!(free(&*subject.two, LockName::RoleChange).await.is_held());
}

/// Takes a lock as soon as it is free.
async fn free(registry: &dyn Registry, name: LockName) -> Lock {
    in_time(async {
        loop {
            match registry.lock(name).await.expect("the registry answers") {
                Some(lock) => return lock,
                None => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
    })
    .await
}

// === helpers for tests of registries ===

/// Makes a node for a test. Equal arguments make equal nodes.
pub fn node(id: &str, epoch: u64) -> NodeInfo {
    let wire = |scheme| WireAddress {
        scheme: Scheme::new(scheme),
        endpoint: format!("{id}:{epoch}"),
        within_host: true,
    };
    NodeInfo {
        id: NodeId::new(id),
        epoch: Epoch(epoch),
        role: Role::Both,
        pid: 12,
        host: "host".to_owned(),
        address: format!("{id}:1"),
        admin: format!("{id}:2"),
        wires: vec![wire("shm"), wire("tcp")],
        without: vec![MissingWire { scheme: Scheme::new("cuda-ipc"), why: "no GPU".to_owned() }],
        keeps_role: false,
        model: ModelInfo {
            name: "mock".to_owned(),
            context_tokens: 2048,
            vocab: 260,
            eos_tokens: vec![TokenId(256)],
            layout: KvLayout::uniform(16, KvDtype::F32, 2, 2, 8),
            fingerprint: Fingerprint::new(["weights", "rope"].map(|part| (part.to_owned(), "1".to_owned()))),
        },
        protocol: types::node::PROTOCOL,
    }
}

pub fn left(id: &str, epoch: u64) -> MembershipEvent {
    MembershipEvent::Left { id: NodeId::new(id), epoch: Epoch(epoch) }
}

/// Announces `node` and waits until it is a member.
pub async fn announced(registry: &dyn Registry, node: NodeInfo) -> Announcement {
    let mut announcement = in_time(registry.announce(node)).await.expect("the registry takes it");
    in_time(announcement.announced()).await;
    announcement
}

/// Fails the test if `wait` takes longer than a minute.
pub async fn in_time<T>(wait: impl Future<Output = T>) -> T {
    timeout(WITHIN, wait).await.expect("it takes too long")
}

/// A watch of a registry, and the members according to its events.
pub struct Watcher {
    events: BoxStream<'static, MembershipEvent>,
    /// Whether the watch has returned its first event.
    heard: bool,
    pub members: Members,
}

impl Debug for Watcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watcher").field("members", &self.members).finish_non_exhaustive()
    }
}

impl Watcher {
    pub fn new(events: BoxStream<'static, MembershipEvent>) -> Self {
        Self { events, heard: false, members: Members::default() }
    }

    pub async fn of(registry: &dyn Registry) -> Self {
        Self::new(in_time(registry.watch()).await.expect("the registry can be watched"))
    }

    pub async fn next(&mut self) -> MembershipEvent {
        let event = in_time(self.events.next()).await.expect("a watch never ends");
        self.members.apply(&event);
        self.heard = true;
        event
    }

    /// Returns the events received until `meanwhile` ends.
    pub async fn hears_during(&mut self, meanwhile: impl Future<Output = ()>) -> Vec<MembershipEvent> {
        let mut heard = Vec::new();
        let mut meanwhile = std::pin::pin!(meanwhile);
        loop {
            tokio::select! {
                () = &mut meanwhile => return heard,
                event = self.next() => heard.push(event),
            }
        }
    }

    /// Reads events until exactly `nodes` are members. Returns the events.
    pub async fn sees(&mut self, nodes: &[NodeInfo]) -> Vec<MembershipEvent> {
        let mut wanted = Members::default();
        wanted.apply(&MembershipEvent::Snapshot(nodes.to_vec()));
        let mut read = Vec::new();
        while !self.heard || self.members != wanted {
            read.push(self.next().await);
        }
        read
    }
}
