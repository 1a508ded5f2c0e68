//! One prompt's way through the cluster: `Dispatch::decode_first` here, and prefill first in `held`.
//!
//! A route is tried; a node that fails is left out of the next one. Full nodes are no failure: waiting happens here,
//! where it holds no KV. Once the first step is in hand, [`crate::continuation`] takes over.

mod held;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use chassis::World;
use chassis::guards::{Guard, stands};
use futures::StreamExt as _;
use tokio::time::Instant;
use tracing::{debug, info, trace};
use types::{
    Deadline, Destination, ModelInfo, NodeId, NodeInfo, Prefilled, Prompt, PromptModel, RefusalKind, Step,
    Usage, Verdict,
};

use crate::admission::Admission;
use crate::cluster::Cluster;
use crate::continuation::{Booking, Continuation};
use crate::error::ServeError;
use crate::metrics::{Outcome, RouterMetrics, Stage};
use crate::policy::{Route, RoutingPolicy};
use crate::rpc::{DecodeCall, DecodeProgress, Failure, NodeClient, Opening, PrefillOffer};
use crate::serve::{Generation, Serve};
use crate::watchdog::{Place, Waiting, Whereabouts, watch};
pub(crate) use held::HeldKv;

/// How long a prompt for which no node has room waits before it asks again.
const FULL_AGAIN: std::ops::RangeInclusive<Duration> = Duration::from_millis(5)..=Duration::from_millis(200);

/// How long nodes that have just failed, all of them, may take until one can be asked again. Longer than it takes to
/// open a status stream anew, and short for a client that is to hear that nobody is there.
const USABLE_AGAIN_WITHIN: Duration = Duration::from_secs(2);

/// Which of the two nodes is asked first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Room is reserved before anything is computed: for wires from node to node.
    DecodeFirst,
    /// The prompt is computed first, and a decode node chosen when its KV is there.
    PrefillFirst,
}

/// Who computes a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum By {
    /// A prefill node, for a decode node.
    Both,
    /// The decode node by itself.
    DecodeAlone,
}

/// What bounds the tries of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Routes that may fail between two steps that reach the client.
    pub attempts_max: u32,
    /// How long a prompt may wait for a node with room.
    pub wait_max: Duration,
}

/// Serves prompts with the cluster's nodes. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Dispatch {
    parts: Arc<Parts>,
    whereabouts: Whereabouts,
}

#[derive(Debug)]
pub struct Parts {
    pub world: World,
    pub cluster: Cluster,
    pub policy: Box<dyn RoutingPolicy>,
    pub admission: Admission,
    pub order: Order,
    pub budget: Budget,
    pub metrics: RouterMetrics,
}

/// The first step in hand, and where the others come from.
#[derive(Debug)]
pub(crate) struct Started {
    /// The weights that computed it: every further step is of the same.
    pub(crate) model: PromptModel,
    pub(crate) first: Step,
    pub(crate) usage: Usage,
    pub(crate) rest: Rest,
}

/// Where the steps after the first come from.
#[derive(Debug)]
pub(crate) enum Rest {
    /// A decode node has, or is about to have, the KV.
    Decode(Box<DecodeCall>),
    /// A prefill node or the pool holds the KV; no decode node is chosen yet.
    Held(Box<HeldKv>),
}

impl Dispatch {
    pub fn new(parts: Parts) -> Self {
        Self { parts: Arc::new(parts), whereabouts: Whereabouts::default() }
    }

    pub(crate) fn parts(&self) -> &Parts {
        &self.parts
    }

    pub(crate) fn whereabouts(&self) -> &Whereabouts {
        &self.whereabouts
    }

