//! Compares a policy's predictions for a route with the measured times of the request, and learns from the
//! difference.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use tokio::time::Instant;
use types::Scheme;

use crate::metrics::predictions::PredictionMetrics;
use crate::policy::{Arm, Decision, RouteCosts, SeenTransfer};

/// The costs of routes that the router has learned. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct RouteLearner(Arc<RwLock<Arc<RouteCosts>>>);

/// The prediction for one attempt, from the decision on.
#[derive(Clone, Debug)]
pub(crate) struct Prediction {
    learner: RouteLearner,
    metrics: PredictionMetrics,
    arm: Arm,
    first_token_ms: f64,
    decided: Instant,
    computed: Option<ComputedAt>,
}

/// The time at which the router has got the first token, and for how long the node has computed.
#[derive(Clone, Copy, Debug)]
struct ComputedAt {
    at: Instant,
    took: Duration,
}

impl RouteLearner {
    /// Returns the costs learned so far.
    pub fn costs(&self) -> Arc<RouteCosts> {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn learn_calls(&self, arm: Arm, ms: f64) {
        self.change(|costs| costs.learn_calls(arm, ms));
    }

    pub(crate) fn learn_transfer(&self, scheme: &Scheme, seen: SeenTransfer) {
        self.change(|costs| costs.learn_transfer(scheme, seen));
    }

    fn change(&self, change: impl FnOnce(&mut RouteCosts)) {
        change(Arc::make_mut(&mut self.0.write().unwrap_or_else(PoisonError::into_inner)));
    }
}

impl Prediction {
    pub(crate) fn new(
        decision: &Decision,
        learner: RouteLearner,
        metrics: PredictionMetrics,
        now: Instant,
    ) -> Self {
        let (arm, first_token_ms) = (decision.arm, decision.terms.first_token_ms());
        Self { learner, metrics, arm, first_token_ms, decided: now, computed: None }
    }

    pub(crate) fn arm(&self) -> Arm {
        self.arm
    }

    /// Compares the time to the first token, which has just arrived. The node reports how long the prompt was
    /// queued and computed; the rest of the time was calls.
    pub(crate) fn first_token(&mut self, queued: Duration, computed: Duration, now: Instant) {
        let seen = now - self.decided;
        self.metrics.compare(self.arm, self.first_token_ms, ms(seen));
        self.learner.learn_calls(self.arm, ms(seen.saturating_sub(queued + computed)));
        self.computed = Some(ComputedAt { at: now, took: computed });
    }

    /// Learns from a transfer that is complete now.
    pub(crate) fn kv_arrived(&self, connector: &str, bytes: u64, moved: Duration, now: Instant) {
        let Some(ComputedAt { at, took }) = self.computed else { return };
        let (moved_ms, computed_ms, tail_ms) = (ms(moved), ms(took), ms(now - at));
        self.learner
            .learn_transfer(&Scheme::new(connector), SeenTransfer { bytes, moved_ms, computed_ms, tail_ms });
    }
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use chassis::metrics::Metrics;

    use super::*;
    use crate::metrics::RouterMetrics;
    use crate::policy::tests::{NO_EXPLORING, node};
    use crate::policy::{Ask, ClusterView, by_name};

    #[test]
    fn a_request_teaches_the_time_of_calls_and_the_rate_of_its_transfer() {
        let prompt = crate::policy::tests::prompt(200);
        let nodes = vec![node("p", types::Role::Prefill), node("d", types::Role::Decode)];
        let ask = Ask::new(&prompt, &[]);
        let view = ClusterView { nodes, ..ClusterView::default() };
        let policy = by_name("least-loaded").expect("in the table");
        let decision = policy.route(&ask, &view, NO_EXPLORING).expect("two nodes");
        let (learner, page) = (RouteLearner::default(), Metrics::new("router"));
        let metrics = RouterMetrics::new(&page).predictions;
        metrics.decided(&decision);
        let (start, after) = (Instant::now(), Duration::from_millis);
        let mut prediction = Prediction::new(&decision, learner.clone(), metrics, start);
        prediction.kv_arrived("tcp", 9 << 20, after(3), start + after(9));
        assert_eq!(learner.costs().connectors().count(), 0, "the first token is not there");
        prediction.first_token(after(5), after(10), start + after(18));
        prediction.kv_arrived("tcp", 30_000_000, after(30), start + after(38));
        let costs = learner.costs();
        assert!((costs.calls(Arm::Remote).ms - 3.0).abs() < 1e-9, "{costs:?}");
        let (scheme, tcp) = costs.connectors().next().expect("learned");
        assert_eq!((scheme.as_str(), tcp.rate), ("tcp", 1e6));
        assert!((tcp.tail_ms - 0.0).abs() < 1e-9, "{tcp:?}");
        let seen = "baton_router_route_first_token_seconds_sum{arm=\"remote\",value=\"seen\"} 0.018";
        assert!(page.page().contains(seen), "{}", page.page());
    }
}
