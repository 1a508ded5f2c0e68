//! The path of one prompt through the cluster: decode first in `Dispatch::decode_first`, prefill first in
//! `held`.
//!
//! A route is tried; a node that fails is left out of the next one. A prompt without room waits in its decode
//! node's queue, as one attempt. If that queue is full, another node is tried. After the first step,
//! [`crate::continuation`] takes over.

mod held;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use chassis::World;
use chassis::guards::{Guard, stands};
use futures::StreamExt as _;
use tokio::time::Instant;
use tracing::{debug, info, trace};
use types::step::PromptLogprob;
use types::{
    BlockHash, CallerAction, ComputedPrompt, Deadline, Destination, ModelInfo, NodeId, NodeInfo, Prompt,
    RefusalKind, RequestedModel, Step, Usage,
};

use crate::admission::{Admission, AdmissionAsk, Permit};
use crate::breaker::{Breakers, Trial};
use crate::cluster::{Assignment, Cluster};
use crate::continuation::{Continuation, RequestGuards};
use crate::drain::Drain;
use crate::error::{AcceptError, ServeError};
use crate::metrics::{Outcome, RouterMetrics, Stage};
use crate::policy::{AllowedArms, Ask, ClusterView, Decision, NoRoute, Order, Route, RoutingPolicy};
use crate::predictions::Prediction;
use crate::requests::{Part, RecordHead, RequestEvent, RequestRecord, Requests};
use crate::rpc::{DecodeCall, DecodeProgress, Failure, NodeClient, Opening, PrefillOffer};
use crate::serve::{Arrival, Detail, Generation, Ready, Serve};
use crate::watchdog::{StageTracker, TrackedRequest, WaitStage, watch};
pub(crate) use held::HeldKv;

/// The pauses before a prompt tries again when every node's queue is full, or no node is usable. They double
/// from the first value to the last.
const FULL_AGAIN: std::ops::RangeInclusive<Duration> = Duration::from_millis(5)..=Duration::from_millis(200);
/// How much earlier than the router a node may see a deadline pass: nodes get the remaining time in whole
/// milliseconds.
const LATE: Duration = Duration::from_millis(10);

/// Which nodes compute a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ComputedBy {
    /// A prefill node computes the prompt, for a decode node.
    Both,
    /// The decode node computes the prompt alone.
    DecodeAlone,
}

/// The limits of one request's attempts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// The number of routes that may fail between two steps that reach the client.
    pub attempts_max: u32,
    /// The longest wait for a node with room.
    pub wait_max: Duration,
    /// The longest wait of a new request for a usable node, if nodes are known.
    pub nodes_wait_new: Duration,
    /// The longest wait of a stream that has begun for a usable node.
    pub nodes_wait_begun: Duration,
}

/// Serves prompts on the cluster's nodes. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Dispatch {
    parts: Arc<DispatchParts>,
    stages: StageTracker,
    requests: Requests,
    breakers: Breakers,
    /// Locked while a route is chosen and its nodes are assigned the prompt, so that prompts that come together are not sent to
    /// one idle node.
    choosing: Arc<Mutex<()>>,
}

#[derive(Debug)]
pub struct DispatchParts {
    pub world: World,
    pub cluster: Cluster,
    pub policy: Box<dyn RoutingPolicy>,
    pub admission: Admission,
    pub order: Order,
    pub budget: Budget,
    /// The share of requests that are explained without asking for it.
    pub explain_share: f64,
    pub metrics: RouterMetrics,
    pub drain: Drain,
}

/// A prompt that needs its next step from new nodes.
#[derive(Clone, Copy, Debug)]
struct FirstStepAsk<'a> {
    ask: Ask<'a>,
    /// The permit of a new request, with the room that it was given.
    permit: Option<&'a Permit>,
    record: &'a RequestRecord,
}

