//! `baton bench faults`: measures a cluster under load while faults are injected.

use std::path::PathBuf;

use clap::Args;
use tokio::time::Instant;

use crate::client::TargetServer;
use crate::command::measure::{Bench, OutputArgs, RequestArgs, RunSpec};
use crate::command::{CommandOutcome, say};
use crate::error::{Result, write_text};
use crate::faults::{InjectedFault, Schedule, inject_all};
use crate::load::LoadArgs;
use crate::load::drive::LoadResult;
use crate::recovery::costs;
use crate::report::{FaultMark, RunReport, html, markdown};
use crate::workload::WorkloadArgs;

#[derive(Clone, Debug, Args)]
pub struct FaultsArgs {
    /// The router of the cluster
    #[arg(long, default_value = "http://127.0.0.1:8000", env = "BATON_BENCH_URL")]
    pub url: String,
    /// The faults with their times: a TOML file, see docs/measurements/README.md
    #[arg(long, value_name = "FILE")]
    pub schedule: PathBuf,
    #[command(flatten)]
    pub requests: RequestArgs,
    #[command(flatten)]
    pub workload: WorkloadArgs,
    #[command(flatten)]
    pub load: LoadArgs,
    #[command(flatten)]
    pub output: OutputArgs,
    /// File for an HTML page about the run
    #[arg(long, value_name = "FILE", help_heading = "Results")]
    pub html: Option<PathBuf>,
}

pub async fn run(args: FaultsArgs) -> Result<CommandOutcome> {
    args.load.check(args.workload.arrival_times())?;
    let schedule = Schedule::read(&args.schedule)?;
    let bench = Bench::prepare(&args.url, &args.requests, &args.workload).await?;
    let target = TargetServer::resolve(&args.url).await?;
    let label = args.output.label.as_deref().unwrap_or("faults");
    let spec = RunSpec { is_quiet: args.output.quiet, ..RunSpec::new(args.load.clone(), label) };
    let mut injected = Vec::with_capacity(schedule.faults.len());
    let strikes = inject_all(&schedule, &target, Instant::now(), &mut injected);
    let (seen, strikes) = tokio::join!(bench.run(&spec), strikes);
    let seen = seen?;
    let mut report = bench.report(&spec, &args.output.slo, &seen.records, seen.lag.clone());
    report.faults = marks(&args, &seen, &injected);
    args.output.write(&report, "")?;
    let ended = present(&args, report)?;
    // The report is written in any case, but a schedule that was not completed is an error.
    strikes.map(|()| ended)
}

fn marks(args: &FaultsArgs, seen: &LoadResult, injected: &[InjectedFault]) -> Vec<FaultMark> {
    let at_us: Vec<_> = injected
        .iter()
        .map(|injected| injected.at.saturating_duration_since(seen.epoch).as_micros() as u64)
        .collect();
    let costs = costs(&seen.records, &at_us, &args.output.slo);
    let mark = |((injected, at_us), cost): ((&InjectedFault, u64), crate::recovery::Cost)| FaultMark {
        at_us,
        what: injected.what.clone(),
        lost: cost.lost,
        recovery_s: cost.recovery_s,
    };
    injected.iter().zip(at_us).zip(costs).map(mark).collect()
}

fn present(args: &FaultsArgs, report: RunReport) -> Result<CommandOutcome> {
    let reports = [report];
    say(&markdown::table(&reports).to_markdown());
    say(&markdown::remark_list(&reports));
    if let Some(path) = &args.html {
        write_text(path, &html::page("baton bench faults", &reports)?)?;
    }
    Ok(if reports[0].valid { CommandOutcome::Well } else { CommandOutcome::Invalid })
}
