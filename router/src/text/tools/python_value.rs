//! Values of Python in calls: where they end, and the same values as JSON.

use serde_json::{Map, Number, Value};

/// Finds the end of an argument's value: the first `,` or `)` outside its strings and brackets.
#[derive(Debug, Default)]
pub(super) struct PythonExtent {
    text: String,
    depth: usize,
    quote: Option<char>,
    is_escaped: bool,
}

impl PythonExtent {
    /// Returns whether the value ended before this character.
    pub(super) fn read(&mut self, c: char) -> bool {
        match self.quote {
            Some(quote) => {
                let ends = !self.is_escaped && c == quote;
                self.is_escaped = !self.is_escaped && c == '\\';
                self.quote = self.quote.filter(|_| !ends);
            }
            None => match c {
                ',' | ')' if self.depth == 0 => return true,
                '"' | '\'' => self.quote = Some(c),
                '[' | '(' | '{' => self.depth += 1,
                ']' | ')' | '}' => self.depth = self.depth.saturating_sub(1),
                _ => {}
            },
        }
        self.text.push(c);
        false
    }

    pub(super) fn text(&self) -> &str {
        &self.text
    }
}

/// Returns the JSON of a value that is written in JSON or Python. Other texts become strings.
pub(super) fn json_of(text: &str) -> String {
    let text = text.trim();
    if serde_json::from_str::<serde::de::IgnoredAny>(text).is_ok() {
        return text.to_owned();
    }
    let mut literal = Literal { rest: text };
    let value = literal.value(0).filter(|_| literal.rest.trim().is_empty());
    value.unwrap_or_else(|| text.into()).to_string()
}

/// Limit of the depth of lists and dictionaries.
const DEPTH_MAX: usize = 32;

/// Reads a literal of Python.
struct Literal<'a> {
    rest: &'a str,
}

const WORDS: &[(&str, Value)] = &[
    ("True", Value::Bool(true)),
    ("False", Value::Bool(false)),
    ("None", Value::Null),
    ("true", Value::Bool(true)),
    ("false", Value::Bool(false)),
    ("null", Value::Null),
];

impl Literal<'_> {
    fn value(&mut self, depth: usize) -> Option<Value> {
        self.rest = self.rest.trim_start();
        match self.rest.chars().next()? {
            _ if depth > DEPTH_MAX => None,
            quote @ ('"' | '\'') => self.string(quote).map(Value::String),
            '[' => self.items(']', |literal| literal.value(depth + 1)).map(Value::Array),
            '(' => self.items(')', |literal| literal.value(depth + 1)).map(Value::Array),
            '{' => self.items('}', |literal| literal.entry(depth + 1)).map(Map::from_iter).map(Value::Object),
            _ => self.word(),
        }
    }

    fn entry(&mut self, depth: usize) -> Option<(String, Value)> {
        let quote = self.rest.chars().next().filter(|quote| "\"'".contains(*quote))?;
        let key = self.string(quote)?;
        self.rest = self.rest.trim_start().strip_prefix(':')?;
        Some((key, self.value(depth)?))
    }

    fn items<T>(&mut self, end: char, item: impl Fn(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        let mut items = Vec::new();
        self.rest = &self.rest[1..];
        loop {
            self.rest = self.rest.trim_start();
            if let Some(rest) = self.rest.strip_prefix(end) {
                self.rest = rest;
                return Some(items);
            }
            items.push(item(self)?);
            self.rest = self.rest.trim_start();
            match self.rest.strip_prefix(',') {
                Some(rest) => self.rest = rest,
                None if self.rest.starts_with(end) => {}
                None => return None,
            }
        }
    }

    fn string(&mut self, quote: char) -> Option<String> {
        let mut text = String::new();
        let mut characters = self.rest[1..].chars();
        loop {
            match characters.next()? {
                c if c == quote => break,
                '\\' => match characters.next()? {
                    'n' => text.push('\n'),
                    't' => text.push('\t'),
                    'r' => text.push('\r'),
                    c @ ('\\' | '\'' | '"') => text.push(c),
                    c => text.extend(['\\', c]),
                },
                c => text.push(c),
            }
        }
        self.rest = characters.as_str();
        Some(text)
    }

    fn word(&mut self) -> Option<Value> {
        let is_part = |c: char| c.is_alphanumeric() || "+-._".contains(c);
        let end = self.rest.find(|c| !is_part(c)).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest;
        let known = WORDS.iter().find(|(name, _)| *name == word).map(|(_, value)| value.clone());
        known.or_else(|| word.parse::<Number>().ok().map(Value::Number))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn python_becomes_json() {
        for (python, json) in [
            ("\"a\"", "\"a\""),
            ("'it\\'s \\n'", r#""it's \n""#),
            ("[1, -2.5, True, None,]", "[1,-2.5,true,null]"),
            ("{'a': ('b', {})}", r#"{"a":["b",{}]}"#),
            ("{\"a\": 1,  \"b\": [true]}", "{\"a\": 1,  \"b\": [true]}"),
            ("Paris", "\"Paris\""),
            ("'open", "\"'open\""),
            ("1 2", "\"1 2\""),
            ("[1, x]", "\"[1, x]\""),
            ("", "\"\""),
        ] {
            assert_eq!(json_of(python), json, "{python}");
        }
        let deep = "[".repeat(10_000);
        assert_eq!(json_of(&deep), format!("\"{deep}\""));
    }
}