/// One route of a prompt, with the work that is assigned to the nodes.
#[derive(Clone, Copy, Debug)]
struct Attempt<'a> {
    ask: Ask<'a>,
    route: &'a Route,
    assigned: &'a Assignment,
    /// The time until which the prompt may wait for room.
    room_by: Instant,
}

/// The first step of a request, and the source of its other steps.
#[derive(Debug)]
pub(crate) struct StartedRequest {
    /// The weights that computed the first step. All further steps must come from the same weights.
    pub(crate) model: RequestedModel,
    pub(crate) first: Step,
    /// See [`ComputedPrompt`].
    pub(crate) prompt_logprobs: Vec<PromptLogprob>,
    pub(crate) usage: Usage,
    pub(crate) rest: StepSource,
}

/// The source of a request's steps after the first.
#[derive(Debug)]
pub(crate) enum StepSource {
    /// A decode node has the KV, or is receiving it.
    Decode(Box<DecodeCall>),
    /// A prefill node or a pool node holds the KV; no decode node is chosen yet.
    Held(Box<HeldKv>),
}

impl Dispatch {
    pub fn new(parts: DispatchParts) -> Self {
        let breakers = parts.metrics.breakers();
        let (stages, requests) = (StageTracker::default(), Requests::default());
        Self { parts: Arc::new(parts), stages, requests, breakers, choosing: Arc::default() }
    }

    pub(crate) fn parts(&self) -> &DispatchParts {
        &self.parts
    }

    pub(crate) fn stages(&self) -> &StageTracker {
        &self.stages
    }

    /// Returns the breakers of nodes.
    pub fn breakers(&self) -> &Breakers {
        &self.breakers
    }

    /// Returns the lines in which requests wait.
    pub fn admission(&self) -> &Admission {
        &self.parts.admission
    }

    /// Returns the records of requests.
    pub fn requests(&self) -> &Requests {
        &self.requests
    }

