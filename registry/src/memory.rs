//! The registry as a table in this process, for the router and for tests.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use async_trait::async_trait;
use chassis::{Gate, Task, World, spawn_guarded};
use futures::stream::{self, BoxStream, StreamExt as _};
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;
use tracing::{debug, info, warn};
use types::NodeInfo;

use crate::announcement::{self, Announcement, LeaseTerms, Presence};
use crate::error::RegistryError;
use crate::lock::{self, Entry, Lock, LockName};
use crate::table::{LeaseId, Table};
use crate::{MembershipEvent, Registry};

/// The lifetime of a node's lease. It is long enough that a node without CPU time can still renew it; routing
/// detects a dead node much earlier by itself.
pub const TTL: Duration = Duration::from_secs(10);
/// Renewals per lease time. There are many, because a renewal also tells a node that the registry restarted,
/// and a restarted router should know its nodes within a second.
const RENEWALS_PER_TTL: u32 = 10;
/// Checks for expired leases per lease time. An expiry is noticed a tenth of a lease late at most.
const LOOKS_PER_TTL: u32 = 10;
/// The number of unread events beyond which a watcher gets a snapshot instead.
const EVENTS_BEHIND_MAX: usize = 1024;

/// A registry in memory. Clones are handles to the same table.
#[derive(Clone, Debug)]
pub struct MemoryRegistry {
    shared: Arc<Shared>,
    gate: Gate,
    world: World,
}

#[derive(Debug)]
struct Shared {
    /// The number of this life of the registry. A changed number tells watchers that its members were lost.
    life: u64,
    /// The mutex is held for one change and its events, never across an await, so that all watchers see the
    /// same order.
    state: Mutex<State>,
    /// The task that expires leases. It is aborted with the last handle.
    reaper: OnceLock<Task<()>>,
}

#[derive(Debug)]
struct State {
    table: Table,
    events: broadcast::Sender<MembershipEvent>,
}

impl MemoryRegistry {
    /// Makes an empty registry with leases of `ttl`; see [`TTL`].
    pub fn new(ttl: Duration, world: World, gate: Gate) -> Self {
        let (events, _) = broadcast::channel(EVENTS_BEHIND_MAX);
        let state = Mutex::new(State { table: Table::new(ttl, world.now()), events });
        let shared = Arc::new(Shared { life: world.draw(), state, reaper: OnceLock::new() });
        let reaper = reap(Arc::downgrade(&shared), ttl / LOOKS_PER_TTL, world.clone());
        let reaper = spawn_guarded(&gate, "registry leases", reaper);
        shared.reaper.set(reaper).expect("the cell is new and empty");
        Self { shared, gate, world }
    }

    pub fn life(&self) -> u64 {
        self.shared.life
    }

    pub(crate) fn world(&self) -> &World {
        &self.world
    }

    pub fn ttl(&self) -> Duration {
        self.shared.state().table.ttl()
    }

    /// Returns the current members.
    pub fn members(&self) -> Vec<NodeInfo> {
        self.shared.state().table.members()
    }

    /// Makes a node a member under a new lease, and returns the lease's id.
    pub(crate) fn grant(&self, node: NodeInfo) -> Result<LeaseId, RegistryError> {
        let lease = LeaseId(self.world.draw());
        let now = self.world.now();
        self.shared.change(|table| Ok((lease, table.announce(node, lease, now)?)))
    }

    /// Gives a lock to a new lease, and returns the lease's id.
    pub(crate) fn take_lock(&self, name: LockName) -> Result<LeaseId, RegistryError> {
        let lease = LeaseId(self.world.draw());
        self.shared.state().table.lock(name, lease, self.world.now())?;
        Ok(lease)
    }

    pub(crate) fn keep_alive(&self, lease: LeaseId) -> Result<(), RegistryError> {
        self.shared.state().table.keep_alive(lease, self.world.now())
    }

    pub(crate) fn withdraw(&self, lease: LeaseId) -> Result<(), RegistryError> {
        self.shared.change(|table| Ok(((), table.withdraw(lease).into_iter().collect())))
    }

    /// Returns a stream of the members and then every change. A reader that was too slow gets a snapshot
    /// again.
    pub(crate) fn events(&self) -> BoxStream<'static, MembershipEvent> {
        let behind = Reader { registry: self.clone(), events: None };
        stream::unfold(behind, |mut reader| async move {
            let event = reader.next().await;
            Some((event, reader))
        })
        .boxed()
    }

    /// Returns the current members and a receiver of all changes after them, without a gap.
    fn subscribe(&self) -> (MembershipEvent, broadcast::Receiver<MembershipEvent>) {
        let state = self.shared.state();
        (MembershipEvent::Snapshot(state.table.members()), state.events.subscribe())
    }
}

