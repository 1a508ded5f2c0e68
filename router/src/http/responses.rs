//! The endpoint `POST /v1/responses`, OpenAI's, without a store: its requests become chats, and its answers are
//! lists of blocks. And `POST /v1/responses/input_tokens`, which counts the tokens of such a chat.

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use serde_json::{Map, Value, json};
use types::Usage;

use super::answer::{AnswerContext, AnswerShape};
use super::api::{HttpApi, ParsedRequest, RequestHead};
use super::blocks::{Block, BlockAnswer, BlockEvent, BlockFormat, BlockKind, NamedEvent};
use super::conversion::{blocks, kind, list, move_tools, moved, only, parse_chat, present, text_of};
use super::error::{FieldNames, HttpError};
use super::{body, request_fields, tokenize};
use crate::choice::ChoiceFinish;
use crate::error::AcceptError;

/// Fields that a chat has too, with their names there.
const SAME: &[(&str, &str)] = &[
    ("model", "model"),
    ("max_output_tokens", "max_completion_tokens"),
    ("parallel_tool_calls", "parallel_tool_calls"),
    ("stream", "stream"),
    ("temperature", "temperature"),
    ("top_p", "top_p"),
    ("chat_template_kwargs", "chat_template_kwargs"),
];
/// Fields that change nothing in the answer. `max_tool_calls` counts calls of a server's own tools.
const HARMLESS: &[&str] = &[
    "max_tool_calls",
    "metadata",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "stream_options",
    "user",
];
/// The fields of a request that its answer repeats, with the value of an absent one.
const REPEATED: &[(&str, &str)] = &[
    ("instructions", "null"),
    ("max_output_tokens", "null"),
    ("metadata", "{}"),
    ("parallel_tool_calls", "true"),
    ("temperature", "null"),
    ("tool_choice", "\"auto\""),
    ("tools", "[]"),
    ("top_p", "null"),
];

/// Parses a request's JSON into a prompt and sampling parameters.
pub(crate) fn parse_request(api: &HttpApi, json: &[u8]) -> Result<ParsedRequest<ResponsesFormat>, HttpError> {
    let fields: Map<String, Value> = body::parse(json)?;
    let repeated = |(name, absent): &(&str, &str)| {
        let value = present(fields.get(*name).cloned());
        let absent = || serde_json::from_str(absent).expect("the table has JSON");
        ((*name).to_owned(), value.unwrap_or_else(absent))
    };
    let repeated = REPEATED.iter().map(repeated).collect();
    let format = ResponsesFormat { repeated, seed: api.world.draw(), n_events: 0 };
    Ok(parse_chat(api, chat_of(fields)?, ResponsesFormat::NAMES)?.with_shape(format))
}

/// Answers with the number of tokens of a request's prompt. A prompt that fits into no context is counted too.
pub(crate) async fn input_tokens(
    State(api): State<HttpApi>,
    head: RequestHead,
    body: Body,
) -> Result<Json<Value>, HttpError> {
    let n_tokens = tokenize::count(&api, head, body, parse_request).await?;
    Ok(Json(json!({"object": "response.input_tokens", "input_tokens": n_tokens})))
}

/// Converts a request to a chat request.
fn chat_of(mut fields: Map<String, Value>) -> Result<Map<String, Value>, AcceptError> {
    let mut chat = moved(&mut fields, SAME);
    let mut messages = Vec::new();
    if let Some(instructions) = present(fields.remove("instructions")) {
        if !instructions.is_string() {
            return Err(AcceptError::invalid("instructions", "expected a string"));
        }
        messages.push(json!({"role": "system", "content": instructions}));
    }
    match fields.remove("input").ok_or_else(|| AcceptError::missing("input"))? {
        Value::String(text) => messages.push(json!({"role": "user", "content": text})),
        input => {
            for (at, item) in blocks("input", input)?.into_iter().enumerate() {
                add_item(&mut messages, &format!("input[{at}]"), item)?;
            }
        }
    }
    chat.insert("messages".to_owned(), messages.into());
    move_tools(&mut fields, &mut chat, tool_of)?;
    match present(fields.remove("tool_choice")) {
        Some(Value::Object(choice)) => {
            let function = json!({"name": choice.get("name")});
            let choice = json!({"type": choice.get("type"), "function": function});
            chat.insert("tool_choice".to_owned(), choice);
        }
        Some(choice) => drop(chat.insert("tool_choice".to_owned(), choice)),
        None => {}
    }
    add_text_format(&mut chat, present(fields.remove("text")))?;
    if present(fields.remove("truncation")).is_some_and(|truncation| truncation != "disabled") {
        return Err(AcceptError::unsupported("truncation", "a prompt that is too long is refused"));
    }
    if present(fields.remove("top_logprobs")).is_some_and(|n| n != 0) {
        return Err(AcceptError::unsupported("top_logprobs", "this endpoint has no log-probabilities"));
    }
    if fields.get("reasoning").is_some_and(|reasoning| !asks_nothing(reasoning)) {
        return Err(AcceptError::unsupported(
            "reasoning",
            "use chat_template_kwargs, as the model's template reads it",
        ));
    }
    fields.remove("reasoning");
    check_include(present(fields.remove("include")))?;
    request_fields::refuse_others(&fields, HARMLESS)?;
    Ok(chat)
}

