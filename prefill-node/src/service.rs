//! `baton.v1.Prefill`: takes a prompt, answers as soon as the first token is sampled, and sends a refusal
//! later if the KV is lost on its way. Only this file of the crate uses gRPC.

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
use tokio::sync::oneshot;
use tonic::{Request, Response, Status};
use tracing::{Instrument as _, info, info_span, trace};
use types::{ComputedPrompt, Destination, Landing, Prompt, Refusal, RefusalKind};

use crate::held_transfers::{HeldTransfer, HeldTransfers};
use crate::outbox::{DeliveryError, FirstToken, FirstTokenResult, deliver, hold, outbox};

/// The gRPC service of one prefill node.
#[derive(Clone, Debug)]
pub struct PrefillService {
    node: NodeParts,
    held: HeldTransfers,
}

type Delivery = Task<Result<(), DeliveryError>>;

impl PrefillService {
    pub fn new(node: NodeParts) -> Self {
        Self { held: HeldTransfers::new(node.held.clone()), node }
    }

    pub fn server(self) -> PrefillServer<Self> {
        PrefillServer::new(self).max_decoding_message_size(proto::MESSAGE_BYTES_MAX)
    }

    /// Computes a prompt. Dropping the future before it is ready cancels the sequence and its delivery.
    async fn run_prompt(&self, prompt: Prompt, to: Destination) -> Result<AnsweredPrompt, Refusal> {
        prompt.model.check(&self.node.model)?;
        let constraint = self.node.grammars.constraint(&prompt).await?;
        let worker = self.node.worker.clone();
        let on_taken = move || worker.nudge();
        let (outbox, answer, queue) = outbox(to.transfer(), prompt.tokens.len() as u32, on_taken);
        let deadline = prompt.deadline;
        let (work, place) = match to {
            Destination::Landing(landing) => {
                check_length(&prompt, &landing)?;
                let landing = landing.opened_with(prompt.digest());
                let connector = self.connector(&landing)?;
                (futures::future::Either::Left(deliver(connector, landing, queue)), None)
            }
            Destination::Held(transfer) => {
                let (place, named) = self.held.put(transfer)?;
                (futures::future::Either::Right(hold(queue, named, prompt.digest())), Some(place))
            }
        };
        let in_time = tokio::time::timeout_at(deadline.instant().into(), work);
        let deliver = async move {
            let done = in_time.await.unwrap_or(Err(DeliveryError::Late));
            if let Err(error) = &done {
                info!(error = %Refusal::from(error), "KV delivery from the prefill node failed");
            }
            done
        };
        let delivery: Delivery =
            spawn_guarded(&self.node.gate, "delivery", deliver.instrument(info_span!("deliver")));
        let (source, sink) = (Source::Fresh, Box::new(outbox));
        let sequence = NewSequence { prompt: prompt.clone(), source, sink, steps_wanted: 1, constraint };
        let _ticket = self.node.worker.submit(sequence)?;
        let (first, delivery) = first_token(answer, delivery).await;
        let FirstToken { step: first, timing, prompt_logprobs } = first?;
        let usage = types::Usage {
            prompt_tokens: prompt.tokens.len() as u32,
            cached_tokens: timing.usage.cached_tokens,
        };
        let scheduler::StepTiming { room, queued, computed, .. } = timing;
        let prefilled = ComputedPrompt { first, prompt_logprobs, usage, room, queued, computed };
        Ok(AnsweredPrompt { prefilled, delivery, place })
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
        self.held.name(transfer, self.connector(&landing)?, landing)
    }

    fn parse(&self, request: v1::PrefillRequest) -> Result<(Prompt, Destination), Status> {
        let prompt = request.prompt.ok_or_else(|| Status::invalid_argument("prompt is missing"))?;
        let to = request.destination.ok_or_else(|| Status::invalid_argument("destination is missing"))?;
        Ok((proto::prompt_from_wire(prompt, self.node.world.now().into_std())?, to.try_into()?))
    }
}

/// Waits for the first token, or for a delivery that fails before it. Returns the delivery if it is still
/// running.
async fn first_token(
    mut answer: oneshot::Receiver<FirstTokenResult>,
    mut delivery: Delivery,
) -> (FirstTokenResult, Option<Delivery>) {
    let no_worker = |_| Err(Refusal::new(RefusalKind::Failed, "the worker is gone"));
    let delivered = tokio::select! {
        biased;
        first = &mut answer => return (first.unwrap_or_else(no_worker), Some(delivery)),
        delivered = &mut delivery => delivered,
    };
    match failure_of(delivered) {
        Some(refusal) => (Err(refusal), None),
        // A delivery that has ended without an error has had the token, so the worker's answer follows within
        // a moment.
        None => (answer.await.unwrap_or_else(no_worker), None),
    }
}

