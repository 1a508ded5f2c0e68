//! `baton.v1.Decode`: one stream lasts as long as one prompt on this node, and its end releases everything.
//! Only this file of the crate uses gRPC. See `docs/decisions/0034-a-stream-for-each-sequence.md`.

use std::pin::Pin;

use chassis::{Task, spawn_guarded};
use futures::{Stream, StreamExt as _};
use grammar::Constraint;
use kv_transfer::{Arrival, ArrivalStatus, ArrivedKv, TransferError};
use node::{CounterGuard, DecodeExpertSettings, NodeParts, PeerWires};
use proto::v1;
use proto::v1::decode_event::Event;
use proto::v1::decode_server::{Decode, DecodeServer};
use scheduler::{NewSequence, Source, StepTiming};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};
use tracing::{Instrument as _, info, info_span, trace};
use types::{Prompt, Refusal, RefusalKind};

use crate::reservations::{PrefillOffer, Reservation, Reservations};
use crate::steps::{STEPS_MAX, SentStep, steps};

/// The gRPC service of one decode node.
#[derive(Clone, Debug)]
pub struct DecodeService {
    node: NodeParts,
    reservations: Reservations,
}

impl DecodeService {
    pub fn new(node: NodeParts, settings: DecodeExpertSettings) -> Self {
        Self { reservations: Reservations::new(node.clone(), settings), node }
    }

    pub fn server(self) -> DecodeServer<Self> {
        DecodeServer::new(self).max_decoding_message_size(proto::MESSAGE_BYTES_MAX)
    }

    fn parse(&self, request: v1::DecodeRequest) -> Result<(Prompt, PrefillOffer), Status> {
        use v1::decode_request::Prefill;
        let prompt = request.prompt.ok_or_else(|| Status::invalid_argument("prompt is missing"))?;
        let offer = match request.prefill.ok_or_else(|| Status::invalid_argument("prefill is missing"))? {
            Prefill::Offered(peer) => PrefillOffer::Offered(PeerWires::from(peer)),
            Prefill::HeldBy(peer) => PrefillOffer::HeldBy(PeerWires::from(peer)),
            Prefill::None(v1::NoPeer {}) => PrefillOffer::None,
        };
        Ok((proto::prompt_from_wire(prompt, self.node.world.now().into_std())?, offer))
    }
}

/// One prompt on this node. Dropping it releases everything that the prompt has here.
#[derive(Debug)]
struct Life {
    service: DecodeService,
    prompt: Prompt,
    timings: Timings,
    events: mpsc::Sender<v1::DecodeEvent>,
}

/// Which steps are sent with their timing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Timings {
    OfFirstStep,
    OfEachStep,
}

impl Life {
    /// Runs the prompt to its last step. If the prompt fails, the last event is a refusal.
    async fn live(self, offer: PrefillOffer) {
        if let Err(refusal) = self.run(&offer).await {
            info!(refusal = %refusal, "prompt was not served, sending a refusal to the router");
            self.say(Event::Refused((&refusal).into())).await;
        }
    }

    async fn run(&self, offer: &PrefillOffer) -> Result<(), Refusal> {
        self.prompt.model.check(&self.service.node.model)?;
        let constraint = self.service.node.grammars.constraint(&self.prompt).await?;
        match self.service.reservations.reserve(&self.prompt, offer).await? {
            Reservation::Local { held_tokens } => {
                self.say(Event::Local(v1::Local { held_tokens })).await;
                self.decode(Source::Fresh, constraint).await
            }
            Reservation::Landing { landing, arrival, arriving } => {
                trace!(target: "walk", request = %self.prompt.id, transfer = %landing.transfer, "KV room granted to the router");
                let landing = landing.bound_to(self.prompt.digest());
                self.say(Event::Landing((&landing).into())).await;
                self.receive(arrival, arriving, constraint).await
            }
        }
    }

    /// Waits for the KV and decodes from prefill's first token on.
    async fn receive(
        &self,
        arrival: Arrival,
        arriving: CounterGuard,
        constraint: Option<Constraint>,
    ) -> Result<(), Refusal> {
        let arrived = self.arrived(arrival).instrument(info_span!("arrive")).await;
        let arrived = arrived.map_err(|error| Refusal::from(&error))?;
        drop(arriving);
        trace!(target: "walk", request = %self.prompt.id, "all KV is in place");
        info!(bytes = arrived.bytes, connector = %arrived.scheme, waited_ms = arrived.waited.as_millis() as u64, "KV of the prompt has arrived");
        self.say(arrived_event(&arrived)).await;
        let ArrivedKv { lease, handoff, .. } = arrived;
        self.check_place(handoff.first.index)?;
        match handoff.first.finish {
            Some(_) => Ok(()),
            None => self.decode(Source::Arrived { lease, first: handoff.first }, constraint).await,
        }
    }

