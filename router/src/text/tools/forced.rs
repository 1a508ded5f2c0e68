//! The grammar of an answer that is tool calls and nothing else: for a client that demands a call.
//!
//! Each format's file has the syntax of its calls. This file joins them, after the reasoning of models that reason. A
//! grammar that the client wrote comes after the reasoning too.

use grammar::{GrammarError, sources};
use types::Grammar;

use super::call_rules::{CallSyntax, ForcedTool, LarkRules};
use super::{ToolFormat, deepseek, hermes, llama3_json, mistral, pythonic, qwen3_coder};
use crate::error::AcceptError;
use crate::text::reasoning::ReasoningRules;
use crate::text::tokenizer::Tokenizer;

/// The number of calls in an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallCount {
    One,
    OneOrMore,
}

/// The calls that an answer must consist of.
#[derive(Debug)]
pub struct ForcedCalls<'a> {
    pub tools: &'a [ForcedTool],
    pub format: ToolFormat,
    pub count: CallCount,
    pub reasoning: Option<ReasoningRules>,
    pub tokenizer: &'a Tokenizer,
}

impl ForcedCalls<'_> {
    /// Returns the grammar. An error names a schema that the format cannot enforce.
    pub fn grammar(&self) -> Result<Grammar, AcceptError> {
        let mut rules = LarkRules::new(self.tokenizer);
        let CallSyntax { before, calls, between, after } = self.syntax(&mut rules)?;
        let call = rules.add(&calls.join(" | "));
        let more = match self.count {
            CallCount::One => String::new(),
            CallCount::OneOrMore => format!("({between} {call})*"),
        };
        let thought = self.reasoning.map(|reasoning| thought(&mut rules, &reasoning)).unwrap_or_default();
        let start = format!("start: {thought} {before} {call} {more} {after}");
        Ok(sources::lark(&format!("{start}\n{}", rules.into_text())))
    }

    fn syntax(&self, rules: &mut LarkRules<'_>) -> Result<CallSyntax, AcceptError> {
        match self.format {
            ToolFormat::Hermes => hermes::forced(rules, self.tools),
            ToolFormat::Llama3Json => llama3_json::forced(rules, self.tools),
            ToolFormat::Pythonic => pythonic::forced(rules, self.tools),
            ToolFormat::Mistral => mistral::forced(rules, self.tools),
            ToolFormat::Qwen3Coder => qwen3_coder::forced(rules, self.tools),
            ToolFormat::DeepSeek => deepseek::forced(rules, self.tools),
        }
    }
}

/// Returns the grammar of answers that follow `grammar` after the model's reasoning.
pub fn after_reasoning(
    grammar: &Grammar,
    reasoning: &ReasoningRules,
    tokenizer: &Tokenizer,
) -> Result<Grammar, GrammarError> {
    let mut rules = LarkRules::new(tokenizer);
    let thought = thought(&mut rules, reasoning);
    let answer = rules.add(&sources::symbol(grammar)?);
    Ok(sources::lark(&format!("start: {thought} {answer}\n{}", rules.into_text())))
}

/// Returns the symbols of the reasoning before the answer. It is left to the model, unless the prompt has begun it.
fn thought(rules: &mut LarkRules<'_>, reasoning: &ReasoningRules) -> String {
    let [open, close] = reasoning.tags.both();
    let rest = rules.text_until(close);
    let gap = r"/[ \t\r\n]{0,8}/";
    if reasoning.opened { format!("{rest} {gap}") } else { format!("({} {rest} {gap})?", rules.tag(open)) }
}

#[cfg(test)]
mod tests;
