//! Converts errors to the form that OpenAI clients expect. No other file has status codes.

use std::error::Error;
use std::time::Duration;

use axum::Json;
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::response::{IntoResponse, Response};
use http::{HeaderValue, StatusCode, header};
use serde::Serialize;
use types::{CallerAction, RefusalKind};

use crate::error::{AcceptError, RequestError, ServeError, whole_seconds};
use crate::tenants::Limit;

macro_rules! codes {
    ($($name:ident = $word:literal, $status:ident, $class:ident, $meaning:literal;)*) => {
        /// The error code for programs. `docs/errors.md` lists all codes.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Code { $(#[doc = $meaning] $name,)* }

        impl Code {
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            pub fn as_str(self) -> &'static str {
                match self { $(Self::$name => $word,)* }
            }

            pub fn status(self) -> StatusCode {
                match self { $(Self::$name => StatusCode::$status,)* }
            }

            fn class(self) -> Class {
                match self { $(Self::$name => Class::$class,)* }
            }

            /// Returns whether the cluster is at fault, and not the request, its deadline or the load.
            pub(crate) fn is_fault(self) -> bool {
                matches!(self.class(), Class::Unavailable | Class::Server)
            }

            /// Returns the code's description in `docs/errors.md`.
            pub fn meaning(self) -> &'static str {
                match self { $(Self::$name => $meaning,)* }
            }
        }
    };
}

codes! {
    InvalidJson = "invalid_json", BAD_REQUEST, Request, "The body is not JSON, or not UTF-8.";
    InvalidValue = "invalid_value", BAD_REQUEST, Request, "A field or header has a wrong type, or a value out of range.";
    MissingParameter = "missing_required_parameter", BAD_REQUEST, Request, "A required field is absent.";
    UnsupportedParameter = "unsupported_parameter", BAD_REQUEST, Request, "A field uses a feature that Baton does not have, and that cannot be ignored.";
    ContextLength = "context_length_exceeded", BAD_REQUEST, Request, "The prompt, or the prompt and the tokens asked for, do not fit into the model's context, or into the tenant's.";
    Template = "template_refused", BAD_REQUEST, Request, "The model's chat template refuses the messages.";
    TooLong = "too_long", BAD_REQUEST, Request, "The sequence does not fit into the memory of a node, even if the node is empty.";
    Invalid = "invalid", BAD_REQUEST, Request, "A node found the request at fault.";
    InvalidApiKey = "invalid_api_key", UNAUTHORIZED, Request, "The request has no API key, or one that the router does not know.";
    ModelNotFound = "model_not_found", NOT_FOUND, Request, "No such model is served here.";
    NotFound = "not_found", NOT_FOUND, Request, "No such path.";
    MethodNotAllowed = "method_not_allowed", METHOD_NOT_ALLOWED, Request, "The path exists, but not for this method.";
    BodyTimeout = "body_timeout", REQUEST_TIMEOUT, Request, "The request's body did not arrive in time.";
    BodyTooLarge = "body_too_large", BAD_REQUEST, Request, "The request's body is larger than the router accepts.";
    Overloaded = "overloaded", TOO_MANY_REQUESTS, Overloaded, "The request's line is full, the request would miss its objective, or too much text waits to be tokenized. Come back after the time in Retry-After.";
    TenantRequests = "tenant_requests", TOO_MANY_REQUESTS, Overloaded, "The tenant has as many concurrent requests as it may have.";
    TenantTokens = "tenant_tokens_per_minute", TOO_MANY_REQUESTS, Overloaded, "The tenant has used its tokens per minute. Come back after the time in Retry-After.";
    Full = "full", TOO_MANY_REQUESTS, Overloaded, "The sequence got no KV room within `router.wait_ms`, or every node's line of prompts that wait for room is full.";
    Queue = "queue", TOO_MANY_REQUESTS, Overloaded, "Every prefill node has more work queued than its limit.";
    Cancelled = "cancelled", REQUEST_TIMEOUT, Request, "The request was cancelled before it was answered.";
    NoNodes = "no_nodes", SERVICE_UNAVAILABLE, Unavailable, "No usable pair of nodes, or the router does not know its nodes yet.";
    Draining = "draining", SERVICE_UNAVAILABLE, Unavailable, "The router, or the nodes that could serve the request, are being stopped.";
    Mismatch = "mismatch", SERVICE_UNAVAILABLE, Unavailable, "The nodes' models or KV layouts differ.";
    Protocol = "protocol", SERVICE_UNAVAILABLE, Unavailable, "The nodes and the router have no protocol version in common.";
    Deadline = "deadline", GATEWAY_TIMEOUT, Timeout, "The request's deadline passed (`x-baton-timeout-ms`, or the setting `deadline_ms`).";
    Landing = "landing", BAD_GATEWAY, Server, "The memory reserved for the request's KV was lost, on every attempt.";
    Wire = "wire", BAD_GATEWAY, Server, "The connection between the nodes broke, on every attempt.";
    NodeFailed = "failed", BAD_GATEWAY, Server, "The nodes failed while they worked on the request, on every attempt.";
    Internal = "internal", INTERNAL_SERVER_ERROR, Server, "A bug in Baton.";
}

