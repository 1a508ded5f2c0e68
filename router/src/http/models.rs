//! The endpoint `GET /v1/models`: the models that can be used now.

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use serde::Serialize;
use types::ModelInfo;

use super::api::HttpApi;
use super::error::HttpError;
use crate::error::AcceptError;
use crate::tenants::Client;

#[derive(Debug, Serialize)]
pub(crate) struct ModelList {
    object: &'static str,
    data: Vec<ModelFields>,
}

#[derive(Debug, Serialize)]
pub(crate) struct ModelFields {
    id: String,
    object: &'static str,
    /// The creation time, always zero: it is unknown, but clients expect a number.
    created: u64,
    owned_by: &'static str,
    max_model_len: u32,
}

impl From<ModelInfo> for ModelFields {
    fn from(model: ModelInfo) -> Self {
        Self {
            id: model.name,
            object: "model",
            created: 0,
            owned_by: "baton",
            max_model_len: model.context_tokens,
        }
    }
}

pub(crate) async fn list(State(api): State<HttpApi>, _client: Client) -> Json<ModelList> {
    Json(ModelList { object: "list", data: api.serve.models().into_iter().map(ModelFields::from).collect() })
}

pub(crate) async fn one(
    State(api): State<HttpApi>,
    _client: Client,
    name: Result<Path<String>, PathRejection>,
) -> Result<Json<ModelFields>, HttpError> {
    let Path(name) = name?;
    match api.serve.models().into_iter().find(|model| model.name == name) {
        Some(model) => Ok(Json(model.into())),
        None => Err(api.serve.knows_nodes().err().unwrap_or(AcceptError::UnknownModel { name }).into()),
    }
}
