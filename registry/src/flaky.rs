//! A registry with injected faults, for tests of code that uses a registry.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures::stream::{BoxStream, StreamExt as _};
use tokio::sync::watch;
use types::NodeInfo;

use crate::announcement::{self, Announcement, AnnouncementState, LeaseTerms, Presence};
use crate::error::RegistryError;
use crate::lock::{Lock, LockName};
use crate::memory;
use crate::open::RegistryParts;
use crate::watch::{AllNodes, Feed, RegistryMessage, follow};
use crate::{MembershipEvent, Registry};

/// A registry that forwards all calls to an inner one, except during a fault set by its [`FaultSwitch`]. It
/// keeps the trait's contract: code that fails with it relies on more than the contract.
#[derive(Debug)]
pub struct Flaky<R> {
    inner: Arc<R>,
    parts: RegistryParts,
    fault: watch::Sender<Fault>,
}

/// The switch that injects faults into a [`Flaky`] registry.
#[derive(Clone, Debug)]
pub struct FaultSwitch(watch::Sender<Fault>);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Fault {
    away: bool,
    n_gaps: u64,
}

impl<R: Registry> Flaky<R> {
    pub fn new(inner: R, parts: RegistryParts) -> (Self, FaultSwitch) {
        let (fault, _) = watch::channel(Fault::default());
        (Self { inner: Arc::new(inner), parts, fault: fault.clone() }, FaultSwitch(fault))
    }
}

impl FaultSwitch {
    /// Makes the registry unreachable until [`FaultSwitch::back`].
    pub fn away(&self) {
        self.0.send_modify(|fault| fault.away = true);
    }

    /// Makes the registry reachable again.
    pub fn back(&self) {
        self.0.send_modify(|fault| fault.away = false);
    }

    /// Interrupts every watch once, so that its next event is a snapshot.
    pub fn gap(&self) {
        self.0.send_modify(|fault| fault.n_gaps += 1);
    }
}

#[async_trait]
impl<R: Registry> Registry for Flaky<R> {
    async fn announce(&self, node: NodeInfo) -> Result<Announcement, RegistryError> {
        let inner = Arc::clone(&self.inner);
        let presence =
            FlakyPresence { inner, node: node.clone(), announcement: None, fault: self.fault.subscribe() };
        announcement::keep(&node, presence, &self.parts.gate, self.parts.world.clone()).await
    }

    async fn watch(&self) -> Result<BoxStream<'static, MembershipEvent>, RegistryError> {
        let feed = FlakyFeed { inner: Arc::clone(&self.inner), events: None, fault: self.fault.subscribe() };
        Ok(follow(feed, self.parts.world.clone()))
    }

    async fn lock(&self, name: LockName) -> Result<Option<Lock>, RegistryError> {
        reachable(&self.fault.subscribe())?;
        self.inner.lock(name).await
    }
}

fn reachable(fault: &watch::Receiver<Fault>) -> Result<(), RegistryError> {
    match fault.borrow().away {
        true => Err(RegistryError::Unreachable {
            operation: "reach a flaky registry",
            source: "it is away".into(),
        }),
        false => Ok(()),
    }
}

// === FlakyPresence ===

struct FlakyPresence<R> {
    inner: Arc<R>,
    node: NodeInfo,
    announcement: Option<Announcement>,
    fault: watch::Receiver<Fault>,
}

#[async_trait]
impl<R: Registry> Presence for FlakyPresence<R> {
    async fn announce(&mut self) -> Result<LeaseTerms, RegistryError> {
        reachable(&self.fault)?;
        let announcement = self.inner.announce(self.node.clone()).await?;
        let standing = announcement.standing();
        self.announcement = Some(announcement);
        self.judge(standing)?;
        Ok(memory::terms(memory::TTL))
    }

    async fn keep_alive(&mut self) -> Result<(), RegistryError> {
        reachable(&self.fault)?;
        let standing = self.announcement.as_ref().map(Announcement::standing);
        self.judge(standing.ok_or(RegistryError::LeaseLost)?)
    }

    async fn withdraw(&mut self) -> Result<(), RegistryError> {
        reachable(&self.fault)?;
        if let Some(announcement) = self.announcement.take() {
            announcement.withdraw().await;
        }
        Ok(())
    }
}

impl<R> FlakyPresence<R> {
    fn judge(&self, standing: AnnouncementState) -> Result<(), RegistryError> {
        match standing {
            AnnouncementState::Member => Ok(()),
            AnnouncementState::Superseded => {
                Err(RegistryError::Superseded { id: self.node.id.clone(), epoch: self.node.epoch })
            }
            AnnouncementState::Trying | AnnouncementState::Refused | AnnouncementState::Withdrawn => {
                Err(RegistryError::LeaseLost)
            }
        }
    }
}

// === FlakyFeed ===

struct FlakyFeed<R> {
    inner: Arc<R>,
    /// The events of the inner registry; `None` after a fault: a new watch begins with a snapshot.
    events: Option<BoxStream<'static, MembershipEvent>>,
    fault: watch::Receiver<Fault>,
}

#[async_trait]
impl<R: Registry> Feed for FlakyFeed<R> {
    async fn next(&mut self) -> Result<Vec<RegistryMessage>, RegistryError> {
        if let Err(away) = reachable(&self.fault) {
            self.events = None;
            return Err(away);
        }
        let events = match &mut self.events {
            Some(events) => events,
            None => self.events.insert(self.inner.watch().await?),
        };
        tokio::select! {
            biased;
            _ = self.fault.changed() => {
                self.events = None;
                Err(interrupted())
            }
            event = events.next() => Ok(vec![news(event.ok_or_else(interrupted)?)]),
        }
    }

    fn ttl(&self) -> Duration {
        memory::TTL
    }
}

fn interrupted() -> RegistryError {
    RegistryError::Interrupted { reason: "it is flaky".to_owned() }
}

fn news(event: MembershipEvent) -> RegistryMessage {
    match event {
        MembershipEvent::Snapshot(nodes) => RegistryMessage::All(AllNodes { nodes, forgot: false }),
        MembershipEvent::Joined(node) => RegistryMessage::Is(node),
        MembershipEvent::Left { id, .. } => RegistryMessage::Gone(id),
    }
}

#[cfg(test)]
mod tests;
