//! Chat templates convert messages to the text that a model was trained on.
//!
//! Templates are written for Hugging Face's Jinja2. This module has the settings, filters and functions of
//! `transformers`, so that the rendered bytes are the same.

mod python;

use std::collections::BTreeMap;

use jiff::Timestamp;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, filters, tests as builtin_tests};

use super::dialect;
use super::reasoning::ReasoningTags;
use super::tools::ToolFormat;
use crate::error::AcceptError;

/// The template of models without one of their own.
const PLAIN: &str = "{% if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}\
    Call a tool with <tool_call>{\"name\": NAME, \"arguments\": OBJECT}</tool_call><|end|>{% endif %}\
    {% for message in messages %}<|{{ message.role }}|>{{ message.content }}\
    {% for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|end|>{% endfor %}\
    {% if add_generation_prompt %}<|assistant|>{% endif %}";
const CHAT: &str = "chat";
const CHAT_WITH_TOOLS: &str = "chat with tools";
/// The name of the variable with the current time, for [`strftime_now`]. Its space keeps templates from using
/// the name.
const NOW: &str = "baton now";

/// A compiled chat template with its special tokens.
#[derive(Clone, Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    specials: Vec<(String, String)>,
    tool_format: Option<ToolFormat>,
    reasoning: Option<ReasoningTags>,
    arguments: ArgumentsForm,
}

/// The form in which a template expects the arguments of earlier tool calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArgumentsForm {
    Object,
    /// JSON in a string: the template joins it with other text.
    Text,
}

impl ArgumentsForm {
    fn of_template(source: &str) -> Self {
        let joins = ["['arguments'] +", "[\"arguments\"] +", ".arguments +"];
        if joins.iter().any(|text| source.contains(text)) { Self::Text } else { Self::Object }
    }
}

/// The variables of a template. Their values are the client's, unchanged.
#[derive(Clone, Debug)]
pub struct Chat {
    pub messages: Value,
    /// The tools of the request; `none` if it has none.
    pub tools: Value,
    /// Additional variables for a model's template: `chat_template_kwargs`.
    pub variables: Vec<(String, Value)>,
    /// Whether the text ends where the model's answer begins.
    pub add_generation_prompt: bool,
    /// The current time, for templates that contain the date.
    pub unix_seconds: i64,
}

impl ChatTemplate {
    /// Compiles a model's template. `specials` are variables such as `bos_token`, from
    /// `tokenizer_config.json`.
    pub fn new(source: &str, specials: Vec<(String, String)>) -> Result<Self, Error> {
        let mut environment = environment()?;
        environment.add_template_owned(CHAT, dialect::translated(source).into_owned())?;
        Ok(Self {
            environment,
            specials,
            tool_format: ToolFormat::of_template(source),
            reasoning: ReasoningTags::of_template(source),
            arguments: ArgumentsForm::of_template(source),
        })
    }

    /// Adds a separate template for chats with tools, which some models have.
    pub fn with_tools(mut self, source: &str) -> Result<Self, Error> {
        self.environment.add_template_owned(CHAT_WITH_TOOLS, dialect::translated(source).into_owned())?;
        self.tool_format = ToolFormat::of_template(source).or(self.tool_format);
        self.arguments = ArgumentsForm::of_template(source);
        Ok(self)
    }

    /// Replaces the format of tool calls that was found in the template.
    #[must_use]
    pub fn with_tool_format(self, format: ToolFormat) -> Self {
        Self { tool_format: Some(format), ..self }
    }

    /// Returns how the model writes tool calls; `None`: the template does not show it.
    pub fn tool_format(&self) -> Option<ToolFormat> {
        self.tool_format
    }

    /// Returns the tags around the model's reasoning; `None`: the model does not reason before its answer.
    pub fn reasoning(&self) -> Option<ReasoningTags> {
        self.reasoning
    }

    pub fn arguments(&self) -> ArgumentsForm {
        self.arguments
    }

    /// Makes the template of untrained models: `<|role|>content<|end|>` for each message.
    pub fn plain() -> Self {
        Self::new(PLAIN, Vec::new()).expect("the plain template is valid")
    }

    /// Renders a chat. An error is the template's own, such as an unknown role or a wrong order of roles.
    pub fn render(&self, chat: Chat) -> Result<String, AcceptError> {
        self.template(&chat)
            .and_then(|template| template.render(self.context(chat)))
            .map_err(|error| AcceptError::Template { reason: reason(&error) })
    }

    fn template(&self, chat: &Chat) -> Result<minijinja::Template<'_, '_>, Error> {
        let with_tools = chat.tools.is_true().then(|| self.environment.get_template(CHAT_WITH_TOOLS).ok());
        with_tools.flatten().map_or_else(|| self.environment.get_template(CHAT), Ok)
    }

    /// Makes the variables of a template. The last entry of a name counts, so `variables` cannot replace the
    /// request's own messages.
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
    environment.set_formatter(python::write);
    environment.add_filter("tojson", python::tojson);
    environment.add_filter("string", python::string);
    environment.add_filter("length", length);
    environment.add_filter("count", length);
    environment.add_test("iterable", is_iterable);
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
    Ok(environment)
}

/// The test `iterable`. In Jinja2, `none` is not iterable, and an undefined value is.
fn is_iterable(value: &Value) -> bool {
    !value.is_none() && builtin_tests::is_iterable(value)
}

/// The filter `length`. In Jinja2, an undefined value is empty.
fn length(value: &Value) -> Result<usize, Error> {
    if value.is_undefined() { Ok(0) } else { filters::length(value) }
}

/// Returns the error message of the template's author, without the position in the template.
fn reason(error: &Error) -> String {
    error.detail().map_or_else(|| error.to_string(), str::to_owned)
}

fn raise_exception(message: String) -> Result<String, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

/// Returns the date and time in `strftime` format, in UTC, because the server's time zone says nothing about
/// its clients.
fn strftime_now(state: &State<'_, '_>, format: &str) -> Result<String, Error> {
    let seconds = state.lookup(NOW).and_then(|now| i64::try_from(now).ok()).unwrap_or_default();
    let now = Timestamp::from_second(seconds).map_err(invalid)?;
    jiff::fmt::strtime::format(format, now).map_err(invalid)
}

fn invalid(error: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::InvalidOperation, error.to_string())
}

#[cfg(test)]
mod tests;
