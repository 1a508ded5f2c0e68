//! The answer to a request for other engines, while it is passed on.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use chassis::{Gate, spawn_guarded};
use futures::future::{BoxFuture, FutureExt as _};
use http::response::Parts;
use tokio::time::{Instant, Sleep, sleep_until, timeout};
use types::{Deadline, RefusalKind};

use super::leg::{BegunLeg, DrainedLeg, EngineRefusal, FailedLeg, LegBytes, LegFailure};
use super::limit::LimitPermit;
use crate::drain::Drain;
use crate::error::ServeError;
use crate::metrics::Outcome;
use crate::requests::RequestRecord;
use crate::tenants::TenantPermit;

/// An answer: the head as the server sent it, and its bytes.
#[derive(Debug)]
pub struct UpstreamAnswer {
    pub head: Parts,
    pub record: RequestRecord,
    pub bytes: AnswerStream,
}

/// The first bytes of an answer, and where the others come from.
pub(super) struct StartedAnswer {
    pub(super) head: Parts,
    pub(super) first: Option<Bytes>,
    pub(super) rest: AnswerSource,
}

/// The source of an answer's bytes after the first.
pub(super) enum AnswerSource {
    /// There are none: the answer is a server's refusal.
    Refusal,
    Legs(OpenLegs),
}

/// The legs of an answer that has begun.
pub(super) struct OpenLegs {
    answering: LegBytes,
    /// The prefill leg, if it has not ended. Its failure ends the answer.
    prefill: Option<DrainedLeg>,
    gate: Gate,
}

/// The time that a prefill leg has for its end after the answer's, so that its connection can be used again.
const PREFILL_END_GRACE: Duration = Duration::from_millis(500);

/// The values that a request holds until its answer ends.
#[derive(Debug)]
pub(super) struct HeldByAnswer {
    pub(super) outcome: Outcome,
    pub(super) _permits: Vec<LimitPermit>,
    pub(super) tenant: Option<Arc<TenantPermit>>,
}

/// The bytes of an answer. Dropping it closes the connections of all legs.
pub struct AnswerStream {
    first: Option<Bytes>,
    /// `None` after the end.
    rest: Option<AnswerSource>,
    held: HeldByAnswer,
    deadline: Pin<Box<Sleep>>,
    /// The wait for the end of the drain, begun once for all bytes.
    drained: BoxFuture<'static, ()>,
}

// === impl StartedAnswer ===

impl StartedAnswer {
    pub(super) fn of_legs(begun: BegunLeg, prefill: Option<DrainedLeg>, gate: &Gate) -> Self {
        let BegunLeg { head, first, rest } = begun;
        Self {
            head,
            first,
            rest: AnswerSource::Legs(OpenLegs { answering: rest, prefill, gate: gate.clone() }),
        }
    }

    pub(super) fn of_refusal(refusal: EngineRefusal) -> Self {
        Self { head: refusal.head, first: Some(refusal.body), rest: AnswerSource::Refusal }
    }
}

// === impl OpenLegs ===

impl OpenLegs {
    /// Returns the next bytes; `None` at the end. Cancel-safe.
    async fn next(&mut self) -> Result<Option<Bytes>, FailedLeg> {
        loop {
            let Some(prefill) = &mut self.prefill else { return self.answering.next().await };
            tokio::select! {
                biased;
                bytes = self.answering.next() => {
                    let bytes = bytes?;
                    if bytes.is_none() {
                        self.end_prefill();
                    }
                    return Ok(bytes);
                }
                ended = prefill => {
                    self.prefill = None;
                    ended?;
                }
            }
        }
    }

    /// Lets the prefill leg end after the answer. The prefill leg's own answer is not needed then.
    fn end_prefill(&mut self) {
        if let Some(prefill) = self.prefill.take() {
            let ending = async move { drop(timeout(PREFILL_END_GRACE, prefill).await) };
            spawn_guarded(&self.gate, "upstream prefill leg", ending).detach();
        }
    }
}

// === impl AnswerStream ===

impl AnswerStream {
    pub(super) fn new(
        first: Option<Bytes>,
        rest: AnswerSource,
        held: HeldByAnswer,
        deadline: Deadline,
        drain: &Drain,
    ) -> Self {
        let deadline = Box::pin(sleep_until(deadline.instant().into()));
        let over = drain.over.clone();
        let drained = async move { over.wait().await }.boxed();
        Self { first, rest: Some(rest), held, deadline, drained }
    }

    /// Counts generated tokens against the tenant's limits, if it has limits.
    pub fn generated(&self, n_tokens: impl FnOnce() -> usize) {
        if let Some(permit) = &self.held.tenant {
            let now = Instant::now();
            (0..n_tokens()).for_each(|_| permit.generated(now));
        }
    }

    /// Returns the next bytes; `None` at the end of the answer, and after an error. Cancel-safe.
    pub async fn next(&mut self) -> Result<Option<Bytes>, ServeError> {
        if let Some(first) = self.first.take() {
            self.end_if_over();
            return Ok(Some(first));
        }
        let next = match &mut self.rest {
            None => return Ok(None),
            Some(AnswerSource::Refusal) => {
                self.rest = None;
                return Ok(None);
            }
            Some(AnswerSource::Legs(legs)) => tokio::select! {
                biased;
                next = legs.next() => next.map_err(ServeError::from),
                () = &mut self.deadline => {
                    Err(ServeError::DeadlinePassed { reason: "the request's time is up".to_owned() })
                }
                () = &mut self.drained => Err(ServeError::Draining),
            },
        };
        match self.held.outcome.note(next) {
            Ok(Some(bytes)) => {
                self.end_if_over();
                Ok(Some(bytes))
            }
            Ok(None) => {
                self.rest = None;
                self.held.outcome.finished();
                Ok(None)
            }
            Err(error) => {
                self.rest = None;
                Err(error)
            }
        }
    }

    /// Ends the request with its last bytes, because a server does not ask for more than the length of an answer.
    fn end_if_over(&mut self) {
        if let Some(AnswerSource::Legs(legs)) = &mut self.rest
            && legs.answering.is_over()
        {
            legs.end_prefill();
            self.rest = None;
            self.held.outcome.finished();
        }
    }
}

impl fmt::Debug for AnswerStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AnswerStream").field("held", &self.held).finish_non_exhaustive()
    }
}

impl From<FailedLeg> for ServeError {
    fn from(failed: FailedLeg) -> Self {
        let FailedLeg { role, url, why } = failed;
        let role = role.as_str();
        match why {
            LegFailure::Unreachable(why) => {
                Self::NoNodes { reason: format!("the {role} server {url} is not reached: {why}") }
            }
            LegFailure::Unanswered(why) => {
                let reason = format!("the {role} server {url} did not finish its answer: {why}");
                Self::Refused { kind: RefusalKind::Failed, reason }
            }
            LegFailure::Refused(refusal) => {
                let status = refusal.head.status;
                let reason = format!("the {role} server {url} answered {status}");
                Self::Refused { kind: kind_of(status.as_u16()), reason }
            }
        }
    }
}

/// Returns the outcome of a request that an engine's error status means.
pub(super) fn kind_of(status: u16) -> RefusalKind {
    match status {
        429 => RefusalKind::Full,
        400..500 => RefusalKind::Invalid,
        _ => RefusalKind::Failed,
    }
}
