//! The health of the services by their names, which probes and load balancers ask for.
//!
//! `baton.v1.Inference` serves while `/ready` says so. Without a name the health is that of the process.

use std::sync::Arc;
use std::time::Duration;

use chassis::Shutdown;
use chassis::rpc::HealthReporter;
use proto::v1::inference_server::InferenceServer;

use super::GrpcApi;
use crate::serve::Ready;

const CHECKED_EVERY: Duration = Duration::from_secs(1);

/// Reports the health of the API until `shutdown`.
pub(crate) async fn follow(health: HealthReporter, ready: Arc<dyn Ready>, shutdown: Shutdown) {
    let mut was_ready = None;
    while !shutdown.requested() {
        let is_ready = ready.ready().is_ok();
        // Every report wakes all watchers, so only changes are reported.
        if was_ready.replace(is_ready) != Some(is_ready) {
            match is_ready {
                true => health.set_serving::<InferenceServer<GrpcApi>>().await,
                false => health.set_not_serving::<InferenceServer<GrpcApi>>().await,
            }
        }
        let _ = tokio::time::timeout(CHECKED_EVERY, shutdown.wait()).await;
    }
}
