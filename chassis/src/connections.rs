//! The connections of one port: their number, their phases, and the choice of the one to close when there are too many.
//!
//! A connection that has sent nothing, has sent part of a request, or is idle can be closed without loss. Such connections
//! are closed for new ones, the oldest first. A connection with a running request never is.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http::Version;
use prometheus::IntCounterVec;
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::byte_size::ByteSize;

/// A process's `[expert.connections]` section: the limits of each of its ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ConnectionLimits {
    /// Limit of connections of one port. Beyond the limit the oldest without a whole request is closed; if none,
    /// new ones wait in the kernel's queue.
    pub connections_max: usize,
    /// Limit of connections of the admin port.
    pub admin_max: usize,
    /// Limit of connections of one port from one address (IPv6: one /64 network). 0: no limit, because
    /// clients behind a proxy share an address.
    pub per_address_max: usize,
    /// A connection that sends no byte for this time after it was opened is closed.
    pub first_byte_ms: u64,
    /// A connection whose request head is not complete in this time after its first byte is closed.
    pub head_ms: u64,
    /// An HTTP/1 connection without a request for this time is closed. The default is longer than clients
    /// keep idle connections.
    pub idle_ms: u64,
    /// Bytes of all request bodies being read on one port. Above it the body that has been read for the longest
    /// time is aborted.
    pub bodies_max: ByteSize,
}

impl Default for ConnectionLimits {
    fn default() -> Self {
        Self {
            connections_max: 16_384,
            admin_max: 64,
            per_address_max: 0,
            first_byte_ms: 10_000,
            head_ms: 10_000,
            idle_ms: 100_000,
            bodies_max: ByteSize(128 << 20),
        }
    }
}

impl ConnectionLimits {
    /// Returns the time at which a connection in `phase` is closed; `None` if the protocol itself ends it.
    fn bound(&self, phase: Phase) -> Option<Instant> {
        let (since, ms) = match phase {
            Phase::Silent(since) => (since, self.first_byte_ms),
            Phase::Head(since) => (since, self.head_ms),
            Phase::Idle(since) => (since, self.idle_ms),
            Phase::Body | Phase::Serving => return None,
        };
        Some(since + Duration::from_millis(ms))
    }
}

/// Counts the connections that a port refuses. The default counts nothing.
#[derive(Clone, Debug, Default)]
pub struct ConnectionCounts(Option<(IntCounterVec, &'static str)>);

/// Why a connection was refused or closed for another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConnectionRefusal {
    /// Its address has too many.
    Address,
    /// Its slot was needed for a new one.
    Displaced,
    /// The process had no file descriptor for it.
    Accept,
}

impl ConnectionCounts {
    /// Makes the counts of one port. `refused` has the labels `port` and `reason`.
    pub fn new(refused: IntCounterVec, port: &'static str) -> Self {
        Self(Some((refused, port)))
    }

    pub(crate) fn refused(&self, refusal: ConnectionRefusal) {
        let reason = match refusal {
            ConnectionRefusal::Address => "address",
            ConnectionRefusal::Displaced => "displaced",
            ConnectionRefusal::Accept => "accept",
        };
        if let Some((refused, port)) = &self.0 {
            refused.with_label_values(&[*port, reason]).inc();
        }
    }
}

/// How long a connection that was replaced by a new one stays open for a request that was on its way. During
/// a flood a connection can be replaced before its first bytes are read.
const LEAVES_WITHIN: Duration = Duration::from_millis(100);
/// Limit of connections of one port that were replaced by new ones and are still open.
const LEAVING_MAX: usize = 1024;
pub(crate) const NEEDED: &str = "its slot is needed for a new connection";

/// The phase of a connection, with the time at which it began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Silent(Instant),
    Head(Instant),
    /// The body of an HTTP/1 request is arriving. The handler bounds its time.
    Body,
    Serving,
    Idle(Instant),
}

