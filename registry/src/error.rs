//! What can go wrong between a process and its registry.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use types::{Epoch, NodeId, Verdict};

/// What a caller should do in the meantime when the registry does not answer.
const RETRY_IN: Duration = Duration::from_secs(1);

/// A cause that belongs to one implementation.
pub type Cause = Box<dyn std::error::Error + Send + Sync>;

/// One variant for each thing that can fail. `operation` is what was being done, in a few words.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// `url` is shown without its password.
    #[error("registry address {url}: {reason}")]
    Url { url: String, reason: String },
    #[error("read {}", path.display())]
    ReadFile { path: PathBuf, source: std::io::Error },
    #[error("node {id} cannot be announced: {reason}")]
    InvalidNode { id: NodeId, reason: String },
    /// The registry answered, and the answer is no.
    #[error("{operation}: the registry refuses")]
    Denied { operation: &'static str, source: Cause },
    /// The registry did not answer, or could not.
    #[error("{operation}: the registry cannot be reached")]
    Unreachable { operation: &'static str, source: Cause },
    #[error("{operation}: no answer within {} ms", within.as_millis())]
    TimedOut { operation: &'static str, within: Duration },
    /// The registry does not know the lease: it lapsed, or the registry has lost its data.
    #[error("the lease is gone")]
    LeaseLost,
    /// A later life of the same node is a member.
    #[error("a later life of node {id} is a member already (this one is {epoch})")]
    Superseded { id: NodeId, epoch: Epoch },
    #[error("the registry holds {n_members_max} members and takes no more")]
    Full { n_members_max: usize },
    /// The connection broke or was closed: what happened since is not known.
    #[error("the watch was interrupted: {reason}")]
    Interrupted { reason: String },
    /// The process is draining and starts nothing new.
    #[error("the process is stopping")]
    Stopping,
}

impl RegistryError {
    pub fn verdict(&self) -> Verdict {
        match self {
            Self::Url { .. }
            | Self::ReadFile { .. }
            | Self::InvalidNode { .. }
            | Self::Denied { .. }
            | Self::Stopping => Verdict::Reject,
            Self::Unreachable { .. }
            | Self::TimedOut { .. }
            | Self::LeaseLost
            | Self::Superseded { .. }
            | Self::Full { .. }
            | Self::Interrupted { .. } => Verdict::RetryLater(RETRY_IN),
        }
    }

    /// What an operator has to look at.
    pub fn trouble(&self) -> Trouble {
        let cause = Chain(self).to_string().to_lowercase();
        let says = |parts: &[&str]| parts.iter().any(|part| cause.contains(part));
        match self {
            Self::Url { .. } | Self::ReadFile { .. } => Trouble::Address,
            Self::Denied { .. } if says(&["user name is empty", "user id or password"]) => Trouble::Password,
            Self::Denied { .. } if says(&["permission denied"]) => Trouble::Permission,
            Self::Denied { .. } if says(&["cluster's secret", "cluster secret", "clock"]) => Trouble::Secret,
            // Some layers between here and TLS keep only the text of its errors, or only that the peer hung up: so ends
            // a connection whose certificate is missing, and one in plain text to a port that expects TLS.
            _ if says(&TLS_FAILED) => Trouble::Certificate,
            _ => Trouble::Unreachable,
        }
    }

    /// Retrying does not help: an operator has to change something.
    pub fn is_final(&self) -> bool {
        self.verdict() == Verdict::Reject
    }
}

/// What errors of connections say that were accepted and came to nothing.
const TLS_FAILED: [&str; 7] = [
    "certificate",
    "fatal alert",
    "tls",
    "corrupt message",
    "connection closed",
    "connection reset",
    "broken pipe",
];

/// What stands between a process and its registry; each kind is repaired in another place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// The address, or a file that it names.
    Address,
    /// The user or the password is wrong or missing.
    Password,
    /// The user may not use the keys of this cluster.
    Permission,
    /// The caller and the registry have different secrets or clocks.
    Secret,
    /// One end does not accept the other's certificate, or only one of them speaks TLS.
    Certificate,
    /// It does not answer, or something else answers there.
    Unreachable,
}

/// Prints an error with all its causes, for the one place where it is logged.
pub(crate) struct Chain<'a>(pub(crate) &'a dyn std::error::Error);

impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)?;
        let mut cause = self.0.source();
        while let Some(error) = cause {
            write!(f, ": {error}")?;
            cause = error.source();
        }
        Ok(())
    }
}
