//! `/openapi.json`: the description of the HTTP port for programs, made from the tables of fields and of
//! errors.

use std::collections::BTreeMap;

use axum::Json;
use serde_json::{Map, Value, json};

use super::error::{Code, ErrorForm};
use super::request_fields::{Endpoint, FIELDS, FieldSupport};
use crate::accept::{INPUTS_MAX, LOGPROBS_MAX, N_MAX};
use crate::chat::tools::TOOLS_MAX;

/// One endpoint: its method, path and purpose. `docs/api.md` lists the same.
type Row = (&'static str, &'static str, &'static str);

const ENDPOINTS: &[Row] = &[
    ("post", "/v1/chat/completions", "Answers a chat."),
    ("post", "/v1/completions", "Continues texts or token ids."),
    ("post", "/v1/messages", "Answers a chat in the form of Anthropic's API."),
    ("post", "/v1/messages/count_tokens", "Counts the tokens of such a chat."),
    ("post", "/v1/responses", "Answers a chat in the form of OpenAI's Responses."),
    ("post", "/v1/responses/input_tokens", "Counts the tokens of such a chat."),
    ("post", "/v1/embeddings", "Is refused: the models generate text."),
    ("post", "/tokenize", "Converts a text or a chat to token ids."),
    ("post", "/detokenize", "Converts token ids to text."),
    ("get", "/v1/models", "Lists the models that can be used now."),
    ("get", "/v1/models/{name}", "Describes one model."),
    ("get", "/live", "Whether the process lives."),
    ("get", "/ready", "Whether requests can be served."),
    ("get", "/health", "The same as /ready."),
    ("get", "/metrics", "Metrics in Prometheus's text format."),
    ("get", "/version", "The version of the process and of its protocol."),
    ("get", "/openapi.json", "This description."),
    ("get", "/debug/cluster", "The nodes."),
    ("get", "/debug/config", "The settings in force."),
    ("get", "/debug/kv", "The KV blocks of all nodes."),
    ("get", "/debug/requests", "Requests under way, the last ones, and the slowest."),
    ("get", "/debug/requests/{id}", "One request with its stages."),
];

pub(crate) async fn page() -> Json<Value> {
    Json(description())
}

fn description() -> Value {
    let mut paths: BTreeMap<&str, Map<String, Value>> = BTreeMap::new();
    for row in ENDPOINTS {
        paths.entry(row.1).or_default().insert(row.0.to_owned(), operation(row));
    }
    json!({
        "openapi": "3.1.0",
        "info": { "title": "Baton", "version": env!("CARGO_PKG_VERSION") },
        "paths": paths,
        "components": {
            "schemas": {
                "ChatRequest": request(Endpoint::Chat),
                "CompletionRequest": request(Endpoint::Completions),
                "Error": error(),
                "MessagesError": messages_error(),
            },
            "securitySchemes": { "key": { "type": "http", "scheme": "bearer" } },
        },
    })
}

fn operation(&(_, path, summary): &Row) -> Value {
    let mut operation = json!({ "summary": summary, "responses": responses(path) });
    if let Some((_, name)) = path.split_once('{') {
        let name = name.trim_end_matches('}');
        let schema = json!({ "type": "string" });
        operation["parameters"] = json!([{ "name": name, "in": "path", "required": true, "schema": schema }]);
    }
    if let Some(schema) = request_schema(path) {
        let schema = json!({ "$ref": format!("#/components/schemas/{schema}") });
        operation["requestBody"] =
            json!({ "required": true, "content": { "application/json": { "schema": schema } } });
    }
    // A router without a tenants file needs no key for /v1, and one on loopback no admin key.
    if path.starts_with("/v1/") || path.starts_with("/debug/") {
        operation["security"] = json!([{}, { "key": [] }]);
    }
    operation
}

fn request_schema(path: &str) -> Option<&'static str> {
    match path {
        "/v1/chat/completions" => Some("ChatRequest"),
        "/v1/completions" => Some("CompletionRequest"),
        _ => None,
    }
}

