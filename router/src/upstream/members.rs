//! The servers of one upstream pool: their health, their requests, and the choice among them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use chassis::{Gate, Task, spawn_guarded};
use tokio::time::Instant;
use tracing::info;

use super::client::{EngineClient, Unanswered};
use super::settings::MemberAddress;
use crate::breaker::Breaker;

/// The pause between two health checks of a server.
const HEALTH_EVERY: Duration = Duration::from_millis(500);
/// The longest time of a health check's answer. A busy server answers late.
const HEALTH_WITHIN: Duration = Duration::from_secs(5);

/// What a server does for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LegRole {
    Prefill,
    Decode,
}

impl LegRole {
    pub const ALL: [Self; 2] = [Self::Prefill, Self::Decode];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// What the last contact with a server said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    /// No check has ended yet. Requests may go there.
    Unknown,
    Up,
    Down,
}

impl Health {
    pub const ALL: [Self; 3] = [Self::Unknown, Self::Up, Self::Down];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Up => "up",
            Self::Down => "down",
        }
    }
}

/// The servers of one kind. Dropping it ends their health checks.
#[derive(Debug)]
pub struct Pool {
    role: LegRole,
    members: Vec<Arc<Member>>,
    _checks: Vec<Task<()>>,
}

/// One server.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) address: MemberAddress,
    /// Locked for one look-up or change.
    state: Mutex<MemberState>,
}

#[derive(Debug)]
struct MemberState {
    health: Health,
    in_flight: u32,
    /// The time at which the server got its last request.
    last_request: Option<Instant>,
    /// The server's failures; `None` without any since its last success.
    breaker: Option<Breaker>,
}

/// One server as the choice among servers sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    pub health: Health,
    /// Whether the breaker lets requests through.
    pub admits: bool,
    /// Whether the request has failed there already.
    pub has_failed: bool,
    pub in_flight: u32,
    pub last_request: Option<Instant>,
}

/// One server as pages and metrics show it.
#[derive(Clone, Debug)]
pub struct MemberStatus {
    pub role: LegRole,
    pub url: String,
    pub health: Health,
    pub in_flight: u32,
    /// The failures in a row.
    pub failures: u32,
}

/// One request's leg on a server. Dropping it ends its count. Without a verdict it says nothing about the
/// server.
#[derive(Debug)]
pub(super) struct LegPlace {
    member: Arc<Member>,
    /// Whether the request tries a server whose breaker was open.
    is_trial: bool,
}

/// Chooses a server: among those that are not down and where the request has not failed, the one with the
/// fewest requests, and of equal ones the one whose last request is the longest ago. Servers with open
/// breakers are chosen only if there are no others.
pub fn choose(candidates: &[Candidate]) -> Option<usize> {
    let usable = |one: &Candidate| one.health != Health::Down && !one.has_failed;
    let order = |(_, one): &(usize, &Candidate)| (!one.admits, one.in_flight, one.last_request);
    candidates.iter().enumerate().filter(|(_, one)| usable(one)).min_by_key(order).map(|(nth, _)| nth)
}

// === impl Pool ===

impl Pool {
    /// Begins to check the servers.
    pub(super) fn new(
        role: LegRole,
        addresses: &[MemberAddress],
        client: &EngineClient,
        gate: &Gate,
    ) -> Self {
        let members: Vec<Arc<Member>> = addresses.iter().cloned().map(Member::new).map(Arc::new).collect();
        let check = |member: &Arc<Member>| {
            let (member, client) = (Arc::clone(member), client.clone());
            spawn_guarded(gate, "upstream health", async move { member.follow_health(role, &client).await })
        };
        let _checks = members.iter().map(check).collect();
        Self { role, members, _checks }
    }

    /// Chooses a server at `now` and counts a leg there. `failed` are the URLs of servers where the request
    /// has failed. An error says why there is none.
    pub(super) fn place(&self, failed: &[String], now: Instant) -> Result<LegPlace, String> {
        let candidates: Vec<Candidate> = self.members.iter().map(|one| one.candidate(failed, now)).collect();
        match choose(&candidates) {
            Some(nth) => Ok(LegPlace::new(Arc::clone(&self.members[nth]), now)),
            None => Err(self.shortage()),
        }
    }

    /// Checks that a server of this kind is up.
    pub(super) fn ready(&self) -> Result<(), String> {
        let is_up = self.members.iter().any(|one| one.state().health == Health::Up);
        if is_up { Ok(()) } else { Err(self.shortage()) }
    }

    fn shortage(&self) -> String {
        let n_down = self.members.iter().filter(|one| one.state().health == Health::Down).count();
        let (role, n) = (self.role.as_str(), self.members.len());
        format!("no {role} server is usable: {n_down} of {n} are down")
    }

    pub(super) fn status(&self) -> impl Iterator<Item = MemberStatus> + '_ {
        self.members.iter().map(|one| one.status(self.role))
    }
}

// === impl Member ===

impl Member {
    fn new(address: MemberAddress) -> Self {
        let state = MemberState { health: Health::Unknown, in_flight: 0, last_request: None, breaker: None };
        Self { address, state: Mutex::new(state) }
    }

    fn candidate(&self, failed: &[String], now: Instant) -> Candidate {
        let state = self.state();
        Candidate {
            health: state.health,
            admits: state.breaker.is_none_or(|breaker| breaker.admits(now)),
            has_failed: failed.contains(&self.address.base),
            in_flight: state.in_flight,
            last_request: state.last_request,
        }
    }

    fn status(&self, role: LegRole) -> MemberStatus {
        let state = self.state();
        MemberStatus {
            role,
            url: self.address.base.clone(),
            health: state.health,
            in_flight: state.in_flight,
            failures: state.breaker.map_or(0, |breaker| breaker.failures()),
        }
    }

