//! The membership table: members and their leases. It reads no clock: the time is an argument.

use std::collections::BTreeMap;
use std::time::Duration;

use chassis::guards::{Guard, stands};
use tokio::time::Instant;
use types::{NodeId, NodeInfo};

use crate::MembershipEvent;
use crate::error::RegistryError;
use crate::lock::LockName;
use crate::members::{joined, left};

/// The largest number of members, more than a Baton cluster needs. More announcements are a mistake or an
/// attack.
pub const N_MEMBERS_MAX: usize = 10_000;

/// The id of one lease. It is random, so that leases of an earlier life are invalid in a restarted registry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LeaseId(pub u64);

/// The members and their leases. Every method returns the events that it causes.
#[derive(Debug)]
pub struct Table {
    ttl: Duration,
    places: BTreeMap<NodeId, Member>,
    leases: BTreeMap<LeaseId, NodeId>,
    /// The locks that processes have.
    locks: BTreeMap<LockName, HeldLock>,
    /// The time of the last call of [`Table::lapse`].
    looked: Instant,
}

#[derive(Debug)]
struct HeldLock {
    lease: LeaseId,
    lapses: Instant,
}

#[derive(Debug)]
struct Member {
    node: NodeInfo,
    lease: LeaseId,
    lapses: Instant,
}

impl Table {
    /// Makes an empty table. A lease expires `ttl` after its last renewal, so [`Table::lapse`] must be called
    /// several times within `ttl`.
    pub fn new(ttl: Duration, now: Instant) -> Self {
        Self { ttl, places: BTreeMap::new(), leases: BTreeMap::new(), locks: BTreeMap::new(), looked: now }
    }

    pub fn ttl(&self) -> Duration {
        self.ttl
    }

    /// Makes this life of the node a member under `lease`, unless a later life is a member. A lease that it
    /// replaces becomes invalid, so that it cannot withdraw the node any more.
    pub fn announce(
        &mut self,
        node: NodeInfo,
        lease: LeaseId,
        now: Instant,
    ) -> Result<Vec<MembershipEvent>, RegistryError> {
        self.admit(&node)?;
        let id = node.id.clone();
        let place = Member { node: node.clone(), lease, lapses: now + self.ttl };
        let before = self.places.insert(id.clone(), place);
        if let Some(before) = &before {
            self.leases.remove(&before.lease);
        }
        self.leases.insert(lease, id);
        Ok(joined(before.as_ref().map(|place| &place.node), node))
    }

    fn admit(&self, node: &NodeInfo) -> Result<(), RegistryError> {
        match self.places.get(&node.id) {
            Some(place) if place.node.epoch > node.epoch => {
                Err(RegistryError::Superseded { id: node.id.clone(), epoch: node.epoch })
            }
            None if self.places.len() >= N_MEMBERS_MAX => {
                Err(RegistryError::Full { n_members_max: N_MEMBERS_MAX })
            }
            Some(_) | None => Ok(()),
        }
    }

    /// Renews a lease. Fails if the lease has expired or was replaced.
    pub fn keep_alive(&mut self, lease: LeaseId, now: Instant) -> Result<(), RegistryError> {
        let lapses = now + self.ttl;
        if let Some(lock) = self.locks.values_mut().find(|lock| lock.lease == lease) {
            lock.lapses = lapses;
            return Ok(());
        }
        let id = self.leases.get(&lease).ok_or(RegistryError::LeaseLost)?;
        let place = self.places.get_mut(id).ok_or(RegistryError::LeaseLost)?;
        place.lapses = lapses;
        Ok(())
    }

    /// Gives a lock to a lease, unless another lease has it.
    pub fn lock(&mut self, name: LockName, lease: LeaseId, now: Instant) -> Result<(), RegistryError> {
        if self.locks.contains_key(&name) {
            return Err(RegistryError::LockHeld);
        }
        self.locks.insert(name, HeldLock { lease, lapses: now + self.ttl });
        Ok(())
    }

    /// Removes the lease's member or lock. Does nothing if the lease was replaced.
    pub fn withdraw(&mut self, lease: LeaseId) -> Option<MembershipEvent> {
        self.locks.retain(|_, lock| lock.lease != lease);
        let id = self.leases.remove(&lease)?;
        self.places.remove(&id).map(|place| left(&place.node))
    }

    /// Removes the members and locks whose lease has expired. Returns the events.
    ///
    /// If the call is late, the process was suspended or had no CPU time, so renewals may have been missed.
    /// All leases then get their full time again.
    pub fn lapse(&mut self, now: Instant) -> Vec<MembershipEvent> {
        let stood_still = now.saturating_duration_since(self.looked) > self.ttl / 2;
        self.looked = now;
        if stood_still {
            self.renew_all(now);
            return Vec::new();
        }
        self.locks.retain(|_, lock| lock.lapses > now);
        let lapsed: Vec<LeaseId> = self
            .places
            .values()
            .filter(|place| place.lapses <= now && stands(Guard::LeaseExpiry))
            .map(|place| place.lease)
            .collect();
        lapsed.into_iter().filter_map(|lease| self.withdraw(lease)).collect()
    }

    fn renew_all(&mut self, now: Instant) {
        for place in self.places.values_mut() {
            place.lapses = now + self.ttl;
        }
        for lock in self.locks.values_mut() {
            lock.lapses = now + self.ttl;
        }
    }

    pub fn members(&self) -> Vec<NodeInfo> {
        self.places.values().map(|place| place.node.clone()).collect()
    }
}

#[cfg(test)]
mod tests;
