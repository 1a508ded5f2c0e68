//! Notices that no token moves although there are requests, and says where they are.
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

/// Where a request waits. One whose client does not read waits for nobody here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
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

impl Place {
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
pub struct Whereabouts {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    waiting: [AtomicU32; Place::ALL.len()],
    n_moved: AtomicU64,
    /// Why the router is not ready. Held for a look or a change.
    stuck: Mutex<Option<String>>,
}

/// One request's place. Dropping it is leaving.
#[derive(Debug)]
pub struct Waiting {
    all: Whereabouts,
    at: Mutex<Place>,
}

impl Whereabouts {
    pub fn enter(&self, at: Place) -> Waiting {
        self.count(at).fetch_add(1, Ordering::Relaxed);
        Waiting { all: self.clone(), at: Mutex::new(at) }
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

    fn count(&self, at: Place) -> &AtomicU32 {
        &self.shared.waiting[at as usize]
    }

    fn stuck(&self) -> MutexGuard<'_, Option<String>> {
        self.shared.stuck.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// As `3 wait for prefill, 1 for decode`.
impl fmt::Display for Whereabouts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counted = Place::ALL.map(|place| (place, self.count(place).load(Ordering::Relaxed)));
        let told: Vec<String> = counted
            .iter()
            .filter(|(_, count)| *count > 0)
            .map(|(place, count)| format!("{count} wait at {}", place.as_str()))
            .collect();
        f.write_str(&told.join(", "))
    }
}

impl Waiting {
    pub fn goes_to(&self, place: Place) {
        let mut at = self.at.lock().unwrap_or_else(PoisonError::into_inner);
        self.all.count(*at).fetch_sub(1, Ordering::Relaxed);
        self.all.count(place).fetch_add(1, Ordering::Relaxed);
        *at = place;
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let at = *self.at.lock().unwrap_or_else(PoisonError::into_inner);
        self.all.count(at).fetch_sub(1, Ordering::Relaxed);
    }
}

// === the watch ===

/// What was seen at the last look at which something had moved.
#[derive(Clone, Copy, Debug)]
struct Seen {
    steps: u64,
    at: Instant,
}

/// Looks until it is dropped. `n_node_steps` is what the nodes say they have run so far; `bound`, how long nothing may
/// move.
pub async fn watch(whereabouts: Whereabouts, bound: Duration, n_node_steps: impl Fn() -> u64) {
    let mut seen = Seen { steps: 0, at: Instant::now() };
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let steps = n_node_steps().wrapping_add(whereabouts.n_moved());
        if steps != seen.steps || whereabouts.n_waiting() == 0 {
            seen = Seen { steps, at: Instant::now() };
        }
        let is_stuck = seen.at.elapsed() > bound;
        let ms = seen.at.elapsed().as_millis();
        note(&whereabouts, is_stuck.then(|| format!("no token has moved for {ms} ms: {whereabouts}")));
    }
}

/// One line when it begins, one when it ends.
fn note(whereabouts: &Whereabouts, found: Option<String>) {
    let mut stuck = whereabouts.stuck();
    match (&*stuck, &found) {
        (None, Some(reason)) => warn!(reason, "no token moves"),
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
        whereabouts: &Whereabouts,
        n_node_steps: impl Fn() -> u64,
    ) -> Result<(), String> {
        let watching = watch(whereabouts.clone(), BOUND, n_node_steps);
        let _ = tokio::time::timeout(Duration::from_secs(seconds), watching).await;
        whereabouts.check()
    }

    #[tokio::test(start_paused = true)]
    async fn a_standstill_is_noticed_and_named() {
        let whereabouts = Whereabouts::default();
        assert_eq!(after(10, &whereabouts, || 0).await, Ok(()), "nobody waits");
        let (one, _other) = (whereabouts.enter(Place::Route), whereabouts.enter(Place::Decode));
        one.goes_to(Place::Prefill);
        assert_eq!(after(4, &whereabouts, || 0).await, Ok(()), "it may come yet");
        let stuck = after(5, &whereabouts, || 0).await.expect_err("nothing moves");
        assert!(stuck.ends_with(" ms: 1 wait at prefill, 1 wait at decode"), "{stuck}");
        drop((one, _other));
        assert_eq!(after(1, &whereabouts, || 0).await, Ok(()), "they have ended");
    }

    #[tokio::test(start_paused = true)]
    async fn what_nodes_compute_is_movement() {
        let whereabouts = Whereabouts::default();
        let _one = whereabouts.enter(Place::Prefill);
        let began = Instant::now();
        assert_eq!(after(20, &whereabouts, || began.elapsed().as_secs()).await, Ok(()));
        assert!(after(20, &whereabouts, || 7).await.is_err());
        whereabouts.moved();
        assert_eq!(after(1, &whereabouts, || 7).await, Ok(()));
    }
}
