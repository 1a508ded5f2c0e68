//! KV that has arrived.

use std::time::Duration;

use kv_cache::BlockLease;
use types::{Handoff, Scheme};

/// KV that is whole, verified and ours. It cannot exist before that.
#[derive(Debug)]
pub struct ArrivedKv {
    /// The lease that the landing was made of.
    pub lease: BlockLease,
    pub handoff: Handoff,
    /// Bytes that travelled.
    pub bytes: u64,
    /// The wire that was really used.
    pub scheme: Scheme,
    /// From the landing's grant to the last byte.
    pub waited: Duration,
}
