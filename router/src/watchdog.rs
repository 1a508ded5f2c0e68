//! Notices when no token is sent although there are requests, and says which stage they wait in.
//!
//! It depends on no request that comes: it looks at intervals. A token moves when a step reaches this router, or when
//! a node says that it has run another one: a long prompt that is being computed is no standstill.

use std::fmt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use tracing::{info, warn};

/// How often it looks.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Where a request waits. A request whose client does not read is not counted as waiting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitStage {
    /// For a node to be usable, or to have room.
    Route,
    /// For a decode node's word whether there is room.
    Reserve,
    /// For a prefill node's first token.
    Prefill,
    /// For a pool node to have the KV, and for KV that is held or stored to be sent to a decode node.
    Deliver,
    /// For a decode node's next step, and the KV before it.
    Decode,
}

impl WaitStage {
    const ALL: [Self; 5] = [Self::Route, Self::Reserve, Self::Prefill, Self::Deliver, Self::Decode];

    fn as_str(self) -> &'static str {
        match self {
            Self::Route => "route",
            Self::Reserve => "reserve",
            Self::Prefill => "prefill",
            Self::Deliver => "deliver",
            Self::Decode => "decode",
        }
    }
}

/// Where all requests are, and how often something moved. Clones share one count.
#[derive(Clone, Debug, Default)]
pub struct StageTracker {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    waiting: [AtomicU32; WaitStage::ALL.len()],
    n_moved: AtomicU64,
    /// Why the router is not ready. Held for a look or a change.
    stuck: Mutex<Option<String>>,
}

/// One request's place. Dropping it is leaving.
#[derive(Debug)]
pub struct TrackedRequest {
    all: StageTracker,
    at: Mutex<WaitStage>,
}

impl StageTracker {
    pub fn enter(&self, at: WaitStage) -> TrackedRequest {
        self.count(at).fetch_add(1, Ordering::Relaxed);
        TrackedRequest { all: self.clone(), at: Mutex::new(at) }
    }

    /// A step has come.
    pub fn moved(&self) {
        self.shared.n_moved.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether tokens move; otherwise where they do not.
    pub fn check(&self) -> Result<(), String> {
        self.stuck().clone().map_or(Ok(()), Err)
    }

    fn n_waiting(&self) -> u32 {
        self.shared.waiting.iter().map(|count| count.load(Ordering::Relaxed)).sum()
    }

    fn n_moved(&self) -> u64 {
        self.shared.n_moved.load(Ordering::Relaxed)
    }

    fn count(&self, at: WaitStage) -> &AtomicU32 {
        &self.shared.waiting[at as usize]
    }

    fn stuck(&self) -> MutexGuard<'_, Option<String>> {
        self.shared.stuck.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// For example `3 wait for prefill, 1 for decode`.
impl fmt::Display for StageTracker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counted = WaitStage::ALL.map(|place| (place, self.count(place).load(Ordering::Relaxed)));
        let told: Vec<String> = counted
            .iter()
            .filter(|(_, count)| *count > 0)
            .map(|(place, count)| format!("{count} wait at {}", place.as_str()))
            .collect();
        f.write_str(&told.join(", "))
    }
}

impl TrackedRequest {
    pub fn set_stage(&self, place: WaitStage) {
        let mut at = self.at.lock().unwrap_or_else(PoisonError::into_inner);
        self.all.count(*at).fetch_sub(1, Ordering::Relaxed);
        self.all.count(place).fetch_add(1, Ordering::Relaxed);
        *at = place;
    }
}

impl Drop for TrackedRequest {
    fn drop(&mut self) {
        let at = *self.at.lock().unwrap_or_else(PoisonError::into_inner);
        self.all.count(at).fetch_sub(1, Ordering::Relaxed);
    }
}

// === the watch ===

/// What was seen at the last look at which something had moved.
#[derive(Clone, Copy, Debug)]
struct LastProgress {
    steps: u64,
    at: Instant,
}

/// Looks until it is dropped. `n_node_steps` is what the nodes say they have run so far; `bound`, how long nothing may
/// move.
pub async fn watch(stages: StageTracker, bound: Duration, n_node_steps: impl Fn() -> u64) {
    let mut seen = LastProgress { steps: 0, at: Instant::now() };
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let steps = n_node_steps().wrapping_add(stages.n_moved());
        if steps != seen.steps || stages.n_waiting() == 0 {
            seen = LastProgress { steps, at: Instant::now() };
        }
        let is_stuck = seen.at.elapsed() > bound;
        let ms = seen.at.elapsed().as_millis();
        note(&stages, is_stuck.then(|| format!("no token has moved for {ms} ms: {stages}")));
    }
}

/// One line when it begins, one when it ends.
fn note(stages: &StageTracker, found: Option<String>) {
    let mut stuck = stages.stuck();
    match (&*stuck, &found) {
        (None, Some(reason)) => warn!(reason, "no request makes progress"),
        (Some(_), None) => info!("tokens move again"),
        _ => {}
    }
    *stuck = found;
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUND: Duration = Duration::from_secs(4);

    async fn after(
        seconds: u64,
        stages: &StageTracker,
        n_node_steps: impl Fn() -> u64,
    ) -> Result<(), String> {
        let watching = watch(stages.clone(), BOUND, n_node_steps);
        let _ = tokio::time::timeout(Duration::from_secs(seconds), watching).await;
        stages.check()
    }

    #[tokio::test(start_paused = true)]
    async fn a_standstill_is_noticed_and_named() {
        let stages = StageTracker::default();
        assert_eq!(after(10, &stages, || 0).await, Ok(()), "no request waits");
        let (one, _other) = (stages.enter(WaitStage::Route), stages.enter(WaitStage::Decode));
        one.set_stage(WaitStage::Prefill);
        assert_eq!(after(4, &stages, || 0).await, Ok(()), "it may come yet");
        let stuck = after(5, &stages, || 0).await.expect_err("nothing moves");
        assert!(stuck.ends_with(" ms: 1 wait at prefill, 1 wait at decode"), "{stuck}");
        drop((one, _other));
        assert_eq!(after(1, &stages, || 0).await, Ok(()), "they have ended");
    }

    #[tokio::test(start_paused = true)]
    async fn what_nodes_compute_is_movement() {
        let stages = StageTracker::default();
        let _one = stages.enter(WaitStage::Prefill);
        let began = Instant::now();
        assert_eq!(after(20, &stages, || began.elapsed().as_secs()).await, Ok(()));
        assert!(after(20, &stages, || 7).await.is_err());
        stages.moved();
        assert_eq!(after(1, &stages, || 7).await, Ok(()));
    }
}
