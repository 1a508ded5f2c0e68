//! What was seen of one request: the events, as they came, and nothing computed from them.
//!
//! Every number in a report is a function of these records, and the records travel with the report,
//! so a reader can compute any other number from them.

use std::fmt;

use serde::{Deserialize, Serialize};

/// One request, from the moment at which it should have been sent.
///
/// All times but `intended_us` count from `intended_us`, so that waiting for the harness, for the connection and for
/// the server are all part of what the user waits for.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestRecord {
    /// Position in the order of sending.
    pub index: u32,
    /// Which conversation, and which turn of it.
    pub session: u32,
    pub turn: u32,
    /// Which slice of an interleaved run; 0 in any other run.
    pub slice: u32,
    /// When it should have been sent, since the run's start.
    pub intended_us: u64,
    /// When the harness began to send it: its own lag.
    pub lag_us: u32,
    /// When the last byte of the request was handed to the kernel; the connection is part of it.
    pub sent_us: u32,
    /// The server's count, or the planned number if the server sends none.
    pub prompt_tokens: u32,
    pub cached_tokens: u32,
    pub wanted_tokens: u32,
    /// The server's own total, where it gave one.
    pub usage_tokens: Option<u32>,
    pub counted_by: CountedBy,
    /// The first chunk whose text was not empty.
    pub first_text_us: Option<u32>,
    pub end_us: u32,
    pub outcome: Outcome,
    /// Every chunk that carried a choice, empty ones included.
    pub chunks: Vec<Chunk>,
}

/// One event of the stream and how many tokens it brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    pub at_us: u32,
    pub tokens: u32,
}

/// Where the number of tokens in a chunk comes from, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CountedBy {
    /// The server sends the ids.
    TokenIds,
    /// The server sends its running total with every chunk.
    Usage,
    /// Neither: a chunk with text counts as one token, and coalescing cannot be seen.
    Chunks,
    /// The server sends its total at the end only: it is spread evenly over the chunks with text.
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
    /// Every one of its latencies is infinite.
    Failed(Failure),
    /// Given up by the harness, as the workload asked. Chosen before it was sent, so leaving it out of the
    /// latencies does not favour quick requests.
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
    /// A status other than 200.
    Status,
    /// The stream ended, broke or turned to nonsense before its end.
    Broken,
    /// An error event inside the stream.
    ErrorEvent,
    /// Ended well, without a token.
    Empty,
    Timeout,
    /// The harness itself could not: no descriptors or ports left. Makes the run invalid.
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

    /// The chunks that brought tokens.
    pub fn deliveries(&self) -> impl Iterator<Item = Chunk> + '_ {
        self.chunks.iter().copied().filter(|chunk| chunk.tokens > 0)
    }

    pub fn counted_tokens(&self) -> u32 {
        self.chunks.iter().map(|chunk| chunk.tokens).sum()
    }

    /// The server's total where there is one, else what was counted.
    pub fn output_tokens(&self) -> u32 {
        self.usage_tokens.unwrap_or_else(|| self.counted_tokens())
    }

    /// When token number `ordinal` (from 0) was in the client's hands.
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

    /// The end, since the run's start.
    pub fn ended_at_us(&self) -> u64 {
        self.intended_us + u64::from(self.end_us)
    }
}
