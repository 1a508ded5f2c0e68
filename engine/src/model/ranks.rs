//! Hot path.
//! Ranks: threads that compute one step together. Each rank computes a share of every layer's outputs and the
//! KV of its heads.
//!
//! Ranks divide a layer's outputs, never its inputs: one rank sums each dot product, always in the same
//! order. So several ranks give the same bits as one. Before a layer runs, ranks gather the outputs that it
//! needs, at least four times in each layer of a model. All ranks run the same steps in the same order, so a gather
//! needs no tag.

use std::cell::Cell;
use std::ops::Range;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use kv_cache::FenceSignal;

use super::tensor::Tensor;

/// The time for which a rank waits for the others. Ranks have equal work, so a rank that is later has failed:
/// the step fails, and the device counts as lost.
const MEET_WITHIN: Duration = Duration::from_secs(60);

/// The state that the ranks of one model share.
#[derive(Debug)]
struct RankGroup {
    n_ranks: usize,
    /// The columns that each rank publishes for the others. There are two sets, used in turn: ranks write to
    /// a set only after they have met at the other one, so all ranks have read the set's old content.
    published: [Box<[RwLock<Vec<f32>>]>; 2],
    /// Locked for short accesses, and passed to the condition variable.
    meeting: Mutex<Barrier>,
    all_there: Condvar,
    meet_within: Duration,
}

#[derive(Debug, Default)]
struct Barrier {
    n_there: usize,
    /// The number of gathers so far.
    n_met: usize,
    /// Set after a rank was dropped or has timed out.
    is_over: bool,
}

/// One rank's handle. After it is dropped, the other ranks panic at their next gather.
#[derive(Debug)]
pub struct RankHandle {
    nth: usize,
    table: Arc<RankGroup>,
    n_met: Cell<usize>,
}

impl RankHandle {
    /// Makes one handle for each rank of a model.
    pub fn all(n_ranks: u16) -> Vec<Self> {
        Self::all_within(n_ranks, MEET_WITHIN)
    }

    fn all_within(n_ranks: u16, meet_within: Duration) -> Vec<Self> {
        let n_ranks = usize::from(n_ranks);
        let places = || (0..n_ranks).map(|_| RwLock::default()).collect();
        let (meeting, all_there) = (Mutex::default(), Condvar::new());
        let table = RankGroup { n_ranks, published: [places(), places()], meeting, all_there, meet_within };
        let table = Arc::new(table);
        (0..n_ranks).map(|nth| Self { nth, table: Arc::clone(&table), n_met: Cell::new(0) }).collect()
    }

    pub fn nth(&self) -> u16 {
        self.nth as u16
    }

    /// Returns this rank's part of `n` outputs. The parts are in the order of the ranks.
    pub fn share(&self, n: usize) -> Range<usize> {
        self.table.share(self.nth, n)
    }

    /// Returns this rank's part of the outputs of `n_heads` heads of `head_dim`. With fewer heads than ranks,
    /// several ranks hold the same head.
    pub fn share_of_heads(&self, n_heads: usize, head_dim: usize) -> Range<usize> {
        let heads = match self.table.n_ranks / n_heads.max(1) {
            0 | 1 => self.share(n_heads),
            n_holders => self.nth / n_holders..self.nth / n_holders + 1,
        };
        heads.start * head_dim..heads.end * head_dim
    }

    /// Collects the columns of all ranks for the same rows. Each rank provides its [`share`](Self::share).
    ///
    /// # Panics
    /// If another rank was dropped, or times out.
    pub fn gather(&self, mine: &Tensor, all: &mut Tensor) {
        let published = &self.table.published[self.n_met.get() % 2];
        {
            let mut place = published[self.nth].write().unwrap_or_else(PoisonError::into_inner);
            place.clear();
            place.extend_from_slice(mine);
        }
        self.table.meet();
        self.n_met.set(self.n_met.get() + 1);
        let width = all.width();
        for (nth, place) in published.iter().enumerate() {
            let theirs = place.read().unwrap_or_else(PoisonError::into_inner);
            let columns = self.table.share(nth, width);
            assert_eq!(theirs.len(), all.n_rows() * columns.len(), "ranks compute the same rows");
            for (row, numbers) in theirs.chunks_exact(columns.len().max(1)).enumerate() {
                all.row_mut(row)[columns.clone()].copy_from_slice(numbers);
            }
        }
    }
}

impl Drop for RankHandle {
    fn drop(&mut self) {
        self.table.end(self.table.meeting());
    }
}

impl RankGroup {
    fn share(&self, nth: usize, n: usize) -> Range<usize> {
        n * nth / self.n_ranks..n * (nth + 1) / self.n_ranks
    }

