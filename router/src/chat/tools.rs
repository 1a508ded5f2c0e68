//! The tools of a chat: which ones the model may call, and which ones it must call.

use std::collections::BTreeSet;
use std::sync::Arc;

use grammar::sources;
use serde_json::{Value, json};

use crate::accept::is_name;
use crate::error::AcceptError;
use crate::grammars::{AskedGrammar, AskedSchema};
use crate::text::ServedModel;
use crate::text::parts::ToolRules;
use crate::text::reasoning::ReasoningRules;
use crate::text::tools::{CallCount, ForcedCalls, ForcedTool, ToolSet};

/// The largest number of tools in one request.
pub(crate) const TOOLS_MAX: usize = 512;

/// The tools that the model may call.
#[derive(Debug)]
pub(crate) struct Tools {
    /// The field as the client wrote it, for the chat template.
    pub(crate) fields: Vec<Value>,
    pub(crate) set: Arc<ToolSet>,
    /// The tools that the answer may call, if it must call one; `None`: the model decides whether it calls a tool.
    pub(crate) demand: Option<ToolDemand>,
}

/// The calls that `tool_choice` demands of an answer.
#[derive(Debug)]
pub(crate) struct ToolDemand {
    tools: Vec<ForcedTool>,
    /// Whether the client names one function.
    pub(crate) is_named: bool,
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
    let tools = tools.collect::<Result<Vec<_>, _>>()?;
    let set = ToolSet::new(tools.iter().map(|tool| (tool.name.clone(), tool.typed.clone())));
    let demand = match tool_choice(choice)? {
        ToolChoice::None => return Ok(None),
        ToolChoice::Auto if tools.is_empty() => return Ok(None),
        ToolChoice::Auto => None,
        ToolChoice::Required => Some(ToolDemand { tools: some(tools)?, is_named: false }),
        ToolChoice::Named(name) => Some(ToolDemand { tools: vec![named(tools, name)?], is_named: true }),
    };
    Ok(Some(Tools { fields, set: Arc::new(set), demand }))
}

/// Whether the answer calls a tool.
enum ToolChoice<'a> {
    None,
    Auto,
    Required,
    Named(&'a str),
}

fn tool_choice(choice: Option<&Value>) -> Result<ToolChoice<'_>, AcceptError> {
    match choice {
        None => Ok(ToolChoice::Auto),
        Some(Value::String(choice)) => match choice.as_str() {
            "auto" => Ok(ToolChoice::Auto),
            "none" => Ok(ToolChoice::None),
            "required" => Ok(ToolChoice::Required),
            other => Err(AcceptError::invalid("tool_choice", format!("unknown choice `{other}`"))),
        },
        Some(Value::Object(choice)) => {
            if choice.get("type").is_some_and(|kind| kind != "function") {
                return Err(AcceptError::unsupported("tool_choice.type", "only `function`"));
            }
            let name = choice.get("function").and_then(|function| function.get("name"));
            let missing = || AcceptError::missing("tool_choice.function.name");
            Ok(ToolChoice::Named(name.and_then(Value::as_str).ok_or_else(missing)?))
        }
        Some(_) => Err(AcceptError::invalid("tool_choice", "expected a string or an object")),
    }
}

fn some(tools: Vec<ForcedTool>) -> Result<Vec<ForcedTool>, AcceptError> {
    match tools.is_empty() {
        true => Err(AcceptError::invalid("tool_choice", "a call is demanded and `tools` has no tool")),
        false => Ok(tools),
    }
}

fn named(tools: Vec<ForcedTool>, name: &str) -> Result<ForcedTool, AcceptError> {
    let unknown = || AcceptError::invalid("tool_choice.function.name", format!("`tools` has no `{name}`"));
    tools.into_iter().find(|tool| tool.name == name).ok_or_else(unknown)
}

impl ToolDemand {
    /// Returns the grammar of the calls that are demanded.
    pub(crate) fn grammar(
        &self,
        model: &ServedModel,
        rules: &ToolRules,
        reasoning: Option<ReasoningRules>,
    ) -> Result<AskedGrammar, AcceptError> {
        let count = if self.is_named || rules.calls_max == 1 { CallCount::One } else { CallCount::OneOrMore };
        let calls = ForcedCalls {
            tools: &self.tools,
            format: rules.format,
            count,
            reasoning,
            tokenizer: &model.tokenizer,
        };
        let schema = |tool: &ForcedTool| AskedSchema {
            param: tool.param.clone(),
            grammar: sources::json_schema(&tool.parameters.to_string()),
        };
        let schemas = self.tools.iter().map(schema).collect();
        Ok(AskedGrammar { schemas, ..AskedGrammar::new("tool_choice", calls.grammar()?) })
    }
}

/// Reads a tool: its name, and its parameters. A tool without a schema has no parameters.
fn tool_of(path: &str, tool: &Value) -> Result<ForcedTool, AcceptError> {
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
    let parameters = tool.pointer("/function/parameters").filter(|schema| !schema.is_null());
    let path_of_schema = format!("{path}.function.parameters");
    if parameters.is_some_and(|schema| !schema.is_object() && !schema.is_boolean()) {
        return Err(AcceptError::invalid(path_of_schema, "a schema is an object"));
    }
    let properties = parameters.and_then(|schema| schema.get("properties")).and_then(Value::as_object);
    let typed = properties.into_iter().flatten().filter(|(_, schema)| !is_text(schema));
    let typed: BTreeSet<String> = typed.map(|(name, _)| name.clone()).collect();
    let none = || json!({"type": "object", "properties": {}, "additionalProperties": false});
    let parameters = parameters.cloned().unwrap_or_else(none);
    Ok(ForcedTool { name, parameters, param: path_of_schema, typed })
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