/// Refuses a landing whose token count differs from the prompt's: it belongs to another sequence.
fn check_length(prompt: &Prompt, landing: &Landing) -> Result<(), Refusal> {
    if landing.n_tokens as usize == prompt.tokens.len() {
        return Ok(());
    }
    let reason = format!("a landing of {} tokens for a prompt of {}", landing.n_tokens, prompt.tokens.len());
    Err(Refusal::new(RefusalKind::Landing, reason))
}

/// Returns the reason why a delivery failed; `None` if it is complete.
fn failure_of(delivered: Result<Result<(), DeliveryError>, chassis::TaskError>) -> Option<Refusal> {
    Some(match delivered {
        Ok(Ok(())) => return None,
        Ok(Err(error)) => Refusal::from(&error),
        Err(chassis::TaskError::Refused { .. }) => {
            Refusal::new(RefusalKind::Draining, "the node is stopping")
        }
        Err(error) => Refusal::new(RefusalKind::Failed, error.to_string()),
    })
}

/// A computed prompt whose KV is being sent or held.
#[derive(Debug)]
struct AnsweredPrompt {
    prefilled: ComputedPrompt,
    delivery: Option<Delivery>,
    place: Option<HeldTransfer>,
}

impl AnsweredPrompt {
    /// Returns the stream of answers: the first token, then a refusal if the KV is lost.
    fn into_stream(self) -> Answers {
        let answer = v1::PrefillAnswer { answer: Some(Answer::Prefilled((&self.prefilled).into())) };
        let one = futures::stream::iter([Ok(answer)]);
        one.chain(OngoingDelivery { place: self.place, delivery: self.delivery }.outcome()).boxed()
    }
}

/// KV that is being sent or held. After the call has ended, a transfer continues until the KV has arrived,
/// the decode node gives up, or the deadline passes. Held KV without a landing is released when the call
/// ends.
#[derive(Debug)]
struct OngoingDelivery {
    place: Option<HeldTransfer>,
    delivery: Option<Delivery>,
}

impl OngoingDelivery {
    /// Returns a stream that ends when the KV is in place. If it cannot be delivered, the stream sends a
    /// refusal first: the transfer may not have begun on the decode node if the connection broke early.
    fn outcome(mut self) -> impl Stream<Item = Result<v1::PrefillAnswer, Status>> + Send {
        let wait = async move {
            let refusal = failure_of(self.delivery.as_mut()?.await)?;
            Some(Ok(v1::PrefillAnswer { answer: Some(Answer::Refused((&refusal).into())) }))
        };
        futures::stream::once(wait).filter_map(futures::future::ready)
    }
}

impl Drop for OngoingDelivery {
    fn drop(&mut self) {
        let is_wanted = self.place.as_ref().is_none_or(HeldTransfer::is_named);
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
        trace!(target: "walk", request = %prompt.id, "prompt received from the router");
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
    info!(refusal = %refusal, "prompt was not served, sending a refusal to the router");
    let answer = v1::PrefillAnswer { answer: Some(Answer::Refused(refusal.into())) };
    futures::stream::iter([Ok(answer)]).boxed()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use chassis::Gate;
    use scheduler::{StepTiming, StepWork};
    use types::{Step, TokenId};

    fn token() -> Step {
        Step { token: TokenId(7), index: 0, logprobs: None, finish: None }
    }

    /// The delivery completes before the worker's answer is seen, and the prompt still counts as computed.
    #[tokio::test]
    async fn a_delivery_that_is_quicker_than_the_answer_is_no_failure() {
        let usage = types::Usage { prompt_tokens: 1, cached_tokens: 0 };
        let (room, queued, computed) = (Duration::ZERO, Duration::ZERO, Duration::ZERO);
        let timing = StepTiming { usage, room, queued, computed, work: StepWork::default() };
        let (sender, answer) = oneshot::channel();
        let delivery = spawn_guarded(&Gate::new("node"), "delivery", async { Ok(()) });
        let answered = async {
            while !delivery.is_finished() {
                tokio::task::yield_now().await;
            }
            tokio::join!(first_token(answer, delivery), async {
                tokio::task::yield_now().await;
                let prompt_logprobs = Vec::new();
                let _ = sender.send(Ok(FirstToken { step: token(), timing, prompt_logprobs }));
            })
        };
        let ((first, delivery), ()) = answered.await;
        assert_eq!(first.expect("a first token").step, token());
        assert!(delivery.is_none());
    }

    #[tokio::test]
    async fn a_delivery_that_fails_ends_the_wait() {
        let (_sender, answer) = oneshot::channel();
        let late = async { Err(DeliveryError::Late) };
        let (first, _) = first_token(answer, spawn_guarded(&Gate::new("node"), "delivery", late)).await;
        assert_eq!(first.expect_err("no token").kind, RefusalKind::Deadline);
    }
}
