//! DeepSeek V3.1's `f<｜tool▁sep｜>{…}`, and V3's and R1's `function<｜tool▁sep｜>f`, a line break and the
//! arguments in a code block.

use std::sync::Arc;

use super::call_rules::{CallSyntax, ForcedTool, LarkRules};
use super::json_object::{Extent, JsonExtent};
use super::{CallReader, Calls, Expected, Match, Progress, ToolSet};
use crate::error::AcceptError;
use crate::text::tags::TagFinder;

pub(super) const CALLS_BEGIN: &str = "<｜tool▁calls▁begin｜>";
const CALLS_END: &str = "<｜tool▁calls▁end｜>";
pub(super) const CALL_BEGIN: &str = "<｜tool▁call▁begin｜>";
const CALL_END: &str = "<｜tool▁call▁end｜>";
const SEPARATOR: &str = "<｜tool▁sep｜>";
pub(super) const SPECIAL: &[&str] = &[CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR];

/// Limit of the text before the arguments. Longer text is not a call.
const HEAD_BYTES_MAX: usize = 512;

#[derive(Debug)]
pub(super) struct DeepSeek {
    tools: Arc<ToolSet>,
    state: State,
}

#[derive(Debug)]
enum State {
    /// Before a call, or the end of all calls.
    Between(Expected),
    /// From the start of a call to its arguments.
    Head(String),
    Arguments(JsonExtent),
    /// After the arguments: the end of a code block, and of the call.
    Tail(TagFinder),
}

impl DeepSeek {
    pub(super) fn new(marker: &str, tools: Arc<ToolSet>) -> Self {
        let state = match marker {
            CALL_BEGIN => State::Head(String::new()),
            _ => State::Between(Expected::default()),
        };
        Self { tools, state }
    }

    /// Returns the tool's name in the text before the arguments.
    fn name(head: &str) -> Option<&str> {
        let (before, after) = head.split_once(SEPARATOR)?;
        match after.trim() {
            "" => Some(before.trim()),
            after => after.strip_suffix("```json").map(str::trim),
        }
    }

    fn read_head(&mut self, mut head: String, c: char, calls: &mut Calls) -> Progress {
        if c == '{' {
            let Some(name) = Self::name(&head).filter(|name| self.tools.has(name)) else {
                return Progress::NotACall;
            };
            calls.begin(name);
            return self.read_argument(JsonExtent::default(), c, calls);
        }
        head.push(c);
        if head.len() > HEAD_BYTES_MAX {
            return Progress::NotACall;
        }
        self.state = State::Head(head);
        Progress::More
    }

    fn read_argument(&mut self, mut extent: JsonExtent, c: char, calls: &mut Calls) -> Progress {
        calls.argument(c);
        self.state = match extent.read(c) {
            Extent::Inside => State::Arguments(extent),
            Extent::Last | Extent::After => State::Tail(TagFinder::default()),
        };
        Progress::More
    }
}

impl CallReader for DeepSeek {
    fn read(&mut self, c: char, calls: &mut Calls) -> Progress {
        match std::mem::replace(&mut self.state, State::Between(Expected::default())) {
            State::Between(mut next) => match next.read(c, &[CALL_BEGIN, CALLS_END]) {
                Match::More => {
                    self.state = State::Between(next);
                    Progress::More
                }
                Match::Whole(CALLS_END) => Progress::Ended(String::new()),
                Match::Whole(_) => {
                    self.state = State::Head(String::new());
                    Progress::More
                }
                Match::Other(_) => Progress::NotACall,
            },
            State::Head(head) => self.read_head(head, c, calls),
            State::Arguments(extent) => self.read_argument(extent, c, calls),
            State::Tail(mut end) => match end.push(c, &[CALL_END, CALLS_END], &mut String::new()) {
                Some(CALLS_END) => Progress::Ended(String::new()),
                Some(_) => Progress::Taken,
                None => {
                    self.state = State::Tail(end);
                    Progress::More
                }
            },
        }
    }
}

/// Returns the syntax of calls that are demanded. The model chooses between V3.1's and V3's.
pub(super) fn forced(rules: &mut LarkRules<'_>, tools: &[ForcedTool]) -> Result<CallSyntax, AcceptError> {
    let (begin, end, separator) = (rules.tag(CALL_BEGIN), rules.tag(CALL_END), rules.tag(SEPARATOR));
    let call = |tool: &ForcedTool| {
        let arguments = rules.json_arguments(tool)?;
        let newer = format!("{} {separator} {arguments}", LarkRules::literal(&tool.name));
        let head = LarkRules::literal(&format!("{}\n```json\n", tool.name));
        let older = format!("\"function\" {separator} {head} {arguments} {}", LarkRules::literal("\n```"));
        Ok(format!("{begin} ({newer} | {older}) {end}"))
    };
    let calls = tools.iter().map(call).collect::<Result<_, AcceptError>>()?;
    let between = format!("{}?", LarkRules::literal("\n"));
    Ok(CallSyntax { before: rules.tag(CALLS_BEGIN), calls, between, after: rules.tag(CALLS_END) })
}
