//! The errors of starting a process: in its configuration, or in starting a part of it.

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
    /// The defaults of a raw configuration cannot be serialised; this is a bug.
    #[error("list the known settings")]
    Defaults(#[source] serde_json::Error),
}

/// The source of a setting.
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
    /// There is no setting with this name.
    Unknown { nearest: Option<String> },
    /// The setting was renamed.
    Moved { to: String },
    /// The value is not valid for the setting.
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

/// The error of starting a part of the process, such as its log.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(
        "`{0}` is not a log level: use error, warn, info, debug, trace or off, or a list such as `info,baton_kv_transfer=debug`"
    )]
    LogLevel(String),
    /// Telemetry is already installed; a process can install it only once.
    #[error("install telemetry")]
    Telemetry(#[source] tracing_subscriber::util::TryInitError),
    #[error("send spans to {endpoint}: {reason}")]
    Otlp { endpoint: String, reason: String },
    #[error("describe services")]
    Reflection(#[source] tonic_reflection::server::Error),
}
