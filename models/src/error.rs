//! The errors of a model's download, as sentences for its user.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use http::StatusCode;

#[derive(Debug, thiserror::Error)]
pub enum HubError {
    #[error("the hub's address {endpoint:?} is invalid: it must begin with http:// or https://")]
    Endpoint { endpoint: String },
    #[error("no CA certificate is in {}: {reason}", path.display())]
    Authorities { path: PathBuf, reason: String },
    #[error("cannot set up TLS")]
    Tls(#[source] rustls::Error),
    #[error(
        "{url} is not trusted: {why}. For an authority that this machine does not know, set SSL_CERT_FILE to a PEM file"
    )]
    Untrusted { url: String, why: rustls::CertificateError },
    #[error("cannot reach {url}")]
    Unreachable { url: String, source: Box<dyn std::error::Error + Send + Sync> },
    #[error("{url} sent nothing for {waited:?}")]
    Silent { url: String, waited: Duration },
    #[error("{id} is not on {endpoint}, or it is private: set HF_TOKEN to a token that may read it")]
    Unauthorized { id: String, endpoint: String },
    #[error("{id} is gated: ask for access at {endpoint}/{id}, and set HF_TOKEN to your token")]
    Gated { id: String, endpoint: String },
    #[error("{id} is not on {endpoint}")]
    UnknownModel { id: String, endpoint: String },
    #[error("{id} has no revision {revision:?}")]
    UnknownRevision { id: String, revision: String },
    #[error("{url} answered {status}{}", said(.message))]
    Status { url: String, status: StatusCode, message: String },
    #[error("{url} sent an invalid answer: {reason}")]
    Answer { url: String, reason: String },
    #[error(
        "{id} has weights in GGUF, which are not downloaded: download one file and pass its path, or use the model's repository with safetensors, often the same name without -GGUF"
    )]
    Gguf { id: String },
    #[error("{id} cannot be served, because it has no config.json")]
    NoConfig { id: String },
    /// The `config.json` describes a model that cannot be served; the weights were not downloaded.
    #[error("{id} cannot be served")]
    Refused { id: String, source: Box<dyn std::error::Error + Send + Sync> },
    #[error("{id} has no safetensors weights: other formats are not supported")]
    NoWeights { id: String },
    #[error("{file} arrived damaged: its digest differs from the hub's")]
    Damaged { file: String },
    #[error("{id} is not in the cache {}, and HF_HUB_OFFLINE is set", cache.display())]
    Offline { id: String, cache: PathBuf },
    #[error("another process has held {} for {waited:?}", path.display())]
    Locked { path: PathBuf, waited: Duration },
    #[error("cannot use {}", path.display())]
    Io { path: PathBuf, source: io::Error },
}

fn said(message: &str) -> String {
    if message.is_empty() { String::new() } else { format!(": {message}") }
}

impl HubError {
    /// Returns a function for `map_err` that adds the path of the file or folder to an I/O error.
    pub(crate) fn io(path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { path: path.to_owned(), source }
    }

    /// Returns whether the same request may succeed later, because the network or the hub failed.
    pub(crate) fn may_pass(&self) -> bool {
        match self {
            Self::Unreachable { .. } | Self::Silent { .. } => true,
            Self::Status { status, .. } => {
                status.is_server_error() || *status == StatusCode::TOO_MANY_REQUESTS
            }
            _ => false,
        }
    }
}
