//! Hot path. The steps of one started request, also across failures of nodes.
//!
//! When a node dies or KV is lost, the prompt and the tokens sent so far go to another route, and the stream continues.
//! [`Step::index`] shows that no token is lost or repeated. Greedy decoding, or random draws keyed by position, ensures
//! that no token changes.

use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker, ready};

use futures::future::{BoxFuture, FutureExt as _};
use futures::stream::Stream;
use futures::task::AtomicWaker;
use tokio::time::{Instant, Sleep, sleep_until};
use tracing::{info, trace, warn};
use types::{CallerAction, Deadline, Prompt, RefusalKind, Step, TokenId};

use crate::admission::Permit;
use crate::dispatch::{ComputedBy, Dispatch, StartedRequest, StepSource};
use crate::error::ServeError;
use crate::metrics::{Outcome, Stage};
use crate::requests::{RequestEvent, RequestRecord};
use crate::rpc::{DecodeCall, DecodeProgress, Failure};
use crate::watchdog::{TrackedRequest, WaitStage};

/// How often in a row a prefill node may compute the prompt without a step from the decode node afterwards.
/// After that the decode node computes the prompt alone: connectors between the nodes probably fail, and each
/// prefill would give only one token.
const LOSSES_MAX: u32 = 1;

/// A started request, across failures of nodes: a stream that ends after its last step, or after an error. Dropping it
/// cancels the request on every node.
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
    /// Ends the request at its deadline or when the router stops.
    end: OuterEnd,
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

