//! `/live` answers while the process runs; `/ready` and `/health` answer whether requests can be served.

use std::sync::Arc;

use axum::extract::State;

use super::error::{Code, HttpError};
use crate::serve::Ready;

/// The paths whose errors are not counted: probes ask while the router is not ready.
pub(crate) const PROBES: [&str; 2] = ["/ready", "/health"];

pub(crate) async fn live() -> &'static str {
    "alive\n"
}

pub(crate) async fn ready(State(servers): State<Arc<dyn Ready>>) -> Result<&'static str, HttpError> {
    servers.ready().map(|()| "ready\n").map_err(|reason| HttpError::new(Code::NoNodes, reason))
}
