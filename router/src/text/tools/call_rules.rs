//! The parts of a grammar of tool calls, from which each format's file makes the syntax of its calls.

use std::collections::BTreeSet;

use grammar::sources;
use serde_json::{Map, Value, json};

use crate::error::AcceptError;
use crate::text::tokenizer::Tokenizer;

/// A tool that the answer may call.
#[derive(Clone, Debug)]
pub struct ForcedTool {
    pub name: String,
    /// The schema of its arguments.
    pub parameters: Value,
    /// The field that contained the schema.
    pub param: String,
    /// The parameters that are not texts.
    pub typed: BTreeSet<String>,
}

impl ForcedTool {
    /// Returns whether the reader of a format without JSON takes a parameter as a text.
    pub(super) fn is_text(&self, parameter: &str) -> bool {
        !self.typed.contains(parameter)
    }
}

/// How an answer of several calls is written, in symbols of the grammar.
#[derive(Debug, Default)]
pub(super) struct CallSyntax {
    pub(super) before: String,
    /// The alternatives of one call.
    pub(super) calls: Vec<String>,
    pub(super) between: String,
    pub(super) after: String,
}

// === the text of a grammar ===

/// The rules of a grammar in the language of Lark, as they are written.
#[derive(Debug)]
pub(super) struct LarkRules<'a> {
    tokenizer: &'a Tokenizer,
    n: usize,
    text: String,
}

impl<'a> LarkRules<'a> {
    pub(super) fn new(tokenizer: &'a Tokenizer) -> Self {
        Self { tokenizer, n: 0, text: String::new() }
    }

    /// Returns the rules, one a line.
    pub(super) fn into_text(self) -> String {
        self.text
    }

    /// Returns a text as a symbol.
    pub(super) fn literal(text: &str) -> String {
        sources::quoted(text)
    }

    /// Returns a tag of the format as a symbol: some tokenizers have it as a special token.
    pub(super) fn tag(&self, tag: &str) -> String {
        self.tokenizer.special_named(tag).map_or_else(|| Self::literal(tag), sources::token)
    }

    pub(super) fn has_special(&self, tag: &str) -> bool {
        self.tokenizer.special_named(tag).is_some()
    }

    /// Adds a rule and returns its name.
    pub(super) fn add(&mut self, body: &str) -> String {
        let name = self.name();
        self.text.push_str(&format!("{name}: {body}\n"));
        name
    }

    /// Adds any text that ends with its first `end`, and returns its symbols.
    pub(super) fn text_until(&mut self, end: &str) -> String {
        if self.has_special(end) {
            return format!("/(.|\\n)*/ {}", self.tag(end));
        }
        let name = self.name();
        self.text.push_str(&format!("{name}[suffix={}]: /(.|\\n)*/\n", Self::literal(end)));
        name
    }

    /// Adds the arguments of a tool as a JSON object.
    pub(super) fn json_arguments(&mut self, tool: &ForcedTool) -> Result<String, AcceptError> {
        let schema = arguments_schema(tool)?;
        self.json(&schema, &tool.param)
    }

    /// Adds JSON by a schema, which the field `param` contained.
    pub(super) fn json(&mut self, schema: &Value, param: &str) -> Result<String, AcceptError> {
        let json = sources::embedded_json(schema);
        let json = json.map_err(|error| AcceptError::invalid(param.to_owned(), error.to_string()))?;
        Ok(self.add(&json))
    }

    fn name(&mut self) -> String {
        self.n += 1;
        format!("r{}", self.n)
    }
}

/// Returns the schema of a tool's arguments, which are an object.
fn arguments_schema(tool: &ForcedTool) -> Result<Value, AcceptError> {
    let wrong = || AcceptError::invalid(tool.param.clone(), "the arguments of a call are an object");
    match &tool.parameters {
        Value::Object(schema) => {
            let mut schema = schema.clone();
            let kind = schema.entry("type").or_insert_with(|| "object".into());
            if kind == "object" { Ok(schema.into()) } else { Err(wrong()) }
        }
        Value::Bool(true) => Ok(json!({"type": "object"})),
        _ => Err(wrong()),
    }
}

// === parameters one by one, for formats whose arguments are not JSON ===

/// One parameter of a tool.
#[derive(Debug)]
pub(super) struct Parameter<'a> {
    pub(super) name: &'a str,
    pub(super) is_required: bool,
    /// Its schema, with the definitions of the root.
    pub(super) schema: Value,
    /// The place of its schema in the request.
    pub(super) param: String,
}

/// The keys of a schema that describe parameters one by one. `additionalProperties` is always obeyed: no others are
/// written.
const DESCRIBED: &[&str] =
    &["type", "properties", "required", "additionalProperties", "$defs", "definitions"];
/// The keys of a schema that constrain nothing.
pub(super) const NOTES: &[&str] =
    &["title", "description", "default", "examples", "deprecated", "strict", "$schema", "$comment"];

/// Returns the parameters of a tool. A schema that says more than which parameters there are is refused.
pub(super) fn parameters<'a>(tool: &'a ForcedTool, format: &str) -> Result<Vec<Parameter<'a>>, AcceptError> {
    let Value::Object(schema) = &tool.parameters else {
        return arguments_schema(tool).map(|_| Vec::new());
    };
    arguments_schema(tool)?;
    let is_known = |key: &str| DESCRIBED.contains(&key) || NOTES.contains(&key);
    if let Some(key) = schema.keys().find(|key| !is_known(key)) {
        return Err(unenforced(&tool.param, key, format));
    }
    let properties = schema.get("properties").and_then(Value::as_object);
    let has = |name: &str| properties.is_some_and(|properties| properties.contains_key(name));
    let required: Vec<&str> = schema
        .get("required")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    if let Some(name) = required.iter().find(|name| !has(name)) {
        let reason = format!("`{name}` is required and has no schema");
        return Err(AcceptError::invalid(tool.param.clone(), reason));
    }
    let parameter = |(name, own): (&'a String, &Value)| Parameter {
        name,
        is_required: required.contains(&name.as_str()),
        schema: with_definitions(own, schema),
        param: format!("{}.properties.{name}", tool.param),
    };
    Ok(properties.into_iter().flatten().map(parameter).collect())
}

/// Returns the refusal of a schema's key that this format cannot enforce in a call.
pub(super) fn unenforced(param: &str, key: &str, format: &str) -> AcceptError {
    let reason = format!("the tool call format `{format}` cannot enforce it: use `tool_choice: \"auto\"`");
    AcceptError::unsupported(format!("{param}.{key}"), reason)
}

fn with_definitions(own: &Value, root: &Map<String, Value>) -> Value {
    let Value::Object(own) = own else { return own.clone() };
    let mut own = own.clone();
    for name in ["$defs", "definitions"] {
        if let Some(definitions) = root.get(name) {
            own.insert(name.to_owned(), definitions.clone());
        }
    }
    own.into()
}
