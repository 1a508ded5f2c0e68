//! The router's calls to one node. Only this module of the router uses the nodes' gRPC services.

mod end;
mod prefill;
mod put;
mod role;

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use chassis::identity::ExpectedPeer;
use chassis::rpc::{MESSAGE_BYTES_MAX, RpcChannel, RpcLimits, call, channel};
use chassis::{Gate, World};
use futures::StreamExt as _;
use proto::v1;
use proto::v1::decode_client::DecodeClient;
use proto::v1::decode_event::Event;
use proto::v1::node_status_client::NodeStatusClient;
use proto::v1::prefill_client::PrefillClient;
use tokio::time::Instant;
use types::step::PromptLogprob;
use types::{
    BlockCounts, BlockEvent, ComputedPrompt, Destination, Landing, NodeId, NodeInfo, NodeLoad, Prompt,
    Refusal, RefusalKind, Step, TransferId,
};

use crate::breaker::Trial;
use crate::error::ServeError;
use crate::policy::Route;
use crate::serve::Detail;
pub use prefill::PrefillCall;
pub use put::PutCall;

/// The timeout of a call that a node answers without computing a prompt.
const QUESTION_TIMEOUT: Duration = Duration::from_secs(2);
/// The time to wait for a decode node's report that KV has arrived, after the sender became unreachable: it
/// may have sent all KV.
const ARRIVAL_GRACE: Duration = Duration::from_secs(1);
/// The largest number of steps that are read before the prefill node's answer arrives. Reading ahead serves
/// to notice a failure.
const READ_AHEAD_MAX: usize = 64;

/// The protocol version in which prompts have grammars.
const GRAMMAR_PROTOCOL: u16 = 4;
/// The first protocol version whose nodes compute log-probabilities of prompts.
const PROMPT_LOGPROBS_PROTOCOL: u16 = 5;

/// A client of one node's services. Cheap to clone; all clones share one connection.
#[derive(Clone, Debug)]
pub struct NodeClient {
    world: World,
    /// The gate of the tasks that read calls to their end.
    gate: Gate,
    info: Arc<NodeInfo>,
    channel: RpcChannel,
}

/// One message from a node's status stream.
#[derive(Debug)]
pub enum StatusUpdate {
    Report(NodeReport),
    /// A numbered change of the node's prefix cache.
    Blocks(u64, BlockEvent),
}

/// A node's report about its work.
#[derive(Debug)]
pub enum NodeReport {
    Load(NodeLoad),
    Draining,
}

/// The level of detail of a node's ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LedgerDetail {
    Counts,
    /// Counts, and every block.
    Blocks,
}

/// The router's report to a node about the node.
#[derive(Clone, Debug)]
pub struct Standing {
    /// The router's name, new at every start.
    pub router: String,
    /// The reason why the router gives the node no work; `None`: the node gets work.
    pub refusal: Option<String>,
    /// The reason why a rollout must not replace other nodes yet; `None`: the node serves, or it could.
    pub rollout_waits_for: Option<String>,
    /// The time after which the node must ignore the report.
    pub believed_for: Duration,
}

impl NodeClient {
    /// Makes a client. The connection is opened at the first call.
    pub fn new(world: &World, gate: &Gate, info: &Arc<NodeInfo>) -> Self {
        let expected = ExpectedPeer::Node { id: info.id.clone(), role: info.role };
        let channel = channel(world, &info.address, expected, RpcLimits::default());
        Self { world: world.clone(), gate: gate.clone(), info: info.clone(), channel }
    }

