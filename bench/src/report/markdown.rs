//! Writes runs as text and tables, for the terminal and for documents.

use std::fmt::Write as _;

use crate::metrics::Metric;
use crate::report::RunReport;
use crate::report::table::Table;
use crate::span::show_ms;

/// The largest number of runs that are shown as columns. More runs are shown as rows.
const N_COLUMNS_MAX: usize = 3;

/// A value in a table of runs: its name, and the function that shows it.
type Entry = (String, fn(&RunReport) -> String);

/// Returns a table of the runs: all values for few runs, the compared ones for many.
pub fn table(runs: &[RunReport]) -> Table {
    if runs.len() > N_COLUMNS_MAX { by_rows(runs) } else { by_columns(runs) }
}

/// Returns a table with one column per run.
fn by_columns(runs: &[RunReport]) -> Table {
    let labels = runs.iter().map(|run| run.label.clone());
    let mut rows: Vec<_> = entries(runs).iter().map(|entry| row(&entry.0, runs, entry.1)).collect();
    for metric in Metric::ALL {
        let name = format!("{} p50 / p90 / p99 / max", metric.name());
        rows.push(row(&name, runs, |run| quartet(run, metric)));
    }
    rows.push(row("first contact ttft", runs, |run| show_ms(run.subject.cold_ttft_ms)));
    rows.push(row("own lag p99: sending / event loop", runs, own_lag));
    Table { header: std::iter::once(String::new()).chain(labels).collect(), rows }
}

/// Returns a table with one row per run.
fn by_rows(runs: &[RunReport]) -> Table {
    let entries = entries(runs);
    let compared =
        [Metric::Ttft, Metric::SecondToken, Metric::Tpot, Metric::Tbt, Metric::WorstGap, Metric::E2el];
    let names = entries.iter().map(|entry| entry.0.clone());
    let metrics = compared.iter().map(|metric| format!("{} p50 / p99", metric.name()));
    let header =
        std::iter::once("run".to_owned()).chain(names).chain(metrics).chain(["own lag p99".to_owned()]);
    let row = |run: &RunReport| {
        let pair = |metric: &Metric| {
            let of = run.latency(*metric);
            format!("{} / {}", show_ms(of.p50), show_ms(of.p99))
        };
        let mut row = vec![run.label.clone()];
        row.extend(entries.iter().map(|entry| entry.1(run)));
        row.extend(compared.iter().map(pair));
        row.push(own_lag(run));
        row
    };
    Table { header: header.collect(), rows: runs.iter().map(row).collect() }
}

/// Returns the values that are not latencies. Objectives appear only if some are set.
fn entries(runs: &[RunReport]) -> Vec<Entry> {
    let mut entries: Vec<Entry> = vec![
        ("valid".to_owned(), |run| if run.valid { "yes".to_owned() } else { "NO".to_owned() }),
        ("sent / finished / failed / cancelled".to_owned(), |run| {
            let requests = &run.requests;
            format!(
                "{} / {} / {} / {}",
                requests.sent, requests.finished, requests.failed, requests.cancelled
            )
        }),
        ("output tokens/s".to_owned(), |run| format!("{:.1}", run.rates.output_tokens_per_s)),
        ("requests/s".to_owned(), |run| format!("{:.2}", run.rates.requests_per_s)),
    ];
    if runs.iter().any(|run| !run.slo.is_empty()) {
        entries.extend::<[Entry; 3]>([
            ("objective".to_owned(), |run| run.objectives().to_string()),
            ("attainment over sent".to_owned(), |run| format!("{:.1} %", run.attainment.share * 100.0)),
            ("goodput requests/s".to_owned(), |run| format!("{:.2}", run.rates.goodput_per_s)),
        ]);
    }
    entries
}

fn row(name: &str, runs: &[RunReport], cell: impl Fn(&RunReport) -> String) -> Vec<String> {
    std::iter::once(name.to_owned()).chain(runs.iter().map(cell)).collect()
}

fn quartet(run: &RunReport, metric: Metric) -> String {
    let of = run.latency(metric);
    [of.p50, of.p90, of.p99, of.max].map(show_ms).join(" / ")
}

fn own_lag(run: &RunReport) -> String {
    format!("{} / {}", show_ms(run.lag.send_ms.p99), show_ms(run.lag.event_loop_ms.p99))
}

/// Returns remarks on each run, one sentence each.
pub fn remarks(runs: &[RunReport]) -> Vec<String> {
    runs.iter().flat_map(remarks_of).collect()
}

fn remarks_of(run: &RunReport) -> Vec<String> {
    let label = &run.label;
    let mut all = Vec::new();
    all.extend(run.lag.invalid_because.iter().map(|reason| format!("{label} is INVALID: {reason}")));
    all.extend(run.notes.iter().map(|note| format!("{label}: {note}")));
    let failures = run.requests.failures.iter();
    all.extend(failures.map(|(kind, n)| format!("{label}: {n} failed ({kind})")));
    if let Some(error) = run.samples.errors.first() {
        all.push(format!("{label}: the first error was: {}", error.chars().take(200).collect::<String>()));
    }
    all.extend(run.faults.iter().map(|fault| {
        let (at, back) = (fault.at_us as f64 / 1e6, show_ms(fault.recovery_s * 1e3));
        format!("{label}: at {at:.1} s {}: {} requests lost, recovered after {back}", fault.what, fault.lost)
    }));
    all
}

/// Returns the remarks as a list, for the terminal.
pub fn remark_list(runs: &[RunReport]) -> String {
    remarks(runs).iter().fold(String::new(), |mut text, remark| {
        let _ = writeln!(text, "- {remark}");
        text
    })
}

/// Returns a line about the machine and the command, to be placed below a table.
pub fn provenance(run: &RunReport) -> String {
    let from = &run.provenance;
    let machine = &from.machine;
    let gpus = if machine.gpus.is_empty() { String::new() } else { format!(", {}", machine.gpus.join(", ")) };
    format!(
        "{}: {}, commit {}, {}, {} cores, {} GiB{gpus}, kernel {}; model {}; cache {}; `{}`",
        run.label,
        run.date,
        from.commit.as_deref().unwrap_or("unknown"),
        machine.cpu,
        machine.n_cores,
        machine.memory_gib,
        machine.kernel,
        run.subject.model,
        if from.is_cache_cold { "cold (fresh salt)" } else { "as left by runs with the same salt" },
        from.command.join(" "),
    )
}
