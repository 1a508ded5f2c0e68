//! Grammars from what clients send, and their form for llguidance.

use llguidance::JsonCompileOptions;
use llguidance::api::TopLevelGrammar;
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
