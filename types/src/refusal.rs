//! The classification of errors by the caller's action.

use std::fmt;
use std::time::Duration;

/// The action that the caller should take after an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallerAction {
    /// The request is at fault; it fails on every node.
    Reject,
    /// This node cannot serve the request; another node may.
    RetryElsewhere,
    /// No node can serve the request now.
    RetryLater(Duration),
    /// An internal invariant is broken.
    Bug,
}

/// A node's refusal of a request, with its kind and reason.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{kind}: {reason}")]
pub struct Refusal {
    pub kind: RefusalKind,
    /// The reason for humans: the request and the obstacle.
    pub reason: String,
}

impl Refusal {
    pub fn new(kind: RefusalKind, reason: impl Into<String>) -> Self {
        Self { kind, reason: reason.into() }
    }

    pub fn caller_action(&self) -> CallerAction {
        self.kind.caller_action()
    }
}

macro_rules! refusal_kinds {
    ($($(#[$doc:meta])* $name:ident = $code:literal => $action:expr,)*) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum RefusalKind { $($(#[$doc])* $name,)* }

        impl RefusalKind {
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// Returns the code of this kind on the wire and in docs/errors.md.
            pub fn code(self) -> &'static str {
                match self { $(Self::$name => $code,)* }
            }

            pub fn from_code(code: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|kind| kind.code() == code)
            }

            pub fn caller_action(self) -> CallerAction {
                match self { $(Self::$name => $action,)* }
            }
        }
    };
}

refusal_kinds! {
    /// The node has no room for the sequence's KV.
    Full = "full" => CallerAction::RetryElsewhere,
    /// The predicted work in the node's queue exceeds its limit.
    Queue = "queue" => CallerAction::RetryElsewhere,
    Draining = "draining" => CallerAction::RetryElsewhere,
    /// The two nodes cannot use each other's KV.
    Mismatch = "mismatch" => CallerAction::RetryElsewhere,
    /// The landing has ended, has expired or was never granted.
    Landing = "landing" => CallerAction::RetryElsewhere,
    /// The connection to the landing broke.
    Wire = "wire" => CallerAction::RetryElsewhere,
    /// The sequence does not fit on such a node, even if it is empty.
    TooLong = "too_long" => CallerAction::Reject,
    Invalid = "invalid" => CallerAction::Reject,
    Protocol = "protocol" => CallerAction::RetryElsewhere,
    Deadline = "deadline" => CallerAction::Reject,
    Cancelled = "cancelled" => CallerAction::Reject,
    /// The node failed while it processed the request.
    Failed = "failed" => CallerAction::RetryElsewhere,
}

impl fmt::Display for RefusalKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.code())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_found_again() {
        for kind in RefusalKind::ALL {
            assert_eq!(RefusalKind::from_code(kind.code()), Some(*kind));
        }
        assert_eq!(RefusalKind::from_code("nonsense"), None);
    }
}
