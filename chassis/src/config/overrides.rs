//! Settings from the environment.

use serde_json::Value as Json;
use toml::{Table, Value};

use super::RESERVED;
use super::service_links::ServiceLinks;
use crate::error::{ConfigError, ConfigProblem, Origin};

const PREFIX: &str = "BATON_";
const SEPARATOR: &str = "__";

/// An environment variable that sets one key of the configuration.
pub(super) struct Override {
    pub(super) variable: String,
    path: Vec<String>,
    value: Value,
}

/// Returns the variables that are settings, sorted by name so that the result does not depend on their order.
pub(super) fn read(env: impl IntoIterator<Item = (String, String)>, known: &Json) -> Vec<Override> {
    let mut variables: Vec<_> = env.into_iter().filter(|(name, _)| is_setting(name)).collect();
    variables.sort();
    let links = ServiceLinks::of(&variables);
    let is_link = |(name, text): &&(String, String)| !is_known(name, known) && links.include(name, text);
    let settings = variables.iter().filter(|variable| !is_link(variable));
    settings.map(|(name, text)| Override::new(name.clone(), text.clone(), known)).collect()
}

/// Returns whether the variable names an existing section or setting; if so, it is not a Service's variable.
fn is_known(name: &str, known: &Json) -> bool {
    path(name).first().is_some_and(|section| known.get(section).is_some())
}

/// Returns the section and the key that a variable names.
fn path(variable: &str) -> Vec<String> {
    let name = variable.strip_prefix(PREFIX).unwrap_or(variable);
    name.split(SEPARATOR).map(str::to_lowercase).collect()
}

/// Returns whether the variable names an existing setting rather than a section.
pub(super) fn names_a_setting(variable: &str, known: &Json) -> bool {
    let value = path(variable).iter().try_fold(known, |value, key| value.get(key));
    value.is_some_and(|value| !value.is_object())
}

fn is_setting(name: &str) -> bool {
    name.starts_with(PREFIX) && !RESERVED.contains(&name)
}

impl Override {
    fn new(variable: String, text: String, known: &Json) -> Self {
        let path = path(&variable);
        let default = path.iter().try_fold(known, |value, key| value.get(key));
        let value = if matches!(default, Some(Json::String(_))) { Value::String(text) } else { typed(text) };
        Self { variable, path, value }
    }

    /// Writes the value into `table` and creates the sections that lead to it.
    pub(super) fn apply(&self, table: &mut Table) -> Result<(), ConfigError> {
        let Some((key, sections)) = self.path.split_last() else { return Ok(()) };
        let mut table = table;
        for section in sections {
            let entry = table.entry(section.clone()).or_insert_with(|| Value::Table(Table::new()));
            table = entry.as_table_mut().ok_or_else(|| self.not_a_section(section))?;
        }
        table.insert(key.clone(), self.value.clone());
        Ok(())
    }

    /// Returns whether the value at `path` came from this variable.
    pub(super) fn covers(&self, path: &str) -> bool {
        let own = self.path.join(".");
        path == own || path.strip_prefix(&own).is_some_and(|rest| rest.starts_with(['.', '[']))
    }

    fn not_a_section(&self, section: &str) -> ConfigError {
        ConfigError::Setting {
            origin: Origin::Env(self.variable.clone()),
            key: self.path.join("."),
            problem: ConfigProblem::Value(format!("`{section}` is not a section")),
        }
    }
}

fn typed(text: String) -> Value {
    let line: Result<Table, _> = format!("value = {text}").parse();
    // Accepts one key only, because a text with a line break could add a second one.
    match line {
        Ok(mut table) if table.len() == 1 => table.remove("value").unwrap_or(Value::String(text)),
        _ => Value::String(text),
    }
}
