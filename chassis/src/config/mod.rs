//! What a process is told: one TOML file, overridden by the environment.
//!
//! Configuration has two types. The raw one is what this module makes: as written, with serde, every field with a
//! default. The process turns it into its own checked `Config`, and only that leaves the process's `config.rs`.
//!
//! The one override rule: `BATON_SECTION__KEY=value` sets `key` in `[section]`, `BATON_KEY=value` a key outside any
//! section. A value that reads as TOML is taken as such (`8000`, `true`, `["a"]`), anything else as a string; where
//! the default is a string it is always one.
//!
//! What no setting reads is an error with the nearest name in it, in the file and in the environment alike.
//! The variables that kubelet sets for a Service whose name begins with `baton` are recognised and passed over.
//! Durations are integers whose unit is in the key (`drain_ms`), amounts of memory are [`ByteSize`](crate::byte_size::ByteSize).

mod overrides;
mod service_links;
#[cfg(test)]
mod tests;

use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value as Json;
use toml::{Table, Value};

use crate::error::{ConfigError, ConfigProblem, Origin};
use overrides::Override;

/// Variables with our prefix that are not settings: they are read before there is a configuration, or by tools.
pub const RESERVED: &[&str] = &["BATON_CONFIG", "BATON_LOG"];

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

/// Like [`load`], from a text that is already read. `origin` is named in errors.
pub fn parse<R>(
    text: &str,
    origin: Origin,
    env: impl IntoIterator<Item = (String, String)>,
) -> Result<R, ConfigError>
where
    R: Default + Serialize + DeserializeOwned,
{
    // JSON and not TOML, because it keeps the keys of settings that are `None` by default.
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

/// Whether `variable` names a setting of `R`.
pub fn has_setting<R: Default + Serialize>(variable: &str) -> bool {
    serde_json::to_value(R::default()).is_ok_and(|known| overrides::names_a_setting(variable, &known))
}

/// What is needed to say which setting is wrong, and where it was written.
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
        self.problem(&path, ConfigProblem::Value(reason))
    }

    /// `path` may be a section that does not exist; `setting` is the first one in it.
    fn unknown(&self, path: &str, setting: &str) -> ConfigError {
        let known = paths(&self.known);
        if let Some(moved) = new_name(setting, &known) {
            return self.problem(setting, ConfigProblem::Moved { to: moved });
        }
        self.problem(path, ConfigProblem::Unknown { nearest: nearest(path, &known) })
    }

    fn problem(&self, path: &str, problem: ConfigProblem) -> ConfigError {
        let overridden = self.overrides.iter().rev().find(|wanted| wanted.covers(path));
        let origin =
            overridden.map_or_else(|| self.origin.clone(), |wanted| Origin::Env(wanted.variable.clone()));
        ConfigError::Setting { origin, key: path.to_owned(), problem }
    }
}

/// An optional section appears as `?` in the path; users do not write it.
fn dotted(path: &serde_ignored::Path<'_>) -> String {
    path.to_string().replace(".?", "")
}

/// Every key of the defaults, in dotted form, sections before what is in them.
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

/// `path` itself, or the first setting in it if it is a section.
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

/// Settings that have another name now: the old name and the new one.
const RENAMED: &[(&str, &str)] = &[("awake_us", "spin_us")];

/// Rarely changed settings: what was `[section] key` is `[expert.section] key`.
const EXPERT: &str = "expert";

/// The present name of a setting that was renamed, or moved to `[expert]`.
fn new_name(path: &str, known: &[String]) -> Option<String> {
    let renamed = RENAMED.iter().find(|(old, _)| *old == last(path));
    let present = renamed
        .map_or(path.to_owned(), |(old, new)| format!("{}{new}", path.strip_suffix(old).unwrap_or_default()));
    [format!("{EXPERT}.{present}"), present].into_iter().find(|name| known.contains(name))
}

/// Below this likeness a suggestion confuses more than it helps.
const LIKENESS_MIN: f64 = 0.7;

/// The known key that looks most like `path`. A key in the wrong section counts as near.
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
