//! `baton.v1.Prefill`: a prompt comes in, an answer goes back as soon as the first token is sampled, and another one if its
//! KV was lost on the way.
//! The only file of this crate that knows gRPC.

use std::pin::Pin;
use std::sync::Arc;

use chassis::{Task, spawn_guarded};
use futures::{Stream, StreamExt as _};
use kv_transfer::KvConnector;
use node::NodeParts;
use proto::v1;
use proto::v1::prefill_answer::Answer;
use proto::v1::prefill_server::{Prefill, PrefillServer};
use scheduler::{NewSequence, Source};
use tonic::{Request, Response, Status};
use tracing::{Instrument as _, info, info_span, trace};
use types::{Destination, Landing, Prefilled, Prompt, Refusal, RefusalKind};

use crate::outbox::{DeliveryError, First, deliver, hold, outbox};
use crate::shelf::{Place, Shelf};

/// The service of one prefill node.
#[derive(Clone, Debug)]
pub struct PrefillService {
    node: NodeParts,
    shelf: Shelf,
}

type Delivery = Task<Result<(), DeliveryError>>;

impl PrefillService {
    pub fn new(node: NodeParts) -> Self {
        Self { node, shelf: Shelf::default() }
    }

    pub fn server(self) -> PrefillServer<Self> {
        PrefillServer::new(self).max_decoding_message_size(proto::MESSAGE_BYTES_MAX)
    }

    /// Computes a prompt. Dropping the future before it is ready cancels the sequence and its delivery.
    async fn run_prompt(&self, prompt: Prompt, to: Destination) -> Result<Answered, Refusal> {
        prompt.model.check(&self.node.model)?;
        let (outbox, answer, parcels) = outbox();
        let deadline = prompt.deadline;
        let (work, place) = match to {
            Destination::Landing(landing) => {
                check_length(&prompt, &landing)?;
                let connector = self.connector(&landing)?;
                (
                    futures::future::Either::Left(deliver(
                        connector,
                        landing,
                        parcels,
                        self.node.worker.clone(),
                    )),
                    None,
                )
            }
            Destination::Held(transfer) => {
                let (place, named) = self.shelf.put(transfer)?;
                (futures::future::Either::Right(hold(parcels, named)), Some(place))
            }
            Destination::Store => {
                return Err(Refusal::new(RefusalKind::Mismatch, "this node has no pool connector"));
            }
        };
        let in_time = tokio::time::timeout_at(deadline.instant().into(), work);
        let deliver = async move {
            let done = in_time.await.unwrap_or(Err(DeliveryError::Late));
            if let Err(error) = &done {
                info!(error = %Refusal::from(error), "kv was not delivered");
            }
            done
        };
        let mut delivery: Delivery =
            spawn_guarded(&self.node.gate, "delivery", deliver.instrument(info_span!("deliver")));
        let source = Source::Fresh { lease: None, cached_tokens: 0 };
        let sequence =
            NewSequence { prompt: prompt.clone(), source, sink: Box::new(outbox), steps_wanted: 1 };
        let _ticket = self.node.worker.submit(sequence)?;
        let first: First = tokio::select! {
            biased;
            first = answer => first.unwrap_or_else(|_| Err(Refusal::new(RefusalKind::Failed, "the worker is gone"))),
            failed = &mut delivery => Err(refusal_of(failed)),
        };
        let (first, timing) = first?;
        let usage = types::Usage {
            prompt_tokens: prompt.tokens.len() as u32,
            cached_tokens: timing.usage.cached_tokens,
        };
        let prefilled = Prefilled { first, usage, queued: timing.queued, computed: timing.computed };
        Ok(Answered { prefilled, delivery, place })
    }

    fn connector(&self, to: &Landing) -> Result<Arc<dyn KvConnector>, Refusal> {
        let scheme = &to.wire.scheme;
        self.node.connectors.by_scheme(scheme).ok_or_else(|| {
            Refusal::new(RefusalKind::Mismatch, format!("this node has no connector called {scheme}"))
        })
    }

    fn deliver_held(&self, request: v1::DeliverRequest) -> Result<(), Refusal> {
        let invalid = |error: proto::ConvertError| Refusal::new(RefusalKind::Invalid, error.to_string());
        let transfer = proto::transfer_from_wire(&request.transfer, "deliver.transfer").map_err(invalid)?;
        let missing = || Refusal::new(RefusalKind::Invalid, "deliver.landing is missing");
        let landing: Landing = request.landing.ok_or_else(missing)?.try_into().map_err(invalid)?;
        self.shelf.name(transfer, self.connector(&landing)?, landing)
    }

