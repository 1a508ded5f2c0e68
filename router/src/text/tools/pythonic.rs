//! `[f(a="x", b=1), g()]` as the whole answer: Llama 4, and Llama 3.2 with a template of its own.

use std::sync::Arc;

use super::call_rules::{CallSyntax, ForcedTool, LarkRules, parameters, unenforced};
use super::python_value::{PythonExtent, json_of};
use super::{CallReader, Calls, Progress, ToolSet};
use crate::error::AcceptError;

pub(super) const START: &str = "<|python_start|>";
pub(super) const END: &str = "<|python_end|>";

#[derive(Debug)]
pub(super) struct Pythonic {
    tools: Arc<ToolSet>,
    state: State,
    /// Whether the list stands between tags.
    is_tagged: bool,
    name: String,
    n_arguments: usize,
}

#[derive(Debug)]
enum State {
    Start,
    Name(String),
    /// The name of an argument, or the end of the call.
    Argument(String),
    Value(PythonExtent),
    AfterCall,
    /// The closing tag after the list.
    Close(String),
}

impl Pythonic {
    pub(super) fn new(marker: &str, tools: Arc<ToolSet>) -> Self {
        let is_tagged = marker == START;
        let state = if is_tagged { State::Start } else { State::Name(String::new()) };
        Self { tools, state, is_tagged, name: String::new(), n_arguments: 0 }
    }

    fn read_name(&mut self, mut name: String, c: char) -> Progress {
        self.state = match c {
            '(' if self.tools.has(&name) => {
                (self.name, self.n_arguments) = (name, 0);
                State::Argument(String::new())
            }
            c if c.is_whitespace() && name.is_empty() => State::Name(name),
            c => {
                name.push(c);
                if !self.tools.has_beginning(&name) {
                    return Progress::NotACall;
                }
                State::Name(name)
            }
        };
        Progress::More
    }

    fn read_argument(&mut self, mut name: String, c: char, calls: &mut Calls) -> Progress {
        self.state = match c {
            '=' if !name.is_empty() => {
                if self.n_arguments == 0 {
                    calls.begin(&self.name);
                }
                calls.arguments(if self.n_arguments == 0 { "{" } else { ", " });
                self.n_arguments += 1;
                calls.arguments(&serde_json::Value::from(name.trim_end()).to_string());
                calls.arguments(": ");
                State::Value(PythonExtent::default())
            }
            ')' if name.is_empty() => return self.end_call(calls),
            c if c.is_whitespace() && name.is_empty() => State::Argument(name),
            c if c.is_alphanumeric() || c == '_' || c.is_whitespace() => {
                name.push(c);
                State::Argument(name)
            }
            _ => return Progress::NotACall,
        };
        Progress::More
    }

    fn read_value(&mut self, mut extent: PythonExtent, c: char, calls: &mut Calls) -> Progress {
        if !extent.read(c) {
            self.state = State::Value(extent);
            return Progress::More;
        }
        calls.arguments(&json_of(extent.text()));
        if c == ')' {
            return self.end_call(calls);
        }
        self.state = State::Argument(String::new());
        Progress::More
    }

    fn end_call(&mut self, calls: &mut Calls) -> Progress {
        if self.n_arguments == 0 {
            calls.begin(&self.name);
            calls.arguments("{");
        }
        calls.arguments("}");
        self.state = State::AfterCall;
        Progress::Taken
    }
}

impl CallReader for Pythonic {
    fn read(&mut self, c: char, calls: &mut Calls) -> Progress {
        match std::mem::replace(&mut self.state, State::Start) {
            State::Start if c == '[' => self.state = State::Name(String::new()),
            State::Start if c.is_whitespace() => {}
            State::Name(name) => return self.read_name(name, c),
            State::Argument(name) => return self.read_argument(name, c, calls),
            State::Value(extent) => return self.read_value(extent, c, calls),
            State::AfterCall => match c {
                ',' => self.state = State::Name(String::new()),
                ']' if self.is_tagged => {
                    self.state = State::Close(String::new());
                    return Progress::Taken;
                }
                ']' => return Progress::Ended(String::new()),
                c if c.is_whitespace() => self.state = State::AfterCall,
                _ => return Progress::NotACall,
            },
            State::Start => return Progress::NotACall,
            State::Close(mut read) => {
                read.push(c);
                if read.trim_start() == END {
                    return Progress::Ended(String::new());
                }
                if !END.starts_with(read.trim_start()) {
                    return Progress::Ended(read);
                }
                self.state = State::Close(read);
            }
        }
        Progress::More
    }
}

/// The format's name in refusals.
const FORMAT: &str = "pythonic";

/// Returns the syntax of calls that are demanded. Values are written as JSON, which the reader takes like Python's.
pub(super) fn forced(rules: &mut LarkRules<'_>, tools: &[ForcedTool]) -> Result<CallSyntax, AcceptError> {
    let call = |tool: &ForcedTool| {
        let head = LarkRules::literal(&format!("{}(", tool.name));
        Ok(format!("{head} {} {}", forced_arguments(rules, tool)?, LarkRules::literal(")")))
    };
    let calls = tools.iter().map(call).collect::<Result<_, AcceptError>>()?;
    let [before, between, after] = ["[", ", ", "]"].map(LarkRules::literal);
    Ok(CallSyntax { before, calls, between, after })
}

/// Adds the arguments of a tool in the order of its schema, from the last to the first: for each place, what may follow
/// if an argument was written before, and if none was.
fn forced_arguments(rules: &mut LarkRules<'_>, tool: &ForcedTool) -> Result<String, AcceptError> {
    let (mut first, mut later) = ("\"\"".to_owned(), "\"\"".to_owned());
    for parameter in parameters(tool, FORMAT)?.iter().rev() {
        let is_identifier = |name: &str| name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
        if parameter.name.is_empty() || !is_identifier(parameter.name) {
            return Err(unenforced(&tool.param, &format!("properties.{}", parameter.name), FORMAT));
        }
        let head = LarkRules::literal(&format!("{}=", parameter.name));
        let pair = format!("{head} {}", rules.json(&parameter.schema, &parameter.param)?);
        let (with_first, with_later) = (format!("{pair} {later}"), format!("\", \" {pair} {later}"));
        if parameter.is_required {
            (first, later) = (rules.add(&with_first), rules.add(&with_later));
        } else {
            first = rules.add(&format!("{with_first} | {first}"));
            later = rules.add(&format!("{with_later} | {later}"));
        }
    }
    Ok(first)
}
