//! The network between head and followers. A relay passes the messages on, with the faults of the plan.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use chassis::net::MemoryNet;
use chassis::{Gate, Listener, Net, Shutdown, Stream, StreamReader, StreamWriter, spawn_guarded};
use proto::v1;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until};

use super::super::net::Crash;
use super::clock::{ConnectionSeen, Progress};
use super::plan::{Direction, Fault, FaultKind, ProcessFault};
use super::reports::LandingReports;

/// The bytes before a message: its length, and its number.
const HEADER_BYTES: usize = 12;
/// A direction that stands still for longer is silent for the other side.
const SILENT_MAX: Duration = Duration::from_secs(5);
const STREAM_BYTES: usize = 64 << 10;

/// The network of one follower.
#[derive(Clone, Debug)]
pub struct FollowerNet {
    /// The network of the connection to the head.
    pub joining: MemoryNet,
    /// The network of all other connections. The relay passes none of them.
    pub kv: Arc<dyn Net>,
    /// The address of the head.
    pub head: String,
    pub follower: usize,
    /// How long each message travels.
    pub delay: Duration,
    pub faults: Vec<Fault>,
    pub ends: ConnectionEnds,
    /// Takes the faults of processes that messages trigger.
    pub process_faults: mpsc::Sender<ProcessFault>,
    pub progress: Progress,
    pub reports: LandingReports,
    /// The gate of the relays.
    pub gate: Gate,
}

/// How the connection to the head can end. Clones are handles to the same connection.
#[derive(Clone, Debug, Default)]
pub struct ConnectionEnds {
    /// Ends both directions.
    pub cut: Shutdown,
    /// Both directions stand still.
    pub silence: Shutdown,
}

impl ConnectionEnds {
    /// Ends the connection as the death of one of its processes does.
    pub fn end(&self, how: Crash) {
        match how {
            Crash::Process => self.cut.trigger(),
            Crash::Machine => self.silence.trigger(),
        }
    }
}

#[async_trait]
impl Net for FollowerNet {
    async fn connect(&self, addr: &str) -> io::Result<Stream> {
        if addr != self.head {
            return self.kv.connect(addr).await;
        }
        if self.ends.cut.requested() {
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        if self.ends.silence.requested() {
            return std::future::pending().await;
        }
        let far = self.joining.connect(addr).await?;
        let (near, ours) = duplex(STREAM_BYTES);
        let (from_follower, to_follower) = Stream::other(ours).into_split();
        let (from_head, to_head) = far.into_split();
        let there = (Direction::ToHead, from_follower, to_head);
        let back = (Direction::ToFollower, from_head, to_follower);
        for (direction, reader, writer) in [there, back] {
            let relay = DirectionRelay {
                direction,
                incoming: Incoming { reader, bytes: Vec::new(), n_taken: 0 },
                writer,
                delay: self.delay,
                travelling: VecDeque::new(),
                faults: self.faults_of(direction),
                kept: Vec::new(),
                n_written: 0,
                follower: self.follower,
                progress: self.progress.clone(),
                reports: self.reports.clone(),
                cut: self.ends.cut.clone(),
                silence: self.ends.silence.clone(),
                process_faults: self.process_faults.clone(),
            };
            spawn_guarded(&self.gate, "relay", relay.pass_all()).detach();
        }
        Ok(Stream::other(near))
    }

    async fn listen(&self, addr: &str) -> io::Result<Box<dyn Listener>> {
        self.kv.listen(addr).await
    }
}

impl FollowerNet {
    fn faults_of(&self, direction: Direction) -> Vec<Fault> {
        let is_here = |fault: &&Fault| fault.follower == self.follower && fault.direction == direction;
        self.faults.iter().filter(is_here).copied().collect()
    }
}

/// One direction of a connection.
struct DirectionRelay {
    direction: Direction,
    incoming: Incoming,
    writer: StreamWriter,
    delay: Duration,
    /// The messages on their way, each with its arrival.
    travelling: VecDeque<(Instant, Message)>,
    faults: Vec<Fault>,
    /// Messages that arrive later.
    kept: Vec<Kept>,
    /// The number of the message that the reader expects.
    n_written: u64,
    follower: usize,
    progress: Progress,
    reports: LandingReports,
    /// Ends both directions.
    cut: Shutdown,
    /// Both directions stand still.
    silence: Shutdown,
    process_faults: mpsc::Sender<ProcessFault>,
}

/// A message, counted from 0 in its direction.
#[derive(Clone, Debug)]
struct Message {
    nth: u64,
    bytes: Vec<u8>,
}

#[derive(Clone, Debug)]
struct Kept {
    message: Message,
    until: Until,
}

#[derive(Clone, Copy, Debug)]
enum Until {
    Time(Instant),
    /// The message with this number has arrived.
    After(u64),
}

/// The end of a direction. The other side of the connection may see it.
enum Ended {
    /// The sender has closed the connection.
    Closed,
    /// The reader has closed the connection, or is cut off.
    Unread,
}

impl DirectionRelay {
    async fn pass_all(mut self) {
        let cut = self.cut.clone();
        let ended = tokio::select! {
            biased;
            () = cut.wait() => Ended::Closed,
            ended = self.pass_until_closed() => ended,
        };
        if let Ended::Closed = ended {
            // The reader may be gone already.
            let _ = self.writer.shutdown().await;
        }
    }