    /// Opens the decode stream of a prompt. Dropping the returned call ends the prompt on the node. Each prompt has its
    /// own: `docs/decisions/0034-a-stream-for-each-sequence.md`.
    pub async fn decode(
        &self,
        prompt: &Prompt,
        prefill: PrefillOffer<'_>,
        detail: Detail,
    ) -> Result<DecodeCall, Failure> {
        self.check_version(prompt)?;
        let request = v1::DecodeRequest {
            prompt: Some(self.on_the_wire(prompt)),
            prefill: Some(prefill.to_wire()),
            explain: detail == Detail::Explained,
        };
        let mut client = DecodeClient::new(self.channel.clone()).max_decoding_message_size(MESSAGE_BYTES_MAX);
        let events =
            client.run(call(&prompt.id, request)).await.map_err(|status| self.failure(&status))?.into_inner();
        Ok(DecodeCall {
            gate: self.gate.clone(),
            info: self.info.clone(),
            events,
            ahead: VecDeque::new(),
            kv: None,
            trials: Vec::new(),
            is_proven: false,
        })
    }

    /// Asks the node to compute the prompt and to send its KV to `to`. Dropping the future cancels the prompt
    /// on the node; dropping the returned call releases held KV.
    pub async fn prefill(
        &self,
        prompt: &Prompt,
        to: &Destination,
    ) -> Result<(ComputedPrompt, PrefillCall), Failure> {
        self.check_version(prompt)?;
        let request =
            v1::PrefillRequest { prompt: Some(self.on_the_wire(prompt)), destination: Some(to.into()) };
        let mut client =
            PrefillClient::new(self.channel.clone()).max_decoding_message_size(MESSAGE_BYTES_MAX);
        let mut answers =
            client.run(call(&prompt.id, request)).await.map_err(|status| self.failure(&status))?.into_inner();
        let answer = answers.message().await.map_err(|status| self.failure(&status))?;
        match answer.and_then(|answer| answer.answer) {
            Some(v1::prefill_answer::Answer::Prefilled(prefilled)) => {
                let prefilled: ComputedPrompt =
                    prefilled.try_into().map_err(|error| self.invalid_answer(&error))?;
                check_prompt_logprobs(prompt, &prefilled.prompt_logprobs)
                    .map_err(|wrong| self.invalid_answer(&wrong))?;
                Ok((prefilled, PrefillCall::new(self.clone(), answers)))
            }
            Some(v1::prefill_answer::Answer::Refused(refusal)) => Err(self.refused(refusal)),
            None => Err(self.invalid_answer(&"an empty answer")),
        }
    }

    /// Names the landing for KV that the prefill node holds.
    pub async fn deliver(&self, held: TransferId, landing: &Landing) -> Result<(), Failure> {
        let request =
            v1::DeliverRequest { transfer: proto::transfer_to_wire(held), landing: Some(landing.into()) };
        let mut client = PrefillClient::new(self.channel.clone());
        let answer = client.deliver(request).await.map_err(|status| self.failure(&status))?.into_inner();
        answer.refused.map_or(Ok(()), |refusal| Err(self.refused(refusal)))
    }

    pub async fn status(&self) -> Result<StatusUpdates, Failure> {
        let mut client =
            NodeStatusClient::new(self.channel.clone()).max_decoding_message_size(MESSAGE_BYTES_MAX);
        let call = tokio::time::timeout(
            QUESTION_TIMEOUT,
            client.watch(v1::StatusRequest { epoch: self.info.epoch.0 }),
        );
        let updates =
            call.await.map_err(|_| self.silent())?.map_err(|status| self.failure(&status))?.into_inner();
        Ok(StatusUpdates { client: self.clone(), updates })
    }

    /// Reports to the node whether it gets work.
    pub async fn tell(&self, standing: Standing) -> Result<(), Failure> {
        let Standing { router, refusal, rollout_waits_for, believed_for } = standing;
        let request = v1::StandingRequest {
            router,
            refusal: refusal.unwrap_or_default(),
            ttl_ms: believed_for.as_millis() as u64,
            rollout_waits_for: rollout_waits_for.unwrap_or_default(),
        };
        let mut client = NodeStatusClient::new(self.channel.clone());
        let call = tokio::time::timeout(QUESTION_TIMEOUT, client.set_standing(request));
        call.await.map_err(|_| self.silent())?.map_err(|status| self.failure(&status))?;
        Ok(())
    }

