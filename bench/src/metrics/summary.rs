//! The numbers of a run for the table and the report. Failed requests count as infinite latencies.

use std::collections::BTreeMap;

use crate::metrics::distribution::Distribution;
use crate::metrics::metric::Metric;
use crate::metrics::objective::{Attainment, Objectives};
use crate::metrics::window::Window;
use crate::record::{CountedBy, RequestRecord};

/// The numbers of one run, computed from the records of a window only.
#[derive(Clone, Debug)]
pub struct Summary {
    pub window: Window,
    pub sent: usize,
    pub finished: usize,
    pub failed: usize,
    pub cancelled: usize,
    /// The number of failures by kind.
    pub failures: BTreeMap<&'static str, usize>,
    pub latencies: Vec<(Metric, Distribution)>,
    pub attainment: Attainment,
    pub rates: Rates,
    pub tokens: TokenCounts,
}

/// Rates per second of the window.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rates {
    pub requests: f64,
    pub good_requests: f64,
    pub output_tokens: f64,
    pub total_tokens: f64,
}

/// The numbers of tokens, how they arrived, and whether they were counted correctly.
#[derive(Clone, Copy, Debug, Default)]
pub struct TokenCounts {
    pub prompt: u64,
    pub cached: u64,
    pub output: u64,
    /// The mean number of tokens per chunk with tokens. Above 1, several tokens arrive at once.
    pub per_delivery: f64,
    pub most_in_a_delivery: u32,
    /// The share of gaps between tokens that lie within one chunk.
    pub gaps_of_zero: f64,
    /// Requests whose counted tokens differ from the server's total.
    pub miscounted: usize,
    /// Finished requests with fewer tokens than requested.
    pub short: usize,
    /// Requests whose tokens could be counted by chunks only.
    pub by_chunks: usize,
}

impl Summary {
    pub fn of(records: &[RequestRecord], window: Window, objectives: &Objectives) -> Self {
        let chosen = window.of(records);
        let attainment = objectives.attainment(chosen.iter().copied());
        Self {
            window,
            sent: chosen.len(),
            finished: chosen.iter().filter(|record| record.is_finished()).count(),
            failed: chosen.iter().filter(|record| record.failure().is_some()).count(),
            cancelled: chosen.iter().filter(|record| record.is_cancelled()).count(),
            failures: failures(&chosen),
            latencies: latencies(&chosen),
            rates: rates(records, &chosen, window, attainment.good),
            tokens: token_counts(&chosen),
            attainment,
        }
    }

    pub fn latency(&self, metric: Metric) -> &Distribution {
        let found = self.latencies.iter().find(|(of, _)| *of == metric);
        &found.expect("`latencies` has every metric").1
    }

    /// Returns remarks that a reader needs before using the numbers.
    pub fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        let tokens = &self.tokens;
        if self.sent == 0 {
            notes.push(
                "no request was due within the measured window: ramp, warm-up or cool-down took them all"
                    .to_owned(),
            );
        }
        if tokens.by_chunks > 0 {
            notes.push(format!(
                "{} requests: tokens counted one per chunk; coalescing cannot be seen",
                tokens.by_chunks
            ));
        }
        if tokens.per_delivery > 1.05 {
            notes.push(tokens.bunches());
        }
        if tokens.miscounted > 0 {
            notes.push(format!(
                "{} requests: tokens counted differ from the server's total",
                tokens.miscounted
            ));
        }
        if tokens.short > 0 {
            notes.push(format!("{} requests ended with fewer tokens than asked for", tokens.short));
        }
        if self.early_announcement() {
            notes.push(
                "tokens are announced before their text arrives: compare ttft with first_text".to_owned(),
            );
        }
        notes
    }

    fn early_announcement(&self) -> bool {
        let (token, text) = (self.latency(Metric::Ttft).p50, self.latency(Metric::FirstText).p50);
        text > token * 1.1 + 1.0
    }
}

impl TokenCounts {
    /// Returns the remark about several tokens per chunk.
    fn bunches(&self) -> String {
        let share = self.gaps_of_zero * 100.0;
        let zeros = if share > 50.0 { "most".to_owned() } else { format!("{share:.0} % of all") };
        format!(
            "tokens come {:.1} at a time (at most {}); {zeros} TBT gaps are 0 inside a chunk: judge by itl and worst_gap",
            self.per_delivery, self.most_in_a_delivery
        )
    }
}

