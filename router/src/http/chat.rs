//! The endpoint `POST /v1/chat/completions`.

use minijinja::value::{Serde, Value as TemplateValue};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use types::TokenId;

use super::answer::{AnswerContext, AnswerFormat, TokenIds, finish_reason};
use super::api::{HttpApi, ParsedRequest};
use super::constraints::ConstraintFields;
use super::error::HttpError;
use super::fields::{CommonFields, asked};
use super::logprobs::ChatLogprobs;
use super::request_fields::{self, Endpoint};
use super::{body, messages};
use crate::accept::{Inputs, MaxTokens, SamplingParams};
use crate::choice::{Delta, WholeChoice};
use crate::error::AcceptError;
use crate::text::{Chat, ServedModel};

/// The fields that only chat requests have.
#[derive(Debug, Deserialize)]
struct ChatFields {
    messages: Option<Vec<Map<String, Value>>>,
    tools: Option<Vec<Value>>,
    tool_choice: Option<Value>,
    max_completion_tokens: Option<u32>,
    logprobs: Option<bool>,
    top_logprobs: Option<u32>,
    add_generation_prompt: Option<bool>,
    chat_template_kwargs: Option<Map<String, Value>>,
}

/// Parses a chat's JSON into tokens and sampling parameters.
pub(crate) fn parse_request(api: &HttpApi, json: &[u8]) -> Result<ParsedRequest<ChatShape>, HttpError> {
    let (common, chat): (CommonFields, ChatFields) = (body::parse(json)?, body::parse(json)?);
    let constraints: ConstraintFields = body::parse(json)?;
    request_fields::check(Endpoint::Chat, json)?;
    let model = api.serve.model(&api.models, common.model.as_deref())?;
    let options = common.options();
    let params = chat.params(common, constraints)?;
    let tokens = chat.tokens(&model, api.world.unix_time().as_secs() as i64)?;
    Ok(ParsedRequest {
        model,
        inputs: Inputs { param: "messages", tokens: vec![tokens] },
        params,
        options,
        shape: ChatShape,
    })
}

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

    fn tokens(self, model: &ServedModel, unix_seconds: i64) -> Result<Vec<TokenId>, AcceptError> {
        let Some(template) = &model.template else {
            return Err(AcceptError::unsupported(
                "messages",
                "the model has no chat template; use /v1/completions",
            ));
        };
        let text = template.render(self.chat(unix_seconds)?)?;
        model.tokenizer.encode(&text).map_err(|error| error.at("messages"))
    }

    fn chat(self, unix_seconds: i64) -> Result<Chat, AcceptError> {
        refuse_tools(self.tools, self.tool_choice.as_ref())?;
        let messages = messages::checked(self.messages.ok_or_else(|| AcceptError::missing("messages"))?)?;
        let variables = self.chat_template_kwargs.into_iter().flatten();
        Ok(Chat {
            messages: Serde(messages).into(),
            tools: TemplateValue::from(()),
            variables: variables.map(|(name, value)| (name, TemplateValue::from(Serde(value)))).collect(),
            add_generation_prompt: self.add_generation_prompt.unwrap_or(true),
            unix_seconds,
        })
    }
}

/// Refuses tools that the model may call, because answers cannot contain calls yet. Tools that the model may
/// not call are left out of the prompt.
fn refuse_tools(tools: Option<Vec<Value>>, choice: Option<&Value>) -> Result<(), AcceptError> {
    let has_tools = tools.is_some_and(|tools| !tools.is_empty());
    match choice.map(|choice| choice.as_str()) {
        Some(Some("none")) => Ok(()),
        None | Some(Some("auto")) if !has_tools => Ok(()),
        None | Some(Some("auto")) => Err(AcceptError::unsupported("tools", "tool calls are not built yet")),
        Some(_) => Err(AcceptError::unsupported("tool_choice", "only `none`: tool calls are not built yet")),
    }
}

// === the answer ===

/// The format of a chat's answers.
#[derive(Debug)]
pub(crate) struct ChatShape;

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
    content: Option<&'a str>,
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
    content: &'a str,
    refusal: Option<()>,
}

const ASSISTANT: &str = "assistant";

impl AnswerFormat for ChatShape {
    const ID: &'static str = "chatcmpl-";
    const WHOLE: &'static str = "chat.completion";
    const CHUNK: &'static str = "chat.completion.chunk";
    type Chunk<'a> = ChatChunk<'a>;
    type Choice<'a> = ChatChoice<'a>;

    fn opening(&self, _about: &AnswerContext, choice: usize) -> Option<ChatChunk<'_>> {
        let delta = ChatDelta { role: Some(ASSISTANT), content: Some("") };
        Some(ChatChunk { index: choice, delta, logprobs: None, finish_reason: None, token_ids: None })
    }

    fn chunk<'a>(&'a self, context: &'a AnswerContext, delta: &'a Delta) -> ChatChunk<'a> {
        let content = (!delta.text.is_empty()).then_some(delta.text.as_str());
        ChatChunk {
            index: delta.choice,
            delta: ChatDelta { role: None, content },
            logprobs: ChatLogprobs::of(&context.model.tokenizer, [&delta.step]),
            finish_reason: delta.finish.map(finish_reason),
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
            message: ChatMessage { role: ASSISTANT, content: &whole.text, refusal: None },
            logprobs: ChatLogprobs::of(&context.model.tokenizer, whole.steps.iter().map(|(_, step)| step)),
            finish_reason: whole.finish.map(finish_reason),
            token_ids: context.options.token_ids.then(|| whole.token_ids()),
        }
    }

    fn prompt_tokens<'a>(&self, context: &'a AnswerContext) -> Option<TokenIds<'a>> {
        context.if_ids(context.prompts.first()?)
    }
}
