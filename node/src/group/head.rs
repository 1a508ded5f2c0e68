//! The head: waits for its followers, and then is the node, with stages and ranks in other processes.

use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use bytes::Bytes;
use chassis::{Gate, Shutdown, Task, World, spawn_guarded};
use engine::remote::{RemoteProcess, StageMates, StageRanks};
use engine::{Backend, EngineSettings};
use futures::future::select_all;
use kv_transfer::{LandOrder, LandingEvent, OtherProcesses, PutOrder, TransferError};
use proto::v1;
use tokio::sync::mpsc;
use tokio::time::timeout_at;
use tracing::info;
use types::{Epoch, NodeId, ProcessGrid, Role, StageLayers, TransferId};

use super::entrance::{Entrance, JoinAttempt, JoinedProcesses};
use super::error::GroupError;
use super::joined::JoinedProcess;
use super::mates::{self, Member};
use super::messages::OfHead;
use super::{GroupSettings, Prepared, blocking, prepare};

/// Limit of connections that have not joined yet.
const JOINING_MAX: usize = 64;

/// The parts that the head needs to gather its followers.
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
    grid: ProcessGrid,
    layers: StageLayers,
    processes: Vec<Arc<JoinedProcess>>,
    _joining: Joining,
}

/// The port where followers join. Dropping it closes the port, and ends the connections of all that have joined.
#[derive(Debug)]
struct Joining {
    processes: JoinedProcesses,
    _accepting: Task<()>,
}

/// Waits for a follower for each place but its own, and opens the model with them.
///
/// A follower whose settings or files differ is refused. If one is missing at the end, the error names it.
pub async fn gather(parts: HeadParts) -> Result<(Arc<Group>, Box<dyn Backend>), GroupError> {
    let HeadParts { world, gate, id, role, settings, engine } = &parts;
    let GroupSettings { grid, listen, join_within } = settings;
    let n_followers = grid.head();
    let Prepared { stage: prepared, common } = prepare(engine, *grid, n_followers).await?;
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
        grid: *grid,
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
                let (missing, within) = (missing(&processes, *grid), *join_within);
                return Err(GroupError::Missing { missing, addr, within, refused });
            }
        }
    };
    let n_blocks = joined.iter().map(|process| process.n_blocks).fold(prepared.n_blocks(), u32::min);
    let epoch = world.epoch();
    let sums_ids: Vec<Bytes> = (0..grid.n_stages())
        .map(|_| prepared.sums_id())
        .collect::<Result<_, _>>()
        .map_err(GroupError::Open)?;
    for (place, process) in joined.iter().enumerate() {
        let (node, receives_kv) = (id.as_str().to_owned(), role.decodes());
        let sums_id = sums_ids[grid.share(place).stage].clone();
        let accepted = v1::Accepted { n_blocks, node, epoch: epoch.0, receives_kv, sums_id };
        process.say(OfHead::Accepted(accepted)).await?;
    }
    info!(n_blocks, "all processes of this node have joined");
    let of_process = |(place, process): (usize, &Arc<JoinedProcess>)| RemoteProcess {
        share: grid.share(place),
        stage: Arc::clone(process) as _,
    };
    let remote: Vec<RemoteProcess> = joined.iter().enumerate().map(of_process).collect();
    let sums_id = sums_ids.into_iter().next_back().expect("there is a stage");
    let ranks = connect_ranks(*grid, &joined).map(|mates| StageRanks { mates, sums_id });
    let group = Arc::new(Group { epoch, grid: *grid, layers, processes: joined, _joining: joining });
    let open = move || prepared.open_head(n_blocks, &remote, ranks).map_err(GroupError::Open);
    let backend = blocking(open).await?;
    Ok((group, backend))
}

/// Connects the ranks of each stage that has several processes. Returns the exchange of this process.
fn connect_ranks(grid: ProcessGrid, joined: &[Arc<JoinedProcess>]) -> Option<Arc<dyn StageMates>> {
    if grid.processes_of_stage() == 1 {
        return None;
    }
    let of_stage = |stage| {
        let members: Vec<Member<'_>> = grid
            .of_stage(stage)
            .map(|place| joined.get(place).and_then(|process| process.member()))
            .collect();
        mates::connect(&members)
    };
    let mut of_stages: Vec<_> = (0..grid.n_stages()).map(of_stage).collect();
    // The head is in the last stage.
    of_stages.pop().flatten()
}

/// Returns the processes if one has joined for each place.
fn all_joined(processes: &JoinedProcesses) -> Option<Vec<Arc<JoinedProcess>>> {
    let processes = processes.lock().unwrap_or_else(PoisonError::into_inner);
    processes.iter().map(|process| process.clone().filter(|process| !process.is_lost())).collect()
}

/// Names the places without a process.
fn missing(processes: &JoinedProcesses, grid: ProcessGrid) -> String {
    let processes = processes.lock().unwrap_or_else(PoisonError::into_inner);
    let is_free =
        |process: &Option<Arc<JoinedProcess>>| process.as_ref().is_none_or(|process| process.is_lost());
    let free = processes.iter().enumerate().filter(|(_, process)| is_free(process));
    let name = |place| match grid.processes_of_stage() {
        // The number of a stage is that of its place.
        1 => grid.name(place),
        _ => format!("place {place} ({})", grid.name(place)),
    };
    free.map(|(place, _)| name(place)).collect::<Vec<_>>().join(", ")
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
    fn process_of(&self, layer: u16, rank: u16) -> Option<usize> {
        let stage = self.layers.iter().position(|layers| layers.contains(&layer))?;
        Some(self.grid.process_of(stage, rank)).filter(|process| *process != self.grid.head())
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
