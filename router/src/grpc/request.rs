//! Converts clients' messages to the requests that both APIs have.

use std::borrow::Cow;

use grammar::sources;
use proto::v1;
use proto::v1::answer_grammar::Grammar;
use proto::v1::tool_choice::{Choice, Mode};
use serde_json::{Map, Value, json};
use types::TokenId;

use crate::accept::{MaxTokens, SamplingParams, cache_salt};
use crate::chat::ChatRequest;
use crate::error::AcceptError;
use crate::grammars::AskedGrammar;

/// Returns the sampling parameters of a call. An absent field has the model's default. See
/// `docs/decisions/0028-a-clients-message-says-what-is-absent.md`.
pub(super) fn params(request: &mut v1::GenerateRequest) -> Result<SamplingParams, AcceptError> {
    let sampling = request.sampling.take().unwrap_or_default();
    let stop = request.stop.take().unwrap_or_default();
    let asked = |tokens| MaxTokens::Asked { tokens, param: "stop.max_tokens" };
    let mut logit_bias: Vec<_> =
        sampling.logit_bias.into_iter().map(|(id, bias)| (TokenId(id), bias)).collect();
    logit_bias.sort_by_key(|(token, _)| *token);
    Ok(SamplingParams {
        n: request.n.unwrap_or(1),
        max_tokens: stop.max_tokens.map_or(MaxTokens::RestOfContext, asked),
        min_tokens: stop.min_tokens,
        temperature: sampling.temperature,
        top_p: sampling.top_p,
        top_k: sampling.top_k.map(i64::from),
        min_p: sampling.min_p,
        repetition_penalty: sampling.repetition_penalty,
        presence_penalty: sampling.presence_penalty,
        frequency_penalty: sampling.frequency_penalty,
        logit_bias,
        seed: sampling.seed,
        logprobs: sampling.logprobs,
        prompt_logprobs: sampling.prompt_logprobs,
        stop: std::mem::take(&mut request.stop_strings),
        stop_tokens: stop.stop_tokens.into_iter().map(TokenId).collect(),
        ignore_eos: stop.ignore_eos,
        cache_salt: cache_salt(given(std::mem::take(&mut request.cache_salt)))?,
        grammar: sampling.grammar.map(grammar).transpose()?,
    })
}

fn grammar(asked: v1::AnswerGrammar) -> Result<AskedGrammar, AcceptError> {
    const PARAM: &str = "sampling.grammar";
    match asked.grammar.ok_or_else(|| AcceptError::missing("sampling.grammar.grammar"))? {
        Grammar::JsonSchema(schema) => Ok(AskedGrammar::new(PARAM, sources::json_schema(&schema))),
        Grammar::Regex(pattern) => Ok(AskedGrammar::new(PARAM, sources::regex(&pattern))),
        Grammar::Lark(text) => AskedGrammar::lark(PARAM, &text),
        Grammar::Choice(choice) => AskedGrammar::choice(PARAM, &choice.texts),
        Grammar::JsonObject(_) => Ok(AskedGrammar::new(PARAM, sources::json_object())),
    }
}

/// Returns a text that is not empty.
fn given(text: String) -> Option<String> {
    (!text.is_empty()).then_some(text)
}

// === chats ===

/// Converts a chat to the form that templates read.
pub(super) fn chat(chat: v1::Chat) -> Result<ChatRequest, AcceptError> {
    let tools = chat.tools.into_iter().enumerate().map(|(at, asked)| tool(at, asked));
    Ok(ChatRequest {
        messages: Some(chat.messages.into_iter().map(message).collect()),
        tools: Some(tools.collect::<Result<_, _>>()?),
        tool_choice: chat.tool_choice.map(tool_choice).transpose()?,
        parallel_tool_calls: chat.parallel_tool_calls,
        include_reasoning: chat.include_reasoning,
        separate_reasoning: chat.separate_reasoning,
        add_generation_prompt: chat.add_generation_prompt,
        continue_final_message: chat.continue_final_message,
        chat_template_kwargs: given(chat.chat_template_kwargs).map(template_kwargs).transpose()?,
    })
}

/// Returns the number of bytes in a chat's texts, on which the time of parsing and rendering depends.
pub(super) fn n_bytes(chat: &v1::Chat) -> usize {
    let call = |call: &v1::ToolCall| call.name.len() + call.arguments.len();
    let message = |message: &v1::ChatMessage| {
        let content = message.content.as_ref().map_or(0, String::len) + message.reasoning_content.len();
        content + message.tool_calls.iter().map(call).sum::<usize>()
    };
    let tool = |tool: &v1::Tool| tool.name.len() + tool.description.len() + tool.parameters.len();
    let messages: usize = chat.messages.iter().map(message).sum();
    messages + chat.tools.iter().map(tool).sum::<usize>() + chat.chat_template_kwargs.len()
}

