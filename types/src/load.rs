//! The contents of a node's status stream: its load, and changes of its prefix cache.

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

/// A change of a node's prefix cache. Events are numbered without gaps; a reader that sees a gap requests a
/// snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BlockEvent {
    /// The complete list of cached blocks. It replaces the result of all earlier events.
    Snapshot(Vec<BlockHash>),
    Stored(Vec<BlockHash>),
    Evicted(Vec<BlockHash>),
}