/// OpenAI's error classes, its field `type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    Request,
    Overloaded,
    Unavailable,
    Timeout,
    Server,
}

impl Class {
    fn as_str(self) -> &'static str {
        match self {
            Self::Request => "invalid_request_error",
            Self::Overloaded => "rate_limit_error",
            Self::Unavailable => "service_unavailable_error",
            Self::Timeout => "timeout_error",
            Self::Server => "server_error",
        }
    }
}

/// The field of Anthropic's API that asks a server to store a conversation.
pub(super) const THREAD: &str = "thread";

/// An error as a client sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpError {
    pub code: Code,
    /// The field or header at fault, if there is one.
    pub param: Option<String>,
    pub message: String,
    pub retry_after: Option<Duration>,
}

impl HttpError {
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, param: None, message: message.into(), retry_after: None }
    }

    #[must_use]
    pub fn context(self, param: impl Into<String>) -> Self {
        Self { param: Some(param.into()), ..self }
    }

    /// Replaces the name of the field at fault, for an endpoint in which it has another one.
    #[must_use]
    pub(crate) fn renamed(self, names: FieldNames) -> Self {
        let Some(old) = &self.param else { return self };
        let Some(new) = name_at_endpoint(names, old) else { return self };
        let message = match self.message.strip_prefix(old.as_str()) {
            Some(rest) => format!("{new}{rest}"),
            None => self.message.replacen(&format!(" of {old} "), &format!(" of {new} "), 1),
        };
        Self { param: Some(new), message, ..self }
    }

    /// Returns OpenAI's error object: the body of a response, or the data of an `error` event in a stream.
    pub(crate) fn body(&self) -> ErrorBody<'_> {
        let error = ErrorFields {
            message: &self.message,
            class: self.code.class().as_str(),
            param: self.param.as_deref(),
            code: self.code.as_str(),
        };
        ErrorBody { error }
    }
}

/// Names of fields in a chat, each with the name at an endpoint. The first that fits counts. A name that begins with `]`
/// follows the index of a list.
pub(crate) type FieldNames = &'static [(&'static str, &'static str)];

/// Returns the endpoint's name of a field that is in a chat at the path `param`; `None`: it is the same.
fn name_at_endpoint(names: FieldNames, param: &str) -> Option<String> {
    let renamed = |(in_chat, name): &(&str, &str)| {
        if in_chat.starts_with(']') {
            return param.contains(in_chat).then(|| param.replacen(in_chat, name, 1));
        }
        let rest = param.strip_prefix(in_chat)?;
        (rest.is_empty() || rest.starts_with(['.', '['])).then(|| format!("{name}{rest}"))
    };
    names.iter().find_map(renamed)
}

/// The form of errors' JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ErrorForm {
    OpenAi,
    Anthropic,
}

impl ErrorForm {
    /// Returns the form that a path's clients expect.
    pub(crate) fn of(path: &str) -> Self {
        match path.strip_prefix("/v1/messages") {
            Some(rest) if rest.is_empty() || rest.starts_with('/') => Self::Anthropic,
            _ => Self::OpenAi,
        }
    }

