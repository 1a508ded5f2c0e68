//! The server's side of our headers.

use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::Request;
use axum::middleware::Next;
use axum::response::Response;
use http::HeaderMap;
use tonic::Status;
use tracing::{Instrument, Span, warn};
use types::node::PROTOCOL;

use super::headers;
use crate::telemetry::request_span;

/// Reads the headers of an incoming call, refuses a caller with whom we share no protocol version, and runs the
/// handler, and the stream it answers with, in the request's span.
pub(super) async fn receive(mut request: Request, next: Next) -> Response {
    let request_id = headers::request_id(request.headers());
    let span = request_span(request.uri().path(), request_id.as_ref(), request.headers());
    if let Err(status) = agree(request.headers()) {
        span.in_scope(|| warn!(reason = status.message(), "call refused"));
        return status.into_http();
    }
    if let Some(id) = request_id {
        request.extensions_mut().insert(id);
    }
    let response = next.run(request).instrument(span.clone()).await;
    response.map(|body| Body::new(SpannedBody { body, span }))
}

fn agree(headers: &HeaderMap) -> Result<(), Status> {
    let theirs =
        headers::protocol(headers).map_err(|malformed| Status::invalid_argument(malformed.to_string()))?;
    match theirs.map(|theirs| PROTOCOL.agree(theirs)) {
        None | Some(Ok(_)) => Ok(()),
        Some(Err(mismatch)) => Err(Status::failed_precondition(mismatch.to_string())),
    }
}

/// A body whose frames are made in the request's span. The span ends with it.
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
    ) -> Poll<Option<Result<hyper::body::Frame<Bytes>, axum::Error>>> {
        let this = &mut *self;
        let _entered = this.span.enter();
        Pin::new(&mut this.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        self.body.size_hint()
    }
}
