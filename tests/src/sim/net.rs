//! A network inside one process with faults: every path has a delay, can be held, cut and mended.
//!
//! It behaves as TCP does: bytes arrive in order or not at all, a held path loses nothing (kernels
//! retransmit), a killed process resets its connections, and a dead machine is silent until it is back. All
//! randomness comes from the seed, and nothing depends on the number of bytes in a message, so that a date in
//! a header changes no run. See `docs/decisions/0006-simulated-network.md`.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use async_trait::async_trait;
use chassis::{Listener, Net, Stream};
use tokio::sync::{Notify, mpsc};
use tokio::time::Instant;

use super::chance::Chance;
use super::log::EventLog;
use super::pipe::{Connection, SimStream, Wires};

/// The port of every node's KV. Bits are flipped only there, because only KV has checksums of its own.
pub const KV_PORT: &str = ":7002";
/// Limit of pieces that a tap keeps until they are read.
const HEARD_MAX: usize = 4096;
/// Limit of connections that wait to be accepted.
const BACKLOG: usize = 128;
/// The delay of a path without faults: a minimum, and a random addition.
const DELAY: Duration = Duration::from_micros(200);
const JITTER: Duration = Duration::from_millis(2);

/// The simulated network. Clones are handles to the same one.
#[derive(Clone)]
pub struct SimNet {
    shared: Arc<Shared>,
}

struct Shared {
    log: EventLog,
    /// The hosts, paths and connections. Never held across an await.
    state: Mutex<State>,
    /// Notified whenever a path is held or released.
    changed: Notify,
}

struct State {
    chance: Chance,
    hosts: BTreeMap<String, Host>,
    paths: BTreeMap<(String, String), Arc<Path>>,
    doors: BTreeMap<String, BoundPort>,
    connections: BTreeMap<u64, Weak<Connection>>,
    n_connections: u64,
    /// The host that receives copies of others' KV traffic.
    tap: Option<(String, Tap)>,
}

struct Host {
    number: u8,
    life: Arc<Life>,
    /// Whether the machine is up, and so refuses connections to closed ports.
    is_up: bool,
}

struct BoundPort {
    life: Arc<Life>,
    visits: mpsc::Sender<(SimStream, SocketAddr)>,
}

/// One life of a process. After its end no message of its tasks arrives.
#[derive(Debug, Default)]
pub struct Life(AtomicBool);

