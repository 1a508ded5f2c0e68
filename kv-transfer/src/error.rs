//! The errors of a KV transfer, and their verdicts.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use device::cuda::CudaError;
use device::verbs::VerbsError;
use device::{MemoryError, PeerMemoryError};
use types::node::{FingerprintMismatch, ProtocolMismatch};
use types::{CallerAction, Refusal, RefusalKind, in_full};

/// The reason why a transfer failed. Cheap to clone: the sender and the arrival of one transfer both hold it.
#[derive(Clone, Debug, thiserror::Error)]
pub enum TransferError {
    #[error("no connector is called {name:?}; there are {known}")]
    UnknownConnector { name: String, known: String },
    /// A node of several processes cannot do this. The text is a sentence.
    #[error("{0}")]
    SeveralProcesses(String),
    #[error("cannot listen on {addr}")]
    Listen { addr: String, source: Arc<io::Error> },
    #[error("cannot connect to {addr}")]
    Connect { addr: String, source: Arc<io::Error> },
    #[error("cannot share memory with another process")]
    Share { source: Arc<MemoryError> },
    /// `slots` has their sum.
    #[error("no room for {slots} (set expert.transfer.host_slots lower)")]
    Slots { slots: String, source: Arc<dyn std::error::Error + Send + Sync> },
    #[error("cannot map the peer's memory")]
    Map { source: Arc<PeerMemoryError> },
    #[error("the GPU operation failed")]
    Device { source: Arc<CudaError> },
    #[error("RDMA is not available")]
    Rdma { source: Arc<VerbsError> },
    #[error("the connection is lost")]
    ConnectionLost { source: Arc<io::Error> },
    #[error("{what} made no progress for {after:?}")]
    Stalled { what: &'static str, after: Duration },
    #[error("the peer broke the protocol")]
    Frame(#[from] FrameError),
    #[error(transparent)]
    Protocol(#[from] ProtocolMismatch),
    #[error(transparent)]
    Fingerprint(#[from] FingerprintMismatch),
    #[error("layouts differ: {0}")]
    Layout(String),

    #[error("this connector cannot send to {0}")]
    WrongDestination(String),
    #[error("no such landing")]
    UnknownLanding,
    #[error("the grant does not match the landing")]
    WrongGrant,
    #[error("the landing belongs to another life of the node")]
    WrongEpoch,
    #[error("the landing is already open or was opened before")]
    AlreadyOpened,
    #[error("the landing's deadline has passed")]
    Expired,
    #[error("too many landings or connections")]
    TooMany,
    /// The two sides have different values for the transfer's length, layout or model.
    #[error("the peer refuses: {0}")]
    Mismatch(String),

    /// The peer cancelled the transfer.
    #[error("the peer cancelled the transfer")]
    Cancelled,
    /// The peer failed with an error that has no variant in this type.
    #[error("the peer failed: {0}")]
    Peer(String),
    /// The step that computes the layers failed.
    #[error("the step that computes this KV failed")]
    FenceBroken,
    /// The producer of the KV ended without a handoff.
    #[error("the sequence ended before its first token")]
    Unfinished,
    /// Pages arrived wrong, and were wrong again when they were sent once more.
    #[error("{pages} pages arrived corrupted twice")]
    Corrupted { pages: usize },
    #[error("the connector is closed")]
    Closed,

    /// The caller broke the contract.
    #[error("invalid request: {0}")]
    BadRequest(String),
    #[error("{sent} of {wanted} pages were sent before finish")]
    Incomplete { sent: usize, wanted: usize },
    #[error("KV memory is in use where it must not be: {0}")]
    Memory(String),
}

/// The reason why bytes are not a valid frame.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    #[error("incomplete frame: {given} of {needed} bytes")]
    Incomplete { needed: usize, given: usize },
    #[error("not a frame of this protocol")]
    Magic,
    #[error("unknown kind {0}")]
    Kind(u8),
    #[error("reserved bytes are not zero")]
    Reserved,
    #[error("the body of {len} bytes exceeds the limit of {max}")]
    BodyTooLong { len: usize, max: usize },
    #[error("the payload of {len} bytes exceeds the limit of {max}")]
    PayloadTooLong { len: usize, max: usize },
    #[error("the checksum is wrong")]
    Checksum,
    #[error("the body is malformed: {0}")]
    Body(&'static str),
    #[error("unexpected frame: {0}")]
    Unexpected(&'static str),
}

impl TransferError {
    /// Returns the caller's next step.
    pub fn caller_action(&self) -> CallerAction {
        match self.refusal_kind() {
            None => CallerAction::Bug,
            Some(kind) => kind.caller_action(),
        }
    }

    /// Returns whether the only cause is that this machine lacks the hardware. The operator need not act.
    pub fn is_of_the_machine(&self) -> bool {
        matches!(self, Self::Rdma { source } if matches!(**source, VerbsError::NoDevice))
    }

    /// Returns the code with which a node answers this error; `None` for a bug of our own.
    fn refusal_kind(&self) -> Option<RefusalKind> {
        use TransferError as E;
        match self {
            E::Connect { .. } | E::ConnectionLost { .. } | E::Stalled { .. } | E::Frame(_) => {
                Some(RefusalKind::Wire)
            }
            E::Corrupted { .. } | E::Closed | E::Listen { .. } | E::Cancelled => Some(RefusalKind::Wire),
            E::Share { .. } | E::Slots { .. } | E::Map { .. } | E::Rdma { .. } => Some(RefusalKind::Wire),
            E::Protocol(_) => Some(RefusalKind::Protocol),
            E::Fingerprint(_) | E::Layout(_) | E::Mismatch(_) => Some(RefusalKind::Mismatch),
            E::WrongDestination(_) | E::UnknownConnector { .. } | E::SeveralProcesses(_) => {
                Some(RefusalKind::Mismatch)
            }
            E::UnknownLanding | E::WrongGrant | E::WrongEpoch | E::AlreadyOpened => {
                Some(RefusalKind::Landing)
            }
            E::Expired => Some(RefusalKind::Landing),
            E::TooMany => Some(RefusalKind::Full),
            E::FenceBroken | E::Unfinished | E::Peer(_) | E::Device { .. } => Some(RefusalKind::Failed),
            E::BadRequest(_) | E::Incomplete { .. } | E::Memory(_) => None,
        }
    }

    /// Returns the code for metrics and logs. A cancelled request or a closed connector is no fault of the wire.
    pub fn word(&self) -> &'static str {
        let kind = match self {
            Self::Cancelled | Self::Closed => Some(RefusalKind::Cancelled),
            _ => self.refusal_kind(),
        };
        kind.map_or("bug", RefusalKind::code)
    }

    /// Returns whether the GPU's driver cannot do this on this machine, whatever the settings are.
    pub(crate) fn is_not_supported(&self) -> bool {
        matches!(self, Self::Device { source } if source.is_not_supported())
    }

    pub(crate) fn share(source: MemoryError) -> Self {
        Self::Share { source: Arc::new(source) }
    }

    pub(crate) fn device(source: CudaError) -> Self {
        Self::Device { source: Arc::new(source) }
    }

    /// Maps an error that only reports a broken connection to `ConnectionLost`, as the other wires do.
    #[cfg(feature = "rdma")]
    pub(crate) fn rdma(source: VerbsError) -> Self {
        match source {
            VerbsError::Failed(failure) if failure.is_of_the_connection() => {
                Self::lost(io::Error::other(source))
            }
            source => Self::Rdma { source: Arc::new(source) },
        }
    }

    pub(crate) fn lost(source: io::Error) -> Self {
        Self::ConnectionLost { source: Arc::new(source) }
    }

    pub(crate) fn lost_because(why: &'static str) -> Self {
        Self::lost(io::Error::other(why))
    }
}

impl From<&TransferError> for Refusal {
    fn from(error: &TransferError) -> Self {
        Refusal::new(error.refusal_kind().unwrap_or(RefusalKind::Failed), in_full(error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_the_world_are_retried_elsewhere_and_ours_are_bugs() {
        let lost = TransferError::lost_because("reset");
        assert_eq!(lost.caller_action(), CallerAction::RetryElsewhere);
        assert_eq!(TransferError::Expired.caller_action(), CallerAction::RetryElsewhere);
        assert_eq!(TransferError::Incomplete { sent: 1, wanted: 2 }.caller_action(), CallerAction::Bug);
    }

    #[test]
    fn a_refusal_carries_the_whole_chain() {
        let refusal = Refusal::from(&TransferError::lost_because("reset by peer"));
        assert_eq!(refusal.kind, RefusalKind::Wire);
        assert_eq!(refusal.reason, "the connection is lost: reset by peer");
    }
}
