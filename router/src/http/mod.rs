//! The HTTP API, compatible with OpenAI's. Only this module reads JSON and uses status codes.
//!
//! Suggested reading order: the path of a request (`api`); its fields (`request_fields`, `fields`,
//! `constraints`, `chat`, `completions`, `prompt_field`, `tokenize`, and `anthropic`,
//! `responses` and `conversion`, whose requests become chats); chats (`router::chat`); answers while they are generated (`router::answers`, [`crate::choice`]); the formats of
//! answers (`answer`, `tools`, `blocks`, `sse`, `logprobs`, `explanation`); requests for other engines (`passthrough`); the live page's chats (`chat_box`); errors (`error`); pages of other origins (`cors`); and the port's
//! connections ([`stall`], [`tls`]).

pub mod api;
pub mod error;
pub mod body;
mod anthropic;
mod answer;
mod blocks;
mod caller;
mod chat;
mod chat_box;
mod completions;
mod constraints;
mod explanation;
mod conversion;
mod cors;
mod fields;
mod health;
mod identity;
mod logprobs;
mod models;
mod openapi;
mod passthrough;
mod prompt_field;
mod request_fields;
mod responses;
mod sse;
mod tokenize;
mod tools;
pub mod stall;
pub mod tls;

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use axum::routing::{get, post};
use axum::{Router, middleware};

pub use api::HttpApi;
use api::RequestHead;
pub use body::BodyLimits;
pub use chat_box::chat_box;
pub use cors::CorsOrigins;
pub use error::{Code, HttpError};
pub(crate) use explanation::{ms, parts_ms, route, worst_gap};
pub use passthrough::{Passthrough, passthrough, passthrough_chat_box};
pub use stall::WriteTimeoutListener;
pub use tls::{Certificate, CertificateError, CertificateFiles};

use crate::accept::Acceptor;
use crate::metrics::RouterMetrics;
use crate::serve::Ready;
use crate::tenants::Client;

/// Returns the API routes. They work only inside [`stack`].
pub fn api(api: HttpApi) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(chat_completions))
        .route("/v1/completions", post(completions))
        .route("/v1/messages", post(messages_of_anthropic))
        .route("/v1/messages/count_tokens", post(anthropic::count_tokens))
        .route("/v1/responses", post(responses))
        .route("/v1/responses/input_tokens", post(responses::input_tokens))
        .route("/v1/embeddings", post(embeddings))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*name}", get(models::one))
        .with_state(api)
}

/// Returns the route of the description of the API.
pub fn description(api: HttpApi) -> Router {
    Router::new().route("/openapi.json", get(openapi::page)).with_state(api)
}

/// Returns the routes `/live`, `/ready` and `/health`.
pub fn health(ready: Arc<dyn Ready>) -> Router {
    Router::new()
        .route("/live", get(health::live))
        .route("/ready", get(health::ready))
        .route("/health", get(health::ready))
        .with_state(ready)
}

/// Adds a request id, a span and the form of errors to all routes, and to requests for unknown paths. Counts the errors.
pub fn stack(routes: Router, acceptor: Acceptor, metrics: RouterMetrics) -> Router {
    routes
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(middleware::from_fn_with_state((acceptor, metrics), identity::identify))
}

async fn chat_completions(
    State(api): State<HttpApi>,
    head: RequestHead,
    body: Body,
) -> Result<Response, HttpError> {
    api.answer(head, body, chat::parse_request).await?.respond().await
}

async fn completions(
    State(api): State<HttpApi>,
    head: RequestHead,
    body: Body,
) -> Result<Response, HttpError> {
    api.answer(head, body, completions::parse_request).await?.respond().await
}

async fn messages_of_anthropic(
    State(api): State<HttpApi>,
    head: RequestHead,
    body: Body,
) -> Result<Response, HttpError> {
    blocks::respond(api.answer(head, body, anthropic::parse_request).await?).await
}

async fn responses(State(api): State<HttpApi>, head: RequestHead, body: Body) -> Result<Response, HttpError> {
    blocks::respond(api.answer(head, body, responses::parse_request).await?).await
}

async fn embeddings(_client: Client) -> HttpError {
    HttpError::new(Code::UnsupportedParameter, "embeddings are not supported: the models here generate text")
}

async fn not_found(uri: http::Uri) -> HttpError {
    HttpError::new(Code::NotFound, format!("no such path: {}", uri.path()))
}

async fn method_not_allowed(method: http::Method, uri: http::Uri) -> HttpError {
    HttpError::new(Code::MethodNotAllowed, format!("{} does not support {method}", uri.path()))
}

#[cfg(test)]
pub(crate) mod tests;
