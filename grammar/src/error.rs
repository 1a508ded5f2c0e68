//! The errors of grammars and of the sequences that follow them.

use types::grammar::GRAMMAR_BYTES_MAX;

/// The reason why a grammar cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    #[error("a grammar has at most {GRAMMAR_BYTES_MAX} bytes, not {bytes}")]
    TooLong { bytes: usize },
    #[error("not JSON: {0}")]
    NotJson(String),
    /// The schema cannot be enforced. `place` is a JSON pointer; the root's is empty.
    #[error("at {}: {reason}", shown(place))]
    Schema { place: String, reason: String },
    /// A regular expression or a grammar is wrong. The reason names the line.
    #[error("{0}")]
    Text(String),
}

fn shown(place: &str) -> &str {
    if place.is_empty() { "the root" } else { place }
}

/// The reason why a sequence can no longer follow its grammar.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConstraintError {
    #[error("after these tokens the grammar allows no further token, and the answer may not end")]
    DeadEnd,
    /// Following the grammar costs more than its limits, or has failed.
    #[error("{0}")]
    Failed(String),
}
