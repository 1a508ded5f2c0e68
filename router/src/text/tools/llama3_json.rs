//! `{"name": "f", "parameters": {…}}` as the whole answer, several with `;` between: Llama 3.1 to 3.3.

use std::sync::Arc;

use super::call_rules::{CallSyntax, ForcedTool, LarkRules};
use super::json_object::CallObject;
use super::{CallReader, Calls, Progress, ToolSet};
use crate::error::AcceptError;

pub(super) const PYTHON_TAG: &str = "<|python_tag|>";

#[derive(Debug)]
pub(super) struct Llama3Json {
    tools: Arc<ToolSet>,
    object: CallObject,
    /// Whether the next object has not begun: only white space and `;` may come before it.
    between: bool,
}

impl Llama3Json {
    pub(super) fn new(marker: &str, tools: Arc<ToolSet>) -> Self {
        let object = CallObject::new(Arc::clone(&tools));
        let mut reader = Self { tools, object, between: false };
        if marker == "{" {
            reader.object.open();
        }
        reader
    }
}

impl CallReader for Llama3Json {
    fn read(&mut self, c: char, calls: &mut Calls) -> Progress {
        if self.between && (c.is_whitespace() || c == ';') {
            return Progress::More;
        }
        self.between = false;
        match self.object.read(c, calls) {
            Progress::Ended(_) => {
                self.object = CallObject::new(Arc::clone(&self.tools));
                self.between = true;
                Progress::Taken
            }
            progress => progress,
        }
    }
}

/// Returns the syntax of calls that are demanded.
pub(super) fn forced(rules: &mut LarkRules<'_>, tools: &[ForcedTool]) -> Result<CallSyntax, AcceptError> {
    let call = |tool: &ForcedTool| {
        let head = LarkRules::literal(&format!("{{\"name\": \"{}\", \"parameters\": ", tool.name));
        Ok(format!("{head} {} {}", rules.json_arguments(tool)?, LarkRules::literal("}")))
    };
    let calls = tools.iter().map(call).collect::<Result<_, AcceptError>>()?;
    Ok(CallSyntax { calls, between: LarkRules::literal("; "), ..CallSyntax::default() })
}