    pub async fn ledger(&self, detail: LedgerDetail) -> Result<(BlockCounts, Vec<v1::LedgerBlock>), Failure> {
        let blocks = detail == LedgerDetail::Blocks;
        let mut client =
            NodeStatusClient::new(self.channel.clone()).max_decoding_message_size(MESSAGE_BYTES_MAX);
        let call = tokio::time::timeout(QUESTION_TIMEOUT, client.ledger(v1::LedgerRequest { blocks }));
        let answer =
            call.await.map_err(|_| self.silent())?.map_err(|status| self.failure(&status))?.into_inner();
        let counts = answer.counts.ok_or_else(|| self.invalid_answer(&"a ledger without counts"))?.into();
        Ok((counts, answer.blocks))
    }

    /// Refuses a prompt for a node of an older version, which would ignore a part of it.
    fn check_version(&self, prompt: &Prompt) -> Result<(), Failure> {
        let needs = [
            (prompt.sampling.grammar.is_some(), "constrained output needs", GRAMMAR_PROTOCOL),
            (
                prompt.sampling.prompt_logprobs.is_some(),
                "log-probabilities of prompts need",
                PROMPT_LOGPROBS_PROTOCOL,
            ),
        ];
        match needs.iter().find(|(is_asked, _, version)| *is_asked && self.info.protocol.max < *version) {
            None => Ok(()),
            Some((_, what, version)) => {
                let reason =
                    format!("{what} protocol version {version}, the node speaks {}", self.info.protocol);
                let refusal = Refusal::new(RefusalKind::Protocol, reason);
                Err(Failure { node: self.info.clone(), refusal })
            }
        }
    }

    fn on_the_wire(&self, prompt: &Prompt) -> v1::Prompt {
        proto::prompt_to_wire(prompt, self.world.now().into_std())
    }

    fn refused(&self, refusal: v1::Refusal) -> Failure {
        Failure { node: self.info.clone(), refusal: refusal.into() }
    }

    fn failure(&self, status: &tonic::Status) -> Failure {
        Failure { node: self.info.clone(), refusal: refusal_of(status) }
    }

    fn invalid_answer(&self, what: &dyn std::fmt::Display) -> Failure {
        Failure {
            node: self.info.clone(),
            refusal: Refusal::new(RefusalKind::Failed, format!("answered with {what}")),
        }
    }

    fn silent(&self) -> Failure {
        let reason = format!("no answer within {QUESTION_TIMEOUT:?}");
        Failure { node: self.info.clone(), refusal: Refusal::new(RefusalKind::Failed, reason) }
    }
}

/// Checks that a node has sent all log-probabilities that the prompt asks for.
fn check_prompt_logprobs(prompt: &Prompt, found: &[PromptLogprob]) -> Result<(), String> {
    let n_wanted = prompt.sampling.prompt_logprobs.map_or(0, |_| prompt.tokens.len() - 1);
    if found.len() == n_wanted {
        return Ok(());
    }
    Err(format!("log-probabilities of {} instead of {n_wanted} tokens of the prompt", found.len()))
}

/// Classifies a failed call by its status code.
fn refusal_of(status: &tonic::Status) -> Refusal {
    let kind = match status.code() {
        tonic::Code::InvalidArgument => RefusalKind::Invalid,
        tonic::Code::FailedPrecondition => RefusalKind::Protocol,
        tonic::Code::ResourceExhausted => RefusalKind::Queue,
        tonic::Code::DeadlineExceeded => RefusalKind::Deadline,
        _ => RefusalKind::Failed,
    };
    Refusal::new(kind, format!("{}: {}", status.code(), status.message()))
}

/// A failed attempt to serve a prompt: the node at fault, and its refusal.
#[derive(Clone, Debug)]
pub struct Failure {
    pub node: Arc<NodeInfo>,
    pub refusal: Refusal,
}

