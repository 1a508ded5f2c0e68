//! `baton.v1.Pool`: one stream lasts as long as one sequence on this node, and its end releases everything.
//! Only this file of the crate uses gRPC. See `docs/decisions/0022-a-pool-node-lands-and-delivers.md`.

use std::pin::Pin;

use chassis::{Task, spawn_guarded};
use futures::{Stream, StreamExt as _};
use node::{CounterGuard, PeerWires};
use proto::v1;
use proto::v1::pool_server::{Pool, PoolServer};
use proto::v1::put_event::Event;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};
use tracing::{Instrument as _, info, info_span};
use types::{Landing, Prompt, Refusal, RefusalKind, TransferId};

use crate::metrics::CountedOutcome;
use crate::parts::PoolParts;
use crate::store::{Incoming, PutRequest};
use crate::stored::StoredSequences;

/// The capacity of a stream's queue: a stream carries at most two events.
const EVENTS_MAX: usize = 2;

/// The gRPC service of one pool node.
#[derive(Clone, Debug)]
pub struct PoolService {
    node: PoolParts,
    stored: StoredSequences,
}

impl PoolService {
    pub fn new(node: PoolParts) -> Self {
        Self { node, stored: StoredSequences::default() }
    }

    pub fn server(self) -> PoolServer<Self> {
        PoolServer::new(self).max_decoding_message_size(proto::MESSAGE_BYTES_MAX)
    }

    fn parse(&self, request: v1::PutRequest) -> Result<(Prompt, PeerWires), Status> {
        let peer = request.prefill.ok_or_else(|| Status::invalid_argument("prefill is missing"))?;
        let prompt = request.prompt.ok_or_else(|| Status::invalid_argument("prompt is missing"))?;
        let prompt = proto::prompt_from_wire(prompt, self.node.world.now().into_std())?;
        Ok((prompt, PeerWires::from(peer)))
    }

    /// Reserves room for a sequence, over the best connector that this node and the sender have in common.
    ///
    /// Cached blocks are found by hashes that this node computes. So a caller gets the blocks of a prompt
    /// only if it knows the prompt: its tenant, its cache salt and its tokens.
    fn open(&self, prompt: &Prompt, peer: &PeerWires) -> Result<(Landing, Incoming, CounterGuard), Refusal> {
        prompt.model.check(&self.node.model)?;
        let counted = self.node.sequences.enter(self.node.sequences_max).ok_or_else(|| {
            Refusal::new(
                RefusalKind::Full,
                format!("the node has {} sequences, its limit", self.node.sequences_max),
            )
        })?;
        let no_wire =
            || Refusal::new(RefusalKind::Mismatch, format!("no connector in common with {}", peer.node));
        let connector = self.node.connectors.shared_with(peer).ok_or_else(no_wire)?.scheme();
        let key = self.node.world.identity().block_hash_key();
        let block_tokens = usize::from(self.node.model.layout.block_tokens);
        let put = PutRequest {
            transfer: self.node.world.transfer_id(),
            request: prompt.id.clone(),
            hashes: prompt.hasher(&key, block_tokens).hashes(&prompt.tokens),
            n_tokens: prompt.tokens.len() as u32,
            connector,
            deadline: prompt.deadline,
        };
        let (landing, incoming) = self.node.store.put(put).map_err(|error| Refusal::from(&error))?;
        self.node.metrics.tokens.inc_by(landing.n_tokens.into());
        self.node.metrics.held_tokens.inc_by(landing.held_tokens.into());
        Ok((landing, incoming, counted))
    }

    async fn deliver_stored(&self, transfer: TransferId, landing: Landing) -> Result<(), Refusal> {
        let unknown = || Refusal::new(RefusalKind::Failed, format!("no sequence is stored for {transfer}"));
        let (sequence, prompt) = self.stored.get(transfer).ok_or_else(unknown)?;
        sequence.deliver(landing.opened_with(prompt)).await.map_err(|error| Refusal::from(&error))
    }
}

/// One sequence on this node. Dropping it releases everything that the sequence has here.
#[derive(Debug)]
struct Life {
    service: PoolService,
    /// This landing is bound to the prompt's digest. The digest decrypts the grants of decode nodes'
    /// landings.
    prompt: Prompt,
    peer: PeerWires,
    events: mpsc::Sender<Event>,
}