/// The connections of one port, with their limits.
#[derive(Debug)]
pub(crate) struct Connections {
    limits: ConnectionLimits,
    open: Mutex<OpenConnections>,
    /// The number of the next connection. A number is never given twice.
    next: AtomicU64,
    /// Wakes the accept loop when a connection ends or can be closed.
    changed: Arc<Notify>,
}

/// Open connections, by number. Numbers grow, so the first one is the oldest.
#[derive(Debug, Default)]
struct OpenConnections {
    placed: BTreeMap<u64, Arc<Activity>>,
    /// Connections that were replaced by newer ones and are still open.
    leaving: BTreeMap<u64, Arc<Activity>>,
}

/// One connection's slot on the port. Dropping it frees the slot.
#[derive(Debug)]
pub(crate) struct ConnectionPermit {
    number: u64,
    connections: Arc<Connections>,
    pub(crate) activity: Arc<Activity>,
}

/// The state of one connection.
#[derive(Debug)]
pub(crate) struct Activity {
    address: IpAddr,
    state: Mutex<State>,
    /// Wakes the task that watches this connection's time limits.
    changed: Notify,
    /// Wakes the accept loop: this connection can now be closed.
    can_close: Arc<Notify>,
}

/// Whether a connection may stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Held,
    /// The connection was replaced at this time. It stays if a request comes within [`LEAVES_WITHIN`].
    Leaving(Instant),
    Lost,
}

#[derive(Debug)]
struct State {
    phase: Phase,
    place: Place,
    requests: usize,
    /// Whether the connection is HTTP/2. Then bytes between requests are frames of the connection, and pings
    /// detect a dead peer.
    is_multiplexed: bool,
}

/// The error for a connection whose address already has too many connections.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TooManyFromAddress;

impl Connections {
    pub(crate) fn new(limits: ConnectionLimits) -> Arc<Self> {
        Arc::new(Self { limits, open: Mutex::default(), next: AtomicU64::new(0), changed: Arc::default() })
    }

    /// Returns a slot for a new connection. If there is none, closes the oldest connection without a request; if all have
    /// requests, waits. Cancel-safe.
    pub(crate) async fn place(
        self: &Arc<Self>,
        address: IpAddr,
    ) -> Result<ConnectionPermit, TooManyFromAddress> {
        let address = network(address);
        loop {
            let changed = self.changed.notified();
            if let Some(place) = self.try_place(address)? {
                return Ok(place);
            }
            changed.await;
        }
    }

    fn try_place(self: &Arc<Self>, address: IpAddr) -> Result<Option<ConnectionPermit>, TooManyFromAddress> {
        let mut open = self.open();
        let per_address = self.limits.per_address_max;
        let n_of_address = || open.placed.values().filter(|one| one.address == address).count();
        if per_address > 0 && n_of_address() >= per_address {
            open.close_oldest(Some(address)).ok_or(TooManyFromAddress)?;
        }
        if !open.has_room(self.limits.connections_max) {
            return Ok(None);
        }
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let activity = Arc::new(Activity::new(address, self.changed.clone()));
        open.placed.insert(number, activity.clone());
        Ok(Some(ConnectionPermit { number, connections: self.clone(), activity }))
    }

    /// Closes the oldest connection without a request, because the process has no file descriptor left.
    pub(crate) fn close_one(&self) -> bool {
        self.open().close_oldest(None).is_some()
    }

    /// Gives a slot again to a replaced connection whose request came after all; replaces another one if none
    /// is free. Returns `false` if no slot can be freed.
    fn keep(&self, number: u64) -> bool {
        let mut open = self.open();
        if !open.leaving.contains_key(&number) || !open.has_room(self.limits.connections_max) {
            return false;
        }
        if let Some(activity) = open.leaving.remove(&number) {
            activity.state().place = Place::Held;
            open.placed.insert(number, activity);
        }
        true
    }

