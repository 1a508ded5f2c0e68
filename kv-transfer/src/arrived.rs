//! The KV of one sequence after its transfer.

use std::time::Duration;

use kv_cache::BlockLease;
use types::{Handoff, Scheme};

/// Complete, verified KV of one sequence. The value exists only after verification.
#[derive(Debug)]
pub struct ArrivedKv {
    /// The lease that the landing was made from.
    pub lease: BlockLease,
    pub handoff: Handoff,
    /// The number of bytes that were transferred.
    pub bytes: u64,
    /// The wire that carried the KV.
    pub scheme: Scheme,
    /// The time from the landing's grant to the last byte.
    pub waited: Duration,
    /// The time from the first byte to the last; zero if nothing was sent.
    pub moved: Duration,
}
