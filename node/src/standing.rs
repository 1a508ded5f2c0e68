//! The routers' reports on this node: whether they refuse it, and why a rollout must wait.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use proto::v1;
use tokio::time::Instant;

/// The largest number of routers whose reports are stored. A cluster has a few routers.
const ROUTERS_MAX: usize = 64;
/// The longest time for which a report is valid without being repeated.
const BELIEVED_AT_MOST: Duration = Duration::from_secs(60);
/// The longest reason, in characters.
const REASON_MAX: usize = 1024;

/// The latest reports of all routers. Clones share one table.
///
/// One router's refusal makes the node unready. The refusal ends when the router withdraws it or its time to
/// live passes, so a router that is gone blocks the node only briefly.
#[derive(Clone, Debug, Default)]
pub struct Standings {
    /// The reports by the router's name. The mutex is never held across an await.
    reports: Arc<Mutex<BTreeMap<String, RouterReport>>>,
}

/// One router's report, as long as it is valid.
#[derive(Debug)]
struct RouterReport {
    /// The reason why the router gives the node no work; `None`: the node gets work.
    refusal: Option<String>,
    /// The reason why a rollout must not replace other nodes yet; `None`: the rollout may go on.
    rollout_waits_for: Option<String>,
    believed_until: Instant,
}

impl Standings {
    /// Stores a router's report that is received at `now`.
    pub fn hear(&self, report: v1::StandingRequest, now: Instant) {
        let v1::StandingRequest { router, refusal, ttl_ms, rollout_waits_for } = report;
        let mut reports = self.fresh(now);
        if reports.len() < ROUTERS_MAX || reports.contains_key(&router) {
            let reason = |text: String| {
                Some(text.chars().take(REASON_MAX).collect::<String>()).filter(|text| !text.is_empty())
            };
            let report = RouterReport {
                refusal: reason(refusal),
                rollout_waits_for: reason(rollout_waits_for),
                believed_until: now + Duration::from_millis(ttl_ms).min(BELIEVED_AT_MOST),
            };
            reports.insert(router, report);
        }
    }

    /// Returns the reason why a router gives this node no work; `None` if no valid report has one.
    pub fn refusal(&self, now: Instant) -> Option<String> {
        self.fresh(now).values().find_map(|report| report.refusal.clone())
    }

    /// Returns the reason why a rollout must not replace other nodes yet. Returns `None` if at least one
    /// report is valid and none has a reason to wait.
    pub fn rollout_waits_for(&self, now: Instant) -> Option<String> {
        let reports = self.fresh(now);
        if reports.is_empty() {
            return Some("no router has reported lately that this node serves".to_owned());
        }
        reports.values().find_map(|report| report.rollout_waits_for.clone())
    }

    fn fresh(&self, now: Instant) -> MutexGuard<'_, BTreeMap<String, RouterReport>> {
        let mut reports = self.reports.lock().unwrap_or_else(PoisonError::into_inner);
        reports.retain(|_, report| now < report.believed_until);
        reports
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn word(router: &str, refusal: &str) -> v1::StandingRequest {
        v1::StandingRequest {
            router: router.to_owned(),
            refusal: refusal.to_owned(),
            ttl_ms: 6000,
            rollout_waits_for: String::new(),
        }
    }

    #[test]
    fn a_rollout_waits_until_a_router_has_spoken_and_none_holds_it() {
        let (standings, now) = (Standings::default(), Instant::now());
        let waits = |at| standings.rollout_waits_for(now + Duration::from_secs(at));
        assert!(waits(0).is_some_and(|reason| reason.contains("no router")));
        standings.hear(word("a", ""), now);
        assert_eq!(waits(1), None);
        let held = v1::StandingRequest { rollout_waits_for: "a decode node".into(), ..word("b", "other") };
        standings.hear(held, now);
        assert_eq!(waits(1).as_deref(), Some("a decode node"));
        standings.hear(word("b", "other"), now);
        assert_eq!(waits(1), None, "superseded, and its group is complete");
        assert!(waits(7).is_some(), "nothing was heard for long");
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
