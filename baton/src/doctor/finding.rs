//! One thing that was looked at, how it is, and what to do about it.

use serde::Serialize;

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Level {
    Ok,
    /// Nothing is wrong; something is not there that some would expect.
    Note,
    /// It serves, but not as well as it could, or not for long.
    Warn,
    /// It does not serve.
    Bad,
}

impl Level {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Note => "note",
            Self::Warn => "WARN",
            Self::Bad => "BAD",
        }
    }
}

/// `advice` is never empty: a finding that leaves one alone with it is of no use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Finding {
    pub(super) group: &'static str,
    pub(super) level: Level,
    pub(super) found: String,
    pub(super) advice: String,
}

const NOTHING_TO_DO: &str = "nothing to do";

impl Finding {
    pub(super) fn ok(group: &'static str, found: impl Into<String>) -> Self {
        Self { group, level: Level::Ok, found: found.into(), advice: NOTHING_TO_DO.to_owned() }
    }

    pub(super) fn note(group: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { group, level: Level::Note, found: found.into(), advice: advice.into() }
    }

    pub(super) fn warn(group: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { group, level: Level::Warn, found: found.into(), advice: advice.into() }
    }

    pub(super) fn bad(group: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { group, level: Level::Bad, found: found.into(), advice: advice.into() }
    }
}