/// Returns the success, and all errors by status: any request may get any of them.
fn responses(path: &str) -> Value {
    let content = |kind: &str, schema: Value| json!({ kind: { "schema": schema } });
    let content = match path {
        "/live" | "/ready" | "/health" | "/metrics" => content("text/plain", json!({ "type": "string" })),
        _ => content("application/json", json!({ "type": "object" })),
    };
    let mut responses = Map::new();
    let mut success = json!({ "description": "success", "content": content });
    if request_schema(path).is_some() {
        // The answer with `stream`. It has no schema, because tools would apply one to each event.
        success["content"]["text/event-stream"] = json!({});
    }
    responses.insert("200".to_owned(), success);
    let mut codes: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for code in Code::ALL {
        codes.entry(code.status().as_u16().to_string()).or_default().push(code.as_str());
    }
    let schema = match ErrorForm::of(path) {
        ErrorForm::OpenAi => json!({ "$ref": "#/components/schemas/Error" }),
        ErrorForm::Anthropic => json!({ "$ref": "#/components/schemas/MessagesError" }),
    };
    for (status, codes) in codes {
        let content = json!({ "application/json": { "schema": schema } });
        responses.insert(status, json!({ "description": codes.join(", "), "content": content }));
    }
    responses.into()
}

fn error() -> Value {
    let codes: Vec<&str> = Code::ALL.iter().map(|code| code.as_str()).collect();
    let fields = json!({
        "code": { "type": "string", "enum": codes },
        "type": { "type": "string" },
        "message": { "type": "string" },
        "param": { "type": ["string", "null"] },
    });
    let inner = json!({ "type": "object", "required": ["code", "type", "message"], "properties": fields });
    json!({ "type": "object", "required": ["error"], "properties": { "error": inner } })
}

/// Returns the form of errors of Anthropic's API.
fn messages_error() -> Value {
    let fields = json!({ "type": { "type": "string" }, "message": { "type": "string" } });
    let inner = json!({ "type": "object", "required": ["type", "message"], "properties": fields });
    let fields = json!({ "type": { "const": "error" }, "error": inner });
    json!({ "type": "object", "required": ["type", "error"], "properties": fields })
}

/// Returns the fields of an endpoint that are honoured or ignored. Others are refused by name.
fn request(endpoint: Endpoint) -> Value {
    let mut properties = Map::new();
    for field in FIELDS.iter().filter(|field| field.on.includes(endpoint)) {
        let (schema, note) = match field.fate {
            FieldSupport::Honoured(note) => (schema(field.name), note.to_owned()),
            FieldSupport::Harmless(note) => (json!({}), format!("ignored: {note}")),
            FieldSupport::Refused { .. } => continue,
        };
        let mut schema = nullable(schema);
        if !note.is_empty() {
            schema["description"] = json!(note);
        }
        properties.insert(field.name.to_owned(), schema);
    }
    let required = match endpoint {
        Endpoint::Chat => "messages",
        Endpoint::Completions => "prompt",
    };
    json!({
        "type": "object",
        "required": [required],
        "properties": properties,
        "additionalProperties": false,
    })
}

/// Lets a field be `null` too, which always means that it is absent.
fn nullable(mut schema: Value) -> Value {
    match schema.get_mut("type") {
        Some(Value::Array(kinds)) => kinds.push(json!("null")),
        Some(kind) => *kind = json!([kind.take(), "null"]),
        None => {}
    }
    schema
}

