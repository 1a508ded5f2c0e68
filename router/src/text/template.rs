//! Chat templates: from messages to the text that the model was trained on.
//!
//! Templates are written for Hugging Face's Jinja2. Rendered here, they give the same bytes: the settings, filters and
//! functions below are the ones that `transformers` gives them.

use std::collections::BTreeMap;

use jiff::Timestamp;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Value};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State};
use serde::Serialize;

use super::dialect;
use crate::error::AcceptError;

/// How the plain template, the one without a model, writes a chat.
const PLAIN: &str = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}\
    {% if add_generation_prompt %}<|assistant|>{% endif %}";
const CHAT: &str = "chat";
const CHAT_WITH_TOOLS: &str = "chat with tools";
/// The context variable that holds the time, for [`strftime_now`]. No template can name it by accident.
const NOW: &str = "baton now";

/// A compiled chat template, with the special tokens that it writes.
#[derive(Clone, Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    specials: Vec<(String, String)>,
}

/// What a template is rendered with. The values are the client's, unchanged.
#[derive(Clone, Debug)]
pub struct Chat {
    pub messages: Value,
    /// `none` when the request has no tools.
    pub tools: Value,
    /// More variables, for switches that only one model's template knows: `chat_template_kwargs`.
    pub variables: Vec<(String, Value)>,
    /// Whether the text ends where the model's answer begins.
    pub add_generation_prompt: bool,
    /// For templates that tell the model today's date.
    pub unix_seconds: i64,
}

impl ChatTemplate {
    /// Compiles a model's template. `specials` are variables such as `bos_token`, as in `tokenizer_config.json`.
    pub fn new(source: &str, specials: Vec<(String, String)>) -> Result<Self, Error> {
        let mut environment = environment()?;
        environment.add_template_owned(CHAT, dialect::translated(source).into_owned())?;
        Ok(Self { environment, specials })
    }

    /// Some models have a template of its own for chats with tools.
    pub fn with_tools(mut self, source: &str) -> Result<Self, Error> {
        self.environment.add_template_owned(CHAT_WITH_TOOLS, dialect::translated(source).into_owned())?;
        Ok(self)
    }

    /// For models that were not trained on anything: `<|role|>content<|end|>` for each message.
    pub fn plain() -> Self {
        Self::new(PLAIN, Vec::new()).expect("it is a constant, and a test renders it")
    }

    /// The text of a chat, or why the template refuses it: unknown role, roles out of order, whatever it checks.
    pub fn render(&self, chat: Chat) -> Result<String, AcceptError> {
        self.template(&chat)
            .and_then(|template| template.render(self.context(chat)))
            .map_err(|error| AcceptError::Template { reason: reason(&error) })
    }

    fn template(&self, chat: &Chat) -> Result<minijinja::Template<'_, '_>, Error> {
        let with_tools = chat.tools.is_true().then(|| self.environment.get_template(CHAT_WITH_TOOLS).ok());
        with_tools.flatten().map_or_else(|| self.environment.get_template(CHAT), Ok)
    }

    /// Later entries win: a request cannot replace its own messages through `variables`.
    fn context(&self, chat: Chat) -> Value {
        let specials = self.specials.iter().map(|(name, token)| (name.clone(), Value::from(token)));
        let own = [
            ("messages".to_owned(), chat.messages),
            ("tools".to_owned(), chat.tools),
            ("add_generation_prompt".to_owned(), Value::from(chat.add_generation_prompt)),
            (NOW.to_owned(), Value::from(chat.unix_seconds)),
        ];
        chat.variables.into_iter().chain(specials).chain(own).collect::<BTreeMap<String, Value>>().into()
    }
}

fn environment() -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_unknown_method_callback(dialect::method);
    environment.add_filter("tojson", tojson);
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
    Ok(environment)
}

/// What the template's author wrote, without the place in the template: that is nothing to a client.
fn reason(error: &Error) -> String {
    error.detail().map_or_else(|| error.to_string(), str::to_owned)
}

fn raise_exception(message: String) -> Result<String, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

/// The date and time, as `strftime` writes them. In UTC: where a server stands says nothing about where its clients are.
fn strftime_now(state: &State<'_, '_>, format: &str) -> Result<String, Error> {
    let seconds = state.lookup(NOW).and_then(|now| i64::try_from(now).ok()).unwrap_or_default();
    let now = Timestamp::from_second(seconds).map_err(invalid)?;
    jiff::fmt::strtime::format(format, now).map_err(invalid)
}

/// JSON as Python's `json.dumps` writes it, and not escaped for HTML, as the built-in filter would.
fn tojson(value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let ensure_ascii: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let json = match indent {
        Some(n) => written(value, serde_json::ser::PrettyFormatter::with_indent(" ".repeat(n).as_bytes()))?,
        None => written(value, PythonSpacing)?,
    };
    Ok(if ensure_ascii.unwrap_or(false) { ascii(&json) } else { json })
}

fn written(value: &Value, formatter: impl serde_json::ser::Formatter) -> Result<String, Error> {
    let mut json = Vec::new();
    value.serialize(&mut serde_json::Serializer::with_formatter(&mut json, formatter)).map_err(invalid)?;
    String::from_utf8(json).map_err(invalid)
}

/// Characters beyond ASCII as `\uXXXX`, in pairs where one is not enough. They can only stand inside strings.
fn ascii(json: &str) -> String {
    let mut units = [0; 2];
    json.chars().fold(String::with_capacity(json.len()), |mut text, character| {
        if character.is_ascii() {
            text.push(character);
        } else {
            character
                .encode_utf16(&mut units)
                .iter()
                .for_each(|unit| text.push_str(&format!("\\u{unit:04x}")));
        }
        text
    })
}

fn invalid(error: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::InvalidOperation, error.to_string())
}

/// `{"a": 1, "b": 2}`: Python puts a space after commas and colons.
struct PythonSpacing;

impl serde_json::ser::Formatter for PythonSpacing {
    fn begin_array_value<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, writer: &mut W) -> std::io::Result<()> {
        writer.write_all(b": ")
    }
}

#[cfg(test)]
mod tests;
