//! The HTTP door: OpenAI's API. The one place that knows JSON and status codes.
//!
//! Suggested reading order: a request's way (`door`), what it may say (`request_fields`, `fields`, `messages`, `chat`, `completions`), one
//! answer in the making ([`crate::choice`]), how answers are written (`answer`, `sse`, `logprobs`), and what is wrong
//! (`error`).

pub mod door;
pub mod error;
pub mod body;
mod answer;
mod caller;
mod chat;
mod completions;
mod fields;
mod health;
mod identity;
mod logprobs;
mod messages;
mod models;
mod request_fields;
mod sse;
pub mod stall;

use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use axum::routing::{get, post};
use axum::{Extension, Router, middleware};
use http::HeaderMap;
use types::RequestId;

pub use body::BodyLimits;
pub use door::Door;
pub use error::{Code, HttpError};
pub use stall::ImpatientListener;

use crate::accept::Acceptor;

/// The API. It works inside of [`stack`] only.
pub fn api(door: Door) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(chat_completions))
        .route("/v1/completions", post(completions))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*name}", get(models::one))
        .with_state(door)
}

/// `/live`, `/ready` and `/health`.
pub fn health(door: Door) -> Router {
    Router::new()
        .route("/live", get(health::live))
        .route("/ready", get(health::ready))
        .route("/health", get(health::ready))
        .with_state(door)
}

/// What every path has around it: a request id, a span, and errors in OpenAI's shape also where there is no such path.
pub fn stack(routes: Router, acceptor: Acceptor) -> Router {
    routes
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(middleware::from_fn_with_state(acceptor, identity::identify))
}

async fn chat_completions(
    State(door): State<Door>,
    Extension(id): Extension<RequestId>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, HttpError> {
    door.answer(id, headers, body, chat::understand).await
}

async fn completions(
    State(door): State<Door>,
    Extension(id): Extension<RequestId>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, HttpError> {
    door.answer(id, headers, body, completions::understand).await
}

async fn not_found(uri: http::Uri) -> HttpError {
    HttpError::new(Code::NotFound, format!("no such path: {}", uri.path()))
}

async fn method_not_allowed(method: http::Method, uri: http::Uri) -> HttpError {
    HttpError::new(Code::MethodNotAllowed, format!("{} is not for {method}", uri.path()))
}

#[cfg(test)]
mod tests;
