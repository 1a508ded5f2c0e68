//! `baton.v1.NodeStatus`: a stream of a node's load and cached blocks, and the state of its blocks on
//! request. Every kind of node serves it.

use std::pin::Pin;
use std::time::Duration;

use chassis::counted::Counter;
use chassis::{Shutdown, World};
use futures::Stream;
use futures::stream::unfold;
use kv_cache::{BlockEvents, BlockPool, LedgerEntry};
use proto::v1;
use proto::v1::node_status_server::{NodeStatus, NodeStatusServer};
use proto::v1::status_event::Event;
use scheduler::WorkerLoad;
use tokio::sync::watch;
use tonic::{Request, Response, Status};
use types::{Epoch, NodeLoad, Role};

use crate::standing::Standings;
use crate::switch::{RoleRequest, Switch};
use crate::watchdog::StuckStage;

/// The shortest time between two load messages.
const LOAD_PACE: Duration = Duration::from_millis(20);
/// The shortest time before the message that the worker has run out of work, because the next prompt may come
/// at once.
const IDLE_PACE: Duration = Duration::from_millis(2);
/// The longest time between two load messages; each one shows the reader that the node is alive.
const LOAD_HEARTBEAT: Duration = Duration::from_secs(1);
/// The shortest time from one message of block events to the next. Changes in between are merged.
const BLOCKS_PACE: Duration = Duration::from_millis(10);
/// The interval of load messages from a node without a worker, because no event reports changes of its
/// blocks.
const LOAD_EVERY: Duration = Duration::from_millis(250);

/// The inputs of the status service.
#[derive(Clone, Debug)]
pub struct StatusParts {
    pub epoch: Epoch,
    pub pool: BlockPool,
    /// The number of sequences whose KV is arriving.
    pub arriving: Counter,
    /// The worker's status; `None` on a node that computes nothing, whose service sends no block events.
    pub worker: Option<WorkerStatus>,
    pub standings: Standings,
    /// A signal that is triggered when the node stops accepting new work.
    pub draining: Shutdown,
    /// The queue of requests for another role; `None` on a node that computes nothing.
    pub switch: Option<Switch>,
    pub world: World,
}

/// The reports of a worker and its watchdog.
#[derive(Clone, Debug)]
pub struct WorkerStatus {
    pub load: watch::Receiver<WorkerLoad>,
    /// The finding of the watchdog. While the worker is stuck, the node sends no load, so that routers treat
    /// it as unreachable and reconnect.
    pub stuck: watch::Receiver<Option<StuckStage>>,
}

/// The service `baton.v1.NodeStatus` of one node.
#[derive(Clone, Debug)]
pub struct StatusService(StatusParts);

impl StatusService {
    pub fn new(parts: StatusParts) -> Self {
        Self(parts)
    }

    pub fn server(self) -> NodeStatusServer<Self> {
        NodeStatusServer::new(self)
    }
}

/// The server's end of one status stream.
struct Reader {
    node: StatusParts,
    sent_draining: bool,
    load_sent: Option<tokio::time::Instant>,
    worker: Option<WorkerReader>,
}

/// The worker's load and block events, as one status stream reads them.
struct WorkerReader {
    status: WorkerStatus,
    blocks: BlockEvents,
    /// The time before which no block event is sent, so that one message has the changes of several.
    blocks_after: tokio::time::Instant,
    /// Whether the last load message said that the worker has work.
    reported_work: bool,
}

impl Reader {
    fn new(node: &StatusParts) -> Self {
        let blocks_after = node.world.now();
        let reader =
            |status| WorkerReader { status, blocks: node.pool.events(), blocks_after, reported_work: false };
        let worker = node.worker.clone().map(reader);
        Self { node: node.clone(), sent_draining: false, load_sent: None, worker }
    }

    /// Returns the next event for the stream, or an error once the worker is stuck.
    async fn next(&mut self) -> Result<Event, Status> {
        let Some(mut stuck) = self.worker.as_ref().map(|worker| worker.status.stuck.clone()) else {
            return Ok(self.next_event().await);
        };
        tokio::select! {
            biased;
            Ok(found) = stuck.wait_for(Option::is_some) => Err(refused(*found)),
            event = self.next_event() => Ok(event),
        }
    }

