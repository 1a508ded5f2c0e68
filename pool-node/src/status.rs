//! `baton.v1.NodeStatus` of a node that computes nothing: where its blocks are, and that it is alive.

use std::pin::Pin;
use std::time::Duration;

use chassis::Shutdown;
use futures::Stream;
use futures::stream::unfold;
use node::Standings;
use proto::v1;
use proto::v1::node_status_server::{NodeStatus, NodeStatusServer};
use proto::v1::status_event::Event;
use tonic::{Request, Response, Status};
use types::NodeLoad;

use crate::parts::PoolParts;

/// So often it is told where the blocks are: whoever reads it knows that the node is alive.
const LOAD_EVERY: Duration = Duration::from_millis(250);

/// The service.
#[derive(Clone, Debug)]
pub(crate) struct StatusService {
    node: PoolParts,
    draining: Shutdown,
    standings: Standings,
}

impl StatusService {
    /// `draining` is said once the node takes nothing new.
    pub(crate) fn new(node: PoolParts, draining: Shutdown, standings: Standings) -> Self {
        Self { node, draining, standings }
    }

    pub(crate) fn server(self) -> NodeStatusServer<Self> {
        NodeStatusServer::new(self)
    }

    fn load(&self) -> Event {
        let blocks = self.node.shelf.counts();
        Event::Load(NodeLoad { arriving: self.node.sequences.count(), blocks, ..NodeLoad::default() }.into())
    }

    /// The next thing worth telling: the load at once, and again and again.
    async fn next(&self, told: &mut Told) -> Event {
        if std::mem::replace(&mut told.load, true) {
            tokio::select! {
                biased;
                () = self.draining.wait(), if !told.draining => {
                    told.draining = true;
                    return Event::Draining(v1::Draining {});
                }
                () = tokio::time::sleep(LOAD_EVERY) => {}
            }
        }
        self.load()
    }
}

/// What one reader has been told.
#[derive(Default)]
struct Told {
    load: bool,
    draining: bool,
}

#[tonic::async_trait]
impl NodeStatus for StatusService {
    type WatchStream = Pin<Box<dyn Stream<Item = Result<v1::StatusEvent, Status>> + Send>>;

    async fn watch(&self, _: Request<v1::StatusRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let events = unfold((self.clone(), Told::default()), |(status, mut told)| async move {
            let event = status.next(&mut told).await;
            Some((Ok(v1::StatusEvent { event: Some(event) }), (status, told)))
        });
        Ok(Response::new(Box::pin(events)))
    }

    async fn set_standing(
        &self,
        request: Request<v1::StandingRequest>,
    ) -> Result<Response<v1::StandingAnswer>, Status> {
        self.standings.hear(request.into_inner(), tokio::time::Instant::now());
        Ok(Response::new(v1::StandingAnswer {}))
    }

    async fn ledger(
        &self,
        request: Request<v1::LedgerRequest>,
    ) -> Result<Response<v1::LedgerAnswer>, Status> {
        Ok(Response::new(node::status::ledger(self.node.shelf.pool(), request.into_inner())))
    }
}
