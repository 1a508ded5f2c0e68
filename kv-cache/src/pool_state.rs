//! The pool's state: each block's record, the holds, and the prefix index. No lock, no clock, no I/O.
//!
//! A block's state follows from three facts in its [`Record`]: its number of leases, its number of quarantines, and
//! whether the prefix index refers to it. Only [`PoolState::alter`] changes a record, so the counts cannot drift.
//!
//! The blocks of one hold that the index refers to are always its first ones (its *claimed* blocks), and their
//! entries are a path from the root. So a reader of an entry also reads all its ancestors, and no entry with a reader
//! is below one without. So every cached block can be evicted, and `available` is exact.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::time::Instant;
use types::{BlockCounts, BlockHash, BlockIdx};

use crate::error::NoRoom;
use crate::event_log::{EventLog, Reading};
use crate::hold::{Hold, HoldId, Tables};
use crate::holder::Holder;
use crate::prefix::PrefixIndex;
use crate::record::{BlockState, Record};
use crate::runs::FreeRuns;

#[derive(Debug)]
pub(crate) struct PoolState {
    n_groups: usize,
    records: Vec<Record>,
    counts: BlockCounts,
    free: FreeRuns,
    index: PrefixIndex,
    /// The leases and quarantines. Ordered by creation, so that a seed repeats a run.
    holds: BTreeMap<HoldId, Hold>,
    n_holds_made: u64,
    events: EventLog,
}

// === impl PoolState: what leases do ===

impl PoolState {
    pub(crate) fn new(n_groups: usize, n_blocks: u32, events_kept_max: usize, now: Instant) -> Self {
        let unused = Record { leases: 0, quarantines: 0, hash: None, since: now };
        Self {
            n_groups,
            records: vec![unused; n_blocks as usize],
            counts: BlockCounts { total: n_blocks, free: n_blocks, ..BlockCounts::default() },
            free: FreeRuns::new(n_blocks),
            index: PrefixIndex::default(),
            holds: BTreeMap::new(),
            n_holds_made: 0,
            events: EventLog::new(events_kept_max),
        }
    }

    pub(crate) fn reserve(
        &mut self,
        n_blocks: usize,
        holder: Holder,
        now: Instant,
    ) -> Result<(HoldId, Arc<Tables>), NoRoom> {
        let wanted = n_blocks.saturating_mul(self.n_groups);
        let available = self.counts.available() as usize;
        if wanted > available {
            return Err(NoRoom { wanted, available });
        }
        self.evict_until_free(wanted as u32, now);
        let by_group = (0..self.n_groups).map(|_| self.free.take(n_blocks as u32)).collect();
        let tables = Tables::new(by_group, n_blocks);
        for block in tables.blocks() {
            self.alter(block, now, Record::begin_lease);
        }
        Ok(self.hold(Hold::fresh(holder, tables)))
    }

    pub(crate) fn adopt(
        &mut self,
        hashes: &[BlockHash],
        holder: Holder,
        now: Instant,
    ) -> (HoldId, Arc<Tables>) {
        let hashes = hashes[..self.index.longest(hashes)].to_vec();
        let tables = self.tables_of(&hashes);
        for hash in &hashes {
            self.index.pin(*hash);
        }
        for block in tables.blocks() {
            self.alter(block, now, Record::begin_lease);
        }
        let n_claimed = hashes.len();
        self.hold(Hold { hashes, n_claimed, ..Hold::fresh(holder, tables) })
    }

    /// Merges two holds into one; the later one is then gone. Returns `None` if the later one has blocks with a hash,
    /// because the index could not reach them through blocks without one.
    pub(crate) fn join(&mut self, first: HoldId, later: HoldId) -> Option<Arc<Tables>> {
        let prefix_is_empty = self.held(first).tables.n_blocks() == 0;
        if !prefix_is_empty && !self.held(later).hashes.is_empty() {
            return None;
        }
        let later = self.holds.remove(&later)?;
        let hold = self.held_mut(first);
        hold.append(later);
        Some(Arc::clone(&hold.tables))
    }

    pub(crate) fn publish(&mut self, id: HoldId, ordinal: usize, hash: BlockHash, now: Instant) {
        // A model without attention has no KV to find again, so its blocks are not published.
        let has_kv = self.n_groups > 0;
        let hold = self.held_mut(id);
        if has_kv && hold.may_publish(ordinal) {
            hold.hashes.push(hash);
            self.claim(id, now);
        }
    }

