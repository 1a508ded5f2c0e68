//! The pool's state behind its lock, shared by leases, readers of events and clones of the pool.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use types::BlockHash;

use crate::event_log::Reading;
use crate::hold::{HoldId, Tables};
use crate::holder::Holder;
use crate::pool_state::PoolState;

/// The pool's state and its lock. Cheap to clone: clones share one state.
#[derive(Clone)]
pub(crate) struct SharedPool(Arc<Shared>);

struct Shared {
    /// A std mutex, because sections are short (about a microsecond for each block of a call) and never
    /// await. Drops, the worker's thread and tasks enter them.
    state: Mutex<PoolState>,
    /// Changes when blocks become available.
    freed: watch::Sender<u64>,
    /// Notified of every event. A `Notify` wakes its readers in the order in which they wait; a watch would
    /// not.
    news: Arc<Notify>,
}

impl SharedPool {
    pub(crate) fn new(state: PoolState) -> Self {
        let (state, freed) = (Mutex::new(state), watch::Sender::new(0));
        Self(Arc::new(Shared { state, freed, news: Arc::default() }))
    }

    pub(crate) fn freed(&self) -> watch::Receiver<u64> {
        self.0.freed.subscribe()
    }

    pub(crate) fn news(&self) -> Arc<Notify> {
        Arc::clone(&self.0.news)
    }

    pub(crate) fn join(&self, first: HoldId, later: HoldId) -> Option<Arc<Tables>> {
        self.state().join(first, later)
    }

    pub(crate) fn publish(&self, id: HoldId, ordinal: usize, hash: BlockHash) {
        self.change(|state, now| state.publish(id, ordinal, hash, now));
    }

    pub(crate) fn give_back(&self, id: HoldId, group: usize, before: usize) -> Arc<Tables> {
        self.change(|state, now| state.give_back(id, group, before, now))
    }

    pub(crate) fn rename(&self, id: HoldId, holder: Holder) {
        self.state().rename(id, holder);
    }

    pub(crate) fn quarantine(&self, id: HoldId, why: &'static str) -> HoldId {
        self.change(|state, now| state.quarantine(id, why, now))
    }

    pub(crate) fn release(&self, id: HoldId) {
        self.change(|state, now| state.release(id, now));
    }

    pub(crate) fn read_events(&self, after: Option<u64>) -> Reading {
        self.state().read_events(after)
    }

    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Changes the state, then wakes the tasks that wait for room or for events.
    pub(crate) fn change<T>(&self, change: impl FnOnce(&mut PoolState, Instant) -> T) -> T {
        let now = Instant::now();
        let mut state = self.state();
        let before = (state.counts().available(), state.last_event());
        let result = change(&mut state, now);
        let after = (state.counts().available(), state.last_event());
        drop(state);
        if after.0 > before.0 {
            self.0.freed.send_modify(|changes| *changes += 1);
        }
        if after.1 > before.1 {
            self.0.news.notify_waiters();
        }
        result
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, PoolState> {
        self.0.state.lock().expect("the state is not used after a panic inside of its lock")
    }
}

impl fmt::Debug for SharedPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedPool").field("counts", &self.state().counts()).finish()
    }
}
