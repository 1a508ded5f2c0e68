//! The connections of one port: their number, their phases, and the choice of the one to close when there are too many.
//!
//! A connection that has sent nothing, has sent part of a request's head, or is idle can be closed without loss. Such
//! connections are closed for new ones, the oldest first. A connection with a running request never is.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http::Version;
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::byte_size::ByteSize;

/// A process's `[expert.connections]` section: the limits of each of its ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ConnectionLimits {
    /// Connections of one port. Beyond it the oldest idle one is closed; if all have requests, new ones wait in
    /// the kernel's queue. Admin ports have 64.
    pub connections_max: usize,
    /// Connections of one port from one address (IPv6: one /64 network). 0: no limit, because clients behind a
    /// proxy share an address.
    pub per_address_max: usize,
    /// A connection that sends no byte for this time after it was opened is closed.
    pub first_byte_ms: u64,
    /// Time from the first byte of a request's head to its end.
    pub head_ms: u64,
    /// An HTTP/1 connection without a request for this time is closed. Longer than clients keep idle
    /// connections.
    pub idle_ms: u64,
    /// Bytes of all request bodies being read on one port. Above it the body that has been read for the longest
    /// time is aborted.
    pub bodies_max: ByteSize,
}

impl Default for ConnectionLimits {
    fn default() -> Self {
        Self {
            connections_max: 16_384,
            per_address_max: 0,
            first_byte_ms: 10_000,
            head_ms: 10_000,
            idle_ms: 100_000,
            bodies_max: ByteSize(128 << 20),
        }
    }
}

impl ConnectionLimits {
    /// The time at which a connection in `phase` is closed; `None` if the protocol itself ends it.
    fn bound(&self, phase: Phase) -> Option<Instant> {
        let (since, ms) = match phase {
            Phase::Silent(since) => (since, self.first_byte_ms),
            Phase::Head(since) => (since, self.head_ms),
            Phase::Idle(since) => (since, self.idle_ms),
            Phase::Serving => return None,
        };
        Some(since + Duration::from_millis(ms))
    }
}

/// The state of a connection, with the time since when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Silent(Instant),
    Head(Instant),
    Serving,
    Idle(Instant),
}

/// The connections of one port.
#[derive(Debug)]
pub(crate) struct Connections {
    limits: ConnectionLimits,
    open: Mutex<BTreeMap<u64, Arc<Activity>>>,
    /// The number of the next connection. A number is never reused.
    next: AtomicU64,
    /// Wakes the accept loop when a connection ends or can be closed.
    changed: Arc<Notify>,
}

/// One connection's slot among the connections of the port. Dropping it frees the slot.
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
    closed: CancellationToken,
}

#[derive(Debug)]
struct State {
    phase: Phase,
    requests: usize,
    /// True for HTTP/2. There, bytes between requests are frames of the connection, and pings detect a dead peer.
    is_multiplexed: bool,
}

/// The refusal of a connection: its address has too many.
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
        if per_address > 0 && open.values().filter(|one| one.address == address).count() >= per_address {
            close_oldest(&mut open, Some(address)).ok_or(TooManyFromAddress)?;
        }
        if open.len() >= self.limits.connections_max && close_oldest(&mut open, None).is_none() {
            return Ok(None);
        }
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let activity = Arc::new(Activity::new(address, self.changed.clone()));
        open.insert(number, activity.clone());
        Ok(Some(ConnectionPermit { number, connections: self.clone(), activity }))
    }

    /// Closes the oldest connection without a request, because the process has no file descriptor left.
    pub(crate) fn close_one(&self) -> bool {
        close_oldest(&mut self.open(), None).is_some()
    }

    fn open(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<Activity>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Numbers grow, so the first connection that can be closed is the oldest one.
fn close_oldest(open: &mut BTreeMap<u64, Arc<Activity>>, of: Option<IpAddr>) -> Option<()> {
    let can_close =
        |(_, one): &(&u64, &Arc<Activity>)| of.is_none_or(|of| one.address == of) && !one.is_serving();
    let number = open.iter().find(can_close).map(|(number, _)| *number)?;
    open.remove(&number)?.closed.cancel();
    Some(())
}

/// Returns the part of an address that identifies one subscriber: an IPv4 address or an IPv6 /64 network.
fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX))),
        address => address,
    }
}

impl ConnectionPermit {
    /// Returns the reason when the connection must be closed: a time limit has passed, or its slot is needed.
    pub(crate) async fn must_close(&self) -> &'static str {
        tokio::select! {
            () = self.activity.closed.cancelled() => "its slot is needed for a new connection",
            why = self.activity.overdue(self.connections.limits) => why,
        }
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        self.connections.open().remove(&self.number);
        self.connections.changed.notify_waiters();
    }
}

impl Activity {
    fn new(address: IpAddr, can_close: Arc<Notify>) -> Self {
        let state = State { phase: Phase::Silent(Instant::now()), requests: 0, is_multiplexed: false };
        Self {
            address,
            state: Mutex::new(state),
            changed: Notify::new(),
            can_close,
            closed: CancellationToken::new(),
        }
    }

    /// Notes that bytes have arrived from the peer.
    pub(crate) fn read(&self) {
        let mut state = self.state();
        let begins_head = match state.phase {
            Phase::Silent(_) => true,
            Phase::Idle(_) => !state.is_multiplexed,
            Phase::Head(_) | Phase::Serving => false,
        };
        if begins_head {
            state.phase = Phase::Head(Instant::now());
            self.changed.notify_one();
        }
    }

    /// Notes that a request's head is complete. The request lasts until the returned value is dropped.
    pub(crate) fn request(self: &Arc<Self>, version: Version) -> RequestUnderWay {
        let mut state = self.state();
        state.requests += 1;
        state.is_multiplexed |= version == Version::HTTP_2;
        state.phase = Phase::Serving;
        RequestUnderWay(self.clone())
    }

    fn is_serving(&self) -> bool {
        self.state().phase == Phase::Serving
    }

    async fn overdue(&self, limits: ConnectionLimits) -> &'static str {
        loop {
            let (phase, is_multiplexed) = {
                let state = self.state();
                (state.phase, state.is_multiplexed)
            };
            let bound = limits.bound(phase).filter(|_| !is_multiplexed);
            match bound {
                Some(bound) if bound <= Instant::now() => return phase.complaint(),
                Some(bound) => {
                    let _ = tokio::time::timeout_at(bound, self.changed.notified()).await;
                }
                None => self.changed.notified().await,
            }
        }
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
            Self::Serving => "",
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

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: ConnectionLimits = ConnectionLimits {
        connections_max: 3,
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
