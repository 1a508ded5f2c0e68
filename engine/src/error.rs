//! What can go wrong, and what to do about it.

use std::path::PathBuf;

use types::Verdict;

/// A whole step failed. No row of it has a token, and the KV that it should have written is not to be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BackendError {
    #[error("launch step: {0}")]
    Launch(String),
    #[error("collect step: {0}")]
    Collect(String),
    /// Steps were collected in another order than launched, or launched past the two that may be in flight.
    #[error("steps out of order: {0}")]
    Order(String),
    /// The device is gone; no later step can succeed.
    #[error("device lost: {0}")]
    DeviceLost(String),
}

impl BackendError {
    /// Whether the backend is of no further use.
    pub fn is_fatal(&self) -> bool {
        matches!(self, Self::DeviceLost(_))
    }

    pub fn verdict(&self) -> Verdict {
        match self {
            Self::Order(_) => Verdict::Bug,
            Self::Launch(_) | Self::Collect(_) | Self::DeviceLost(_) => Verdict::RetryElsewhere,
        }
    }
}

/// One row of a step failed; the others did not notice.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RowError {
    /// The KV that the row read is not the KV of its sequence.
    #[error("kv checksum mismatch at layer {layer}, position {position}: {what}")]
    KvMismatch { layer: u16, position: usize, what: &'static str },
    /// Someone else holds a page that is this row's to use.
    #[error("page of layer {layer}, position {position}: {reason}")]
    Page { layer: u16, position: usize, reason: String },
    /// The row continues a token in flight, and there is none.
    #[error("no token in flight for this slot")]
    NoTokenInFlight,
    /// Nothing may be drawn: every token is forbidden, or no number is finite.
    #[error("sample token: {0}")]
    Sample(String),
}

impl RowError {
    /// Recomputed elsewhere from its tokens, the sequence has every chance.
    pub fn verdict(&self) -> Verdict {
        match self {
            Self::KvMismatch { .. } | Self::Sample(_) => Verdict::RetryElsewhere,
            Self::Page { .. } | Self::NoTokenInFlight => Verdict::Bug,
        }
    }
}

/// The model could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("no model {name:?}: known are {known}")]
    UnknownModel { name: String, known: String },
    #[error("read costs {path}")]
    ReadCosts {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("parse costs {name}")]
    ParseCosts {
        name: String,
        #[source]
        source: Box<toml::de::Error>,
    },
    #[error("mock settings: {0}")]
    MockSettings(String),
    #[error("{bytes} bytes of KV memory hold no block of {block_bytes} bytes")]
    NoKvMemory { bytes: usize, block_bytes: usize },
    #[error("take KV memory: {0}")]
    KvMemory(String),
}

impl OpenError {
    pub fn verdict(&self) -> Verdict {
        Verdict::Reject
    }
}
