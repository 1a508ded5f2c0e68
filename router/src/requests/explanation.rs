//! Where the time of one request went: a summary of its record for its client.

use std::sync::Arc;
use std::time::Duration;

use types::NodeId;

use super::parts::{Part, PartTimes};
use super::record::{Gap, RequestEvent, RequestRecord, RequestSummary};
use crate::policy::Decision;

/// Where the time of one request went.
#[derive(Clone, Debug, PartialEq)]
pub struct Explanation {
    /// From the request's arrival to now, or to its end. All parts add up to it.
    pub total: Duration,
    /// From the request's arrival to its first token. The parts in `before` add up to it.
    pub first_token: Option<Duration>,
    /// The parts up to the first token.
    pub before: PartTimes,
    /// The parts after the first token.
    pub after: PartTimes,
    pub largest: Option<Part>,
    /// The nodes of the last try. Without a prefill node the decode node computes the prompt.
    pub prefill: Option<NodeId>,
    pub decode: Option<NodeId>,
    /// The decision for the last try.
    pub decision: Option<Arc<Decision>>,
    pub prompt_tokens: u32,
    pub cached_tokens: u32,
    pub output_tokens: u32,
    pub tries: u32,
    pub continuations: u32,
    pub transfers: Vec<KvTransfer>,
    /// The longest time between two tokens.
    pub worst_gap: Option<Gap>,
}

/// KV that has arrived on a decode node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvTransfer {
    pub connector: String,
    pub bytes: u64,
    /// From the first byte to the last. Compute hides the part of it that is not in [`Part::Transfer`].
    pub moved: Duration,
}

impl RequestRecord {
    /// Returns where the time of the request went so far.
    pub fn explanation(&self) -> Explanation {
        Explanation::new(&self.summary(), self.prompt_tokens())
    }
}

impl Explanation {
    fn new(summary: &RequestSummary, prompt_tokens: u32) -> Self {
        let (prefill, decode) = nodes(summary);
        // Without a first token, all time is before it.
        let before = if summary.first_token.is_some() { summary.parts_of_first_token } else { summary.parts };
        Self {
            total: summary.took,
            first_token: summary.first_token,
            before,
            after: summary.parts.since(&before),
            largest: summary.parts.largest(),
            prefill,
            decode,
            decision: summary.decision.clone(),
            prompt_tokens,
            cached_tokens: summary.cached_tokens,
            output_tokens: summary.output_tokens,
            tries: summary.tries,
            continuations: summary.continuations,
            transfers: summary.events.iter().filter_map(|(_, event)| transfer(event)).collect(),
            worst_gap: summary.worst_gap,
        }
    }

    /// Returns the parts in words, the largest first, as `reserve 12.1 ms, decode 8 ms`.
    pub fn in_words(&self) -> String {
        let mut all: Vec<(Part, Duration)> =
            Part::ALL.iter().map(|part| (*part, self.before.of(*part) + self.after.of(*part))).collect();
        all.retain(|(_, took)| !took.is_zero());
        all.sort_by_key(|(_, took)| std::cmp::Reverse(*took));
        let words =
            all.iter().map(|(part, took)| format!("{} {:.1} ms", part.as_str(), took.as_secs_f64() * 1e3));
        words.collect::<Vec<_>>().join(", ")
    }
}

impl KvTransfer {
    /// Returns the bytes per second; `None` if the time is too short to be measured.
    pub fn rate(&self) -> Option<f64> {
        let seconds = self.moved.as_secs_f64();
        (seconds > 0.0).then(|| self.bytes as f64 / seconds)
    }
}

/// Returns the nodes of the last try, and of the last delivery after it.
fn nodes(summary: &RequestSummary) -> (Option<NodeId>, Option<NodeId>) {
    summary.events.iter().fold((None, None), |(prefill, decode), (_, event)| match event {
        RequestEvent::Try { prefill, decode } => (prefill.clone(), decode.clone()),
        RequestEvent::Deliver { decode } => (prefill, Some(decode.clone())),
        _ => (prefill, decode),
    })
}

fn transfer(event: &RequestEvent) -> Option<KvTransfer> {
    match event {
        RequestEvent::KvArrived { connector, bytes, moved, .. } => {
            Some(KvTransfer { connector: connector.clone(), bytes: *bytes, moved: *moved })
        }
        _ => None,
    }
}
