//! How busy a node is, and which blocks it has cached: what its status stream carries.

use crate::block::BlockHash;

/// A node's load at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct NodeLoad {
    /// Sequences that are in the batch.
    pub running: u32,
    /// Sequences that wait for room.
    pub waiting: u32,
    /// Landings whose KV is still on its way.
    pub arriving: u32,
    /// Prompt tokens that are still to be computed.
    pub queued_tokens: u64,
    /// Predicted time until a prompt that comes now is computed first.
    pub queue_ms: f32,
    /// Predicted time of a decode step with one more sequence in it.
    pub step_ms: f32,
    /// Steps finished since the node started: it stands still when the worker does.
    pub steps_total: u64,
    pub blocks: BlockCounts,
}

/// Where a pool's blocks are. `free + leased + cached + quarantined = total` on an idle node and on a busy one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockCounts {
    pub total: u32,
    pub free: u32,
    pub leased: u32,
    /// Held by the prefix index alone: taken back when room is needed.
    pub cached: u32,
    /// Waiting for proof that no wire can still write into them.
    pub quarantined: u32,
}

impl BlockCounts {
    /// Blocks that a new sequence could have.
    pub fn available(&self) -> u32 {
        self.free + self.cached
    }

    pub fn adds_up(&self) -> bool {
        self.free + self.leased + self.cached + self.quarantined == self.total
    }
}

/// A change of a node's prefix cache. Numbered without gaps; a reader that sees one asks for a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BlockEvent {
    /// Everything that is cached, in place of all that was said before.
    Snapshot(Vec<BlockHash>),
    Stored(Vec<BlockHash>),
    Evicted(Vec<BlockHash>),
}