fn message(asked: v1::ChatMessage) -> Map<String, Value> {
    let v1::ChatMessage { role, content, tool_calls, tool_call_id, name, reasoning_content } = asked;
    let calls: Vec<Value> = tool_calls.into_iter().map(tool_call).collect();
    let fields = [
        ("role", given(role).map(Value::from)),
        ("content", content.map(Value::from)),
        ("tool_calls", (!calls.is_empty()).then(|| calls.into())),
        ("tool_call_id", given(tool_call_id).map(Value::from)),
        ("name", given(name).map(Value::from)),
        ("reasoning_content", given(reasoning_content).map(Value::from)),
    ];
    fields.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect()
}

fn tool_call(call: v1::ToolCall) -> Value {
    let v1::ToolCall { id, name, arguments } = call;
    json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
}

fn tool(at: usize, asked: v1::Tool) -> Result<Value, AcceptError> {
    let v1::Tool { name, description, parameters } = asked;
    let schema = |text: String| object(&text, || format!("chat.tools[{at}].parameters"));
    let fields = [
        ("name", given(name).map(Value::from)),
        ("description", given(description).map(Value::from)),
        ("parameters", given(parameters).map(schema).transpose()?.map(Value::from)),
    ];
    let function: Map<String, Value> =
        fields.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect();
    Ok(json!({"type": "function", "function": function}))
}

fn tool_choice(asked: v1::ToolChoice) -> Result<Value, AcceptError> {
    match asked.choice {
        Some(Choice::Function(name)) => Ok(json!({"type": "function", "function": {"name": name}})),
        Some(Choice::Mode(mode)) => match Mode::try_from(mode) {
            Ok(Mode::Auto) => Ok("auto".into()),
            Ok(Mode::None) => Ok("none".into()),
            Ok(Mode::Required) => Ok("required".into()),
            Ok(Mode::Unspecified) | Err(_) => {
                Err(AcceptError::invalid("chat.tool_choice", format!("unknown choice `{mode}`")))
            }
        },
        None => Err(AcceptError::missing("chat.tool_choice.choice")),
    }
}

fn template_kwargs(text: String) -> Result<Map<String, Value>, AcceptError> {
    object(&text, || "chat.chat_template_kwargs".to_owned())
}

fn object(text: &str, param: impl Fn() -> String) -> Result<Map<String, Value>, AcceptError> {
    serde_json::from_str(text)
        .map_err(|error| AcceptError::invalid(param(), format!("expected a JSON object: {error}")))
}

// === the names of fields ===

/// The fields that have another name over HTTP, which shared checks use.
const NAMES: &[(&str, &str)] = &[
    ("messages", "chat.messages"),
    ("tools", "chat.tools"),
    ("tool_choice", "chat.tool_choice"),
    ("tool_choice.function.name", "chat.tool_choice.function"),
    ("temperature", "sampling.temperature"),
    ("top_p", "sampling.top_p"),
    ("top_k", "sampling.top_k"),
    ("min_p", "sampling.min_p"),
    ("repetition_penalty", "sampling.repetition_penalty"),
    ("presence_penalty", "sampling.presence_penalty"),
    ("frequency_penalty", "sampling.frequency_penalty"),
    ("logit_bias", "sampling.logit_bias"),
    ("top_logprobs", "sampling.logprobs"),
    ("prompt_logprobs", "sampling.prompt_logprobs"),
    ("min_tokens", "stop.min_tokens"),
    ("ignore_eos", "stop.ignore_eos"),
    ("stop_token_ids", "stop.stop_tokens"),
    ("stop", "stop_strings"),
    ("x-baton-timeout-ms", "timeout_ms"),
    ("x-baton-tenant", "tenant"),
    ("x-baton-priority", "priority"),
];

/// Returns the name of a field of a call that shared checks name as HTTP does.
pub(super) fn name_of(param: &str) -> Cow<'static, str> {
    // An element of a list: `messages[2].content`.
    let (list, element) = param.split_at(param.find('[').unwrap_or(param.len()));
    match NAMES.iter().find(|(over_http, _)| *over_http == list) {
        Some((_, name)) if element.is_empty() => Cow::Borrowed(name),
        Some((_, name)) => format!("{name}{}", element.replacen("].function.", "].", 1)).into(),
        None => param.to_owned().into(),
    }
}
