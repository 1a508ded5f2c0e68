//! Tool calls in a model's answers: one file per format, and the parser that divides calls from text.
//!
//! A call is divided from the text only if it has the format's form and names a tool of the request. Text
//! that only looks like a call stays text. The arguments of a call are not checked: they arrive as the model
//! wrote them. If the client demands a call, a grammar ([`ForcedCalls`]) enforces the form and the schemas.

mod call_rules;
mod calls;
mod deepseek;
mod forced;
mod hermes;
mod json_object;
mod llama3_json;
mod mistral;
mod parser;
mod pythonic;
mod python_value;
mod qwen3_coder;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

pub use call_rules::ForcedTool;
pub(super) use calls::Calls;
pub use calls::{CallDelta, CallIds, CallStart};
pub use forced::{CallCount, ForcedCalls, after_reasoning};
pub(super) use parser::ToolParser;

/// The tools of one request, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ToolSet {
    /// The parameters of each tool that are not texts. Only formats without JSON ask for them.
    tools: BTreeMap<String, BTreeSet<String>>,
}

impl ToolSet {
    /// Makes a set of tools, each with the names of its parameters that are not texts.
    pub fn new(tools: impl IntoIterator<Item = (String, BTreeSet<String>)>) -> Self {
        Self { tools: tools.into_iter().collect() }
    }

    fn has(&self, name: &str) -> bool {
        self.tools.contains_key(name)
    }

    /// Returns whether a tool's name begins with `start`.
    fn has_beginning(&self, start: &str) -> bool {
        self.tools.keys().any(|name| name.starts_with(start))
    }

    fn is_text(&self, tool: &str, parameter: &str) -> bool {
        self.tools.get(tool).is_none_or(|typed| !typed.contains(parameter))
    }
}

/// How a model writes tool calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolFormat {
    Hermes,
    Llama3Json,
    Pythonic,
    Mistral,
    Qwen3Coder,
    DeepSeek,
}

impl ToolFormat {
    /// The formats with their names in the setting `model.tool_format`.
    const NAMED: &[(&'static str, Self)] = &[
        ("hermes", Self::Hermes),
        ("llama3-json", Self::Llama3Json),
        ("pythonic", Self::Pythonic),
        ("mistral", Self::Mistral),
        ("qwen3-coder", Self::Qwen3Coder),
        ("deepseek", Self::DeepSeek),
    ];

    pub fn named(name: &str) -> Option<Self> {
        Self::NAMED.iter().find(|(known, _)| *known == name).map(|(_, format)| *format)
    }

    pub fn names() -> impl Iterator<Item = &'static str> {
        Self::NAMED.iter().map(|(name, _)| *name)
    }

    /// Finds the format in a chat template, by the text that the template instructs the model to write.
    pub fn of_template(source: &str) -> Option<Self> {
        let has = |text: &str| source.contains(text);
        if has("<tool_call>") {
            return Some(if has("<function=") { Self::Qwen3Coder } else { Self::Hermes });
        }
        if has(mistral::MARKER) {
            return Some(Self::Mistral);
        }
        if has(deepseek::CALLS_BEGIN) {
            return Some(Self::DeepSeek);
        }
        if has("[func_name1(") {
            return Some(Self::Pythonic);
        }
        let is_llama = has("<|start_header_id|>") && has("\"parameters\"");
        (is_llama || has(llama3_json::PYTHON_TAG)).then_some(Self::Llama3Json)
    }

    /// Returns the special tokens that the parser must see. Other special tokens are not part of the text.
    pub fn special_tokens(self) -> &'static [&'static str] {
        match self {
            Self::Hermes => &[hermes::OPEN, hermes::CLOSE],
            Self::Qwen3Coder => &[qwen3_coder::OPEN, qwen3_coder::CLOSE],
            Self::Llama3Json => &[llama3_json::PYTHON_TAG],
            Self::Pythonic => &[pythonic::START, pythonic::END],
            Self::Mistral => mistral::SPECIAL,
            Self::DeepSeek => deepseek::SPECIAL,
        }
    }

    /// Returns the texts that may begin a call at this place.
    fn markers(self, place: Place) -> &'static [&'static str] {
        match (self, place) {
            (Self::Hermes, _) => &[hermes::OPEN],
            (Self::Qwen3Coder, _) => &[qwen3_coder::OPEN, qwen3_coder::FUNCTION],
            (Self::Llama3Json, Place::Start) => &[llama3_json::PYTHON_TAG, "{"],
            (Self::Llama3Json, Place::Inside) => &[llama3_json::PYTHON_TAG],
            (Self::Pythonic, Place::Start) => &[pythonic::START, "["],
            (Self::Pythonic, Place::Inside) => &[pythonic::START],
            (Self::Mistral, _) => &[mistral::MARKER],
            (Self::DeepSeek, _) => &[deepseek::CALLS_BEGIN, deepseek::CALL_BEGIN],
        }
    }

    /// Returns the reader of the text after a marker.
    fn reader(self, marker: &str, tools: &Arc<ToolSet>) -> Box<dyn CallReader> {
        let tools = Arc::clone(tools);
        match self {
            Self::Hermes => Box::new(hermes::Hermes::new(tools)),
            Self::Llama3Json => Box::new(llama3_json::Llama3Json::new(marker, tools)),
            Self::Pythonic => Box::new(pythonic::Pythonic::new(marker, tools)),
            Self::Mistral => Box::new(mistral::Mistral::new(tools)),
            Self::Qwen3Coder => Box::new(qwen3_coder::Qwen3Coder::new(marker, tools)),
            Self::DeepSeek => Box::new(deepseek::DeepSeek::new(marker, tools)),
        }
    }
}

/// A place in an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// No text came before, except white space and calls.
    Start,
    Inside,
}

/// Reads the text after a marker, one character at a time, and writes the calls in it.
///
/// A reader that has begun a call cannot make it text again, so it begins a call only when the name is known
/// and the arguments have begun.
trait CallReader: fmt::Debug + Send {
    fn read(&mut self, c: char, calls: &mut Calls) -> Progress;
}

/// The state of a reader after a character.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Progress {
    More,
    /// All text so far belongs to calls, and another call may follow without a marker.
    Taken,
    /// The calls are complete. The given text, which the reader has read already, is not part of them.
    Ended(String),
    /// The text since the last call is not a call.
    NotACall,
}

/// Reads a fixed text after white space, one character at a time.
#[derive(Debug, Default)]
struct Expected {
    read: String,
}

/// The state of an expected text after a character.
enum Match {
    More,
    /// This text of the expected ones is complete.
    Whole(&'static str),
    /// The text read, without the white space before it, is none of the expected ones.
    Other(String),
}

impl Expected {
    fn read(&mut self, c: char, texts: &[&'static str]) -> Match {
        if self.read.is_empty() && c.is_whitespace() {
            return Match::More;
        }
        self.read.push(c);
        if let Some(text) = texts.iter().find(|text| **text == self.read) {
            self.read.clear();
            return Match::Whole(text);
        }
        if texts.iter().any(|text| text.starts_with(&self.read)) {
            return Match::More;
        }
        Match::Other(std::mem::take(&mut self.read))
    }
}
