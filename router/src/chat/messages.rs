//! The messages of a chat: checked, and converted to the form that chat templates expect.

use serde_json::{Map, Value};

use crate::error::AcceptError;
use crate::text::template::ArgumentsForm;

/// The largest number of messages in one chat.
pub(crate) const MESSAGES_MAX: usize = 4096;

/// Converts messages to the form that templates expect: a known role, content as one text, and arguments of
/// tool calls in the template's form. Other fields are kept, because a model's template may read them.
pub(crate) fn checked(
    messages: Vec<Map<String, Value>>,
    arguments: ArgumentsForm,
) -> Result<Vec<Value>, AcceptError> {
    if messages.is_empty() || messages.len() > MESSAGES_MAX {
        let reason = format!("from 1 to {MESSAGES_MAX} messages, not {}", messages.len());
        return Err(AcceptError::invalid("messages", reason));
    }
    let check =
        |(at, message)| checked_message(&format!("messages[{at}]"), message, arguments).map(Value::Object);
    messages.into_iter().enumerate().map(check).collect()
}

fn checked_message(
    path: &str,
    mut message: Map<String, Value>,
    arguments: ArgumentsForm,
) -> Result<Map<String, Value>, AcceptError> {
    let role = role(path, message.get("role"))?;
    let content = content(path, role, message.get_mut("content").map(Value::take))?;
    message.insert("role".to_owned(), role.into());
    message.insert("content".to_owned(), content.into());
    // vLLM's newer name for it.
    if let Some(reasoning) = message.get("reasoning").filter(|reasoning| !reasoning.is_null()).cloned() {
        message.entry("reasoning_content").or_insert(reasoning);
    }
    check_calls(&format!("{path}.tool_calls"), message.get("tool_calls"))?;
    if arguments == ArgumentsForm::Object
        && let Some(Value::Array(calls)) = message.get_mut("tool_calls")
    {
        calls.iter_mut().for_each(parse_arguments);
    }
    Ok(message)
}

/// Converts a role. `developer` is the newer name of `system`; templates do not have it.
fn role(path: &str, role: Option<&Value>) -> Result<&'static str, AcceptError> {
    let param = || format!("{path}.role");
    match role {
        None => Err(AcceptError::missing(param())),
        Some(Value::String(role)) => match role.as_str() {
            "system" | "developer" => Ok("system"),
            "user" => Ok("user"),
            "assistant" => Ok("assistant"),
            "tool" => Ok("tool"),
            other => Err(AcceptError::invalid(param(), format!("unknown role `{other}`"))),
        },
        Some(_) => Err(AcceptError::invalid(param(), "a role is a string")),
    }
}

/// Converts a message's content to one text. It is empty for an assistant message that only called tools.
fn content(path: &str, role: &str, content: Option<Value>) -> Result<String, AcceptError> {
    let param = || format!("{path}.content");
    match content {
        Some(Value::String(text)) => Ok(text),
        Some(Value::Array(parts)) => joined(&param(), &parts),
        None | Some(Value::Null) if role == "assistant" => Ok(String::new()),
        None | Some(Value::Null) => Err(AcceptError::missing(param())),
        Some(_) => Err(AcceptError::invalid(param(), "content is a string or a list of parts")),
    }
}

/// Joins the texts of a message's parts with line breaks.
fn joined(path: &str, parts: &[Value]) -> Result<String, AcceptError> {
    let texts: Result<Vec<&str>, AcceptError> =
        parts.iter().enumerate().map(|(at, part)| text(format!("{path}[{at}]"), part)).collect();
    Ok(texts?.join("\n"))
}

fn text(path: String, part: &Value) -> Result<&str, AcceptError> {
    match (part.get("type").and_then(Value::as_str), part.get("text").and_then(Value::as_str)) {
        (Some("text"), Some(text)) => Ok(text),
        (Some("text"), None) => Err(AcceptError::missing(path + ".text")),
        (Some(kind), _) => Err(AcceptError::unsupported(path + ".type", format!("only text, not `{kind}`"))),
        (None, _) => Err(AcceptError::missing(path + ".type")),
    }
}