#[async_trait]
impl Registry for MemoryRegistry {
    async fn announce(&self, node: NodeInfo) -> Result<Announcement, RegistryError> {
        let entry = Entry::Node(Box::new(node.clone()));
        let presence = InMemory { registry: self.clone(), entry, lease: None };
        announcement::keep(&node, presence, &self.gate, self.world.clone()).await
    }

    async fn watch(&self) -> Result<BoxStream<'static, MembershipEvent>, RegistryError> {
        Ok(self.events())
    }

    async fn lock(&self, name: LockName) -> Result<Option<Lock>, RegistryError> {
        let presence = InMemory { registry: self.clone(), entry: Entry::Lock(name), lease: None };
        lock::take(name, presence, &self.gate, self.world.clone()).await
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the table and sends the resulting events while the lock is held.
    fn change<T>(
        &self,
        change: impl FnOnce(&mut Table) -> Result<(T, Vec<MembershipEvent>), RegistryError>,
    ) -> Result<T, RegistryError> {
        let mut state = self.state();
        let (answer, events) = change(&mut state.table)?;
        for event in events {
            tell(&event);
            // Sending fails only if there are no watchers, so the error is ignored.
            let _ = state.events.send(event);
        }
        Ok(answer)
    }
}

fn tell(event: &MembershipEvent) {
    match event {
        MembershipEvent::Joined(node) => {
            info!(node = %node.id, epoch = %node.epoch, role = %node.role, address = node.address, "node joined the registry");
        }
        MembershipEvent::Left { id, epoch } => info!(node = %id, %epoch, "node left the registry"),
        MembershipEvent::Snapshot(nodes) => {
            debug!(n_members = nodes.len(), "membership snapshot sent to watchers")
        }
    }
}

/// Ends expired leases until the registry is dropped.
async fn reap(shared: Weak<Shared>, every: Duration, world: World) {
    loop {
        tokio::time::sleep(every).await;
        let Some(shared) = shared.upgrade() else { return };
        let lapsed = shared.change(|table| {
            let lapsed = table.lapse(world.now());
            Ok((lapsed.len(), lapsed))
        });
        if let Ok(n_lapsed @ 1..) = lapsed {
            warn!(n_lapsed, "leases expired: members sent no keep-alive");
        }
    }
}

// === Reader ===

/// One watcher's position in the stream of events.
struct Reader {
    registry: MemoryRegistry,
    /// The receiver of changes; `None` before the first snapshot, and after the watcher was too slow.
    events: Option<broadcast::Receiver<MembershipEvent>>,
}

impl Reader {
    async fn next(&mut self) -> MembershipEvent {
        if let Some(events) = &mut self.events {
            match events.recv().await {
                Ok(event) => return event,
                Err(RecvError::Lagged(n_missed)) => {
                    warn!(n_missed, "registry watcher is too slow, sending it a snapshot")
                }
                Err(RecvError::Closed) => unreachable!("the reader's own handle keeps the sender"),
            }
        }
        let (snapshot, events) = self.registry.subscribe();
        self.events = Some(events);
        snapshot
    }
}

// === InMemory ===

struct InMemory {
    registry: MemoryRegistry,
    entry: Entry,
    lease: Option<LeaseId>,
}

#[async_trait]
impl Presence for InMemory {
    async fn announce(&mut self) -> Result<LeaseTerms, RegistryError> {
        self.lease = Some(match &self.entry {
            Entry::Node(node) => self.registry.grant((**node).clone())?,
            Entry::Lock(name) => self.registry.take_lock(*name)?,
        });
        Ok(terms(self.registry.ttl()))
    }

    async fn keep_alive(&mut self) -> Result<(), RegistryError> {
        self.registry.keep_alive(self.lease.ok_or(RegistryError::LeaseLost)?)
    }

    async fn withdraw(&mut self) -> Result<(), RegistryError> {
        self.lease.take().map_or(Ok(()), |lease| self.registry.withdraw(lease))
    }
}

/// Returns the lease terms of the embedded registry, in memory and over gRPC.
pub(crate) fn terms(ttl: Duration) -> LeaseTerms {
    LeaseTerms { ttl, beat: ttl / RENEWALS_PER_TTL }
}

#[cfg(test)]
mod tests;
