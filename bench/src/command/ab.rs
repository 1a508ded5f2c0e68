//! `baton bench ab`: measures two servers, or two settings of one, in turns, so that drift affects both.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use serde_json::{Map, Value};
use tokio::time::Instant;

use crate::bootstrap::{Contrast, Resampling, Statistic, Units, contrasts};
use crate::command::compare::{STATISTICS, distinct, table};
use crate::command::measure::{Bench, OutputArgs, RequestArgs, RunSpec, parse_fields, parse_header};
use crate::command::{CommandOutcome, say, tell};
use crate::error::{BenchError, Result, write_text};
use crate::load::LoadArgs;
use crate::metrics::{LagSamples, Metric, Objectives};
use crate::record::RequestRecord;
use crate::report::{RunReport, html, markdown};
use crate::span::parse_span;
use crate::workload::{ArrivalTimes, WorkloadArgs};

/// The smallest number of pairs. With fewer the interval is meaningless.
const N_PAIRS_MIN: usize = 4;

#[derive(Clone, Debug, Args)]
pub struct AbArgs {
    /// The server A, to compare with
    #[arg(long, value_name = "URL")]
    pub a: String,
    /// The server B, which may be better; by default the same as A, if only settings differ
    #[arg(long, value_name = "URL")]
    pub b: Option<String>,
    /// The name of A in tables
    #[arg(long, default_value = "A")]
    pub a_label: String,
    /// The name of B in tables
    #[arg(long, default_value = "B")]
    pub b_label: String,
    /// A header for A's requests only
    #[arg(long, value_parser = parse_header, value_name = "HEADER")]
    pub a_header: Vec<(String, String)>,
    /// A header for B's requests only
    #[arg(long, value_parser = parse_header, value_name = "HEADER")]
    pub b_header: Vec<(String, String)>,
    /// Fields for A's requests only
    #[arg(long, value_parser = parse_fields, value_name = "JSON")]
    pub a_fields: Option<Map<String, Value>>,
    /// Fields for B's requests only
    #[arg(long, value_parser = parse_fields, value_name = "JSON")]
    pub b_fields: Option<Map<String, Value>>,
    /// A's rate if it differs from --rate: a replica behind a random choice of two gets half the rate
    #[arg(long, value_name = "PER_SECOND", requires = "rate")]
    pub a_rate: Option<f64>,
    /// Number of pairs of slices: A B, B A, A B, …
    #[arg(long, default_value_t = 10, value_name = "N")]
    pub pairs: usize,
    /// Length of a slice, unless --requests sets its number of sessions
    #[arg(long, default_value = "10s", value_parser = parse_span, value_name = "SPAN")]
    pub slice: Duration,
    #[command(flatten)]
    pub requests: RequestArgs,
    #[command(flatten)]
    pub workload: WorkloadArgs,
    #[command(flatten)]
    pub load: LoadArgs,
    #[command(flatten)]
    pub output: OutputArgs,
    /// File for an HTML page about both sides
    #[arg(long, value_name = "FILE", help_heading = "Results")]
    pub html: Option<PathBuf>,
}

/// One of the two targets, with its records.
struct Side {
    bench: Bench,
    label: String,
    load: LoadArgs,
    /// The records of all slices of this side, joined without the other side's slices.
    records: Vec<RequestRecord>,
    elapsed: Duration,
    lag: LagSamples,
    /// Output tokens per second in each slice.
    rates: Units,
}

pub async fn run(args: AbArgs) -> Result<CommandOutcome> {
    let load = slice_load(&args)?;
    let load_a = LoadArgs { rate: args.a_rate.or(load.rate), ..load.clone() };
    load_a.check(ArrivalTimes::Generated)?;
    let mut sides = [side(&args, load_a, SideName::A).await?, side(&args, load, SideName::B).await?];
    'pairs: for pair in 0..args.pairs {
        // The order alternates, A B then B A, so that drift in one direction favours neither side.
        for nth in if pair % 2 == 0 { [0, 1] } else { [1, 0] } {
            tell(&format!("pair {} of {}: {}", pair + 1, args.pairs, sides[nth].label));
            sides[nth].play(&args, pair, nth).await?;
            if sides[nth].lag.interrupted {
                break 'pairs;
            }
        }
    }
    present(&args, &sides)
}

/// Returns the load of one slice. Each slice is a separate run, with its own warm-up cut off.
fn slice_load(args: &AbArgs) -> Result<LoadArgs> {
    if args.pairs < N_PAIRS_MIN {
        return Err(BenchError::usage(format!(
            "--pairs is at least {N_PAIRS_MIN}: the interval is drawn from them"
        )));
    }
    if args.load.arrivals.is_some() || args.workload.arrival_times() == ArrivalTimes::Recorded {
        return Err(BenchError::usage(
            "ab draws each slice anew: give --rate or --concurrency, not recorded times",
        ));
    }
    let duration = args.load.requests.is_none().then_some(args.slice);
    let load = LoadArgs { duration, ..args.load.clone() };
    load.check(ArrivalTimes::Generated)?;
    Ok(load)
}

/// Names one of the two sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SideName {
    A,
    B,
}

