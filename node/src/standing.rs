//! What routers say of this node's place in the cluster: why it gets no work, if it gets none.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use proto::v1;
use tokio::time::Instant;

/// Routers that are listened to at one time. A cluster has a few.
const ROUTERS_MAX: usize = 64;
/// The longest time for which a router is believed that says nothing more.
const BELIEVED_AT_MOST: Duration = Duration::from_secs(60);
/// The longest reason, in characters.
const REASON_MAX: usize = 1024;

/// The refusals of all routers. Clones share one table.
///
/// A refusal of any router counts. It ends when that router takes it back, or has not repeated it in time, so that a router
/// that has left refuses no node for ever.
#[derive(Clone, Debug, Default)]
pub struct Standings {
    /// By the router's name: the reason, and until when it counts. Never held across an await.
    refusals: Arc<Mutex<BTreeMap<String, (String, Instant)>>>,
}

impl Standings {
    /// Takes in what a router says at `now`.
    pub fn hear(&self, word: v1::StandingRequest, now: Instant) {
        let v1::StandingRequest { router, refusal, ttl_ms } = word;
        let mut refusals = self.fresh(now);
        if refusal.is_empty() {
            refusals.remove(&router);
        } else if refusals.len() < ROUTERS_MAX || refusals.contains_key(&router) {
            let reason = refusal.chars().take(REASON_MAX).collect();
            let believed_for = Duration::from_millis(ttl_ms).min(BELIEVED_AT_MOST);
            refusals.insert(router, (reason, now + believed_for));
        }
    }

    /// Why a router gives this node no work; `None`: no router has said so lately.
    pub fn refusal(&self, now: Instant) -> Option<String> {
        self.fresh(now).values().next().map(|(reason, _)| reason.clone())
    }

    fn fresh(&self, now: Instant) -> MutexGuard<'_, BTreeMap<String, (String, Instant)>> {
        let mut refusals = self.refusals.lock().unwrap_or_else(PoisonError::into_inner);
        refusals.retain(|_, (_, until)| now < *until);
        refusals
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn word(router: &str, refusal: &str) -> v1::StandingRequest {
        v1::StandingRequest { router: router.to_owned(), refusal: refusal.to_owned(), ttl_ms: 6000 }
    }

    #[test]
    fn any_router_counts_until_it_takes_its_word_back_or_falls_silent() {
        let (standings, now) = (Standings::default(), Instant::now());
        let after = |seconds| now + Duration::from_secs(seconds);
        assert_eq!(standings.refusal(now), None);
        standings.hear(word("a", "other weights"), now);
        standings.hear(word("b", ""), now);
        assert_eq!(standings.refusal(after(5)).as_deref(), Some("other weights"));
        standings.hear(word("b", "so says b"), after(5));
        assert_eq!(standings.refusal(after(7)).as_deref(), Some("so says b"), "a has fallen silent");
        standings.hear(word("b", ""), after(8));
        assert_eq!(standings.refusal(after(8)), None);
    }

    #[test]
    fn the_table_is_bounded() {
        let (standings, now) = (Standings::default(), Instant::now());
        (0..2 * ROUTERS_MAX).for_each(|nth| standings.hear(word(&format!("r{nth}"), "no"), now));
        assert_eq!(standings.fresh(now).len(), ROUTERS_MAX);
        standings.hear(word("r0", &"x".repeat(2 * REASON_MAX)), now);
        assert_eq!(standings.refusal(now).map(|reason| reason.len()), Some(REASON_MAX));
    }
}
