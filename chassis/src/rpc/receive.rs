//! The server's side of Baton's headers.

use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{ConnectInfo, Request, State};
use axum::middleware::Next;
use axum::response::Response;
use http::{HeaderMap, HeaderValue};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use hyper::body::{Frame, SizeHint};
use tokio::time::Sleep;
use tonic::{Code, Status};
use tracing::{Instrument, Span, warn};
use types::node::{MESSAGE_BYTES_MAX, PROTOCOL};

use super::{headers, roles};
use crate::identity::call::{Accepts, CallRefused, INSTANCE_HEADER, SignedCall};
use crate::identity::{CertName, Identity};
use crate::telemetry::{RareLines, mark_failed, request_span};
use crate::world::World;

/// The timeout for the message of a signed call.
const MESSAGE_WITHIN: Duration = Duration::from_secs(10);
/// The timeout for the message of any other call, as long as for a body over HTTP.
pub(super) const CLIENT_MESSAGE_WITHIN: Duration = Duration::from_secs(30);
/// The largest body: the largest message and gRPC's prefix of five bytes.
const BODY_BYTES_MAX: usize = MESSAGE_BYTES_MAX + 5;
/// Prefixes of the services that clients may call without a signature. All other services are for Baton's
/// processes.
const FOR_CLIENTS: [&str; 3] = ["/baton.v1.Inference/", "/grpc.health.v1.Health/", REFLECTION];
/// The only service whose calls may have many messages, at any time.
const REFLECTION: &str = "/grpc.reflection.";

static CALL_REFUSED: RareLines = RareLines::new();

/// The check of callers on one server: their signatures, and the address that they dialled.
#[derive(Clone, Debug)]
pub struct Callers {
    world: World,
    accepts: Accepts,
}

/// The reason why a call is not served.
#[derive(Debug)]
pub(super) enum CallRejection {
    Refused(Status),
    /// The caller must sign it for this instance, and call again.
    Instance(String),
    /// The caller has cancelled it, or its connection has ended, before its message had arrived.
    Cancelled,
}

impl Callers {
    /// Accepts callers with the cluster's secret and a certificate of the right role, as far as this process has them.
    pub fn known_to(world: &World) -> Self {
        Self { world: world.clone(), accepts: Accepts::Every }
    }

    /// Also refuses calls that were signed for another address than `address`.
    #[must_use]
    pub fn calling(self, address: &str) -> Self {
        Self { accepts: Accepts::Address(address.to_owned()), ..self }
    }

    /// Also serves only calls that were signed for this process in this life, so that a call recorded elsewhere is not
    /// served. The caller learns the process's random name from the answer to its first call.
    #[must_use]
    pub fn calling_this_instance(self) -> Self {
        let instance = format!("{:032x}", u128::from_le_bytes(self.world.nonce()));
        Self { accepts: Accepts::Instance(instance), ..self }
    }

    pub(super) fn identity(&self) -> &Identity {
        self.world.identity()
    }

    /// Checks the caller's role and its signature, and returns the request.
    async fn check(&self, request: Request) -> Result<Request, CallRejection> {
        let identity = self.world.identity();
        let path = request.uri().path().to_owned();
        if FOR_CLIENTS.iter().any(|prefix| path.starts_with(prefix)) {
            return Ok(request);
        }
        if identity.tls().is_some() {
            let checked = roles::check(&path, request.extensions().get::<CertName>());
            checked.map_err(|wrong| refused(&identity.call_refused(wrong)))?;
        }
        if identity.secret().is_none() {
            return Ok(request);
        }
        let shown = identity.check_head(&self.world, request.headers()).map_err(|error| refused(&error))?;
        let (head, body) = request.into_parts();
        let body = message_of(body).await?;
        let call = SignedCall { path: &path, headers: &head.headers, body: &body };
        match identity.check_call(&self.world, shown, call, &self.accepts) {
            Ok(()) => Ok(Request::from_parts(head, Body::from(body))),
            Err(CallRefused::Instance { own }) => Err(CallRejection::Instance(own)),
            Err(error) => Err(refused(&error)),
        }
    }
}

