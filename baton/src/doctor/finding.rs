//! A finding: the result of one check, and advice.

use serde::Serialize;

/// The severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Level {
    Ok,
    /// The process can serve; something is missing that a user may expect.
    Note,
    /// The process can serve, but with restrictions.
    Warn,
    /// The process cannot serve.
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

/// The result of one check. `advice` is never empty: every finding tells the user what to do.
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