    /// Returns a future that admits waiting requests, until it is dropped.
    pub fn serve_lines(&self) -> impl Future<Output = ()> + Send + 'static {
        self.parts.admission.clone().serve()
    }

    /// Returns a future that watches whether requests make progress, until it is dropped.
    pub fn watchdog(&self, bound: Duration) -> impl Future<Output = ()> + Send + 'static {
        let cluster = self.parts.cluster.clone();
        watch(self.stages.clone(), bound, move || cluster.n_steps())
    }

    /// Tries routes until one gives the request's first step.
    pub(crate) async fn start(
        &self,
        prompt: &Prompt,
        by: ComputedBy,
        record: &RequestRecord,
    ) -> Result<StartedRequest, ServeError> {
        let hashes = self.parts.cluster.hashes(prompt);
        let arms = match by {
            ComputedBy::Both => AllowedArms::RemoteOrLocal,
            ComputedBy::DecodeAlone => AllowedArms::OnlyLocal,
        };
        let ask = Ask { prompt, hashes: &hashes, arms, objective: record.objective() };
        self.first_step(FirstStepAsk { ask, permit: None, record }).await
    }

    async fn first_step(&self, asked: FirstStepAsk<'_>) -> Result<StartedRequest, ServeError> {
        let FirstStepAsk { ask, permit, record } = asked;
        let progress = if ask.prompt.n_generated == 0 { Progress::New } else { Progress::Begun };
        let mut tries = Attempts::new(self, progress, ask.prompt.deadline, record);
        if let Some(permit) = permit {
            tries.began = permit.entered;
        }
        let waiting = self.stages.enter(WaitStage::Route, record);
        loop {
            waiting.set_stage(WaitStage::Route);
            let Chosen { decision, assigned, trials } = tries.route(&ask).await?;
            record.decided(&decision, self.prediction(&decision));
            permit.into_iter().for_each(Permit::assigned);
            let prompt = &ask.prompt.for_weights_of(&decision.route.decode.model);
            let ask = Ask { prompt, ..ask };
            let attempt =
                Attempt { ask, route: &decision.route, assigned: &assigned, room_by: tries.room_by() };
            self.parts.metrics.expected_cached_tokens.inc_by(u64::from(decision.terms.cached_tokens));
            match self.attempt(attempt, &waiting).await {
                Ok(mut started) => {
                    if let StepSource::Decode(decode) = &mut started.rest {
                        decode.tried_by(trials);
                        record.streams_on(assigned.into_stream());
                    }
                    return Ok(started);
                }
                Err(failure) => tries.failed(failure, Some(&decision.route)).await?,
            }
        }
    }

    fn prediction(&self, decision: &Decision) -> Prediction {
        let DispatchParts { cluster, metrics, world, .. } = &*self.parts;
        metrics.predictions.decided(decision);
        Prediction::new(decision, cluster.learner().clone(), metrics.predictions.clone(), world.now())
    }

    async fn attempt(
        &self,
        attempt: Attempt<'_>,
        waiting: &TrackedRequest,
    ) -> Result<StartedRequest, Failure> {
        let route = attempt.route;
        self.parts.metrics.attempts.inc();
        let is_held = route.prefill.is_some() && self.parts.order == Order::PrefillFirst;
        waiting.record().note(RequestEvent::Try {
            prefill: route.prefill.as_ref().map(|node| node.id.clone()),
            decode: (!is_held).then(|| route.decode.id.clone()),
        });
        match (&route.prefill, self.parts.order) {
            (Some(prefill), Order::PrefillFirst) => {
                waiting.set_stage(WaitStage::Prefill);
                attempt.assigned.prefill_called(self.parts.world.now());
                self.prefill_first(attempt.ask, prefill, waiting.record()).await
            }
            _ => self.decode_first(attempt, waiting).await,
        }
    }

    /// Reserves room on the decode node, waiting there until `room_by`, then asks the prefill node to compute
    /// the prompt.
    async fn decode_first(
        &self,
        attempt: Attempt<'_>,
        waiting: &TrackedRequest,
    ) -> Result<StartedRequest, Failure> {
        let Attempt { ask: Ask { prompt, .. }, route, assigned, room_by } = attempt;
        waiting.set_stage(WaitStage::Reserve);
        let asked = self.parts.world.now();
        let prefill = route.prefill.as_deref();
        let offer = prefill.map_or(PrefillOffer::None, PrefillOffer::Offered);
        let detail = waiting.record().detail();
        assigned.decode_called(asked);
        let mut decode = self.client(&route.decode)?.decode(prompt, offer, detail).await?;
        let opening = decode.opening(room_by).await?;
        self.parts.metrics.stage(Stage::Reserve, asked.elapsed());
        trace!(target: "walk", request = %prompt.id, "KV room reserved on the decode node");
        match (opening, prefill) {
            (Opening::Landing(landing), Some(prefill)) => {
                let to = Destination::Landing(*landing);
                let client = self.client(prefill)?;
                waiting.set_stage(WaitStage::Prefill);
                assigned.prefill_called(self.parts.world.now());
                let (prefilled, sender) = tokio::select! {
                    biased;
                    prefilled = client.prefill(prompt, &to) => prefilled?,
                    failure = decode.failure() => return Err(failure),
                };
                decode.kv_from(sender);
                self.breakers.succeeded(&prefill.id);
                waiting.record().prefilled(&prefilled);
                Ok(self.started(prompt, prefilled, StepSource::Decode(Box::new(decode))))
            }
            (Opening::Landing(_), None) => Err(decode.unasked_landing()),
            (Opening::Local { held_tokens }, _) => {
                waiting.set_stage(WaitStage::Decode);
                waiting.record().computed_locally();
                self.local(prompt, decode, held_tokens, waiting.record()).await
            }
        }
    }

    /// Asks the decode node to compute the prompt alone, and returns the first step.
    async fn local(
        &self,
        prompt: &Prompt,
        mut decode: DecodeCall,
        held_tokens: u32,
        record: &RequestRecord,
    ) -> Result<StartedRequest, Failure> {
        let usage = Usage { prompt_tokens: prompt.tokens.len() as u32, cached_tokens: held_tokens };
        loop {
            if let DecodeProgress::Step { step: first, report, prompt_logprobs } = decode.progress().await? {
                decode.check_prompt_logprobs(prompt, &prompt_logprobs)?;
                self.breakers.succeeded(decode.node());
                record.stepped(report);
                let model = prompt.model.clone();
                return Ok(StartedRequest {
                    model,
                    first,
                    prompt_logprobs,
                    usage,
                    rest: StepSource::Decode(Box::new(decode)),
                });
            }
        }
    }

    fn started(&self, prompt: &Prompt, prefilled: ComputedPrompt, rest: StepSource) -> StartedRequest {
        self.parts.metrics.stage(Stage::PrefillQueue, prefilled.queued);
        self.parts.metrics.stage(Stage::Prefill, prefilled.computed);
        let ComputedPrompt { first, prompt_logprobs, usage, .. } = prefilled;
        StartedRequest { model: prompt.model.clone(), first, prompt_logprobs, usage, rest }
    }

    /// Counts a failure of a node, or of the transfer between the nodes of `route`.
    pub(crate) fn count_failure(&self, failure: &Failure, route: Option<&Route>, deadline: Deadline) {
        if !self.is_late(deadline) {
            self.breakers.failed(&failure.node, &failure.refusal, route, self.parts.world.now());
        }
    }

    /// Returns whether the deadline may have caused a failure, because nodes end calls and landings then. Such a
    /// failure does not count against the nodes: clients choose deadlines.
    fn is_late(&self, deadline: Deadline) -> bool {
        self.parts.world.left(deadline) < LATE
    }

    fn client(&self, node: &NodeInfo) -> Result<NodeClient, Failure> {
        self.parts.cluster.client(&node.id).ok_or_else(|| Failure::gone(node))
    }
}

