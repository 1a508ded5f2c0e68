//! The pool: hands out leases on blocks, and takes the blocks back.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;
use types::{BlockCounts, BlockHash, KvLayout};

use crate::error::{IntegrityError, NoRoom};
use crate::event_log::EVENTS_KEPT_MAX;
use crate::events::BlockEvents;
use crate::hold::{HoldId, Tables};
use crate::holder::Holder;
use crate::lease::BlockLease;
use crate::ledger::LedgerEntry;
use crate::pool_state::PoolState;
use crate::shared::SharedPool;

/// All blocks of one node. Cheap to clone: clones share the pool.
///
/// The blocks of all layer groups have one range of numbers. A lease has the same number of blocks for each group. No
/// call waits. A caller without room may watch [`freed`](Self::freed) and try again.
#[derive(Clone)]
pub struct BlockPool {
    shared: SharedPool,
}

impl BlockPool {
    /// The time without work after which a node checks its pool's [`integrity`](Self::integrity).
    pub const CHECK_AFTER: Duration = Duration::from_secs(30);

    pub fn new(layout: &KvLayout, n_blocks: u32) -> Self {
        Self::with_events_kept(layout, n_blocks, EVENTS_KEPT_MAX)
    }

    fn with_events_kept(layout: &KvLayout, n_blocks: u32, events_kept_max: usize) -> Self {
        let state = PoolState::new(layout.groups.len(), n_blocks, events_kept_max, Instant::now());
        Self { shared: SharedPool::new(state) }
    }

    /// Leases `n_blocks` fresh blocks of each group, all or none. Their content is undefined.
    ///
    /// Neighbouring blocks are preferred, and within a table the blocks ascend. If there are too few free blocks,
    /// cached blocks without readers are evicted, the least recently used first.
    pub fn reserve(&self, n_blocks: usize, holder: Holder) -> Result<BlockLease, NoRoom> {
        let (id, tables) = self.shared.change(|state, now| state.reserve(n_blocks, holder, now))?;
        Ok(self.lease(id, tables))
    }

    /// Leases the longest cached prefix of a sequence, which may be empty. The blocks are shared and must not be
    /// written.
    ///
    /// `hashes` are those of the sequence's full blocks that the caller can use, in order.
    pub fn adopt(&self, hashes: &[BlockHash], holder: Holder) -> BlockLease {
        let (id, tables) = self.shared.change(|state, now| state.adopt(hashes, holder, now));
        self.lease(id, tables)
    }

    /// Returns the number of blocks in each state. The call is cheap.
    pub fn counts(&self) -> BlockCounts {
        self.shared.state().counts()
    }

    /// Returns the state, holder, readers, hash and age of every block. For humans; the cost is linear in the
    /// number of blocks.
    pub fn ledger(&self) -> Vec<LedgerEntry> {
        self.shared.state().ledger(Instant::now())
    }

    /// Recounts everything and compares it with the state. For idle times and tests: the pool is locked for about a
    /// microsecond per block.
    pub fn integrity(&self) -> Result<(), IntegrityError> {
        self.shared.state().integrity()
    }

    /// Returns a channel that changes whenever blocks become available. To wait for room: subscribe, try, and
    /// on [`NoRoom`] await a change.
    pub fn freed(&self) -> watch::Receiver<u64> {
        self.shared.freed()
    }

    /// Returns a reader of the stored and evicted hashes, beginning with a snapshot.
    pub fn events(&self) -> BlockEvents {
        BlockEvents::new(self.shared.clone())
    }

    fn lease(&self, id: HoldId, tables: Arc<Tables>) -> BlockLease {
        BlockLease::new(self.shared.clone(), id, tables)
    }
}

impl fmt::Debug for BlockPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockPool").field("counts", &self.counts()).finish()
    }
}

#[cfg(test)]
pub(crate) mod tests;