/// The source of the KV, as the call to a decode node names it.
#[derive(Clone, Copy, Debug)]
pub enum PrefillOffer<'a> {
    /// The node that can compute the KV.
    Offered(&'a NodeInfo),
    /// The node that has computed the KV and holds it.
    HeldBy(&'a NodeInfo),
    /// There is no prefill node: the decode node computes the KV.
    None,
}

impl PrefillOffer<'_> {
    fn to_wire(self) -> v1::decode_request::Prefill {
        use v1::decode_request::Prefill;
        match self {
            Self::Offered(node) => Prefill::Offered(peer_to_wire(node)),
            Self::HeldBy(node) => Prefill::HeldBy(peer_to_wire(node)),
            Self::None => Prefill::None(v1::NoPeer {}),
        }
    }
}

fn peer_to_wire(node: &NodeInfo) -> v1::Peer {
    let wires = node.wires.iter().map(Into::into).collect();
    v1::Peer { node: node.id.to_string(), host: node.host.clone(), wires }
}

impl Failure {
    /// Makes the failure of a node that left the cluster between the choice and the call.
    pub(crate) fn gone(node: &NodeInfo) -> Self {
        Self {
            node: Arc::new(node.clone()),
            refusal: Refusal::new(RefusalKind::Draining, "the node has left"),
        }
    }
}

impl From<Failure> for ServeError {
    fn from(failure: Failure) -> Self {
        let Failure { node, refusal } = failure;
        match refusal.kind {
            RefusalKind::Deadline => {
                Self::DeadlinePassed { reason: format!("{}: {}", node.id, refusal.reason) }
            }
            kind => Self::Refused { kind, reason: format!("{}: {}", node.id, refusal.reason) },
        }
    }
}

// === the decode stream ===

/// A decode call. Dropping it releases everything that the prompt has on the node.
#[derive(Debug)]
pub struct DecodeCall {
    gate: Gate,
    info: Arc<NodeInfo>,
    events: tonic::Streaming<v1::DecodeEvent>,
    ahead: VecDeque<DecodeProgress>,
    /// The call to the sender of the KV, until the KV has arrived.
    kv: Option<PrefillCall>,
    /// The trials of the node's breaker, until the first step.
    trials: Vec<Trial>,
    is_proven: bool,
}

/// The first event of a decode node.
#[derive(Debug)]
pub enum Opening {
    /// The node has reserved room for the KV.
    Landing(Box<Landing>),
    /// The node computes the prompt itself.
    Local { held_tokens: u32 },
}

/// A later event of a decode node.
#[derive(Debug)]
pub enum DecodeProgress {
    /// All KV has arrived on the node.
    Arrived { scheme: String, bytes: u64, waited: Duration, moved: Duration },
    Step {
        step: Step,
        report: Option<StepReport>,
        /// The log-probabilities of a prompt that asks for them and that the node computed, with its first step.
        prompt_logprobs: Vec<PromptLogprob>,
    },
}

/// A decode node's report of the time of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepReport {
    /// The part of `queued` in which the sequence waited for KV room.
    pub room: Duration,
    /// The time from the sequence's submission to its first engine step.
    pub queued: Duration,
    /// The time from the sequence's first engine step to this step.
    pub computed: Duration,
    /// The engine steps since the sequence's last step.
    pub steps: u32,
    /// The prompt tokens in these engine steps, of all sequences.
    pub prefill_tokens: u32,
    /// The sequences that decoded in the last engine step.
    pub rows: u32,
    /// The duration of the last engine step.
    pub took: Duration,
    /// How often the sequence lost its KV blocks in between.
    pub preemptions: u32,
}

impl From<v1::StepTiming> for StepReport {
    fn from(wire: v1::StepTiming) -> Self {
        Self {
            room: Duration::from_micros(wire.room_us),
            queued: Duration::from_micros(wire.queued_us),
            computed: Duration::from_micros(wire.computed_us),
            steps: wire.steps,
            prefill_tokens: wire.prefill_tokens,
            rows: wire.rows,
            took: Duration::from_micros(wire.took_us),
            preemptions: wire.preemptions,
        }
    }
}

