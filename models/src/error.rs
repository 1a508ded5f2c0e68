//! Why a model was not fetched, in sentences for the one who asked for it.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use http::StatusCode;

#[derive(Debug, thiserror::Error)]
pub enum HubError {
    #[error("the hub's address {endpoint:?} is none: it begins with http:// or https://")]
    Endpoint { endpoint: String },
    #[error("no certificate of an authority is in {}: {reason}", path.display())]
    Authorities { path: PathBuf, reason: String },
    #[error("set up TLS")]
    Tls(#[source] rustls::Error),
    #[error(
        "{url} is not trusted: {why}. An authority other than those of this machine is named by SSL_CERT_FILE, a PEM file"
    )]
    Untrusted { url: String, why: rustls::CertificateError },
    #[error("cannot reach {url}")]
    Unreachable { url: String, source: Box<dyn std::error::Error + Send + Sync> },
    #[error("{url} said nothing for {waited:?}")]
    Silent { url: String, waited: Duration },
    #[error("{id} is not on {endpoint}, or it is private: set HF_TOKEN to a token that may read it")]
    Unauthorized { id: String, endpoint: String },
    #[error("{id} is gated: ask for access at {endpoint}/{id}, and set HF_TOKEN to a token of yours")]
    Gated { id: String, endpoint: String },
    #[error("{id} is not on {endpoint}")]
    UnknownModel { id: String, endpoint: String },
    #[error("{id} has no revision {revision:?}")]
    UnknownRevision { id: String, revision: String },
    #[error("{url} answered {status}{}", said(.message))]
    Status { url: String, status: StatusCode, message: String },
    #[error("{url} answered with something else than a hub does: {reason}")]
    Answer { url: String, reason: String },
    #[error(
        "{id} has its weights as GGUF, which is not read: name the model's repository with safetensors, often the same name without -GGUF"
    )]
    Gguf { id: String },
    #[error("{id} has no config.json, and so cannot be served")]
    NoConfig { id: String },
    /// Judged by its `config.json`, before its weights are fetched.
    #[error("{id} cannot be served")]
    Refused { id: String, source: Box<dyn std::error::Error + Send + Sync> },
    #[error("{id} has no weights as safetensors: other formats are not read")]
    NoWeights { id: String },
    #[error("{file} arrived damaged: it is not what the hub says it is")]
    Damaged { file: String },
    #[error("{id} is not in the cache {}, and HF_HUB_OFFLINE is set", cache.display())]
    Offline { id: String, cache: PathBuf },
    #[error("another process has held {} for {waited:?}", path.display())]
    Locked { path: PathBuf, waited: Duration },
    #[error("use {}", path.display())]
    Io { path: PathBuf, source: io::Error },
}

fn said(message: &str) -> String {
    if message.is_empty() { String::new() } else { format!(": {message}") }
}

impl HubError {
    /// For `map_err`: what happened to this file or folder.
    pub(crate) fn io(path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { path: path.to_owned(), source }
    }

    /// Whether the same request may go well a little later: it is the way to the hub that fails, or the hub itself.
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
