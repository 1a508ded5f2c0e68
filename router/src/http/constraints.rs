//! The request fields that constrain an answer: OpenAI's, vLLM's and SGLang's.

use std::collections::BTreeMap;

use grammar::sources;
use serde::Deserialize;
use serde_json::Value;
use types::Grammar;

use crate::error::AcceptError;
use crate::grammars::AskedGrammar;

/// The fields that constrain an answer. At most one of them may be set.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct ConstraintFields {
    response_format: Option<ResponseFormat>,
    structured_outputs: Option<StructuredOutputs>,
    guided_json: Option<Value>,
    guided_json_object: Option<bool>,
    guided_regex: Option<String>,
    guided_choice: Option<Vec<String>>,
    guided_grammar: Option<String>,
    json_schema: Option<Value>,
    regex: Option<String>,
}

#[derive(Debug, Deserialize)]
struct ResponseFormat {
    #[serde(rename = "type")]
    kind: String,
    json_schema: Option<NamedSchema>,
    /// The schema of a `json_object`, as other servers have it.
    schema: Option<Value>,
}

/// OpenAI's schema with a name. `strict` changes nothing: every schema is enforced.
#[derive(Debug, Deserialize)]
struct NamedSchema {
    schema: Option<Value>,
}

/// vLLM's `structured_outputs`.
#[derive(Debug, Default, Deserialize)]
struct StructuredOutputs {
    json: Option<Value>,
    json_object: Option<bool>,
    regex: Option<String>,
    choice: Option<Vec<String>>,
    grammar: Option<String>,
    #[serde(flatten)]
    others: BTreeMap<String, Value>,
}

impl ConstraintFields {
    /// Returns the grammar that the fields ask for.
    pub(crate) fn grammar(self) -> Result<Option<AskedGrammar>, AcceptError> {
        let mut asked = Vec::new();
        let format = self.response_format.map(ResponseFormat::grammar).transpose()?.flatten();
        asked.extend(format.map(|grammar| AskedGrammar::new("response_format", grammar)));
        asked.extend(self.structured_outputs.unwrap_or_default().grammars()?);
        asked.extend(schema("guided_json", self.guided_json));
        asked.extend(object("guided_json_object", self.guided_json_object));
        asked.extend(regex("guided_regex", self.guided_regex));
        asked.extend(choice("guided_choice", self.guided_choice)?);
        asked.extend(lark("guided_grammar", self.guided_grammar)?);
        asked.extend(schema("json_schema", self.json_schema));
        asked.extend(regex("regex", self.regex));
        match asked.as_slice() {
            [] | [_] => Ok(asked.pop()),
            [first, second, ..] => {
                let reason = format!("an answer has one grammar, and `{}` is one already", first.param);
                Err(AcceptError::invalid(second.param, reason))
            }
        }
    }
}

impl ResponseFormat {
    fn grammar(self) -> Result<Option<Grammar>, AcceptError> {
        let missing = || AcceptError::missing("response_format.json_schema.schema");
        self.refuse_others()?;
        match self.kind.as_str() {
            "text" => Ok(None),
            "json_object" => Ok(Some(self.schema.map_or_else(sources::json_object, of_schema))),
            "json_schema" => {
                let schema = self.json_schema.and_then(|named| named.schema).ok_or_else(missing)?;
                Ok(Some(of_schema(schema)))
            }
            _ => Err(AcceptError::unsupported(
                "response_format",
                "only `text`, `json_object` and `json_schema`",
            )),
        }
    }

    /// Refuses a schema that the type does not use.
    fn refuse_others(&self) -> Result<(), AcceptError> {
        let unused = |name: &str| {
            let reason = format!("not with the type `{}`", self.kind);
            Err(AcceptError::unsupported(format!("response_format.{name}"), reason))
        };
        match self.kind.as_str() {
            "text" | "json_object" if self.json_schema.is_some() => unused("json_schema"),
            "text" | "json_schema" if self.schema.is_some() => unused("schema"),
            _ => Ok(()),
        }
    }
}

impl StructuredOutputs {
    fn grammars(self) -> Result<Vec<AskedGrammar>, AcceptError> {
        let changes = |value: &Value| !matches!(value, Value::Null | Value::Bool(false));
        if let Some((name, _)) = self.others.iter().find(|(_, value)| changes(value)) {
            let param = format!("structured_outputs.{name}");
            return Err(AcceptError::unsupported(
                param,
                "only `json`, `json_object`, `regex`, `choice` and `grammar`",
            ));
        }
        let mut asked = Vec::new();
        asked.extend(schema("structured_outputs.json", self.json));
        asked.extend(object("structured_outputs.json_object", self.json_object));
        asked.extend(regex("structured_outputs.regex", self.regex));
        asked.extend(choice("structured_outputs.choice", self.choice)?);
        asked.extend(lark("structured_outputs.grammar", self.grammar)?);
        Ok(asked)
    }
}

// === from a field to a grammar ===

fn schema(param: &'static str, schema: Option<Value>) -> Option<AskedGrammar> {
    Some(AskedGrammar::new(param, of_schema(schema?)))
}