impl DecodeCall {
    /// Returns the first event. A node without room sends it when the prompt's turn comes; without an event
    /// until `until`, the node counts as full. Any other event is a failure.
    pub async fn opening(&mut self, until: Instant) -> Result<Opening, Failure> {
        let message = match tokio::time::timeout_at(until, self.events.message()).await {
            Ok(message) => message,
            Err(_) => return Err(self.still_full()),
        };
        match self.event_in(message)?.event {
            Some(Event::Landing(landing)) => {
                landing.try_into().map(Box::new).map(Opening::Landing).map_err(|error| self.failed(&error))
            }
            Some(Event::Local(local)) => Ok(Opening::Local { held_tokens: local.held_tokens }),
            Some(Event::Refused(refusal)) => Err(self.refused(refusal)),
            Some(Event::Arrived(_) | Event::Step(_)) | None => {
                Err(self.failed(&"a stream that does not begin with an opening"))
            }
        }
    }

    pub(crate) fn node(&self) -> &NodeId {
        &self.info.id
    }

    /// Sets the trials of breakers that this call decides.
    pub(crate) fn tried_by(&mut self, trials: Vec<Trial>) {
        self.trials = trials;
    }

    /// Returns the route whose KV is on the way.
    pub(crate) fn arriving_on(&self) -> Option<Route> {
        let prefill = Some(self.kv.as_ref()?.node().clone());
        Some(Route { prefill, decode: self.info.clone() })
    }

    /// Notes a step. Returns true for the first one, which shows that the node works.
    pub(crate) fn has_worked(&mut self) -> bool {
        !std::mem::replace(&mut self.is_proven, true)
    }

    /// Sets the call to the sender of the KV. If the KV is lost in transfer, [`Self::progress`] then fails.
    pub fn kv_from(&mut self, sender: PrefillCall) {
        self.kv = Some(sender);
    }

    /// Returns the next event after the opening. Cancel-safe.
    pub async fn progress(&mut self) -> Result<DecodeProgress, Failure> {
        poll_fn(|cx| self.poll_progress(cx)).await
    }

    /// Polls [`progress`](Self::progress).
    pub(crate) fn poll_progress(&mut self, cx: &mut Context<'_>) -> Poll<Result<DecodeProgress, Failure>> {
        let progress = match self.ahead.pop_front() {
            Some(progress) => progress,
            None => ready!(self.poll_read(cx))?,
        };
        // Any further event means that the KV has arrived.
        if let Some(sender) = self.kv.take() {
            self.trials.iter().for_each(Trial::kv_arrived);
            sender.let_end();
        }
        Poll::Ready(Ok(progress))
    }

    /// Waits for the stream to fail. Other events are kept for [`Self::progress`]. Cancel-safe.
    ///
    /// The end of the stream is no failure here: a short answer may be complete before the prefill node's
    /// answer arrives, and the reader of the steps detects an incomplete one.
    pub async fn failure(&mut self) -> Failure {
        while self.ahead.len() < READ_AHEAD_MAX {
            match self.events.message().await {
                Ok(Some(event)) => match self.understand(event) {
                    Ok(progress) => self.ahead.push_back(progress),
                    Err(failure) => return failure,
                },
                Ok(None) => break,
                Err(status) => return self.broken(&status),
            }
        }
        std::future::pending().await
    }

    /// Lets the call end after its last step.
    pub(crate) fn let_end(self) {
        end::let_end(&self.gate, self.events);
    }

    fn still_full(&self) -> Failure {
        let reason = "the prompt waited for KV room as long as router.wait_ms allows";
        Failure { node: self.info.clone(), refusal: Refusal::new(RefusalKind::Full, reason) }
    }

    /// Checks the log-probabilities of a prompt that the node computed.
    pub(crate) fn check_prompt_logprobs(
        &self,
        prompt: &Prompt,
        found: &[PromptLogprob],
    ) -> Result<(), Failure> {
        check_prompt_logprobs(prompt, found).map_err(|wrong| self.failed(&wrong))
    }

