//! Detects that no request makes progress, and names the stages that requests wait in.
//!
//! The watchdog polls, so it works when no event arrives any more. Progress is a step that reaches this
//! router, or an engine step that a node reports; so a long prompt that is being computed counts as progress.

use std::fmt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use tracing::{info, warn};

use crate::requests::{Place, RequestRecord};

/// The poll interval.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// The stage that a request waits in. A request whose client does not read is not counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitStage {
    /// The request waits in its model's line.
    Admission,
    /// The request waits for a node to be usable or to have room.
    Route,
    /// The request waits for a decode node's answer about room.
    Reserve,
    /// The request waits for a prefill node's first token.
    Prefill,
    /// The request waits for a pool node to store the KV, or for held or stored KV to be sent to a decode
    /// node.
    Deliver,
    /// The request waits for a decode node's next step, including the arrival of KV.
    Decode,
}

impl WaitStage {
    const ALL: [Self; 6] =
        [Self::Admission, Self::Route, Self::Reserve, Self::Prefill, Self::Deliver, Self::Decode];

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Admission => "admission",
            Self::Route => "route",
            Self::Reserve => "reserve",
            Self::Prefill => "prefill",
            Self::Deliver => "deliver",
            Self::Decode => "decode",
        }
    }
}

/// The number of requests in each stage, and a count of their steps. Clones share the counts.
#[derive(Clone, Debug, Default)]
pub struct StageTracker {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    waiting: [AtomicU32; WaitStage::ALL.len()],
    n_moved: AtomicU64,
    /// The reason why the router is not ready; `None` while requests make progress. The mutex is held for one
    /// look-up or change.
    stuck: Mutex<Option<String>>,
}

/// The stage of one request, which its record follows. Dropping it ends the count: the request is at the
/// client then.
#[derive(Debug)]
pub struct TrackedRequest {
    all: StageTracker,
    at: Mutex<WaitStage>,
    record: RequestRecord,
}

impl StageTracker {
    pub fn enter(&self, at: WaitStage, record: &RequestRecord) -> TrackedRequest {
        self.count(at).fetch_add(1, Ordering::Relaxed);
        record.enter(at.into());
        TrackedRequest { all: self.clone(), at: Mutex::new(at), record: record.clone() }
    }

    /// Counts a step as progress.
    pub fn moved(&self) {
        self.shared.n_moved.fetch_add(1, Ordering::Relaxed);
    }

    /// Checks that requests make progress. An error names the stages that they wait in.
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

/// Writes the number of requests per stage, for example `3 wait at prefill, 1 wait at decode`.
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
        self.record.enter(place.into());
    }

    pub(crate) fn record(&self) -> &RequestRecord {
        &self.record
    }
}

impl Drop for TrackedRequest {
    fn drop(&mut self) {
        let at = *self.at.lock().unwrap_or_else(PoisonError::into_inner);
        self.all.count(at).fetch_sub(1, Ordering::Relaxed);
        self.record.enter(Place::Client);
    }
}

// === the watchdog ===

/// The step count when requests last made progress, and the time of that.
#[derive(Clone, Copy, Debug)]
struct LastProgress {
    steps: u64,
    at: Instant,
}

/// Checks for progress until the future is dropped. `n_node_steps` returns the nodes' reported engine steps;
/// `bound` is the longest time without progress.
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
        note(&stages, is_stuck.then(|| format!("no request has made progress for {ms} ms: {stages}")));
    }
}

/// Logs one line when requests get stuck and one when they continue.
fn note(stages: &StageTracker, found: Option<String>) {
    let mut stuck = stages.stuck();
    match (&*stuck, &found) {
        (None, Some(reason)) => warn!(reason, "no request makes progress"),
        (Some(_), None) => info!("requests make progress again"),
        _ => {}
    }
    *stuck = found;
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUND: Duration = Duration::from_secs(4);

    fn record() -> RequestRecord {
        RequestRecord::of_model("mock")
    }

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
        let one = stages.enter(WaitStage::Route, &record());
        let _other = stages.enter(WaitStage::Decode, &record());
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
        let _one = stages.enter(WaitStage::Prefill, &record());
        let began = Instant::now();
        assert_eq!(after(20, &stages, || began.elapsed().as_secs()).await, Ok(()));
        assert!(after(20, &stages, || 7).await.is_err());
        stages.moved();
        assert_eq!(after(1, &stages, || 7).await, Ok(()));
    }
}
