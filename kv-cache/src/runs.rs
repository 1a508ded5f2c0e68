//! Free blocks, kept as runs of neighbours. A sequence with neighbouring blocks is transferred in a few large copies.

use std::collections::{BTreeMap, BTreeSet};

use types::BlockIdx;

/// The free blocks. Adjacent runs are always merged.
#[derive(Debug, Default)]
pub(crate) struct FreeRuns {
    /// The runs: start → length.
    by_start: BTreeMap<u32, u32>,
    /// The runs as (length, start), to find the best fit.
    by_len: BTreeSet<(u32, u32)>,
    n_blocks: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct BlockRun {
    start: u32,
    len: u32,
}

impl FreeRuns {
    pub(crate) fn new(n_blocks: u32) -> Self {
        let mut runs = Self::default();
        runs.put_run(BlockRun { start: 0, len: n_blocks });
        runs
    }

    pub(crate) fn n_blocks(&self) -> u32 {
        self.n_blocks
    }

    /// Takes `n` blocks in as few runs as possible, in ascending order.
    ///
    /// Uses the smallest run that is long enough, so that long runs stay whole for long sequences. If no run is long
    /// enough, uses up the longest ones first.
    ///
    /// # Panics
    /// If fewer than `n` blocks are free. The caller checks the number first.
    pub(crate) fn take(&mut self, n: u32) -> Vec<BlockIdx> {
        let mut taken = Vec::new();
        let mut missing = n;
        while missing > 0 {
            let run = self.best_fit(missing).expect("the caller has counted the free blocks");
            let len = run.len.min(missing);
            self.cut(run, len);
            taken.push(BlockRun { start: run.start, len });
            missing -= len;
        }
        taken.sort_unstable();
        taken.iter().flat_map(|run| run.start..run.start + run.len).map(BlockIdx).collect()
    }

    /// Puts blocks back, in any order. Consecutive neighbours are put back as one run.
    pub(crate) fn put(&mut self, blocks: &[BlockIdx]) {
        for run in blocks.chunk_by(|a, b| a.0 + 1 == b.0) {
            self.put_run(BlockRun { start: run[0].0, len: run.len() as u32 });
        }
    }

    /// Returns all free blocks, in ascending order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = BlockIdx> {
        self.by_start.iter().flat_map(|(start, len)| *start..start + len).map(BlockIdx)
    }

    /// Returns the error in the runs, if there is one.
    pub(crate) fn fault(&self) -> Option<&'static str> {
        let mut ends = self.by_start.iter().map(|(start, len)| start + len);
        let starts = self.by_start.keys().skip(1);
        if starts.zip(&mut ends).any(|(start, end)| *start <= end) {
            return Some("two runs overlap or are adjacent");
        }
        let same = self.by_len.iter().all(|(len, start)| self.by_start.get(start) == Some(len));
        if !same || self.by_len.len() != self.by_start.len() {
            return Some("the two indexes differ");
        }
        (self.by_start.values().sum::<u32>() != self.n_blocks).then_some("the number of free blocks is wrong")
    }

    fn best_fit(&self, n: u32) -> Option<BlockRun> {
        let long_enough = self.by_len.range((n, 0)..).next();
        long_enough.or_else(|| self.by_len.last()).map(|(len, start)| BlockRun { start: *start, len: *len })
    }

    /// Takes the first `len` blocks of a run.
    fn cut(&mut self, run: BlockRun, len: u32) {
        self.remove(run);
        if len < run.len {
            self.insert(BlockRun { start: run.start + len, len: run.len - len });
        }
    }

    /// Puts a run back, and merges it with adjacent runs.
    fn put_run(&mut self, mut run: BlockRun) {
        if run.len == 0 {
            return;
        }
        if let Some(before) = self.ending_at(run.start) {
            self.remove(before);
            run = BlockRun { start: before.start, len: before.len + run.len };
        }
        let end = run.start + run.len;
        if let Some(len) = self.by_start.get(&end).copied() {
            self.remove(BlockRun { start: end, len });
            run.len += len;
        }
        self.insert(run);
    }

    fn ending_at(&self, end: u32) -> Option<BlockRun> {
        let (start, len) = self.by_start.range(..end).next_back()?;
        (start + len == end).then_some(BlockRun { start: *start, len: *len })
    }

    fn insert(&mut self, run: BlockRun) {
        self.by_start.insert(run.start, run.len);
        self.by_len.insert((run.len, run.start));
        self.n_blocks += run.len;
    }

    fn remove(&mut self, run: BlockRun) {
        self.by_start.remove(&run.start);
        self.by_len.remove(&(run.len, run.start));
        self.n_blocks -= run.len;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks(indices: impl IntoIterator<Item = u32>) -> Vec<BlockIdx> {
        indices.into_iter().map(BlockIdx).collect()
    }

    /// Makes free runs 0..2, 4..9 and 12..15.
    fn three_runs() -> FreeRuns {
        let mut runs = FreeRuns::default();
        runs.put(&blocks((0..2).chain(4..9).chain(12..15)));
        runs
    }

    #[test]
    fn best_fit_table() {
        for (n, expected) in [
            (0, blocks([])),
            (1, blocks([0])),
            (2, blocks([0, 1])),
            (3, blocks([12, 13, 14])),
            (4, blocks(4..8)),
            (5, blocks(4..9)),
            (6, blocks([0].into_iter().chain(4..9))),
            (8, blocks((4..9).chain(12..15))),
            (9, blocks([0].into_iter().chain(4..9).chain(12..15))),
        ] {
            let mut runs = three_runs();
            assert_eq!(runs.take(n), expected, "{n} blocks");
            assert_eq!(runs.n_blocks(), 10 - n);
            assert_eq!(runs.fault(), None);
        }
    }

    #[test]
    fn what_comes_back_grows_together() {
        for order in [[2, 3], [3, 2]] {
            let mut runs = three_runs();
            runs.put(&blocks(order));
            assert_eq!(runs.take(9), blocks(0..9), "0..2, 2, 3 and 4..9 are one run");
            assert_eq!(runs.fault(), None);
        }
    }

    #[test]
    fn a_pool_without_blocks_has_none() {
        assert_eq!(FreeRuns::new(0).n_blocks(), 0);
        assert_eq!(FreeRuns::new(0).iter().count(), 0);
    }
}
