//! The inputs from outside the program: network, clock, randomness, ids.

use std::fmt;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::time::Instant;
use tokio::time::error::Elapsed;
use types::{Deadline, Epoch, Grant, RequestId, TransferId};

use crate::identity::Identity;
use crate::net::{Net, TcpNet};

/// The source of randomness, time and sockets for all of Baton's code. Cheap to clone.
///
/// With [`World::seeded`] and a paused runtime clock, the same seed repeats a run. So no other code in Baton may ask the
/// operating system for randomness or the time.
#[derive(Clone, Debug)]
pub struct World {
    draws: Draws,
    calendar: WallClock,
    net: Arc<dyn Net>,
    identity: Identity,
}

impl World {
    /// Makes the world of production: the system's randomness, TCP, the system's calendar.
    pub fn real() -> Self {
        Self {
            draws: Draws::System,
            calendar: WallClock::System,
            net: Arc::new(TcpNet),
            identity: Identity::default(),
        }
    }

    /// Makes a deterministic world. Its network is still TCP; see [`World::with_net`].
    pub fn seeded(seed: u64) -> Self {
        let calendar = WallClock::Counted { start: Instant::now(), jumps: Jumps::default() };
        Self { draws: Draws::seeded(seed), calendar, net: Arc::new(TcpNet), identity: Identity::default() }
    }

    /// Replaces the offset of the calendar by one that a test can move. It has no effect on [`World::real`].
    #[must_use]
    pub fn with_jumps(mut self, by: &Jumps) -> Self {
        if let WallClock::Counted { jumps, .. } = &mut self.calendar {
            *jumps = by.clone();
        }
        self
    }

    #[must_use]
    pub fn with_net(self, net: Arc<dyn Net>) -> Self {
        Self { net, ..self }
    }

    /// Replaces the identity, which is empty at first.
    #[must_use]
    pub fn with_identity(self, identity: Identity) -> Self {
        Self { identity, ..self }
    }

    /// Makes the world of one part, such as a node of a cluster in one process. In a seeded world its draws
    /// depend on the seed and `name` only, so that an additional draw in one part does not change another
    /// part.
    #[must_use]
    pub fn fork(&self, name: &str) -> Self {
        Self { draws: self.draws.fork(name), ..self.clone() }
    }

    /// Returns the current moment on the clock that tests can pause.
    pub fn now(&self) -> Instant {
        Instant::now()
    }

    /// Returns the time since 1970, for display. It is never used to measure durations.
    pub fn unix_time(&self) -> Duration {
        self.calendar.unix_time()
    }

    pub fn deadline_in(&self, within: Duration) -> Deadline {
        Deadline::at((self.now() + within).into_std())
    }

    /// Returns the time left until `deadline`; zero after it.
    pub fn left(&self, deadline: Deadline) -> Duration {
        deadline.left(self.now().into_std())
    }

    /// Waits until `deadline` passes.
    pub async fn sleep_until(&self, deadline: Deadline) {
        tokio::time::sleep_until(deadline.instant().into()).await;
    }

    /// Runs `future` until it ends, or until `deadline` passes and the future is dropped.
    pub async fn before<F: Future>(&self, deadline: Deadline, future: F) -> Result<F::Output, Elapsed> {
        tokio::time::timeout_at(deadline.instant().into(), future).await
    }

    /// Returns a random number of 64 bits.
    pub fn draw(&self) -> u64 {
        u64::from_le_bytes(self.bytes())
    }

    pub fn grant(&self) -> Grant {
        Grant::from_bytes(self.bytes())
    }

    pub fn transfer_id(&self) -> TransferId {
        TransferId(u128::from_le_bytes(self.bytes()))
    }

    /// Makes an epoch. Later lives of a node get greater epochs, so that the registry knows which life is newer.
    /// It consists of the microseconds since 1970 and twelve random bits, for two starts in the same microsecond.
    pub fn epoch(&self) -> Epoch {
        let micros = self.unix_time().as_micros() as u64;
        Epoch(micros << 12 | self.draw() & 0xfff)
    }

    pub fn request_id(&self) -> RequestId {
        RequestId::new(format!("req-{:032x}", u128::from_le_bytes(self.bytes())))
    }

    pub fn net(&self) -> &Arc<dyn Net> {
        &self.net
    }

    /// Returns the identity of this process: its secret, and its memory of callers.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    pub(crate) fn nonce(&self) -> [u8; 16] {
        self.bytes()
    }

    pub(crate) fn challenge(&self) -> [u8; 32] {
        self.bytes()
    }

    fn bytes<const N: usize>(&self) -> [u8; N] {
        let mut bytes = [0; N];
        self.draws.fill(&mut bytes);
        bytes
    }
}

/// The generator of random bytes: the system's, or one with a seed.
#[derive(Clone)]
enum Draws {
    System,
    /// The generator's mutex is held for one draw and never across an await.
    Seeded {
        seed: u64,
        generator: Arc<Mutex<StdRng>>,
    },
}

