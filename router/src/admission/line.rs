//! The line of one model: which waiting prompt is served next, and which prompts are refused.
//!
//! The line knows neither nodes nor tasks, and takes the time as an argument. The order is:
//!
//! 1. Higher priorities are served first.
//! 2. Tenants of one priority take turns: deficit round robin in predicted work, by their weights.
//! 3. A tenant's prompts are served in order of arrival.
//! 4. Age comes before all of it: one of [`AGED_EVERY`] admissions goes to the oldest prompt, if it has waited for a
//!    quarter of the longest wait. So the n-th oldest prompt is served at the latest
//!    n × `AGED_EVERY` admissions after it has aged, and a tenant cannot take the whole line by letting its prompts age.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use chassis::guards::{Guard, stands};
use tokio::time::Instant;
use types::TenantId;
use types::prompt::Priority;

use super::rate::ServiceRate;
use super::refusal::{LineRefusal, RefusalReason};
use super::tenant_queues::TenantQueues;
pub(super) use super::tenant_queues::TicketId;
use super::terms::{AdmissionTerms, Shedding};

/// One of this many admissions goes to the oldest prompt, if it has aged.
pub(super) const AGED_EVERY: u32 = 16;

/// Predicted waits are divided by this factor, as a margin: under overload every admitted prompt is close to its
/// objective, and without the margin half of them would miss it.
const WAIT_MARGIN: f64 = 0.9;

/// A prompt that waits, or that wants to.
#[derive(Clone, Debug)]
pub(super) struct WaitingPrompt {
    pub(super) tenant: TenantId,
    pub(super) priority: Priority,
    pub(super) terms: AdmissionTerms,
    /// The predicted work, in tokens.
    pub(super) work: u64,
    /// The arrival of the request. Its objective counts from here.
    pub(super) arrived: Instant,
}

/// The times that nodes are predicted to need for a prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct PredictedService {
    /// From the admission to the first token.
    pub(super) first_token: Duration,
    /// From one token to the next.
    pub(super) token_gap: Duration,
}

/// The bounds of a line.
#[derive(Clone, Copy, Debug)]
pub(super) struct LineBounds {
    /// The largest number of prompts, waiting and served.
    pub(super) requests_max: usize,
    /// The longest wait.
    pub(super) wait_max: Duration,
}

impl LineBounds {
    /// Returns the time after which a waiting prompt has aged.
    fn aged_after(&self) -> Duration {
        self.wait_max / 4
    }
}

/// A prompt that has entered the line.
#[derive(Debug)]
pub(super) struct Entered {
    pub(super) id: TicketId,
    pub(super) predicted_wait: Duration,
    /// The time at which the prompt is refused if it still waits: its latency objective can no longer be met, or the
    /// longest allowed wait has passed.
    pub(super) leaves_at: Instant,
    /// The prompt that had to leave for it.
    pub(super) displaced: Option<(TicketId, LineRefusal)>,
}

#[derive(Debug)]
struct Ticket {
    prompt: WaitingPrompt,
    entered: Instant,
}

/// The line of one model.
#[derive(Debug)]
pub(super) struct Line {
    bounds: LineBounds,
    n_entered: u64,
    waiting: BTreeMap<TicketId, Ticket>,
    /// The waiting tickets by priority, the highest first.
    classes: BTreeMap<Reverse<Priority>, TenantQueues>,
    /// The waiting tickets that leave first: the lowest priority first, and the newest first.
    sheddable: BTreeSet<(Priority, Reverse<TicketId>)>,
    served: BTreeSet<TicketId>,
    admitted_since_aged: u32,
    rate: ServiceRate,
}

impl Line {
    pub(super) fn new(bounds: LineBounds) -> Self {
        Self {
            bounds,
            n_entered: 0,
            waiting: BTreeMap::new(),
            classes: BTreeMap::new(),
            sheddable: BTreeSet::new(),
            served: BTreeSet::new(),
            admitted_since_aged: 0,
            rate: ServiceRate::default(),
        }
    }

