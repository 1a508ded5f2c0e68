//! The configuration of a process: one TOML file, overridden by the environment.
//!
//! Configuration has two types. This module parses the raw one with serde; every field has a default. The process
//! converts it to its own checked `Config`, and only that leaves the process's `config.rs`.
//!
//! The override rule: `BATON_SECTION__KEY=value` sets `key` in `[section]`, `BATON_KEY=value` a key outside all
//! sections. A value is parsed as TOML if it can be (`8000`, `true`, `["a"]`), and is a string otherwise. If the default
//! is a string, the value is always a string.
//!
//! An unknown setting, in the file or in the environment, is an error that suggests the nearest name.
//! Variables that kubelet sets for a Service whose name begins with `baton` are recognised and ignored.
//! Durations are integers with the unit in the key (`drain_ms`). Amounts of memory are
//! [`ByteSize`](crate::byte_size::ByteSize)s.

mod listening;
mod overrides;
mod service_links;
mod shown;
#[cfg(test)]
mod tests;

use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value as Json;
use toml::{Table, Value};

use crate::error::{ConfigError, ConfigProblem, Origin};
pub use listening::{ListenError, check_listening, host_and_port};
use overrides::Override;
pub use shown::{Shown, shown};

/// Variables with the prefix that are not settings: they are read before the configuration, or by tools.
pub const RESERVED: &[&str] = &["BATON_CONFIG", "BATON_LOG", "BATON_RANK_OF", "BATON_RANK_PLACE"];

/// Reads `R` from its defaults, then `file`, then the variables of `env` that start with `BATON_`.
pub fn load<R>(file: Option<&Path>, env: impl IntoIterator<Item = (String, String)>) -> Result<R, ConfigError>
where
    R: Default + Serialize + DeserializeOwned,
{
    let text = match file {
        Some(path) => std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { file: path.to_owned(), source })?,
        None => String::new(),
    };
    let origin = file.map_or(Origin::Defaults, |path| Origin::File(path.to_owned()));
    parse(&text, origin, env)
}

/// Parses `text` as a configuration file and applies the variables, as [`load`] does. Errors name `origin`.
pub fn parse<R>(
    text: &str,
    origin: Origin,
    env: impl IntoIterator<Item = (String, String)>,
) -> Result<R, ConfigError>
where
    R: Default + Serialize + DeserializeOwned,
{
    // JSON keeps the keys of settings whose default is `None`, which TOML drops; unknown keys are found by
    // comparison.
    let known = serde_json::to_value(R::default()).map_err(ConfigError::Defaults)?;
    let mut table: Table = text
        .parse()
        .map_err(|source| ConfigError::Syntax { origin: origin.clone(), source: Box::new(source) })?;
    let overrides = overrides::read(env, &known);
    for wanted in &overrides {
        wanted.apply(&mut table)?;
    }
    Loader { known, origin, overrides }.read(table)
}

/// Returns whether `variable` names a setting of `R`.
pub fn has_setting<R: Default + Serialize>(variable: &str) -> bool {
    serde_json::to_value(R::default()).is_ok_and(|known| overrides::names_a_setting(variable, &known))
}

/// The context of errors about settings: the known settings, and the origin of the values.
struct Loader {
    known: Json,
    origin: Origin,
    overrides: Vec<Override>,
}

impl Loader {
    fn read<R: DeserializeOwned>(&self, table: Table) -> Result<R, ConfigError> {
        let mut unread = Vec::new();
        let mut note = |path: serde_ignored::Path<'_>| unread.push(dotted(&path));
        let written = table.clone();
        let source = Value::Table(table);
        let watched = serde_ignored::Deserializer::new(source, &mut note);
        let raw = serde_path_to_error::deserialize(watched).map_err(|error| self.wrong_value(&error))?;
        match unread.first() {
            None => Ok(raw),
            Some(path) => Err(self.unknown(path, &first_setting(path, &written))),
        }
    }

