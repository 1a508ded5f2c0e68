//! Why the pool did not take or give KV.

use kv_cache::NoRoom;
use kv_transfer::TransferError;
use types::{RefusalKind, Scheme, Verdict};

#[derive(Clone, Debug, thiserror::Error)]
pub enum PoolError {
    #[error("the pool has no connector {0}")]
    NoConnector(Scheme),
    /// Everything is being read or written. What nobody reads would have been evicted.
    #[error("no room for {wanted} blocks")]
    Full { wanted: usize, source: NoRoom },
    #[error("{have} of {wanted} blocks are here")]
    Missing { have: usize, wanted: usize },
    #[error("the landing is for {landing} tokens, the blocks hold {blocks}")]
    OtherLength { landing: u32, blocks: u32 },
    #[error("block {ordinal} is not what it was when it was put")]
    Spoilt { ordinal: usize },
    #[error("move KV")]
    Transfer(#[from] TransferError),
}

impl PoolError {
    /// What the caller should do. All of it can be computed again.
    pub fn verdict(&self) -> Verdict {
        match self {
            Self::NoConnector(_) | Self::OtherLength { .. } => RefusalKind::Mismatch.verdict(),
            Self::Full { .. } => RefusalKind::Full.verdict(),
            Self::Missing { .. } | Self::Spoilt { .. } => RefusalKind::Landing.verdict(),
            Self::Transfer(error) => error.verdict(),
        }
    }
}