impl Ready for Dispatch {
    fn ready(&self) -> Result<(), String> {
        if self.parts.drain.requested.requested() {
            return Err("the router is stopping".to_owned());
        }
        self.parts.cluster.ready().and_then(|()| self.stages.check())
    }
}

#[async_trait]
impl Serve for Dispatch {
    fn models(&self) -> Vec<ModelInfo> {
        self.parts.cluster.models()
    }

    async fn generate(&self, prompt: Prompt, arrival: Arrival) -> Result<Generation, ServeError> {
        let arrival = self.sampled(arrival);
        let mut outcome = Outcome::new(self.parts.metrics.of_model(&prompt.model.name), arrival.at);
        let unix_time = self.parts.world.unix_time().saturating_sub(arrival.at.elapsed());
        let open = self.requests.begin(RecordHead::of(&prompt), &arrival, unix_time);
        let record = open.record().clone();
        let hashes = self.parts.cluster.hashes(&prompt).into();
        let permit = match outcome.note(self.admit(&prompt, &hashes, &arrival, &record).await) {
            Ok(permit) => permit,
            Err(refused) => {
                if let ServeError::Overloaded { .. } = refused {
                    open.discard();
                }
                return Err(refused);
            }
        };
        outcome.keep(open);
        trace!(target: "walk", request = %prompt.id, n_tokens = prompt.tokens.len(), "prompt accepted");
        let ask = Ask { objective: record.objective(), ..Ask::new(&prompt, &hashes) };
        let starting = self.first_step(FirstStepAsk { ask, permit: Some(&permit), record: &record });
        let mut started = outcome.note(self.by_deadline(prompt.deadline, starting).await)?;
        let (usage, prompt_logprobs) = (started.usage, std::mem::take(&mut started.prompt_logprobs));
        let ttft = record.first_token(usage);
        outcome.metrics().first_token.observe(ttft.as_secs_f64());
        outcome.metrics().prompt_tokens.inc_by(u64::from(usage.prompt_tokens));
        self.parts.metrics.cached_tokens.inc_by(u64::from(usage.cached_tokens));
        info!(ttft_ms = ttft.as_millis() as u64, "first token received from the nodes");
        self.stages.moved();
        let complete = outcome.complete();
        let explained = (arrival.detail == Detail::Explained).then(|| record.clone());
        let guards = RequestGuards { permit, outcome, record };
        let steps = Continuation::new(self.clone(), prompt, started, guards).boxed();
        Ok(Generation { usage, prompt_logprobs, complete, explained, steps })
    }

