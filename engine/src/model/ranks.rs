//! Hot path.
//! Ranks: threads that compute one step together. Each rank computes a share of every layer's outputs and the
//! KV of its heads.
//!
//! Ranks divide a layer's outputs, never its inputs: one rank sums each dot product, always in the same
//! order. So several ranks give the same bits as one. Before a layer runs, ranks gather the outputs that it
//! needs, at least four times in each layer of a model. All ranks run the same steps in the same order, so a gather
//! needs no tag.
//!
//! The ranks of a stage may be in several processes. In each process the last rank that reaches a gather sends the columns of
//! the process's ranks to the other processes, and receives theirs.

use std::cell::Cell;
use std::fmt::Debug;
use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use kv_cache::FenceSignal;
use tracing::warn;

use super::tensor::Tensor;
use crate::error::StageLost;

/// The time for which a rank waits for the others. Ranks have equal work, so a rank that is later has failed:
/// the step fails, and the device counts as lost.
const MEET_WITHIN: Duration = Duration::from_secs(60);

/// The ranks of the same stage in other processes.
pub trait OtherRanks: Debug + Send + Sync {
    /// Gives the columns of this process's ranks to the others. Waits for theirs, and returns them in the order of the ranks.
    fn exchange(&self, mine: &[f32]) -> Result<Vec<f32>, StageLost>;
}

/// The state that the ranks of one stage share.
#[derive(Debug)]
struct RankGroup {
    /// The number of ranks in all processes.
    n_ranks: usize,
    /// The ranks of this process.
    here: Range<usize>,
    /// `None` if all ranks are in this process.
    others: Option<Box<dyn OtherRanks>>,
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
    /// Set after a rank was dropped or has timed out, or another process was lost.
    is_over: bool,
    /// Set after another process was lost, which is logged.
    is_lost_elsewhere: bool,
}

/// One rank's handle. After it is dropped, the other ranks panic at their next gather.
#[derive(Debug)]
pub struct RankHandle {
    nth: usize,
    table: Arc<RankGroup>,
    n_met: Cell<usize>,
}

impl RankHandle {
    /// Makes one handle for each rank of a stage.
    pub fn all(n_ranks: u16) -> Vec<Self> {
        RankGroup::new(n_ranks, 0..n_ranks, None, MEET_WITHIN).handles()
    }

