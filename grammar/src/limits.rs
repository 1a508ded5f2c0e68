//! The limits of compiling a grammar and of following it.

use llguidance::ParserFactory;
use llguidance::api::ParserLimits;

use crate::error::GrammarError;

/// The longest reason of a refusal. llguidance quotes the line that is wrong, which may be the whole grammar.
const REASON_CHARS_MAX: usize = 500;

/// The message of llguidance if a grammar allows neither a token nor the end.
pub(crate) const DEAD_END: &str = "NoExtensionBias";

/// Reasons that name options of llguidance, and the texts that clients get instead.
const REASONS: [(&str, &str); 2] = [
    (
        "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf",
        "the alternatives of a `oneOf` must exclude each other",
    ),
    (
        "Only absolute $ref's (#/...) are supported without 'referencing' feature; ref",
        "a `$ref` begins with `#/`, the root, unlike",
    ),
];

/// Returns the limits. They bound the time of a compilation to about a second, that of a mask to about 20 ms, and the
/// memory of a compiled grammar to about 40 MB.
fn limits() -> ParserLimits {
    ParserLimits { max_lexer_states: 20_000, verbose_errors: false, ..ParserLimits::default() }
}

/// Sets the limits, and turns off what llguidance prints.
pub(crate) fn limited(mut factory: ParserFactory) -> ParserFactory {
    *factory.limits_mut() = limits();
    factory.set_stderr_log_level(0);
    factory.set_buffer_log_level(0);
    factory
}

/// Returns a reason without the parts that llguidance adds for its own developers.
pub(crate) fn plain(error: &impl ToString) -> String {
    let text = error.to_string();
    let text = text.split("\n<").next().unwrap_or_default().trim();
    let text = REASONS.iter().fold(text.to_owned(), |text, (theirs, ours)| text.replace(theirs, ours));
    match text.char_indices().nth(REASON_CHARS_MAX) {
        Some((end, _)) => format!("{} …", &text[..end]),
        None => text,
    }
}

pub(crate) fn check_length(text: &str) -> Result<(), GrammarError> {
    let bytes = text.len();
    if bytes > types::grammar::GRAMMAR_BYTES_MAX { Err(GrammarError::TooLong { bytes }) } else { Ok(()) }
}
