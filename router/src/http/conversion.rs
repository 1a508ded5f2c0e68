//! The common parts of the conversions of other endpoints' requests to chats.

use serde_json::{Map, Value};

use super::api::{HttpApi, ParsedRequest};
use super::chat::{self, ChatShape};
use super::error::{FieldNames, HttpError};
use crate::error::AcceptError;

/// Parses a request that has become a chat. An error has the endpoint's `names` of fields, and no position in the JSON,
/// which the client did not write.
pub(super) fn parse_chat(
    api: &HttpApi,
    chat: Map<String, Value>,
    names: FieldNames,
) -> Result<ParsedRequest<ChatShape>, HttpError> {
    let parsed = chat::parse_request(api, Value::Object(chat).to_string().as_bytes());
    parsed.map_err(|error| {
        let error = error.renamed(names);
        match error.message.rsplit_once(" at line ") {
            Some((message, place)) if is_position(place) => {
                HttpError { message: message.to_owned(), ..error }
            }
            _ => error,
        }
    })
}

/// Returns whether a text is the end of a position that `serde_json` writes: `3 column 14`.
fn is_position(text: &str) -> bool {
    text.split_once(" column ").is_some_and(|both| [both.0, both.1].iter().all(|n| n.parse::<u32>().is_ok()))
}

/// Moves fields that a chat has too, with their names there.
pub(super) fn moved(fields: &mut Map<String, Value>, names: &[(&str, &str)]) -> Map<String, Value> {
    let moved =
        names.iter().filter_map(|(name, in_chat)| Some(((*in_chat).to_owned(), fields.remove(*name)?)));
    moved.collect()
}

/// Moves the list of tools, each converted by `tool_of`, which gets its path in the request.
pub(super) fn move_tools(
    fields: &mut Map<String, Value>,
    chat: &mut Map<String, Value>,
    tool_of: fn(&str, Value) -> Result<Value, AcceptError>,
) -> Result<(), AcceptError> {
    let Some(tools) = present(fields.remove("tools")) else { return Ok(()) };
    let tools = list("tools", tools)?.into_iter().enumerate();
    let tools = tools.map(|(at, tool)| tool_of(&format!("tools[{at}]"), tool));
    chat.insert("tools".to_owned(), tools.collect::<Result<Vec<_>, _>>()?.into());
    Ok(())
}

/// Returns a value that is not `null`.
pub(super) fn present(value: Option<Value>) -> Option<Value> {
    value.filter(|value| !value.is_null())
}

pub(super) fn list(path: &str, value: Value) -> Result<Vec<Value>, AcceptError> {
    items(path, value, "expected a list")
}

/// Returns the blocks of content that may be a string too.
pub(super) fn blocks(path: &str, content: Value) -> Result<Vec<Value>, AcceptError> {
    items(path, content, "expected a string or a list")
}

fn items(path: &str, value: Value, otherwise: &'static str) -> Result<Vec<Value>, AcceptError> {
    match value {
        Value::Array(items) => Ok(items),
        _ => Err(AcceptError::invalid(path.to_owned(), otherwise)),
    }
}

/// Returns the text in a field of the object at `path`.
pub(super) fn text_of(path: &str, object: &Value, name: &str) -> Result<String, AcceptError> {
    match object.get(name) {
        None | Some(Value::Null) => Err(AcceptError::missing(format!("{path}.{name}"))),
        Some(Value::String(text)) => Ok(text.clone()),
        Some(_) => Err(AcceptError::invalid(format!("{path}.{name}"), "expected a string")),
    }
}

/// Returns the `type` of an object; empty if it has none.
pub(super) fn kind(object: &Value) -> &str {
    object.get("type").and_then(Value::as_str).unwrap_or_default()
}

/// Makes the error for an object of a type that is not supported.
pub(super) fn only(param: String, known: &str, kind: &str) -> AcceptError {
    AcceptError::unsupported(param, format!("only {known}, not `{kind}`"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_positions_of_the_parser_are_cut_off() {
        for (text, expected) in [("1 column 43", true), ("x column 2", false), ("b`", false)] {
            assert_eq!(is_position(text), expected, "{text}");
        }
    }
}