    /// Adds a prompt at its place. Refuses it if its objective would be missed, or if the line is full and no other
    /// prompt gives way.
    pub(super) fn enter(
        &mut self,
        prompt: WaitingPrompt,
        service: PredictedService,
        now: Instant,
    ) -> Result<Entered, LineRefusal> {
        self.rate.advance(now, self.waiting.len());
        let predicted_wait = self.predicted_wait(&prompt);
        self.check(&prompt, predicted_wait, service, now)?;
        let displaced = self.make_place(&prompt)?;
        self.n_entered += 1;
        let id = TicketId(self.n_entered);
        let (tenant, weight) = (&prompt.tenant, prompt.terms.weight);
        self.classes.entry(Reverse(prompt.priority)).or_default().push(tenant, weight, id, prompt.work);
        if prompt.terms.shedding == Shedding::First {
            self.sheddable.insert((prompt.priority, Reverse(id)));
        }
        let waits_until = now + self.bounds.wait_max;
        let held_until = |longest: Duration| {
            prompt.arrived.checked_add(longest.saturating_sub(service.first_token)).unwrap_or(waits_until)
        };
        let first_token = prompt.terms.objective.first_token;
        let leaves_at = first_token.map_or(waits_until, |longest| held_until(longest).min(waits_until));
        self.waiting.insert(id, Ticket { prompt, entered: now });
        self.rate.advance(now, self.waiting.len());
        Ok(Entered { id, predicted_wait, leaves_at, displaced })
    }

    /// Returns the ticket to serve next. It keeps its place until it is admitted or removed.
    pub(super) fn next(&mut self, now: Instant) -> Option<TicketId> {
        if let Some((id, ticket)) = self.waiting.first_key_value()
            && self.admitted_since_aged + 1 >= AGED_EVERY
            && now >= ticket.entered + self.bounds.aged_after()
        {
            return Some(*id);
        }
        self.classes.values_mut().next()?.next()
    }

    /// Serves a waiting ticket. Returns the time that it has waited.
    pub(super) fn admit(&mut self, id: TicketId, now: Instant) -> Option<Duration> {
        let ticket = self.waiting.get(&id)?;
        let waited = now.saturating_duration_since(ticket.entered);
        let is_oldest = self.waiting.first_key_value().is_some_and(|(first, _)| *first == id);
        let has_aged = is_oldest && waited >= self.bounds.aged_after();
        self.admitted_since_aged = if has_aged { 0 } else { self.admitted_since_aged.saturating_add(1) };
        self.rate.advance(now, self.waiting.len());
        if !waited.is_zero() {
            self.rate.served(ticket.prompt.work);
        }
        if let Some(class) = self.classes.get_mut(&Reverse(ticket.prompt.priority)) {
            class.charge(&ticket.prompt.tenant, id);
        }
        if stands(Guard::Admission) {
            self.leave(id);
        }
        self.served.insert(id);
        self.rate.advance(now, self.waiting.len());
        Some(waited)
    }

    /// Removes a ticket that has ended, waiting or served.
    pub(super) fn remove(&mut self, id: TicketId, now: Instant) {
        self.rate.advance(now, self.waiting.len());
        self.leave(id);
        self.served.remove(&id);
        self.rate.advance(now, self.waiting.len());
    }

    /// Checks whether a waiting ticket that could be served now still meets its objective.
    pub(super) fn check_again(
        &self,
        id: TicketId,
        service: PredictedService,
        now: Instant,
    ) -> Result<(), LineRefusal> {
        self.waiting
            .get(&id)
            .map_or(Ok(()), |ticket| self.check(&ticket.prompt, Duration::ZERO, service, now))
    }

    /// Returns the refusal of a ticket that still waits at its `leaves_at`.
    pub(super) fn timed_out(&self, id: TicketId, now: Instant) -> Option<LineRefusal> {
        let ticket = self.waiting.get(&id)?;
        let retry_after = self.retry_after();
        let waited = now.saturating_duration_since(ticket.entered);
        match ticket.prompt.terms.objective.first_token {
            Some(longest) if waited < self.bounds.wait_max => {
                Some(LineRefusal::missed_first_token(waited, longest, retry_after))
            }
            _ => Some(LineRefusal::waited(waited, retry_after)),
        }
    }

    pub(super) fn n_waiting(&self) -> usize {
        self.waiting.len()
    }

    pub(super) fn n_served(&self) -> usize {
        self.served.len()
    }

    /// Returns the waiting work that is served per second; `None` if it is not known.
    pub(super) fn work_per_second(&self) -> Option<f64> {
        self.rate.per_second()
    }

    /// Returns the number of waiting tickets by priority and tenant.
    pub(super) fn counts(&self) -> impl Iterator<Item = (Priority, &TenantId, usize)> {
        self.classes.iter().flat_map(|(Reverse(priority), class)| {
            class.counts().map(move |(tenant, n_waiting)| (*priority, tenant, n_waiting))
        })
    }

