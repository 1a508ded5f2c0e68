//! Sends one request and reads its answer, from the intended time to the record.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::{Instant, timeout_at};

use crate::client::connection::{Connection, Connections};
use crate::client::reception::{Reception, ReceptionState, Timing};
use crate::client::recorder::{Answer, AnswerText};
use crate::client::target::TargetServer;
use crate::load::live::Live;
use crate::record::{Failure, FailureKind, Outcome, RequestRecord};

/// A request's place in the run and its limits, besides the bytes to send.
#[derive(Clone, Debug)]
pub struct Assignment {
    pub index: u32,
    pub session: u32,
    pub turn: u32,
    pub slice: u32,
    pub intended: Instant,
    pub prompt_tokens: u32,
    pub wanted_tokens: u32,
    pub cancel_after: Option<Duration>,
    pub text: AnswerText,
}

/// Sends requests to one target. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Client {
    target: Arc<TargetServer>,
    connections: Arc<Connections>,
    live: Arc<Live>,
    /// The time from which the run's records count.
    epoch: Instant,
    timeout: Duration,
}

/// A request that was sent, and its answer that is being read.
struct Exchange<'a> {
    client: &'a Client,
    intended: Instant,
    sent_us: u32,
    reception: Reception,
    n_seen: usize,
}

impl Client {
    pub fn new(target: Arc<TargetServer>, live: Arc<Live>, epoch: Instant, options: ClientOptions) -> Self {
        let connections = if options.keeps_connections { Connections::kept() } else { Connections::fresh() };
        let connections = Arc::new(connections);
        Self { target, connections, live, epoch, timeout: options.timeout }
    }

    /// Sends one request and reads its answer. A failure is part of the record.
    pub async fn exchange(&self, assignment: Assignment, wire: Vec<u8>) -> (RequestRecord, Option<Answer>) {
        let lag_us = since(assignment.intended, Instant::now());
        let mut exchange = Exchange {
            client: self,
            intended: assignment.intended,
            sent_us: 0,
            reception: Reception::new(assignment.wanted_tokens, assignment.text),
            n_seen: 0,
        };
        self.live.begin();
        let outcome = exchange.run_bounded(&wire, assignment.cancel_after).await;
        let answer = exchange.reception.recorder.answer.take();
        let timing = Timing {
            intended_us: assignment.intended.saturating_duration_since(self.epoch).as_micros() as u64,
            lag_us,
            sent_us: exchange.sent_us,
            end_us: since(assignment.intended, Instant::now()),
        };
        let record = exchange.reception.into_record(&assignment, timing, outcome);
        self.live.end(&record);
        (record, answer)
    }
}

/// The settings of a client.
#[derive(Clone, Copy, Debug)]
pub struct ClientOptions {
    pub keeps_connections: bool,
    /// The longest time from a request's intended time to its last token.
    pub timeout: Duration,
}

impl Exchange<'_> {
    /// Runs the exchange until the timeout or the planned cancellation, whichever is first. Dropping the
    /// exchange closes the connection, which is how an OpenAI client cancels.
    async fn run_bounded(&mut self, wire: &[u8], cancel_after: Option<Duration>) -> Outcome {
        let give_up = cancel_after.filter(|after| *after < self.client.timeout);
        let deadline = self.intended + give_up.unwrap_or(self.client.timeout);
        match timeout_at(deadline, self.run(wire)).await {
            Ok(Ok(outcome)) => outcome,
            Ok(Err((kind, error))) => failed(harness_or(kind, &error), error.to_string()),
            Err(_) if give_up.is_some() => Outcome::Cancelled,
            Err(_) => failed(FailureKind::Timeout, format!("not done within {:?}", self.client.timeout)),
        }
    }

    /// Sends the request and reads the answer. If the server has closed a kept connection, the request is
    /// sent once more over a new one, before the first byte of an answer only. The lost time counts.
    async fn run(&mut self, wire: &[u8]) -> Result<Outcome, (FailureKind, io::Error)> {
        let client = self.client;
        let connection = client.connections.take(&client.target).await.map_err(connect_failed)?;
        let may_retry = connection.is_used;
        match self.send_and_read(connection, wire).await {
            Err(_) if may_retry && !self.reception.has_begun() => {
                let connection = Connections::open(&client.target).await.map_err(connect_failed)?;
                self.send_and_read(connection, wire).await.map_err(broken)
            }
            other => other.map_err(broken),
        }
    }

    async fn send_and_read(&mut self, mut connection: Connection, wire: &[u8]) -> io::Result<Outcome> {
        connection.send(wire).await?;
        self.sent_us = since(self.intended, Instant::now());
        loop {
            let heard = connection.read(|bytes| self.hear(bytes)).await??;
            if let ReceptionState::End { outcome, reusable } = heard {
                if reusable {
                    self.client.connections.give_back(connection);
                }
                return Ok(outcome);
            }
        }
    }

    /// Passes the bytes of one read to the recorder. The clock is read here, next to the read that returned
    /// the bytes.
    fn hear(&mut self, bytes: &[u8]) -> io::Result<ReceptionState> {
        let at_us = since(self.intended, Instant::now());
        if bytes.is_empty() {
            return self.hear_end();
        }
        let heard = self.reception.feed(bytes, at_us);
        let new = &self.reception.recorder.chunks[self.n_seen..];
        let n_tokens = new.iter().map(|chunk| u64::from(chunk.tokens)).sum();
        self.n_seen += new.len();
        self.client.live.tokens.fetch_add(n_tokens, Ordering::Relaxed);
        Ok(heard)
    }

    fn hear_end(&mut self) -> io::Result<ReceptionState> {
        if !self.reception.has_begun() {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "closed before an answer"));
        }
        Ok(ReceptionState::End { outcome: self.reception.close(), reusable: false })
    }
}

fn since(start: Instant, now: Instant) -> u32 {
    u32::try_from(now.saturating_duration_since(start).as_micros()).unwrap_or(u32::MAX)
}

fn connect_failed(error: io::Error) -> (FailureKind, io::Error) {
    (FailureKind::Connect, error)
}

fn broken(error: io::Error) -> (FailureKind, io::Error) {
    (FailureKind::Broken, error)
}

/// Returns `Harness` if this machine ran out of descriptors or local ports, which is no failure of the
/// server; otherwise `kind`.
fn harness_or(kind: FailureKind, error: &io::Error) -> FailureKind {
    use rustix::io::Errno;
    let ours = [Errno::MFILE, Errno::NFILE, Errno::ADDRNOTAVAIL, Errno::NOBUFS, Errno::NOMEM];
    let is_ours =
        error.raw_os_error().is_some_and(|code| ours.iter().any(|errno| errno.raw_os_error() == code));
    if is_ours { FailureKind::Harness } else { kind }
}

fn failed(kind: FailureKind, message: String) -> Outcome {
    Outcome::Failed(Failure { kind, message })
}
