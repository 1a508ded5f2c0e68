//! The exit codes: 0 success, 1 failure, 2 invalid arguments (as in clap), 3 the process could not start, 4
//! the process was stopped before its running work had ended.

use std::error::Error;
use std::process::ExitCode;

use crate::output;

/// The error of a command, with its exit code.
#[derive(Debug)]
pub(crate) struct CommandError {
    code: u8,
    error: Box<dyn Error + Send + Sync>,
}

impl CommandError {
    pub(crate) fn work(error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self { code: 1, error: error.into() }
    }

    pub(crate) fn usage(error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self { code: 2, error: error.into() }
    }

    pub(crate) fn start(error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self { code: 3, error: error.into() }
    }

    pub(crate) fn drain(error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self { code: 4, error: error.into() }
    }

    /// Writes the error with its causes to standard error, and returns the exit code.
    pub(crate) fn report(self) -> ExitCode {
        let mut sentence = format!("error: {}", self.error);
        let mut cause = self.error.source();
        while let Some(error) = cause {
            sentence.push_str(&format!(": {error}"));
            cause = error.source();
        }
        output::tell(&sentence);
        ExitCode::from(self.code)
    }
}
