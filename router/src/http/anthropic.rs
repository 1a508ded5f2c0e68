//! The endpoint `POST /v1/messages`, Anthropic's: its requests become chats, and its answers are lists of blocks. And
//! `POST /v1/messages/count_tokens`, which counts the tokens of such a chat.

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use serde_json::{Map, Value, json};
use types::Usage;

use super::answer::{AnswerContext, AnswerShape};
use super::api::{HttpApi, ParsedRequest, RequestHead};
use super::blocks::{Block, BlockAnswer, BlockEvent, BlockFormat, BlockKind, NamedEvent};
use super::conversion::{blocks, kind, list, move_tools, moved, only, parse_chat, present, text_of};
use super::error::{FieldNames, HttpError, THREAD};
use super::{body, request_fields, tokenize};
use crate::choice::ChoiceFinish;
use crate::error::AcceptError;

/// Fields that a chat has too, with their names there.
const SAME: &[(&str, &str)] = &[
    ("model", "model"),
    ("max_tokens", "max_tokens"),
    ("stop_sequences", "stop"),
    ("stream", "stream"),
    ("temperature", "temperature"),
    ("top_k", "top_k"),
    ("top_p", "top_p"),
    ("chat_template_kwargs", "chat_template_kwargs"),
];
/// Fields that change nothing in the answer.
const HARMLESS: &[&str] = &["metadata", "service_tier", "speed", "cache_control"];

/// Parses a request's JSON into a prompt and sampling parameters.
pub(crate) fn parse_request(api: &HttpApi, json: &[u8]) -> Result<ParsedRequest<MessagesFormat>, HttpError> {
    let fields: Map<String, Value> = body::parse(json)?;
    if fields.get("max_tokens").is_none_or(Value::is_null) {
        return Err(AcceptError::missing("max_tokens").into());
    }
    parse_chat_of(api, fields)
}

fn parse_chat_of(
    api: &HttpApi,
    fields: Map<String, Value>,
) -> Result<ParsedRequest<MessagesFormat>, HttpError> {
    Ok(parse_chat(api, chat_of(fields)?, MessagesFormat::NAMES)?.with_shape(MessagesFormat))
}

/// Answers with the number of tokens of a request's prompt. A prompt that fits into no context is counted too.
pub(crate) async fn count_tokens(
    State(api): State<HttpApi>,
    head: RequestHead,
    body: Body,
) -> Result<Json<Value>, HttpError> {
    let parse_request = |api: &HttpApi, json: &[u8]| parse_chat_of(api, body::parse(json)?);
    Ok(Json(json!({"input_tokens": tokenize::count(&api, head, body, parse_request).await?})))
}

/// Converts a request to a chat request.
fn chat_of(mut fields: Map<String, Value>) -> Result<Map<String, Value>, AcceptError> {
    let mut chat = moved(&mut fields, SAME);
    let mut messages = Vec::new();
    if let Some(system) = present(fields.remove("system")) {
        messages.push(json!({"role": "system", "content": texts("system", system)?}));
    }
    let given = fields.remove("messages").ok_or_else(|| AcceptError::missing("messages"))?;
    for (at, message) in list("messages", given)?.into_iter().enumerate() {
        add_message(&mut messages, &format!("messages[{at}]"), message)?;
    }
    // The answer continues an assistant's text at the end.
    let is_begun = messages.last().is_some_and(|last| {
        last["role"] == "assistant" && last["content"] != "" && last["tool_calls"].is_null()
    });
    chat.insert("continue_final_message".to_owned(), is_begun.into());
    chat.insert("messages".to_owned(), messages.into());
    move_tools(&mut fields, &mut chat, tool_of)?;
    if let Some(choice) = present(fields.remove("tool_choice")) {
        if choice["disable_parallel_tool_use"] == true {
            chat.insert("parallel_tool_calls".to_owned(), false.into());
        }
        chat.insert("tool_choice".to_owned(), tool_choice(&choice)?);
    }
    if present(fields.remove(THREAD)).is_some() {
        return Err(AcceptError::unsupported(THREAD, "nothing is stored: send all messages"));
    }
    add_output_config(&mut chat, present(fields.remove("output_config")))?;
    let included = includes_thinking(present(fields.remove("thinking")))?;
    chat.insert("include_reasoning".to_owned(), included.into());
    request_fields::refuse_others(&fields, HARMLESS)?;
    Ok(chat)
}

/// Converts the field `output_config` to `response_format`. The effort `high` is that of a request without the field.
fn add_output_config(chat: &mut Map<String, Value>, config: Option<Value>) -> Result<(), AcceptError> {
    let mut config = match config {
        None => return Ok(()),
        Some(Value::Object(config)) => config,
        Some(_) => return Err(AcceptError::invalid("output_config", "expected an object")),
    };
    if let Some(format) = present(config.remove("format")) {
        match kind(&format) {
            "json_schema" => {
                let schema = json!({"name": "output", "schema": format["schema"]});
                let format = json!({"type": "json_schema", "json_schema": schema});
                chat.insert("response_format".to_owned(), format);
            }
            other => return Err(only("output_config.format.type".to_owned(), "json_schema", other)),
        }
    }
    if present(config.remove("effort")).is_some_and(|effort| effort != "high") {
        let reason = "use chat_template_kwargs, as the model's template reads it";
        return Err(AcceptError::unsupported("output_config.effort", reason));
    }
    request_fields::refuse_others(&config, &[])
}