    /// Checks that each ticket is in one state, and in the turns of its tenant while it waits.
    pub(super) fn integrity(&self) -> Result<(), String> {
        let of_turns: usize = self.counts().map(|(_, _, n_waiting)| n_waiting).sum();
        if of_turns != self.waiting.len() {
            return Err(format!("{of_turns} tickets have a turn, and {} wait", self.waiting.len()));
        }
        for (id, Ticket { prompt, .. }) in &self.waiting {
            let class = self.classes.get(&Reverse(prompt.priority));
            if !class.is_some_and(|class| class.contains(&prompt.tenant, *id)) {
                return Err(format!("{id:?} waits without a turn"));
            }
            if self.served.contains(id) {
                return Err(format!("{id:?} is served and waits to be served again"));
            }
        }
        let n_inside = self.waiting.len() + self.served.len();
        let max = self.bounds.requests_max;
        if n_inside > max { Err(format!("{n_inside} tickets in a line of {max}")) } else { Ok(()) }
    }

    /// Checks that the objective is met if the prompt waits for `wait` from now.
    fn check(
        &self,
        prompt: &WaitingPrompt,
        wait: Duration,
        service: PredictedService,
        now: Instant,
    ) -> Result<(), LineRefusal> {
        let objective = prompt.terms.objective;
        let first_token = now.saturating_duration_since(prompt.arrived) + wait + service.first_token;
        match (objective.first_token, objective.token_gap) {
            (Some(longest), _) if first_token > longest => {
                Err(LineRefusal::late_first_token(first_token, longest))
            }
            (_, Some(longest)) if service.token_gap > longest => {
                Err(LineRefusal::late_tokens(service.token_gap, longest, self.retry_after()))
            }
            _ => Ok(()),
        }
    }

    /// Predicts the wait of a new prompt, with the margin. It is zero while no prompt waits, or if the rate is not known.
    fn predicted_wait(&self, prompt: &WaitingPrompt) -> Duration {
        if self.waiting.is_empty() {
            return Duration::ZERO;
        }
        let higher =
            self.classes.range(..Reverse(prompt.priority)).map(|(_, class)| class.work()).sum::<u64>();
        let class = self.classes.get(&Reverse(prompt.priority));
        let before =
            |class: &TenantQueues| class.work_before(&prompt.tenant, prompt.terms.weight, prompt.work);
        let work = higher + class.map_or(0, before) + prompt.work;
        self.rate.time_of(work).unwrap_or_default().div_f64(WAIT_MARGIN)
    }

    /// Finds a place for a prompt. If the line is full, a prompt of no higher priority gives way: one that may be shed,
    /// or the newest one of the tenant with the most waiting prompts per weight.
    fn make_place(&mut self, prompt: &WaitingPrompt) -> Result<Option<(TicketId, LineRefusal)>, LineRefusal> {
        let n_inside = self.waiting.len() + self.served.len();
        if n_inside < self.bounds.requests_max {
            return Ok(None);
        }
        let retry_after = self.retry_after();
        let max = self.bounds.requests_max;
        let Some((id, reason)) = self.first_to_leave(prompt) else {
            return Err(LineRefusal::full(max, retry_after));
        };
        self.leave(id);
        Ok(Some((id, LineRefusal::displaced(reason, max, retry_after))))
    }

    fn first_to_leave(&self, prompt: &WaitingPrompt) -> Option<(TicketId, RefusalReason)> {
        if prompt.terms.shedding == Shedding::First {
            return None;
        }
        if let Some((priority, Reverse(id))) = self.sheddable.first()
            && *priority <= prompt.priority
        {
            return Some((*id, RefusalReason::Shed));
        }
        let (Reverse(lowest), class) = self.classes.last_key_value()?;
        let largest = class.largest_share()?;
        let own = class.share_with_one_more(&prompt.tenant, prompt.terms.weight);
        let gives_way = *lowest < prompt.priority || (*lowest == prompt.priority && largest.per_weight > own);
        gives_way.then_some((largest.newest, RefusalReason::Displaced))
    }

    /// Takes a ticket out of the waiting ones.
    fn leave(&mut self, id: TicketId) {
        let Some(Ticket { prompt, .. }) = self.waiting.remove(&id) else { return };
        self.sheddable.remove(&(prompt.priority, Reverse(id)));
        if let Some(class) = self.classes.get_mut(&Reverse(prompt.priority)) {
            class.remove(&prompt.tenant, id);
            if class.is_empty() {
                self.classes.remove(&Reverse(prompt.priority));
            }
        }
    }

    /// Returns the time in which the line serves all prompts that wait now.
    fn retry_after(&self) -> Duration {
        let work = self.classes.values().map(TenantQueues::work).sum();
        self.rate.time_of(work).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests;