impl Life {
    pub fn is_over(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// The path of bytes from one host to another, in one direction.
#[derive(Debug)]
pub struct Path {
    state: Mutex<PathState>,
}

#[derive(Clone, Copy, Debug)]
struct PathState {
    is_held: bool,
    delay: Duration,
    /// The shortest time between the arrivals of two writes.
    gap: Duration,
    /// One in this number of writes on the KV port arrives with a flipped bit; `None` without the fault.
    corrupts_one_in: Option<u64>,
    /// The number of writes after which every connection made from now on is reset; `None` without the fault.
    cut_after: Option<u32>,
}

impl Path {
    fn new() -> Self {
        Self {
            state: Mutex::new(PathState {
                is_held: false,
                delay: DELAY,
                gap: Duration::ZERO,
                corrupts_one_in: None,
                cut_after: None,
            }),
        }
    }

    pub fn is_held(&self) -> bool {
        self.state().is_held
    }

    pub fn corrupts(&self, chance: &mut Chance) -> bool {
        self.state().corrupts_one_in.is_some_and(|n| chance.one_in(n))
    }

    /// Draws the arrival time of a byte that is sent now.
    pub fn due(&self, chance: &mut Chance) -> Instant {
        let jitter = Duration::from_micros(chance.below(JITTER.as_micros() as u64));
        Instant::now() + self.state().delay + jitter
    }

    /// Returns the shortest time between the arrivals of two writes.
    pub fn gap(&self) -> Duration {
        self.state().gap
    }

    fn state(&self) -> MutexGuard<'_, PathState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Copied traffic: the connection, its server, and some of the client's bytes.
#[derive(Clone, Debug)]
pub struct Heard {
    pub connection: u64,
    pub to: String,
    pub bytes: Vec<u8>,
}

pub type Tap = mpsc::Sender<Heard>;

/// How a process ends unexpectedly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Crash {
    /// The process is killed, and its kernel resets its connections.
    Process,
    /// The machine is gone: it sends nothing, not even a reset.
    Machine,
}

// === impl SimNet: for the plan ===

impl SimNet {
    pub fn new(chance: Chance, log: EventLog) -> Self {
        let state = State {
            chance,
            hosts: BTreeMap::new(),
            paths: BTreeMap::new(),
            doors: BTreeMap::new(),
            connections: BTreeMap::new(),
            n_connections: 0,
            tap: None,
        };
        Self { shared: Arc::new(Shared { log, state: Mutex::new(state), changed: Notify::new() }) }
    }

    /// Starts a life at `host` and returns its network. Connections of the previous life are reset.
    pub fn host(&self, host: &str) -> Arc<HostNet> {
        let mut state = self.state();
        let number = state.hosts.get(host).map_or(state.hosts.len() as u8 + 1, |known| known.number);
        let life = Arc::new(Life::default());
        let known = Host { number, life: Arc::clone(&life), is_up: true };
        let before = state.hosts.insert(host.to_owned(), known);
        let left_over = state.connections_of(|one| one.has_host(host));
        drop(state);
        if before.is_some() {
            left_over.iter().for_each(|connection| connection.reset());
        }
        Arc::new(HostNet { net: self.clone(), host: host.to_owned(), life })
    }

    /// Ends the life at `host`.
    pub fn crash(&self, host: &str, how: Crash) {
        let mut state = self.state();
        let Some(known) = state.hosts.get_mut(host) else { return };
        known.life.0.store(true, Ordering::Relaxed);
        known.is_up = how == Crash::Process;
        state.doors.retain(|_, door| !door.life.is_over());
        let broken = state.connections_of(|one| one.has_host(host));
        drop(state);
        for connection in broken {
            match how {
                Crash::Process => connection.reset(),
                Crash::Machine => connection.wake(),
            }
        }
        self.shared.changed.notify_waiters();
    }

    /// Holds all bytes from `from` to `to` until the path is released.
    pub fn hold(&self, from: &str, to: &str) {
        self.path(from, to).state().is_held = true;
    }

    /// Releases the path: held bytes arrive.
    pub fn release(&self, from: &str, to: &str) {
        self.path(from, to).state().is_held = false;
        self.wake();
    }

    /// Holds all bytes to and from `host` until the host is released.
    pub fn hold_host(&self, host: &str) {
        self.each_path_of(host, |net, from, to| net.path(from, to).state().is_held = true);
    }

    pub fn release_host(&self, host: &str) {
        self.each_path_of(host, |net, from, to| net.path(from, to).state().is_held = false);
        self.wake();
    }

    fn each_path_of(&self, host: &str, change: impl Fn(&Self, &str, &str)) {
        let others: Vec<String> = self.state().hosts.keys().filter(|other| *other != host).cloned().collect();
        for other in others {
            change(self, host, &other);
            change(self, &other, host);
        }
    }

    /// Delays every write from now on by `delay`.
    pub fn slow(&self, from: &str, to: &str, delay: Duration) {
        self.path(from, to).state().delay = delay;
    }

    /// Makes any two later writes arrive at least `gap` apart.
    pub fn trickle(&self, from: &str, to: &str, gap: Duration) {
        self.path(from, to).state().gap = gap;
    }

    /// Flips a bit in one of `one_in` writes on the KV port.
    pub fn corrupt(&self, from: &str, to: &str, one_in: u64) {
        self.path(from, to).state().corrupts_one_in = Some(one_in);
    }

    /// Resets every connection made from now on between two hosts after `writes` writes in this direction.
    pub fn cut_after(&self, from: &str, to: &str, writes: u32) {
        self.path(from, to).state().cut_after = Some(writes);
    }

    /// Resets every connection between two hosts.
    pub fn reset(&self, one: &str, other: &str) {
        let both = |connection: &Connection| connection.has_host(one) && connection.has_host(other);
        let broken = self.state().connections_of(both);
        broken.iter().for_each(|connection| connection.reset());
    }

    /// Copies the KV traffic of other hosts' connections, made from now on, to the host `by`.
    pub fn tap(&self, by: &str) -> mpsc::Receiver<Heard> {
        let (tap, heard) = mpsc::channel(HEARD_MAX);
        self.state().tap = Some((by.to_owned(), tap));
        heard
    }

    /// Removes all faults. Ended lives stay ended.
    pub fn heal(&self) {
        let mut state = self.state();
        state.paths.values().for_each(|path| *path.state() = *Path::new().state());
        let connections = state.connections_of(|_| true);
        drop(state);
        connections.iter().for_each(|connection| connection.mend());
        self.wake();
    }

    /// Returns the log of the run.
    pub fn log(&self) -> &EventLog {
        &self.shared.log
    }

    pub fn n_connections(&self) -> usize {
        self.state().connections_of(|_| true).len()
    }

    fn wake(&self) {
        let all = self.state().connections_of(|_| true);
        all.iter().for_each(|connection| connection.wake());
        self.shared.changed.notify_waiters();
    }

    fn path(&self, from: &str, to: &str) -> Arc<Path> {
        self.state().path(from, to)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn path(&mut self, from: &str, to: &str) -> Arc<Path> {
        let path = self.paths.entry((from.to_owned(), to.to_owned()));
        Arc::clone(path.or_insert_with(|| Arc::new(Path::new())))
    }

    fn connections_of(&mut self, wanted: impl Fn(&Connection) -> bool) -> Vec<Arc<Connection>> {
        self.connections.retain(|_, connection| connection.strong_count() > 0);
        let living = self.connections.values().filter_map(Weak::upgrade);
        living.filter(|connection| wanted(connection)).collect()
    }

    fn address(&self, host: &str, port: u16) -> SocketAddr {
        let number = self.hosts.get(host).map_or(0, |known| known.number);
        SocketAddr::from((Ipv4Addr::new(10, 0, 0, number), port))
    }
}

impl fmt::Debug for SimNet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimNet").finish_non_exhaustive()
    }
}

// === HostNet ===

/// The network as seen by one life of one process.
#[derive(Debug)]
pub struct HostNet {
    net: SimNet,
    host: String,
    life: Arc<Life>,
}

impl HostNet {
    fn alive(&self) -> io::Result<()> {
        if self.life.is_over() { Err(io::ErrorKind::ConnectionAborted.into()) } else { Ok(()) }
    }

