//! The metrics of a request. `docs/measurements/README.md` repeats these definitions.

use crate::record::{Outcome, RequestRecord};

/// A latency metric, in milliseconds. The first seven metrics have one value per request; the last two pool
/// the gaps of all requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Metric {
    /// The first token minus the intended send time. A chunk without a token is not a first token.
    Ttft,
    /// The first visible text minus the intended send time, later than TTFT if tokens come before their text.
    FirstText,
    /// The second token minus the intended send time. It includes the transfer of KV, even if the first token
    /// is early.
    SecondToken,
    /// The second token minus the first.
    Handover,
    /// (Last token − first token) ÷ (number of tokens − 1).
    Tpot,
    /// The longest gap between two tokens of the request.
    WorstGap,
    /// The last token minus the intended send time.
    E2el,
    /// The gaps between consecutive tokens, of all requests; tokens of one chunk have a gap of 0.
    Tbt,
    /// The gaps between consecutive chunks with tokens, of all requests. Other tools call this ITL.
    Itl,
}

impl Metric {
    pub const ALL: [Metric; 9] = [
        Metric::Ttft,
        Metric::FirstText,
        Metric::SecondToken,
        Metric::Handover,
        Metric::Tpot,
        Metric::Tbt,
        Metric::Itl,
        Metric::WorstGap,
        Metric::E2el,
    ];

    /// Returns the metric's name in reports; vLLM's name where it has one.
    pub fn name(self) -> &'static str {
        match self {
            Metric::Ttft => "ttft",
            Metric::FirstText => "first_text",
            Metric::SecondToken => "second_token",
            Metric::Handover => "handover_gap",
            Metric::Tpot => "tpot",
            Metric::WorstGap => "worst_gap",
            Metric::E2el => "e2el",
            Metric::Tbt => "tbt",
            Metric::Itl => "itl",
        }
    }

    pub fn title(self) -> &'static str {
        match self {
            Metric::Ttft => "Time to first token",
            Metric::FirstText => "Time to first text",
            Metric::SecondToken => "Time to second token",
            Metric::Handover => "Hand-over gap",
            Metric::Tpot => "Time per output token",
            Metric::WorstGap => "Worst gap of a request",
            Metric::E2el => "End to end",
            Metric::Tbt => "Time between tokens",
            Metric::Itl => "Gap between chunks",
        }
    }

    /// Returns the values of this metric over `records`: one per request, or all gaps pooled. Cancelled
    /// requests give none; a failed one gives infinity (in a pool, one gap that never ended).
    pub fn samples<'a>(self, records: impl Iterator<Item = &'a RequestRecord>) -> Vec<f64> {
        let mut samples = Vec::new();
        for record in records {
            self.extend(&mut samples, record);
        }
        samples
    }

    /// Adds one request's values of this metric to `samples`.
    pub fn extend(self, samples: &mut Vec<f64>, record: &RequestRecord) {
        match (&record.outcome, self) {
            (Outcome::Cancelled, _) => {}
            (outcome, Metric::Tbt) => {
                samples.extend(token_gaps(record));
                samples.extend(never(outcome));
            }
            (outcome, Metric::Itl) => {
                samples.extend(delivery_gaps(record));
                samples.extend(never(outcome));
            }
            (Outcome::Failed(_), _) => samples.extend(self.applies(record).then_some(f64::INFINITY)),
            (Outcome::Finished, _) => samples.extend(self.of(record)),
        }
    }

    /// Returns the value of a finished request; `None` if it has none: a request of one token has no second
    /// token.
    fn of(self, record: &RequestRecord) -> Option<f64> {
        match self {
            Metric::Ttft => record.token_us(0).map(ms),
            Metric::FirstText => record.first_text_us.map(ms),
            Metric::SecondToken => record.token_us(1).map(ms),
            Metric::Handover => Some(ms(record.token_us(1)? - record.token_us(0)?)),
            Metric::Tpot => tpot(record),
            Metric::WorstGap => {
                (record.counted_tokens() > 1).then(|| delivery_gaps(record).fold(0.0, f64::max))
            }
            Metric::E2el => record.last_token_us().map(ms),
            Metric::Tbt | Metric::Itl => None,
        }
    }

    /// Returns whether a failed request would have had this metric if it had succeeded.
    fn applies(self, record: &RequestRecord) -> bool {
        match self {
            Metric::Ttft | Metric::FirstText | Metric::E2el => true,
            _ => record.wanted_tokens > 1,
        }
    }
}

pub fn ms(us: u32) -> f64 {
    f64::from(us) / 1e3
}

/// Returns (last − first) ÷ (tokens − 1); `None` for a request with fewer than two tokens.
pub fn tpot(record: &RequestRecord) -> Option<f64> {
    let n_tokens = record.output_tokens();
    let decode_us = record.last_token_us()? - record.token_us(0)?;
    (n_tokens > 1).then(|| ms(decode_us) / f64::from(n_tokens - 1))
}

/// Returns the gaps between chunks with tokens. If several tokens come in one chunk, no zeros are added that
/// could hide a stall.
pub fn delivery_gaps(record: &RequestRecord) -> impl Iterator<Item = f64> + '_ {
    let next = record.deliveries().skip(1);
    record.deliveries().zip(next).map(|(before, after)| ms(after.at_us - before.at_us))
}

/// Returns the gaps between tokens. The first token of a chunk has the gap of the chunk, its other tokens
/// have 0.
pub fn token_gaps(record: &RequestRecord) -> impl Iterator<Item = f64> + '_ {
    let mut before: Option<u32> = None;
    record.deliveries().flat_map(move |chunk| {
        let first = before.replace(chunk.at_us).map(|at_us| ms(chunk.at_us - at_us));
        first.into_iter().chain(std::iter::repeat_n(0.0, chunk.tokens as usize - 1))
    })
}

fn never(outcome: &Outcome) -> Option<f64> {
    matches!(outcome, Outcome::Failed(_)).then_some(f64::INFINITY)
}
