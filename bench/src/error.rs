//! The errors of the harness before, between and after requests. A failed request is no error but a record.

use std::path::PathBuf;

/// An error of the harness, with one variant for each kind of failed operation.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    #[error("read {path}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("write {path}")]
    Write { path: PathBuf, source: std::io::Error },
    #[error("parse {path}: {reason}")]
    Parse { path: PathBuf, reason: String },
    #[error("target {url}: {reason}")]
    Target { url: String, reason: String },
    #[error("{0}")]
    Usage(String),
    #[error("prepare the load loop")]
    Prepare(#[source] std::io::Error),
    #[error("fault {what}: {reason}")]
    Fault { what: String, reason: String },
    #[error("start {program}")]
    Start { program: String, source: std::io::Error },
    #[error("decode samples: {0}")]
    Samples(String),
}

pub type Result<T> = std::result::Result<T, BenchError>;

impl BenchError {
    pub fn usage(reason: impl Into<String>) -> Self {
        Self::Usage(reason.into())
    }

    pub fn parse(path: impl Into<PathBuf>, reason: impl ToString) -> Self {
        Self::Parse { path: path.into(), reason: reason.to_string() }
    }

    pub fn target(url: impl Into<String>, reason: impl ToString) -> Self {
        Self::Target { url: url.into(), reason: reason.to_string() }
    }

    /// Returns the error with the whole chain of its causes in one line.
    pub fn in_full(&self) -> String {
        let mut text = self.to_string();
        let mut cause = std::error::Error::source(self);
        while let Some(error) = cause {
            text.push_str(&format!(": {error}"));
            cause = error.source();
        }
        text
    }
}

/// Reads a whole text file. An error contains the path.
pub fn read_text(path: &std::path::Path) -> Result<String> {
    std::fs::read_to_string(path).map_err(|source| BenchError::Read { path: path.to_owned(), source })
}

/// Writes a whole text file. An error contains the path.
pub fn write_text(path: &std::path::Path, text: &str) -> Result<()> {
    std::fs::write(path, text).map_err(|source| BenchError::Write { path: path.to_owned(), source })
}