    /// Waits for the KV, and reports to the worker how much of it is in place if the worker plans for that.
    async fn arrived(&self, mut arrival: Arrival) -> Result<ArrivedKv, TransferError> {
        let Some(mut expected) = self.service.node.worker.expect_arrival() else {
            return arrival.settle().await;
        };
        loop {
            match arrival.poll() {
                ArrivalStatus::Waiting { received, total } => {
                    expected.progressed(received, total, self.service.node.world.now());
                    arrival.progress(received).await;
                }
                ArrivalStatus::Arrived(arrived) => return Ok(arrived),
                ArrivalStatus::Failed(error) => return Err(error),
            }
        }
    }

    /// Refuses a first token with a wrong index: it belongs to another sequence, and the answer would be
    /// wrong without an error.
    fn check_place(&self, index: u32) -> Result<(), Refusal> {
        if index as usize == self.prompt.n_generated {
            return Ok(());
        }
        let reason = format!("step {index} arrived for a prompt with {} steps", self.prompt.n_generated);
        Err(Refusal::new(RefusalKind::Failed, reason))
    }

    /// Runs the sequence to its end and sends its steps to the router.
    async fn decode(&self, source: Source, constraint: Option<Constraint>) -> Result<(), Refusal> {
        let (sink, mut steps, ended) = steps();
        let (prompt, sink) = (self.prompt.clone(), Box::new(sink));
        let sequence = NewSequence { prompt, source, sink, steps_wanted: u32::MAX, constraint };
        let _ticket = self.service.node.worker.submit(sequence)?;
        let mut is_timed = true;
        while let Some(SentStep { step, timing, prompt_logprobs }) = steps.recv().await {
            let timing = is_timed.then(|| timing_to_wire(&timing));
            is_timed = self.timings == Timings::OfEachStep;
            let prompt_logprobs = proto::prompt_logprobs_to_wire(&prompt_logprobs);
            let event = Some(Event::Step((&step).into()));
            self.send(v1::DecodeEvent { event, timing, prompt_logprobs }).await;
            if steps.capacity() <= STEPS_MAX / 2 {
                self.service.node.worker.nudge();
            }
        }
        ended.await.unwrap_or_else(|_| Err(Refusal::new(RefusalKind::Failed, "the worker is gone")))
    }

    /// Sends an event to the router. If the router has dropped the stream, the event is lost, and this call
    /// is being dropped too.
    async fn say(&self, event: Event) {
        self.send(v1::DecodeEvent { event: Some(event), timing: None, prompt_logprobs: None }).await;
    }

    async fn send(&self, event: v1::DecodeEvent) {
        let _ = self.events.send(event).await;
    }
}

fn timing_to_wire(timing: &StepTiming) -> v1::StepTiming {
    let us = |took: std::time::Duration| took.as_micros() as u64;
    let StepTiming { room, queued, computed, work, .. } = *timing;
    v1::StepTiming {
        room_us: us(room),
        queued_us: us(queued),
        computed_us: us(computed),
        steps: work.steps,
        prefill_tokens: work.prefill_tokens,
        rows: work.rows,
        took_us: us(work.took),
        preemptions: work.preemptions,
    }
}

fn arrived_event(arrived: &ArrivedKv) -> Event {
    Event::Arrived(v1::Arrived {
        scheme: arrived.scheme.to_string(),
        bytes: arrived.bytes,
        waited_us: arrived.waited.as_micros() as u64,
        moved_us: arrived.moved.as_micros() as u64,
    })
}

/// The event stream of a prompt, and the task that feeds it. Dropping the stream ends the task.
#[derive(Debug)]
struct Events {
    events: ReceiverStream<v1::DecodeEvent>,
    _life: Task<()>,
}

impl Stream for Events {
    type Item = Result<v1::DecodeEvent, Status>;

    fn poll_next(
        mut self: Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Self::Item>> {
        self.events.poll_next_unpin(cx).map(|event| event.map(Ok))
    }
}

#[tonic::async_trait]
impl Decode for DecodeService {
    type RunStream = Pin<Box<dyn Stream<Item = Result<v1::DecodeEvent, Status>> + Send>>;

    async fn run(&self, request: Request<v1::DecodeRequest>) -> Result<Response<Self::RunStream>, Status> {
        let request = request.into_inner();
        let timings = if request.explain { Timings::OfEachStep } else { Timings::OfFirstStep };
        let (prompt, offer) = self.parse(request)?;
        let span = info_span!("decode", request_id = %prompt.id, n_tokens = prompt.tokens.len());
        trace!(target: "walk", request = %prompt.id, "prompt received from the router");
        let (events, received) = mpsc::channel(STEPS_MAX);
        let life = Life { service: self.clone(), prompt, timings, events };
        let life = spawn_guarded(&self.node.gate, "decode", life.live(offer).instrument(span));
        if life.is_finished() && self.node.gate.is_closed() {
            return Err(Status::unavailable("the node is stopping"));
        }
        Ok(Response::new(Box::pin(Events { events: ReceiverStream::new(received), _life: life })))
    }
}
