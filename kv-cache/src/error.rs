//! The errors of this crate, and their verdicts.

use types::{BlockCounts, BlockHash, BlockIdx, CallerAction};

/// Fewer blocks are free or cached than were requested. Nothing was taken and nothing evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no room: {wanted} blocks wanted, {available} available")]
pub struct NoRoom {
    /// The number of requested blocks, summed over all layer groups.
    pub wanted: usize,
    pub available: usize,
}

impl NoRoom {
    pub fn caller_action(&self) -> CallerAction {
        CallerAction::RetryElsewhere
    }
}

/// The pool's state is inconsistent. This is always a bug.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IntegrityError {
    #[error("the counts are wrong: counted {counted:?}, recorded {booked:?}")]
    Counts { counted: BlockCounts, booked: BlockCounts },
    #[error("{block:?} is held by {held} leases, recorded {booked}")]
    Holds { block: BlockIdx, held: u32, booked: u32 },
    #[error("{block:?} is shared by {holds} leases, but not in the prefix index")]
    SharedInPrivate { block: BlockIdx, holds: u32 },
    #[error("{block:?} is both free and held")]
    FreeAndHeld { block: BlockIdx },
    #[error("{block:?} is in the prefix index twice, or with another hash than {hash:?}")]
    Index { block: BlockIdx, hash: BlockHash },
    #[error("cached block {hash:?}: {what}")]
    Tree { hash: BlockHash, what: &'static str },
    #[error("free runs: {what}")]
    Runs { what: &'static str },
}

impl IntegrityError {
    pub fn caller_action(&self) -> CallerAction {
        CallerAction::Bug
    }
}
