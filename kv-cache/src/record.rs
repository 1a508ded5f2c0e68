//! One block's record, and the state that follows from it.

use std::fmt;

use tokio::time::Instant;
use types::BlockHash;

/// The state of a block, which follows from its record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockState {
    Free,
    /// Held by one lease or, if published, by several.
    Leased,
    /// Held by the prefix index alone.
    Cached,
    /// Quarantined and not leased: a remote write may still reach it.
    Quarantined,
}

impl BlockState {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Free => "free",
            Self::Leased => "leased",
            Self::Cached => "cached",
            Self::Quarantined => "quarantined",
        }
    }
}

impl fmt::Display for BlockState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The record of one block: its holders, its hash, and when its state last changed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Record {
    pub(crate) leases: u32,
    pub(crate) quarantines: u32,
    /// The hash by which the index refers to this block; `None` if it is not in the index.
    pub(crate) hash: Option<BlockHash>,
    pub(crate) since: Instant,
}

impl Record {
    pub(crate) fn state(&self) -> BlockState {
        match (self.leases, self.quarantines, self.hash) {
            (0, 0, None) => BlockState::Free,
            (0, 0, Some(_)) => BlockState::Cached,
            (0, _, _) => BlockState::Quarantined,
            _ => BlockState::Leased,
        }
    }

    pub(crate) fn holds(&self) -> u32 {
        self.leases + self.quarantines
    }

    pub(crate) fn begin_lease(&mut self) {
        self.leases += 1;
    }

    pub(crate) fn end_lease(&mut self) {
        self.leases -= 1;
    }

    pub(crate) fn end_quarantine(&mut self) {
        self.quarantines -= 1;
    }
}
