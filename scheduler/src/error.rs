//! The errors of starting a worker. The error of a sequence is a [`types::Refusal`].

use types::CallerAction;

#[derive(Debug, thiserror::Error)]
pub enum SchedulerError {
    #[error("scheduler settings: {0}")]
    Settings(String),
    #[error("the pool has {pool} blocks, the backend's memory {memory}")]
    PoolSize { pool: u32, memory: u32 },
    #[error("cannot start the worker's thread")]
    Thread(#[source] std::io::Error),
}

impl SchedulerError {
    pub fn caller_action(&self) -> CallerAction {
        match self {
            Self::Settings(_) => CallerAction::Reject,
            Self::PoolSize { .. } => CallerAction::Bug,
            Self::Thread(_) => CallerAction::RetryElsewhere,
        }
    }
}