/// Returns content that is a text or a list of text blocks, in a chat's form.
fn texts(path: &str, content: Value) -> Result<Value, AcceptError> {
    if content.is_string() {
        return Ok(content);
    }
    let given = blocks(path, content)?.into_iter().enumerate();
    let parts = given.map(|(at, block)| match kind(&block) {
        "text" => text_part(&format!("{path}[{at}]"), &block),
        other => Err(only(format!("{path}[{at}].type"), "text", other)),
    });
    Ok(parts.collect::<Result<Vec<_>, _>>()?.into())
}

fn text_part(path: &str, block: &Value) -> Result<Value, AcceptError> {
    Ok(json!({"type": "text", "text": text_of(path, block, "text")?}))
}

/// Adds a message, which is several messages of a chat if it has results of tools.
fn add_message(messages: &mut Vec<Value>, path: &str, mut message: Value) -> Result<(), AcceptError> {
    let content = message.get_mut("content").map(Value::take);
    let content = content.ok_or_else(|| AcceptError::missing(format!("{path}.content")))?;
    let path_of_content = format!("{path}.content");
    match message.get("role").and_then(Value::as_str) {
        Some("user") if content.is_string() => messages.push(json!({"role": "user", "content": content})),
        Some("user") => add_user(messages, &path_of_content, content)?,
        Some("assistant") => messages.push(assistant(&path_of_content, content)?),
        Some(other) => {
            return Err(AcceptError::invalid(format!("{path}.role"), format!("unknown role `{other}`")));
        }
        None => return Err(AcceptError::missing(format!("{path}.role"))),
    }
    Ok(())
}

fn add_user(messages: &mut Vec<Value>, path: &str, content: Value) -> Result<(), AcceptError> {
    let given = blocks(path, content)?;
    if given.is_empty() {
        return Err(AcceptError::invalid(path.to_owned(), "a user message needs at least one block"));
    }
    let mut parts = Vec::new();
    for (at, mut block) in given.into_iter().enumerate() {
        match kind(&block) {
            "text" => parts.push(text_part(&format!("{path}[{at}]"), &block)?),
            "tool_result" => {
                let result = present(block.get_mut("content").map(Value::take)).unwrap_or_else(|| "".into());
                messages.push(json!({
                    "role": "tool",
                    "tool_call_id": block["tool_use_id"],
                    "content": texts(&format!("{path}[{at}].content"), result)?,
                }));
            }
            other => return Err(only(format!("{path}[{at}].type"), "text and tool_result", other)),
        }
    }
    if !parts.is_empty() {
        messages.push(json!({"role": "user", "content": parts}));
    }
    Ok(())
}

fn assistant(path: &str, content: Value) -> Result<Value, AcceptError> {
    if content.is_string() {
        return Ok(json!({"role": "assistant", "content": content}));
    }
    let (mut text, mut reasoning, mut calls) = (String::new(), String::new(), Vec::new());
    for (at, block) in blocks(path, content)?.into_iter().enumerate() {
        match kind(&block) {
            "text" => text.push_str(&text_of(&format!("{path}[{at}]"), &block, "text")?),
            "thinking" => reasoning.push_str(block["thinking"].as_str().unwrap_or_default()),
            // It has nothing that a model can read.
            "redacted_thinking" => {}
            "tool_use" => {
                let name = text_of(&format!("{path}[{at}]"), &block, "name")?;
                let function = json!({"name": name, "arguments": block["input"].to_string()});
                calls.push(json!({"id": block["id"], "type": "function", "function": function}));
            }
            other => {
                return Err(only(format!("{path}[{at}].type"), "text, thinking and tool_use", other));
            }
        }
    }
    let mut message = json!({"role": "assistant", "content": text});
    if !reasoning.is_empty() {
        message["reasoning_content"] = reasoning.into();
    }
    if !calls.is_empty() {
        message["tool_calls"] = calls.into();
    }
    Ok(message)
}

fn tool_of(path: &str, tool: Value) -> Result<Value, AcceptError> {
    match kind(&tool) {
        "" | "custom" => {}
        other => return Err(only(format!("{path}.type"), "custom tools", other)),
    }
    let name = tool.get("name").ok_or_else(|| AcceptError::missing(format!("{path}.name")))?;
    let mut function = json!({"name": name});
    for (name, name_in_chat) in [("description", "description"), ("input_schema", "parameters")] {
        if let Some(value) = tool.get(name) {
            function[name_in_chat] = value.clone();
        }
    }
    Ok(json!({"type": "function", "function": function}))
}

