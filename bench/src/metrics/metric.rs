//! The metrics of a request. `docs/measurements/README.md` quotes these definitions.

use crate::record::{Outcome, RequestRecord};

/// A latency, in milliseconds. The first seven have one value for each request; the last two pool the gaps of all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Metric {
    /// First token minus intended send time. A chunk without a token is not a first token.
    Ttft,
    /// First visible text minus intended send time. It is later than TTFT if tokens come before their text.
    FirstText,
    /// Second token minus intended send time. It includes the hand-over, even if the first token is early.
    SecondToken,
    /// Second token minus first.
    Handover,
    /// (Last token − first token) ÷ (tokens − 1).
    Tpot,
    /// The longest gap between two tokens of the request.
    WorstGap,
    /// Last token minus intended send time.
    E2el,
    /// Gaps between consecutive tokens, of all requests; tokens of one chunk have a gap of 0.
    Tbt,
    /// Gaps between consecutive chunks with tokens, of all requests: other tools call it ITL.
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

    /// The name in reports; vLLM's where it has one.
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

    /// This metric's values over `records`: every request gives its own, or all gaps are pooled.
    /// Cancelled requests give none; failed ones give infinity (to a pool: one gap that never ended).
    pub fn samples<'a>(self, records: impl Iterator<Item = &'a RequestRecord>) -> Vec<f64> {
        let mut samples = Vec::new();
        for record in records {
            self.extend(&mut samples, record);
        }
        samples
    }

    /// Adds the values of one request.
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

    /// The value for a finished request; `None` if it has none: a request of one token has no second token.
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

    /// Whether a failed request would have had this metric if it had succeeded.
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

/// (last − first) ÷ (tokens − 1), for a request of at least two tokens.
pub fn tpot(record: &RequestRecord) -> Option<f64> {
    let n_tokens = record.output_tokens();
    let decode_us = record.last_token_us()? - record.token_us(0)?;
    (n_tokens > 1).then(|| ms(decode_us) / f64::from(n_tokens - 1))
}

/// The gaps between chunks with tokens. Packing tokens into few chunks adds no zeros that hide a stall.
pub fn delivery_gaps(record: &RequestRecord) -> impl Iterator<Item = f64> + '_ {
    let next = record.deliveries().skip(1);
    record.deliveries().zip(next).map(|(before, after)| ms(after.at_us - before.at_us))
}

/// The gaps between tokens: the gap of the chunk for its first token, 0 for its other tokens.
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
