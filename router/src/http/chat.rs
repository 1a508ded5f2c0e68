//! The endpoint `POST /v1/chat/completions`.

use serde::{Deserialize, Serialize};

use super::answer::{AnswerContext, AnswerFormat, AnswerShape, TokenIds, finish_reason};
use super::api::{HttpApi, ParsedRequest};
use super::body::JsonBody;
use super::constraints::ConstraintFields;
use super::error::HttpError;
use super::fields::{CommonFields, asked};
use super::logprobs::ChatLogprobs;
use super::request_fields::{self, Endpoint};
use super::tools::ToolCall;
use crate::accept::{MaxTokens, SamplingParams};
use crate::answers::AnsweredPrompt;
use crate::chat::ChatRequest;
use crate::choice::{ChoiceFinish, Delta, WholeChoice};
use crate::error::AcceptError;
use crate::text::Parts;

/// The fields that only chat requests have, beside those of [`ChatRequest`].
#[derive(Debug, Deserialize)]
struct ChatFields {
    max_completion_tokens: Option<u32>,
    logprobs: Option<bool>,
    top_logprobs: Option<u32>,
}

/// Parses a chat's JSON into a prompt and sampling parameters.
pub(crate) fn parse_request(api: &HttpApi, json: &[u8]) -> Result<ParsedRequest<ChatShape>, HttpError> {
    let body = JsonBody::of(json);
    let (common, fields, chat): (CommonFields, ChatFields, ChatRequest) =
        (body.parse()?, body.parse()?, body.parse()?);
    let constraints: ConstraintFields = body.parse()?;
    request_fields::check(Endpoint::Chat, &body)?;
    let model = api.serve.model(&api.models, common.model.as_deref())?;
    let options = common.options();
    let params = fields.params(common, constraints)?;
    let chat = chat.rendered(&api.world, &model)?;
    let calls_finish = if chat.names_call() { NAMED_CALL } else { TOOL_CALLS };
    Ok(ParsedRequest { request: chat.asked(model, params)?, options, shape: ChatShape { calls_finish } })
}

/// The finish reason of an answer that ends with calls. With a named function OpenAI sends `stop`.
const TOOL_CALLS: &str = finish_reason(ChoiceFinish::ToolCalls);
const NAMED_CALL: &str = finish_reason(ChoiceFinish::Stop);

impl ChatFields {
    fn params(
        &self,
        common: CommonFields,
        constraints: ConstraintFields,
    ) -> Result<SamplingParams, AcceptError> {
        let max_tokens = asked("max_completion_tokens", self.max_completion_tokens);
        let params = common.params(constraints, MaxTokens::RestOfContext)?;
        let logprobs = match (self.logprobs.unwrap_or(false), self.top_logprobs) {
            (true, top) => Some(top.unwrap_or(0)),
            (false, None | Some(0)) => None,
            (false, Some(_)) => {
                return Err(AcceptError::invalid("top_logprobs", "it needs logprobs to be true"));
            }
        };
        Ok(SamplingParams { max_tokens: max_tokens.unwrap_or(params.max_tokens), logprobs, ..params })
    }
}

// === the answer ===

/// The format of a chat's answers.
#[derive(Debug)]
pub(crate) struct ChatShape {
    /// The finish reason of an answer that ends with calls.
    calls_finish: &'static str,
}

impl ChatShape {
    fn finish_reason(&self, finish: ChoiceFinish) -> &'static str {
        match finish {
            ChoiceFinish::ToolCalls => self.calls_finish,
            finish => finish_reason(finish),
        }
    }
}

#[derive(Debug, Serialize)]
pub(crate) struct ChatChunk<'a> {
    index: usize,
    delta: ChatDelta<'a>,
    logprobs: Option<ChatLogprobs>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<TokenIds<'a>>,
}

#[derive(Debug, Default, Serialize)]
struct ChatDelta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ToolCall<'a>>,
}

#[derive(Debug, Serialize)]
pub(crate) struct ChatChoice<'a> {
    index: usize,
    message: ChatMessage<'a>,
    logprobs: Option<ChatLogprobs>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
}

#[derive(Debug, Serialize)]
struct ChatMessage<'a> {
    role: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<&'a str>,
    /// The text; `null` if the answer has other parts only.
    content: Option<&'a str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ToolCall<'a>>,
    refusal: Option<()>,
}

impl<'a> ChatMessage<'a> {
    fn of(parts: &'a Parts) -> Self {
        let has_others = !(parts.reasoning.is_empty() && parts.calls.is_empty());
        Self {
            role: ASSISTANT,
            reasoning_content: unless_empty(&parts.reasoning),
            content: Some(parts.text.as_str()).filter(|text| !(text.is_empty() && has_others)),
            tool_calls: parts.calls.iter().map(ToolCall::whole).collect(),
            refusal: None,
        }
    }
}

fn unless_empty(text: &str) -> Option<&str> {
    (!text.is_empty()).then_some(text)
}

const ASSISTANT: &str = "assistant";

impl AnswerShape for ChatShape {
    const ID: &'static str = "chatcmpl-";
}

impl AnswerFormat for ChatShape {
    const WHOLE: &'static str = "chat.completion";
    const CHUNK: &'static str = "chat.completion.chunk";
    type Chunk<'a> = ChatChunk<'a>;
    type Choice<'a> = ChatChoice<'a>;

    fn opening<'a>(&'a self, _context: &'a AnswerContext, choice: usize) -> Option<ChatChunk<'a>> {
        let delta = ChatDelta { role: Some(ASSISTANT), content: Some(""), ..ChatDelta::default() };
        Some(ChatChunk { index: choice, delta, logprobs: None, finish_reason: None, token_ids: None })
    }

    fn chunk<'a>(&'a self, context: &'a AnswerContext, delta: &'a Delta) -> ChatChunk<'a> {
        ChatChunk {
            index: delta.choice,
            delta: ChatDelta {
                role: None,
                reasoning_content: unless_empty(&delta.parts.reasoning),
                content: unless_empty(&delta.parts.text),
                tool_calls: delta.parts.calls.iter().map(ToolCall::part).collect(),
            },
            logprobs: ChatLogprobs::of(&context.model.tokenizer, [&delta.step]),
            finish_reason: delta.finish.map(|finish| self.finish_reason(finish)),
            token_ids: context.if_ids(std::slice::from_ref(&delta.step.token)),
        }
    }

    fn whole<'a>(
        &'a self,
        context: &'a AnswerContext,
        choice: usize,
        whole: &'a WholeChoice,
    ) -> ChatChoice<'a> {
        ChatChoice {
            index: choice,
            message: ChatMessage::of(&whole.parts),
            logprobs: ChatLogprobs::of(&context.model.tokenizer, whole.steps.iter().map(|(_, step)| step)),
            finish_reason: whole.finish.map(|finish| self.finish_reason(finish)),
            token_ids: context.options.token_ids.then(|| whole.token_ids()),
        }
    }

    fn only_prompt<'a>(&self, context: &'a AnswerContext) -> Option<&'a AnsweredPrompt> {
        context.prompt(0)
    }
}
