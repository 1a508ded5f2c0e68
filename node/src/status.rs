//! `baton.v1.NodeStatus`: how busy a node is and what it has cached, as a stream; and its ledger.

use std::pin::Pin;
use std::time::Duration;

use chassis::Shutdown;
use futures::Stream;
use futures::stream::unfold;
use kv_cache::{BlockEvents, BlockPool, LedgerEntry};
use proto::v1;
use proto::v1::node_status_server::{NodeStatus, NodeStatusServer};
use proto::v1::status_event::Event;
use scheduler::WorkerLoad;
use tokio::sync::watch;
use tonic::{Request, Response, Status};
use types::NodeLoad;

use crate::parts::NodeParts;
use crate::standing::Standings;
use crate::watchdog::Stuck;

/// At most so often a changed load is told.
const LOAD_PACE: Duration = Duration::from_millis(20);
/// At least so often the load is told, changed or not: whoever reads it knows that the node is alive.
const LOAD_HEARTBEAT: Duration = Duration::from_secs(1);

/// The service.
#[derive(Clone, Debug)]
pub struct StatusService {
    node: NodeParts,
    draining: Shutdown,
    stuck: watch::Receiver<Option<Stuck>>,
    standings: Standings,
}

impl StatusService {
    /// `draining` is said once the node takes no new work. While it is `stuck`, it tells nobody its load: a router takes
    /// it for unreachable, and asks again.
    pub fn new(
        node: NodeParts,
        draining: Shutdown,
        stuck: watch::Receiver<Option<Stuck>>,
        standings: Standings,
    ) -> Self {
        Self { node, draining, stuck, standings }
    }

    pub fn server(self) -> NodeStatusServer<Self> {
        NodeStatusServer::new(self)
    }
}

/// One reader of the status stream.
struct Reader {
    node: NodeParts,
    draining: Shutdown,
    said_draining: bool,
    load: watch::Receiver<WorkerLoad>,
    load_told: Option<tokio::time::Instant>,
    blocks: BlockEvents,
    stuck: watch::Receiver<Option<Stuck>>,
}

impl Reader {
    fn new(service: &StatusService) -> Self {
        Self {
            node: service.node.clone(),
            draining: service.draining.clone(),
            said_draining: false,
            load: service.node.worker.load(),
            load_told: None,
            blocks: service.node.pool.events(),
            stuck: service.stuck.clone(),
        }
    }

    /// The next thing worth telling; an error once the node is stuck.
    async fn next(&mut self) -> Result<Event, Status> {
        let mut stuck = self.stuck.clone();
        tokio::select! {
            biased;
            Ok(found) = stuck.wait_for(Option::is_some) => Err(refused(*found)),
            event = self.next_event() => Ok(event),
        }
    }

    /// The first is the load.
    async fn next_event(&mut self) -> Event {
        let Some(told) = self.load_told else { return self.tell_load() };
        let changed = async {
            tokio::time::sleep_until(told + LOAD_PACE).await;
            let _ = tokio::time::timeout_at(told + LOAD_HEARTBEAT, self.load.changed()).await;
        };
        tokio::select! {
            biased;
            () = self.draining.wait(), if !self.said_draining => {
                self.said_draining = true;
                Event::Draining(v1::Draining {})
            }
            // Before the blocks: it has a pace, and they have none.
            () = changed => self.tell_load(),
            event = self.blocks.next() => Event::Blocks(v1::BlockEvents::new(event.number, &event.event)),
        }
    }

    fn tell_load(&mut self) -> Event {
        self.load_told = Some(self.node.world.now());
        let load = self.load.borrow_and_update().node;
        Event::Load(with_parts(&self.node, load).into())
    }
}

/// The worker's load, with what only the node knows.
pub(crate) fn with_parts(node: &NodeParts, load: NodeLoad) -> NodeLoad {
    NodeLoad { arriving: node.arriving.count(), blocks: node.pool.counts(), ..load }
}

#[tonic::async_trait]
impl NodeStatus for StatusService {
    type WatchStream = Pin<Box<dyn Stream<Item = Result<v1::StatusEvent, Status>> + Send>>;

    async fn watch(&self, _: Request<v1::StatusRequest>) -> Result<Response<Self::WatchStream>, Status> {
        if let Some(stuck) = *self.stuck.borrow() {
            return Err(refused(Some(stuck)));
        }
        let events = unfold(Some(Reader::new(self)), |reader| async move {
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
        self.standings.hear(request.into_inner(), self.node.world.now());
        Ok(Response::new(v1::StandingAnswer {}))
    }

    async fn ledger(
        &self,
        request: Request<v1::LedgerRequest>,
    ) -> Result<Response<v1::LedgerAnswer>, Status> {
        Ok(Response::new(ledger(&self.node.pool, request.into_inner())))
    }
}

fn refused(stuck: Option<Stuck>) -> Status {
    let stage = stuck.map(|stuck| stuck.to_string()).unwrap_or_default();
    Status::unavailable(format!("nothing moves here, {stage}"))
}

/// Where a pool's blocks are.
pub fn ledger(pool: &BlockPool, request: v1::LedgerRequest) -> v1::LedgerAnswer {
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