/// Returns the type of an honoured field, with its bounds.
fn schema(name: &str) -> Value {
    let number = |least: f64, most: f64| json!({ "type": "number", "minimum": least, "maximum": most });
    let count = |least: u32| json!({ "type": "integer", "minimum": least, "maximum": u32::MAX });
    let token_ids = json!({ "type": "array", "items": count(0) });
    match name {
        "model" | "cache_salt" => json!({ "type": "string" }),
        "stream"
        | "return_token_ids"
        | "ignore_eos"
        | "echo"
        | "add_generation_prompt"
        | "continue_final_message"
        | "include_reasoning"
        | "separate_reasoning"
        | "parallel_tool_calls" => json!({ "type": "boolean" }),
        "logprobs" => json!({ "type": ["boolean", "integer"] }),
        "n" | "best_of" => json!({ "type": "integer", "minimum": 1, "maximum": N_MAX }),
        // Zero is allowed, because `echo` may be used without an answer.
        "max_tokens" => count(0),
        "max_completion_tokens" => count(1),
        "min_tokens" => count(0),
        "top_logprobs" | "prompt_logprobs" => {
            json!({ "type": "integer", "minimum": 0, "maximum": LOGPROBS_MAX })
        }
        "temperature" => number(0.0, 2.0),
        "top_p" => json!({ "type": "number", "exclusiveMinimum": 0, "maximum": 1 }),
        "min_p" => number(0.0, 1.0),
        "repetition_penalty" => json!({ "type": "number", "minimum": 0.01, "maximum": 10 }),
        "presence_penalty" | "frequency_penalty" => number(-2.0, 2.0),
        "top_k" => json!({ "type": "integer", "minimum": -1, "maximum": u32::MAX }),
        "seed" => json!({ "type": "integer" }),
        "logit_bias" => json!({ "type": "object", "additionalProperties": number(-100.0, 100.0) }),
        "stop_token_ids" => token_ids,
        "stop" => one_or_several(&json!({ "type": "string" })),
        "prompt" => json!({ "anyOf": [
            one_or_several(&json!({ "type": "string" })),
            token_ids,
            { "type": "array", "maxItems": INPUTS_MAX, "items": token_ids },
        ] }),
        "messages" => json!({ "type": "array", "minItems": 1, "items": message() }),
        "tools" => json!({ "type": "array", "maxItems": TOOLS_MAX, "items": tool() }),
        "tool_choice" => json!({ "anyOf": [
            { "type": "string", "enum": ["none", "auto", "required"] },
            { "type": "object", "required": ["function"], "properties": {
                "type": { "const": "function" },
                "function": { "type": "object", "required": ["name"], "properties": { "name": { "type": "string" } } },
            } },
        ] }),
        "chat_template_kwargs" => json!({ "type": "object" }),
        "response_format" => response_format(),
        "guided_json" | "json_schema" => json!({ "type": ["object", "string", "boolean"] }),
        "guided_regex" | "guided_grammar" | "regex" => json!({ "type": "string" }),
        "guided_choice" => json!({ "type": "array", "minItems": 1, "items": { "type": "string" } }),
        "guided_json_object" => json!({ "type": "boolean" }),
        "structured_outputs" => json!({ "type": "object", "properties": {
            "json": { "type": ["object", "string", "boolean"] },
            "json_object": { "type": "boolean" },
            "regex": { "type": "string" },
            "choice": { "type": "array", "minItems": 1, "items": { "type": "string" } },
            "grammar": { "type": "string" },
        } }),
        "stream_options" => {
            let boolean = json!({ "type": "boolean" });
            let properties = json!({ "include_usage": boolean, "continuous_usage_stats": boolean });
            json!({ "type": "object", "properties": properties })
        }
        _ => Value::Null,
    }
}

fn response_format() -> Value {
    let named = json!({ "type": "object", "properties": { "schema": { "type": "object" } } });
    let kinds = ["text", "json_object", "json_schema"];
    let properties = json!({ "type": { "enum": kinds }, "json_schema": named });
    json!({ "type": "object", "required": ["type"], "properties": properties })
}

fn one_or_several(schema: &Value) -> Value {
    json!({ "anyOf": [schema, { "type": "array", "items": schema }] })
}

fn tool() -> Value {
    let function = json!({
        "type": "object",
        "required": ["name"],
        "properties": { "name": { "type": "string" }, "parameters": { "type": "object" } },
    });
    json!({
        "type": "object",
        "required": ["type", "function"],
        "properties": { "type": { "const": "function" }, "function": function },
    })
}

fn message() -> Value {
    let part = json!({
        "type": "object",
        "required": ["type", "text"],
        "properties": { "type": { "const": "text" }, "text": { "type": "string" } },
    });
    let content = json!({ "anyOf": [{ "type": "string" }, { "type": "array", "items": part }] });
    let roles = ["system", "developer", "user", "assistant", "tool"];
    json!({
        "type": "object",
        "required": ["role", "content"],
        "properties": { "role": { "type": "string", "enum": roles }, "content": content },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_honoured_field_has_a_type() {
        for field in FIELDS {
            if let FieldSupport::Honoured(_) = field.fate {
                assert!(schema(field.name).is_object(), "{} has no type", field.name);
            }
        }
    }

    #[test]
    fn every_reference_names_a_schema() {
        let description = description();
        let text = description.to_string();
        let references =
            text.split("#/components/schemas/").skip(1).filter_map(|rest| rest.split('"').next());
        for name in references {
            assert!(description["components"]["schemas"][name].is_object(), "{name}");
        }
    }
}
