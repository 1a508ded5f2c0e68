//! Divides the text of a chat's answer into reasoning, text and tool calls.

use std::sync::Arc;

use types::TokenId;

use super::reasoning::{ReasoningParser, ReasoningRules};
use super::tokenizer::Tokenizer;
use super::tools::{CallDelta, CallIds, Calls, ToolFormat, ToolParser, ToolSet};

/// The parts of an answer, or of a piece of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Parts {
    pub reasoning: String,
    pub text: String,
    pub calls: Vec<CallDelta>,
}

/// How the answers to one request are divided.
#[derive(Clone, Debug)]
pub struct PartsRules {
    pub reasoning: Option<ReasoningRules>,
    pub tools: Option<ToolRules>,
}

#[derive(Clone, Debug)]
pub struct ToolRules {
    pub format: ToolFormat,
    pub tools: Arc<ToolSet>,
    /// The largest number of calls in one answer. Later calls are left out.
    pub calls_max: usize,
    /// A random number, for the ids of calls.
    pub seed: u64,
}

/// Divides one answer, as its text arrives.
#[derive(Debug)]
pub struct PartsParser {
    reasoning: Option<ReasoningParser>,
    includes_reasoning: bool,
    tools: Option<ToolParser>,
}

impl PartsRules {
    pub fn parser(&self, choice: usize) -> PartsParser {
        let reasoning = self.reasoning.map(ReasoningParser::new);
        let tools = self.tools.as_ref().map(|ToolRules { format, tools, calls_max, seed }| {
            let ids = CallIds { seed: *seed, choice, is_short: *format == ToolFormat::Mistral };
            ToolParser::new(*format, Arc::clone(tools), Calls::new(ids, *calls_max))
        });
        let includes_reasoning = self.reasoning.is_none_or(|rules| rules.included);
        PartsParser { reasoning, includes_reasoning, tools }
    }

    /// Returns the special tokens whose names the parser must see in the text.
    pub fn shown_tokens(&self, tokenizer: &Tokenizer) -> Vec<TokenId> {
        let tools = self.tools.iter().flat_map(|rules| rules.format.special_tokens());
        let reasoning = self.reasoning.iter().flat_map(|rules| rules.tags.both());
        tools.copied().chain(reasoning).filter_map(|name| tokenizer.special_named(name)).collect()
    }
}

impl PartsParser {
    /// Divides the next piece of the answer.
    pub fn push(&mut self, piece: String) -> Parts {
        let mut parts = Parts::default();
        let mut rest = String::new();
        match &mut self.reasoning {
            Some(parser) => parser.push(&piece, &mut parts.reasoning, &mut rest),
            None => rest = piece,
        }
        self.divide_calls(rest, &mut parts);
        self.leave_out(&mut parts);
        parts
    }

    /// Returns the parts that were held back, at the end of the answer.
    pub fn finish(&mut self) -> Parts {
        let mut parts = Parts::default();
        let mut rest = String::new();
        if let Some(parser) = &mut self.reasoning {
            parser.finish(&mut parts.reasoning, &mut rest);
        }
        self.divide_calls(rest, &mut parts);
        if let Some(parser) = &mut self.tools {
            parser.finish(&mut parts.text);
        }
        self.leave_out(&mut parts);
        parts
    }

    fn divide_calls(&mut self, rest: String, parts: &mut Parts) {
        match &mut self.tools {
            Some(parser) => parser.push(&rest, &mut parts.text, &mut parts.calls),
            None => parts.text = rest,
        }
    }

    fn leave_out(&self, parts: &mut Parts) {
        if !self.includes_reasoning {
            parts.reasoning.clear();
        }
    }
}

impl Parts {
    pub fn is_empty(&self) -> bool {
        self.reasoning.is_empty() && self.text.is_empty() && self.calls.is_empty()
    }

    /// Appends the parts of the next piece.
    pub fn add(&mut self, next: Self) {
        self.reasoning.push_str(&next.reasoning);
        self.text.push_str(&next.text);
        for delta in next.calls {
            match self.calls.last_mut() {
                Some(last) if last.index == delta.index => last.arguments.push_str(&delta.arguments),
                _ => self.calls.push(delta),
            }
        }
    }
}
