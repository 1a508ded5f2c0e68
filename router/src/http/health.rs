//! `/live` answers while the process runs; `/ready` and `/health` answer whether requests can be served.

use axum::extract::State;

use super::api::HttpApi;
use super::error::{Code, HttpError};

pub(crate) async fn live() -> &'static str {
    "alive\n"
}

pub(crate) async fn ready(State(api): State<HttpApi>) -> Result<&'static str, HttpError> {
    api.serve.ready().map(|()| "ready\n").map_err(|reason| HttpError::new(Code::NoNodes, reason))
}
