//! KV room for a prompt whose KV another node sends. The request waits in one queue with fresh prompts.

use chassis::counted::{Counter, CounterGuard};
use kv_cache::{BlockLease, BlockPool, Holder};
use tokio::sync::oneshot;
use tokio::time::Instant;
use types::prompt::Priority;
use types::{BlockHash, Deadline, Refusal, RefusalKind};

use crate::precedence::{Precedence, SequenceId};
use crate::settings::SchedulerSettings;

/// A request for the room of a prompt, before its KV can be sent here.
#[derive(Clone, Debug)]
pub struct RoomRequest {
    pub holder: Holder,
    pub priority: Priority,
    pub deadline: Deadline,
    /// The hashes of the prompt's full blocks that may be taken from the prefix cache, in order.
    pub hashes: Vec<BlockHash>,
    /// The blocks per layer group that the whole prompt needs.
    pub n_blocks: usize,
    /// The counter of open landings.
    pub landings: Counter,
    /// The limit of open landings.
    pub landings_max: u32,
}

/// Room for a prompt's KV. Dropping it releases the blocks and the landing.
#[derive(Debug)]
pub struct GrantedRoom {
    /// Blocks for the whole prompt, the cached ones first.
    pub lease: BlockLease,
    /// The number of leading blocks per layer group whose KV is cached.
    pub cached_blocks: usize,
    /// The landing, as a unit of the counter of open landings.
    pub landing: CounterGuard,
}

/// A request for room that waits, with the channel for its answer.
#[derive(Debug)]
pub(crate) struct RoomWaiter {
    pub(crate) id: SequenceId,
    pub(crate) request: RoomRequest,
    pub(crate) submitted: Instant,
    pub(crate) answer: oneshot::Sender<Result<GrantedRoom, Refusal>>,
}

impl RoomRequest {
    /// Takes the room if all of it is available and `kept` blocks, in all `n_groups` layer groups, stay free.
    pub(crate) fn grant(&self, pool: &BlockPool, n_groups: usize, kept: usize) -> Option<GrantedRoom> {
        let landing = self.landings.enter(self.landings_max)?;
        let cached = pool.adopt(&self.hashes, self.holder.clone());
        let cached_blocks = cached.n_blocks();
        let n_fresh = self.n_blocks - cached_blocks;
        if n_fresh * n_groups + kept > pool.counts().available() as usize {
            return None;
        }
        let fresh = pool.reserve(n_fresh, self.holder.clone()).ok()?;
        Some(GrantedRoom { lease: cached.join(fresh), cached_blocks, landing })
    }
}

impl RoomWaiter {
    pub(crate) fn precedence(&self, now: Instant, settings: &SchedulerSettings) -> Precedence {
        let age = now.saturating_duration_since(self.submitted);
        Precedence::new(self.request.priority, self.id, age, settings.age_bound)
    }

    pub(crate) fn deadline(&self) -> Instant {
        self.request.deadline.instant().into()
    }

    /// Sends the answer. If the caller has given up, the room is released at once.
    pub(crate) fn answer(self, answer: Result<GrantedRoom, Refusal>) {
        let _ = self.answer.send(answer);
    }
}

/// Returns the refusal of a request when too many prompts wait.
pub(crate) fn line_is_full(n_waiting: usize) -> Refusal {
    Refusal::new(RefusalKind::Full, format!("{n_waiting} prompts wait for KV room already"))
}
