//! `baton bench explain`: where the time went in a run with `--explain`, as a table and as stacked bars.

use std::path::PathBuf;

use clap::Args;

use crate::command::{CommandOutcome, say, tell};
use crate::error::{BenchError, Result, write_text};
use crate::explanation::{Explanation, Parts};
use crate::report::RunReport;
use crate::report::bars::{Bar, StackedBars, bars};
use crate::report::table::Table;

/// The shares of requests that the bars show, the slowest last: of all, and of the slowest ones.
const SHARES: [(&str, f64); 4] =
    [("all requests", 1.0), ("slowest half", 0.5), ("slowest 10 %", 0.1), ("slowest 1 %", 0.01)];

#[derive(Clone, Debug, Args)]
pub struct ExplainArgs {
    /// A report of a run with --explain
    pub file: PathBuf,
    /// File for the stacked bars, as SVG
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
}

pub fn run(args: &ExplainArgs) -> Result<CommandOutcome> {
    let report = RunReport::read(&args.file)?;
    if report.explanations.is_empty() {
        let reason = "no request has an explanation: measure a Baton router with --explain";
        return Err(BenchError::parse(&args.file, reason));
    }
    let all = report.explanations.iter().map(|request| &request.explained);
    let groups = groups(all);
    groups.iter().for_each(|group| say(&table(group).to_markdown()));
    if let Some(path) = &args.svg {
        write_text(path, &bars(&groups))?;
        tell(&format!("bars: {}", path.display()));
    }
    Ok(CommandOutcome::Well)
}

/// Returns the bars of the time to the first token, and those of the worst gap.
fn groups<'a>(all: impl Iterator<Item = &'a Explanation> + Clone) -> [StackedBars; 2] {
    let first = all.clone().map(|explained| &explained.before_first_token_ms).collect();
    let gaps = all.filter_map(|explained| Some(&explained.worst_gap.as_ref()?.parts_ms)).collect();
    [group("Time to first token", first), group("Worst gap between tokens", gaps)]
}

/// Makes one bar per share: the mean of its requests, part by part.
fn group(title: &str, mut of_requests: Vec<&Parts>) -> StackedBars {
    let sum = |parts: &Parts| parts.values().sum::<f64>();
    of_requests.sort_by(|a, b| sum(b).total_cmp(&sum(a)));
    let mut parts: Vec<String> = of_requests.iter().flat_map(|parts| parts.keys().cloned()).collect();
    parts.sort_unstable();
    parts.dedup();
    let bar = |(name, share): &(&str, f64)| {
        let n = ((of_requests.len() as f64 * share).ceil() as usize).max(1).min(of_requests.len());
        let mean = |part: &String| {
            of_requests[..n].iter().filter_map(|parts| parts.get(part)).sum::<f64>() / n.max(1) as f64
        };
        Bar { name: (*name).to_owned(), sizes: parts.iter().map(mean).collect() }
    };
    let bars = SHARES.iter().map(bar).collect();
    StackedBars { title: title.to_owned(), parts, bars }
}

fn table(group: &StackedBars) -> Table {
    let names = group.bars.iter().map(|bar| bar.name.clone());
    let header = std::iter::once(format!("{}, ms", group.title)).chain(names).collect();
    let row = |(nth, part): (usize, &String)| {
        let sizes = group.bars.iter().map(|bar| format!("{:.2}", bar.sizes[nth]));
        std::iter::once(part.clone()).chain(sizes).collect()
    };
    let sums = group.bars.iter().map(|bar| format!("{:.2}", bar.sizes.iter().sum::<f64>()));
    let sum = std::iter::once("sum".to_owned()).chain(sums).collect();
    Table { header, rows: group.parts.iter().enumerate().map(row).chain([sum]).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slowest_requests_have_their_own_bars() {
        let parts = |reserve: f64, decode: f64| {
            Parts::from([("reserve".to_owned(), reserve), ("decode".to_owned(), decode)])
        };
        let all: Vec<Parts> = (0..100).map(|nth| parts(f64::from(nth / 99 * 50), 1.0)).collect();
        let group = group("t", all.iter().collect());
        assert_eq!(group.parts, ["decode", "reserve"]);
        let sizes: Vec<&[f64]> = group.bars.iter().map(|bar| bar.sizes.as_slice()).collect();
        assert_eq!(sizes, [[1.0, 0.5], [1.0, 1.0], [1.0, 5.0], [1.0, 50.0]]);
        assert!(table(&group).to_markdown().contains("| sum"));
        assert!(super::group("t", Vec::new()).bars.iter().all(|bar| bar.sizes.is_empty()));
    }
}
