//! The errors of starting a worker. The error of a sequence is a [`types::Refusal`].

use types::Verdict;

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
    pub fn verdict(&self) -> Verdict {
        match self {
            Self::Settings(_) => Verdict::Reject,
            Self::PoolSize { .. } => Verdict::Bug,
            Self::Thread(_) => Verdict::RetryElsewhere,
        }
    }
}