impl Life {
    /// Receives and keeps the sequence until its stream ends or its deadline passes.
    async fn live(self) {
        let deadline = self.prompt.deadline.instant().into();
        let _ = tokio::time::timeout_at(deadline, self.until_late()).await;
    }

    async fn until_late(&self) {
        let mut outcome = CountedOutcome::new(&self.service.node.metrics.puts);
        if let Err(refusal) = self.run(&mut outcome).await {
            info!(refusal = %refusal, "sequence was not stored on the pool node");
            outcome.is(refusal.kind.code());
            self.say(Event::Refused((&refusal).into())).await;
        }
    }

    /// Receives the sequence and keeps it until its stream ends.
    async fn run(&self, outcome: &mut CountedOutcome<'_>) -> Result<(), Refusal> {
        let (landing, incoming, _counted) = self.service.open(&self.prompt, &self.peer)?;
        let (transfer, digest) = (landing.transfer, self.prompt.digest());
        self.say(Event::Landing((&landing.bound_to(digest)).into())).await;
        let sequence = incoming.stored().await.map_err(|error| Refusal::from(&error))?;
        let stored = v1::Stored { bytes: sequence.bytes() };
        let _entry = self.service.stored.put(transfer, sequence, digest);
        outcome.is("stored");
        self.say(Event::Stored(stored)).await;
        self.events.closed().await;
        Ok(())
    }

    /// Sends an event to the router. If the router has dropped the stream, the event is lost, and this call
    /// is being dropped too.
    async fn say(&self, event: Event) {
        let _ = self.events.send(event).await;
    }
}

/// The event stream of a sequence, and the task that feeds it. Dropping the stream ends the task.
#[derive(Debug)]
struct Events {
    events: ReceiverStream<Event>,
    _life: Task<()>,
}

impl Stream for Events {
    type Item = Result<v1::PutEvent, Status>;

    fn poll_next(
        mut self: Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Self::Item>> {
        let event = self.events.poll_next_unpin(cx);
        event.map(|event| event.map(|event| Ok(v1::PutEvent { event: Some(event) })))
    }
}

#[tonic::async_trait]
impl Pool for PoolService {
    type PutStream = Pin<Box<dyn Stream<Item = Result<v1::PutEvent, Status>> + Send>>;

    async fn put(&self, request: Request<v1::PutRequest>) -> Result<Response<Self::PutStream>, Status> {
        let (prompt, peer) = self.parse(request.into_inner())?;
        let span = info_span!("keep", request_id = %prompt.id, n_tokens = prompt.tokens.len());
        let (events, received) = mpsc::channel(EVENTS_MAX);
        let life = Life { service: self.clone(), prompt, peer, events };
        let life = spawn_guarded(&self.node.gate, "keep", life.live().instrument(span));
        if life.is_finished() && self.node.gate.is_closed() {
            return Err(Status::unavailable("the node is stopping"));
        }
        Ok(Response::new(Box::pin(Events { events: ReceiverStream::new(received), _life: life })))
    }

    /// Sends a stored sequence to a landing. The call needs no deadline: the landing's owner gives up at the
    /// request's deadline, which ends the delivery.
    async fn deliver(
        &self,
        request: Request<v1::DeliverRequest>,
    ) -> Result<Response<v1::DeliverAnswer>, Status> {
        let request = request.into_inner();
        let transfer = proto::transfer_from_wire(&request.transfer, "deliver.transfer")?;
        let landing =
            request.landing.ok_or_else(|| Status::invalid_argument("deliver.landing is missing"))?;
        let landing = Landing::try_from(landing)?;
        let mut outcome = CountedOutcome::new(&self.node.metrics.deliveries);
        let refused = self.deliver_stored(transfer, landing).await.err();
        if let Some(refusal) = &refused {
            info!(%transfer, %refusal, "stored sequence was not delivered to the decode node");
        }
        outcome.is(refused.as_ref().map_or("delivered", |refusal| refusal.kind.code()));
        Ok(Response::new(v1::DeliverAnswer { refused: refused.as_ref().map(Into::into) }))
    }
}