    fn open(&self) -> MutexGuard<'_, OpenConnections> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl OpenConnections {
    /// Returns whether a slot is free, after the oldest connection without a request was replaced if
    /// necessary.
    fn has_room(&mut self, max: usize) -> bool {
        self.placed.len() < max || self.close_oldest(None).is_some()
    }

    fn close_oldest(&mut self, of: Option<IpAddr>) -> Option<()> {
        let can_close =
            |(_, one): &(&u64, &Arc<Activity>)| of.is_none_or(|of| one.address == of) && !one.is_serving();
        let number = self.placed.iter().find(can_close).map(|(number, _)| *number)?;
        let oldest = self.placed.remove(&number)?;
        oldest.set_place(Place::Leaving(Instant::now()));
        self.leaving.insert(number, oldest);
        if self.leaving.len() > LEAVING_MAX
            && let Some((_, first)) = self.leaving.pop_first()
        {
            first.set_place(Place::Lost);
        }
        Some(())
    }
}

/// Returns the part of an address that identifies one subscriber: an IPv4 address or an IPv6 /64 network.
fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX))),
        address => address,
    }
}

impl ConnectionPermit {
    /// Waits until the connection must be closed, and returns the reason: a time limit has passed, or its
    /// slot is needed.
    pub(crate) async fn must_close(&self) -> &'static str {
        loop {
            let (phase, place, is_multiplexed) = {
                let state = self.activity.state();
                (state.phase, state.place, state.is_multiplexed)
            };
            let bound = match place {
                Place::Lost => return NEEDED,
                Place::Leaving(_) if phase == Phase::Serving => {
                    if !self.connections.keep(self.number) {
                        return NEEDED;
                    }
                    continue;
                }
                Place::Leaving(since) => Some((since + LEAVES_WITHIN, NEEDED)),
                Place::Held => {
                    let bound = self.connections.limits.bound(phase).filter(|_| !is_multiplexed);
                    bound.map(|bound| (bound, phase.complaint()))
                }
            };
            match bound {
                Some((bound, why)) if bound <= Instant::now() => return why,
                Some((bound, _)) => {
                    let _ = tokio::time::timeout_at(bound, self.activity.changed.notified()).await;
                }
                None => self.activity.changed.notified().await,
            }
        }
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        {
            let mut open = self.connections.open();
            open.placed.remove(&self.number);
            open.leaving.remove(&self.number);
        }
        self.connections.changed.notify_waiters();
    }
}

impl Activity {
    fn new(address: IpAddr, can_close: Arc<Notify>) -> Self {
        let phase = Phase::Silent(Instant::now());
        let state = State { phase, place: Place::Held, requests: 0, is_multiplexed: false };
        Self { address, state: Mutex::new(state), changed: Notify::new(), can_close }
    }

    /// Records that bytes have arrived from the peer.
    pub(crate) fn read(&self) {
        let mut state = self.state();
        let begins_head = match state.phase {
            Phase::Silent(_) => true,
            Phase::Idle(_) => !state.is_multiplexed,
            Phase::Head(_) | Phase::Body | Phase::Serving => false,
        };
        if begins_head {
            state.phase = Phase::Head(Instant::now());
            self.changed.notify_one();
        }
    }

    /// Records that a request's head is complete. The request lasts until the returned value is dropped.
    pub(crate) fn request(self: &Arc<Self>, version: Version) -> RequestUnderWay {
        let mut state = self.state();
        state.requests += 1;
        state.is_multiplexed |= version == Version::HTTP_2;
        state.phase = Phase::Serving;
        if state.place != Place::Held {
            self.changed.notify_one();
        }
        RequestUnderWay(self.clone())
    }

    /// Records that the body of the request is still arriving, until the returned value is dropped. `None`: the connection
    /// is HTTP/2, and serves other requests meanwhile.
    pub(crate) fn reads_body(self: &Arc<Self>) -> Option<BodyUnderWay> {
        let mut state = self.state();
        if state.is_multiplexed {
            return None;
        }
        state.phase = Phase::Body;
        self.can_close.notify_waiters();
        Some(BodyUnderWay(self.clone()))
    }

