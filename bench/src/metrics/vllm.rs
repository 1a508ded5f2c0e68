//! Computes metrics by the definitions and field names of `vllm bench serve`, so that result files can be
//! compared. Percentiles are of *successful* requests only; the report's own `latency_ms` counts failures
//! too.

use serde_json::{Map, Value, json};

use crate::metrics::distribution::{deviation, mean, percentile};
use crate::metrics::metric::Metric;
use crate::metrics::objective::Objectives;
use crate::metrics::window::Window;
use crate::record::RequestRecord;

const SHARED: [Metric; 4] = [Metric::Ttft, Metric::Tpot, Metric::Itl, Metric::E2el];

/// Returns the fields that have the same meaning in both tools.
pub fn fields(records: &[RequestRecord], window: Window, objectives: &Objectives) -> Map<String, Value> {
    let finished: Vec<_> = window.of(records).into_iter().filter(|record| record.is_finished()).collect();
    let failed = window.of(records).iter().filter(|record| record.failure().is_some()).count();
    let mut fields = totals(&finished, window);
    fields.insert("failed".to_owned(), json!(failed));
    if !objectives.is_empty() {
        let good = finished.iter().filter(|record| objectives.hold(record)).count();
        fields.insert("request_goodput".to_owned(), json!(good as f64 / window.seconds()));
    }
    for metric in SHARED {
        latency(&mut fields, metric, metric.samples(finished.iter().copied()));
    }
    fields
}

fn totals(finished: &[&RequestRecord], window: Window) -> Map<String, Value> {
    let duration = window.seconds();
    let input: u64 = finished.iter().map(|record| u64::from(record.prompt_tokens)).sum();
    let output: u64 = finished.iter().map(|record| u64::from(record.output_tokens())).sum();
    let (per_second, concurrent) = peaks(finished);
    let entries = [
        ("duration", json!(duration)),
        ("completed", json!(finished.len())),
        ("total_input_tokens", json!(input)),
        ("total_output_tokens", json!(output)),
        ("request_throughput", json!(finished.len() as f64 / duration)),
        ("output_throughput", json!(output as f64 / duration)),
        ("total_token_throughput", json!((input + output) as f64 / duration)),
        ("max_output_tokens_per_s", json!(per_second)),
        ("max_concurrent_requests", json!(concurrent)),
    ];
    entries.map(|(name, value)| (name.to_owned(), value)).into_iter().collect()
}

/// Returns the largest number of tokens, and of running requests, in a one-second bucket since the first
/// request.
fn peaks(finished: &[&RequestRecord]) -> (u64, u64) {
    let start_us = finished.iter().map(|record| record.intended_us).min().unwrap_or(0);
    let bucket = |at_us: u64| ((at_us - start_us) / 1_000_000) as usize;
    let n_buckets = finished.iter().map(|record| bucket(record.ended_at_us()) + 2).max().unwrap_or(1);
    let (mut tokens, mut requests) = (vec![0u64; n_buckets], vec![0u64; n_buckets]);
    for record in finished {
        for chunk in record.deliveries() {
            tokens[bucket(record.intended_us + u64::from(chunk.at_us))] += u64::from(chunk.tokens);
        }
        let last_us = record.intended_us + u64::from(record.last_token_us().unwrap_or(0));
        requests[bucket(record.intended_us)..=bucket(last_us)].iter_mut().for_each(|n| *n += 1);
    }
    (tokens.into_iter().max().unwrap_or(0), requests.into_iter().max().unwrap_or(0))
}

fn latency(fields: &mut Map<String, Value>, metric: Metric, mut samples: Vec<f64>) {
    samples.sort_unstable_by(f64::total_cmp);
    // Without samples vLLM prints 0, so one sample of 0 is added.
    if samples.is_empty() {
        samples.push(0.0);
    }
    let name = metric.name();
    fields.insert(format!("mean_{name}_ms"), json!(mean(&samples)));
    fields.insert(format!("median_{name}_ms"), json!(percentile(&samples, 50.0)));
    fields.insert(format!("std_{name}_ms"), json!(deviation(&samples)));
    for percent in [90, 95, 99] {
        fields.insert(format!("p{percent}_{name}_ms"), json!(percentile(&samples, f64::from(percent))));
    }
}