    /// Gives an error's response this form. Other responses stay as they are.
    pub(crate) fn given_to(self, response: Response) -> Response {
        match response.extensions().get::<HttpError>().filter(|_| self == Self::Anthropic) {
            Some(error) => {
                let body = Json(error.anthropic_body()).into_response().into_body();
                response.map(|_| body)
            }
            None => response,
        }
    }
}

impl HttpError {
    /// Returns the data of an `error` event in a stream.
    pub(crate) fn data(&self, form: ErrorForm) -> String {
        match form {
            ErrorForm::OpenAi => serde_json::to_string(&self.body()).expect("an error can be written"),
            ErrorForm::Anthropic => self.anthropic_body().to_string(),
        }
    }

    /// Returns Anthropic's error object. Its types follow from the status.
    pub(crate) fn anthropic_body(&self) -> serde_json::Value {
        let kind = match self.code.status() {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::NOT_FOUND => "not_found_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
            StatusCode::GATEWAY_TIMEOUT => "timeout_error",
            status if status.is_client_error() => "invalid_request_error",
            _ => "api_error",
        };
        let mut error = serde_json::json!({"type": kind, "message": self.message});
        // After an error with these details, Anthropic's clients send the whole conversation, without a
        // thread.
        if self.code == Code::UnsupportedParameter && self.param.as_deref() == Some(THREAD) {
            error["details"] =
                serde_json::json!({"error_code": "thread_unsupported_request", "unsupported": [THREAD]});
        }
        serde_json::json!({"type": "error", "error": error})
    }
}

#[derive(Debug, Serialize)]
pub(crate) struct ErrorBody<'a> {
    error: ErrorFields<'a>,
}

#[derive(Debug, Serialize)]
struct ErrorFields<'a> {
    message: &'a str,
    #[serde(rename = "type")]
    class: &'static str,
    param: Option<&'a str>,
    code: &'static str,
}

impl From<&AcceptError> for Code {
    fn from(error: &AcceptError) -> Self {
        match error {
            AcceptError::Missing { .. } => Self::MissingParameter,
            AcceptError::Invalid { .. } => Self::InvalidValue,
            AcceptError::Unsupported { .. } => Self::UnsupportedParameter,
            AcceptError::TooLong { .. } | AcceptError::TenantContext { .. } => Self::ContextLength,
            AcceptError::Unauthorized { .. } => Self::InvalidApiKey,
            AcceptError::TenantLimit(reached) => code_of_limit(reached.limit),
            AcceptError::Template { .. } => Self::Template,
            AcceptError::UnknownModel { .. } => Self::ModelNotFound,
            AcceptError::NoNodes { .. } => Self::NoNodes,
        }
    }
}

impl From<AcceptError> for HttpError {
    fn from(error: AcceptError) -> Self {
        let (code, retry_after) = (Code::from(&error), retry_after(error.caller_action()));
        Self { retry_after, ..Self::new(code, error.to_string()).context(error.param()) }
    }
}

impl From<ServeError> for HttpError {
    fn from(error: ServeError) -> Self {
        Self {
            retry_after: retry_after(error.caller_action()),
            ..Self::new(Code::from(&error), error.to_string())
        }
    }
}

impl From<QueryRejection> for HttpError {
    fn from(rejection: QueryRejection) -> Self {
        // The reason begins with the field at fault.
        let reason = rejection.source().map_or_else(|| rejection.body_text(), ToString::to_string);
        match reason.split_once(": ").map(|(param, _)| param.to_owned()) {
            Some(param) => Self::new(Code::InvalidValue, reason).context(param),
            None => Self::new(Code::InvalidValue, reason),
        }
    }
}

impl From<PathRejection> for HttpError {
    fn from(rejection: PathRejection) -> Self {
        Self::new(Code::InvalidValue, rejection.body_text())
    }
}

impl From<RequestError> for HttpError {
    fn from(error: RequestError) -> Self {
        match error {
            RequestError::Accept(error) => error.into(),
            RequestError::Serve(error) => error.into(),
        }
    }
}

