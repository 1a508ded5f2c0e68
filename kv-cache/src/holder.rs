//! The purpose of a lease and its request, as the ledger shows them. The pool does not depend on them.

use std::fmt;

use types::RequestId;

/// The use of the blocks of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Holding {
    /// The KV of a sequence that runs or waits.
    Sequence,
    /// KV on its way to this node.
    Landing,
    /// KV on its way from this node, or KV that waits to be fetched.
    Outbox,
}

impl fmt::Display for Holding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sequence => "sequence",
            Self::Landing => "landing",
            Self::Outbox => "outbox",
        })
    }
}

/// The purpose of a lease and its request, for the ledger.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    pub what: Holding,
    pub request: RequestId,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.what, self.request)
    }
}