    fn knows_nodes(&self) -> Result<(), AcceptError> {
        self.parts.cluster.knows_nodes().map_err(|reason| AcceptError::NoNodes { reason })
    }
}

impl Dispatch {
    /// Waits in the model's line.
    async fn admit(
        &self,
        prompt: &Prompt,
        hashes: &Arc<[BlockHash]>,
        arrival: &Arrival,
        record: &RequestRecord,
    ) -> Result<Permit, ServeError> {
        let _waiting = self.stages.enter(WaitStage::Admission, record);
        record.enter_part(Part::Admission);
        let (terms, arrived) = (arrival.terms, arrival.at);
        let ask = AdmissionAsk { prompt, hashes, terms, arrived, record };
        self.by_deadline(prompt.deadline, self.parts.admission.admit(ask)).await
    }

    /// Marks a share of requests to be explained, besides those that ask for it.
    fn sampled(&self, arrival: Arrival) -> Arrival {
        let share = self.parts.explain_share;
        let is_drawn = share > 0.0 && (self.parts.world.draw() as f64) < share * u64::MAX as f64;
        if is_drawn { Arrival { detail: Detail::Explained, ..arrival } } else { arrival }
    }

    /// Runs `work` until the deadline passes or the router stops. Dropping its calls cancels the request on
    /// the nodes.
    pub(crate) fn by_deadline<T>(
        &self,
        deadline: Deadline,
        work: impl Future<Output = Result<T, ServeError>>,
    ) -> impl Future<Output = Result<T, ServeError>> {
        self.parts.drain.by_deadline(deadline, work)
    }
}

// === attempts ===

/// The attempts at one prompt's next step: the failed nodes, and the remaining attempts and time.
struct Attempts<'a> {
    dispatch: &'a Dispatch,
    parts: &'a DispatchParts,
    record: &'a RequestRecord,
    failed: Vec<NodeId>,
    attempts_left: u32,
    began: Instant,
    pause: Duration,
    progress: Progress,
    deadline: Deadline,
}

/// A chosen route, with the prompt assigned to its nodes.
struct Chosen {
    decision: Decision,
    assigned: Assignment,
    trials: Vec<Trial>,
}

/// Whether the client already has tokens of the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    New,
    Begun,
}

impl<'a> Attempts<'a> {
    fn new(
        dispatch: &'a Dispatch,
        progress: Progress,
        deadline: Deadline,
        record: &'a RequestRecord,
    ) -> Self {
        let parts = &dispatch.parts;
        let attempts_left = parts.budget.attempts_max;
        Self {
            dispatch,
            parts,
            record,
            failed: Vec::new(),
            attempts_left,
            began: parts.world.now(),
            pause: *FULL_AGAIN.start(),
            progress,
            deadline,
        }
    }

    /// Chooses a route over nodes that have not failed. If there is none, all nodes may be tried again.
    async fn route(&mut self, ask: &Ask<'_>) -> Result<Chosen, ServeError> {
        let draw = self.parts.world.draw();
        if let Ok(chosen) = self.choose(ask, &self.failed, draw) {
            return Ok(chosen);
        }
        self.failed.clear();
        self.usable(ask, draw).await
    }