impl Draws {
    fn seeded(seed: u64) -> Self {
        Self::Seeded { seed, generator: Arc::new(Mutex::new(StdRng::seed_from_u64(seed))) }
    }

    fn fork(&self, name: &str) -> Self {
        match self {
            Self::System => Self::System,
            Self::Seeded { seed, .. } => Self::seeded(name.bytes().fold(*seed ^ FNV_OFFSET, fnv_step)),
        }
    }

    fn fill(&self, bytes: &mut [u8]) {
        match self {
            Self::System => getrandom::fill(bytes).expect("the operating system has randomness"),
            Self::Seeded { generator, .. } => {
                generator.lock().unwrap_or_else(PoisonError::into_inner).fill_bytes(bytes);
            }
        }
    }
}

const FNV_OFFSET: u64 = 0xcbf2_9ce4_8422_2325;

/// Hashes one more byte with FNV-1a. Unlike the standard library's hasher it is the same in every build, so
/// that seeds repeat a run.
fn fnv_step(hash: u64, byte: u8) -> u64 {
    (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
}

impl fmt::Debug for Draws {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::System => f.write_str("System"),
            Self::Seeded { seed, .. } => write!(f, "Seeded({seed})"),
        }
    }
}

/// The offset that a test adds to a calendar, in seconds, as an operator or a time server may change a clock. Clones
/// share one offset.
#[derive(Clone, Debug, Default)]
pub struct Jumps(Arc<AtomicI64>);

impl Jumps {
    pub fn jump(&self, seconds: i64) {
        self.0.fetch_add(seconds, Ordering::Relaxed);
    }

    fn applied_to(&self, time: Duration) -> Duration {
        let seconds = self.0.load(Ordering::Relaxed);
        let by = Duration::from_secs(seconds.unsigned_abs());
        if seconds < 0 { time.saturating_sub(by) } else { time + by }
    }
}

/// The source of calendar time: the system's, or one that tests control.
#[derive(Clone, Debug)]
enum WallClock {
    System,
    /// WallClock time counted by the pausable clock from a fixed day.
    Counted {
        start: Instant,
        jumps: Jumps,
    },
}

impl WallClock {
    const FIRST_DAY: Duration = Duration::from_secs(1_700_000_000);

    fn unix_time(&self) -> Duration {
        match self {
            Self::System => system_time().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default(),
            Self::Counted { start, jumps } => jumps.applied_to(Self::FIRST_DAY + start.elapsed()),
        }
    }
}

#[allow(clippy::disallowed_methods, reason = "the one place that asks the system which day it is")]
fn system_time() -> SystemTime {
    SystemTime::now()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_seed_repeats_a_run() {
        let run = |seed| {
            let world = World::seeded(seed);
            (world.draw(), world.grant(), world.transfer_id(), world.epoch(), world.request_id())
        };
        assert_eq!(run(7), run(7));
        assert_ne!(run(7), run(8));
    }

    #[tokio::test(start_paused = true)]
    async fn clones_share_one_sequence_of_draws() {
        let world = World::seeded(7);
        assert_ne!(world.clone().draw(), world.draw());
    }

    #[tokio::test(start_paused = true)]
    async fn forks_do_not_disturb_each_other() {
        let draws = |disturbance: u32| {
            let world = World::seeded(7);
            let (one, two) = (world.fork("one"), world.fork("two"));
            let _disturbance: Vec<u64> = (0..disturbance).map(|_| one.draw()).collect();
            two.draw()
        };
        assert_eq!(draws(0), draws(3));
        assert_ne!(World::seeded(7).fork("one").draw(), World::seeded(7).fork("two").draw());
    }

    #[test]
    fn the_real_world_does_not_repeat() {
        let world = World::real();
        assert_ne!(world.grant(), world.grant());
        assert_ne!(world.fork("a").epoch(), world.fork("a").epoch());
        assert!(world.unix_time() > WallClock::FIRST_DAY);
    }

    #[tokio::test(start_paused = true)]
    async fn time_is_the_pausable_clock() {
        let world = World::seeded(7);
        let deadline = world.deadline_in(Duration::from_secs(3));
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(world.left(deadline), Duration::from_secs(2));
        assert_eq!(world.unix_time(), WallClock::FIRST_DAY + Duration::from_secs(1));
        assert_eq!(world.before(deadline, async { 1 }).await, Ok(1));
        world.before(deadline, std::future::pending::<()>()).await.expect_err("it is pending");
        world.sleep_until(deadline).await;
        assert_eq!(world.left(deadline), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn a_calendar_jumps_and_the_clock_does_not() {
        let jumps = Jumps::default();
        let world = World::seeded(7).with_jumps(&jumps).fork("node");
        let (before, deadline) = (world.unix_time(), world.deadline_in(Duration::from_secs(3)));
        jumps.jump(3600);
        assert_eq!(world.unix_time(), before + Duration::from_secs(3600));
        jumps.jump(-7200);
        assert_eq!(world.unix_time(), before - Duration::from_secs(3600));
        assert_eq!(world.left(deadline), Duration::from_secs(3));
    }
}
