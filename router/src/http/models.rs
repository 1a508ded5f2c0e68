//! `GET /v1/models`: what can be asked for now.

use axum::Json;
use axum::extract::{Path, State};
use serde::Serialize;
use types::ModelInfo;

use super::door::Door;
use super::error::HttpError;
use crate::error::AcceptError;

#[derive(Debug, Serialize)]
pub(crate) struct ModelList {
    object: &'static str,
    data: Vec<ModelFields>,
}

#[derive(Debug, Serialize)]
pub(crate) struct ModelFields {
    id: String,
    object: &'static str,
    /// When a model was made is not known here; clients want a number.
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

pub(crate) async fn list(State(door): State<Door>) -> Json<ModelList> {
    Json(ModelList { object: "list", data: door.serve.models().into_iter().map(ModelFields::from).collect() })
}

pub(crate) async fn one(
    State(door): State<Door>,
    Path(name): Path<String>,
) -> Result<Json<ModelFields>, HttpError> {
    let model = door.serve.models().into_iter().find(|model| model.name == name);
    Ok(Json(model.ok_or(AcceptError::UnknownModel { name })?.into()))
}