/// Checks that the tool calls of a message are a list of calls with names.
fn check_calls(path: &str, calls: Option<&Value>) -> Result<(), AcceptError> {
    let calls = match calls {
        None | Some(Value::Null) => return Ok(()),
        Some(Value::Array(calls)) => calls,
        Some(_) => return Err(AcceptError::invalid(path.to_owned(), "expected a list")),
    };
    calls.iter().enumerate().try_for_each(|(at, call)| {
        let param = || format!("{path}[{at}].function.name");
        match call.pointer("/function/name") {
            None => Err(AcceptError::missing(param())),
            Some(name) if name.is_string() => Ok(()),
            Some(_) => Err(AcceptError::invalid(param(), "expected a string")),
        }
    })
}

/// Converts a tool call's arguments from a JSON string to an object, which templates expect. A call without arguments gets
/// an empty one. Other values stay as they are.
fn parse_arguments(call: &mut Value) {
    let Some(function) = call.get_mut("function").and_then(Value::as_object_mut) else { return };
    let arguments = function.entry("arguments").or_insert(Value::Null);
    if arguments.is_null() || arguments.as_str().is_some_and(|text| text.trim().is_empty()) {
        *arguments = Value::Object(Map::new());
    }
    let parsed = arguments.as_str().and_then(|text| serde_json::from_str(text).ok());
    if let Some(object @ Value::Object(_)) = parsed {
        *arguments = object;
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn check(messages: Value) -> Result<Value, AcceptError> {
        let messages = serde_json::from_value(messages).expect("a list of objects");
        checked(messages, ArgumentsForm::Object).map(Value::Array)
    }

    #[test]
    fn messages_become_what_templates_know() {
        for (given, expected) in [
            (json!({"role": "user", "content": "a"}), json!({"role": "user", "content": "a"})),
            (json!({"role": "developer", "content": "a"}), json!({"role": "system", "content": "a"})),
            (json!({"role": "assistant", "content": null}), json!({"role": "assistant", "content": ""})),
            (
                json!({"role": "user", "name": "x", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}),
                json!({"role": "user", "name": "x", "content": "a\nb"}),
            ),
            (
                json!({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{\"b\": 1, \"a\": 2}"}}]}),
                json!({"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"b": 1, "a": 2}}}]}),
            ),
            (
                json!({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": ""}}, {"function": {"name": "g"}}]}),
                json!({"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}, {"function": {"name": "g", "arguments": {}}}]}),
            ),
            (
                json!({"role": "assistant", "content": "a", "reasoning": "b"}),
                json!({"role": "assistant", "content": "a", "reasoning": "b", "reasoning_content": "b"}),
            ),
        ] {
            assert_eq!(check(json!([given])).expect("sane"), json!([expected]));
        }
    }

    #[test]
    fn refusals_name_the_place() {
        let user = json!({"role": "user", "content": "a"});
        for (bad, expected) in [
            (json!({"content": "a"}), "messages[1].role is required"),
            (json!({"role": 7, "content": "a"}), "messages[1].role: a role is a string"),
            (json!({"role": "wizard", "content": "a"}), "messages[1].role: unknown role `wizard`"),
            (json!({"role": "user"}), "messages[1].content is required"),
            (
                json!({"role": "user", "content": 7}),
                "messages[1].content: content is a string or a list of parts",
            ),
            (
                json!({"role": "user", "content": [{"type": "text"}]}),
                "messages[1].content[0].text is required",
            ),
            (
                json!({"role": "user", "content": [{"type": "image_url"}]}),
                "messages[1].content[0].type is not supported: only text, not `image_url`",
            ),
            (json!({"role": "assistant", "tool_calls": "a"}), "messages[1].tool_calls: expected a list"),
            (
                json!({"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}),
                "messages[1].tool_calls[0].function.name is required",
            ),
            (
                json!({"role": "assistant", "tool_calls": [{"function": {"name": 5}}]}),
                "messages[1].tool_calls[0].function.name: expected a string",
            ),
        ] {
            assert_eq!(check(json!([user, bad])).expect_err("refused").to_string(), expected);
        }
        assert_eq!(check(json!([])).expect_err("empty").param(), "messages");
    }
}