    /// Gives back a group's blocks before block `before`. See [`BlockLease::give_back`](crate::BlockLease).
    pub(crate) fn give_back(&mut self, id: HoldId, group: usize, before: usize, now: Instant) -> Arc<Tables> {
        let hold = self.held_mut(id);
        let mut gone = hold.take_gone(group, before);
        let (head, read) = hold.take_head().unwrap_or_default();
        let tables = Arc::clone(&hold.tables);
        gone.extend(head);
        self.give_up(gone.into_iter(), Record::end_lease, now);
        // All entries are unpinned together, so that no entry is left with a reader that its parent does not have.
        for hash in read.into_iter().rev() {
            self.index.unpin(hash);
        }
        tables
    }

    pub(crate) fn rename(&mut self, id: HoldId, holder: Holder) {
        self.held_mut(id).holder = holder;
    }

    /// Turns a lease into a quarantine, under a new id.
    pub(crate) fn quarantine(&mut self, id: HoldId, why: &'static str, now: Instant) -> HoldId {
        let mut hold = self.holds.remove(&id).expect("a lease is in the state until it is given up");
        for block in hold.tables.blocks() {
            self.alter(block, now, |record| {
                record.leases -= 1;
                record.quarantines += 1;
            });
        }
        // Hashes beyond the claimed blocks are dropped, because a wire may have written into those blocks
        // since.
        hold.hashes.truncate(hold.n_claimed);
        hold.quarantined = Some(why);
        self.hold(hold).0
    }

    /// Ends a hold. Does nothing if the hold was joined or quarantined before, because its id is then gone.
    pub(crate) fn release(&mut self, id: HoldId, now: Instant) {
        let Some(hold) = self.holds.remove(&id) else { return };
        self.index_unclaimed(&hold, now);
        for (block, hash) in hold.tables.first().iter().zip(&hold.hashes) {
            if self.record(*block).hash == Some(*hash) {
                self.index.unpin(*hash);
            }
        }
        let count = if hold.is_quarantined() { Record::end_quarantine } else { Record::end_lease };
        self.give_up(hold.tables.blocks(), count, now);
    }
}

// === impl PoolState: the prefix index ===

impl PoolState {
    /// Lets the index refer to as many of the hold's published blocks as possible.
    ///
    /// | the index has for the hash | effect |
    /// |---|---|
    /// | nothing | it refers to this block |
    /// | a block without holder | it refers to this block instead; the other one becomes free |
    /// | a block that others hold | this block stays a duplicate, and the loop ends: later blocks are tried again
    /// later |
    fn claim(&mut self, id: HoldId, now: Instant) {
        let mut stored = Vec::new();
        while let Some((ordinal, hash)) = self.held(id).next_claim() {
            let blocks = self.held(id).tables.at(ordinal);
            match self.index.get(hash).map(|entry| entry.readers) {
                None => {
                    self.index_block(hash, self.held(id).parent_of(ordinal), blocks, now);
                    stored.push(hash);
                }
                Some(0) => self.index_instead(hash, blocks, now),
                Some(_) => break,
            }
            self.held_mut(id).n_claimed += 1;
        }
        self.events.stored(stored);
    }

    /// Indexes, at a hold's end, its published blocks that the index still lacks. Blocks after another hold's
    /// block can now be indexed too, because they have no reader any more.
    fn index_unclaimed(&mut self, hold: &Hold, now: Instant) {
        let mut stored = Vec::new();
        for (ordinal, hash) in hold.hashes.iter().enumerate().skip(hold.n_claimed) {
            if self.index.get(*hash).is_none() {
                self.index_block(*hash, hold.parent_of(ordinal), hold.tables.at(ordinal), now);
                stored.push(*hash);
            }
        }
        self.events.stored(stored);
    }

    /// Adds an entry whose reader is the hold of these blocks.
    fn index_block(
        &mut self,
        hash: BlockHash,
        parent: Option<BlockHash>,
        blocks: Box<[BlockIdx]>,
        now: Instant,
    ) {
        for block in &blocks {
            self.alter(*block, now, |record| record.hash = Some(hash));
        }
        self.index.insert(hash, parent, blocks);
    }

