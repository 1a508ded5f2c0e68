//! The head: waits for its followers, and then is the node, with stages in other processes.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use chassis::identity::link;
use chassis::{Gate, Listener, Shutdown, Stream, Task, World, spawn_guarded};
use engine::remote::RemoteStage;
use engine::{Backend, EngineSettings};
use futures::future::select_all;
use kv_transfer::{LandOrder, LandingEvent, OtherProcesses, PutOrder, TransferError};
use proto::v1;
use tokio::sync::mpsc;
use tokio::time::{timeout, timeout_at};
use tracing::{info, warn};
use types::{Epoch, Fingerprint, NodeId, Role, StageLayers, TransferId, in_full};

use super::connection::{MessageReader, SILENT_MAX, outgoing};
use super::error::GroupError;
use super::joined::{JoinRequest, JoinedProcess};
use super::messages::{OfFollower, OfHead, from_head};
use super::{GroupSettings, Prepared, blocking, prepare};

/// Limit of connections that have not joined yet.
const JOINING_MAX: usize = 64;

/// What the head needs to gather its followers.
#[derive(Clone, Debug)]
pub struct HeadParts {
    pub world: World,
    pub gate: Gate,
    pub id: NodeId,
    pub role: Role,
    pub settings: GroupSettings,
    pub engine: EngineSettings,
}

/// The followers of a node, and the node's epoch. Dropping it ends the connections.
#[derive(Debug)]
pub struct Group {
    epoch: Epoch,
    layers: StageLayers,
    processes: Vec<Arc<JoinedProcess>>,
    _joining: Joining,
}

/// The processes that have joined, by stage; empty after the node's end. Locked for look-ups. Shared with the task that
/// accepts connections.
type JoinedProcesses = Arc<Mutex<Vec<Option<Arc<JoinedProcess>>>>>;

/// The port where followers join. Dropping it closes the port, and ends the connections of all that have joined.
#[derive(Debug)]
struct Joining {
    processes: JoinedProcesses,
    _accepting: Task<()>,
}

/// Waits for a follower for each stage but the last, and opens the model with them.
///
/// A follower whose settings or files differ is refused. If one is missing at the end, the error names it.
pub async fn gather(parts: HeadParts) -> Result<(Arc<Group>, Box<dyn Backend>), GroupError> {
    let HeadParts { world, gate, id, role, settings, engine } = &parts;
    let n_followers = usize::from(settings.n_processes) - 1;
    let Prepared { stage: prepared, common } = prepare(engine, n_followers).await?;
    let GroupSettings { listen, join_within, .. } = settings;
    let bound = world.net().listen(listen).await;
    let listener = bound.map_err(|source| GroupError::Listen { addr: listen.clone(), source })?;
    let addr = listener.local_addr().map_or_else(|_| listen.clone(), |addr| addr.to_string());
    info!(addr, followers = n_followers, "head waits for the other processes of this node");

    let processes: JoinedProcesses = Arc::new(Mutex::new(vec![None; n_followers]));
    let (attempts, mut attempted) = mpsc::channel(JOINING_MAX);
    let layers = prepared.layers_of_stages().clone();
    let entrance = Entrance {
        world: world.clone(),
        gate: gate.clone(),
        common,
        layers: layers.clone(),
        processes: Arc::clone(&processes),
        attempts,
    };
    let _accepting = spawn_guarded(gate, "followers", entrance.accept_all(listener));
    let joining = Joining { processes: Arc::clone(&processes), _accepting };
    let until = tokio::time::Instant::now() + *join_within;
    let mut refused = None;
    let joined = loop {
        if let Some(all) = all_joined(&processes) {
            break all;
        }
        match timeout_at(until, attempted.recv()).await {
            Ok(Some(JoinAttempt::Refused(why))) => refused = Some(why),
            Ok(_) => {}
            Err(_) => {
                let (stages, within) = (missing(&processes), *join_within);
                return Err(GroupError::Missing { stages, addr, within, refused });
            }
        }
    };
    let n_blocks = joined.iter().map(|process| process.n_blocks).fold(prepared.n_blocks(), u32::min);
    let epoch = world.epoch();
    for process in &joined {
        let (node, receives_kv) = (id.as_str().to_owned(), role.decodes());
        let accepted = v1::Accepted { n_blocks, node, epoch: epoch.0, receives_kv };
        process.say(OfHead::Accepted(accepted)).await?;
    }
    info!(n_blocks, "all processes of this node have joined");
    let remote: Vec<Arc<dyn RemoteStage>> = joined.iter().map(|process| Arc::clone(process) as _).collect();
    let group = Arc::new(Group { epoch, layers, processes: joined, _joining: joining });
    let backend = blocking(move || prepared.open_head(n_blocks, &remote)).await?;
    Ok((group, backend))
}

/// Returns the processes if one has joined for each stage.
fn all_joined(processes: &JoinedProcesses) -> Option<Vec<Arc<JoinedProcess>>> {
    let processes = processes.lock().unwrap_or_else(PoisonError::into_inner);
    processes.iter().map(|process| process.clone().filter(|process| !process.is_lost())).collect()
}

/// Names the stages without a process.
fn missing(processes: &JoinedProcesses) -> String {
    let processes = processes.lock().unwrap_or_else(PoisonError::into_inner);
    let is_free =
        |process: &Option<Arc<JoinedProcess>>| process.as_ref().is_none_or(|process| process.is_lost());
    let free = processes.iter().enumerate().filter(|(_, process)| is_free(process));
    let names: Vec<String> = free.map(|(place, _)| format!("stage {place}")).collect();
    names.join(", ")
}

