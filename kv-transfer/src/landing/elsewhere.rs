//! What the other processes of a node write into a landing's blocks.

use std::sync::{Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use tokio::sync::Notify;

use crate::quiet::Quiet;

/// Whether other processes of this node write into a landing's blocks.
#[derive(Debug, Default)]
pub(crate) struct WritesElsewhere {
    /// Held for a look, never across an await.
    state: Mutex<State>,
    ended: Notify,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    /// No process was told of the landing.
    #[default]
    Idle,
    Busy,
    /// No process writes, and none may begin.
    Ended,
}

impl WritesElsewhere {
    /// Marks the begin of writes. Returns `None` if the landing has ended. Writes end with the drop of the value.
    pub(crate) fn begin(&self) -> Option<WritesGuard<'_>> {
        let mut state = self.state();
        (*state != State::Ended).then(|| *state = State::Busy).map(|()| WritesGuard(self))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The time in which other processes may write.
#[derive(Debug)]
pub(crate) struct WritesGuard<'a>(&'a WritesElsewhere);

impl Drop for WritesGuard<'_> {
    fn drop(&mut self) {
        *self.0.state() = State::Ended;
        self.0.ended.notify_waiters();
    }
}

#[async_trait]
impl Quiet for WritesElsewhere {
    fn awaited(&self) -> &'static str {
        "another process of this node"
    }

    fn revoke(&self) -> bool {
        let mut state = self.state();
        if *state == State::Idle {
            *state = State::Ended;
        }
        *state == State::Ended
    }

    async fn proven(&self) {
        loop {
            let ended = self.ended.notified();
            tokio::pin!(ended);
            ended.as_mut().enable();
            if self.revoke() {
                return;
            }
            ended.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn nothing_is_written_after_the_end() {
        let idle = WritesElsewhere::default();
        assert!(idle.revoke() && idle.begin().is_none());
        let busy = WritesElsewhere::default();
        let writes = busy.begin().expect("it has not ended");
        assert!(!busy.revoke());
        timeout(Duration::from_secs(3600), busy.proven()).await.expect_err("they write");
        let (_, ()) = tokio::join!(busy.proven(), async { drop(writes) });
        assert!(busy.revoke() && busy.begin().is_none());
    }
}