    fn wrong_value(&self, error: &serde_path_to_error::Error<toml::de::Error>) -> ConfigError {
        let path = error.path().to_string();
        let reason = error.inner().message().to_owned();
        self.problem(&path, &path, ConfigProblem::Value(reason))
    }

    /// Makes the error for an unknown name: `path` may be an unknown section, `setting` the first setting in
    /// it.
    fn unknown(&self, path: &str, setting: &str) -> ConfigError {
        let known = paths(&self.known);
        if let Some(moved) = new_name(setting, &known) {
            return self.problem(setting, setting, ConfigProblem::Moved { to: moved });
        }
        self.problem(setting, path, ConfigProblem::Unknown { nearest: nearest(path, &known) })
    }

    /// Makes the error about `path`, with the file or variable that has the value at `setting`.
    fn problem(&self, setting: &str, path: &str, problem: ConfigProblem) -> ConfigError {
        let overridden = self.overrides.iter().rev().find(|wanted| wanted.covers(setting));
        let origin =
            overridden.map_or_else(|| self.origin.clone(), |wanted| Origin::Env(wanted.variable.clone()));
        ConfigError::Setting { origin, key: path.to_owned(), problem }
    }
}

/// Removes the `?` that marks an optional section in a path, because users do not write it.
fn dotted(path: &serde_ignored::Path<'_>) -> String {
    path.to_string().replace(".?", "")
}

/// Returns all keys of the defaults in dotted form; a section comes before its keys.
fn paths(known: &Json) -> Vec<String> {
    let mut found = Vec::new();
    collect_paths("", known, &mut found);
    found
}

fn collect_paths(prefix: &str, value: &Json, found: &mut Vec<String>) {
    let Json::Object(entries) = value else { return };
    for (key, value) in entries {
        let path = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
        found.push(path.clone());
        collect_paths(&path, value, found);
    }
}

/// Returns `path` itself, or the first setting in it if it is a section.
fn first_setting(path: &str, written: &Table) -> String {
    let mut keys = path.split('.');
    let first = keys.next().and_then(|key| written.get(key));
    let mut value = keys.try_fold(first, |value, key| Some(value?.get(key))).flatten();
    let mut setting = path.to_owned();
    while let Some((key, inner)) = value.and_then(Value::as_table).and_then(|table| table.iter().next()) {
        setting = format!("{setting}.{key}");
        value = Some(inner);
    }
    setting
}

/// Renamed settings: the old name and the new one.
const RENAMED: &[(&str, &str)] = &[("awake_us", "spin_us")];

/// The section of rarely changed settings: a former `[section] key` is `[expert.section] key`.
const EXPERT: &str = "expert";

/// Returns the current name of a setting that was renamed or moved to `[expert]`.
fn new_name(path: &str, known: &[String]) -> Option<String> {
    let renamed = RENAMED.iter().find(|(old, _)| *old == last(path));
    let present = renamed
        .map_or(path.to_owned(), |(old, new)| format!("{}{new}", path.strip_suffix(old).unwrap_or_default()));
    [format!("{EXPERT}.{present}"), present].into_iter().find(|name| known.contains(name))
}

/// The similarity below which an error about an unknown setting suggests no name.
const LIKENESS_MIN: f64 = 0.7;

/// Returns the known key most similar to `path`. The same key in another section counts as similar.
fn nearest(path: &str, known: &[String]) -> Option<String> {
    let likeness = |candidate: &String| {
        let whole = strsim::jaro_winkler(path, candidate);
        if last(path) == last(candidate) { whole.max(0.95) } else { whole }
    };
    let encloses =
        |candidate: &&String| path.strip_prefix(*candidate).is_some_and(|rest| rest.starts_with('.'));
    let best = known
        .iter()
        .filter(|candidate| !encloses(candidate))
        .max_by(|a, b| likeness(a).total_cmp(&likeness(b)))?;
    (likeness(best) >= LIKENESS_MIN).then(|| best.clone())
}

fn last(path: &str) -> &str {
    path.rsplit('.').next().unwrap_or(path)
}
