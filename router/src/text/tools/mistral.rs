//! `[TOOL_CALLS][{"name": "f", "arguments": {…}}]`, and since 2025 `[TOOL_CALLS]f[ARGS]{…}`: Mistral.

use std::sync::Arc;

use super::call_rules::{CallSyntax, ForcedTool, LarkRules};
use super::json_object::{CallObject, Extent, JsonExtent};
use super::{CallReader, Calls, Progress, ToolSet};
use crate::error::AcceptError;

pub(super) const MARKER: &str = "[TOOL_CALLS]";
const ARGS: &str = "[ARGS]";
const CALL_ID: &str = "[CALL_ID]";
pub(super) const SPECIAL: &[&str] = &[MARKER, ARGS, CALL_ID];

#[derive(Debug)]
pub(super) struct Mistral {
    tools: Arc<ToolSet>,
    state: State,
}

#[derive(Debug)]
enum State {
    Start,
    /// In a list of objects.
    Object(CallObject),
    AfterObject,
    /// The name, perhaps with an id after it, before the arguments.
    Name(String),
    Arguments(JsonExtent),
}

impl Mistral {
    pub(super) fn new(tools: Arc<ToolSet>) -> Self {
        Self { tools, state: State::Start }
    }

    fn object(&self) -> State {
        State::Object(CallObject::new(Arc::clone(&self.tools)))
    }

    /// Reads the text before the arguments: `f`, `f[ARGS]` or `f[CALL_ID]id[ARGS]`.
    fn read_name(&mut self, mut text: String, c: char, calls: &mut Calls) -> Progress {
        let name = text.split('[').next().unwrap_or_default().trim_end().to_owned();
        let rest = &text[name.len()..].trim();
        let is_whole =
            rest.is_empty() || *rest == ARGS || (rest.starts_with(CALL_ID) && rest.ends_with(ARGS));
        if c == '{' && is_whole && self.tools.has(&name) {
            calls.begin(&name);
            return self.read_argument(JsonExtent::default(), c, calls);
        }
        text.push(c);
        let name = text.split('[').next().unwrap_or_default().trim_end();
        if c == '{' || text.len() > NAME_BYTES_MAX || !self.tools.has_beginning(name) {
            return Progress::NotACall;
        }
        self.state = State::Name(text);
        Progress::More
    }

    fn read_argument(&mut self, mut extent: JsonExtent, c: char, calls: &mut Calls) -> Progress {
        calls.argument(c);
        match extent.read(c) {
            Extent::Inside => {
                self.state = State::Arguments(extent);
                Progress::More
            }
            Extent::Last | Extent::After => Progress::Ended(String::new()),
        }
    }
}

/// Limit of the text before the arguments. Longer text is not a call.
const NAME_BYTES_MAX: usize = 512;

impl CallReader for Mistral {
    fn read(&mut self, c: char, calls: &mut Calls) -> Progress {
        match std::mem::replace(&mut self.state, State::Start) {
            State::Start if c.is_whitespace() => Progress::More,
            State::Start if c == '[' => {
                self.state = self.object();
                Progress::More
            }
            State::Start => self.read_name(String::new(), c, calls),
            State::Name(text) => self.read_name(text, c, calls),
            State::Arguments(extent) => self.read_argument(extent, c, calls),
            State::Object(mut object) => match object.read(c, calls) {
                Progress::Ended(_) => {
                    self.state = State::AfterObject;
                    Progress::Taken
                }
                progress => {
                    self.state = State::Object(object);
                    progress
                }
            },
            State::AfterObject => match c {
                ']' => Progress::Ended(String::new()),
                ',' => {
                    self.state = self.object();
                    Progress::More
                }
                c if c.is_whitespace() => {
                    self.state = State::AfterObject;
                    Progress::More
                }
                _ => Progress::NotACall,
            },
        }
    }
}

/// Returns the syntax of calls that are demanded: the newer one for tokenizers that have its tokens.
pub(super) fn forced(rules: &mut LarkRules<'_>, tools: &[ForcedTool]) -> Result<CallSyntax, AcceptError> {
    let (marker, args) = (rules.tag(MARKER), rules.tag(ARGS));
    let is_newer = rules.has_special(ARGS);
    let call = |tool: &ForcedTool| {
        let arguments = rules.json_arguments(tool)?;
        if is_newer {
            return Ok(format!("{marker} {} {args} {arguments}", LarkRules::literal(&tool.name)));
        }
        let head = LarkRules::literal(&format!("{{\"name\": \"{}\", \"arguments\": ", tool.name));
        Ok(format!("{head} {arguments} {}", LarkRules::literal("}")))
    };
    let calls = tools.iter().map(call).collect::<Result<_, AcceptError>>()?;
    if is_newer {
        return Ok(CallSyntax { calls, ..CallSyntax::default() });
    }
    let (before, after) = (format!("{marker} \" \"? \"[\""), LarkRules::literal("]"));
    Ok(CallSyntax { before, calls, between: LarkRules::literal(", "), after })
}
