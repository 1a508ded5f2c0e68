//! `<tool_call><function=f><parameter=a>…</parameter></function></tool_call>`: Qwen3-Coder.

use std::sync::Arc;

use super::call_rules::{CallSyntax, ForcedTool, LarkRules, NOTES, Parameter, parameters, unenforced};
use super::python_value::json_of;
use super::{CallReader, Calls, Expected, Match, Progress, ToolSet};
use crate::error::AcceptError;
use crate::text::tags::TagFinder;

pub(super) use super::hermes::{CLOSE, OPEN};
pub(super) const FUNCTION: &str = "<function=";
const FUNCTION_CLOSE: &str = "</function>";
const PARAMETER: &str = "<parameter=";
/// The end of a value. The line break before it is not part of the value.
const PARAMETER_CLOSE: &[&str] = &["</parameter>", "\n</parameter>"];

#[derive(Debug)]
pub(super) struct Qwen3Coder {
    tools: Arc<ToolSet>,
    state: State,
    tool: String,
    n_parameters: usize,
}

#[derive(Debug)]
enum State {
    Open(Expected),
    Tool(String),
    /// Before a parameter, or the end of the function.
    Between(Expected),
    Parameter(String),
    Value(Value),
    Close(Expected),
}

/// The value of a parameter. A text goes to the client as it comes; other values wait for their end.
#[derive(Debug)]
struct Value {
    is_text: bool,
    /// Whether the next character is the first one, which may be a line break that is not part of the value.
    is_first: bool,
    text: String,
    end: TagFinder,
}

impl Qwen3Coder {
    pub(super) fn new(marker: &str, tools: Arc<ToolSet>) -> Self {
        let state = match marker {
            FUNCTION => State::Tool(String::new()),
            _ => State::Open(Expected::default()),
        };
        Self { tools, state, tool: String::new(), n_parameters: 0 }
    }

    fn read_tool(&mut self, mut name: String, c: char, calls: &mut Calls) -> Progress {
        if c == '>' {
            if !self.tools.has(&name) {
                return Progress::NotACall;
            }
            calls.begin(&name);
            self.tool = name;
            self.state = State::Between(Expected::default());
            return Progress::More;
        }
        name.push(c);
        if !self.tools.has_beginning(&name) {
            return Progress::NotACall;
        }
        self.state = State::Tool(name);
        Progress::More
    }

    fn read_between(&mut self, mut next: Expected, c: char, calls: &mut Calls) -> Progress {
        self.state = match next.read(c, &[PARAMETER, FUNCTION_CLOSE]) {
            Match::More => State::Between(next),
            Match::Whole(PARAMETER) => State::Parameter(String::new()),
            Match::Whole(_) => {
                calls.arguments(if self.n_parameters == 0 { "{}" } else { "}" });
                State::Close(Expected::default())
            }
            Match::Other(_) => return Progress::NotACall,
        };
        Progress::More
    }

    fn read_parameter(&mut self, mut name: String, c: char, calls: &mut Calls) -> Progress {
        if c != '>' {
            name.push(c);
            self.state = State::Parameter(name);
            return Progress::More;
        }
        calls.arguments(if self.n_parameters == 0 { "{" } else { ", " });
        self.n_parameters += 1;
        calls.arguments(&quoted(&name));
        calls.arguments(": ");
        let is_text = self.tools.is_text(&self.tool, &name);
        if is_text {
            calls.arguments("\"");
        }
        let end = TagFinder::default();
        self.state = State::Value(Value { is_text, is_first: true, text: String::new(), end });
        Progress::More
    }

    fn read_value(&mut self, mut value: Value, c: char, calls: &mut Calls) -> Progress {
        let is_first = std::mem::replace(&mut value.is_first, false);
        if is_first && c == '\n' {
            self.state = State::Value(value);
            return Progress::More;
        }
        let is_whole = value.end.push(c, PARAMETER_CLOSE, &mut value.text).is_some();
        if value.is_text {
            let json = quoted(&std::mem::take(&mut value.text));
            calls.arguments(&json[1..json.len() - 1]);
        }
        if !is_whole {
            self.state = State::Value(value);
            return Progress::More;
        }
        let rest = if value.is_text { "\"".to_owned() } else { json_of(&value.text) };
        calls.arguments(&rest);
        self.state = State::Between(Expected::default());
        Progress::More
    }
}

fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

