//! Why a process did not come up: its configuration was not accepted, or a part of it could not be started.

use std::fmt;
use std::io;
use std::path::PathBuf;

#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("read {}", file.display())]
    Read { file: PathBuf, source: io::Error },
    #[error("{origin} is not TOML")]
    Syntax { origin: Origin, source: Box<toml::de::Error> },
    #[error("{origin}: `{key}`: {problem}")]
    Setting { origin: Origin, key: String, problem: ConfigProblem },
    /// A raw configuration whose defaults cannot be written down; a mistake of ours.
    #[error("list the known settings")]
    Defaults(#[source] serde_json::Error),
}

/// Where a setting was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    Defaults,
    File(PathBuf),
    Env(String),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Defaults => f.write_str("the defaults"),
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Env(variable) => write!(f, "environment variable {variable}"),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConfigProblem {
    /// No setting has this name.
    Unknown { nearest: Option<String> },
    /// The setting has another name now.
    Moved { to: String },
    /// The setting exists, its value is not one.
    Value(String),
}

impl fmt::Display for ConfigProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown { nearest: None } => f.write_str("no such setting"),
            Self::Unknown { nearest: Some(name) } => write!(f, "no such setting, did you mean `{name}`?"),
            Self::Moved { to } => write!(f, "no such setting, it is called `{to}` now"),
            Self::Value(reason) => f.write_str(reason.trim_end()),
        }
    }
}

/// Why a process did not come up.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("`{filter}` is not a log level")]
    LogLevel { filter: String, source: tracing_subscriber::filter::ParseError },
    /// Telemetry is set up once in a process.
    #[error("install telemetry")]
    Telemetry(#[source] tracing_subscriber::util::TryInitError),
    #[error("send spans to {endpoint}: {reason}")]
    Otlp { endpoint: String, reason: String },
    #[error("describe services")]
    Reflection(#[source] tonic_reflection::server::Error),
}
