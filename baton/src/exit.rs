//! How the process ends: 0 well, 1 it failed, 2 it was asked for something that makes no sense (as clap has it),
//! 3 it could not start, 4 it was stopped before everything under way had ended.

use std::error::Error;
use std::process::ExitCode;

use crate::output;

/// Why a command failed, in one sentence with its causes.
#[derive(Debug)]
pub(crate) struct Failed {
    code: u8,
    error: Box<dyn Error + Send + Sync>,
}

impl Failed {
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

    /// Writes the error and its causes to standard error.
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
