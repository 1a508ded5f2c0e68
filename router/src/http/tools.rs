//! The fields `tools`, `tool_choice` and `parallel_tool_calls` of a chat, and the format of calls in answers.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde::Serialize;
use serde_json::Value;

use crate::accept::is_name;
use crate::error::AcceptError;
use crate::text::tools::{CallDelta, ToolSet};

/// The largest number of tools in one request.
pub(crate) const TOOLS_MAX: usize = 512;

/// The tools that the model may call.
#[derive(Debug)]
pub(crate) struct Tools {
    /// The field as the client wrote it, for the chat template.
    pub(crate) fields: Vec<Value>,
    pub(crate) set: Arc<ToolSet>,
}

/// Returns the tools that the model may call, if there are any. With `tool_choice: none` there are none.
pub(crate) fn callable(
    tools: Option<Vec<Value>>,
    choice: Option<&Value>,
) -> Result<Option<Tools>, AcceptError> {
    let fields = tools.unwrap_or_default();
    if fields.len() > TOOLS_MAX {
        let reason = format!("at most {TOOLS_MAX} tools, not {}", fields.len());
        return Err(AcceptError::invalid("tools", reason));
    }
    let tools = fields.iter().enumerate().map(|(at, tool)| tool_of(&format!("tools[{at}]"), tool));
    let set = Arc::new(ToolSet::new(tools.collect::<Result<Vec<_>, _>>()?));
    Ok(may_call(choice)?.filter(|()| !fields.is_empty()).map(|()| Tools { fields, set }))
}

/// Reads `tool_choice`: `Some` lets the model call tools.
fn may_call(choice: Option<&Value>) -> Result<Option<()>, AcceptError> {
    let forced = "a call cannot be forced yet: use `auto` or `none`";
    match choice {
        None => Ok(Some(())),
        Some(Value::String(choice)) => match choice.as_str() {
            "auto" => Ok(Some(())),
            "none" => Ok(None),
            "required" => Err(AcceptError::unsupported("tool_choice", forced)),
            other => Err(AcceptError::invalid("tool_choice", format!("unknown choice `{other}`"))),
        },
        Some(Value::Object(_)) => Err(AcceptError::unsupported("tool_choice", forced)),
        Some(_) => Err(AcceptError::invalid("tool_choice", "expected a string or an object")),
    }
}

/// Returns a tool's name, and the names of its parameters that are not texts.
fn tool_of(path: &str, tool: &Value) -> Result<(String, BTreeSet<String>), AcceptError> {
    match tool.get("type") {
        None => return Err(AcceptError::missing(format!("{path}.type"))),
        Some(kind) if kind == "function" => {}
        Some(_) => return Err(AcceptError::unsupported(format!("{path}.type"), "only `function`")),
    }
    let param = || format!("{path}.function.name");
    let name = match tool.pointer("/function/name") {
        None => return Err(AcceptError::missing(param())),
        Some(Value::String(name)) if is_name(name) => name.clone(),
        Some(_) => return Err(AcceptError::invalid(param(), NAME)),
    };
    let parameters = tool.pointer("/function/parameters/properties").and_then(Value::as_object);
    let typed = parameters.into_iter().flatten().filter(|(_, schema)| !is_text(schema));
    Ok((name, typed.map(|(name, _)| name.clone()).collect()))
}

const NAME: &str = "a tool's name is a string of 1 to 128 letters, digits, '-', '_', '.' or ':'";

/// Returns whether a parameter's values are texts. A schema without a type is a text's, unless it combines
/// others.
fn is_text(schema: &Value) -> bool {
    match schema.get("type") {
        Some(Value::String(kind)) => kind == "string",
        Some(Value::Array(kinds)) => kinds.iter().all(|kind| kind == "string"),
        _ => !["anyOf", "oneOf", "allOf", "$ref"].iter().any(|key| schema.get(*key).is_some()),
    }
}

// === the answer ===

/// A call in a complete answer.
#[derive(Debug, Serialize)]
pub(crate) struct ToolCall<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a str>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    function: FunctionCall<'a>,
}

#[derive(Debug, Serialize)]
struct FunctionCall<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    arguments: &'a str,
}

impl<'a> ToolCall<'a> {
    /// Makes the form of a call in a complete answer.
    pub(crate) fn whole(call: &'a CallDelta) -> Self {
        Self { index: None, ..Self::part(call) }
    }

    /// Makes the form of a part of a call in a stream.
    pub(crate) fn part(call: &'a CallDelta) -> Self {
        let start = call.start.as_ref();
        let function =
            FunctionCall { name: start.map(|start| start.name.as_str()), arguments: &call.arguments };
        Self {
            index: Some(call.index),
            id: start.map(|start| start.id.as_str()),
            kind: start.map(|_| "function"),
            function,
        }
    }
}
