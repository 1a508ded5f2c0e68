//! Work on long texts, on a thread of its own, where it delays no other request.

use tokio::task::{JoinError, spawn_blocking};

/// Beyond this size a text is worked on aside. A tokenizer cuts some two bytes a microsecond, and the router's own threads
/// shall not be away for more than half a millisecond.
const OFFLOAD_BYTES: usize = 1 << 10;

/// Does `work` here and now for short texts, and aside for long ones. Dropped, it lets the work end for nothing.
pub async fn run_by_size<T: Send + 'static>(
    n_bytes: usize,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, JoinError> {
    if n_bytes < OFFLOAD_BYTES { Ok(work()) } else { spawn_blocking(work).await }
}
