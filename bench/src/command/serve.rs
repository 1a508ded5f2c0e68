//! `baton bench serve`: measures one run, a sweep of runs, or the highest rate that holds the objectives.

use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;

use crate::command::measure::{Bench, OutputArgs, RequestArgs, RunSpec};
use crate::command::search::Search;
use crate::command::{CommandOutcome, say, tell};
use crate::error::{BenchError, Result, write_text};
use crate::load::LoadArgs;
use crate::report::{RunReport, html, markdown};
use crate::workload::WorkloadArgs;

#[derive(Clone, Debug, Args)]
pub struct ServeArgs {
    /// The server to measure
    #[arg(long, default_value = "http://127.0.0.1:8000", env = "BATON_BENCH_URL")]
    pub url: String,
    #[command(flatten)]
    pub requests: RequestArgs,
    #[command(flatten)]
    pub workload: WorkloadArgs,
    #[command(flatten)]
    pub load: LoadArgs,
    #[command(flatten)]
    pub output: OutputArgs,
    /// Make one run for each value: rate=1,2,4 or concurrency=1,8,64
    #[arg(long, value_name = "WHAT=VALUES", help_heading = "Load", conflicts_with_all = ["rate", "concurrency", "arrivals"])]
    pub sweep: Option<Sweep>,
    /// Search for the highest rate at which this share of sent requests holds --slo, beginning at --rate
    #[arg(long, value_name = "SHARE", help_heading = "Load", conflicts_with_all = ["sweep", "concurrency", "arrivals"])]
    pub find_rate: Option<f64>,
    /// File for an HTML page about all runs of this command
    #[arg(long, value_name = "FILE", help_heading = "Results")]
    pub html: Option<PathBuf>,
}

/// The setting that a sweep varies, with its values.
#[derive(Clone, Debug, PartialEq)]
pub enum Sweep {
    Rate(Vec<f64>),
    Concurrency(Vec<usize>),
}

impl FromStr for Sweep {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let sweep = match text.split_once('=') {
            Some(("rate", values)) => list(values).map(Sweep::Rate),
            Some(("concurrency", values)) => list(values).map(Sweep::Concurrency),
            _ => None,
        };
        sweep.ok_or_else(|| format!("`{text}` is neither rate=1,2,4 nor concurrency=1,8,64"))
    }
}

fn list<T: FromStr>(text: &str) -> Option<Vec<T>> {
    text.split(',').map(|value| value.trim().parse().ok()).collect()
}

pub async fn run(args: ServeArgs) -> Result<CommandOutcome> {
    let points = points(&args)?;
    let arrivals = args.workload.arrival_times();
    points.iter().try_for_each(|(_, load)| load.check(arrivals))?;
    let bench = Bench::prepare(&args.url, &args.requests, &args.workload).await?;
    tell(&format!(
        "{}: tokens counted by {}; seed {}, salt {}",
        args.url, bench.survey.counted_by, bench.seed, bench.salt
    ));
    let reports = match args.find_rate {
        Some(share) => search(&args, &bench, share).await?,
        None => measure_all(&args, &bench, points).await?,
    };
    present(&args, &reports)
}

/// Returns the label and the load of each run to make.
fn points(args: &ServeArgs) -> Result<Vec<(String, LoadArgs)>> {
    let with = |change: &dyn Fn(&mut LoadArgs)| {
        let mut load = args.load.clone();
        change(&mut load);
        load
    };
    Ok(match (&args.sweep, args.find_rate) {
        (Some(Sweep::Rate(rates)), _) => {
            rates.iter().map(|rate| (format!("rate={rate}"), with(&|load| load.rate = Some(*rate)))).collect()
        }
        (Some(Sweep::Concurrency(counts)), _) => {
            let load = |n: usize| with(&|load| load.concurrency = Some(n));
            counts.iter().map(|n| (format!("concurrency={n}"), load(*n))).collect()
        }
        (None, Some(_)) if args.output.slo.is_empty() => {
            return Err(BenchError::usage("--find-rate needs --slo"));
        }
        (None, Some(_)) => vec![(String::new(), with(&|load| load.rate = Some(load.rate.unwrap_or(1.0))))],
        (None, None) => vec![(String::new(), args.load.clone())],
    })
}

async fn measure_all(
    args: &ServeArgs,
    bench: &Bench,
    points: Vec<(String, LoadArgs)>,
) -> Result<Vec<RunReport>> {
    let mut reports = Vec::with_capacity(points.len());
    for (nth, (name, load)) in points.into_iter().enumerate() {
        let report = measure(args, bench, &name, load, nth as u64).await?;
        let is_interrupted = report.lag.interrupted;
        reports.push(report);
        if is_interrupted {
            break;
        }
    }
    Ok(reports)
}

async fn measure(args: &ServeArgs, bench: &Bench, name: &str, load: LoadArgs, nth: u64) -> Result<RunReport> {
    let label = match (&args.output.label, name) {
        (Some(label), "") => label.clone(),
        (Some(label), name) => format!("{label} {name}"),
        (None, "") => "serve".to_owned(),
        (None, name) => name.to_owned(),
    };
    let spec = RunSpec { salt_step: nth, is_quiet: args.output.quiet, ..RunSpec::new(load, &label) };
    let seen = bench.run(&spec).await?;
    let report = bench.report(&spec, &args.output.slo, &seen.records, seen.lag);
    args.output.write(&report, name)?;
    Ok(report)
}

/// Searches for the highest rate. Each probe is a whole run with new prompts, and all of them are reported.
async fn search(args: &ServeArgs, bench: &Bench, share: f64) -> Result<Vec<RunReport>> {
    let mut search = Search::from(args.load.rate.unwrap_or(1.0));
    let mut reports: Vec<RunReport> = Vec::new();
    while let Some(rate) = search.next() {
        let load = LoadArgs { rate: Some(rate), ..args.load.clone() };
        let report = measure(args, bench, &format!("rate={rate:.3}"), load, reports.len() as u64).await?;
        let (attained, is_valid) = (report.attainment.share, report.valid);
        tell(&format!(
            "rate {rate:.3}: {:.1} % of {} requests hold",
            attained * 100.0,
            report.attainment.sent
        ));
        if attained >= share {
            search.note_held(rate);
        } else {
            search.note_broke(rate);
        }
        reports.push(report);
        if !is_valid {
            tell("the harness was the bottleneck: the search ends here");
            break;
        }
    }
    match search.answer() {
        Some(rate) => say(&format!(
            "highest rate that holds {} for {:.0} %: {rate:.3} requests/s",
            args.output.slo,
            share * 100.0
        )),
        None => say(&format!("no rate that was tried holds {}", args.output.slo)),
    }
    let rate = |report: &RunReport| report.provenance.load["rate"].as_f64().unwrap_or(0.0);
    reports.sort_by(|one, other| rate(one).total_cmp(&rate(other)));
    Ok(reports)
}

fn present(args: &ServeArgs, reports: &[RunReport]) -> Result<CommandOutcome> {
    say(&markdown::table(reports).to_markdown());
    say(&markdown::remark_list(reports));
    if let Some(path) = &args.html {
        write_text(path, &html::page("baton bench serve", reports)?)?;
    }
    Ok(if reports.iter().all(|report| report.valid) { CommandOutcome::Well } else { CommandOutcome::Invalid })
}