    fn parse(&self, request: v1::PrefillRequest) -> Result<(Prompt, Destination), Status> {
        let prompt = request.prompt.ok_or_else(|| Status::invalid_argument("prompt is missing"))?;
        let to = request.destination.ok_or_else(|| Status::invalid_argument("destination is missing"))?;
        Ok((proto::prompt_from_wire(prompt, self.node.world.now().into_std())?, to.try_into()?))
    }
}

/// A landing for another number of tokens is one for another sequence.
fn check_length(prompt: &Prompt, landing: &Landing) -> Result<(), Refusal> {
    if landing.n_tokens as usize == prompt.tokens.len() {
        return Ok(());
    }
    let reason = format!("a landing of {} tokens for a prompt of {}", landing.n_tokens, prompt.tokens.len());
    Err(Refusal::new(RefusalKind::Landing, reason))
}

fn refusal_of(delivery: Result<Result<(), DeliveryError>, chassis::TaskError>) -> Refusal {
    match delivery {
        Ok(Err(error)) => Refusal::from(&error),
        Ok(Ok(())) => Refusal::new(RefusalKind::Failed, "delivered without a first token"),
        Err(chassis::TaskError::Refused { .. }) => {
            Refusal::new(RefusalKind::Draining, "the node is stopping")
        }
        Err(error) => Refusal::new(RefusalKind::Failed, error.to_string()),
    }
}

/// A computed prompt whose KV is on its way, or held.
#[derive(Debug)]
struct Answered {
    prefilled: Prefilled,
    delivery: Delivery,
    place: Option<Place>,
}

impl Answered {
    /// The answer, and what became of the KV.
    fn into_stream(self) -> Answers {
        let answer = v1::PrefillAnswer { answer: Some(Answer::Prefilled((&self.prefilled).into())) };
        let one = futures::stream::iter([Ok(answer)]);
        one.chain(Underway { place: self.place, delivery: Some(self.delivery) }.outcome()).boxed()
    }
}

/// KV on its way to a landing, or on the shelf. When nobody listens any more it goes on by itself, until it has arrived,
/// the decode node gives it up, or its deadline passes; KV that nobody has come for is released.
#[derive(Debug)]
struct Underway {
    place: Option<Place>,
    delivery: Option<Delivery>,
}

impl Underway {
    /// Ends when the KV is in place. Where it will not be, says why first: the decode node may not know, if the wire broke
    /// before it heard of the transfer.
    fn outcome(mut self) -> impl Stream<Item = Result<v1::PrefillAnswer, Status>> + Send {
        let wait = async move {
            let delivered = self.delivery.as_mut()?.await;
            let refusal = (!matches!(delivered, Ok(Ok(())))).then(|| refusal_of(delivered))?;
            Some(Ok(v1::PrefillAnswer { answer: Some(Answer::Refused((&refusal).into())) }))
        };
        futures::stream::once(wait).filter_map(futures::future::ready)
    }
}

impl Drop for Underway {
    fn drop(&mut self) {
        let is_wanted = self.place.as_ref().is_none_or(Place::is_named);
        if let Some(delivery) = self.delivery.take().filter(|_| is_wanted) {
            delivery.detach();
        }
    }
}

type Answers = Pin<Box<dyn Stream<Item = Result<v1::PrefillAnswer, Status>> + Send>>;

#[tonic::async_trait]
impl Prefill for PrefillService {
    type RunStream = Answers;

    async fn run(&self, request: Request<v1::PrefillRequest>) -> Result<Response<Answers>, Status> {
        let (prompt, to) = self.parse(request.into_inner())?;
        let span = info_span!("prefill", request_id = %prompt.id, n_tokens = prompt.tokens.len());
        trace!(target: "walk", request = %prompt.id, "prompt came");
        let service = self.clone();
        let answers = async move {
            match service.run_prompt(prompt, to).await {
                Ok(answered) => answered.into_stream(),
                Err(refusal) => refused(&refusal),
            }
        };
        Ok(Response::new(futures::stream::once(answers.instrument(span)).flatten().boxed()))
    }

    async fn deliver(
        &self,
        request: Request<v1::DeliverRequest>,
    ) -> Result<Response<v1::DeliverAnswer>, Status> {
        let refused = self.deliver_held(request.into_inner()).err();
        Ok(Response::new(v1::DeliverAnswer { refused: refused.as_ref().map(Into::into) }))
    }
}

fn refused(refusal: &Refusal) -> Answers {
    info!(refusal = %refusal, "prompt refused");
    let answer = v1::PrefillAnswer { answer: Some(Answer::Refused(refusal.into())) };
    futures::stream::iter([Ok(answer)]).boxed()
}