    async fn pass_until_closed(&mut self) -> Ended {
        let ended = self.pass().await;
        if let (Ended::Unread, Direction::ToFollower) = (&ended, self.direction) {
            // The head knows nothing yet.
            while self.incoming.next().await.is_some() {}
        }
        self.note(|seen| seen.is_closed = true);
        if let Ended::Unread = ended {
            while self.incoming.next().await.is_some() {}
        }
        ended
    }

    async fn pass(&mut self) -> Ended {
        loop {
            let silence = self.silence.clone();
            let due = self.next_due();
            let message = tokio::select! {
                biased;
                () = silence.wait() => return self.stand_still().await,
                () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => None,
                read = self.incoming.next() => match read {
                    Some(message) => Some(message),
                    None => return self.pass_rest().await,
                },
            };
            let passed = match message {
                Some(message) => self.send(message).await,
                None => self.write_due().await,
            };
            if let Err(ended) = passed {
                return ended;
            }
        }
    }

    /// Lets a message travel.
    async fn send(&mut self, message: Message) -> Result<(), Ended> {
        self.note_sent(&message.bytes);
        if self.delay.is_zero() {
            return self.apply_fault(message).await;
        }
        self.travelling.push_back((Instant::now() + self.delay, message));
        Ok(())
    }

    /// Passes on what travels, after the sender has closed the connection.
    async fn pass_rest(&mut self) -> Ended {
        while let Some((due, message)) = self.travelling.pop_front() {
            sleep_until(due).await;
            if let Err(ended) = self.apply_fault(message).await {
                return ended;
            }
        }
        Ended::Closed
    }

    /// Passes a message on, with its fault.
    async fn apply_fault(&mut self, message: Message) -> Result<(), Ended> {
        let fault = self.faults.iter().find(|fault| fault.nth == message.nth).map(|fault| fault.what);
        let Some(kind) = fault else { return self.write(message).await };
        self.progress.note(|seen| seen.last_fault = Some(Instant::now()));
        match kind {
            FaultKind::Lose => {}
            FaultKind::Double { after } => {
                let until = Until::After(message.nth + after);
                self.kept.push(Kept { message: message.clone(), until });
                self.write(message).await?;
            }
            FaultKind::Late(by) => {
                let until = Until::Time(Instant::now() + by);
                self.kept.push(Kept { message, until });
            }
            FaultKind::Hold(time) => {
                if time > SILENT_MAX {
                    self.demand_end();
                }
                let silence = self.silence.clone();
                self.note(|seen| seen.n_held += 1);
                tokio::select! {
                    biased;
                    () = silence.wait() => return Err(self.stand_still().await),
                    () = sleep(time) => {}
                }
                self.note(|seen| seen.n_held -= 1);
                self.write(message).await?;
            }
            FaultKind::Cut => return Err(self.cut(&[]).await),
            FaultKind::CutInside => return Err(self.cut(&message.bytes[..message.bytes.len() / 2]).await),
            FaultKind::Silence => {
                self.demand_end();
                return Err(self.stand_still().await);
            }
            FaultKind::SilenceBothWays => {
                self.demand_end();
                self.silence.trigger();
                return Err(self.stand_still().await);
            }
            FaultKind::Process(fault) => {
                self.process_faults.try_send(fault).expect("a plan has few faults of processes");
                self.write(message).await?;
            }
        }
        Ok(())
    }

    /// Ends both directions after some bytes.
    async fn cut(&mut self, last: &[u8]) -> Ended {
        self.demand_end();
        let _ = self.writer.write_all(last).await;
        self.cut.trigger();
        Ended::Closed
    }

    /// Passes nothing on any more. The reader does not see the end of the connection.
    async fn stand_still(&mut self) -> Ended {
        self.note(|seen| seen.n_held += 1);
        while self.incoming.next().await.is_some() {}
        if let Direction::ToHead = self.direction {
            self.cut.wait().await;
        }
        Ended::Unread
    }

    fn next_due(&self) -> Option<Instant> {
        let due = |kept: &Kept| match kept.until {
            Until::Time(due) => Some(due),
            Until::After(_) => None,
        };
        let first = self.travelling.front().map(|(due, _)| *due);
        self.kept.iter().filter_map(due).chain(first).min()
    }