    /// Watches, until it is dropped, whether tokens move.
    pub fn watchdog(&self, bound: Duration) -> impl Future<Output = ()> + Send + 'static {
        let cluster = self.parts.cluster.clone();
        watch(self.whereabouts.clone(), bound, move || cluster.n_steps())
    }

    /// Tries routes until one has given its first step.
    pub(crate) async fn start(&self, prompt: &Prompt, by: By) -> Result<Started, ServeError> {
        let mut tries = Tries::new(&self.parts);
        let waiting = self.whereabouts.enter(Place::Route);
        loop {
            waiting.goes_to(Place::Route);
            let route = tries.route(prompt).await?;
            let route = if by == By::Both { route } else { Route { prefill: None, ..route } };
            self.parts.cluster.assign(&route, prompt.tokens.len());
            let prompt = &prompt.for_weights_of(&route.decode.model);
            match self.attempt(prompt, &route, &waiting).await {
                Ok(started) => return Ok(started),
                Err(failure) => tries.failed(failure).await?,
            }
        }
    }

    async fn attempt(&self, prompt: &Prompt, route: &Route, waiting: &Waiting) -> Result<Started, Failure> {
        self.parts.metrics.attempts.inc();
        match (&route.prefill, self.parts.order) {
            (Some(prefill), Order::PrefillFirst) => {
                waiting.goes_to(Place::Prefill);
                self.prefill_first(prompt, prefill).await
            }
            (prefill, _) => self.decode_first(prompt, prefill.as_deref(), &route.decode, waiting).await,
        }
    }

    /// The decode node says first whether there is room, and where; then the prompt is computed into it.
    async fn decode_first(
        &self,
        prompt: &Prompt,
        prefill: Option<&NodeInfo>,
        decode: &NodeInfo,
        waiting: &Waiting,
    ) -> Result<Started, Failure> {
        waiting.goes_to(Place::Reserve);
        let asked = self.parts.world.now();
        let offer = prefill.map_or(PrefillOffer::None, PrefillOffer::Offered);
        let mut decode = self.client(decode)?.decode(prompt, offer).await?;
        let opening = decode.opening().await?;
        self.parts.metrics.stage(Stage::Reserve, asked.elapsed());
        trace!(target: "walk", request = %prompt.id, "answered with room");
        match (opening, prefill) {
            (Opening::Landing(landing), Some(prefill)) => {
                let to = Destination::Landing(*landing);
                let client = self.client(prefill)?;
                waiting.goes_to(Place::Prefill);
                let (prefilled, sender) = tokio::select! {
                    biased;
                    prefilled = client.prefill(prompt, &to) => prefilled?,
                    failure = decode.failure() => return Err(failure),
                };
                decode.kv_from(sender);
                Ok(self.started(prompt, prefilled, Rest::Decode(Box::new(decode))))
            }
            (Opening::Landing(_), None) => Err(decode.unasked_landing()),
            (Opening::Local { held_tokens }, _) => {
                waiting.goes_to(Place::Decode);
                self.local(prompt, decode, held_tokens).await
            }
        }
    }

    /// The decode node computes the prompt by itself; its first step is the first.
    async fn local(
        &self,
        prompt: &Prompt,
        mut decode: DecodeCall,
        held_tokens: u32,
    ) -> Result<Started, Failure> {
        let usage = Usage { prompt_tokens: prompt.tokens.len() as u32, cached_tokens: held_tokens };
        loop {
            if let DecodeProgress::Step(first) = decode.progress().await? {
                let model = prompt.model.clone();
                return Ok(Started { model, first, usage, rest: Rest::Decode(Box::new(decode)) });
            }
        }
    }

    fn started(&self, prompt: &Prompt, prefilled: Prefilled, rest: Rest) -> Started {
        self.parts.metrics.stage(Stage::PrefillQueue, prefilled.queued);
        self.parts.metrics.stage(Stage::Prefill, prefilled.computed);
        Started { model: prompt.model.clone(), first: prefilled.first, usage: prefilled.usage, rest }
    }

    fn client(&self, node: &NodeInfo) -> Result<NodeClient, Failure> {
        self.parts.cluster.client(&node.id).ok_or_else(|| Failure::gone(node))
    }
}

#[async_trait]
impl Serve for Dispatch {
    fn models(&self) -> Vec<ModelInfo> {
        self.parts.cluster.models()
    }

    async fn generate(&self, prompt: Prompt) -> Result<Generation, ServeError> {
        let mut outcome = Outcome::new(&self.parts.metrics);
        let permit = outcome.note(self.parts.admission.admit())?;
        let accepted = self.parts.world.now();
        trace!(target: "walk", request = %prompt.id, n_tokens = prompt.tokens.len(), "accepted");
        let started = outcome.note(self.by_deadline(prompt.deadline, self.start(&prompt, By::Both)).await)?;
        self.parts.metrics.stage(Stage::FirstToken, accepted.elapsed());
        info!(ttft_ms = accepted.elapsed().as_millis() as u64, "first token");
        self.whereabouts.moved();
        let usage = started.usage;
        let booking = Booking { accepted, permit, outcome };
        let steps = Continuation::new(self.clone(), prompt, started, booking).into_steps().boxed();
        Ok(Generation { usage, steps })
    }