/// Refuses requested parts of an answer that Baton does not have. Reasoning is plain text here, and is never encrypted.
fn check_include(include: Option<Value>) -> Result<(), AcceptError> {
    let Some(include) = include else { return Ok(()) };
    match list("include", include)?.iter().position(|part| part != "reasoning.encrypted_content") {
        None => Ok(()),
        Some(at) => {
            let reason = "only reasoning.encrypted_content";
            Err(AcceptError::unsupported(format!("include[{at}]"), reason))
        }
    }
}

/// Returns whether an object has no value besides `null` and `none`.
fn asks_nothing(value: &Value) -> bool {
    let is_neutral = |value: &Value| value.is_null() || value == "none";
    value.is_null() || value.as_object().is_some_and(|fields| fields.values().all(is_neutral))
}

/// Converts the field `text` to `response_format`.
fn add_text_format(chat: &mut Map<String, Value>, text: Option<Value>) -> Result<(), AcceptError> {
    let mut text = match text {
        None => return Ok(()),
        Some(Value::Object(text)) => text,
        Some(_) => return Err(AcceptError::invalid("text", "expected an object")),
    };
    if let Some(mut format) = present(text.remove("format")) {
        let kind = format.get("type").cloned().ok_or_else(|| AcceptError::missing("text.format.type"))?;
        let converted = match kind.as_str() {
            Some("json_schema") => {
                format.as_object_mut().map(|fields| fields.remove("type"));
                json!({"type": kind, "json_schema": format})
            }
            _ => json!({"type": kind}),
        };
        chat.insert("response_format".to_owned(), converted);
    }
    if let Some(verbosity) = present(text.remove("verbosity")) {
        chat.insert("verbosity".to_owned(), verbosity);
    }
    request_fields::refuse_others(&text, &[])
}

/// Adds an item of the input to the messages.
fn add_item(messages: &mut Vec<Value>, path: &str, mut item: Value) -> Result<(), AcceptError> {
    match kind(&item) {
        "" | "message" => {
            let role = role_of(path, &item)?;
            let content = item.get_mut("content").map(Value::take);
            let content = content.ok_or_else(|| AcceptError::missing(format!("{path}.content")))?;
            let content = texts(&format!("{path}.content"), content)?;
            if role == "assistant" {
                let text = content.as_str().unwrap_or_default().to_owned();
                assistant(messages)["content"] = text.into();
            } else {
                messages.push(json!({"role": role, "content": content}));
            }
        }
        "reasoning" => {
            let content = present(item.get_mut("content").map(Value::take)).unwrap_or_else(|| json!([]));
            let text = texts(&format!("{path}.content"), content)?;
            assistant(messages)["reasoning_content"] = text;
        }
        "function_call" => {
            let [name, arguments, id] =
                ["name", "arguments", "call_id"].map(|name| text_of(path, &item, name));
            let function = json!({"name": name?, "arguments": arguments?});
            let call = json!({"id": id?, "type": "function", "function": function});
            match &mut assistant_of_calls(messages)["tool_calls"] {
                Value::Array(calls) => calls.push(call),
                calls => *calls = json!([call]),
            }
        }
        "function_call_output" => {
            let output = item.get_mut("output").map(Value::take);
            let output = output.ok_or_else(|| AcceptError::missing(format!("{path}.output")))?;
            let content = texts(&format!("{path}.output"), output)?;
            messages.push(json!({"role": "tool", "tool_call_id": item["call_id"], "content": content}));
        }
        other => {
            let known = "message, reasoning, function_call and function_call_output";
            return Err(only(format!("{path}.type"), known, other));
        }
    }
    Ok(())
}

/// Returns the role of a message.
fn role_of(path: &str, item: &Value) -> Result<String, AcceptError> {
    let role = text_of(path, item, "role")?;
    match role.as_str() {
        "user" | "assistant" | "system" | "developer" => Ok(role),
        other => Err(AcceptError::invalid(format!("{path}.role"), format!("unknown role `{other}`"))),
    }
}