impl CallReader for Qwen3Coder {
    fn read(&mut self, c: char, calls: &mut Calls) -> Progress {
        match std::mem::replace(&mut self.state, State::Close(Expected::default())) {
            State::Open(mut open) => match open.read(c, &[FUNCTION]) {
                Match::More => self.state = State::Open(open),
                Match::Whole(_) => self.state = State::Tool(String::new()),
                Match::Other(_) => return Progress::NotACall,
            },
            State::Tool(name) => return self.read_tool(name, c, calls),
            State::Between(next) => return self.read_between(next, c, calls),
            State::Parameter(name) => return self.read_parameter(name, c, calls),
            State::Value(value) => return self.read_value(value, c, calls),
            State::Close(mut close) => match close.read(c, &[CLOSE]) {
                Match::More => self.state = State::Close(close),
                Match::Whole(_) => return Progress::Ended(String::new()),
                Match::Other(text) => return Progress::Ended(text),
            },
        }
        Progress::More
    }
}

// === calls that are demanded ===

/// The format's name in refusals.
const FORMAT: &str = "qwen3-coder";
const VALUE_END: &str = PARAMETER_CLOSE[0];

/// Returns the syntax of calls that are demanded.
pub(super) fn forced(rules: &mut LarkRules<'_>, tools: &[ForcedTool]) -> Result<CallSyntax, AcceptError> {
    let (open, close) = (rules.tag(OPEN), rules.tag(CLOSE));
    let call = |tool: &ForcedTool| {
        let head = LarkRules::literal(&format!("\n{FUNCTION}{}>\n", tool.name));
        let mut arguments = String::new();
        for parameter in parameters(tool, FORMAT)? {
            let written = forced_parameter(rules, tool, &parameter)?;
            arguments.push_str(&if parameter.is_required { written } else { format!("({written})?") });
            arguments.push(' ');
        }
        let tail = LarkRules::literal(&format!("{FUNCTION_CLOSE}\n"));
        Ok(format!("{open} {head} {arguments} {tail} {close}"))
    };
    let calls = tools.iter().map(call).collect::<Result<_, AcceptError>>()?;
    Ok(CallSyntax { calls, between: LarkRules::literal("\n"), ..CallSyntax::default() })
}

fn forced_parameter(
    rules: &mut LarkRules<'_>,
    tool: &ForcedTool,
    parameter: &Parameter<'_>,
) -> Result<String, AcceptError> {
    if parameter.name.is_empty() || parameter.name.contains(['<', '>', '\n']) {
        return Err(unenforced(&tool.param, &format!("properties.{}", parameter.name), FORMAT));
    }
    let head = LarkRules::literal(&format!("{PARAMETER}{}>\n", parameter.name));
    let tail = LarkRules::literal(&format!("\n{VALUE_END}\n"));
    if !tool.is_text(parameter.name) {
        return Ok(format!("{head} {} {tail}", rules.json(&parameter.schema, &parameter.param)?));
    }
    match forced_texts(parameter)? {
        Some(texts) => Ok(format!("{head} ({}) {tail}", texts.join(" | "))),
        None => Ok(format!("{head} {} \"\\n\"", rules.text_until(VALUE_END))),
    }
}

/// Returns the texts that a parameter may have; `None`: any text. Other rules for a text are refused.
fn forced_texts(parameter: &Parameter<'_>) -> Result<Option<Vec<String>>, AcceptError> {
    let refused = |key: &str| unenforced(&parameter.param, key, FORMAT);
    if parameter.schema == false {
        return Err(AcceptError::invalid(parameter.param.clone(), "no value is valid by the schema `false`"));
    }
    let mut texts = None;
    for (key, value) in parameter.schema.as_object().into_iter().flatten() {
        let allowed: &[serde_json::Value] = match (key.as_str(), value) {
            ("const", value) => std::slice::from_ref(value),
            ("enum", serde_json::Value::Array(values)) => values,
            ("type" | "$defs" | "definitions", _) => continue,
            (key, _) if NOTES.contains(&key) => continue,
            (key, _) => return Err(refused(key)),
        };
        let text = |value: &serde_json::Value| {
            let text = value.as_str().filter(|text| !text.contains(VALUE_END));
            text.map(LarkRules::literal).ok_or_else(|| refused(key))
        };
        if texts.is_some() || allowed.is_empty() {
            return Err(refused(key));
        }
        texts = Some(allowed.iter().map(text).collect::<Result<_, _>>()?);
    }
    Ok(texts)
}
