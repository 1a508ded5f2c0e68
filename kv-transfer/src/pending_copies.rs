//! Counts the copies in progress for one landing or one outgoing transfer.
//!
//! The CPU copies under a landing's lock, so a closed landing is quiet. A device copy continues for some microseconds
//! after the call that starts it has returned, and the other processes of a node copy until they report the end. Each such
//! copy is a [`PendingCopy`], counted until it is dropped.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use async_trait::async_trait;
use tokio::sync::Notify;

use crate::quiet::Quiet;

/// The number of copies in progress for one landing or one outgoing transfer.
#[derive(Debug, Default)]
pub(crate) struct PendingCopies {
    n: AtomicUsize,
    landed: Notify,
}

/// One copy in progress. Drop it when it is reported done.
#[derive(Debug)]
#[must_use = "a pending copy that is not held counts as done"]
pub(crate) struct PendingCopy {
    pending_copies: Arc<PendingCopies>,
}

impl PendingCopies {
    pub(crate) fn begin(self: &Arc<Self>) -> PendingCopy {
        self.n.fetch_add(1, Ordering::AcqRel);
        PendingCopy { pending_copies: Arc::clone(self) }
    }
}

impl Drop for PendingCopy {
    fn drop(&mut self) {
        if self.pending_copies.n.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.pending_copies.landed.notify_waiters();
        }
    }
}

#[async_trait]
impl Quiet for PendingCopies {
    fn awaited(&self) -> &'static str {
        "a copy in progress on this node"
    }

    /// Returns whether no copy is left. No copy can begin after the landing is closed.
    fn revoke(&self) -> bool {
        // A read-modify-write, because it is ordered with every `begin`: a copy that begins after this call
        // sees all writes before it.
        self.n.fetch_add(0, Ordering::AcqRel) == 0
    }

    async fn proven(&self) {
        loop {
            let landed = self.landed.notified();
            tokio::pin!(landed);
            // Registers before the check, so that no notification between the check and the wait is missed.
            landed.as_mut().enable();
            if self.revoke() {
                return;
            }
            landed.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn proof_comes_with_the_last_flight_and_with_no_timer() {
        let pending_copies = Arc::new(PendingCopies::default());
        assert!(pending_copies.revoke(), "nothing is under way");
        let (first, second) = (pending_copies.begin(), pending_copies.begin());
        drop(first);
        assert!(!pending_copies.revoke());
        timeout(Duration::from_secs(3600), pending_copies.proven()).await.expect_err("one is under way");
        let (_, ()) = tokio::join!(pending_copies.proven(), async { drop(second) });
        assert!(pending_copies.revoke());
    }
}
