//! The servers of one upstream pool: their health, their requests, and the choice among them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use chassis::{Gate, Task, spawn_guarded};
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::info;

use super::client::{EngineClient, Unanswered};
use super::settings::MemberAddress;
use crate::breaker::Breaker;

/// The pause between two health checks of a server.
const HEALTH_EVERY: Duration = Duration::from_millis(500);
/// The longest time of a health check's answer. A busy server answers late.
const HEALTH_WITHIN: Duration = Duration::from_secs(5);

/// The leg of a request that a server computes.
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

/// The health of a server by the last contact with it.
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

/// The servers of one kind. Dropping the last clone ends their health checks.
#[derive(Clone, Debug)]
pub struct Pool {
    role: LegRole,
    /// Locked for one look-up or change.
    members: Arc<Mutex<Members>>,
    client: EngineClient,
    gate: Gate,
}

#[derive(Debug, Default)]
struct Members {
    all: Vec<CheckedMember>,
    source: SourceState,
}

/// The source of a pool's servers, as pages show it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SourceState {
    /// The URL of the list, without a password; `None`: the settings list the servers.
    pub url: Option<String>,
    /// Why the source gives no list now. The last one stays in use.
    pub failure: Option<String>,
}

/// A server and its health checks, which end when it leaves the pool.
#[derive(Debug)]
struct CheckedMember {
    member: Arc<Member>,
    _check: Task<()>,
}

/// One server.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) address: MemberAddress,
    /// Locked for one look-up or change.
    state: Mutex<MemberState>,
    /// The result of the last health check. A failed connect changes only the state, because other legs may be
    /// answered.
    checked: watch::Sender<Health>,
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
    /// Makes a pool without servers.
    pub(super) fn new(role: LegRole, client: &EngineClient, gate: &Gate) -> Self {
        Self { role, members: Arc::default(), client: client.clone(), gate: gate.clone() }
    }

    pub(super) fn role(&self) -> LegRole {
        self.role
    }

    /// Replaces the servers. Those that stay keep their health and counts; the requests of the others go on.
    pub(super) fn set(&self, addresses: Vec<MemberAddress>) {
        let mut members = self.members();
        let before = std::mem::take(&mut members.all);
        let (mut known, mut all) = (before, Vec::with_capacity(addresses.len()));
        for address in addresses {
            all.push(match known.iter().position(|one| one.member.address == address) {
                Some(nth) => known.swap_remove(nth),
                None => self.checked(address),
            });
        }
        members.all = all;
    }

    /// Begins to check a server.
    fn checked(&self, address: MemberAddress) -> CheckedMember {
        let member = Arc::new(Member::new(address));
        let (checked, client, role) = (Arc::clone(&member), self.client.clone(), self.role);
        let check = async move { checked.follow_health(role, &client).await };
        CheckedMember { member, _check: spawn_guarded(&self.gate, "upstream health", check) }
    }

    pub(super) fn set_source(&self, source: SourceState) {
        self.members().source = source;
    }

    pub(super) fn source(&self) -> SourceState {
        self.members().source.clone()
    }

    /// Chooses a server at `now` and counts a leg there. `failed` are the URLs of servers where the request
    /// has failed. An error says why there is none.
    pub(super) fn place(&self, failed: &[String], now: Instant) -> Result<LegPlace, String> {
        let members = self.members();
        let candidates: Vec<Candidate> =
            members.all.iter().map(|one| one.member.candidate(failed, now)).collect();
        match choose(&candidates) {
            Some(nth) => Ok(LegPlace::new(Arc::clone(&members.all[nth].member), now)),
            None => Err(self.shortage(&members)),
        }
    }

    /// Checks that a server of this kind is up.
    pub(super) fn ready(&self) -> Result<(), String> {
        let members = self.members();
        let is_up = members.all.iter().any(|one| one.member.state().health == Health::Up);
        if is_up { Ok(()) } else { Err(self.shortage(&members)) }
    }

    fn shortage(&self, members: &Members) -> String {
        let n_down = members.all.iter().filter(|one| one.member.state().health == Health::Down).count();
        let (role, n) = (self.role.as_str(), members.all.len());
        match &members.source.failure {
            Some(reason) => format!("no {role} server is usable: {n_down} of {n} are down, and {reason}"),
            None => format!("no {role} server is usable: {n_down} of {n} are down"),
        }
    }

    pub(super) fn status(&self) -> Vec<MemberStatus> {
        self.members().all.iter().map(|one| one.member.status(self.role)).collect()
    }

    fn members(&self) -> MutexGuard<'_, Members> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Member ===

