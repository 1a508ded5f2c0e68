//! Reports that a sender's device no longer writes into a landing.
//!
//! A failed landing keeps its blocks in quarantine until its sender reports that its device is done, or until the end
//! of the link has revoked the sender's right to write.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use tokio::sync::Notify;
use types::TransferId;

use crate::quiet::Quiet;

/// The outstanding reports of one link's sender: one for each landing that it opened.
#[derive(Debug, Default)]
pub(super) struct QuietProofs {
    state: Mutex<State>,
}

/// The landings without a report. Held for a look-up, never across an await.
#[derive(Debug, Default)]
struct State {
    outstanding: BTreeMap<TransferId, Arc<QuietProof>>,
    /// Set once the sender has no right to write any more: no report is needed.
    close: bool,
}

/// The report of one landing.
#[derive(Debug, Default)]
struct QuietProof {
    said: AtomicBool,
    changed: Notify,
}

impl QuietProofs {
    /// Returns the proof of quiet for a landing that this sender opened.
    pub(super) fn expect(&self, transfer: TransferId) -> Arc<dyn Quiet> {
        let mut state = self.state();
        let word = Arc::<QuietProof>::default();
        if state.close {
            word.mark();
        } else {
            state.outstanding.insert(transfer, Arc::clone(&word));
        }
        word
    }

    /// Marks a report as received. A report for an unknown transfer is late, and ignored.
    pub(super) fn received(&self, transfer: TransferId) {
        if let Some(word) = self.state().outstanding.remove(&transfer) {
            word.mark();
        }
    }

    /// Marks all reports as received, because the sender can no longer write.
    pub(super) fn close(&self) {
        let outstanding = {
            let mut state = self.state();
            state.close = true;
            std::mem::take(&mut state.outstanding)
        };
        outstanding.into_values().for_each(|word| word.mark());
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl QuietProof {
    fn mark(&self) {
        self.said.store(true, Ordering::Release);
        self.changed.notify_waiters();
    }
}

#[async_trait]
impl Quiet for QuietProof {
    fn awaited(&self) -> &'static str {
        "the sender's report that its device is done"
    }

    /// Returns whether the report has come. The access of one transfer cannot be revoked alone, only that of
    /// the whole link.
    fn revoke(&self) -> bool {
        self.said.load(Ordering::Acquire)
    }

    async fn proven(&self) {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if self.revoke() {
                return;
            }
            changed.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn blocks_wait_for_their_senders_word_and_for_no_timer() {
        let words = QuietProofs::default();
        let (first, second) = (words.expect(TransferId(1)), words.expect(TransferId(2)));
        assert!(!first.revoke());
        timeout(Duration::from_secs(3600), first.proven()).await.expect_err("nothing was said");
        words.received(TransferId(1));
        words.received(TransferId(7));
        first.proven().await;
        assert!(!second.revoke(), "it is another one's");
        tokio::join!(second.proven(), async { words.close() });
        assert!(words.expect(TransferId(3)).revoke(), "no right is left");
    }
}
