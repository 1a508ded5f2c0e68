//! Why a request is not accepted, and why an accepted one was not served.

use std::borrow::Cow;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use types::{RefusalKind, Verdict};

use crate::tenants::LimitReached;
use crate::text::tokenizer::TokenizerError;

/// A request that never became a prompt. Each names the field (or header) that is to blame.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AcceptError {
    #[error("{param} is required")]
    Missing { param: Cow<'static, str> },
    #[error("{param}: {reason}")]
    Invalid { param: Cow<'static, str>, reason: String },
    /// It asks for something that the router does not do. Refused, because ignoring it would change the answer's meaning.
    #[error("{param} is not supported: {reason}")]
    Unsupported { param: Cow<'static, str>, reason: String },
    #[error("{reason}")]
    TooLong { param: Cow<'static, str>, reason: String },
    /// The model's chat template raised an exception.
    #[error("the chat template refuses these messages: {reason}")]
    Template { reason: String },
    #[error("the model `{name}` is not served here")]
    UnknownModel { name: String },
    /// No API key, or one that is not known.
    #[error("{reason}")]
    Unauthorized { reason: &'static str },
    /// The prompt and its answer are longer than the tenant may have.
    #[error("{reason}")]
    TenantContext { param: Cow<'static, str>, reason: String },
    #[error("{}", .0.reason)]
    TenantLimit(LimitReached),
    /// The request's model cannot be looked up: the router does not know the cluster's nodes yet.
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

    /// The field or header that is to blame.
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

    pub fn verdict(&self) -> Verdict {
        match self {
            Self::NoNodes { .. } => Verdict::RetryLater(RETRY_AFTER),
            Self::TenantLimit(reached) => Verdict::RetryLater(reached.retry_after),
            _ => Verdict::Reject,
        }
    }
}

/// An accepted prompt that could not be served, after everything was tried that its deadline and budget allow.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ServeError {
    /// The last node's typed "no".
    #[error("{kind}: {reason}")]
    Refused { kind: RefusalKind, reason: String },
    /// Admission says that waiting would miss the request's objective.
    #[error("overloaded: {reason}")]
    Overloaded { retry_after: Duration, reason: String },
    /// No usable pair of nodes.
    #[error("no nodes: {reason}")]
    NoNodes { reason: String },
    #[error("the deadline passed: {reason}")]
    DeadlinePassed { reason: String },
    /// The router is stopping, and the request was still running at the end of its drain.
    #[error("the router is stopping, and its time for requests under way is over")]
    Draining,
    /// The router or a node is at fault.
    #[error("failed: {reason}")]
    Failed { reason: String },
}

/// How long to stay away when nothing better is known.
pub(crate) const RETRY_AFTER: Duration = Duration::from_secs(1);

impl ServeError {
    /// How such a request ended, in a word for metrics.
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

    /// What the client should do about it. Nodes were tried already, so "elsewhere" has become "later".
    pub fn verdict(&self) -> Verdict {
        match self {
            Self::Refused { kind, .. } => match kind.verdict() {
                Verdict::RetryElsewhere => Verdict::RetryLater(RETRY_AFTER),
                verdict => verdict,
            },
            Self::Overloaded { retry_after, .. } => Verdict::RetryLater(*retry_after),
            Self::NoNodes { .. } | Self::Draining => Verdict::RetryLater(RETRY_AFTER),
            Self::DeadlinePassed { .. } => Verdict::Reject,
            Self::Failed { .. } => Verdict::Bug,
        }
    }
}

/// A text that could not be cut into tokens.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    #[error("the model has no tokenizer; send token ids to /v1/completions")]
    NoTokenizer,
    #[error("the tokenizer refuses the text: {reason}")]
    Refused { reason: String },
}

impl EncodeError {
    /// The text came in this field.
    pub fn at(self, param: &'static str) -> AcceptError {
        match self {
            Self::NoTokenizer => AcceptError::unsupported(param, self.to_string()),
            Self::Refused { .. } => AcceptError::invalid(param, self.to_string()),
        }
    }
}

/// A model's text half that cannot be used: found when the router starts, not by a request.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    #[error("read {}", file.display())]
    Read { file: PathBuf, source: io::Error },
    /// The file, and the field if it is one.
    #[error("read {place}")]
    Parse { place: String, source: serde_json::Error },
    /// The file can be read, but what it says makes no sense.
    #[error("read {}: `{field}` {reason}", file.display())]
    Field { file: PathBuf, field: &'static str, reason: String },
    #[error("read {}", file.display())]
    Tokenizer { file: PathBuf, source: TokenizerError },
    #[error("compile the chat template of {}", file.display())]
    CompileTemplate { file: PathBuf, source: minijinja::Error },
}