    /// Gives these blocks and their reader to an entry without reader. The entry's old blocks become free.
    fn index_instead(&mut self, hash: BlockHash, blocks: Box<[BlockIdx]>, now: Instant) {
        for block in &blocks {
            self.alter(*block, now, |record| record.hash = Some(hash));
        }
        let replaced = self.index.replace(hash, blocks);
        self.forget(&replaced, now);
    }

    fn evict_until_free(&mut self, wanted: u32, now: Instant) {
        let mut evicted = Vec::new();
        while self.free.n_blocks() < wanted {
            let (hash, blocks) =
                self.index.evict().expect("every cached block can be evicted, and they suffice");
            self.forget(&blocks, now);
            evicted.push(hash);
        }
        self.events.evicted(evicted);
    }

    /// Frees the blocks that are no longer in the index and have no holder.
    fn forget(&mut self, blocks: &[BlockIdx], now: Instant) {
        for block in blocks {
            self.alter(*block, now, |record| record.hash = None);
        }
        self.free.put(blocks);
    }

    fn tables_of(&self, hashes: &[BlockHash]) -> Tables {
        let entries = || hashes.iter().filter_map(|hash| self.index.get(*hash));
        let of_group = |group: usize| entries().map(|entry| entry.blocks[group]).collect();
        Tables::new((0..self.n_groups).map(of_group).collect(), hashes.len())
    }
}

// === impl PoolState: records ===

impl PoolState {
    /// Removes one holder from each block, as `count` does. Blocks in the index stay cached; others become
    /// free.
    fn give_up(&mut self, blocks: impl Iterator<Item = BlockIdx>, count: fn(&mut Record), now: Instant) {
        let mut freed = Vec::new();
        for block in blocks {
            if self.alter(block, now, count) == BlockState::Free {
                freed.push(block);
            }
        }
        self.free.put(&freed);
    }

    /// Changes a block's record and returns its new state. No other function changes a record.
    fn alter(&mut self, block: BlockIdx, now: Instant, change: impl FnOnce(&mut Record)) -> BlockState {
        let record = &mut self.records[block.0 as usize];
        let before = record.state();
        change(record);
        let after = record.state();
        if before != after {
            record.since = now;
            *count_of(&mut self.counts, before) -= 1;
            *count_of(&mut self.counts, after) += 1;
        }
        after
    }

    fn hold(&mut self, hold: Hold) -> (HoldId, Arc<Tables>) {
        let id = HoldId(self.n_holds_made);
        self.n_holds_made += 1;
        let tables = Arc::clone(&hold.tables);
        self.holds.insert(id, hold);
        (id, tables)
    }

    fn held(&self, id: HoldId) -> &Hold {
        self.holds.get(&id).expect("a lease is in the state until it is given up")
    }

    fn held_mut(&mut self, id: HoldId) -> &mut Hold {
        self.holds.get_mut(&id).expect("a lease is in the state until it is given up")
    }
}

fn count_of(counts: &mut BlockCounts, state: BlockState) -> &mut u32 {
    match state {
        BlockState::Free => &mut counts.free,
        BlockState::Leased => &mut counts.leased,
        BlockState::Cached => &mut counts.cached,
        BlockState::Quarantined => &mut counts.quarantined,
    }
}

// === impl PoolState: read access ===

impl PoolState {
    pub(crate) fn counts(&self) -> BlockCounts {
        self.counts
    }

    pub(crate) fn last_event(&self) -> u64 {
        self.events.last()
    }

    pub(crate) fn read_events(&self, after: Option<u64>) -> Reading {
        self.events.read(after, || self.index.iter().map(|(hash, _)| hash).collect())
    }

    pub(crate) fn record(&self, block: BlockIdx) -> &Record {
        &self.records[block.0 as usize]
    }

    pub(crate) fn records(&self) -> impl ExactSizeIterator<Item = (BlockIdx, &Record)> {
        self.records.iter().enumerate().map(|(idx, record)| (BlockIdx(idx as u32), record))
    }

    pub(crate) fn holds(&self) -> impl Iterator<Item = &Hold> {
        self.holds.values()
    }

    pub(crate) fn free(&self) -> &FreeRuns {
        &self.free
    }

    pub(crate) fn index(&self) -> &PrefixIndex {
        &self.index
    }
}