    fn is_serving(&self) -> bool {
        self.state().phase == Phase::Serving
    }

    fn set_place(&self, place: Place) {
        self.state().place = place;
        self.changed.notify_one();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Phase {
    fn complaint(self) -> &'static str {
        match self {
            Self::Silent(_) => "it sent no byte in time",
            Self::Head(_) => "it did not finish a request's head in time",
            Self::Idle(_) => "it was idle for too long",
            Self::Body | Self::Serving => "",
        }
    }
}

/// Counts a request until it is dropped, when its answer is written or aborted.
#[derive(Debug)]
pub(crate) struct RequestUnderWay(Arc<Activity>);

impl Drop for RequestUnderWay {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.requests -= 1;
        if state.requests == 0 {
            state.phase = Phase::Idle(Instant::now());
            self.0.changed.notify_one();
            self.0.can_close.notify_waiters();
        }
    }
}

/// Marks a request as not complete, until it is dropped.
#[derive(Debug)]
pub(crate) struct BodyUnderWay(Arc<Activity>);

impl Drop for BodyUnderWay {
    fn drop(&mut self) {
        let mut state = self.0.state();
        if state.phase == Phase::Body {
            state.phase = Phase::Serving;
            self.0.changed.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: ConnectionLimits = ConnectionLimits {
        connections_max: 3,
        admin_max: 3,
        per_address_max: 2,
        first_byte_ms: 1_000,
        head_ms: 2_000,
        idle_ms: 5_000,
        bodies_max: ByteSize(1 << 20),
    };

    fn address(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    #[tokio::test(start_paused = true)]
    async fn each_phase_has_its_bound() {
        let connections = Connections::new(LIMITS);
        let place = connections.place(address(1)).await.expect("room");
        let began = Instant::now();
        assert_eq!(place.must_close().await, "it sent no byte in time");
        assert_eq!(began.elapsed(), Duration::from_secs(1));

        place.activity.read();
        tokio::time::sleep(Duration::from_secs(1)).await;
        place.activity.read();
        assert_eq!(place.must_close().await, "it did not finish a request's head in time");
        assert_eq!(began.elapsed(), Duration::from_secs(3), "further bytes give no further time");

        let request = place.activity.request(Version::HTTP_11);
        tokio::time::timeout(Duration::from_secs(60), place.must_close()).await.expect_err("it is served");
        drop(request);
        assert_eq!(place.must_close().await, "it was idle for too long");
    }

    #[tokio::test(start_paused = true)]
    async fn http2_connections_stay_between_requests() {
        let connections = Connections::new(LIMITS);
        let place = connections.place(address(1)).await.expect("room");
        place.activity.read();
        drop(place.activity.request(Version::HTTP_2));
        place.activity.read();
        tokio::time::timeout(Duration::from_secs(3600), place.must_close()).await.expect_err("pings keep it");
    }

    #[tokio::test(start_paused = true)]
    async fn the_oldest_without_a_request_gives_way() {
        let connections = Connections::new(ConnectionLimits { per_address_max: 0, ..LIMITS });
        let serving = connections.place(address(1)).await.expect("room");
        serving.activity.read();
        let _request = serving.activity.request(Version::HTTP_11);
        let silent = connections.place(address(1)).await.expect("room");
        let young = connections.place(address(1)).await.expect("room");
        let new = connections.place(address(1)).await.expect("the silent one gives way");
        assert_eq!(silent.must_close().await, "its slot is needed for a new connection");
        let _requests = [&young, &new].map(|place| place.activity.request(Version::HTTP_11));
        let waits = tokio::time::timeout(Duration::from_secs(60), connections.place(address(2))).await;
        waits.expect_err("all are served");
        let (place, ()) = tokio::join!(connections.place(address(2)), async { drop(young) });
        let _place = place.expect("a place was given back");
        let (place, ()) = tokio::join!(connections.place(address(3)), async { drop(_requests) });
        place.expect("a connection became idle");
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_is_not_complete_gives_way() {
        let connections = Connections::new(ConnectionLimits { per_address_max: 0, ..LIMITS });
        let mut places = Vec::new();
        for version in [Version::HTTP_2, Version::HTTP_11, Version::HTTP_11] {
            let place = connections.place(address(1)).await.expect("room");
            let request = place.activity.request(version);
            let body = place.activity.reads_body();
            places.push((place, request, body));
        }
        let (complete, _request, body) = places.pop().expect("three");
        drop(body.expect("HTTP/1"));
        connections.place(address(1)).await.expect("the second gives way");
        assert_eq!(places[1].0.must_close().await, NEEDED);
        let (multiplexed, _, body) = &places[0];
        assert!(body.is_none());
        let waits = tokio::time::timeout(Duration::from_secs(60), async {
            tokio::join!(multiplexed.must_close(), complete.must_close())
        });
        waits.await.expect_err("they are served");
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_on_its_way_keeps_a_connection_that_gave_way() {
        let connections = Connections::new(ConnectionLimits { per_address_max: 0, ..LIMITS });
        let mut places = Vec::new();
        for _ in 0..4 {
            places.push(connections.place(address(1)).await.expect("the oldest gives way"));
        }
        let request = places[0].activity.request(Version::HTTP_11);
        let stays = tokio::time::timeout(Duration::from_secs(60), places[0].must_close()).await;
        stays.expect_err("its request came in time");
        assert_eq!(places[1].must_close().await, NEEDED, "the next one gives way for it");
        assert_eq!(connections.open().placed.len(), 3);

        // All slots have requests, so the replaced connection is closed although it has a request too.
        let last = connections.place(address(1)).await.expect("another gives way");
        let _requests = [&places[3], &last].map(|place| place.activity.request(Version::HTTP_11));
        let late = places[2].activity.request(Version::HTTP_11);
        assert_eq!(places[2].must_close().await, NEEDED);
        drop((request, late));
    }

    #[tokio::test(start_paused = true)]
    async fn connections_that_gave_way_are_bounded() {
        let connections = Connections::new(ConnectionLimits { per_address_max: 0, ..LIMITS });
        let mut places = Vec::new();
        for _ in 0..LIMITS.connections_max + LEAVING_MAX + 1 {
            places.push(connections.place(address(1)).await.expect("the oldest gives way"));
        }
        let began = Instant::now();
        assert_eq!(places[0].must_close().await, NEEDED);
        assert_eq!(began.elapsed(), Duration::ZERO, "the first one has no further time");
        assert_eq!(places[1].must_close().await, NEEDED);
        assert_eq!(began.elapsed(), LEAVES_WITHIN);
        drop(places);
        let open = connections.open();
        assert!(open.placed.is_empty() && open.leaving.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn one_address_has_its_share() {
        let connections = Connections::new(LIMITS);
        let places = [connections.place(address(1)).await, connections.place(address(1)).await];
        let places = places.map(|place| place.expect("room"));
        let third = connections.place(address(1)).await.expect("its own oldest gives way");
        assert_eq!(places[0].must_close().await, "its slot is needed for a new connection");
        let _requests = [&places[1], &third].map(|place| place.activity.request(Version::HTTP_11));
        assert_eq!(connections.place(address(1)).await.err(), Some(TooManyFromAddress));
        connections.place(address(2)).await.expect("another address has room");
    }

    #[test]
    fn an_ipv6_subscriber_is_a_network() {
        let parse = |text: &str| network(text.parse().expect("an address"));
        assert_eq!(parse("2001:db8:1:2:3:4:5:6"), parse("2001:db8:1:2::1"));
        assert_ne!(parse("2001:db8:1:2::1"), parse("2001:db8:1:3::1"));
        assert_eq!(parse("::ffff:10.0.0.1"), address(1));
    }
}
