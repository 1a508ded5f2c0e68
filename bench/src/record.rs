//! The recorded events of one request, without computed values.
//!
//! Every number in a report is a function of these records. The report contains the records, so that a reader
//! can compute other numbers.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::explanation::Explanation;

/// The record of one request, from the time at which it should have been sent.
///
/// All times except `intended_us` count from `intended_us`, so the wait for the harness, the connection and
/// the server is included.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestRecord {
    /// The position of the request in the order of sending.
    pub index: u32,
    /// The number of the conversation.
    pub session: u32,
    pub turn: u32,
    /// The slice of an interleaved run; 0 in any other run.
    pub slice: u32,
    /// The intended send time in microseconds since the run's start.
    pub intended_us: u64,
    /// The time at which the harness began to send the request: the harness's own lag.
    pub lag_us: u32,
    /// The time at which the last byte of the request was given to the kernel, after the connection was made.
    pub sent_us: u32,
    /// The number of prompt tokens that the server reports, or the planned number if it reports none.
    pub prompt_tokens: u32,
    pub cached_tokens: u32,
    pub wanted_tokens: u32,
    /// The number of output tokens that the server reports, if it does.
    pub usage_tokens: Option<u32>,
    pub counted_by: CountedBy,
    /// The time of the first chunk whose text was not empty.
    pub first_text_us: Option<u32>,
    pub end_us: u32,
    pub outcome: Outcome,
    /// All chunks that have a choice, empty ones included.
    pub chunks: Vec<Chunk>,
    /// The server's explanation of the request's time, if the request asked for it.
    pub explanation: Option<Box<Explanation>>,
}

/// One event of the stream: its time and its number of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    pub at_us: u32,
    pub tokens: u32,
}

/// How the tokens of a chunk were counted, the best way first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CountedBy {
    /// By the token ids that the server sends.
    TokenIds,
    /// By the running total that the server sends with every chunk.
    Usage,
    /// By chunks: a chunk with text counts as one token, because the server sends no counts. Several tokens
    /// in one chunk are not noticed.
    Chunks,
    /// By the total that the server sends at the end, spread evenly over the chunks with text.
    Total,
}

impl fmt::Display for CountedBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::TokenIds => "the ids that the server sends",
            Self::Usage => "the running total that the server sends",
            Self::Chunks => "chunks, one token each",
            Self::Total => "the server's total at the end, spread over chunks",
        })
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    Finished,
    /// The request failed: every one of its latencies is infinite.
    Failed(Failure),
    /// The harness cancelled the request, as the workload planned. The choice is made before sending, so
    /// leaving it out of the latencies does not favour quick requests.
    Cancelled,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub kind: FailureKind,
    pub message: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FailureKind {
    /// The server refused or reset the connection.
    Connect,
    /// The server answered with a status other than 200.
    Status,
    /// The stream ended, broke or became invalid before its end.
    Broken,
    /// The stream contained an error event.
    ErrorEvent,
    /// The stream ended well but had no token.
    Empty,
    Timeout,
    /// The harness ran out of descriptors or ports. This makes the run invalid.
    Harness,
}

impl FailureKind {
    pub const ALL: [(FailureKind, &'static str); 7] = [
        (FailureKind::Connect, "connect"),
        (FailureKind::Status, "status"),
        (FailureKind::Broken, "broken"),
        (FailureKind::ErrorEvent, "error_event"),
        (FailureKind::Empty, "empty"),
        (FailureKind::Timeout, "timeout"),
        (FailureKind::Harness, "harness"),
    ];

    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(kind, _)| *kind == self).map_or("unknown", |(_, name)| name)
    }
}

// === impl RequestRecord ===

impl RequestRecord {
    pub fn is_finished(&self) -> bool {
        self.outcome == Outcome::Finished
    }

    pub fn is_cancelled(&self) -> bool {
        self.outcome == Outcome::Cancelled
    }

    pub fn failure(&self) -> Option<&Failure> {
        match &self.outcome {
            Outcome::Failed(failure) => Some(failure),
            _ => None,
        }
    }

    /// Returns the chunks with tokens.
    pub fn deliveries(&self) -> impl Iterator<Item = Chunk> + '_ {
        self.chunks.iter().copied().filter(|chunk| chunk.tokens > 0)
    }

    pub fn counted_tokens(&self) -> u32 {
        self.chunks.iter().map(|chunk| chunk.tokens).sum()
    }

    /// Returns the number of output tokens: the server's total if there is one, otherwise the counted tokens.
    pub fn output_tokens(&self) -> u32 {
        self.usage_tokens.unwrap_or_else(|| self.counted_tokens())
    }

    /// Returns the time at which the client had token number `ordinal`, counted from 0; `None` if there is no
    /// such token.
    pub fn token_us(&self, ordinal: u32) -> Option<u32> {
        let mut seen = 0;
        for chunk in self.deliveries() {
            seen += chunk.tokens;
            if seen > ordinal {
                return Some(chunk.at_us);
            }
        }
        None
    }

    pub fn last_token_us(&self) -> Option<u32> {
        self.chunks.iter().rev().find(|chunk| chunk.tokens > 0).map(|chunk| chunk.at_us)
    }

    /// Returns the end of the request in microseconds since the run's start.
    pub fn ended_at_us(&self) -> u64 {
        self.intended_us + u64::from(self.end_us)
    }
}
