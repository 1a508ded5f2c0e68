//! A lock in a registry: a value that one process of the cluster has at a time.

use chassis::{Gate, World, spawn_guarded};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};
use types::NodeInfo;

use crate::announcement::{LeaseTask, LeaseTerms, Presence, within};
use crate::error::{Chain, RegistryError};

/// The locks that Baton uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LockName {
    /// Held by the router that moves nodes between roles, all the time.
    Balance,
    /// Held by a node while it changes its role.
    RoleChange,
}

impl LockName {
    pub const ALL: [Self; 2] = [Self::Balance, Self::RoleChange];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Balance => "balance",
            Self::RoleChange => "role-change",
        }
    }
}

/// The entry that a lease keeps.
#[derive(Clone, Debug)]
pub(crate) enum Entry {
    Node(Box<NodeInfo>),
    Lock(LockName),
}

/// A lock that this process has. It is renewed in the background; dropping it gives it back.
///
/// A process that dies, or cannot reach the registry, loses the lock when its lease ends.
#[derive(Debug)]
#[must_use = "dropping a lock gives it back"]
pub struct Lock {
    /// The time until which the lock is certain; `None` once it is lost.
    held_until: watch::Receiver<Option<Instant>>,
    world: World,
    task: LeaseTask,
}

impl Lock {
    /// Returns whether the lock is certain: its last renewal is younger than its lease.
    pub fn is_held(&self) -> bool {
        self.held_until.borrow().is_some_and(|until| self.world.now() < until)
    }

    /// Stops renewals without giving the lock back, as if the process had died.
    pub fn abandon(self) {
        self.task.abandon();
    }
}

/// Takes a lock through `presence`, and spawns the task that renews it. Returns `None` if another process has it.
pub(crate) async fn take(
    name: LockName,
    mut presence: impl Presence,
    gate: &Gate,
    world: World,
) -> Result<Option<Lock>, RegistryError> {
    let asked = world.now();
    let terms = match within("take a lock", presence.announce()).await {
        Ok(terms) => terms,
        Err(RegistryError::LockHeld) => return Ok(None),
        Err(error) => return Err(error),
    };
    let (until, held_until) = watch::channel(Some(asked + terms.ttl));
    let stop = CancellationToken::new();
    let renewal = Renewal { name, presence, terms, until, world: world.clone() };
    let task = spawn_guarded(gate, "registry lock", renewal.run(stop.clone()));
    Ok(Some(Lock { held_until, world, task: LeaseTask::new(stop, task) }))
}

/// The state of the task that renews a lock.
struct Renewal<P> {
    name: LockName,
    presence: P,
    terms: LeaseTerms,
    until: watch::Sender<Option<Instant>>,
    world: World,
}

impl<P: Presence> Renewal<P> {
    async fn run(mut self, stop: CancellationToken) {
        tokio::select! {
            biased;
            () = stop.cancelled() => {}
            () = self.renew() => {}
        }
        self.until.send_replace(None);
        if let Err(error) = within("give a lock back", self.presence.withdraw()).await {
            let lock = self.name.as_str();
            debug!(lock, error = %Chain(&error), "lock was not given back, it is free when its lease ends");
        }
    }

    /// Renews the lock until it is lost.
    async fn renew(&mut self) {
        let mut until = self.world.now() + self.terms.ttl;
        loop {
            tokio::time::sleep(self.terms.beat).await;
            let asked = self.world.now();
            let lock = self.name.as_str();
            match within("renew a lock", self.presence.keep_alive()).await {
                Ok(()) => {
                    until = asked + self.terms.ttl;
                    self.until.send_replace(Some(until));
                }
                Err(RegistryError::LeaseLost) => {
                    return warn!(lock, "lock is lost: the registry has ended its lease");
                }
                Err(error) if self.world.now() >= until => {
                    return warn!(lock, error = %Chain(&error), "lock is lost: its lease was not renewed");
                }
                Err(error) => debug!(lock, error = %Chain(&error), "lock was not renewed, trying again"),
            }
        }
    }
}