/// Reads the headers of an incoming call. Refuses a caller without a common protocol version or the cluster's secret.
/// Runs the handler and its answer's stream in the request's span.
pub(super) async fn receive(State(callers): State<Callers>, request: Request, next: Next) -> Response {
    let request_id = headers::request_id(request.headers());
    let span = request_span(request.uri().path(), request_id.as_ref(), request.headers());
    let peer = request.extensions().get::<ConnectInfo<SocketAddr>>().map(|ConnectInfo(peer)| *peer);
    let checked = match agree(request.headers()) {
        Ok(()) => callers.check(request).await,
        Err(status) => Err(CallRejection::Refused(status)),
    };
    let mut request = match checked {
        Ok(request) => request,
        Err(CallRejection::Instance(own)) => return sign_for(own),
        Err(CallRejection::Cancelled) => {
            return Status::cancelled("the caller has cancelled the call").into_http();
        }
        Err(CallRejection::Refused(status)) => {
            if let Some(left_out) = CALL_REFUSED.line(status.message()) {
                let (peer, reason) = (peer.map(tracing::field::display), status.message());
                span.in_scope(|| warn!(peer, reason, left_out, "incoming gRPC call refused"));
            }
            return status.into_http();
        }
    };
    if let Some(id) = request_id {
        request.extensions_mut().insert(id);
    }
    if !request.uri().path().starts_with(REFLECTION) {
        request = request.map(|body| Body::new(TimedMessage::new(body)));
    }
    let response = next.run(request).instrument(span.clone()).await;
    mark_error(&span, response.headers());
    response.map(|body| Body::new(SpannedBody { body, span }))
}

fn refused(error: &dyn std::fmt::Display) -> CallRejection {
    CallRejection::Refused(Status::unauthenticated(error.to_string()))
}

/// Reads the message of a signed call.
pub(super) async fn message_of(body: Body) -> Result<Bytes, CallRejection> {
    let collected = tokio::time::timeout(MESSAGE_WITHIN, Limited::new(body, BODY_BYTES_MAX).collect()).await;
    match collected.map_err(|_| refused(&"the call's message did not arrive in time"))? {
        Ok(body) => {
            let body = body.to_bytes();
            if is_whole(&body) { Ok(body) } else { Err(CallRejection::Cancelled) }
        }
        Err(error) if error.is::<LengthLimitError>() => Err(refused(&error)),
        // All other errors are those of the caller's connection.
        Err(_) => Err(CallRejection::Cancelled),
    }
}

/// Returns whether a body has all bytes of its message. The HTTP library ends the body of a cancelled call early, without
/// an error. Each message comes after a flag and its length.
pub(super) fn is_whole(body: &[u8]) -> bool {
    let Some((prefix, message)) = body.split_first_chunk::<5>() else { return false };
    let [_, length @ ..] = *prefix;
    message.len() >= u32::from_be_bytes(length) as usize
}

/// The answer to a call that was signed for another target.
fn sign_for(own: String) -> Response {
    let mut response =
        Status::unauthenticated(CallRefused::Instance { own: own.clone() }.to_string()).into_http();
    response.headers_mut().insert(INSTANCE_HEADER, HeaderValue::try_from(own).expect("digits are a header"));
    response
}

/// Marks the span of a call that ended with an error of the server, by OpenTelemetry's conventions for gRPC.
pub(super) fn mark_error(span: &Span, end: &HeaderMap) {
    use Code::{DataLoss, DeadlineExceeded, Internal, Unavailable, Unimplemented, Unknown};
    let code = Status::from_header_map(end).map(|status| status.code());
    if let Some(Unknown | DeadlineExceeded | Unimplemented | Internal | Unavailable | DataLoss) = code {
        mark_failed(span);
    }
}

fn agree(headers: &HeaderMap) -> Result<(), Status> {
    let theirs =
        headers::protocol(headers).map_err(|malformed| Status::invalid_argument(malformed.to_string()))?;
    match theirs.map(|theirs| PROTOCOL.agree(theirs)) {
        None | Some(Ok(_)) => Ok(()),
        Some(Err(mismatch)) => Err(Status::failed_precondition(mismatch.to_string())),
    }
}

/// The body of a call with one message. It fails if it has not ended in time, so that callers which send a part hold nothing.
pub(super) struct TimedMessage {
    body: Body,
    late: Pin<Box<Sleep>>,
}

impl TimedMessage {
    pub(super) fn new(body: Body) -> Self {
        Self { body, late: Box::pin(tokio::time::sleep(CLIENT_MESSAGE_WITHIN)) }
    }
}

impl HttpBody for TimedMessage {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(cx) {
            return Poll::Ready(frame.map(|frame| frame.map_err(|error| Status::from_error(error.into()))));
        }
        ready!(self.late.as_mut().poll(cx));
        let waited = CLIENT_MESSAGE_WITHIN.as_secs();
        Poll::Ready(Some(Err(Status::deadline_exceeded(format!(
            "the call's message did not arrive within {waited} s"
        )))))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A body that is polled in the request's span. The span ends when the body is dropped.
struct SpannedBody {
    body: Body,
    span: Span,
}

impl HttpBody for SpannedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let this = &mut *self;
        let _entered = this.span.enter();
        let frame = Pin::new(&mut this.body).poll_frame(cx);
        if let Poll::Ready(Some(Ok(frame))) = &frame
            && let Some(trailers) = frame.trailers_ref()
        {
            mark_error(&this.span, trailers);
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
