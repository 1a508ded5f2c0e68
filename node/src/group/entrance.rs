//! The port where followers join: the admission of each process to its place.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use chassis::identity::link;
use chassis::telemetry::RareLines;
use chassis::{Gate, Listener, Stream, World, spawn_guarded};
use proto::v1;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tracing::{info, warn};
use types::{Fingerprint, ProcessGrid, StageLayers, in_full};

use super::connection::{MessageReader, SILENT_MAX, outgoing};
use super::error::GroupError;
use super::joined::{JoinRequest, JoinedProcess};
use super::messages::{OfFollower, OfHead, from_head};
use super::{EXECUTABLE, PROTOCOL, VERSION};

/// The processes that have joined, by number; empty after the node's end. Locked for look-ups. Shared with the task that
/// accepts connections.
pub(super) type JoinedProcesses = Arc<Mutex<Vec<Option<Arc<JoinedProcess>>>>>;

/// The log lines about processes that may not join.
static REFUSED: RareLines = RareLines::new();

/// Accepts followers.
#[derive(Clone, Debug)]
pub(super) struct Entrance {
    pub(super) world: World,
    pub(super) gate: Gate,
    /// The fingerprint of all that must be equal in all processes.
    pub(super) common: Fingerprint,
    pub(super) grid: ProcessGrid,
    pub(super) layers: StageLayers,
    pub(super) processes: JoinedProcesses,
    pub(super) attempts: mpsc::Sender<JoinAttempt>,
}

/// How an attempt to join has ended.
#[derive(Debug)]
pub(super) enum JoinAttempt {
    Joined,
    /// The reason for an operator.
    Refused(String),
}

/// A request to join with a place that is taken or does not exist.
#[derive(Debug)]
struct Misplaced {
    why: String,
    request: JoinRequest,
}

impl Entrance {
    /// Accepts connections until the node ends. Later ones are refused, because each place has its process.
    pub(super) async fn accept_all(self, mut listener: Box<dyn Listener>) {
        loop {
            match listener.accept().await {
                Ok((stream, from)) => {
                    let (entrance, attempts, within) = (self.clone(), self.attempts.clone(), SILENT_MAX);
                    let join = async move {
                        let joined = timeout(within, entrance.join(stream, from)).await;
                        let late = |_| Err(no_request("it has not joined in time"));
                        let attempt = match joined.unwrap_or_else(late) {
                            Ok(()) => JoinAttempt::Joined,
                            Err(error) => {
                                let why = in_full(&error);
                                if let Some(left_out) = REFUSED.line(&why) {
                                    warn!(%from, error = why, left_out, "process may not join this node");
                                }
                                JoinAttempt::Refused(why)
                            }
                        };
                        // The receiver is gone after all have joined, so a failed send is ignored.
                        let _ = attempts.send(attempt).await;
                    };
                    spawn_guarded(&self.gate, "join", join).detach();
                }
                Err(error) => {
                    warn!(%error, "connection of a follower cannot be accepted, trying again");
                    tokio::time::sleep(SILENT_MAX / 10).await;
                }
            }
        }
    }

    async fn join(self, stream: Stream, from: SocketAddr) -> Result<(), GroupError> {
        let admitted = link::admit_process(&self.world, stream).await;
        let stream = admitted.map_err(|error| GroupError::lost("it is not admitted", &error))?;
        let (reader, writer) = stream.into_split();
        let (mut reader, (out, writing)) = (MessageReader::new(reader), outgoing(writer));
        let first: v1::FromFollower = reader.next().await.map_err(|error| no_request(&error.to_string()))?;
        let Some(OfFollower::Join(join)) = first.message else {
            return Err(no_request("its first message is not a request to join"));
        };
        let v1::Join { place, n_blocks, settings } = join;
        let place = place as usize;
        let (name, layers_end) = self.named(place);
        let request = JoinRequest { place, name, n_blocks, layers_end, from, reader, out, writing };
        let refused = match difference(&self.common, &Fingerprint::new(settings), from) {
            Some(why) => Err(Box::new(Misplaced { why, request })),
            None => self.take_place(request),
        };
        let Err(misplaced) = refused else { return Ok(()) };
        let Misplaced { why, request } = *misplaced;
        // The connection has just begun, so it takes the message.
        let _ = request.out.send_now(from_head(OfHead::Refused(why.clone())));
        request.writing.write_waiting().await?;
        Err(GroupError::Lost(why))
    }

    /// Names the process's part of the model, and returns the end of its layers.
    fn named(&self, place: usize) -> (String, u16) {
        if place >= self.grid.head() {
            return (format!("place {place}"), 0);
        }
        let layers = self.layers.iter().nth(self.grid.share(place).stage);
        (self.grid.name(place), layers.map_or(0, |layers| layers.end))
    }

    /// Starts the connection of a process whose place is free. The check and the start are one step, so that one of two
    /// processes for a place is refused.
    fn take_place(&self, request: JoinRequest) -> Result<(), Box<Misplaced>> {
        let mut processes = self.processes.lock().unwrap_or_else(PoisonError::into_inner);
        let (place, n_places) = (request.place, processes.len());
        let why = match processes.get_mut(place) {
            None if n_places == 0 => "this node is ending".to_owned(),
            None => {
                format!("place {place} is none of the {n_places} of other processes: `--place` counts from 0")
            }
            Some(Some(other)) if !other.is_lost() => {
                format!("{other} is there already: end it first, or join another head or `--place`")
            }
            Some(free) => {
                let JoinRequest { from, name, .. } = &request;
                info!(place, computes = name, %from, "process has joined this node");
                *free = Some(JoinedProcess::start(request, &self.gate));
                return Ok(());
            }
        };
        Err(Box::new(Misplaced { why, request }))
    }
}

/// Names the difference between the head and a process at `from`, and the remedy.
fn difference(ours: &Fingerprint, theirs: &Fingerprint, from: SocketAddr) -> Option<String> {
    let differences = ours.differences(theirs, |name, ours, theirs| {
        format!("{name} is {ours} at the head and {theirs} at {from}")
    });
    let of_executable = |name: &&str| ours.part(name) != theirs.part(name);
    let advice = match [EXECUTABLE, PROTOCOL, VERSION].iter().any(of_executable) {
        true => "run the same executable in all processes of the node",
        false => "give all processes of the node the same model files and settings",
    };
    (!differences.is_empty()).then(|| format!("{}: {advice}", differences.join("; ")))
}

/// The error of a connection that is not from a follower, or from one whose messages this version cannot
/// read.
fn no_request(why: &str) -> GroupError {
    GroupError::Lost(format!(
        "it has sent no request to join ({why}): `baton rank` needs the same executable, `cluster.secret_file` and \
         certificates as the head"
    ))
}

#[cfg(test)]
mod tests;