    /// Checks the server's health until the future is dropped.
    async fn follow_health(&self, role: LegRole, client: &EngineClient) {
        loop {
            let found = match client.check_health(&self.address.base, HEALTH_WITHIN).await {
                Ok(()) => Health::Up,
                Err(_) => Health::Down,
            };
            self.found(role, found);
            tokio::time::sleep(HEALTH_EVERY).await;
        }
    }

    fn found(&self, role: LegRole, found: Health) {
        let before = std::mem::replace(&mut self.state().health, found);
        if before != found {
            let (url, role) = (&self.address.base, role.as_str());
            info!(url, role, health = found.as_str(), "health of upstream server changed");
        }
    }

    fn state(&self) -> MutexGuard<'_, MemberState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl LegPlace ===

impl LegPlace {
    fn new(member: Arc<Member>, now: Instant) -> Self {
        let mut state = member.state();
        state.in_flight += 1;
        state.last_request = Some(now);
        let is_trial = state.breaker.as_mut().is_some_and(|breaker| breaker.begin(now));
        drop(state);
        Self { member, is_trial }
    }

    pub(super) fn address(&self) -> &MemberAddress {
        &self.member.address
    }

    /// Notes that the server has done its work.
    pub(super) fn succeeded(&self) {
        self.member.state().breaker = None;
    }

    /// Notes that the server's work failed.
    pub(super) fn failed(&self, now: Instant) {
        let mut state = self.member.state();
        let breaker = state.breaker.get_or_insert_with(|| Breaker::new(now));
        if breaker.failed(now) {
            let (url, failures) = (&self.member.address.base, breaker.failures());
            info!(url, failures, "upstream server gets no work for a while: its work fails");
        }
    }

    /// Notes that the server gave no answer. Without a connection it is down until a health check succeeds.
    pub(super) fn unanswered(&self, role: LegRole, why: &Unanswered, now: Instant) {
        match why {
            Unanswered::Unreachable(_) => self.member.found(role, Health::Down),
            Unanswered::Broken(_) => self.failed(now),
        }
    }
}

impl Drop for LegPlace {
    fn drop(&mut self) {
        let mut state = self.member.state();
        state.in_flight -= 1;
        if self.is_trial
            && let Some(breaker) = &mut state.breaker
        {
            breaker.abandoned(Instant::now());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(in_flight: u32) -> Candidate {
        Candidate { health: Health::Up, admits: true, has_failed: false, in_flight, last_request: None }
    }

    #[tokio::test(start_paused = true)]
    async fn the_server_with_the_fewest_requests_is_chosen() {
        let down = |in_flight| Candidate { health: Health::Down, ..candidate(in_flight) };
        let resting = |in_flight| Candidate { admits: false, ..candidate(in_flight) };
        let failed = |in_flight| Candidate { has_failed: true, ..candidate(in_flight) };
        let unknown = |in_flight| Candidate { health: Health::Unknown, ..candidate(in_flight) };
        let now = Instant::now();
        let used = |after_ms| Candidate {
            last_request: Some(now + Duration::from_millis(after_ms)),
            ..candidate(1)
        };
        for (candidates, expected) in [
            (vec![], None),
            (vec![candidate(2), candidate(1), candidate(1)], Some(1)),
            (vec![down(0), candidate(9)], Some(1)),
            (vec![down(0), failed(0)], None),
            (vec![resting(0), candidate(9)], Some(1)),
            (vec![resting(3), resting(2), down(0)], Some(1)),
            (vec![unknown(0), candidate(1)], Some(0)),
            (vec![used(5), used(3), used(4)], Some(1)),
            (vec![used(5), candidate(1)], Some(1)),
        ] {
            assert_eq!(choose(&candidates), expected, "{candidates:?}");
        }
    }

    fn pool() -> Pool {
        let address =
            |url: &str| MemberAddress { base: url.to_owned(), host: "a".to_owned(), bootstrap_port: 1 };
        let members = ["a", "b"].map(address).map(Member::new).map(Arc::new).to_vec();
        Pool { role: LegRole::Prefill, members, _checks: Vec::new() }
    }

    fn url(place: &LegPlace) -> &str {
        &place.address().base
    }

    #[tokio::test(start_paused = true)]
    async fn legs_count_until_they_are_dropped() {
        let (pool, now) = (pool(), Instant::now());
        let first = pool.place(&[], now).expect("a server");
        let second = pool.place(&[], now).expect("a server");
        assert_eq!([url(&first), url(&second)], ["a", "b"]);
        drop(second);
        assert_eq!(url(&pool.place(&[], now).expect("a server")), "b");
        assert_eq!(pool.status().map(|one| one.in_flight).collect::<Vec<_>>(), [1, 0]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_that_is_not_reached_is_down_and_one_that_fails_rests() {
        let (pool, now) = (pool(), Instant::now());
        let gone = Unanswered::Unreachable("refused".to_owned());
        pool.place(&[], now).expect("a server").unanswered(LegRole::Prefill, &gone, now);
        for _ in 0..3 {
            let place = pool.place(&[], now).expect("a server");
            assert_eq!(url(&place), "b");
            place.failed(now);
        }
        assert_eq!(url(&pool.place(&[], now).expect("the last server that is not down")), "b");
        let reason = pool.place(&["b".to_owned()], now).expect_err("none is left");
        assert_eq!(reason, "no prefill server is usable: 1 of 2 are down");
        pool.members[0].found(LegRole::Prefill, Health::Up);
        assert_eq!(url(&pool.place(&[], now).expect("a server")), "a");
    }
}
