//! `<tool_call>{"name": "f", "arguments": {…}}</tool_call>`: Hermes, Qwen 2.5, Qwen 3 and others.

use std::sync::Arc;

use super::call_rules::{CallSyntax, ForcedTool, LarkRules};
use super::json_object::CallObject;
use super::{CallReader, Calls, Expected, Match, Progress, ToolSet};
use crate::error::AcceptError;

pub(super) const OPEN: &str = "<tool_call>";
pub(super) const CLOSE: &str = "</tool_call>";

#[derive(Debug)]
pub(super) struct Hermes {
    object: CallObject,
    /// The closing tag, once the object is complete.
    close: Option<Expected>,
}

impl Hermes {
    pub(super) fn new(tools: Arc<ToolSet>) -> Self {
        Self { object: CallObject::new(tools), close: None }
    }
}

impl CallReader for Hermes {
    fn read(&mut self, c: char, calls: &mut Calls) -> Progress {
        if let Some(close) = &mut self.close {
            return match close.read(c, &[CLOSE]) {
                Match::More => Progress::More,
                Match::Whole(_) => Progress::Ended(String::new()),
                Match::Other(text) => Progress::Ended(text),
            };
        }
        match self.object.read(c, calls) {
            Progress::Ended(_) => {
                self.close = Some(Expected::default());
                Progress::More
            }
            progress => progress,
        }
    }
}

/// Returns the syntax of calls that are demanded.
pub(super) fn forced(rules: &mut LarkRules<'_>, tools: &[ForcedTool]) -> Result<CallSyntax, AcceptError> {
    let (open, close) = (rules.tag(OPEN), rules.tag(CLOSE));
    let call = |tool: &ForcedTool| {
        let head = LarkRules::literal(&format!("\n{{\"name\": \"{}\", \"arguments\": ", tool.name));
        let tail = LarkRules::literal("}\n");
        Ok(format!("{open} {head} {} {tail} {close}", rules.json_arguments(tool)?))
    };
    let calls = tools.iter().map(call).collect::<Result<_, AcceptError>>()?;
    Ok(CallSyntax { calls, between: LarkRules::literal("\n"), ..CallSyntax::default() })
}