/// Returns the assistant's message that the next text or reasoning belongs to: the last one, if it has only
/// reasoning.
fn assistant(messages: &mut Vec<Value>) -> &mut Value {
    let is_begun = |message: &Value| {
        message["role"] == "assistant" && message["content"] == "" && message.get("tool_calls").is_none()
    };
    if !messages.last().is_some_and(is_begun) {
        messages.push(json!({"role": "assistant", "content": ""}));
    }
    messages.last_mut().expect("a message is there")
}

/// Returns the assistant's message that the next call belongs to: the last one.
fn assistant_of_calls(messages: &mut Vec<Value>) -> &mut Value {
    if messages.last().is_none_or(|message| message["role"] != "assistant") {
        messages.push(json!({"role": "assistant", "content": ""}));
    }
    messages.last_mut().expect("a message is there")
}

/// Returns content, which is a text or a list of texts, as one text.
fn texts(path: &str, content: Value) -> Result<Value, AcceptError> {
    if content.is_string() {
        return Ok(content);
    }
    let mut joined = Vec::new();
    for (at, part) in blocks(path, content)?.into_iter().enumerate() {
        match (kind(&part), part.get("text").and_then(Value::as_str)) {
            ("input_text" | "output_text" | "reasoning_text" | "text", Some(text)) => {
                joined.push(text.to_owned())
            }
            (other, _) => return Err(only(format!("{path}[{at}].type"), "text", other)),
        }
    }
    Ok(joined.join("\n").into())
}

fn tool_of(path: &str, mut tool: Value) -> Result<Value, AcceptError> {
    if kind(&tool) != "function" {
        return Err(only(format!("{path}.type"), "`function`", kind(&tool)));
    }
    tool.as_object_mut().map(|fields| fields.remove("type"));
    Ok(json!({"type": "function", "function": tool}))
}

// === the answer ===

/// The format of a response's answers.
#[derive(Debug)]
pub(crate) struct ResponsesFormat {
    /// The fields of the request that the answer repeats.
    repeated: Map<String, Value>,
    /// A random number, for the ids of items: clients merge items with the same id.
    seed: u64,
    n_events: u64,
}

impl AnswerShape for ResponsesFormat {
    const ID: &'static str = "resp_";
    const NAMES: FieldNames = &[
        ("max_completion_tokens", "max_output_tokens"),
        ("messages", "input"),
        ("response_format.json_schema", "text.format"),
        ("response_format", "text.format"),
        ("verbosity", "text.verbosity"),
        ("tool_choice.function", "tool_choice"),
        ("].function.", "]."),
    ];
}

/// The states of an item.
const IN_PROGRESS: &str = "in_progress";
const COMPLETED: &str = "completed";
const INCOMPLETE: &str = "incomplete";

/// Returns the status of a block that has ended.
fn end_status(block: &Block) -> &'static str {
    if block.is_cut { INCOMPLETE } else { COMPLETED }
}

impl ResponsesFormat {
    /// Makes an event with the next number.
    fn event(&mut self, name: &'static str, mut data: Value) -> NamedEvent {
        data["type"] = name.into();
        data["sequence_number"] = self.n_events.into();
        self.n_events += 1;
        (name, data)
    }

    fn response(&self, context: &AnswerContext, answer: &BlockAnswer) -> Value {
        let (status, reason) = match answer.finish {
            None => (IN_PROGRESS, Value::Null),
            Some(ChoiceFinish::Length) => (INCOMPLETE, json!({"reason": "max_output_tokens"})),
            Some(ChoiceFinish::Stop | ChoiceFinish::ToolCalls) => (COMPLETED, Value::Null),
        };
        let item = |block| self.item(block, end_status(block));
        let output: Vec<Value> = answer.blocks.iter().map(item).collect();
        let mut response = json!({
            "id": context.id,
            "object": "response",
            "created_at": context.created,
            "status": status,
            "error": null,
            "incomplete_details": reason,
            "model": context.model.name,
            "output": output,
            "previous_response_id": null,
            "store": false,
            "truncation": "disabled",
            "usage": answer.finish.map(|_| usage_of(answer)),
        });
        if let Some(fields) = response.as_object_mut() {
            fields.extend(self.repeated.clone());
        }
        response
    }

    fn item_id(&self, block: &Block) -> String {
        let Self { seed, .. } = self;
        match &block.kind {
            BlockKind::Reasoning => format!("rs_{seed:016x}_{}", block.index),
            BlockKind::Text => format!("msg_{seed:016x}_{}", block.index),
            BlockKind::Call(start) => format!("fc_{}", start.id),
        }
    }