    /// Waits while no answer can come, because a path is held or the machine is gone.
    async fn reach(&self, to: &str) -> io::Result<()> {
        loop {
            let changed = self.net.shared.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            self.alive()?;
            if self.can_reach(to) {
                return Ok(());
            }
            changed.await;
        }
    }

    fn can_reach(&self, to: &str) -> bool {
        let mut state = self.net.state();
        let is_up = state.hosts.get(to).is_none_or(|host| host.is_up);
        is_up && !state.path(&self.host, to).is_held() && !state.path(to, &self.host).is_held()
    }

    /// Waits for a round trip.
    async fn shake_hands(&self, to: &str) {
        let due = {
            let mut state = self.net.state();
            let (there, back) = (state.path(&self.host, to), state.path(to, &self.host));
            there.due(&mut state.chance).max(back.due(&mut state.chance))
        };
        tokio::time::sleep_until(due).await;
    }

    fn connection(&self, to: &str, addr: &str) -> io::Result<(SimStream, SimStream, SocketAddr, Visits)> {
        let mut state = self.net.state();
        let door = state.doors.get(addr).filter(|door| !door.life.is_over());
        let door = door.ok_or(io::ErrorKind::ConnectionRefused)?;
        let (visits, far_life) = (door.visits.clone(), Arc::clone(&door.life));
        state.n_connections += 1;
        let id = state.n_connections;
        let hosts = [self.host.clone(), to.to_owned()];
        let paths = [state.path(&self.host, to), state.path(to, &self.host)];
        let cuts = [paths[0].state().cut_after, paths[1].state().cut_after];
        let chance = Chance::new(state.chance.draw());
        let log = self.net.shared.log.clone();
        let is_kv = addr.ends_with(KV_PORT);
        let overheard = state.tap.as_ref().filter(|(by, _)| is_kv && *by != self.host);
        let wires = Wires { is_kv, tap: overheard.map(|(_, tap)| tap.clone()) };
        let connection = Connection::new(id, hosts, paths, cuts, chance, log, wires);
        state.connections.insert(id, Arc::downgrade(&connection));
        let from = state.address(&self.host, 30_000 + (id % 30_000) as u16);
        let near = SimStream::new(Arc::clone(&connection), 0, Arc::clone(&self.life));
        Ok((near, SimStream::new(connection, 1, far_life), from, visits))
    }
}

type Visits = mpsc::Sender<(SimStream, SocketAddr)>;

#[async_trait]
impl Net for HostNet {
    async fn connect(&self, addr: &str) -> io::Result<Stream> {
        let (to, _) = addr.split_once(':').ok_or(io::ErrorKind::InvalidInput)?;
        self.reach(to).await?;
        self.shake_hands(to).await;
        self.reach(to).await?;
        let (near, far, from, visits) = self.connection(to, addr)?;
        self.net.shared.log.trace("connect", &format!("{} {addr}", self.host));
        visits.send((far, from)).await.map_err(|_| io::ErrorKind::ConnectionRefused)?;
        Ok(Stream::other(near))
    }

    async fn listen(&self, addr: &str) -> io::Result<Box<dyn Listener>> {
        self.alive()?;
        let (_, port) = addr.split_once(':').ok_or(io::ErrorKind::InvalidInput)?;
        let port = port.parse().map_err(|_| io::ErrorKind::InvalidInput)?;
        let mut state = self.net.state();
        if state.doors.get(addr).is_some_and(|door| !door.visits.is_closed()) {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        let local = state.address(&self.host, port);
        let (visits, waiting) = mpsc::channel(BACKLOG);
        state.doors.insert(addr.to_owned(), BoundPort { life: Arc::clone(&self.life), visits });
        Ok(Box::new(SimListener { local, waiting }))
    }
}

#[derive(Debug)]
struct SimListener {
    local: SocketAddr,
    waiting: mpsc::Receiver<(SimStream, SocketAddr)>,
}

#[async_trait]
impl Listener for SimListener {
    async fn accept(&mut self) -> io::Result<(Stream, SocketAddr)> {
        let (stream, from) = self.waiting.recv().await.ok_or(io::ErrorKind::AddrNotAvailable)?;
        Ok((Stream::other(stream), from))
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.local)
    }
}
