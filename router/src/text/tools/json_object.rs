//! Reads a call that is written as a JSON object: `{"name": "f", "arguments": {…}}`.

use std::sync::Arc;

use super::{Calls, Progress, ToolSet};

/// Finds the end of a JSON value, one character at a time. It counts brackets and quotes, and checks nothing
/// else.
#[derive(Debug, Default)]
pub(super) struct JsonExtent {
    depth: usize,
    in_string: bool,
    is_escaped: bool,
    has_begun: bool,
}

/// The position of a character in a JSON value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Extent {
    Inside,
    Last,
    /// The character is not part of the value, which ended before it: a number or a word has no end of its
    /// own.
    After,
}

impl JsonExtent {
    pub(super) fn read(&mut self, c: char) -> Extent {
        let is_first = !std::mem::replace(&mut self.has_begun, true);
        if self.in_string {
            self.in_string = self.is_escaped || c != '"';
            self.is_escaped = !self.is_escaped && c == '\\';
            return if self.in_string || self.depth > 0 { Extent::Inside } else { Extent::Last };
        }
        match c {
            '"' if self.depth > 0 || is_first => self.in_string = true,
            '{' | '[' if self.depth > 0 || is_first => self.depth += 1,
            '}' | ']' if self.depth > 0 => {
                self.depth -= 1;
                if self.depth == 0 {
                    return Extent::Last;
                }
            }
            _ if self.depth > 0 => {}
            c if !(c.is_alphanumeric() || "+-.".contains(c)) => return Extent::After,
            _ => {}
        }
        Extent::Inside
    }
}

/// Reads one call that is an object. An object with other keys is not a call.
#[derive(Debug)]
pub(super) struct CallObject {
    tools: Arc<ToolSet>,
    state: State,
    name: Option<String>,
    /// The arguments that came before the name, or as a string.
    early: String,
    has_begun: bool,
}

#[derive(Debug)]
enum State {
    Start,
    BeforeKey,
    Key(String),
    Colon(Key),
    Value(Value),
    AfterValue,
}

/// The value of a key while it is read.
#[derive(Debug)]
struct Value {
    key: Key,
    extent: JsonExtent,
    text: String,
    /// Whether the value goes to the client as it comes: arguments that are an object, after the name.
    passes: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Key {
    Name,
    Arguments,
    Other,
}

const KEYS: &[(&str, Key)] = &[
    ("name", Key::Name),
    ("arguments", Key::Arguments),
    ("parameters", Key::Arguments),
    ("type", Key::Other),
    ("id", Key::Other),
];

impl Value {
    fn of(key: Key) -> Self {
        Self { key, extent: JsonExtent::default(), text: String::new(), passes: false }
    }
}

impl CallObject {
    pub(super) fn new(tools: Arc<ToolSet>) -> Self {
        Self { tools, state: State::Start, name: None, early: String::new(), has_begun: false }
    }

    /// Takes the object's opening bracket as read.
    pub(super) fn open(&mut self) {
        self.state = State::BeforeKey;
    }

    /// Returns `Ended` with no text after the object's last character.
    pub(super) fn read(&mut self, c: char, calls: &mut Calls) -> Progress {
        let state = std::mem::replace(&mut self.state, State::AfterValue);
        let next = match state {
            State::Key(key) => return self.read_key(key, c),
            State::Value(value) => return self.read_value(value, c, calls),
            state if c.is_whitespace() => state,
            State::Start if c == '{' => State::BeforeKey,
            State::BeforeKey if c == '"' => State::Key(String::new()),
            State::Colon(key) if c == ':' => State::Value(Value::of(key)),
            State::AfterValue if c == ',' => State::BeforeKey,
            State::AfterValue if c == '}' => return self.end(calls),
            _ => return Progress::NotACall,
        };
        self.state = next;
        Progress::More
    }

    fn read_key(&mut self, mut key: String, c: char) -> Progress {
        if c == '"' {
            let Some((_, key)) = KEYS.iter().find(|(name, _)| *name == key) else {
                return Progress::NotACall;
            };
            self.state = State::Colon(*key);
            return Progress::More;
        }
        key.push(c);
        if !KEYS.iter().any(|(name, _)| name.starts_with(&key)) {
            return Progress::NotACall;
        }
        self.state = State::Key(key);
        Progress::More
    }

    fn read_value(&mut self, mut value: Value, c: char, calls: &mut Calls) -> Progress {
        if !value.extent.has_begun {
            if c.is_whitespace() {
                self.state = State::Value(value);
                return Progress::More;
            }
            value.passes = value.key == Key::Arguments && c == '{' && self.name.is_some() && !self.has_begun;
        }
        let position = value.extent.read(c);
        if value.passes {
            self.begin(calls);
            calls.argument(c);
        } else if position != Extent::After {
            value.text.push(c);
        }
        if position == Extent::Inside {
            self.state = State::Value(value);
            return Progress::More;
        }
        if !value.passes && !self.take(value.key, &value.text, calls) {
            return Progress::NotACall;
        }
        self.state = State::AfterValue;
        if position == Extent::After { self.read(c, calls) } else { Progress::More }
    }

    /// Takes a complete value. Returns whether it can be a call's.
    fn take(&mut self, key: Key, text: &str, calls: &mut Calls) -> bool {
        match key {
            Key::Name => match serde_json::from_str::<String>(text) {
                Ok(name) if self.tools.has(&name) && !self.has_begun => {
                    self.name = Some(name);
                    if !self.early.is_empty() {
                        self.begin(calls);
                    }
                    true
                }
                _ => false,
            },
            Key::Arguments if self.has_begun => false,
            Key::Arguments => match written_out(text) {
                Some(arguments) => {
                    self.early = arguments;
                    if self.name.is_some() {
                        self.begin(calls);
                    }
                    true
                }
                None => false,
            },
            Key::Other => true,
        }
    }

    fn begin(&mut self, calls: &mut Calls) {
        if let Some(name) = self.name.as_deref().filter(|_| !self.has_begun) {
            calls.begin(name);
            calls.arguments(&self.early);
            self.has_begun = true;
        }
    }

    fn end(&mut self, calls: &mut Calls) -> Progress {
        if self.name.is_none() {
            return Progress::NotACall;
        }
        if !self.has_begun {
            self.early.push_str("{}");
            self.begin(calls);
        }
        Progress::Ended(String::new())
    }
}

/// Returns the arguments' object: some models write it as a string, and `null` if there are no arguments.
fn written_out(value: &str) -> Option<String> {
    let text = match value.chars().next()? {
        '{' => return Some(value.to_owned()),
        '"' => serde_json::from_str(value).ok()?,
        _ => value.to_owned(),
    };
    if text == "null" || text.is_empty() {
        return Some("{}".to_owned());
    }
    serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(&text).ok().map(|_| text)
}
