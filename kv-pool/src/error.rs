//! Why the pool did not take or give KV.

use kv_cache::NoRoom;
use kv_transfer::TransferError;
use types::{Refusal, RefusalKind, Scheme, Verdict};

#[derive(Clone, Debug, thiserror::Error)]
pub enum PoolError {
    #[error("the pool has no connector {0}")]
    NoConnector(Scheme),
    /// Everything is being read or written. What nobody reads would have been evicted.
    #[error("no room for {wanted} blocks")]
    Full { wanted: usize, source: NoRoom },
    #[error("{hashes} hashes for a sequence of {n_tokens} tokens")]
    OtherHashes { hashes: usize, n_tokens: u32 },
    #[error("the landing is for {landing} tokens, the sequence has {stored}")]
    OtherLength { landing: u32, stored: u32 },
    #[error("block {ordinal} is not what it was when it was put")]
    Spoilt { ordinal: usize },
    #[error("move KV")]
    Transfer(#[from] TransferError),
}

impl PoolError {
    /// What the caller should do. All of it can be computed again.
    pub fn verdict(&self) -> Verdict {
        self.refusal_kind().verdict()
    }

    fn refusal_kind(&self) -> RefusalKind {
        match self {
            Self::NoConnector(_) => RefusalKind::Mismatch,
            Self::Full { .. } => RefusalKind::Full,
            Self::OtherHashes { .. } => RefusalKind::Invalid,
            Self::OtherLength { .. } => RefusalKind::Landing,
            Self::Spoilt { .. } => RefusalKind::Failed,
            Self::Transfer(error) => Refusal::from(error).kind,
        }
    }
}

impl From<&PoolError> for Refusal {
    fn from(error: &PoolError) -> Self {
        match error {
            PoolError::Transfer(error) => error.into(),
            PoolError::Full { source, .. } => Self::new(RefusalKind::Full, format!("{error}: {source}")),
            _ => Self::new(error.refusal_kind(), error.to_string()),
        }
    }
}
