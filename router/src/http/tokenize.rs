//! The endpoints `POST /tokenize` and `POST /detokenize`, with vLLM's fields.

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use types::TokenId;

use super::api::HttpApi;
use super::body;
use super::chat::ChatFields;
use super::error::HttpError;
use super::request_fields;
use crate::error::{AcceptError, EncodeError};
use crate::tenants::Client;
use crate::text::{ServedModel, Tokenizer};

#[derive(Debug, Deserialize)]
struct TokenizeFields {
    model: Option<String>,
    prompt: Option<String>,
    add_special_tokens: Option<bool>,
    return_token_strs: Option<bool>,
    messages: Option<IgnoredAny>,
    /// The fields of chats and those that do not exist.
    #[serde(flatten)]
    others: Map<String, Value>,
}

/// The fields of `others` that a chat's prompt depends on. [`ChatFields`] reads them.
const CHAT_FIELDS: &[&str] = &["add_generation_prompt", "chat_template_kwargs", "tools"];

#[derive(Debug, Deserialize)]
struct DetokenizeFields {
    model: Option<String>,
    tokens: Option<Vec<u32>>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

#[derive(Debug, Serialize)]
pub(crate) struct TokenizedText {
    count: usize,
    max_model_len: u32,
    tokens: Vec<u32>,
    token_strs: Option<Vec<String>>,
}

#[derive(Debug, Serialize)]
pub(crate) struct DetokenizedText {
    prompt: String,
}

pub(crate) async fn tokenize(
    State(api): State<HttpApi>,
    _client: Client,
    body: Body,
) -> Result<Json<TokenizedText>, HttpError> {
    api.parsed(body, api.body, tokenized).await.map(Json)
}

pub(crate) async fn detokenize(
    State(api): State<HttpApi>,
    _client: Client,
    body: Body,
) -> Result<Json<DetokenizedText>, HttpError> {
    api.parsed(body, api.body, detokenized).await.map(Json)
}

fn tokenized(api: &HttpApi, json: &[u8]) -> Result<TokenizedText, HttpError> {
    let fields: TokenizeFields = body::parse(json)?;
    let is_chat = fields.messages.is_some();
    let known = if is_chat { CHAT_FIELDS } else { &[] };
    request_fields::refuse_others(&fields.others, known)?;
    let model = api.serve.model(&api.models, fields.model.as_deref())?;
    let tokens = match (fields.prompt, is_chat) {
        (None, false) => return Err(AcceptError::missing("prompt").into()),
        (Some(_), true) => return Err(AcceptError::invalid("prompt", "not beside messages").into()),
        (Some(text), false) => encoded(&model, &text, fields.add_special_tokens)?,
        (None, true) => {
            if fields.add_special_tokens == Some(true) {
                let reason = "the chat template writes them";
                return Err(AcceptError::unsupported("add_special_tokens", reason).into());
            }
            body::parse::<ChatFields>(json)?.rendered(api, &model)?.tokens
        }
    };
    let shown =
        |tokens: &[TokenId]| tokens.iter().map(|token| model.tokenizer.shown(*token).into()).collect();
    Ok(TokenizedText {
        count: tokens.len(),
        max_model_len: model.context_tokens,
        token_strs: fields.return_token_strs.unwrap_or(false).then(|| shown(&tokens)),
        tokens: tokens.into_iter().map(|token| token.0).collect(),
    })
}

fn encoded(
    model: &ServedModel,
    text: &str,
    add_special_tokens: Option<bool>,
) -> Result<Vec<TokenId>, AcceptError> {
    let tokens = match add_special_tokens.unwrap_or(true) {
        true => model.tokenizer.encode_plain(text),
        false => model.tokenizer.encode(text),
    };
    tokens.map_err(|error| error.at("prompt"))
}

fn detokenized(api: &HttpApi, json: &[u8]) -> Result<DetokenizedText, HttpError> {
    let fields: DetokenizeFields = body::parse(json)?;
    request_fields::refuse_others(&fields.others, &[])?;
    let model = api.serve.model(&api.models, fields.model.as_deref())?;
    let ids = fields.tokens.ok_or_else(|| AcceptError::missing("tokens"))?;
    if matches!(*model.tokenizer, Tokenizer::Absent) {
        return Err(EncodeError::NoTokenizer.at("tokens").into());
    }
    if let Some(id) = ids.iter().find(|id| **id >= model.vocab) {
        let reason = format!("the model has {} tokens, not {id}", model.vocab);
        return Err(AcceptError::invalid("tokens", reason).into());
    }
    let tokens: Vec<TokenId> = ids.into_iter().map(TokenId).collect();
    Ok(DetokenizedText { prompt: model.tokenizer.whole_text_of(&tokens) })
}