enum State {
    /// The first token has come from the prefill node and is not sent to the client yet.
    First(Box<StartedRequest>),
    Decoding(Decoding),
    /// KV that is held is delivered to a decode node.
    Delivering(BoxFuture<'static, Result<DecodeCall, ServeError>>),
    /// The request starts again on another route.
    Restarting(BoxFuture<'static, Result<StartedRequest, ServeError>>),
    /// The last step, or the error, was returned.
    Ended,
}

/// A decode stream, and the wait for its next step.
struct Decoding {
    call: Box<DecodeCall>,
    wait: WaitGuard,
    /// Ends the wait.
    waker: Waker,
}

/// The drop ends the wait, even if a waker still exists.
struct WaitGuard(Arc<StepWait>);

/// Counts the request at its decode node until the node has sent something. The server does not poll the stream of a
/// client that does not read, so the waker ends the count.
struct StepWait {
    counted: Mutex<Option<TrackedRequest>>,
    reader: AtomicWaker,
}

impl Decoding {
    fn new(call: Box<DecodeCall>) -> Self {
        let wait = Arc::new(StepWait { counted: Mutex::new(None), reader: AtomicWaker::new() });
        Self { call, waker: Arc::clone(&wait).into(), wait: WaitGuard(wait) }
    }
}

impl Drop for WaitGuard {
    fn drop(&mut self) {
        self.0.end();
    }
}

impl StepWait {
    fn begin(&self, cx: &Context<'_>, counted: impl FnOnce() -> TrackedRequest) {
        self.reader.register(cx.waker());
        self.counted().get_or_insert_with(counted);
    }

    fn end(&self) {
        self.counted().take();
    }

    fn counted(&self) -> MutexGuard<'_, Option<TrackedRequest>> {
        self.counted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Wake for StepWait {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.end();
        self.reader.wake();
    }
}

impl fmt::Debug for Continuation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Continuation").field("request_id", &self.prompt.id).finish_non_exhaustive()
    }
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
        let end = OuterEnd::new(&dispatch, prompt.deadline);
        Self { dispatch, prompt, sent: Vec::new(), state, losses: 0, last, end, guards }
    }

    /// Polls the next step. The state is `Ended` after an error.
    fn poll_step(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Step, ServeError>>> {
        loop {
            let next = match std::mem::replace(&mut self.state, State::Ended) {
                State::Ended => return Poll::Ready(None),
                State::First(started) => return Poll::Ready(Some(Ok(self.began(*started)))),
                State::Decoding(mut decoding) => match self.poll_decode(&mut decoding, cx) {
                    Poll::Ready(Ok(step)) => {
                        self.state = State::Decoding(decoding);
                        return Poll::Ready(Some(Ok(step)));
                    }
                    Poll::Ready(Err(failure)) => self.failed(failure, &decoding.call),
                    Poll::Pending => {
                        let end = self.end.poll(cx);
                        if end.is_pending() {
                            self.state = State::Decoding(decoding);
                        }
                        return end.map(|error| Some(Err(error)));
                    }
                },
                State::Delivering(mut delivering) => match delivering.poll_unpin(cx) {
                    Poll::Ready(Ok(call)) => Ok(Self::decoding(Box::new(call))),
                    Poll::Ready(Err(error)) => self.restarting(error),
                    Poll::Pending => {
                        self.state = State::Delivering(delivering);
                        return Poll::Pending;
                    }
                },
                State::Restarting(mut restarting) => match restarting.poll_unpin(cx) {
                    Poll::Ready(started) => {
                        let first = started.and_then(|started| self.restarted(started));
                        return Poll::Ready(Some(first));
                    }
                    Poll::Pending => {
                        self.state = State::Restarting(restarting);
                        return Poll::Pending;
                    }
                },
            };
            match next {
                Ok(state) => self.state = state,
                Err(error) => return Poll::Ready(Some(Err(error))),
            }
        }
    }

    fn decoding(call: Box<DecodeCall>) -> State {
        State::Decoding(Decoding::new(call))
    }

    /// Returns the first step of a start. The state becomes that of the steps after it.
    fn began(&mut self, started: StartedRequest) -> Step {
        self.state = match started.rest {
            StepSource::Decode(call) => Self::decoding(call),
            StepSource::Held(held) => {
                let (dispatch, record) = (self.dispatch.clone(), self.guards.record.clone());
                let deadline = self.prompt.deadline;
                let delivering = async move {
                    let delivering = Box::pin(dispatch.deliver(*held, &record));
                    dispatch.by_deadline(deadline, delivering).await
                };
                State::Delivering(delivering.boxed())
            }
        };
        started.first
    }

    fn poll_decode(&mut self, decoding: &mut Decoding, cx: &mut Context<'_>) -> Poll<Result<Step, Failure>> {
        let Decoding { call, wait: WaitGuard(wait), waker } = decoding;
        wait.begin(cx, || self.dispatch.stages().enter(WaitStage::Decode, &self.guards.record));
        let mut cx = Context::from_waker(waker);
        loop {
            match ready!(call.poll_progress(&mut cx))? {
                DecodeProgress::Arrived { scheme, bytes, waited, moved } => {
                    self.dispatch.parts().metrics.arrived(&scheme, bytes, waited);
                    self.guards.record.kv_arrived(scheme, bytes, waited, moved);
                }
                DecodeProgress::Step { step, report, .. } if step.index == self.next_index() => {
                    self.guards.record.stepped(report);
                    if call.has_worked() {
                        self.dispatch.breakers().succeeded(call.node());
                    }
                    self.losses = 0;
                    wait.end();
                    return Poll::Ready(Ok(step));
                }
                DecodeProgress::Step { step, .. } => {
                    return Poll::Ready(Err(call.wrong_index(step.index, self.next_index())));
                }
            }
        }
    }

    /// Counts the failure of a decode node, or of the KV transfer to it, and continues on another route.
    fn failed(&mut self, failure: Failure, call: &DecodeCall) -> Result<State, ServeError> {
        let route = call.arriving_on();
        self.dispatch.count_failure(&failure, route.as_ref(), self.prompt.deadline);
        self.restarting(failure.into())
    }

    /// Continues on another route after `failure`, with all tokens sent so far appended to the prompt.
    fn restarting(&mut self, failure: ServeError) -> Result<State, ServeError> {
        if !another_route_may_help(&failure) {
            return Err(failure);
        }
        info!(request_id = %self.prompt.id, sent = self.sent.len(), reason = %failure, "request continues on another route");
        self.dispatch.parts().metrics.continuations.inc();
        self.guards.record.note(RequestEvent::Continue { code: failure.outcome() });
        self.losses += 1;
        let by = if self.losses > LOSSES_MAX { ComputedBy::DecodeAlone } else { ComputedBy::Both };
        let prompt = self.prompt.continued(&self.sent);
        let (dispatch, record) = (self.dispatch.clone(), self.guards.record.clone());
        let restarting = async move {
            let starting = Box::pin(dispatch.start(&prompt, by, &record));
            dispatch.by_deadline(prompt.deadline, starting).await
        };
        Ok(State::Restarting(restarting.boxed()))
    }

    /// Returns the first step of another route.
    fn restarted(&mut self, started: StartedRequest) -> Result<Step, ServeError> {
        if started.first.index == self.next_index() {
            return Ok(self.began(started));
        }
        let reason = format!("continued with step {} instead of {}", started.first.index, self.next_index());
        warn!(request_id = %self.prompt.id, reason, "continuation on another route begins at a wrong token, the request fails");
        Err(ServeError::Refused { kind: RefusalKind::Failed, reason })
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
            if let State::Decoding(decoding) = std::mem::replace(&mut self.state, State::Ended) {
                decoding.call.let_end();
            }
            self.guards.outcome.finished();
        }
        step
    }

    fn next_index(&self) -> u32 {
        (self.prompt.n_generated + self.sent.len()) as u32
    }
}

