//! The turns of the tenants that wait with one priority: deficit round robin in predicted work.

use std::collections::{BTreeMap, VecDeque};

use types::TenantId;

use super::terms::TenantWeight;

/// The work by which a tenant of weight one may be served in one turn. It is small, so that tenants alternate.
const TURN_WORK: i64 = 1024;

/// The number of a ticket. Later tickets have larger numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct TicketId(pub(super) u64);

#[cfg(test)]
impl TicketId {
    pub(super) fn first() -> Self {
        Self(1)
    }
}

/// The waiting tickets of one priority, by tenant.
#[derive(Debug, Default)]
pub(super) struct TenantQueues {
    tenants: BTreeMap<TenantId, TenantTickets>,
    /// The tenants in order of their turns. The first one has its turn.
    ring: VecDeque<TenantId>,
    /// Whether the first tenant has received the work of its turn.
    has_begun: bool,
}

#[derive(Debug, Default)]
struct TenantTickets {
    weight: TenantWeight,
    /// The work by which the tenant may still be served. Negative if it was served ahead of its turn.
    deficit: i64,
    /// The sum of the tickets' work.
    work: u64,
    /// The work of each ticket, in order of arrival.
    tickets: BTreeMap<TicketId, u64>,
}

/// A tenant's share of the waiting tickets.
#[derive(Clone, Debug)]
pub(super) struct TenantShare {
    /// The number of tickets per weight.
    pub(super) per_weight: f64,
    pub(super) newest: TicketId,
}

impl TenantQueues {
    pub(super) fn push(&mut self, tenant: &TenantId, weight: TenantWeight, id: TicketId, work: u64) {
        if !self.tenants.contains_key(tenant) {
            self.ring.push_back(tenant.clone());
        }
        let tickets = self.tenants.entry(tenant.clone()).or_default();
        // A reload of the tenants file may have changed the weight.
        tickets.weight = weight;
        tickets.work += work;
        tickets.tickets.insert(id, work);
    }

    /// Removes a ticket. A tenant without tickets loses its deficit.
    pub(super) fn remove(&mut self, tenant: &TenantId, id: TicketId) {
        let Some(tickets) = self.tenants.get_mut(tenant) else { return };
        tickets.work -= tickets.tickets.remove(&id).unwrap_or_default();
        if tickets.tickets.is_empty() {
            self.tenants.remove(tenant);
            self.has_begun &= self.ring.front() != Some(tenant);
            self.ring.retain(|other| other != tenant);
        }
    }

    /// Charges a tenant for a ticket that is served. Call it before the ticket is removed.
    pub(super) fn charge(&mut self, tenant: &TenantId, id: TicketId) {
        if let Some(tickets) = self.tenants.get_mut(tenant) {
            tickets.deficit -= tickets.tickets.get(&id).map_or(0, |work| *work as i64);
        }
    }

    /// Returns the ticket to serve next; `None` without tickets. It stays the same until a ticket comes or goes.
    pub(super) fn next(&mut self) -> Option<TicketId> {
        self.ring.front()?;
        loop {
            for _ in 0..=self.ring.len() {
                if let Some(id) = self.next_of_turn() {
                    return Some(id);
                }
                self.ring.rotate_left(1);
                self.has_begun = false;
            }
            self.skip_rounds();
        }
    }

    /// Returns the ticket that the first tenant may be served in its turn.
    fn next_of_turn(&mut self) -> Option<TicketId> {
        let tickets = self.tenants.get_mut(self.ring.front()?)?;
        if !self.has_begun {
            tickets.deficit += tickets.turn_work();
            self.has_begun = true;
        }
        let (id, work) = tickets.tickets.first_key_value()?;
        (tickets.deficit >= *work as i64).then_some(*id)
    }

    /// Gives all tenants the work of the rounds in which none of them could be served.
    fn skip_rounds(&mut self) {
        let rounds = self.tenants.values().map(TenantTickets::rounds_left).min().unwrap_or(1) - 1;
        for tickets in self.tenants.values_mut() {
            tickets.deficit += rounds.max(0) * tickets.turn_work();
        }
    }

    /// Returns the work that is served before a new ticket of this tenant, if all tenants with tickets take turns.
    pub(super) fn work_before(&self, tenant: &TenantId, weight: TenantWeight, work: u64) -> u64 {
        let own = self.tenants.get(tenant).map_or(0, |tickets| tickets.work);
        let until_served = (own + work) as f64 / f64::from(weight.0.get());
        let others = self.tenants.iter().filter(|(other, _)| *other != tenant);
        let meanwhile = others.map(|(_, tickets)| {
            let share = until_served * f64::from(tickets.weight.0.get());
            tickets.work.min(share as u64)
        });
        own + meanwhile.sum::<u64>()
    }

    pub(super) fn work(&self) -> u64 {
        self.tenants.values().map(|tickets| tickets.work).sum()
    }

    /// Returns the share of the tenant that has the most tickets per weight.
    pub(super) fn largest_share(&self) -> Option<TenantShare> {
        let share = |tickets: &TenantTickets| {
            let per_weight = tickets.tickets.len() as f64 / f64::from(tickets.weight.0.get());
            Some(TenantShare { per_weight, newest: *tickets.tickets.last_key_value()?.0 })
        };
        let shares = self.tenants.values().filter_map(share);
        shares.max_by(|one, other| one.per_weight.total_cmp(&other.per_weight))
    }

    /// Returns the number of tickets per weight that a tenant has with one more ticket.
    pub(super) fn share_with_one_more(&self, tenant: &TenantId, weight: TenantWeight) -> f64 {
        let n_waiting = self.tenants.get(tenant).map_or(0, |tickets| tickets.tickets.len());
        (n_waiting + 1) as f64 / f64::from(weight.0.get())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.tenants.is_empty()
    }

    /// Returns the number of tickets of each tenant.
    pub(super) fn counts(&self) -> impl Iterator<Item = (&TenantId, usize)> {
        self.tenants.iter().map(|(tenant, tickets)| (tenant, tickets.tickets.len()))
    }

    pub(super) fn contains(&self, tenant: &TenantId, id: TicketId) -> bool {
        self.tenants.get(tenant).is_some_and(|tickets| tickets.tickets.contains_key(&id))
    }
}

impl TenantTickets {
    fn turn_work(&self) -> i64 {
        TURN_WORK * i64::from(self.weight.0.get())
    }

    /// Returns the number of turns after which the tenant's first ticket can be served.
    fn rounds_left(&self) -> i64 {
        let work = self.tickets.first_key_value().map_or(0, |(_, work)| *work as i64);
        (work - self.deficit - 1).max(0) / self.turn_work() + 1
    }
}