    fn meet(&self) {
        let mut meeting = self.meeting();
        meeting.n_there += 1;
        // A late arrival is a failure, because a rank that arrived earlier may have left.
        if meeting.n_there == self.n_ranks && !meeting.is_over {
            (meeting.n_there, meeting.n_met) = (0, meeting.n_met + 1);
            self.all_there.notify_all();
            return;
        }
        let n_met = meeting.n_met;
        let still_waits = |meeting: &mut Barrier| meeting.n_met == n_met && !meeting.is_over;
        let waited = self.all_there.wait_timeout_while(meeting, self.meet_within, still_waits);
        let (meeting, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        if meeting.n_met == n_met {
            let why = if waited.timed_out() { "timed out" } else { "has ended" };
            self.end(meeting);
            panic!("another rank {why}");
        }
    }

    fn end(&self, mut meeting: MutexGuard<'_, Barrier>) {
        meeting.is_over = true;
        drop(meeting);
        self.all_there.notify_all();
    }

    fn meeting(&self) -> MutexGuard<'_, Barrier> {
        self.meeting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A step's fence. It opens for a layer after all ranks have written their share of the layer. Pipeline stages use it one
/// after the other.
#[derive(Debug)]
pub struct RankFence {
    signal: FenceSignal,
    /// The number of layers that each rank has written.
    n_layers: Box<[AtomicU16]>,
}

impl RankFence {
    pub fn new(signal: FenceSignal, n_ranks: usize) -> Self {
        Self { signal, n_layers: (0..n_ranks).map(|_| AtomicU16::new(0)).collect() }
    }

    /// Records that all ranks have written all layers below `n`, which another process computes.
    pub fn layers_done_elsewhere(&self, n: u16) {
        self.signal.layers_done(n);
    }

    /// Records that a rank has written its share of all layers below `n`.
    pub fn layers_done(&self, rank: &RankHandle, n: u16) {
        // The order is sequentially consistent: if two ranks finish last at the same time, at least one sees
        // both numbers.
        self.n_layers[rank.nth].store(n, Ordering::SeqCst);
        let by_all = self.n_layers.iter().map(|n_layers| n_layers.load(Ordering::SeqCst)).min();
        self.signal.layers_done(by_all.unwrap_or(n));
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::model::Scratch;

    /// Returns a number that identifies its round, row and column.
    fn number(round: usize, row: usize, column: usize) -> f32 {
        (round * 10_000 + row * 100 + column) as f32
    }

    fn gathers(rank: &RankHandle, n_rounds: usize) {
        let scratch = Scratch::default();
        for round in 0..n_rounds {
            let (n_rows, width) = (round % 3, 5 + round % 7);
            let columns = rank.share(width);
            let mut mine = scratch.tensor(n_rows, columns.len());
            for row in 0..n_rows {
                for (at, column) in columns.clone().enumerate() {
                    mine.row_mut(row)[at] = number(round, row, column);
                }
            }
            let mut all = scratch.tensor(n_rows, width);
            rank.gather(&mine, &mut all);
            for row in 0..n_rows {
                let expected: Vec<f32> = (0..width).map(|column| number(round, row, column)).collect();
                assert_eq!(all.row(row), expected);
            }
        }
    }

    #[test]
    fn every_rank_gathers_what_all_have() {
        for n_ranks in [1, 2, 3, 4] {
            let ranks = RankHandle::all(n_ranks).into_iter();
            let threads: Vec<_> = ranks.map(|rank| thread::spawn(move || gathers(&rank, 200))).collect();
            threads.into_iter().for_each(|thread| thread.join().expect("all gather the same"));
        }
    }

    #[test]
    fn shares_are_in_order_and_heads_are_whole() {
        let shares = |n| RankHandle::all(4).iter().map(|rank| rank.share(n)).collect::<Vec<_>>();
        assert_eq!(shares(10), [0..2, 2..5, 5..7, 7..10]);
        let heads = |n| RankHandle::all(4).iter().map(|rank| rank.share_of_heads(n, 8)).collect::<Vec<_>>();
        assert_eq!(heads(8), [0..16, 16..32, 32..48, 48..64]);
        assert_eq!(heads(4), [0..8, 8..16, 16..24, 24..32]);
        assert_eq!(heads(2), [0..8, 0..8, 8..16, 8..16], "two ranks hold the same head");
        assert_eq!(heads(1), [0..8, 0..8, 0..8, 0..8]);
    }

    fn fate_of_who_waits(others: Vec<RankHandle>, rank: RankHandle) -> String {
        let waiting = thread::spawn(move || gathers(&rank, 1));
        drop(others);
        let panicked = waiting.join().expect_err("it cannot go on alone");
        panicked.downcast_ref::<String>().cloned().unwrap_or_default()
    }

    #[test]
    fn a_rank_that_is_gone_holds_nobody_up() {
        let mut ranks = RankHandle::all(2);
        let rank = ranks.remove(0);
        assert_eq!(fate_of_who_waits(ranks, rank), "another rank has ended");
    }

    /// If one rank stops, the others stop waiting for it.
    #[test]
    fn a_rank_that_stands_still_holds_nobody_up_for_ever() {
        let mut ranks = RankHandle::all_within(2, Duration::from_millis(20));
        let rank = ranks.remove(0);
        let waiting = thread::spawn(move || gathers(&rank, 1));
        let panicked = waiting.join().expect_err("the other rank is absent");
        assert_eq!(panicked.downcast_ref::<String>().map(String::as_str), Some("another rank timed out"));
        // The late rank panics, because it finds that the meeting is over.
        let late = ranks.remove(0);
        let late = thread::spawn(move || gathers(&late, 1)).join().expect_err("the other rank has left");
        assert_eq!(late.downcast_ref::<String>().map(String::as_str), Some("another rank has ended"));
    }

    #[test]
    fn a_layer_is_written_when_all_have_written_it() {
        let (signal, fence) = FenceSignal::new();
        let (written, ranks) = (RankFence::new(signal, 2), RankHandle::all(2));
        written.layers_done(&ranks[0], 2);
        assert!(!fence.is_open(1), "the other has written nothing");
        written.layers_done(&ranks[1], 1);
        assert!(fence.is_open(1) && !fence.is_open(2));
        written.layers_done(&ranks[1], 3);
        assert!(fence.is_open(2) && !fence.is_open(3));
    }
}
