//! Grammars from what clients send, and their form for llguidance.

use llguidance::api::TopLevelGrammar;
use llguidance::{JsonCompileOptions, regex_to_lark};
use serde_json::Value;
use types::{Grammar, GrammarKind, TokenId};

use crate::error::GrammarError;
use crate::formats;
use crate::limits::check_length;

/// White space between two tokens of JSON: a space, or a line break with indentation. Without an end a model could write
/// white space until its last token.
const WHITE_SPACE: &str = r" |\r?\n[ \t]{0,32}";
/// The beginning of a symbol that names tokens by their ids.
const TOKEN: &str = "<[";
/// The key with which llguidance's own options stand in a schema.
const OPTIONS_KEY: &str = "x-guidance";

/// Returns the grammar of answers that are valid by a JSON schema.
pub fn json_schema(schema: &str) -> Grammar {
    Grammar::new(GrammarKind::JsonSchema, schema)
}

/// Returns the grammar of answers that are a JSON object.
pub fn json_object() -> Grammar {
    json_schema(r#"{"type":"object"}"#)
}

/// Returns the grammar of answers that match a regular expression as a whole.
pub fn regex(pattern: &str) -> Grammar {
    Grammar::new(GrammarKind::Regex, pattern)
}

/// Returns the grammar of answers by a grammar in the language of Lark. `%json { … }` in it stands for JSON by a
/// schema.
pub fn lark(text: &str) -> Grammar {
    Grammar::new(GrammarKind::Lark, text)
}

/// Returns the grammar of answers that are one of these texts.
pub fn choice<'a>(texts: impl IntoIterator<Item = &'a str>) -> Grammar {
    let quoted: Vec<String> = texts.into_iter().map(quoted).collect();
    lark(&format!("start: {}", quoted.join(" | ")))
}

/// Returns a text as a literal in the language of Lark.
pub fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// Returns a token as a symbol in the language of Lark: for special tokens, which have no text.
pub fn token(id: TokenId) -> String {
    format!("{TOKEN}{}]>", id.0)
}

/// Returns a grammar in the language of Lark with the ids of special tokens in place of their names, such as
/// `<|user|>`; `None`: it names none.
pub fn with_token_ids(
    text: &str,
    id_of: impl Fn(&str) -> Option<TokenId>,
) -> Result<Option<Grammar>, GrammarError> {
    let (mut rest, mut written) = (text, String::new());
    while let Some(at) = rest.find(['"', '/', '#', '<']) {
        let (before, from) = rest.split_at(at);
        let (symbol, after) = from.split_at(symbol_length(from));
        written.push_str(before);
        match symbol.starts_with('<') && symbol.len() > 1 && !symbol.starts_with(TOKEN) {
            true => {
                let unknown = || GrammarError::Text(format!("the model has no special token `{symbol}`"));
                written.push_str(&token(id_of(symbol).ok_or_else(unknown)?));
            }
            false => written.push_str(symbol),
        }
        rest = after;
    }
    written.push_str(rest);
    Ok((written != text).then(|| lark(&written)))
}

/// Returns the length of the text, expression, comment or token at the beginning of `text`; 1 if it does not end.
fn symbol_length(text: &str) -> usize {
    let is_comment = text.starts_with('#') || text.starts_with("//");
    let first = text.as_bytes()[0];
    let mut is_escaped = false;
    for (at, byte) in text.bytes().enumerate().skip(1) {
        match byte {
            b'\n' if is_comment => return at,
            _ if is_comment => {}
            b'>' if first == b'<' => return at + 1,
            b'<' | b' ' | b'\t' | b'\r' | b'\n' if first == b'<' => return 1,
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = true,
            _ if byte == first => return at + 1,
            _ => {}
        }
    }
    if is_comment { text.len() } else { 1 }
}

/// Returns a grammar as a symbol in the language of Lark, so that it can be a part of another grammar.
pub fn symbol(grammar: &Grammar) -> Result<String, GrammarError> {
    match grammar.kind() {
        GrammarKind::JsonSchema => embedded_json(&schema(grammar.text())?),
        GrammarKind::Regex => Ok(format!("%lark {{\nstart: /{}/\n}}", regex_to_lark(grammar.text(), ""))),
        GrammarKind::Lark => Ok(format!("%lark {{\n{}\n}}", grammar.text())),
    }
}

/// Returns JSON by a schema as a symbol in the language of Lark.
pub fn embedded_json(schema: &Value) -> Result<String, GrammarError> {
    Ok(format!("%json {}", with_options(schema.clone())?))
}

/// Returns whether a grammar may name tokens by their ids.
pub(crate) fn names_tokens(grammar: &Grammar) -> bool {
    grammar.kind() == GrammarKind::Lark && grammar.text().contains(TOKEN)
}

/// Reads a grammar's text. Its meaning is checked by the compilation.
pub(crate) fn parsed(grammar: &Grammar) -> Result<TopLevelGrammar, GrammarError> {
    check_length(grammar.text())?;
    match grammar.kind() {
        GrammarKind::JsonSchema => of_schema(schema(grammar.text())?),
        GrammarKind::Regex => Ok(TopLevelGrammar::from_regex(grammar.text())),
        GrammarKind::Lark => Ok(TopLevelGrammar::from_lark(grammar.text().to_owned())),
    }
}

pub(crate) fn schema(text: &str) -> Result<Value, GrammarError> {
    serde_json::from_str(text).map_err(|error| GrammarError::NotJson(error.to_string()))
}

/// Returns the form of a schema for llguidance.
pub(crate) fn of_schema(schema: Value) -> Result<TopLevelGrammar, GrammarError> {
    with_options(schema).map(TopLevelGrammar::from_json_schema)
}

/// Adds the options of compilation to a schema, and the formats that llguidance enforces in part.
fn with_options(schema: Value) -> Result<Value, GrammarError> {
    let wrong = |reason: &str| GrammarError::Schema { place: String::new(), reason: reason.to_owned() };
    let mut schema = match schema {
        Value::Bool(true) => Value::Object(serde_json::Map::new()),
        Value::Bool(false) => return Err(wrong("no JSON is valid by the schema `false`")),
        Value::Object(_) => schema,
        _ => return Err(wrong("a schema is an object or a boolean")),
    };
    if schema.get(OPTIONS_KEY).is_some() {
        return Err(wrong("`x-guidance` is not supported"));
    }
    let options = JsonCompileOptions {
        whitespace_pattern: Some(WHITE_SPACE.to_owned()),
        ..JsonCompileOptions::default()
    };
    options.apply_to(&mut schema);
    formats::enforce(&mut schema);
    Ok(schema)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_tokens_become_ids_outside_of_texts() {
        let id_of = |name: &str| (name == "<|a|>").then_some(TokenId(7));
        for (text, expected) in [
            ("start: <|a|>", Some("start: <[7]>")),
            ("start: \"<|a|>\" <|a|> /<|a|>/", Some("start: \"<|a|>\" <[7]> /<|a|>/")),
            ("start: \"\\\"<|b|>\" /\\/<|b|>/ <[3]>", None),
            ("// <|b|>\n# \"\nstart: <|a|>", Some("// <|b|>\n# \"\nstart: <[7]>")),
            ("start: %json {\"const\": \"<|b|>\"}", None),
            ("start: \"a", None),
        ] {
            let written = with_token_ids(text, id_of).expect("known tokens");
            assert_eq!(written.as_ref().map(Grammar::text), expected, "{text}");
        }
        let error = with_token_ids("start: <|b|>", id_of).expect_err("unknown");
        assert_eq!(error.to_string(), "the model has no special token `<|b|>`");
    }
}