// === impl Group ===

impl Group {
    /// Returns the epoch of the node's only life.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Returns why the node must end: a follower is lost. Waits until then.
    pub async fn lost(&self) -> GroupError {
        let lost = self.processes.iter().map(|process| Box::pin(process.lost.wait()));
        let (_, nth, _) = select_all(lost).await;
        GroupError::Lost(self.processes[nth].why())
    }

    /// Triggers `shutdown` when a follower is asked to stop. It computes until the node has drained.
    pub async fn stop_with_followers(&self, shutdown: &Shutdown) {
        let stopping = self.processes.iter().map(|process| Box::pin(process.stopping.wait()));
        let (_, nth, _) = select_all(stopping).await;
        info!(process = %self.processes[nth], "process of this node is asked to stop, the node drains");
        shutdown.trigger();
    }
}

#[async_trait]
impl OtherProcesses for Group {
    fn of_layer(&self, layer: u16) -> Option<usize> {
        let stage = self.layers.iter().position(|layers| layers.contains(&layer));
        stage.filter(|stage| *stage < self.processes.len())
    }

    fn n_processes(&self) -> usize {
        self.processes.len()
    }

    async fn put(&self, process: usize, order: PutOrder) -> Result<(), TransferError> {
        self.processes[process].put(&order).await
    }

    fn endpoint(&self, process: usize) -> String {
        self.processes[process].kv_endpoint()
    }

    fn land(&self, process: usize, order: LandOrder) -> mpsc::Receiver<LandingEvent> {
        self.processes[process].land(&order)
    }

    fn end_landing(&self, process: usize, link: u64, transfer: TransferId) {
        self.processes[process].end_landing(link, transfer);
    }

    fn close_link(&self, link: u64) {
        for process in self.processes.iter().filter(|process| !process.is_lost()) {
            process.close_link(link);
        }
    }
}

impl Drop for Joining {
    fn drop(&mut self) {
        let mut processes = self.processes.lock().unwrap_or_else(PoisonError::into_inner);
        processes.drain(..).flatten().for_each(|process| process.end());
    }
}

// === joining ===

/// Accepts followers.
#[derive(Clone, Debug)]
struct Entrance {
    world: World,
    gate: Gate,
    /// What must be equal in all processes.
    common: Fingerprint,
    layers: StageLayers,
    processes: JoinedProcesses,
    attempts: mpsc::Sender<JoinAttempt>,
}

/// How an attempt to join has ended.
#[derive(Debug)]
enum JoinAttempt {
    Joined,
    /// The reason for an operator.
    Refused(String),
}

impl Entrance {
    /// Accepts connections until the node ends. Later ones are refused, because each stage has its process.
    async fn accept_all(self, mut listener: Box<dyn Listener>) {
        loop {
            match listener.accept().await {
                Ok((stream, from)) => {
                    let (entrance, attempts, within) = (self.clone(), self.attempts.clone(), SILENT_MAX);
                    let join = async move {
                        let joined = timeout(within, entrance.join(stream, from)).await;
                        let late = |_| Err(GroupError::Lost("it has not joined in time".to_owned()));
                        let attempt = match joined.unwrap_or_else(late) {
                            Ok(()) => JoinAttempt::Joined,
                            Err(error) => {
                                let why = in_full(&error);
                                warn!(%from, error = why, "process may not join this node");
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
        let admitted = link::admit(&self.world, stream).await;
        let stream = admitted.map_err(|error| GroupError::lost("it is not admitted", &error))?;
        let (reader, writer) = stream.into_split();
        let (mut reader, (out, writing)) = (MessageReader::new(reader), outgoing(writer));
        let message: v1::FromFollower = reader.next().await?;
        let Some(OfFollower::Join(join)) = message.message else {
            return Err(GroupError::Lost("its first message is no request to join".to_owned()));
        };
        let place = join.place as usize;
        if let Some(why) = self.refusal(&join, from) {
            // The connection has just begun, so it takes the message.
            let _ = out.send_now(from_head(OfHead::Refused(why.clone())));
            writing.write_waiting().await?;
            return Err(GroupError::Lost(why));
        }
        let layers_end = self.layers.iter().nth(place).map_or(0, |layers| layers.end);
        let n_blocks = join.n_blocks;
        self.take_place(JoinRequest { place, n_blocks, layers_end, from, reader, out, writing });
        Ok(())
    }

    /// Returns the reason why a process may not join.
    fn refusal(&self, join: &v1::Join, from: SocketAddr) -> Option<String> {
        let place = join.place as usize;
        let theirs = Fingerprint::new(join.settings.clone());
        let differences = self.common.differences(&theirs, |name, ours, theirs| {
            format!("{name} is {ours} at the head and {theirs} at {from}")
        });
        if !differences.is_empty() {
            return Some(differences.join("; "));
        }
        let processes = self.processes.lock().unwrap_or_else(PoisonError::into_inner);
        let n_places = processes.len();
        let Some(process) = processes.get(place) else {
            return Some(format!("stage {place} is none of the {n_places} that other processes compute"));
        };
        let taken = process.as_ref().filter(|process| !process.is_lost());
        taken.map(|process| format!("{process} is there already"))
    }

    /// Starts the connection of a process, unless the node has ended.
    fn take_place(&self, joined: JoinRequest) {
        let mut processes = self.processes.lock().unwrap_or_else(PoisonError::into_inner);
        let place = joined.place;
        if let Some(process) = processes.get_mut(place) {
            info!(place, from = %joined.from, "process has joined this node");
            *process = Some(JoinedProcess::start(joined, &self.gate));
        }
    }
}
