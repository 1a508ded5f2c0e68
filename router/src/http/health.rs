//! `/live` answers while the process runs; `/ready` and `/health` answer whether requests can be served.

use axum::extract::State;

use super::api::HttpApi;
use super::error::{Code, HttpError};

/// The paths whose errors are not counted: probes ask while the router is not ready.
pub(crate) const PROBES: [&str; 2] = ["/ready", "/health"];

pub(crate) async fn live() -> &'static str {
    "alive\n"
}

pub(crate) async fn ready(State(api): State<HttpApi>) -> Result<&'static str, HttpError> {
    api.serve.ready().map(|()| "ready\n").map_err(|reason| HttpError::new(Code::NoNodes, reason))
}
