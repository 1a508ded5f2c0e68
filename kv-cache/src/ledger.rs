//! The ledger for operators: the state, the holder and the age of every block.

use std::time::Duration;

use tokio::time::Instant;
use types::{BlockHash, BlockIdx};

use crate::pool_state::PoolState;
use crate::record::{BlockState, Record};

/// One line of the ledger: one block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LedgerEntry {
    pub block: BlockIdx,
    pub state: BlockState,
    /// The holder and its request; the first one if several share the block.
    pub holder: Option<String>,
    /// The number of leases that share the block.
    pub readers: u32,
    /// The block's hash in the prefix index.
    pub hash: Option<BlockHash>,
    /// The time for which the block has been in this state.
    pub age: Duration,
}

impl PoolState {
    pub(crate) fn ledger(&self, now: Instant) -> Vec<LedgerEntry> {
        let mut entries: Vec<LedgerEntry> =
            self.records().map(|(block, record)| record.entry(block, now)).collect();
        for hold in self.holds() {
            let holder = hold.to_string();
            for block in hold.tables.blocks() {
                entries[block.0 as usize].holder.get_or_insert_with(|| holder.clone());
            }
        }
        entries
    }
}

impl Record {
    fn entry(&self, block: BlockIdx, now: Instant) -> LedgerEntry {
        LedgerEntry {
            block,
            state: self.state(),
            holder: None,
            readers: self.leases,
            hash: self.hash,
            age: now.saturating_duration_since(self.since),
        }
    }
}
