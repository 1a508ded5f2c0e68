//! What the caller should do about an error.

use std::fmt;
use std::time::Duration;

/// The one question that an error answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The request itself is at fault; it fails anywhere.
    Reject,
    /// This node cannot; another may.
    RetryElsewhere,
    /// No node can now.
    RetryLater(Duration),
    /// An invariant of ours is broken.
    Bug,
}

/// A node's typed "no".
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{kind}: {reason}")]
pub struct Refusal {
    pub kind: RefusalKind,
    /// For humans: what was asked, what stands in the way.
    pub reason: String,
}

impl Refusal {
    pub fn new(kind: RefusalKind, reason: impl Into<String>) -> Self {
        Self { kind, reason: reason.into() }
    }

    pub fn verdict(&self) -> Verdict {
        self.kind.verdict()
    }
}

macro_rules! refusal_kinds {
    ($($(#[$doc:meta])* $name:ident = $code:literal => $verdict:expr,)*) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum RefusalKind { $($(#[$doc])* $name,)* }

        impl RefusalKind {
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// The word for it on the wire and in the documents.
            pub fn code(self) -> &'static str {
                match self { $(Self::$name => $code,)* }
            }

            pub fn from_code(code: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|kind| kind.code() == code)
            }

            pub fn verdict(self) -> Verdict {
                match self { $(Self::$name => $verdict,)* }
            }
        }
    };
}

refusal_kinds! {
    /// No room for the sequence's KV.
    Full = "full" => Verdict::RetryElsewhere,
    /// More predicted work is queued than the node lets wait.
    Queue = "queue" => Verdict::RetryElsewhere,
    Draining = "draining" => Verdict::RetryElsewhere,
    /// The two sides' KV cannot be read the same way.
    Mismatch = "mismatch" => Verdict::RetryElsewhere,
    /// The landing is gone, expired, or was never granted.
    Landing = "landing" => Verdict::RetryElsewhere,
    /// The wire to the landing broke.
    Wire = "wire" => Verdict::RetryElsewhere,
    /// Could never fit on such a node, however empty.
    TooLong = "too_long" => Verdict::Reject,
    Invalid = "invalid" => Verdict::Reject,
    Protocol = "protocol" => Verdict::RetryElsewhere,
    Deadline = "deadline" => Verdict::Reject,
    Cancelled = "cancelled" => Verdict::Reject,
    /// The node failed while it worked on the request.
    Failed = "failed" => Verdict::RetryElsewhere,
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