    pub(crate) fn unasked_landing(&self) -> Failure {
        self.failed(&"a landing though there is no prefill node")
    }

    pub(crate) fn unasked_local(&self) -> Failure {
        self.failed(&"a request to compute what is held for it")
    }

    pub(crate) fn wrong_index(&self, found: u32, wanted: u32) -> Failure {
        self.failed(&format_args!("step {found} instead of step {wanted}"))
    }

    fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<Result<DecodeProgress, Failure>> {
        match (self.events.poll_next_unpin(cx), &mut self.kv) {
            (Poll::Ready(message), _) => {
                let event = self.event_in(message.transpose());
                Poll::Ready(event.and_then(|event| self.understand(event)))
            }
            (Poll::Pending, Some(kv)) => kv.poll_loss(cx).map(Err),
            (Poll::Pending, None) => Poll::Pending,
        }
    }

    fn event_in(
        &self,
        message: Result<Option<v1::DecodeEvent>, tonic::Status>,
    ) -> Result<v1::DecodeEvent, Failure> {
        match message {
            Ok(Some(event)) => Ok(event),
            Ok(None) => Err(self.failed(&"the end of a stream that was not finished")),
            Err(status) => Err(self.broken(&status)),
        }
    }

    fn understand(&self, event: v1::DecodeEvent) -> Result<DecodeProgress, Failure> {
        match event.event {
            Some(Event::Step(step)) => {
                let step = step.try_into().map_err(|error| self.failed(&error))?;
                let prompt_logprobs = proto::prompt_logprobs_from_wire(event.prompt_logprobs)
                    .map_err(|error| self.failed(&error))?;
                let report = event.timing.map(StepReport::from);
                Ok(DecodeProgress::Step { step, report, prompt_logprobs })
            }
            Some(Event::Arrived(arrived)) => Ok(DecodeProgress::Arrived {
                scheme: arrived.scheme,
                bytes: arrived.bytes,
                waited: Duration::from_micros(arrived.waited_us),
                moved: Duration::from_micros(arrived.moved_us),
            }),
            Some(Event::Refused(refusal)) => Err(self.refused(refusal)),
            Some(Event::Landing(_) | Event::Local(_)) => Err(self.failed(&"a second opening")),
            None => Err(self.failed(&"an empty event")),
        }
    }

    fn broken(&self, status: &tonic::Status) -> Failure {
        Failure { node: self.info.clone(), refusal: refusal_of(status) }
    }

    fn refused(&self, refusal: v1::Refusal) -> Failure {
        Failure { node: self.info.clone(), refusal: refusal.into() }
    }

    fn failed(&self, what: &dyn std::fmt::Display) -> Failure {
        let refusal = Refusal::new(RefusalKind::Failed, format!("answered with {what}"));
        Failure { node: self.info.clone(), refusal }
    }
}

// === the status stream ===

/// The router's end of a node's status stream.
#[derive(Debug)]
pub struct StatusUpdates {
    client: NodeClient,
    updates: tonic::Streaming<v1::StatusEvent>,
}

impl StatusUpdates {
    /// Returns the next update; `None` at the end of the stream.
    pub async fn next(&mut self) -> Result<Option<StatusUpdate>, Failure> {
        use v1::status_event::Event;
        let event = self.updates.message().await.map_err(|status| self.client.failure(&status))?;
        let Some(v1::StatusEvent { event: Some(event) }) = event else { return Ok(None) };
        let update = match event {
            Event::Load(load) => load.try_into().map(|load| StatusUpdate::Report(NodeReport::Load(load))),
            Event::Blocks(blocks) => {
                blocks.try_into().map(|(sequence, event)| StatusUpdate::Blocks(sequence, event))
            }
            Event::Draining(v1::Draining {}) => Ok(StatusUpdate::Report(NodeReport::Draining)),
        };
        update.map(Some).map_err(|error| self.client.invalid_answer(&error))
    }
}
