//! The membership table: leases, and who holds which place. Pure: the time comes in as an argument.

use std::collections::BTreeMap;
use std::time::Duration;

use chassis::guards::{Guard, stands};
use tokio::time::Instant;
use types::{NodeId, NodeInfo};

use crate::MembershipEvent;
use crate::error::RegistryError;
use crate::members::{joined, left};

/// More nodes than Baton is made for; more announcements are a mistake or an attack.
pub const N_MEMBERS_MAX: usize = 10_000;

/// Names one lease. Drawn at random, so that a lease of a former life of the registry is unknown to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LeaseId(pub u64);

/// Everyone who is a member. Every method says what it changed.
#[derive(Debug)]
pub struct Table {
    ttl: Duration,
    places: BTreeMap<NodeId, Member>,
    leases: BTreeMap<LeaseId, NodeId>,
    /// When [`Table::lapse`] last looked.
    looked: Instant,
}

#[derive(Debug)]
struct Member {
    node: NodeInfo,
    lease: LeaseId,
    lapses: Instant,
}

impl Table {
    /// Leases last `ttl` from each sign of life. [`Table::lapse`] must be called several times within it.
    pub fn new(ttl: Duration, now: Instant) -> Self {
        Self { ttl, places: BTreeMap::new(), leases: BTreeMap::new(), looked: now }
    }

    pub fn ttl(&self) -> Duration {
        self.ttl
    }

    /// Gives the place of `node.id` to this life of it, under `lease`, unless a later life holds it.
    /// The lease that held the place before is gone, and with it the power to withdraw.
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

    /// A sign of life. Refused once the lease has lapsed or was replaced.
    pub fn keep_alive(&mut self, lease: LeaseId, now: Instant) -> Result<(), RegistryError> {
        let id = self.leases.get(&lease).ok_or(RegistryError::LeaseLost)?;
        let place = self.places.get_mut(id).ok_or(RegistryError::LeaseLost)?;
        place.lapses = now + self.ttl;
        Ok(())
    }

    /// Gives the place up. A lease that no longer holds one changes nothing.
    pub fn withdraw(&mut self, lease: LeaseId) -> Option<MembershipEvent> {
        let id = self.leases.remove(&lease)?;
        self.places.remove(&id).map(|place| left(&place.node))
    }

    /// Ends the leases that nothing kept alive.
    ///
    /// If this comes late, then this process stood still (stopped, or out of CPU) and cannot tell who was silent
    /// from whom it did not hear. Everyone gets a whole lease's time again.
    pub fn lapse(&mut self, now: Instant) -> Vec<MembershipEvent> {
        let stood_still = now.saturating_duration_since(self.looked) > self.ttl / 2;
        self.looked = now;
        if stood_still {
            self.renew_all(now);
            return Vec::new();
        }
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
    }

    pub fn members(&self) -> Vec<NodeInfo> {
        self.places.values().map(|place| place.node.clone()).collect()
    }
}

#[cfg(test)]
mod tests;
