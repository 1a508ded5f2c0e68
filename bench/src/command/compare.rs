//! `baton bench compare A B`: shows the differences between two reports, and whether they are more than
//! noise.

use std::fmt::Write as _;
use std::path::PathBuf;

use clap::Args;
use serde_json::Value;

use crate::bootstrap::{Contrast, Resampling, Statistic, Units, contrasts};
use crate::command::{CommandOutcome, say};
use crate::error::Result;
use crate::metrics::{Metric, Objectives};
use crate::record::RequestRecord;
use crate::report::RunReport;
use crate::report::table::Table;
use crate::span::show_ms;

#[derive(Clone, Debug, Args)]
pub struct CompareArgs {
    /// Report A, to compare with
    pub a: PathBuf,
    /// Report B, which may be better
    pub b: PathBuf,
}

/// The statistics that are compared for every metric.
pub const STATISTICS: [Statistic; 4] =
    [Statistic::Percentile(50.0), Statistic::Percentile(90.0), Statistic::Percentile(99.0), Statistic::Mean];

pub fn run(args: &CompareArgs) -> Result<CommandOutcome> {
    let (a, b) = (RunReport::read(&args.a)?, RunReport::read(&args.b)?);
    say(&differences(&a, &b));
    for (name, run) in [("A", &a), ("B", &b)] {
        if !run.valid {
            invalid(name, &run.lag.invalid_because).iter().for_each(|line| say(line));
        }
    }
    let (records_a, records_b) = (a.records()?, b.records()?);
    let (chosen_a, chosen_b) = (a.window.of(&records_a), b.window.of(&records_b));
    let mut found = Vec::new();
    for metric in distinct(&chosen_a, &chosen_b) {
        let (a, b) = (by_request(&chosen_a, metric), by_request(&chosen_b, metric));
        found.extend(contrasts(metric.name(), &a, &b, &STATISTICS, Resampling::Independent));
    }
    found.extend(attainment(&chosen_a, &chosen_b, &a.objectives()));
    say(&table(&found));
    Ok(if a.valid && b.valid { CommandOutcome::Well } else { CommandOutcome::Invalid })
}

/// Returns lines that say that an invalid run is invalid, and why, because an exit code alone is overlooked.
fn invalid(name: &str, reasons: &[String]) -> Vec<String> {
    match reasons {
        [] => vec![format!("{name} is INVALID")],
        reasons => reasons.iter().map(|reason| format!("{name} is INVALID: {reason}")).collect(),
    }
}

/// Returns the metrics to compare, without duplicates: if every token comes with its text, or every chunk
/// with one token, two pairs of metrics have the same numbers.
pub fn distinct(a: &[&RequestRecord], b: &[&RequestRecord]) -> Vec<Metric> {
    let same = |records: &[&RequestRecord], one: Metric, other: Metric| {
        one.samples(records.iter().copied()) == other.samples(records.iter().copied())
    };
    let repeats = |one, other| same(a, one, other) && same(b, one, other);
    let is_new = |metric: &Metric| match metric {
        Metric::FirstText => !repeats(Metric::FirstText, Metric::Ttft),
        Metric::Itl => !repeats(Metric::Itl, Metric::Tbt),
        _ => true,
    };
    Metric::ALL.into_iter().filter(is_new).collect()
}

/// Returns a metric's samples with one unit per request, because the gaps of one request depend on each
/// other.
fn by_request(records: &[&RequestRecord], metric: Metric) -> Units {
    let units = records.iter().map(|record| metric.samples(std::iter::once(*record)));
    units.filter(|samples| !samples.is_empty()).collect()
}

/// Compares the attainment. A good request counts 1 and another 0, so that the mean is the attainment.
fn attainment(a: &[&RequestRecord], b: &[&RequestRecord], objectives: &Objectives) -> Vec<Contrast> {
    let sent = |records: &[&RequestRecord]| -> Units {
        let counted = records.iter().filter(|record| !record.is_cancelled());
        counted.map(|record| vec![f64::from(u8::from(objectives.hold(record)))]).collect()
    };
    contrasts("attainment", &sent(a), &sent(b), &[Statistic::Mean], Resampling::Independent)
}

/// Returns the table of the comparisons: latencies in milliseconds, with the interval of the ratio.
pub fn table(contrasts: &[Contrast]) -> String {
    let header = ["", "A", "B", "B ÷ A", "95 % interval", ""].map(str::to_owned).to_vec();
    let tells = |contrast: &&Contrast| !contrast.ratio.is_nan() || contrast.a != contrast.b;
    let row = |contrast: &Contrast| {
        let show = |value: f64| if is_latency(contrast) { show_ms(value) } else { format!("{value:.3}") };
        vec![
            contrast.name.to_string(),
            show(contrast.a),
            show(contrast.b),
            format!("{:.3}", contrast.ratio),
            format!("{:.3} – {:.3}", contrast.low, contrast.high),
            contrast.verdict().to_string(),
        ]
    };
    Table { header, rows: contrasts.iter().filter(tells).map(row).collect() }.to_markdown()
}

fn is_latency(contrast: &Contrast) -> bool {
    Metric::ALL.iter().any(|metric| contrast.name.starts_with(metric.name()))
}

/// Returns the settings in which the two runs differ. Each may explain a difference in numbers.
fn differences(a: &RunReport, b: &RunReport) -> String {
    let mut text = format!("A: {}\nB: {}\n", a.label, b.label);
    let settings = |run: &RunReport| {
        let from = &run.provenance;
        serde_json::json!({
            "commit": from.commit, "machine": from.machine, "workload": from.workload, "load": from.load,
            "seed": from.seed, "cache cold": from.is_cache_cold, "slo": run.slo, "valid": run.valid,
            "target": run.subject,
        })
    };
    let mut found = Vec::new();
    differ("", &settings(a), &settings(b), &mut found);
    for line in &found {
        let _ = writeln!(text, "  {line}");
    }
    if found.is_empty() {
        text.push_str("  the settings are the same\n");
    }
    text
}

/// Compares settings field by field, without measured values, and adds the differences to `found`.
fn differ(path: &str, a: &Value, b: &Value, found: &mut Vec<String>) {
    match (a, b) {
        (Value::Object(a), Value::Object(b)) => {
            for key in a.keys().chain(b.keys().filter(|key| !a.contains_key(*key))) {
                let inner = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                differ(&inner, a.get(key).unwrap_or(&Value::Null), b.get(key).unwrap_or(&Value::Null), found);
            }
        }
        _ if a != b && !path.contains("cold_") => found.push(format!("{path}: {} → {}", brief(a), brief(b))),
        _ => {}
    }
}

fn brief(value: &Value) -> String {
    let text = value.to_string();
    if text.chars().count() > 80 { text.chars().take(77).chain("...".chars()).collect() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn runs_that_say_nothing_are_called_invalid() {
        let lines = invalid("B", &["its own lag was 40 ms".to_owned()]);
        assert_eq!(lines, ["B is INVALID: its own lag was 40 ms"]);
        assert_eq!(invalid("A", &[]), ["A is INVALID"]);
    }

    #[test]
    fn settings_that_differ_are_named_leaf_by_leaf() {
        let mut found = Vec::new();
        let (a, b) = (json!({"x": {"rate": 1, "same": 2}, "only": 3}), json!({"x": {"rate": 4, "same": 2}}));
        differ("", &a, &b, &mut found);
        assert_eq!(found, ["x.rate: 1 → 4", "only: 3 → null"]);
    }
}