fn failures(records: &[&RequestRecord]) -> BTreeMap<&'static str, usize> {
    let mut by_kind = BTreeMap::new();
    for failure in records.iter().filter_map(|record| record.failure()) {
        *by_kind.entry(failure.kind.name()).or_insert(0) += 1;
    }
    by_kind
}

fn latencies(records: &[&RequestRecord]) -> Vec<(Metric, Distribution)> {
    let of = |metric: Metric| (metric, Distribution::of(metric.samples(records.iter().copied())));
    Metric::ALL.into_iter().map(of).collect()
}

/// Computes the rates from requests and tokens that *ended* in the window. In a whole run these are all of
/// them.
fn rates(all: &[RequestRecord], chosen: &[&RequestRecord], window: Window, good: usize) -> Rates {
    let per_second = |count: f64| if window.seconds() > 0.0 { count / window.seconds() } else { 0.0 };
    let finished = all.iter().filter(|record| record.is_finished() && window.contains(record.ended_at_us()));
    let output = all.iter().map(|record| tokens_within(record, window)).sum::<u64>();
    let prompt: u64 = chosen.iter().filter(|r| r.is_finished()).map(|r| u64::from(r.prompt_tokens)).sum();
    Rates {
        requests: per_second(finished.count() as f64),
        good_requests: per_second(good as f64),
        output_tokens: per_second(output as f64),
        total_tokens: per_second((output + prompt) as f64),
    }
}

/// Returns the number of tokens that reached the client within the window, also of unfinished requests.
fn tokens_within(record: &RequestRecord, window: Window) -> u64 {
    let inside = |at_us: u32| window.contains(record.intended_us + u64::from(at_us));
    record.deliveries().filter(|chunk| inside(chunk.at_us)).map(|chunk| u64::from(chunk.tokens)).sum()
}

fn token_counts(records: &[&RequestRecord]) -> TokenCounts {
    let mut counts = TokenCounts::default();
    let mut n_deliveries = 0usize;
    let mut n_gaps = 0u64;
    for record in records {
        counts.prompt += u64::from(record.prompt_tokens);
        counts.cached += u64::from(record.cached_tokens);
        counts.output += u64::from(record.counted_tokens());
        n_gaps += u64::from(record.counted_tokens().saturating_sub(1));
        counts.by_chunks += usize::from(record.counted_by == CountedBy::Chunks && !record.chunks.is_empty());
        if record.is_finished() {
            counts.miscounted += usize::from(record.counted_tokens() != record.output_tokens());
            counts.short += usize::from(record.output_tokens() < record.wanted_tokens);
        }
        for chunk in record.deliveries() {
            n_deliveries += 1;
            counts.most_in_a_delivery = counts.most_in_a_delivery.max(chunk.tokens);
        }
    }
    counts.gaps_of_zero = counts.output.saturating_sub(n_deliveries as u64) as f64 / n_gaps.max(1) as f64;
    counts.per_delivery = counts.output as f64 / n_deliveries.max(1) as f64;
    counts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Chunk, Outcome};

    /// Returns the remarks on a request with these numbers of tokens per chunk.
    fn said(chunks: &[u32]) -> String {
        let chunk = |(nth, tokens): (usize, &u32)| Chunk { at_us: nth as u32 * 1000, tokens: *tokens };
        let record = RequestRecord {
            index: 0,
            session: 0,
            turn: 0,
            slice: 0,
            intended_us: 0,
            lag_us: 0,
            sent_us: 0,
            prompt_tokens: 1,
            cached_tokens: 0,
            wanted_tokens: 1,
            usage_tokens: None,
            counted_by: CountedBy::TokenIds,
            first_text_us: None,
            end_us: 0,
            outcome: Outcome::Finished,
            chunks: chunks.iter().enumerate().map(chunk).collect(),
            explanation: None,
        };
        token_counts(&[&record]).bunches()
    }

    #[test]
    fn most_gaps_are_zero_only_when_most_are() {
        assert!(
            said(&[1, 1, 1, 1, 2]).contains("; 20 % of all TBT gaps are 0"),
            "{}",
            said(&[1, 1, 1, 1, 2])
        );
        assert!(said(&[2, 2, 2]).contains("; most TBT gaps are 0"), "three of five");
        assert!(said(&[1, 8, 8]).contains("; most TBT gaps are 0"));
        assert!(said(&[1, 1, 3, 1, 1]).contains("; 33 % of all TBT gaps are 0"));
    }
}
