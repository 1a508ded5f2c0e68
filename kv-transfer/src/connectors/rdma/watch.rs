//! Hot path. Waits for completions on their file descriptor, without polling.

use std::convert::Infallible;

use device::verbs::{Completion, Completions};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::error::TransferError;

/// Passes every completion to `take`, until an error.
pub(super) async fn watch(
    completions: Completions,
    mut take: impl FnMut(Completion) -> Result<(), TransferError>,
) -> Result<Infallible, TransferError> {
    #[expect(deprecated, reason = "the other constructor is unsafe; the clone keeps this descriptor open")]
    let fd = AsyncFd::with_interest(completions.clone(), Interest::READABLE).map_err(TransferError::lost)?;
    let mut some = Vec::new();
    loop {
        let mut ready = fd.readable().await.map_err(TransferError::lost)?;
        while completions.take_word().map_err(TransferError::rdma)? {}
        ready.clear_ready();
        // Arming comes first, so that no completion is missed: later ones notify the descriptor, and earlier
        // ones are taken now.
        completions.arm().map_err(TransferError::rdma)?;
        while completions.take(&mut some).map_err(TransferError::rdma)? > 0 {
            some.drain(..).try_for_each(&mut take)?;
            tokio::task::yield_now().await;
        }
    }
}
