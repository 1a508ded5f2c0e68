//! Runs work on long texts on a blocking thread, where it delays no other request.

use tokio::task::{JoinError, spawn_blocking};

/// The size above which a text is processed on a blocking thread. A tokenizer processes about two bytes per microsecond,
/// and the router's own threads must not be blocked for more than half a millisecond.
const OFFLOAD_BYTES: usize = 1 << 10;

/// Runs `work` at once for short texts, and on a blocking thread for long ones. Dropping the future discards
/// the result.
pub async fn run_by_size<T: Send + 'static>(
    n_bytes: usize,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, JoinError> {
    if n_bytes < OFFLOAD_BYTES { Ok(work()) } else { spawn_blocking(work).await }
}
