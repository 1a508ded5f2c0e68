//! One leg of a request: its call to one server.

use axum::body::HttpBody as _;
use bytes::Bytes;
use futures::future::BoxFuture;
use http::Request;
use http::response::Parts;
use http_body_util::{BodyExt as _, Full, Limited};
use prometheus::IntCounterVec;
use tokio::sync::watch;
use tokio::time::Instant;
use types::in_full;

use super::client::{AnswerBytes, EngineClient, Unanswered};
use super::members::{Health, LegPlace, LegRole};

/// The largest answer of a leg that the router reads as a whole: a refusal, or the answer of a vLLM prefill leg.
const WHOLE_BYTES_MAX: usize = 64 << 20;

/// A call that is not sent yet. Dropping it, or anything that follows from it, ends the call on the server.
#[derive(Debug)]
pub(super) struct Leg {
    pub(super) role: LegRole,
    pub(super) client: EngineClient,
    pub(super) request: Request<Full<Bytes>>,
    pub(super) place: LegPlace,
    pub(super) counter: IntCounterVec,
}

/// A leg whose answer has begun: the head, the first bytes, and the source of the rest.
#[derive(Debug)]
pub(super) struct BegunLeg {
    pub(super) head: Parts,
    /// `None`: the answer has no bytes.
    pub(super) first: Option<Bytes>,
    pub(super) rest: LegBytes,
}

/// The bytes of a leg's answer after the first. Dropping it closes the leg's connection.
#[derive(Debug)]
pub(super) struct LegBytes {
    body: AnswerBytes,
    open: OpenLeg,
}

/// A leg until its end, which it counts.
#[derive(Debug)]
struct OpenLeg {
    role: LegRole,
    place: LegPlace,
    counter: IntCounterVec,
    outcome: &'static str,
}

/// A leg that failed, and where.
#[derive(Debug)]
pub(super) struct FailedLeg {
    pub(super) role: LegRole,
    pub(super) url: String,
    pub(super) why: LegFailure,
}

#[derive(Debug)]
pub(super) enum LegFailure {
    /// The server answered with an error status.
    Refused(Box<EngineRefusal>),
    /// No connection to the server was made. The text is the reason.
    Unreachable(String),
    /// The server gave no whole answer.
    Unanswered(String),
}

/// An answer with an error status, as the server sent it.
#[derive(Debug)]
pub(super) struct EngineRefusal {
    pub(super) head: Parts,
    pub(super) body: Bytes,
}

/// A leg whose answer is read and not kept.
pub(super) type DrainedLeg = BoxFuture<'static, Result<(), FailedLeg>>;

/// The labels of a leg's outcome.
pub(crate) const LEG_OUTCOMES: [&str; 4] = ["finished", "refused", "failed", "cancelled"];

impl Leg {
    /// Sends the request, and waits for the first bytes of an answer without an error. Fails when a health check of the
    /// server fails before.
    pub(super) async fn begin(self) -> Result<BegunLeg, FailedLeg> {
        let Self { role, client, request, place, counter } = self;
        let mut checks = place.checks();
        let mut open = OpenLeg { role, place, counter, outcome: "cancelled" };
        let answered = tokio::select! {
            biased;
            answered = client.send(request) => answered,
            () = down(&mut checks) => Err(Unanswered::Down),
        };
        let (head, body) = match answered {
            Ok(answer) => answer.into_parts(),
            Err(why) => return Err(open.unanswered(&why)),
        };
        if !head.status.is_success() {
            return Err(open.refused(head, body).await);
        }
        let mut rest = LegBytes { body, open };
        let first = tokio::select! {
            biased;
            first = rest.next() => Some(first?),
            () = down(&mut checks) => None,
        };
        let Some(first) = first else { return Err(rest.open.unanswered(&Unanswered::Down)) };
        rest.open.place.succeeded();
        Ok(BegunLeg { head, first, rest })
    }

    /// Sends the request, and waits for the end of the answer, which is not kept.
    pub(super) fn drain(self) -> DrainedLeg {
        Box::pin(async move {
            let mut rest = self.begin().await?.rest;
            while rest.next().await?.is_some() {}
            Ok(())
        })
    }

