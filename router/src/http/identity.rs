//! Gives every request an id and a span, every response the id, and every error the form of its path, and counts errors.

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use chassis::telemetry::{mark_failed, request_span};
use http::HeaderValue;
use tracing::{Instrument, debug, error, info};

use super::caller::{REQUEST_ID, REQUEST_ID_OF_ANTHROPIC};
use super::error::{Code, ErrorForm, HttpError};
use super::health;
use crate::accept::Acceptor;
use crate::metrics::RouterMetrics;

/// Adds a [`types::RequestId`] to the request's extensions and to the response's headers.
pub(crate) async fn identify(
    State((acceptor, metrics)): State<(Acceptor, RouterMetrics)>,
    mut request: Request,
    next: Next,
) -> Response {
    let form = ErrorForm::of(request.uri().path());
    let asked = request.headers().get(REQUEST_ID).and_then(|id| id.to_str().ok());
    let id = acceptor.request_id(asked);
    let header = HeaderValue::from_str(id.as_str()).expect("ids are letters, digits and a few plain signs");
    let span = request_span(request.uri().path(), Some(&id), request.headers());
    request.extensions_mut().insert(id);
    let response = answered(&metrics, request, next).instrument(span.clone()).await;
    let mut response = form.given_to(response);
    if response.status().is_server_error() {
        mark_failed(&span);
    }
    if form == ErrorForm::Anthropic {
        response.headers_mut().insert(REQUEST_ID_OF_ANTHROPIC, header.clone());
    }
    response.headers_mut().insert(REQUEST_ID, header);
    response
}

async fn answered(metrics: &RouterMetrics, request: Request, next: Next) -> Response {
    let is_probe = health::PROBES.contains(&request.uri().path());
    let response = next.run(request).await;
    let code = response.extensions().get::<HttpError>().map(|error| error.code);
    if let Some(code) = code.filter(|_| !is_probe) {
        metrics.refused(code.as_str());
    }
    match code {
        Some(Code::Internal) => {
            error!(code = Code::Internal.as_str(), "request failed with an internal error")
        }
        // Probes are sent every few seconds, and their answers say why.
        Some(code) if is_probe => debug!(code = code.as_str(), "probe answered with an error"),
        Some(code) => info!(code = code.as_str(), status = response.status().as_u16(), "request refused"),
        None => {}
    }
    response
}