/// Returns the grammar of a schema, which may be written as an object or as JSON in a string.
fn of_schema(schema: Value) -> Grammar {
    match schema {
        Value::String(text) => sources::json_schema(&text),
        schema => sources::json_schema(&schema.to_string()),
    }
}

fn object(param: &'static str, is_asked: Option<bool>) -> Option<AskedGrammar> {
    is_asked?.then(|| AskedGrammar::new(param, sources::json_object()))
}

fn regex(param: &'static str, pattern: Option<String>) -> Option<AskedGrammar> {
    Some(AskedGrammar::new(param, sources::regex(&pattern?)))
}

fn choice(param: &'static str, texts: Option<Vec<String>>) -> Result<Option<AskedGrammar>, AcceptError> {
    texts.map(|texts| AskedGrammar::choice(param, &texts)).transpose()
}

fn lark(param: &'static str, text: Option<String>) -> Result<Option<AskedGrammar>, AcceptError> {
    text.map(|text| AskedGrammar::lark(param, &text)).transpose()
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use types::GrammarKind;

    use super::*;

    fn asked(fields: Value) -> Result<Option<AskedGrammar>, AcceptError> {
        serde_json::from_value::<ConstraintFields>(fields).expect("the right types").grammar()
    }

    #[test]
    fn each_field_is_a_grammar() {
        let schema = json!({"type": "object", "properties": {"b": {}, "a": {}}});
        let named = json!({"name": "n", "strict": true, "schema": schema});
        for (fields, kind, text) in [
            (
                json!({"response_format": {"type": "json_object"}}),
                GrammarKind::JsonSchema,
                r#"{"type":"object"}"#,
            ),
            (
                json!({"response_format": {"type": "json_schema", "json_schema": named}}),
                GrammarKind::JsonSchema,
                r#"{"type":"object","properties":{"b":{},"a":{}}}"#,
            ),
            (
                json!({"response_format": {"type": "json_object", "schema": {"required": ["a"]}}}),
                GrammarKind::JsonSchema,
                r#"{"required":["a"]}"#,
            ),
            (json!({"guided_json": "{}"}), GrammarKind::JsonSchema, "{}"),
            (json!({"json_schema": "{}"}), GrammarKind::JsonSchema, "{}"),
            (json!({"guided_json_object": true}), GrammarKind::JsonSchema, r#"{"type":"object"}"#),
            (json!({"guided_regex": "a+"}), GrammarKind::Regex, "a+"),
            (json!({"regex": "a+"}), GrammarKind::Regex, "a+"),
            (json!({"guided_choice": ["a", "\"b"]}), GrammarKind::Lark, r#"start: "a" | "\"b""#),
            (json!({"guided_grammar": "start: \"a\""}), GrammarKind::Lark, "start: \"a\""),
            (json!({"structured_outputs": {"json": {}}}), GrammarKind::JsonSchema, "{}"),
            (json!({"structured_outputs": {"regex": "a", "backend": null}}), GrammarKind::Regex, "a"),
            (json!({"structured_outputs": {"choice": ["a"]}}), GrammarKind::Lark, "start: \"a\""),
        ] {
            let grammar = asked(fields.clone()).expect("accepted").expect("a grammar").grammar;
            assert_eq!((grammar.kind(), grammar.text()), (kind, text), "{fields}");
        }
    }

    #[test]
    fn what_asks_for_nothing_is_no_grammar() {
        for fields in [
            json!({}),
            json!({"response_format": {"type": "text"}}),
            json!({"guided_json_object": false, "structured_outputs": {}}),
        ] {
            assert_eq!(asked(fields), Ok(None));
        }
    }

    #[test]
    fn what_is_not_built_is_refused_by_name() {
        for (fields, param) in [
            (json!({"response_format": {"type": "structural_tag"}}), "response_format"),
            (json!({"response_format": {"type": "json_schema"}}), "response_format.json_schema.schema"),
            (
                json!({"response_format": {"type": "text", "json_schema": {"schema": {}}}}),
                "response_format.json_schema",
            ),
            (json!({"response_format": {"type": "text", "schema": {}}}), "response_format.schema"),
            (json!({"response_format": {"type": "json_schema", "schema": {}}}), "response_format.schema"),
            (
                json!({"response_format": {"type": "json_object", "json_schema": {}}}),
                "response_format.json_schema",
            ),
            (json!({"structured_outputs": {"structural_tag": "x"}}), "structured_outputs.structural_tag"),
            (
                json!({"structured_outputs": {"whitespace_pattern": " "}}),
                "structured_outputs.whitespace_pattern",
            ),
            (json!({"guided_regex": "a", "guided_json": {}}), "guided_regex"),
            (json!({"guided_choice": []}), "guided_choice"),
            (json!({"guided_choice": ["", "a"]}), "guided_choice"),
            (json!({"guided_grammar": "root ::= \"a\""}), "guided_grammar"),
        ] {
            let error = asked(fields.clone()).expect_err("it would be ignored");
            assert_eq!(error.param(), param, "{fields}");
        }
    }
}