fn tool_choice(choice: &Value) -> Result<Value, AcceptError> {
    match kind(choice) {
        "auto" => Ok("auto".into()),
        "none" => Ok("none".into()),
        "any" => Ok("required".into()),
        "tool" => Ok(json!({"type": "function", "function": {"name": choice["name"]}})),
        _ if !choice.is_object() => Err(AcceptError::invalid("tool_choice", "expected an object")),
        other => Err(AcceptError::invalid("tool_choice.type", format!("unknown choice `{other}`"))),
    }
}

/// Returns whether the answer has thinking blocks: only if the client asks for them.
fn includes_thinking(thinking: Option<Value>) -> Result<bool, AcceptError> {
    let Some(thinking) = thinking else { return Ok(false) };
    match kind(&thinking) {
        "disabled" => Ok(false),
        "adaptive" => Ok(true),
        "enabled" => {
            let reason = "reasoning has no limit of its own; use the type `adaptive`";
            Err(AcceptError::unsupported("thinking.budget_tokens", reason))
        }
        other => Err(AcceptError::invalid("thinking.type", format!("unknown type `{other}`"))),
    }
}

// === the answer ===

/// The format of a message's answers.
#[derive(Debug)]
pub(crate) struct MessagesFormat;

impl AnswerShape for MessagesFormat {
    const ID: &'static str = "msg_";
    const NAMES: FieldNames = &[
        ("continue_final_message", "messages"),
        ("stop", "stop_sequences"),
        ("parallel_tool_calls", "tool_choice.disable_parallel_tool_use"),
        ("response_format.json_schema", "output_config.format"),
        ("response_format", "output_config.format"),
        ("tool_choice.function", "tool_choice"),
        ("].function.parameters", "].input_schema"),
        ("].function.", "]."),
    ];
}

/// Returns a block's JSON. The text is left out where a stream sends it in pieces.
fn block_of(block: &Block, text: &str) -> Value {
    match &block.kind {
        BlockKind::Text => json!({"type": "text", "text": text}),
        BlockKind::Reasoning => json!({"type": "thinking", "thinking": text, "signature": ""}),
        BlockKind::Call(start) => {
            // An answer that was cut off has arguments that are no JSON.
            let input: Value = serde_json::from_str(text).unwrap_or_else(|_| json!({}));
            json!({"type": "tool_use", "id": start.id, "name": start.name, "input": input})
        }
    }
}

fn stop_reason(answer: &BlockAnswer) -> Option<&'static str> {
    Some(match answer.finish? {
        ChoiceFinish::ToolCalls => "tool_use",
        ChoiceFinish::Length => "max_tokens",
        ChoiceFinish::Stop if answer.stop_string.is_some() => "stop_sequence",
        ChoiceFinish::Stop => "end_turn",
    })
}

fn usage_of(usage: Usage, output_tokens: u32) -> Value {
    json!({
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": output_tokens,
    })
}

impl BlockFormat for MessagesFormat {
    fn start(&mut self, context: &AnswerContext, usage: Usage) -> Vec<NamedEvent> {
        let message = self.whole(context, &BlockAnswer::of(usage));
        vec![("message_start", json!({"type": "message_start", "message": message}))]
    }

    fn block(&mut self, event: BlockEvent<'_>) -> Vec<NamedEvent> {
        let (name, block) = match event {
            BlockEvent::Begin(block) => ("content_block_start", block),
            BlockEvent::Piece(block, _) => ("content_block_delta", block),
            BlockEvent::End(block) => ("content_block_stop", block),
        };
        let mut data = json!({"type": name, "index": block.index});
        match event {
            BlockEvent::Begin(block) => data["content_block"] = block_of(block, ""),
            BlockEvent::Piece(block, piece) => {
                let (kind, field) = match &block.kind {
                    BlockKind::Text => ("text_delta", "text"),
                    BlockKind::Reasoning => ("thinking_delta", "thinking"),
                    BlockKind::Call(_) => ("input_json_delta", "partial_json"),
                };
                data["delta"] = json!({"type": kind, field: piece});
            }
            BlockEvent::End(_) => {}
        }
        vec![(name, data)]
    }

    fn end(&mut self, _context: &AnswerContext, answer: &BlockAnswer) -> Vec<NamedEvent> {
        let delta = json!({"stop_reason": stop_reason(answer), "stop_sequence": answer.stop_string});
        let usage = usage_of(answer.usage, answer.output_tokens);
        vec![
            ("message_delta", json!({"type": "message_delta", "delta": delta, "usage": usage})),
            ("message_stop", json!({"type": "message_stop"})),
        ]
    }

    fn error(&mut self, error: &HttpError) -> NamedEvent {
        ("error", error.anthropic_body())
    }

    fn whole(&self, context: &AnswerContext, answer: &BlockAnswer) -> Value {
        let content: Vec<Value> = answer.blocks.iter().map(|block| block_of(block, &block.text)).collect();
        json!({
            "id": context.id,
            "type": "message",
            "role": "assistant",
            "model": context.model.name,
            "content": content,
            "stop_reason": stop_reason(answer),
            "stop_sequence": answer.stop_string,
            "usage": usage_of(answer.usage, answer.output_tokens),
        })
    }
}
