//! `/live` says that the process runs, `/ready` and `/health` that tokens can flow.

use axum::extract::State;

use super::door::Door;
use super::error::{Code, HttpError};

pub(crate) async fn live() -> &'static str {
    "alive\n"
}

pub(crate) async fn ready(State(door): State<Door>) -> Result<&'static str, HttpError> {
    door.serve.ready().map(|()| "ready\n").map_err(|reason| HttpError::new(Code::NoNodes, reason))
}
