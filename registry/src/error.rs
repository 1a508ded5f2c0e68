//! The errors of a process's calls to its registry.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use types::{CallerAction, Epoch, NodeId};

/// The delay after which a caller should try again.
const RETRY_IN: Duration = Duration::from_secs(1);

/// The source of an error, as the registry's implementation reports it.
pub type Cause = Box<dyn std::error::Error + Send + Sync>;

/// The errors of a registry. `operation` names the failed call in a few words.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// The address of the registry is invalid; `url` is shown without its password.
    #[error("registry address {url}: {reason}")]
    Url { url: String, reason: String },
    #[error("read {}", path.display())]
    ReadFile { path: PathBuf, source: std::io::Error },
    #[error("node {id} cannot be announced: {reason}")]
    InvalidNode { id: NodeId, reason: String },
    /// The registry refused the call.
    #[error("{operation}: refused by the registry")]
    Denied { operation: &'static str, source: Cause },
    /// The registry did not answer, or could not process the call. A retry may help.
    #[error("{operation}: the registry cannot be reached")]
    Unreachable { operation: &'static str, source: Cause },
    #[error("{operation}: no answer within {} ms", within.as_millis())]
    TimedOut { operation: &'static str, within: Duration },
    /// The registry does not know the lease: it expired, or the registry lost its data.
    #[error("the lease has expired or is unknown to the registry")]
    LeaseLost,
    /// A later life of the same node is a member.
    #[error(
        "a later life of node {id} is already a member (this one is {epoch}): another process has this id, or the clock \
         was set back and the earlier lease has not expired"
    )]
    Superseded { id: NodeId, epoch: Epoch },
    /// Another process has the lock.
    #[error("another process has the lock")]
    LockHeld,
    #[error("the registry is full: it has {n_members_max} members")]
    Full { n_members_max: usize },
    /// The connection broke or was closed, so changes may have been missed.
    #[error("the watch was interrupted: {reason}")]
    Interrupted { reason: String },
    /// The process is draining and starts nothing new.
    #[error("the process is stopping")]
    Stopping,
}

impl RegistryError {
    pub fn caller_action(&self) -> CallerAction {
        match self {
            Self::Url { .. }
            | Self::ReadFile { .. }
            | Self::InvalidNode { .. }
            | Self::Denied { .. }
            | Self::Stopping => CallerAction::Reject,
            Self::Unreachable { .. }
            | Self::TimedOut { .. }
            | Self::LeaseLost
            | Self::Superseded { .. }
            | Self::LockHeld
            | Self::Full { .. }
            | Self::Interrupted { .. } => CallerAction::RetryLater(RETRY_IN),
        }
    }

    /// Returns the kind of problem, which tells an operator what to check.
    pub fn trouble(&self) -> RegistryProblem {
        let cause = Chain(self).to_string().to_lowercase();
        let says = |parts: &[&str]| parts.iter().any(|part| cause.contains(part));
        match self {
            Self::Url { .. } | Self::ReadFile { .. } => RegistryProblem::Address,
            Self::Denied { .. } if says(&["user name is empty", "user id or password"]) => {
                RegistryProblem::Password
            }
            Self::Denied { .. } if says(&["certificate"]) => RegistryProblem::Certificate,
            Self::Denied { .. } if says(&["permission denied"]) => RegistryProblem::Permission,
            Self::Denied { .. } if says(&["cluster's secret", "cluster secret", "clock"]) => {
                RegistryProblem::Secret
            }
            // Some layers above TLS keep only the text of its errors, or only the fact that the peer
            // disconnected, so the text is searched. This happens if a certificate is missing, or if plain
            // text is sent to a TLS port.
            _ if says(&TLS_FAILED) => RegistryProblem::Certificate,
            _ => RegistryProblem::Unreachable,
        }
    }

    /// Returns whether retrying cannot help, because an operator has to change something.
    pub fn is_final(&self) -> bool {
        self.caller_action() == CallerAction::Reject
    }
}

/// Parts of error messages of connections that were opened and then failed.
const TLS_FAILED: [&str; 7] = [
    "certificate",
    "fatal alert",
    "tls",
    "corrupt message",
    "connection closed",
    "connection reset",
    "broken pipe",
];

/// The kinds of problems between a process and its registry. An operator fixes each in a different place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegistryProblem {
    /// The address is invalid, or a file that it names cannot be read.
    Address,
    /// The user or the password is wrong or missing.
    Password,
    /// The user may not use the keys of this cluster.
    Permission,
    /// The caller and the registry have different secrets or clocks.
    Secret,
    /// One end does not accept the other's certificate, or only one end speaks TLS.
    Certificate,
    /// There is no answer at the address, or the answer is not a registry's.
    Unreachable,
}

/// Displays an error with all its causes, for log lines.
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