impl Stream for Continuation {
    type Item = Result<Step, ServeError>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let continuation = self.get_mut();
        let Some(step) = ready!(continuation.poll_step(cx)) else { return Poll::Ready(None) };
        let step = continuation.guards.outcome.note(step);
        Poll::Ready(Some(step.map(|step| continuation.give(step))))
    }
}

// === the end from outside ===

/// Ends a request that waits for a step, at its deadline or when the router stops. The timer and the wait are set once for
/// all steps.
struct OuterEnd {
    deadline: Pin<Box<Sleep>>,
    drained: BoxFuture<'static, ()>,
}

impl OuterEnd {
    fn new(dispatch: &Dispatch, deadline: Deadline) -> Self {
        let over = dispatch.parts().drain.over.clone();
        let drained = async move { over.wait().await }.boxed();
        Self { deadline: Box::pin(sleep_until(deadline.instant().into())), drained }
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<ServeError> {
        if self.deadline.as_mut().poll(cx).is_ready() {
            return Poll::Ready(ServeError::DeadlinePassed { reason: "the request's time is up".to_owned() });
        }
        self.drained.poll_unpin(cx).map(|()| ServeError::Draining)
    }
}

/// Returns whether a node caused the failure, rather than the prompt, the deadline or the whole cluster.
fn another_route_may_help(error: &ServeError) -> bool {
    matches!(error, ServeError::Refused { kind, .. } if kind.caller_action() == CallerAction::RetryElsewhere)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::watchdog::StageTracker;

    #[test]
    fn a_request_whose_client_does_not_read_is_not_counted_at_its_decode_node() {
        let (stages, record) = (StageTracker::default(), RequestRecord::of_model("mock"));
        let wait = Arc::new(StepWait { counted: Mutex::new(None), reader: AtomicWaker::new() });
        let (guard, waker) = (WaitGuard(Arc::clone(&wait)), Waker::from(Arc::clone(&wait)));
        let cx = Context::from_waker(Waker::noop());
        for _ in 0..2 {
            wait.begin(&cx, || stages.enter(WaitStage::Decode, &record));
            wait.begin(&cx, || unreachable!("it is counted already"));
            assert_eq!(stages.to_string(), "1 wait at decode");
            waker.wake_by_ref();
            assert_eq!(stages.to_string(), "", "the node has sent something, and no poll follows");
        }
        wait.begin(&cx, || stages.enter(WaitStage::Decode, &record));
        drop(guard);
        assert_eq!(stages.to_string(), "", "the request has ended, and a waker is left");
    }
}
