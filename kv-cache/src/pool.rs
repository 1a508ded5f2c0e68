//! The pool: hands out leases on blocks, and takes back what they held.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use types::{BlockCounts, BlockHash, KvLayout};

use crate::books::Books;
use crate::error::{IntegrityError, NoRoom};
use crate::events::{BlockEvents, EVENTS_KEPT_MAX, Reading};
use crate::hold::{HoldId, Tables};
use crate::lease::{BlockLease, Holder};
use crate::ledger::LedgerEntry;

/// All blocks of one node. Cheap to clone: all clones are the same pool.
///
/// The blocks of all layer groups are one range of numbers; a lease has as many blocks of it for each group.
/// No call waits. Whoever finds no room may watch [`freed`](Self::freed) and ask again.
#[derive(Clone)]
pub struct BlockPool {
    shared: Arc<Shared>,
}

struct Shared {
    /// A std mutex: sections are short (about a microsecond for each block that a call moves), never await, and are
    /// entered from drops, from the worker's thread and from tasks alike.
    books: Mutex<Books>,
    /// Changes when blocks became available.
    freed: watch::Sender<u64>,
    /// Changes when there are new events.
    /// Rung for every event. It wakes its readers in the order in which they wait; a watch would not.
    news: Arc<Notify>,
}

impl BlockPool {
    pub fn new(layout: &KvLayout, n_blocks: u32) -> Self {
        Self::with_events_kept(layout, n_blocks, EVENTS_KEPT_MAX)
    }

    fn with_events_kept(layout: &KvLayout, n_blocks: u32, events_kept_max: usize) -> Self {
        let books = Mutex::new(Books::new(layout.groups.len(), n_blocks, events_kept_max, Instant::now()));
        Self { shared: Arc::new(Shared { books, freed: watch::Sender::new(0), news: Arc::default() }) }
    }

    /// Leases `n_blocks` fresh blocks of each group; what they hold is undefined. All of them, or none.
    ///
    /// Neighbouring blocks are preferred, and within a table the blocks ascend. Cached blocks that nobody reads are
    /// evicted when the free ones do not suffice, the longest unused first.
    pub fn reserve(&self, n_blocks: usize, holder: Holder) -> Result<BlockLease, NoRoom> {
        let (id, tables) = self.change(|books, now| books.reserve(n_blocks, holder, now))?;
        Ok(self.lease(id, tables))
    }

    /// Leases the longest cached prefix of a sequence, which may be nothing. The blocks are shared: read, not written.
    ///
    /// `hashes` are those of the sequence's full blocks that the caller has a use for, in order.
    pub fn adopt(&self, hashes: &[BlockHash], holder: Holder) -> BlockLease {
        let (id, tables) = self.change(|books, now| books.adopt(hashes, holder, now));
        self.lease(id, tables)
    }

    /// Where the blocks are at this moment. Costs nothing.
    pub fn counts(&self) -> BlockCounts {
        self.books().counts()
    }

    /// Every block: its state, holder, readers, hash and age. For humans; linear in the number of blocks.
    pub fn ledger(&self) -> Vec<LedgerEntry> {
        self.books().ledger(Instant::now())
    }

    /// Recounts everything and compares it with the books. For idle moments and tests: about a microsecond
    /// per block, during which the pool is locked.
    pub fn integrity(&self) -> Result<(), IntegrityError> {
        self.books().integrity()
    }

    /// Changes whenever blocks became available. To wait for room: subscribe, try, and on [`NoRoom`] await a change.
    pub fn freed(&self) -> watch::Receiver<u64> {
        self.shared.freed.subscribe()
    }

    /// What becomes cached and what is evicted, from a snapshot on.
    pub fn events(&self) -> BlockEvents {
        BlockEvents::new(self.clone(), Arc::clone(&self.shared.news))
    }

    pub(crate) fn join(&self, first: HoldId, later: HoldId) -> Option<Arc<Tables>> {
        self.books().join(first, later)
    }

    pub(crate) fn publish(&self, id: HoldId, ordinal: usize, hash: BlockHash) {
        self.change(|books, now| books.publish(id, ordinal, hash, now));
    }

    pub(crate) fn give_back(&self, id: HoldId, group: usize, before: usize) -> Arc<Tables> {
        self.change(|books, now| books.give_back(id, group, before, now))
    }

    pub(crate) fn rename(&self, id: HoldId, holder: Holder) {
        self.books().rename(id, holder);
    }

    pub(crate) fn quarantine(&self, id: HoldId, why: &'static str) -> HoldId {
        self.change(|books, now| books.quarantine(id, why, now))
    }

    pub(crate) fn release(&self, id: HoldId) {
        self.change(|books, now| books.release(id, now));
    }

    pub(crate) fn read_events(&self, after: Option<u64>) -> Reading {
        self.books().read_events(after)
    }

    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }

    fn lease(&self, id: HoldId, tables: Arc<Tables>) -> BlockLease {
        BlockLease::new(self.clone(), id, tables)
    }

    /// Changes the books, then tells those who wait for what came of it.
    fn change<T>(&self, change: impl FnOnce(&mut Books, Instant) -> T) -> T {
        let now = Instant::now();
        let mut books = self.books();
        let before = (books.counts().available(), books.last_event());
        let result = change(&mut books, now);
        let after = (books.counts().available(), books.last_event());
        drop(books);
        if after.0 > before.0 {
            self.shared.freed.send_modify(|changes| *changes += 1);
        }
        if after.1 > before.1 {
            self.shared.news.notify_waiters();
        }
        result
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        self.shared.books.lock().expect("books that a panic left half written must not be used")
    }
}

impl fmt::Debug for BlockPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockPool").field("counts", &self.counts()).finish()
    }
}

#[cfg(test)]
pub(crate) mod tests;