fn code_of_limit(limit: Limit) -> Code {
    match limit {
        Limit::Requests => Code::TenantRequests,
        Limit::Tokens => Code::TenantTokens,
        Limit::Context => Code::ContextLength,
    }
}

fn retry_after(action: CallerAction) -> Option<Duration> {
    match action {
        CallerAction::RetryLater(after) => Some(after),
        CallerAction::Reject | CallerAction::RetryElsewhere | CallerAction::Bug => None,
    }
}

impl From<&RequestError> for Code {
    fn from(error: &RequestError) -> Self {
        match error {
            RequestError::Accept(error) => error.into(),
            RequestError::Serve(error) => error.into(),
        }
    }
}

impl From<&ServeError> for Code {
    fn from(error: &ServeError) -> Self {
        match error {
            ServeError::Refused { kind, .. } => code_of_refusal(*kind),
            ServeError::Overloaded { .. } => Self::Overloaded,
            ServeError::NoNodes { .. } => Self::NoNodes,
            ServeError::DeadlinePassed { .. } => Self::Deadline,
            ServeError::Draining => Self::Draining,
            ServeError::Failed { .. } => Self::Internal,
        }
    }
}

fn code_of_refusal(kind: RefusalKind) -> Code {
    match kind {
        RefusalKind::Full => Code::Full,
        RefusalKind::Queue => Code::Queue,
        RefusalKind::Draining => Code::Draining,
        RefusalKind::Mismatch => Code::Mismatch,
        RefusalKind::Landing => Code::Landing,
        RefusalKind::Wire => Code::Wire,
        RefusalKind::TooLong => Code::TooLong,
        RefusalKind::Invalid => Code::Invalid,
        RefusalKind::Protocol => Code::Protocol,
        RefusalKind::Deadline => Code::Deadline,
        RefusalKind::Cancelled => Code::Cancelled,
        RefusalKind::Failed => Code::NodeFailed,
    }
}

impl IntoResponse for HttpError {
    fn into_response(self) -> Response {
        let mut response = (self.code.status(), Json(self.body())).into_response();
        if let Some(after) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(whole_seconds(after)));
        }
        if self.code == Code::InvalidApiKey {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response.extensions_mut().insert(self);
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> String {
        let row = |code: &Code| {
            let (word, status, class) = (code.as_str(), code.status().as_u16(), code.class().as_str());
            format!("| `{word}` | {status} | `{class}` | {} |\n", code.meaning())
        };
        Code::ALL.iter().map(row).collect()
    }

    #[test]
    fn the_documents_list_every_code() {
        let documented = include_str!("../../../docs/errors.md");
        assert!(documented.contains(&table()), "put this table into docs/errors.md:\n{}", table());
    }

    #[test]
    fn codes_are_unique() {
        let words: std::collections::BTreeSet<&str> = Code::ALL.iter().map(|code| code.as_str()).collect();
        assert_eq!(words.len(), Code::ALL.len());
    }

    #[test]
    fn a_refusals_code_is_its_own_word() {
        for kind in RefusalKind::ALL {
            assert_eq!(code_of_refusal(*kind).as_str(), kind.code());
        }
    }

    #[test]
    fn refusals_that_may_be_retried_say_when() {
        let after = |error: ServeError| HttpError::from(error).retry_after;
        let reason = String::new;
        let refused = |kind| ServeError::Refused { kind, reason: reason() };
        let overloaded =
            ServeError::Overloaded { retry_after: Duration::from_millis(2500), reason: reason() };
        assert_eq!(after(overloaded), Some(Duration::from_millis(2500)));
        assert_eq!(whole_seconds(Duration::from_millis(2500)), 3);
        assert_eq!(whole_seconds(Duration::ZERO), 1);
        for code in Code::ALL.iter().filter(|code| matches!(code.status().as_u16(), 429 | 503)) {
            let kind = RefusalKind::from_code(code.as_str());
            assert!(kind.is_none_or(|kind| after(refused(kind)).is_some()), "{code:?}");
        }
        assert!(after(ServeError::NoNodes { reason: reason() }).is_some());
        assert_eq!(after(refused(RefusalKind::TooLong)), None);
    }
}