    /// Returns the next event for the stream. The first event is the load, or that the node drains: a load as the first
    /// event means that the node accepts work.
    async fn next_event(&mut self) -> Event {
        let load_sent = self.load_sent;
        let worker = async {
            let sent = load_sent?;
            match &mut self.worker {
                Some(worker) => worker.next(sent).await,
                None => {
                    tokio::time::sleep_until(sent + LOAD_EVERY).await;
                    None
                }
            }
        };
        tokio::select! {
            biased;
            () = self.node.draining.wait(), if !self.sent_draining => {
                self.sent_draining = true;
                Event::Draining(v1::Draining {})
            }
            event = worker => event.unwrap_or_else(|| self.load()),
        }
    }

    fn load(&mut self) -> Event {
        let now = self.node.world.now();
        self.load_sent = Some(now);
        let load = self.worker.as_mut().map(|worker| {
            let report = *worker.status.load.borrow_and_update();
            worker.reported_work = has_work(&report);
            let age = now.saturating_duration_since(report.last_turn);
            NodeLoad { age_ms: age.as_secs_f32() * 1e3, ..report.node }
        });
        let (arriving, blocks) = (self.node.arriving.count(), self.node.pool.counts());
        Event::Load(NodeLoad { arriving, blocks, ..load.unwrap_or_default() }.into())
    }
}

impl WorkerReader {
    /// Returns the next block event, or `None` if a load message is due first.
    async fn next(&mut self, load_sent: tokio::time::Instant) -> Option<Event> {
        let load_is_due = async {
            if self.reported_work {
                let mut load = self.status.load.clone();
                tokio::time::sleep_until(load_sent + IDLE_PACE).await;
                let idle = load.wait_for(|report| !has_work(report));
                if let Ok(Ok(_)) = tokio::time::timeout_at(load_sent + LOAD_PACE, idle).await {
                    return;
                }
            }
            tokio::time::sleep_until(load_sent + LOAD_PACE).await;
            let _ = tokio::time::timeout_at(load_sent + LOAD_HEARTBEAT, self.status.load.changed()).await;
        };
        let blocks = async {
            tokio::time::sleep_until(self.blocks_after).await;
            self.blocks.next().await
        };
        let event = tokio::select! {
            biased;
            // The load is polled first: load messages are limited in rate and parts of a snapshot are not, so a
            // load message never starves them.
            () = load_is_due => return None,
            event = blocks => event,
        };
        if event.event.is_complete {
            self.blocks_after = tokio::time::Instant::now() + BLOCKS_PACE;
        }
        Some(Event::Blocks(v1::BlockEvents::new(event.number, &event.event)))
    }
}

#[tonic::async_trait]
impl NodeStatus for StatusService {
    type WatchStream = Pin<Box<dyn Stream<Item = Result<v1::StatusEvent, Status>> + Send>>;

    async fn watch(
        &self,
        request: Request<v1::StatusRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        check_life(request.get_ref().epoch, self.0.epoch)?;
        if let Some(stuck) = self.0.worker.as_ref().and_then(|worker| *worker.stuck.borrow()) {
            return Err(refused(Some(stuck)));
        }
        let events = unfold(Some(Reader::new(&self.0)), |reader| async move {
            let mut reader = reader?;
            match reader.next().await {
                Ok(event) => Some((Ok(v1::StatusEvent { event: Some(event) }), Some(reader))),
                Err(stuck) => Some((Err(stuck), None)),
            }
        });
        Ok(Response::new(Box::pin(events)))
    }

    async fn set_standing(
        &self,
        request: Request<v1::StandingRequest>,
    ) -> Result<Response<v1::StandingAnswer>, Status> {
        self.0.standings.hear(request.into_inner(), self.0.world.now());
        Ok(Response::new(v1::StandingAnswer {}))
    }