    /// Returns the item of a block. It has no content while it is in progress.
    fn item(&self, block: &Block, status: &str) -> Value {
        let content = if status == IN_PROGRESS { json!([]) } else { json!([part(block)]) };
        let id = self.item_id(block);
        match &block.kind {
            BlockKind::Reasoning => {
                json!({"id": id, "type": "reasoning", "status": status, "summary": [], "content": content})
            }
            BlockKind::Text => {
                json!({"id": id, "type": "message", "status": status, "role": "assistant", "content": content})
            }
            BlockKind::Call(start) => json!({
                "id": id,
                "type": "function_call",
                "status": status,
                "call_id": start.id,
                "name": start.name,
                "arguments": block.text,
            }),
        }
    }
}

fn usage_of(answer: &BlockAnswer) -> Value {
    let BlockAnswer { usage, output_tokens, reasoning_tokens, .. } = answer;
    json!({
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage.prompt_tokens + output_tokens,
    })
}

/// Returns a block's text as the content part of its item.
fn part(block: &Block) -> Value {
    match block.kind {
        BlockKind::Reasoning => json!({"type": "reasoning_text", "text": block.text}),
        _ => json!({"type": "output_text", "text": block.text, "annotations": []}),
    }
}

impl BlockFormat for ResponsesFormat {
    fn start(&mut self, context: &AnswerContext, usage: Usage) -> Vec<NamedEvent> {
        let response = self.response(context, &BlockAnswer::of(usage));
        ["response.created", "response.in_progress"]
            .map(|name| self.event(name, json!({"response": response})))
            .into()
    }

    fn block(&mut self, event: BlockEvent<'_>) -> Vec<NamedEvent> {
        let (BlockEvent::Begin(block) | BlockEvent::Piece(block, _) | BlockEvent::End(block)) = event;
        let place = |extra: Value| {
            let mut data = json!({"output_index": block.index, "item_id": self.item_id(block)});
            if let (Some(data), Value::Object(extra)) = (data.as_object_mut(), extra) {
                data.extend(extra);
            }
            data
        };
        let of_item = |status| json!({"output_index": block.index, "item": self.item(block, status)});
        let (delta, done) = match block.kind {
            BlockKind::Text => ("response.output_text.delta", "response.output_text.done"),
            BlockKind::Reasoning => ("response.reasoning_text.delta", "response.reasoning_text.done"),
            BlockKind::Call(_) => {
                ("response.function_call_arguments.delta", "response.function_call_arguments.done")
            }
        };
        let is_call = matches!(block.kind, BlockKind::Call(_));
        let mut events = Vec::new();
        match event {
            BlockEvent::Begin(block) => {
                events.push(("response.output_item.added", of_item(IN_PROGRESS)));
                if !is_call {
                    let data = place(json!({"content_index": 0, "part": part(block)}));
                    events.push(("response.content_part.added", data));
                }
            }
            BlockEvent::Piece(_, piece) if is_call => events.push((delta, place(json!({"delta": piece})))),
            BlockEvent::Piece(_, piece) => {
                let data = json!({"content_index": 0, "delta": piece, "logprobs": []});
                events.push((delta, place(data)));
            }
            BlockEvent::End(block) => {
                if let BlockKind::Call(start) = &block.kind {
                    let data = json!({"arguments": block.text, "name": start.name});
                    events.push((done, place(data)));
                } else {
                    let data = json!({"content_index": 0, "text": block.text, "logprobs": []});
                    events.push((done, place(data)));
                    let data = json!({"content_index": 0, "part": part(block)});
                    events.push(("response.content_part.done", place(data)));
                }
                events.push(("response.output_item.done", of_item(end_status(block))));
            }
        }
        events.into_iter().map(|(name, data)| self.event(name, data)).collect()
    }

    fn end(&mut self, context: &AnswerContext, answer: &BlockAnswer) -> Vec<NamedEvent> {
        let name = match answer.finish {
            Some(ChoiceFinish::Length) => "response.incomplete",
            _ => "response.completed",
        };
        let data = json!({"response": self.response(context, answer)});
        vec![self.event(name, data)]
    }

    fn error(&mut self, error: &HttpError) -> NamedEvent {
        let data = json!({"code": error.code.as_str(), "message": error.message, "param": error.param});
        self.event("error", data)
    }

    fn whole(&self, context: &AnswerContext, answer: &BlockAnswer) -> Value {
        self.response(context, answer)
    }
}