    fn ready(&self) -> Result<(), String> {
        self.parts.cluster.ready().and_then(|()| self.whereabouts.check())
    }
}

impl Dispatch {
    /// Ends `work` when the deadline passes. The nodes are told by the dropped calls.
    pub(crate) async fn by_deadline<T>(
        &self,
        deadline: Deadline,
        work: impl Future<Output = Result<T, ServeError>>,
    ) -> Result<T, ServeError> {
        match tokio::time::timeout_at(deadline.instant().into(), work).await {
            Ok(result) => result,
            Err(_) => Err(ServeError::DeadlinePassed { reason: "the request's time is up".to_owned() }),
        }
    }
}

// === tries ===

/// The tries of one prompt for its next step: who failed, and how much patience is left.
struct Tries<'a> {
    parts: &'a Parts,
    failed: Vec<NodeId>,
    attempts_left: u32,
    began: Instant,
    pause: Duration,
}

impl<'a> Tries<'a> {
    fn new(parts: &'a Parts) -> Self {
        let attempts_left = parts.budget.attempts_max;
        Self {
            parts,
            failed: Vec::new(),
            attempts_left,
            began: parts.world.now(),
            pause: *FULL_AGAIN.start(),
        }
    }

    /// A route over nodes that have not failed. When none is left, all may try again.
    async fn route(&mut self, prompt: &Prompt) -> Result<Route, ServeError> {
        let draw = self.parts.world.draw();
        if let Ok(route) =
            self.parts.policy.route(prompt, &self.parts.cluster.view(&prompt.model, &self.failed), draw)
        {
            return Ok(route);
        }
        if self.failed.is_empty() {
            return Err(ServeError::NoNodes { reason: self.parts.cluster.why_no_node(&prompt.model) });
        }
        self.failed.clear();
        self.again(prompt, draw).await
    }

    /// Waits for a node that is known to be there to be usable again. One whose connection broke is so in a moment;
    /// without this, a broken connection to the only decode node would end every request.
    async fn again(&mut self, prompt: &Prompt, draw: u64) -> Result<Route, ServeError> {
        let give_up = self.parts.world.now() + USABLE_AGAIN_WITHIN;
        loop {
            self.rest().await;
            let cluster = &self.parts.cluster;
            match self.parts.policy.route(prompt, &cluster.view(&prompt.model, &[]), draw) {
                Ok(route) => return Ok(route),
                Err(_) if self.parts.world.now() < give_up && !cluster.everyone().is_empty() => {}
                Err(_) => return Err(ServeError::NoNodes { reason: cluster.why_no_node(&prompt.model) }),
            }
        }
    }

    /// Counts a failure and decides whether there is another try.
    async fn failed(&mut self, failure: Failure) -> Result<(), ServeError> {
        let kind = failure.refusal.kind;
        self.parts.metrics.retries.with_label_values(&[kind.code()]).inc();
        debug!(node = %failure.node.id, refusal = %failure.refusal, "attempt failed");
        if failure.refusal.verdict() != Verdict::RetryElsewhere {
            return Err(failure.into());
        }
        if matches!(kind, RefusalKind::Full | RefusalKind::Queue) {
            return self.wait_for_room(failure);
        }
        self.attempts_left = self.attempts_left.saturating_sub(1);
        if self.attempts_left == 0 && stands(Guard::AttemptBudget) {
            return Err(failure.into());
        }
        self.failed.push(failure.node.id.clone());
        Ok(())
    }

    /// A full node costs patience, not an attempt.
    fn wait_for_room(&mut self, failure: Failure) -> Result<(), ServeError> {
        if self.began.elapsed() >= self.parts.budget.wait_max {
            return Err(failure.into());
        }
        self.failed.push(failure.node.id.clone());
        Ok(())
    }

    /// Pauses, longer each time, with jitter: a hundred prompts that wait must not all ask at once.
    async fn rest(&mut self) {
        let jitter = (self.parts.world.draw() % 1000) as f64 / 1000.0;
        tokio::time::sleep(self.pause.mul_f64(0.5 + jitter / 2.0)).await;
        self.pause = (self.pause * 2).min(*FULL_AGAIN.end());
    }
}

#[cfg(test)]
mod tests;
