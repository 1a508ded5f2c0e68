//! The endpoint `POST /v1/chat/completions`.

use std::sync::Arc;

use super::answer::{AnswerContext, AnswerFormat, AnswerShape, TokenIds, finish_reason};
use super::api::{HttpApi, ParsedRequest};
use super::body::JsonBody;
use super::constraints::ConstraintFields;
use super::error::HttpError;
use super::fields::{CommonFields, asked};
use super::logprobs::ChatLogprobs;
use super::messages;
use super::request_fields::{self, Endpoint};
use super::tools::{self, ToolCall, ToolDemand, Tools};
use crate::accept::{AskedInputs, AskedPrompt, MaxTokens, SamplingParams};
use crate::choice::{ChoiceFinish, Delta, WholeChoice};
use crate::error::AcceptError;
use crate::grammars::AskedGrammar;
use crate::text::parts::{Parts, PartsRules, ToolRules};
use crate::text::reasoning::{ReasoningRules, ReasoningTags};
use crate::text::{Chat, ChatTemplate, PromptText, ServedModel};
use minijinja::value::{Serde, Value as TemplateValue};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The fields that only chat requests have.
#[derive(Debug, Deserialize)]
pub(crate) struct ChatFields {
    messages: Option<Vec<Map<String, Value>>>,
    tools: Option<Vec<Value>>,
    tool_choice: Option<Value>,
    parallel_tool_calls: Option<bool>,
    include_reasoning: Option<bool>,
    separate_reasoning: Option<bool>,
    max_completion_tokens: Option<u32>,
    logprobs: Option<bool>,
    top_logprobs: Option<u32>,
    add_generation_prompt: Option<bool>,
    chat_template_kwargs: Option<Map<String, Value>>,
}

/// Parses a chat's JSON into a prompt and sampling parameters.
pub(crate) fn parse_request(api: &HttpApi, json: &[u8]) -> Result<ParsedRequest<ChatShape>, HttpError> {
    let body = JsonBody::of(json);
    let (common, chat): (CommonFields, ChatFields) = (body.parse()?, body.parse()?);
    let constraints: ConstraintFields = body.parse()?;
    request_fields::check(Endpoint::Chat, &body)?;
    let model = api.serve.model(&api.models, common.model.as_deref())?;
    let options = common.options();
    let mut params = chat.params(common, constraints)?;
    let RenderedChat { text, parts, demanded } = chat.rendered(api, &model)?;
    let shape = ChatShape { calls_finish: demanded.as_ref().map_or(TOOL_CALLS, |demanded| demanded.finish) };
    if let Some(DemandedCalls { grammar, .. }) = demanded
        && let Some(other) = params.grammar.replace(grammar)
    {
        let reason = format!("an answer has one grammar, and `{}` is one already", other.param);
        return Err(AcceptError::invalid("tool_choice", reason).into());
    }
    Ok(ParsedRequest {
        inputs: AskedInputs { param: "messages", prompts: vec![AskedPrompt::Text(text)] },
        params,
        options,
        parts: Some(parts),
        shape,
        model,
    })
}

/// The calls that a client demands of an answer.
#[derive(Debug)]
struct DemandedCalls {
    grammar: AskedGrammar,
    /// The finish reason of an answer with calls.
    finish: &'static str,
}

/// The finish reason of an answer that ends with calls. With a named function OpenAI has `stop`.
const TOOL_CALLS: &str = finish_reason(ChoiceFinish::ToolCalls);
const NAMED_CALL: &str = finish_reason(ChoiceFinish::Stop);

/// A chat as the model reads it.
#[derive(Debug)]
pub(crate) struct RenderedChat {
    pub(crate) text: PromptText,
    /// How the answers are divided.
    parts: PartsRules,
    demanded: Option<DemandedCalls>,
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

    /// Renders the chat with the model's template.
    pub(crate) fn rendered(
        mut self,
        api: &HttpApi,
        model: &ServedModel,
    ) -> Result<RenderedChat, AcceptError> {
        let Some(template) = &model.template else {
            let reason = "the model has no chat template; use /v1/completions";
            return Err(AcceptError::unsupported("messages", reason));
        };
        let mut tools = tools::callable(self.tools.take(), self.tool_choice.as_ref())?;
        let tool_rules = tools.as_ref().map(|tools| self.tool_rules(api, template, tools)).transpose()?;
        let demand = tools.as_mut().and_then(|tools| tools.demand.take());
        let included = self.include_reasoning.unwrap_or(true);
        let is_separate = self.separate_reasoning.unwrap_or(true);
        let text = template.render(self.chat(api, template, tools)?)?;
        let opened = |tags: ReasoningTags| tags.opened_by(&text);
        let reasoning =
            template.reasoning().map(|tags| ReasoningRules { tags, opened: opened(tags), included });
        let demanded = match (&demand, &tool_rules) {
            (Some(demand), Some(rules)) => Some(DemandedCalls::of(demand, model, rules, reasoning)?),
            _ => None,
        };
        let parts = PartsRules { reasoning: reasoning.filter(|_| is_separate), tools: tool_rules };
        Ok(RenderedChat { text: PromptText::Rendered(text), parts, demanded })
    }

    fn tool_rules(
        &self,
        api: &HttpApi,
        template: &ChatTemplate,
        tools: &Tools,
    ) -> Result<ToolRules, AcceptError> {
        let format = template.tool_format().ok_or_else(|| {
            let reason = "the model's chat template does not show how the model calls tools: the setting \
                          `model.tool_format` names it";
            AcceptError::unsupported("tools", reason)
        })?;
        let calls_max = if self.parallel_tool_calls.unwrap_or(true) { usize::MAX } else { 1 };
        Ok(ToolRules { format, tools: Arc::clone(&tools.set), calls_max, seed: api.world.draw() })
    }

    fn chat(self, api: &HttpApi, template: &ChatTemplate, tools: Option<Tools>) -> Result<Chat, AcceptError> {
        let messages = self.messages.ok_or_else(|| AcceptError::missing("messages"))?;
        let messages = messages::checked(messages, template.arguments())?;
        let variables = self.chat_template_kwargs.into_iter().flatten();
        Ok(Chat {
            messages: Serde(messages).into(),
            tools: tools.map_or(TemplateValue::from(()), |tools| Serde(tools.fields).into()),
            variables: variables.map(|(name, value)| (name, TemplateValue::from(Serde(value)))).collect(),
            add_generation_prompt: self.add_generation_prompt.unwrap_or(true),
            unix_seconds: api.world.unix_time().as_secs() as i64,
        })
    }
}

impl DemandedCalls {
    fn of(
        demand: &ToolDemand,
        model: &ServedModel,
        rules: &ToolRules,
        reasoning: Option<ReasoningRules>,
    ) -> Result<Self, AcceptError> {
        let finish = if demand.is_named { NAMED_CALL } else { TOOL_CALLS };
        Ok(Self { grammar: demand.grammar(model, rules, reasoning)?, finish })
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

    fn opening(&self, _about: &AnswerContext, choice: usize) -> Option<ChatChunk<'_>> {
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

    fn prompt_tokens<'a>(&self, context: &'a AnswerContext) -> Option<TokenIds<'a>> {
        context.if_ids(context.prompts.first()?)
    }
}