impl Member {
    fn new(address: MemberAddress) -> Self {
        let state = MemberState { health: Health::Unknown, in_flight: 0, last_request: None, breaker: None };
        Self { address, state: Mutex::new(state), checked: watch::Sender::new(Health::Unknown) }
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
            self.checked.send_replace(found);
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

    /// Returns the result of each health check of the server.
    pub(super) fn checks(&self) -> watch::Receiver<Health> {
        self.member.checked.subscribe()
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
            // The check that failed has noted it.
            Unanswered::Down => {}
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
    use http::Request;
    use http_body_util::Full;
    use prometheus::{IntCounterVec, Opts};
    use tokio::io::AsyncWriteExt as _;
    use tokio::net::TcpListener;

    use super::*;
    use crate::upstream::leg::{BegunLeg, FailedLeg, Leg, LegFailure};

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

    fn addresses<const N: usize>(urls: [&str; N]) -> Vec<MemberAddress> {
        let address =
            |url: &str| MemberAddress { base: url.to_owned(), host: "a".to_owned(), bootstrap_port: 1 };
        urls.map(address).to_vec()
    }

    /// Makes a pool of two servers. Their health is not checked, because the tests wait for nothing.
    fn pool() -> Pool {
        let pool = Pool::new(LegRole::Prefill, &EngineClient::new(), &Gate::new("test"));
        pool.set(addresses(["a", "b"]));
        pool
    }

    /// Begins a leg on a server that answers with `sent` and then hangs, until its health check fails.
    async fn begun_on_a_hung_server(sent: &[u8]) -> Result<BegunLeg, FailedLeg> {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let base = format!("http://{}", listener.local_addr().expect("bound"));
        let member = Arc::new(Member::new(addresses([&base]).remove(0)));
        let request = Request::post(&base).body(Full::default()).expect("a request");
        let counter = IntCounterVec::new(Opts::new("legs", "Legs."), &["role", "outcome"]);
        let leg = Leg {
            role: LegRole::Decode,
            client: EngineClient::new(),
            request,
            place: LegPlace::new(Arc::clone(&member), Instant::now()),
            counter: counter.expect("valid names"),
        };
        let hang = async {
            let (mut stream, _) = listener.accept().await.expect("it connects");
            stream.write_all(sent).await.expect("sent");
            member.checked.send_replace(Health::Down);
            stream
        };
        let both = async { tokio::join!(leg.begin(), hang) };
        tokio::time::timeout(Duration::from_secs(20), both).await.expect("it waits for no deadline").0
    }

    #[tokio::test]
    async fn a_leg_without_a_first_byte_ends_when_its_server_is_down() {
        for sent in [&b""[..], b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n"] {
            let failed = begun_on_a_hung_server(sent).await.map(drop).expect_err("no byte comes");
            assert!(failed.is_retryable(), "another server is tried");
            assert!(matches!(&failed.why, LegFailure::Unanswered(why) if why.contains("health check")));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn servers_that_stay_keep_their_state() {
        let (pool, now) = (pool(), Instant::now());
        let on_a = pool.place(&[], now).expect("a server");
        let on_b = pool.place(&[], now).expect("a server");
        pool.set(addresses(["c", "b"]));
        let status: Vec<_> = pool.status().into_iter().map(|one| (one.url, one.in_flight)).collect();
        assert_eq!(status, [("c".to_owned(), 0), ("b".to_owned(), 1)]);
        drop((on_a, on_b));
        assert!(pool.status().iter().all(|one| one.in_flight == 0));
        pool.set(Vec::new());
        pool.set_source(SourceState {
            failure: Some("the source fails".to_owned()),
            ..SourceState::default()
        });
        let reason = pool.place(&[], now).expect_err("none is left");
        assert_eq!(reason, "no prefill server is usable: 0 of 0 are down, and the source fails");
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
        assert_eq!(pool.status().iter().map(|one| one.in_flight).collect::<Vec<_>>(), [1, 0]);
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
        pool.members().all[0].member.found(LegRole::Prefill, Health::Up);
        assert_eq!(url(&pool.place(&[], now).expect("a server")), "a");
    }
}
