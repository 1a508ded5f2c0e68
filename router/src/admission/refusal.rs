//! The refusals of a line, in words.

use std::ops::RangeInclusive;
use std::time::Duration;

use types::RefusalKind;

use crate::error::ServeError;

/// The bounds of `Retry-After`.
const RETRY_AFTER: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(60);

macro_rules! reasons {
    ($($name:ident = $word:literal, $meaning:literal;)*) => {
        /// Why a line refuses a prompt.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum RefusalReason { $(#[doc = $meaning] $name,)* }

        impl RefusalReason {
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            pub fn as_str(self) -> &'static str {
                match self { $(Self::$name => $word,)* }
            }

            /// Returns the reason's description in `docs/routing.md`.
            pub fn meaning(self) -> &'static str {
                match self { $(Self::$name => $meaning,)* }
            }
        }
    };
}

reasons! {
    Full = "full", "The line has no place, and no waiting request gives way.";
    Shed = "shed", "The line is full, and the request has `x-baton-sheddable: 1`.";
    Displaced = "displaced", "The line is full, and the request gives way to a higher priority or to a tenant with fewer waiting requests.";
    LateFirstToken = "late_first_token", "The first token is predicted, or already, later than the request's objective.";
    LateTokens = "late_tokens", "The time between tokens is predicted longer than the request's objective.";
    Waited = "waited", "The request got no room within `router.wait_ms`.";
    Text = "text", "Too much text waits to be tokenized.";
}

/// A line's refusal of one prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LineRefusal {
    pub(super) reason: RefusalReason,
    pub(super) retry_after: Duration,
    pub(super) words: String,
}

impl LineRefusal {
    fn new(reason: RefusalReason, retry_after: Duration, words: String) -> Self {
        Self { reason, retry_after: retry_after.clamp(*RETRY_AFTER.start(), *RETRY_AFTER.end()), words }
    }

    pub(super) fn full(requests_max: usize, retry_after: Duration) -> Self {
        let words = format!(
            "{requests_max} requests of the model wait or are served, as many as router.requests_max allows"
        );
        Self::new(RefusalReason::Full, retry_after, words)
    }

    pub(super) fn displaced(reason: RefusalReason, requests_max: usize, retry_after: Duration) -> Self {
        let words = format!(
            "the line is full ({requests_max} requests, router.requests_max), and the request gave way to another one"
        );
        Self::new(reason, retry_after, words)
    }

    /// `first_token` is predicted. The refusal says when a prompt like this one would not be late.
    pub(super) fn late_first_token(first_token: Duration, longest: Duration) -> Self {
        let words = format!(
            "the first token is predicted after {} ms, and the objective is {} ms",
            first_token.as_millis(),
            longest.as_millis()
        );
        Self::new(RefusalReason::LateFirstToken, first_token - longest, words)
    }

    /// The prompt has waited until its objective could not be met.
    pub(super) fn missed_first_token(waited: Duration, longest: Duration, retry_after: Duration) -> Self {
        let words = format!(
            "the request waited for {} ms, and its first token would be later than the objective of {} ms",
            waited.as_millis(),
            longest.as_millis()
        );
        Self::new(RefusalReason::LateFirstToken, retry_after, words)
    }

    pub(super) fn late_tokens(token_gap: Duration, longest: Duration, retry_after: Duration) -> Self {
        let words = format!(
            "the time between tokens is predicted as {} ms, and the objective is {} ms",
            token_gap.as_millis(),
            longest.as_millis()
        );
        Self::new(RefusalReason::LateTokens, retry_after, words)
    }

    pub(super) fn waited(waited: Duration, retry_after: Duration) -> Self {
        let words = format!("no node had room within {} ms (router.wait_ms)", waited.as_millis());
        Self::new(RefusalReason::Waited, retry_after, words)
    }

    /// Returns the error for the client.
    pub(super) fn into_error(self) -> ServeError {
        match self.reason {
            RefusalReason::Waited => ServeError::Refused { kind: RefusalKind::Full, reason: self.words },
            _ => ServeError::Overloaded { retry_after: self.retry_after, reason: self.words },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_lists_every_reason() {
        let row = |reason: &RefusalReason| format!("| `{}` | {} |\n", reason.as_str(), reason.meaning());
        let table: String = RefusalReason::ALL.iter().map(row).collect();
        let page = include_str!("../../../docs/routing.md");
        assert!(page.contains(&table), "put this table into docs/routing.md:\n{table}");
    }
}
