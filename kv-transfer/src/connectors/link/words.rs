//! What senders have still to say about landings that their devices write into.
//!
//! A landing that fails keeps its blocks back until its sender says that its device is done with them, or until the
//! sender's right to write is taken away with the link.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use tokio::sync::Notify;
use types::TransferId;

use crate::quiet::Quiet;

/// The words that one link's sender owes. There is one for each landing that it has opened.
#[derive(Debug, Default)]
pub(super) struct Words {
    state: Mutex<State>,
}

/// Held for a look-up, never across an await.
#[derive(Debug, Default)]
struct State {
    owed: BTreeMap<TransferId, Arc<Word>>,
    /// The right to write is gone: nothing is owed any more.
    all_said: bool,
}

/// One of them.
#[derive(Debug, Default)]
struct Word {
    said: AtomicBool,
    changed: Notify,
}

impl Words {
    /// Whose blocks are quiet once the word is said.
    pub(super) fn awaited_of(&self, transfer: TransferId) -> Arc<dyn Quiet> {
        let mut state = self.state();
        let word = Arc::<Word>::default();
        if state.all_said {
            word.say();
        } else {
            state.owed.insert(transfer, Arc::clone(&word));
        }
        word
    }

    /// A word that nobody waits for is late, not wrong.
    pub(super) fn said(&self, transfer: TransferId) {
        if let Some(word) = self.state().owed.remove(&transfer) {
            word.say();
        }
    }

    /// Nothing can be written any more, whatever was said.
    pub(super) fn all_said(&self) {
        let owed = {
            let mut state = self.state();
            state.all_said = true;
            std::mem::take(&mut state.owed)
        };
        owed.into_values().for_each(|word| word.say());
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Word {
    fn say(&self) {
        self.said.store(true, Ordering::Release);
        self.changed.notify_waiters();
    }
}

#[async_trait]
impl Quiet for Word {
    fn awaited(&self) -> &'static str {
        "the sender's word that its device is done"
    }

    /// One transfer's right cannot be taken away without that of all others of its link; so it waits.
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
        let words = Words::default();
        let (first, second) = (words.awaited_of(TransferId(1)), words.awaited_of(TransferId(2)));
        assert!(!first.revoke());
        timeout(Duration::from_secs(3600), first.proven()).await.expect_err("nothing was said");
        words.said(TransferId(1));
        words.said(TransferId(7));
        first.proven().await;
        assert!(!second.revoke(), "it is another one's");
        tokio::join!(second.proven(), async { words.all_said() });
        assert!(words.awaited_of(TransferId(3)).revoke(), "nobody has a right any more");
    }
}