    fn choose(&self, ask: &Ask<'_>, without: &[NodeId], draw: u64) -> Result<Chosen, NoRoute> {
        let DispatchParts { cluster, policy, world, .. } = self.parts;
        let Dispatch { breakers, choosing, .. } = self.dispatch;
        let _choosing = choosing.lock().unwrap_or_else(PoisonError::into_inner);
        let view = cluster.view(ask, without);
        let held_by = match ask.arms {
            AllowedArms::OnlyHeld { by } => Some(by),
            AllowedArms::RemoteOrLocal | AllowedArms::OnlyLocal => None,
        };
        let choose = |view: &ClusterView| policy.route(ask, view, draw);
        let (decision, trials) = breakers.route(view, world.now(), held_by, choose)?;
        let assigned = cluster.assign(ask, &decision);
        Ok(Chosen { decision, assigned, trials })
    }

    /// Waits for a usable node. Nodes that restart, or whose connections broke while this process was suspended, are
    /// usable again after a moment, and a stream that has begun must not end in the meantime. A new request waits only if
    /// nodes are known.
    async fn usable(&mut self, ask: &Ask<'_>, draw: u64) -> Result<Chosen, ServeError> {
        let began = self.parts.world.now();
        let cluster = &self.parts.cluster;
        loop {
            let wait_max = match self.progress {
                Progress::Begun => self.parts.budget.nodes_wait_begun,
                Progress::New if cluster.everyone().is_empty() => Duration::ZERO,
                Progress::New => self.parts.budget.nodes_wait_new,
            };
            if began.elapsed() >= wait_max {
                let reason = cluster.why_no_node(&ask.prompt.model);
                let waited_ms = began.elapsed().as_millis();
                return Err(ServeError::NoNodes { reason: format!("{reason} (waited {waited_ms} ms)") });
            }
            self.rest().await;
            if let Ok(chosen) = self.choose(ask, &[], draw) {
                return Ok(chosen);
            }
        }
    }

    /// Counts a failure of a node, or of the transfer between the nodes of `route`. Returns an error if no
    /// attempt is left.
    async fn failed(&mut self, failure: Failure, route: Option<&Route>) -> Result<(), ServeError> {
        self.dispatch.count_failure(&failure, route, self.deadline);
        let kind = failure.refusal.kind;
        self.parts.metrics.retries.with_label_values(&[kind.code()]).inc();
        self.record.note(RequestEvent::Failed { node: failure.node.id.clone(), code: kind.code() });
        debug!(node = %failure.node.id, refusal = %failure.refusal, "attempt to serve the request failed on the node");
        if failure.refusal.caller_action() != CallerAction::RetryElsewhere {
            return Err(failure.into());
        }
        if matches!(kind, RefusalKind::Full | RefusalKind::Queue | RefusalKind::Draining) {
            return self.leave_out(failure);
        }
        self.attempts_left = self.attempts_left.saturating_sub(1);
        if self.attempts_left == 0 && stands(Guard::AttemptBudget) {
            return Err(failure.into());
        }
        self.failed.push(failure.node.id.clone());
        Ok(())
    }

    /// Returns the time until which the prompt may wait for room.
    fn room_by(&self) -> Instant {
        self.began + self.parts.budget.wait_max
    }

    /// Leaves out a node that has no room, or that leaves or changes its role. The failure uses up waiting time instead of an
    /// attempt.
    fn leave_out(&mut self, failure: Failure) -> Result<(), ServeError> {
        if self.began.elapsed() >= self.parts.budget.wait_max {
            return Err(failure.into());
        }
        self.failed.push(failure.node.id.clone());
        Ok(())
    }

    /// Pauses, longer each time and with jitter, so that waiting prompts do not all try at once.
    async fn rest(&mut self) {
        let jitter = (self.parts.world.draw() % 1000) as f64 / 1000.0;
        tokio::time::sleep(self.pause.mul_f64(0.5 + jitter / 2.0)).await;
        self.pause = (self.pause * 2).min(*FULL_AGAIN.end());
    }
}

#[cfg(test)]
mod tests;