    /// Sends the request, and waits for the whole answer.
    pub(super) async fn whole(self) -> Result<Bytes, FailedLeg> {
        let BegunLeg { first, mut rest, .. } = self.begin().await?;
        let mut whole = first.unwrap_or_default().to_vec();
        while let Some(bytes) = rest.next().await? {
            if whole.len() + bytes.len() > WHOLE_BYTES_MAX {
                let why = format!("the answer has more than {WHOLE_BYTES_MAX} bytes");
                return Err(rest.open.unanswered(&Unanswered::Broken(why)));
            }
            whole.extend_from_slice(&bytes);
        }
        Ok(whole.into())
    }
}

/// Returns when a health check has failed. Cancel-safe.
async fn down(checks: &mut watch::Receiver<Health>) {
    // The leg holds the member, and so the sender.
    let _ = checks.wait_for(|found| *found == Health::Down).await;
}

impl LegBytes {
    /// Returns whether all bytes were returned. The length of an answer says so before [`next`](Self::next)
    /// returns `None`.
    pub(super) fn is_over(&self) -> bool {
        self.body.is_end_stream()
    }

    /// Returns the next bytes; `None` at the end of the answer. Cancel-safe.
    pub(super) async fn next(&mut self) -> Result<Option<Bytes>, FailedLeg> {
        loop {
            match self.body.frame().await {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(bytes) if !bytes.is_empty() => {
                        if self.is_over() {
                            self.open.outcome = "finished";
                        }
                        return Ok(Some(bytes));
                    }
                    _ => {}
                },
                Some(Err(error)) => return Err(self.open.unanswered(&Unanswered::Broken(in_full(&error)))),
                None => {
                    self.open.outcome = "finished";
                    return Ok(None);
                }
            }
        }
    }
}

impl OpenLeg {
    fn unanswered(&mut self, why: &Unanswered) -> FailedLeg {
        self.outcome = "failed";
        self.place.unanswered(self.role, why, Instant::now());
        self.failure(match why {
            Unanswered::Unreachable(_) => LegFailure::Unreachable(why.to_string()),
            Unanswered::Broken(_) | Unanswered::Down => LegFailure::Unanswered(why.to_string()),
        })
    }

    /// Reads an answer with an error status. Only failed work counts against the server: one without room works
    /// well.
    async fn refused(&mut self, head: Parts, body: AnswerBytes) -> FailedLeg {
        match Limited::new(body, WHOLE_BYTES_MAX).collect().await {
            Err(error) => self.unanswered(&Unanswered::Broken(in_full(&*error))),
            Ok(body) => {
                self.outcome = "refused";
                if matches!(head.status.as_u16(), 500 | 502 | 504) {
                    self.place.failed(Instant::now());
                }
                let body = body.to_bytes();
                self.failure(LegFailure::Refused(Box::new(EngineRefusal { head, body })))
            }
        }
    }

    fn failure(&self, why: LegFailure) -> FailedLeg {
        FailedLeg { role: self.role, url: self.place.address().base.clone(), why }
    }
}

impl Drop for OpenLeg {
    fn drop(&mut self) {
        self.counter.with_label_values(&[self.role.as_str(), self.outcome]).inc();
    }
}

impl FailedLeg {
    /// Returns whether another server may do what this one did not. A refusal of the request itself would be
    /// the same there.
    pub(super) fn is_retryable(&self) -> bool {
        match &self.why {
            LegFailure::Unreachable(_) | LegFailure::Unanswered(_) => true,
            LegFailure::Refused(refusal) => {
                let status = refusal.head.status;
                status.is_server_error() || matches!(status.as_u16(), 408 | 429)
            }
        }
    }

    pub(super) fn code(&self) -> &'static str {
        match self.why {
            LegFailure::Unreachable(_) => "no_nodes",
            LegFailure::Unanswered(_) => "failed",
            LegFailure::Refused(_) => "refused",
        }
    }
}
