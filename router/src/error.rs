//! The errors of accepting a request, and of serving an accepted one.

use std::borrow::Cow;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use types::{CallerAction, RefusalKind};

use crate::tenants::LimitReached;
use crate::text::tokenizer::TokenizerError;

/// The error of a request that was not accepted. It names the field or header at fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AcceptError {
    #[error("{param} is required")]
    Missing { param: Cow<'static, str> },
    #[error("{param}: {reason}")]
    Invalid { param: Cow<'static, str>, reason: String },
    /// The request uses a feature that Baton does not have. It is refused, because ignoring it would change the answer.
    #[error("{param} is not supported: {reason}")]
    Unsupported { param: Cow<'static, str>, reason: String },
    #[error("{reason}")]
    TooLong { param: Cow<'static, str>, reason: String },
    /// The model's chat template raised an exception.
    #[error("the chat template refuses these messages: {reason}")]
    Template { reason: String },
    #[error("the model `{name}` is not served here")]
    UnknownModel { name: String },
    /// The request has no API key, or an unknown one.
    #[error("{reason}")]
    Unauthorized { reason: &'static str },
    /// The prompt and its answer would be longer than the tenant's limit.
    #[error("{reason}")]
    TenantContext { param: Cow<'static, str>, reason: String },
    #[error("{}", .0.reason)]
    TenantLimit(LimitReached),
    /// The model cannot be looked up, because the router does not know the cluster's nodes yet.
    #[error("no nodes: {reason}")]
    NoNodes { reason: String },
}

impl AcceptError {
    pub fn missing(param: impl Into<Cow<'static, str>>) -> Self {
        Self::Missing { param: param.into() }
    }

    pub fn invalid(param: impl Into<Cow<'static, str>>, reason: impl Into<String>) -> Self {
        Self::Invalid { param: param.into(), reason: reason.into() }
    }

    pub fn unsupported(param: impl Into<Cow<'static, str>>, reason: impl Into<String>) -> Self {
        Self::Unsupported { param: param.into(), reason: reason.into() }
    }

    /// Returns the field or header at fault.
    pub fn param(&self) -> &str {
        match self {
            Self::Missing { param }
            | Self::Invalid { param, .. }
            | Self::Unsupported { param, .. }
            | Self::TooLong { param, .. }
            | Self::TenantContext { param, .. } => param,
            Self::Unauthorized { .. } | Self::TenantLimit(_) => "authorization",
            Self::Template { .. } => "messages",
            Self::UnknownModel { .. } | Self::NoNodes { .. } => "model",
        }
    }

    /// Replaces the name of the field at fault, for an API in which it has another one.
    pub(crate) fn renamed(mut self, name_of: fn(&str) -> Cow<'static, str>) -> Self {
        if let Self::Missing { param }
        | Self::Invalid { param, .. }
        | Self::Unsupported { param, .. }
        | Self::TooLong { param, .. }
        | Self::TenantContext { param, .. } = &mut self
        {
            *param = name_of(param);
        }
        self
    }

    pub fn caller_action(&self) -> CallerAction {
        match self {
            Self::NoNodes { .. } => CallerAction::RetryLater(RETRY_AFTER),
            Self::TenantLimit(reached) => CallerAction::RetryLater(reached.retry_after),
            _ => CallerAction::Reject,
        }
    }
}

/// The error of an accepted prompt that could not be served within its deadline and its budget of attempts.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ServeError {
    /// The refusal of the last node that was tried.
    #[error("{kind}: {reason}")]
    Refused { kind: RefusalKind, reason: String },
    /// The router is at its limit of concurrent requests.
    #[error("overloaded: {reason}")]
    Overloaded { retry_after: Duration, reason: String },
    /// There is no usable prefill node, or no usable decode node.
    #[error("no nodes: {reason}")]
    NoNodes { reason: String },
    #[error("deadline: {reason}")]
    DeadlinePassed { reason: String },
    /// The router is stopping, and the request was still running at the end of the drain.
    #[error("the router is stopping, and its drain time is over")]
    Draining,
    /// An internal error.
    #[error("failed: {reason}")]
    Failed { reason: String },
}

/// The delay after which a client should try again, if no better one is known.
pub(crate) const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Returns `after` in whole seconds, rounded up, because a client that comes back early is refused again.
pub(crate) fn whole_seconds(after: Duration) -> u64 {
    (after.as_secs() + u64::from(after.subsec_nanos() > 0)).max(1)
}

impl ServeError {
    /// Returns the outcome of the request, as a metric label.
    pub fn outcome(&self) -> &'static str {
        match self {
            Self::Refused { kind, .. } => kind.code(),
            Self::Overloaded { .. } => "overloaded",
            Self::NoNodes { .. } => "no_nodes",
            Self::DeadlinePassed { .. } => "deadline",
            Self::Draining => "draining",
            Self::Failed { .. } => "internal",
        }
    }

    /// Returns the action that the client should take. Other nodes were already tried, so "retry elsewhere"
    /// becomes "retry later".
    pub fn caller_action(&self) -> CallerAction {
        match self {
            Self::Refused { kind, .. } => match kind.caller_action() {
                CallerAction::RetryElsewhere => CallerAction::RetryLater(RETRY_AFTER),
                action => action,
            },
            Self::Overloaded { retry_after, .. } => CallerAction::RetryLater(*retry_after),
            Self::NoNodes { .. } | Self::Draining => CallerAction::RetryLater(RETRY_AFTER),
            Self::DeadlinePassed { .. } => CallerAction::Reject,
            Self::Failed { .. } => CallerAction::Bug,
        }
    }
}

/// The error of a request, accepted or not.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    #[error(transparent)]
    Accept(#[from] AcceptError),
    #[error(transparent)]
    Serve(#[from] ServeError),
}

/// The error of a text that could not be tokenized.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    #[error("the model has no tokenizer: send the prompt as token ids")]
    NoTokenizer,
    #[error("the tokenizer refuses the text: {reason}")]
    Refused { reason: String },
}

impl EncodeError {
    /// Converts the error to one about the field `param`, which contained the text.
    pub fn at(self, param: &'static str) -> AcceptError {
        match self {
            Self::NoTokenizer => AcceptError::unsupported(param, self.to_string()),
            Self::Refused { .. } => AcceptError::invalid(param, self.to_string()),
        }
    }
}

/// The error of a tokenizer or chat template that cannot be used. It is found when the router starts, not by
/// a request.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    #[error("read {}", file.display())]
    Read { file: PathBuf, source: io::Error },
    /// The file cannot be parsed. `place` is the file, or a field in it.
    #[error("read {place}")]
    Parse { place: String, source: serde_json::Error },
    /// The file can be parsed, but a field's value is invalid.
    #[error("read {}: `{field}` {reason}", file.display())]
    Field { file: PathBuf, field: &'static str, reason: String },
    #[error("read {}", file.display())]
    Tokenizer { file: PathBuf, source: TokenizerError },
    #[error("compile the chat template of {}", file.display())]
    CompileTemplate { file: PathBuf, source: minijinja::Error },
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nodes say it in their reasons.
    #[test]
    fn an_error_says_once_that_the_deadline_passed() {
        let error = ServeError::DeadlinePassed { reason: "decode-0: the deadline passed".to_owned() };
        assert_eq!(error.to_string(), "deadline: decode-0: the deadline passed");
    }
}
