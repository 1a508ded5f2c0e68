//! The integrity check of the pool: recounts all redundant state and compares it.

use types::{BlockCounts, BlockHash, BlockIdx};

use crate::error::IntegrityError;
use crate::pool_state::PoolState;
use crate::prefix::Entry;
use crate::record::{BlockState, Record};

impl PoolState {
    pub(crate) fn integrity(&self) -> Result<(), IntegrityError> {
        self.counts_add_up()?;
        self.holds_match()?;
        self.free_blocks_match()?;
        self.index_matches()?;
        self.index().fault().map_or(Ok(()), |(hash, what)| Err(IntegrityError::Tree { hash, what }))
    }

    fn counts_add_up(&self) -> Result<(), IntegrityError> {
        let mut counted = BlockCounts::default();
        for (_, record) in self.records() {
            counted.total += 1;
            match record.state() {
                BlockState::Free => counted.free += 1,
                BlockState::Leased => counted.leased += 1,
                BlockState::Cached => counted.cached += 1,
                BlockState::Quarantined => counted.quarantined += 1,
            }
        }
        let booked = self.counts();
        if counted == booked && booked.adds_up() {
            Ok(())
        } else {
            Err(IntegrityError::Counts { counted, booked })
        }
    }

    /// Checks that each block is held as often as its record says, and that only published blocks are shared.
    fn holds_match(&self) -> Result<(), IntegrityError> {
        let mut held = vec![0u32; self.records().len()];
        for block in self.holds().flat_map(|hold| hold.tables.blocks()) {
            held[block.0 as usize] += 1;
        }
        for ((block, record), held) in self.records().zip(held) {
            check_holds(block, record, held)?;
        }
        Ok(())
    }

    fn free_blocks_match(&self) -> Result<(), IntegrityError> {
        if let Some(what) = self.free().fault() {
            return Err(IntegrityError::Runs { what });
        }
        if self.free().n_blocks() != self.counts().free {
            return Err(IntegrityError::Runs {
                what: "the number of their blocks differs from the number of free blocks",
            });
        }
        let held = self.free().iter().find(|block| self.record(*block).state() != BlockState::Free);
        held.map_or(Ok(()), |block| Err(IntegrityError::FreeAndHeld { block }))
    }

    /// Checks that every entry's blocks have its hash and are held as often as it has readers, and that no other
    /// block has a hash.
    fn index_matches(&self) -> Result<(), IntegrityError> {
        for (hash, entry) in self.index().iter() {
            for block in &entry.blocks {
                check_entry(hash, entry, *block, self.record(*block))?;
            }
        }
        let mut named = self.records().filter_map(|(block, record)| Some((block, record.hash?)));
        let stray = named
            .find(|(block, hash)| !self.index().get(*hash).is_some_and(|entry| entry.blocks.contains(block)));
        stray.map_or(Ok(()), |(block, hash)| Err(IntegrityError::Index { block, hash }))
    }
}

fn check_entry(
    hash: BlockHash,
    entry: &Entry,
    block: BlockIdx,
    record: &Record,
) -> Result<(), IntegrityError> {
    if record.hash != Some(hash) {
        return Err(IntegrityError::Index { block, hash });
    }
    if record.holds() != entry.readers {
        return Err(IntegrityError::Tree {
            hash,
            what: "the holds of its blocks differ from its number of readers",
        });
    }
    Ok(())
}

fn check_holds(block: BlockIdx, record: &Record, held: u32) -> Result<(), IntegrityError> {
    let booked = record.holds();
    if held != booked {
        return Err(IntegrityError::Holds { block, held, booked });
    }
    if held > 1 && record.hash.is_none() {
        return Err(IntegrityError::SharedInPrivate { block, holds: held });
    }
    Ok(())
}