    async fn change_role(
        &self,
        request: Request<v1::ChangeRoleRequest>,
    ) -> Result<Response<v1::ChangeRoleAnswer>, Status> {
        let v1::ChangeRoleRequest { epoch, role } = request.into_inner();
        check_life(epoch, self.0.epoch)?;
        let role = match proto::role_from_wire(role) {
            Ok(role @ (Role::Prefill | Role::Decode | Role::Both)) => role,
            Ok(Role::Pool) | Err(_) => {
                return Err(Status::invalid_argument("no role of a node that computes"));
            }
        };
        let Some(switch) = &self.0.switch else {
            return Err(Status::failed_precondition("the node computes nothing"));
        };
        let begun = switch.begin(RoleRequest { role, force: false }).await;
        begun.map_err(|refusal| Status::failed_precondition(refusal.to_string()))?;
        Ok(Response::new(v1::ChangeRoleAnswer {}))
    }

    async fn ledger(
        &self,
        request: Request<v1::LedgerRequest>,
    ) -> Result<Response<v1::LedgerAnswer>, Status> {
        Ok(Response::new(ledger(&self.0.pool, request.into_inner())))
    }
}

fn has_work(report: &WorkerLoad) -> bool {
    report.node.running > 0 || report.node.waiting > 0
}

fn refused(stuck: Option<StuckStage>) -> Status {
    let stage = stuck.map(|stuck| stuck.to_string()).unwrap_or_default();
    Status::unavailable(format!("the node makes no progress, {stage}"))
}

/// Refuses a router that expects another epoch: an earlier life of this node, or another node that had this
/// address before.
fn check_life(epoch: u64, own: Epoch) -> Result<(), Status> {
    match Epoch(epoch) {
        Epoch(0) => Ok(()),
        meant if meant == own => Ok(()),
        meant => Err(Status::not_found(format!("this node has epoch {own}, not {meant}"))),
    }
}

/// Returns the number of blocks in each state and, if requested, every block.
fn ledger(pool: &BlockPool, request: v1::LedgerRequest) -> v1::LedgerAnswer {
    let blocks =
        if request.blocks { pool.ledger().into_iter().map(ledger_block).collect() } else { Vec::new() };
    v1::LedgerAnswer { counts: Some(pool.counts().into()), blocks }
}

fn ledger_block(entry: LedgerEntry) -> v1::LedgerBlock {
    v1::LedgerBlock {
        index: entry.block.0,
        state: entry.state.as_str().to_owned(),
        holder: entry.holder.unwrap_or_default(),
        readers: entry.readers,
        hash: entry.hash.map(|hash| format!("{hash:?}")).unwrap_or_default(),
        age_ms: entry.age.as_millis() as u64,
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::{Instant, sleep};
    use types::{KvDtype, KvLayout};

    use super::*;

    fn report(running: u32) -> WorkerLoad {
        let (node, now) = (NodeLoad { running, ..NodeLoad::default() }, Instant::now());
        WorkerLoad { node, growth_reserve_blocks: 0, last_progress: now, last_turn: now }
    }

    /// Returns the time of the next load message since `began`, and its running sequences.
    async fn next(reader: &mut Reader, began: Instant) -> (Duration, u32) {
        loop {
            if let Event::Load(load) = reader.next().await.expect("not stuck") {
                return (began.elapsed(), load.running);
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_end_of_all_work_is_reported_earlier_than_other_changes() {
        let (load, stuck) = (watch::Sender::new(report(0)), watch::Sender::new(None));
        let mut reader = Reader::new(&StatusParts {
            epoch: Epoch(1),
            pool: BlockPool::new(&KvLayout::uniform(16, KvDtype::F32, 1, 1, 4), 2),
            arriving: Counter::default(),
            worker: Some(WorkerStatus { load: load.subscribe(), stuck: stuck.subscribe() }),
            standings: Standings::default(),
            draining: Shutdown::new(),
            switch: None,
            world: World::seeded(1),
        });
        let began = Instant::now();
        let changes = async {
            for (after_ms, running) in [(5, 2), (17, 1), (7, 0), (1, 1), (30, 0)] {
                sleep(Duration::from_millis(after_ms)).await;
                load.send_replace(report(running));
            }
        };
        let reading = async {
            let mut seen = Vec::new();
            for _ in 0..5 {
                let (after, running) = next(&mut reader, began).await;
                seen.push((after.as_millis(), running));
            }
            seen
        };
        let ((), seen) = tokio::join!(changes, reading);
        // Changes at 5, 22, 29, 30 and 60 ms.
        assert_eq!(seen, [(0, 0), (20, 2), (29, 0), (49, 1), (60, 0)]);
    }
}
