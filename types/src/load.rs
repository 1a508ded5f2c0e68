//! The contents of a node's status stream: its load, and changes of its prefix cache.

use std::iter::Sum;
use std::ops::{AddAssign, Range, SubAssign};

use crate::block::BlockHash;

/// A node's load at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct NodeLoad {
    /// Sequences in the engine's batch.
    pub running: u32,
    /// Sequences waiting for KV room.
    pub waiting: u32,
    /// Landings whose KV has not fully arrived.
    pub arriving: u32,
    /// Prompt tokens not yet computed.
    pub queued_tokens: u64,
    /// Predicted wait of a prompt submitted now until its first chunk is computed, in milliseconds.
    pub queue_ms: f32,
    /// Predicted time of a decode step with one more sequence, in milliseconds.
    pub step_ms: f32,
    /// Engine steps finished since the node started. It stops growing when the worker is stuck.
    pub steps_total: u64,
    pub blocks: BlockCounts,
    pub costs: LearnedCosts,
    /// The time since the worker made this report, in milliseconds. A worker makes none during a step, so the
    /// report lacks prompts that have come since.
    pub age_ms: f32,
}

/// The costs that a node has learned from the durations of its steps. A value of zero is unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LearnedCosts {
    /// Milliseconds per prompt token at the begin of its sequence.
    pub prompt_token_ms: f32,
    /// Milliseconds that 1,000 tokens before it, in its sequence, add to a prompt token.
    pub prompt_context_ms: f32,
    /// Milliseconds that prompts add to a step of running sequences, whatever the number of their tokens.
    pub prompt_step_ms: f32,
    /// Milliseconds per step, whatever it computes.
    pub step_ms: f32,
    /// Milliseconds that one more sequence adds to a step.
    pub row_ms: f32,
    /// Milliseconds that 1,000 more tokens of context, in any of its sequences, add to a step.
    pub context_ms: f32,
    /// The largest number of tokens in one step.
    pub step_tokens: u32,
    /// The longest gap between two tokens that prompts may cause, a setting of the node; zero: any.
    pub gap_ms_max: f32,
}

/// Prompt tokens to compute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PromptWork {
    pub n_tokens: u64,
    /// The number of tokens before each of them in its sequence, summed. Attention takes time for each.
    pub n_before: u64,
}

impl LearnedCosts {
    /// Returns the predicted time to compute prompt tokens in steps of their own, in milliseconds.
    pub fn prompt_ms(&self, work: PromptWork) -> f64 {
        let step_ms = f64::from(self.step_ms) + f64::from(self.prompt_step_ms);
        self.tokens_ms(work) + self.prompt_steps(work, 0) * step_ms
    }

    /// Returns the predicted time of prompt tokens, without the steps that compute them, in milliseconds.
    pub fn tokens_ms(&self, work: PromptWork) -> f64 {
        work.takes_ms(self.prompt_token_ms.into(), self.prompt_context_ms.into())
    }

    /// Returns the number of steps that compute prompt tokens beside `n_running` sequences. A step of a node that bounds gaps
    /// has fewer tokens if they take longer.
    pub fn prompt_steps(&self, work: PromptWork, n_running: u32) -> f64 {
        if self.step_tokens == 0 {
            return 0.0;
        }
        let step_tokens = f64::from(self.step_tokens.saturating_sub(n_running).max(1));
        let step_ms = step_tokens * f64::from(self.prompt_token_ms);
        let of_gaps =
            if self.gap_ms_max > 0.0 && step_ms > 0.0 { self.tokens_ms(work) / step_ms } else { 0.0 };
        (work.n_tokens as f64 / step_tokens).max(of_gaps).ceil()
    }
}

impl PromptWork {
    /// Makes the work of computing a sequence's tokens at these positions.
    pub fn of(positions: Range<u64>) -> Self {
        let n_tokens = positions.end.saturating_sub(positions.start);
        let n_before = n_tokens * positions.start + n_tokens * n_tokens.saturating_sub(1) / 2;
        Self { n_tokens, n_before }
    }

    /// Returns the time that it takes if a token takes `token_ms`, and `context_ms` more for each 1,000 tokens before it.
    pub fn takes_ms(&self, token_ms: f64, context_ms: f64) -> f64 {
        self.n_tokens as f64 * token_ms + self.n_before as f64 / 1e3 * context_ms
    }
}

impl AddAssign for PromptWork {
    fn add_assign(&mut self, other: Self) {
        self.n_tokens += other.n_tokens;
        self.n_before += other.n_before;
    }
}

impl SubAssign for PromptWork {
    fn sub_assign(&mut self, other: Self) {
        self.n_tokens -= other.n_tokens;
        self.n_before -= other.n_before;
    }
}

impl Sum for PromptWork {
    fn sum<I: Iterator<Item = Self>>(works: I) -> Self {
        works.fold(Self::default(), |mut sum, work| {
            sum += work;
            sum
        })
    }
}

/// The number of a pool's blocks in each state. `free + leased + cached + quarantined = total` always holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockCounts {
    pub total: u32,
    pub free: u32,
    pub leased: u32,
    /// Blocks that only the prefix cache holds; they are freed when room is needed.
    pub cached: u32,
    /// Blocks that cannot be reused until it is proven that no remote write can still reach them.
    pub quarantined: u32,
}

impl BlockCounts {
    /// Returns the number of blocks that a new sequence can lease.
    pub fn available(&self) -> u32 {
        self.free + self.cached
    }

    pub fn adds_up(&self) -> bool {
        self.free + self.leased + self.cached + self.quarantined == self.total
    }
}

/// The largest number of hashes in one [`BlockEvent`], so that a message stays small.
pub const EVENT_HASHES_MAX: usize = 4 << 10;

/// A change of a node's prefix cache, or a part of one. A status stream numbers its events without gaps; a
/// reader that sees a gap requests a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockEvent {
    pub change: BlockChange,
    /// Whether the change is complete. Otherwise the next event has more of it.
    pub is_complete: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BlockChange {
    /// The list of cached blocks, or its beginning. It replaces the result of all earlier events.
    Snapshot(Vec<BlockHash>),
    Stored(Vec<BlockHash>),
    Evicted(Vec<BlockHash>),
}

impl BlockEvent {
    /// Makes the event of a change that fits into one event.
    pub fn complete(change: BlockChange) -> Self {
        Self { change, is_complete: true }
    }
}
