//! Hot path. Chooses the sequences and tokens that the next step computes: a pure function of the candidates.
//!
//! Cost: one sort of the candidates, at most a few hundred, per step.

use crate::precedence::{Precedence, SequenceId};

/// The limits of one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    pub step_tokens_max: usize,
    pub rows_max: usize,
    /// The largest number of running sequences in the step. The others are in later steps.
    pub running_max: usize,
    /// The number of tokens per block. Chunks end on block edges, so that whole blocks can be sent and
    /// published.
    pub block_tokens: usize,
}

/// A sequence that may be in the next step: it has blocks, tokens to compute, and a sink with room for the
/// results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    pub id: SequenceId,
    pub precedence: Precedence,
    /// The first position that is not computed yet.
    pub start: usize,
    /// The position after the last token that is known or being sampled.
    pub end: usize,
}

/// The number of a candidate's tokens that the step computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    pub id: SequenceId,
    /// The first position of the tokens.
    pub start: usize,
    pub n_tokens: usize,
}

impl Candidate {
    fn n_tokens(&self) -> usize {
        self.end - self.start
    }

    /// Returns whether exactly one token is still to be computed: the sequence generates, or all of its prompt but
    /// the last token was cached.
    pub(crate) fn is_running(&self) -> bool {
        self.n_tokens() == 1
    }

    /// Returns the number of tokens of the next chunk, at most `room`: all remaining tokens, or as many as
    /// end at a block edge.
    fn chunk(&self, room: usize, block_tokens: usize) -> usize {
        if self.n_tokens() <= room {
            return self.n_tokens();
        }
        let edge = (self.start + room) / block_tokens * block_tokens;
        edge.saturating_sub(self.start)
    }
}

/// Fills a step: running sequences first, one token each, then prompts in chunks until the budget is used up.
///
/// Sequences of each kind are in order of precedence. If less than a block of the budget is left for a
/// prompt, neither this prompt nor any later one gets tokens. So short prompts do not overtake a long one in
/// step after step.
pub fn plan(candidates: &[Candidate], budget: Budget) -> Vec<Share> {
    let mut in_line: Vec<&Candidate> = candidates.iter().filter(|one| one.n_tokens() > 0).collect();
    in_line.sort_unstable_by_key(|candidate| (!candidate.is_running(), candidate.precedence));
    let n_running = in_line.partition_point(|candidate| candidate.is_running());
    in_line.drain(n_running.min(budget.running_max)..n_running);
    let mut shares = Vec::with_capacity(in_line.len().min(budget.rows_max));
    let mut tokens_left = budget.step_tokens_max;
    for candidate in in_line.into_iter().take(budget.rows_max) {
        let n_tokens = candidate.chunk(tokens_left, budget.block_tokens);
        if n_tokens == 0 {
            break;
        }
        tokens_left -= n_tokens;
        shares.push(Share { id: candidate.id, start: candidate.start, n_tokens });
    }
    shares
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use types::prompt::Priority;

    use super::*;

    /// A candidate: (id, priority, start, end).
    type Row = (u64, i8, usize, usize);
    /// A case: name, candidates, limit of tokens, limit of rows, and the expected shares.
    type Case = (&'static str, &'static [Row], usize, usize, &'static [(u64, usize)]);

    fn candidate((id, priority, start, end): Row) -> Candidate {
        let id = SequenceId(id);
        let precedence = Precedence::new(Priority(priority), id, Duration::ZERO, Duration::MAX);
        Candidate { id, precedence, start, end }
    }

    fn shares(rows: &[Row], step_tokens_max: usize, rows_max: usize) -> Vec<(u64, usize)> {
        let candidates: Vec<Candidate> = rows.iter().copied().map(candidate).collect();
        let plan =
            plan(&candidates, Budget { step_tokens_max, rows_max, running_max: rows_max, block_tokens: 16 });
        plan.iter().map(|share| (share.id.0, share.n_tokens)).collect()
    }

    #[test]
    fn table() {
        #[rustfmt::skip]
        let cases: &[Case] = &[
            ("no candidate", &[], 64, 8, &[]),
            ("nothing to compute", &[(1, 0, 5, 5)], 64, 8, &[]),
            ("a prompt that fits is one chunk", &[(1, 0, 0, 50)], 64, 8, &[(1, 50)]),
            ("running first, whichever came first", &[(1, 0, 0, 50), (2, 0, 9, 10)], 64, 8, &[(2, 1), (1, 50)]),
            ("a chunk ends on a block edge", &[(1, 0, 0, 100)], 60, 8, &[(1, 48)]),
            ("running tokens count", &[(1, 0, 0, 100), (2, 0, 9, 10)], 64, 8, &[(2, 1), (1, 48)]),
            ("the last chunk ends anywhere", &[(1, 0, 48, 100)], 60, 8, &[(1, 52)]),
            ("from within a block to its edge", &[(1, 0, 5, 100)], 20, 8, &[(1, 11)]),
            ("what is left goes to the next", &[(1, 0, 0, 20), (2, 0, 0, 100)], 64, 8, &[(1, 20), (2, 32)]),
            ("less than a block left: none overtakes", &[(1, 0, 0, 60), (2, 0, 0, 40), (3, 0, 0, 3)], 64, 8, &[(1, 60)]),
            ("priority before arrival", &[(1, 0, 0, 40), (2, 3, 0, 40)], 48, 8, &[(2, 40)]),
            ("rows are bounded", &[(1, 0, 0, 9), (2, 0, 7, 8), (3, 0, 7, 8)], 64, 2, &[(2, 1), (3, 1)]),
            ("running sequences are bounded by tokens too", &[(1, 0, 1, 2), (2, 0, 1, 2), (3, 0, 1, 2)], 2, 8, &[(1, 1), (2, 1)]),
            ("a prompt of one token", &[(1, 0, 0, 1)], 64, 8, &[(1, 1)]),
            ("no budget", &[(1, 0, 0, 1)], 0, 8, &[]),
        ];
        for (what, rows, step_tokens_max, rows_max, expected) in cases {
            assert_eq!(shares(rows, *step_tokens_max, *rows_max), *expected, "{what}");
        }
    }

    #[test]
    fn running_sequences_beyond_the_part_wait_and_prompts_do_not() {
        let rows = [(1, 0, 7, 8), (2, 0, 0, 20), (3, 1, 7, 8), (4, 0, 7, 8)].map(candidate);
        let budget = Budget { step_tokens_max: 64, rows_max: 8, running_max: 2, block_tokens: 16 };
        let ids: Vec<u64> = plan(&rows, budget).iter().map(|share| share.id.0).collect();
        assert_eq!(ids, [3, 1, 2]);
    }
}