    /// Makes one handle for each rank of this process, of `n_ranks`. `others` has the ranks of the other processes.
    pub fn of_process(n_ranks: u16, here: Range<u16>, others: Option<Box<dyn OtherRanks>>) -> Vec<Self> {
        RankGroup::new(n_ranks, here, others, MEET_WITHIN).handles()
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
    /// If another rank was dropped, or times out. Unwinds without a message if another process is lost, which is logged.
    pub fn gather(&self, mine: &Tensor, all: &mut Tensor) {
        let published = &self.table.published[self.n_met.get() % 2];
        {
            let mut place = published[self.nth].write().unwrap_or_else(PoisonError::into_inner);
            place.clear();
            place.extend_from_slice(mine);
        }
        let width = all.width();
        let n_rows = all.n_rows();
        self.table.meet(|| self.table.exchange(published, |nth| n_rows * self.table.share(nth, width).len()));
        self.n_met.set(self.n_met.get() + 1);
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
    fn new(
        n_ranks: u16,
        here: Range<u16>,
        others: Option<Box<dyn OtherRanks>>,
        meet_within: Duration,
    ) -> Self {
        let (n_ranks, here) = (usize::from(n_ranks), here.start.into()..here.end.into());
        let places = || (0..n_ranks).map(|_| RwLock::default()).collect();
        let (meeting, all_there) = (Mutex::default(), Condvar::new());
        Self { n_ranks, here, others, published: [places(), places()], meeting, all_there, meet_within }
    }

    /// Makes the handles of this process's ranks.
    fn handles(self) -> Vec<RankHandle> {
        let table = Arc::new(self);
        let handle = |nth| RankHandle { nth, table: Arc::clone(&table), n_met: Cell::new(0) };
        table.here.clone().map(handle).collect()
    }

    fn share(&self, nth: usize, n: usize) -> Range<usize> {
        n * nth / self.n_ranks..n * (nth + 1) / self.n_ranks
    }

    /// Waits for all ranks of this process. The last one calls `exchange` before the others go on.
    fn meet(&self, exchange: impl FnOnce() -> Result<(), StageLost>) {
        let mut meeting = self.meeting();
        meeting.n_there += 1;
        // A late arrival is a failure, because a rank that arrived earlier may have left.
        if meeting.n_there == self.here.len() && !meeting.is_over {
            if let Err(error) = exchange() {
                warn!(%error, "step cannot be computed");
                meeting.is_lost_elsewhere = true;
                self.end(meeting);
                resume_unwind(Box::new(error.to_string()));
            }
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
            let is_logged = meeting.is_lost_elsewhere;
            self.end(meeting);
            if is_logged {
                resume_unwind(Box::new(format!("another rank {why}")));
            }
            panic!("another rank {why}");
        }
    }

    /// Publishes the columns of the ranks in other processes. `n_numbers` is how many each rank has.
    fn exchange(
        &self,
        published: &[RwLock<Vec<f32>>],
        n_numbers: impl Fn(usize) -> usize,
    ) -> Result<(), StageLost> {
        let Some(others) = &self.others else { return Ok(()) };
        let mut mine = Vec::new();
        for place in &published[self.here.clone()] {
            mine.extend_from_slice(&place.read().unwrap_or_else(PoisonError::into_inner));
        }
        let theirs = others.exchange(&mine)?;
        let mut rest = &theirs[..];
        for (nth, place) in published.iter().enumerate().filter(|(nth, _)| !self.here.contains(nth)) {
            let (numbers, after) = rest.split_at_checked(n_numbers(nth)).ok_or_else(StageLost::other_step)?;
            let mut place = place.write().unwrap_or_else(PoisonError::into_inner);
            place.clear();
            place.extend_from_slice(numbers);
            rest = after;
        }
        if rest.is_empty() { Ok(()) } else { Err(StageLost::other_step()) }
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
    first_rank: usize,
    /// The number of layers that each rank has written.
    n_layers: Box<[AtomicU16]>,
}

impl RankFence {
    /// Makes the fence of these ranks: those of a process, or all.
    pub fn new(signal: FenceSignal, ranks: Range<u16>) -> Self {
        let first_rank = ranks.start.into();
        Self { signal, first_rank, n_layers: ranks.map(|_| AtomicU16::new(0)).collect() }
    }

    /// Records that a rank has written its share of all layers below `n`.
    pub fn layers_done(&self, rank: &RankHandle, n: u16) {
        self.layers_done_by(rank.nth..rank.nth + 1, n);
    }

    /// Like [`layers_done`](Self::layers_done), for neighbouring ranks.
    pub fn layers_done_by(&self, ranks: Range<usize>, n: u16) {
        // The order is sequentially consistent: if two ranks finish last at the same time, at least one sees
        // both numbers.
        for rank in ranks {
            self.n_layers[rank - self.first_rank].store(n, Ordering::SeqCst);
        }
        let by_all = self.n_layers.iter().map(|n_layers| n_layers.load(Ordering::SeqCst)).min();
        self.signal.layers_done(by_all.unwrap_or(n));
    }
}

#[cfg(test)]
mod tests {
    use std::{panic, thread};

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

    /// A process that is lost at once.
    #[derive(Debug)]
    struct LostRanks;

    impl OtherRanks for LostRanks {
        fn exchange(&self, _mine: &[f32]) -> Result<Vec<f32>, StageLost> {
            Err(StageLost("the other process is lost".to_owned()))
        }
    }

    /// The process logs the loss once.
    #[test]
    fn ranks_end_without_a_panic_message_if_another_process_is_lost() {
        let n_messages = Arc::new(AtomicU16::new(0));
        let (counter, before) = (Arc::clone(&n_messages), panic::take_hook());
        panic::set_hook(Box::new(move |info| match thread::current().name() {
            Some("rank of the test") => drop(counter.fetch_add(1, Ordering::SeqCst)),
            _ => before(info),
        }));
        let ranks = RankHandle::of_process(4, 2..4, Some(Box::new(LostRanks))).into_iter();
        let start = |rank| {
            let thread = thread::Builder::new().name("rank of the test".to_owned());
            thread.spawn(move || gathers(&rank, 1)).expect("a thread")
        };
        let threads: Vec<_> = ranks.map(start).collect();
        let ended: Vec<_> = threads.into_iter().map(thread::JoinHandle::join).collect();
        assert!(ended.iter().all(Result::is_err), "no rank goes on");
        assert_eq!(n_messages.load(Ordering::SeqCst), 0);
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
        let mut ranks = RankGroup::new(2, 0..2, None, Duration::from_millis(20)).handles();
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
        let (written, ranks) = (RankFence::new(signal, 0..2), RankHandle::all(2));
        written.layers_done(&ranks[0], 2);
        assert!(!fence.is_open(1), "the other has written nothing");
        written.layers_done(&ranks[1], 1);
        assert!(fence.is_open(1) && !fence.is_open(2));
        written.layers_done(&ranks[1], 3);
        assert!(fence.is_open(2) && !fence.is_open(3));
    }
}
