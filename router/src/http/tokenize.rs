//! The endpoints `POST /tokenize` and `POST /detokenize`, with vLLM's fields, and the count of a chat's tokens for other
//! endpoints.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use types::TokenId;

use super::answer::AnswerShape;
use super::api::{HttpApi, RequestHead, RequestParser};
use super::body;
use super::error::HttpError;
use super::request_fields;
use crate::accept::{AskedInputs, AskedPrompt, SamplingParams};
use crate::answers::AskedRequest;
use crate::chat::ChatRequest;
use crate::error::{AcceptError, EncodeError};
use crate::tenants::Client;
use crate::text::{PromptText, ServedModel, Tokenizer};

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

/// The fields of `others` that a chat's prompt depends on. [`ChatRequest`] reads them.
const CHAT_FIELDS: &[&str] =
    &["add_generation_prompt", "chat_template_kwargs", "continue_final_message", "tools"];

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
    client: Client,
    body: Body,
) -> Result<Json<TokenizedText>, HttpError> {
    let caller = api.acceptor.caller(api.acceptor.request_id(None), client, None)?;
    let body = body::read(body, api.body).await?;
    let AskedText { model, inputs, is_shown } = api.parsed(body, caller.deadline, asked_text).await?;
    let inputs = api.acceptor.tokenized(&model, inputs, &SamplingParams::default(), &caller).await?;
    let tokens = inputs.tokens.concat();
    let shown = || tokens.iter().map(|token| model.tokenizer.shown(*token).into()).collect();
    Ok(Json(TokenizedText {
        count: tokens.len(),
        max_model_len: model.context_tokens,
        token_strs: is_shown.then(shown),
        tokens: tokens.iter().map(|token| token.0).collect(),
    }))
}

pub(crate) async fn detokenize(
    State(api): State<HttpApi>,
    client: Client,
    body: Body,
) -> Result<Json<DetokenizedText>, HttpError> {
    let caller = api.acceptor.caller(api.acceptor.request_id(None), client, None)?;
    let body = body::read(body, api.body).await?;
    api.parsed(body, caller.deadline, detokenized).await.map(Json)
}

/// Returns the number of tokens of a request's prompt, also if it fits into no context.
pub(super) async fn count<S: AnswerShape + Send + 'static>(
    api: &HttpApi,
    head: RequestHead,
    body: Body,
    parse_request: RequestParser<S>,
) -> Result<usize, HttpError> {
    let (ask, caller) = api.asked(head, body, parse_request).await?;
    let AskedRequest { model, inputs, params, .. } = ask.request;
    let inputs = api.acceptor.tokenized(&model, inputs, &params, &caller).await;
    let inputs = inputs.map_err(|error| HttpError::from(error).renamed(S::NAMES))?;
    Ok(inputs.tokens.iter().map(Vec::len).sum())
}

/// A text whose tokens a client asks for.
struct AskedText {
    model: Arc<ServedModel>,
    inputs: AskedInputs,
    /// Whether the answer has the tokens' texts.
    is_shown: bool,
}

fn asked_text(api: &HttpApi, json: &[u8]) -> Result<AskedText, HttpError> {
    let fields: TokenizeFields = body::parse(json)?;
    let is_chat = fields.messages.is_some();
    let known = if is_chat { CHAT_FIELDS } else { &[] };
    request_fields::refuse_others(&fields.others, known)?;
    let model = api.serve.model(&api.models, fields.model.as_deref())?;
    let (param, text) = match (fields.prompt, is_chat) {
        (None, false) => return Err(AcceptError::missing("prompt").into()),
        (Some(_), true) => return Err(AcceptError::invalid("prompt", "not beside messages").into()),
        (Some(text), false) if fields.add_special_tokens.unwrap_or(true) => {
            ("prompt", PromptText::Plain(text))
        }
        (Some(text), false) => ("prompt", PromptText::Rendered(text)),
        (None, true) => {
            if fields.add_special_tokens == Some(true) {
                let reason = "the chat template writes them";
                return Err(AcceptError::unsupported("add_special_tokens", reason).into());
            }
            ("messages", body::parse::<ChatRequest>(json)?.rendered(&api.world, &model)?.text)
        }
    };
    let inputs = AskedInputs { param, prompts: vec![AskedPrompt::Text(text)] };
    Ok(AskedText { model, inputs, is_shown: fields.return_token_strs.unwrap_or(false) })
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
