//! The errors of storing and delivering KV.

use kv_cache::NoRoom;
use kv_transfer::TransferError;
use types::{CallerAction, Refusal, RefusalKind, Scheme};

#[derive(Clone, Debug, thiserror::Error)]
pub enum StoreError {
    #[error("the pool has no connector {0}")]
    NoConnector(Scheme),
    /// All blocks are leased, so none can be evicted.
    #[error("no room for {wanted} blocks")]
    Full { wanted: usize, source: NoRoom },
    #[error("{hashes} hashes for a sequence of {n_tokens} tokens")]
    OtherHashes { hashes: usize, n_tokens: u32 },
    #[error("the landing is for {landing} tokens, the sequence has {stored}")]
    OtherLength { landing: u32, stored: u32 },
    #[error("block {ordinal} differs from what was stored")]
    Spoilt { ordinal: usize },
    #[error("transfer KV")]
    Transfer(#[from] TransferError),
}

impl StoreError {
    /// Returns the action that the caller should take. A retry is always possible, because the KV can be
    /// computed again.
    pub fn caller_action(&self) -> CallerAction {
        self.refusal_kind().caller_action()
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

impl From<&StoreError> for Refusal {
    fn from(error: &StoreError) -> Self {
        match error {
            StoreError::Transfer(error) => error.into(),
            StoreError::Full { source, .. } => Self::new(RefusalKind::Full, format!("{error}: {source}")),
            _ => Self::new(error.refusal_kind(), error.to_string()),
        }
    }
}
