//! The steps of one started request, also across failures of nodes.
//!
//! When a node dies or KV is lost, the prompt and the tokens sent so far go to another route, and the stream continues.
//! [`Step::index`] shows that no token is lost or repeated. Greedy decoding, or random draws keyed by position, ensures
//! that no token changes.

use futures::Stream;
use tokio::time::Instant;
use tracing::{info, trace, warn};
use types::{CallerAction, Prompt, RefusalKind, Step, TokenId};

use crate::admission::Permit;
use crate::dispatch::{ComputedBy, Dispatch, StartedRequest, StepSource};
use crate::error::ServeError;
use crate::metrics::{Outcome, Stage};
use crate::requests::{RequestEvent, RequestRecord};
use crate::rpc::{DecodeCall, DecodeProgress, Failure};
use crate::watchdog::WaitStage;

/// The number of times in a row that a prompt is computed for a decode node that then gives no step. After
/// them, the decode node computes the prompt alone: connectors between the nodes fail, and each prefill would
/// yield only one token.
const LOSSES_MAX: u32 = 1;

/// A started request, across failures of nodes. Dropping it cancels the request on every node.
#[derive(Debug)]
pub(crate) struct Continuation {
    dispatch: Dispatch,
    prompt: Prompt,
    /// The tokens that this stream has returned so far.
    sent: Vec<TokenId>,
    state: State,
    /// The number of starts in a row that gave only the prefill node's step, because the KV was lost.
    losses: u32,
    /// The time of the last returned step.
    last: Instant,
    guards: RequestGuards,
}

/// The values that a request holds until it ends, and that are released on drop.
#[derive(Debug)]
pub(crate) struct RequestGuards {
    /// The right to be served, held only to be released on drop.
    #[allow(dead_code, reason = "its drop is what counts")]
    pub(crate) permit: Permit,
    pub(crate) outcome: Outcome,
    pub(crate) record: RequestRecord,
}

#[derive(Debug)]
enum State {
    /// The first token has come from the prefill node and is not sent to the client yet.
    First(Box<StartedRequest>),
    Running(StepSource),
    /// The last step, or the error, was returned.
    Ended,
}

impl Continuation {
    pub(crate) fn new(
        dispatch: Dispatch,
        prompt: Prompt,
        started: StartedRequest,
        guards: RequestGuards,
    ) -> Self {
        let last = dispatch.parts().world.now();
        let prompt = Prompt { model: started.model.clone(), ..prompt };
        let state = State::First(Box::new(started));
        Self { dispatch, prompt, sent: Vec::new(), state, losses: 0, last, guards }
    }

    pub(crate) fn into_steps(self) -> impl Stream<Item = Result<Step, ServeError>> + Send {
        futures::stream::unfold(self, |mut continuation| async move {
            let item = continuation.next().await?;
            Some((item, continuation))
        })
    }

    async fn next(&mut self) -> Option<Result<Step, ServeError>> {
        let state = std::mem::replace(&mut self.state, State::Ended);
        let (dispatch, deadline) = (self.dispatch.clone(), self.prompt.deadline);
        let step = match state {
            State::Ended => return None,
            State::First(started) => {
                let StartedRequest { first, rest, .. } = *started;
                self.state = State::Running(rest);
                Ok(first)
            }
            State::Running(rest) => dispatch.by_deadline(deadline, self.step(rest)).await,
        };
        let step = self.guards.outcome.note(step);
        Some(step.map(|step| self.give(step)))
    }

    /// Returns the next step from `rest`, or from another route if `rest` fails.
    async fn step(&mut self, rest: StepSource) -> Result<Step, ServeError> {
        let failure = match self.decode_of(rest).await {
            Ok(decode) => match self.step_of(decode).await {
                Ok(step) => return Ok(step),
                Err(failure) => {
                    let now = self.dispatch.parts().world.now();
                    self.dispatch.breakers().failed(&failure.node, &failure.refusal, None, now);
                    failure.into()
                }
            },
            Err(error) => error,
        };
        self.go_on(failure).await
    }