async fn side(args: &AbArgs, load: LoadArgs, name: SideName) -> Result<Side> {
    let (url, label, headers, fields) = match name {
        SideName::A => (&args.a, &args.a_label, &args.a_header, &args.a_fields),
        SideName::B => (args.b.as_ref().unwrap_or(&args.a), &args.b_label, &args.b_header, &args.b_fields),
    };
    let mut requests = args.requests.clone();
    requests.header.extend(headers.iter().cloned());
    requests.fields.get_or_insert_default().extend(fields.clone().unwrap_or_default());
    let workload = WorkloadArgs { seed: Some(args.workload.seed.unwrap_or(1)), ..args.workload.clone() };
    let bench = Bench::prepare(url, &requests, &workload).await?;
    let (label, lag) = (label.clone(), LagSamples::default());
    Ok(Side { bench, label, load, records: Vec::new(), elapsed: Duration::ZERO, lag, rates: Vec::new() })
}

impl Side {
    /// Measures one slice of this side. Both slices of a pair have the same arrivals and lengths, and prompts
    /// that are in no cache.
    async fn play(&mut self, args: &AbArgs, pair: usize, nth: usize) -> Result<()> {
        let begun = Instant::now();
        let spec = RunSpec {
            seed_step: 1 + pair as u64,
            salt_step: 1 + 2 * pair as u64 + nth as u64,
            slice: pair as u32,
            epoch: begun.checked_sub(self.elapsed),
            is_quiet: args.output.quiet,
            ..RunSpec::new(self.load.clone(), &self.label)
        };
        let seen = self.bench.run(&spec).await?;
        let starts_us = self.elapsed.as_micros() as u64;
        self.elapsed += begun.elapsed();
        let skip_us = starts_us + self.load.skip().as_micros() as u64;
        let kept: Vec<_> = seen.records.into_iter().filter(|record| record.intended_us >= skip_us).collect();
        self.rates.push(vec![rate(&kept)]);
        self.records.extend(kept);
        self.lag.merge(seen.lag);
        Ok(())
    }

    /// Returns a metric's samples with one unit per pair of slices.
    fn units(&self, metric: Metric, n_pairs: usize) -> Units {
        let of = |pair| self.records.iter().filter(move |record| record.slice == pair as u32);
        (0..n_pairs).map(|pair| metric.samples(of(pair))).collect()
    }

    fn attainment(&self, objectives: &Objectives, n_pairs: usize) -> Units {
        let good = |record: &RequestRecord| f64::from(u8::from(objectives.hold(record)));
        let of = |pair| self.records.iter().filter(move |r| r.slice == pair as u32 && !r.is_cancelled());
        (0..n_pairs).map(|pair| of(pair).map(good).collect()).collect()
    }
}

/// Returns the output tokens per second, from the first request due to the last token.
fn rate(records: &[RequestRecord]) -> f64 {
    let start = records.iter().map(|record| record.intended_us).min().unwrap_or(0);
    let end = records.iter().map(RequestRecord::ended_at_us).max().unwrap_or(0);
    let tokens: u64 = records.iter().map(|record| u64::from(record.counted_tokens())).sum();
    tokens as f64 * 1e6 / (end - start).max(1) as f64
}

fn present(args: &AbArgs, sides: &[Side; 2]) -> Result<CommandOutcome> {
    let n_pairs = sides[0].rates.len().min(sides[1].rates.len());
    let found = compare(args, sides, n_pairs);
    let reports: Vec<RunReport> = sides.iter().map(|side| side_report(args, side, &found)).collect();
    for (report, suffix) in reports.iter().zip(["a", "b"]) {
        args.output.write(report, suffix)?;
    }
    say(&format!("A: {}\nB: {}\n", args.a_label, args.b_label));
    say(&table(&found));
    say(&markdown::remark_list(&reports));
    if let Some(path) = &args.html {
        write_text(path, &html::page(&format!("{} against {}", args.b_label, args.a_label), &reports)?)?;
    }
    Ok(if reports.iter().all(|report| report.valid) { CommandOutcome::Well } else { CommandOutcome::Invalid })
}

fn compare(args: &AbArgs, sides: &[Side; 2], n_pairs: usize) -> Vec<Contrast> {
    let [a, b] = sides;
    let mut found = Vec::new();
    let (all_a, all_b): (Vec<_>, Vec<_>) = (a.records.iter().collect(), b.records.iter().collect());
    for metric in distinct(&all_a, &all_b) {
        let (a, b) = (a.units(metric, n_pairs), b.units(metric, n_pairs));
        found.extend(contrasts(metric.name(), &a, &b, &STATISTICS, Resampling::Paired));
    }
    let mean = [Statistic::Mean];
    let (rates_a, rates_b) = (a.rates[..n_pairs].to_vec(), b.rates[..n_pairs].to_vec());
    found.extend(contrasts("output tokens/s", &rates_a, &rates_b, &mean, Resampling::Paired));
    let slo = &args.output.slo;
    found.extend(contrasts(
        "attainment",
        &a.attainment(slo, n_pairs),
        &b.attainment(slo, n_pairs),
        &mean,
        Resampling::Paired,
    ));
    found
}

/// Makes the report of one side, including the comparison.
fn side_report(args: &AbArgs, side: &Side, found: &[Contrast]) -> RunReport {
    let load = LoadArgs { ramp: Duration::ZERO, warmup: Duration::ZERO, ..side.load.clone() };
    let spec = RunSpec { is_quiet: true, ..RunSpec::new(load, &side.label) };
    let mut report = side.bench.report(&spec, &args.output.slo, &side.records, side.lag.clone());
    let compared = serde_json::to_value(found).unwrap_or_default();
    report.shared.insert("ab".to_owned(), compared);
    report
}
