//! Hot path. Waits for completions, by their descriptor and never by asking again and again.

use std::convert::Infallible;

use device::verbs::{Completion, Completions};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::error::TransferError;

/// Gives every completion to `take`, until something fails.
pub(super) async fn watch(
    completions: Completions,
    mut take: impl FnMut(Completion) -> Result<(), TransferError>,
) -> Result<Infallible, TransferError> {
    #[expect(
        deprecated,
        reason = "the other one is unsafe; this descriptor is open as long as what it is taken from"
    )]
    let fd = AsyncFd::with_interest(completions.clone(), Interest::READABLE).map_err(TransferError::lost)?;
    let mut some = Vec::new();
    loop {
        let mut ready = fd.readable().await.map_err(TransferError::lost)?;
        while completions.take_word().map_err(TransferError::rdma)? {}
        ready.clear_ready();
        // In this order: what comes after the arming brings a word, and what came before is taken now.
        completions.arm().map_err(TransferError::rdma)?;
        while completions.take(&mut some).map_err(TransferError::rdma)? > 0 {
            some.drain(..).try_for_each(&mut take)?;
            tokio::task::yield_now().await;
        }
    }
}