    /// Writes the messages whose time has come.
    async fn write_due(&mut self) -> Result<(), Ended> {
        let now = Instant::now();
        while self.travelling.front().is_some_and(|(due, _)| *due <= now)
            && let Some((_, message)) = self.travelling.pop_front()
        {
            self.apply_fault(message).await?;
        }
        let is_due = |kept: &mut Kept| matches!(kept.until, Until::Time(due) if due <= now);
        for kept in self.kept.extract_if(.., is_due).collect::<Vec<_>>() {
            self.write_one(&kept.message).await?;
        }
        Ok(())
    }

    /// Writes a message, and the copies that come after it.
    async fn write(&mut self, message: Message) -> Result<(), Ended> {
        self.write_one(&message).await?;
        let is_next = |kept: &mut Kept| matches!(kept.until, Until::After(nth) if nth <= message.nth);
        for kept in self.kept.extract_if(.., is_next).collect::<Vec<_>>() {
            self.progress.note(|seen| seen.last_fault = Some(Instant::now()));
            self.write_one(&kept.message).await?;
        }
        Ok(())
    }

    async fn write_one(&mut self, message: &Message) -> Result<(), Ended> {
        self.writer.write_all(&message.bytes).await.map_err(|_| Ended::Unread)?;
        if message.nth != self.n_written {
            self.demand_end();
        }
        self.n_written = message.nth + 1;
        self.note_arrived(&message.bytes);
        Ok(())
    }

    /// Notes that the node must end, unless its end has begun.
    fn demand_end(&self) {
        self.note(|seen| seen.must_end |= !seen.is_closed);
    }

    fn note_sent(&self, bytes: &[u8]) {
        self.reports.sent(self.follower, self.direction, &bytes[HEADER_BYTES..]);
        match kind(self.direction, bytes) {
            Kind::Step => self.note(|seen| seen.steps_sent += 1),
            Kind::Results => self.note(|seen| seen.results_sent += 1),
            Kind::Loaded => self.note(|seen| seen.has_loaded = true),
            Kind::Accepted | Kind::Other => {}
        }
    }

    fn note_arrived(&self, bytes: &[u8]) {
        self.reports.arrived(self.follower, self.direction, &bytes[HEADER_BYTES..]);
        match kind(self.direction, bytes) {
            Kind::Step => self.note(|seen| seen.steps_arrived += 1),
            Kind::Results => self.note(|seen| seen.results_arrived += 1),
            Kind::Accepted => self.note(|seen| seen.is_accepted = true),
            Kind::Loaded => self.note(|seen| seen.is_known_to_be_loaded = true),
            Kind::Other => {}
        }
    }

    fn note(&self, change: impl FnOnce(&mut ConnectionSeen)) {
        self.progress.note(|seen| change(&mut seen.connections[self.follower]));
    }
}

/// The messages of a sender.
struct Incoming {
    reader: StreamReader,
    bytes: Vec<u8>,
    n_taken: u64,
}

impl Incoming {
    /// Waits for the next message; `None` at the end. Cancel-safe.
    async fn next(&mut self) -> Option<Message> {
        loop {
            if let Some(bytes) = self.take_whole() {
                let nth = self.n_taken;
                self.n_taken += 1;
                return Some(Message { nth, bytes });
            }
            if self.reader.read_buf(&mut self.bytes).await.unwrap_or(0) == 0 {
                return None;
            }
        }
    }

    fn take_whole(&mut self) -> Option<Vec<u8>> {
        let length = u32::from_le_bytes(*self.bytes.first_chunk()?) as usize + HEADER_BYTES;
        (self.bytes.len() >= length).then(|| self.bytes.drain(..length).collect())
    }
}

/// The messages that say whether a thread computes.
enum Kind {
    Step,
    Results,
    Accepted,
    Loaded,
    Other,
}

fn kind(direction: Direction, bytes: &[u8]) -> Kind {
    use v1::from_follower::Message as OfFollower;
    use v1::from_head::Message as OfHead;
    let body = &bytes[HEADER_BYTES..];
    match direction {
        Direction::ToHead => match proto::decode(body).map(|of: v1::FromFollower| of.message) {
            Ok(Some(OfFollower::Output(_))) => Kind::Results,
            Ok(Some(OfFollower::Loaded(_))) => Kind::Loaded,
            _ => Kind::Other,
        },
        Direction::ToFollower => match proto::decode(body).map(|of: v1::FromHead| of.message) {
            Ok(Some(OfHead::Input(_))) => Kind::Step,
            Ok(Some(OfHead::Accepted(_))) => Kind::Accepted,
            _ => Kind::Other,
        },
    }
}
