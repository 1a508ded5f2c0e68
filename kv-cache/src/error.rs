//! What can go wrong, and what to do about it.

use types::{BlockCounts, BlockHash, BlockIdx, Verdict};

/// Fewer blocks are free or cached than were asked for. Nothing was taken and nothing evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no room: {wanted} blocks wanted, {available} available")]
pub struct NoRoom {
    /// Over all layer groups.
    pub wanted: usize,
    pub available: usize,
}

impl NoRoom {
    pub fn verdict(&self) -> Verdict {
        Verdict::RetryElsewhere
    }
}

/// The pool's state contradicts itself. Always a bug of ours.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IntegrityError {
    #[error("counts do not add up: counted {counted:?}, booked {booked:?}")]
    Counts { counted: BlockCounts, booked: BlockCounts },
    #[error("{block:?} is held by {held} leases, booked {booked}")]
    Holds { block: BlockIdx, held: u32, booked: u32 },
    #[error("{block:?} is shared by {holds} leases, but not in the prefix index")]
    SharedInPrivate { block: BlockIdx, holds: u32 },
    #[error("{block:?} is free and held at once")]
    FreeAndHeld { block: BlockIdx },
    #[error("{block:?} is in the prefix index twice, or with another hash than {hash:?}")]
    Index { block: BlockIdx, hash: BlockHash },
    #[error("cached block {hash:?}: {what}")]
    Tree { hash: BlockHash, what: &'static str },
    #[error("free runs: {what}")]
    Runs { what: &'static str },
}

impl IntegrityError {
    pub fn verdict(&self) -> Verdict {
        Verdict::Bug
    }
}