    /// Returns the decode stream of `rest`. KV that is still held is delivered first.
    async fn decode_of(&self, rest: StepSource) -> Result<Box<DecodeCall>, ServeError> {
        match rest {
            StepSource::Decode(decode) => Ok(decode),
            StepSource::Held(held) => {
                Box::pin(self.dispatch.deliver(*held, &self.guards.record)).await.map(Box::new)
            }
        }
    }

    async fn step_of(&mut self, mut decode: Box<DecodeCall>) -> Result<Step, Failure> {
        let _waiting = self.dispatch.stages().enter(WaitStage::Decode, &self.guards.record);
        loop {
            match decode.progress().await? {
                DecodeProgress::Arrived { scheme, bytes, waited, moved } => {
                    self.dispatch.parts().metrics.arrived(&scheme, bytes, waited);
                    self.guards.record.kv_arrived(scheme, bytes, waited, moved);
                }
                DecodeProgress::Step(step, report) if step.index == self.next_index() => {
                    self.guards.record.stepped(report);
                    if decode.has_worked() {
                        self.dispatch.breakers().succeeded(decode.node());
                    }
                    self.losses = 0;
                    self.state = State::Running(StepSource::Decode(decode));
                    return Ok(step);
                }
                DecodeProgress::Step(step, _) => {
                    return Err(decode.wrong_index(step.index, self.next_index()));
                }
            }
        }
    }

    /// Continues on another route after `failure`, with all tokens sent so far appended to the prompt.
    async fn go_on(&mut self, failure: ServeError) -> Result<Step, ServeError> {
        if !another_route_may_help(&failure) {
            return Err(failure);
        }
        info!(request_id = %self.prompt.id, sent = self.sent.len(), reason = %failure, "request continues on another route");
        self.dispatch.parts().metrics.continuations.inc();
        self.guards.record.note(RequestEvent::Continue { code: failure.outcome() });
        self.losses += 1;
        let by = if self.losses > LOSSES_MAX { ComputedBy::DecodeAlone } else { ComputedBy::Both };
        let prompt = self.prompt.continued(&self.sent);
        let started = Box::pin(self.dispatch.start(&prompt, by, &self.guards.record)).await?;
        if started.first.index != self.next_index() {
            let reason =
                format!("continued with step {} instead of {}", started.first.index, self.next_index());
            warn!(request_id = %self.prompt.id, reason, "continuation on another route begins at a wrong token, the request fails");
            return Err(ServeError::Refused { kind: RefusalKind::Failed, reason });
        }
        self.state = State::Running(started.rest);
        Ok(started.first)
    }

    /// Records a step in metrics and progress, just before it is returned.
    fn give(&mut self, step: Step) -> Step {
        self.dispatch.stages().moved();
        trace!(target: "walk", request = %self.prompt.id, index = step.index, "token received for the client");
        let metrics = &self.dispatch.parts().metrics;
        let now = self.dispatch.parts().world.now();
        if self.sent.len() == 1 {
            metrics.stage(Stage::HandoverGap, now - self.last);
        }
        let of_model = self.guards.outcome.metrics();
        if !self.sent.is_empty() {
            of_model.token_gap.observe((now - self.last).as_secs_f64());
        }
        of_model.output_tokens.inc();
        self.guards.record.gave_token();
        self.last = now;
        self.sent.push(step.token);
        if step.finish.is_some() {
            self.state = State::Ended;
            self.guards.outcome.finished();
        }
        step
    }

    fn next_index(&self) -> u32 {
        (self.prompt.n_generated + self.sent.len()) as u32
    }
}

/// Returns whether a node caused the failure, rather than the prompt, the deadline or the whole cluster.
fn another_route_may_help(error: &ServeError) -> bool {
    matches!(error, ServeError::Refused { kind, .. } if kind.caller_action() == CallerAction::RetryElsewhere)
}
