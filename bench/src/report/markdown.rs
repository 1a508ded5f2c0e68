//! Runs as a table, for the terminal and for documents.

use std::fmt::Write as _;

use crate::metrics::Metric;
use crate::report::RunReport;
use crate::span::show_ms;

/// One column for each run; a row for each number.
pub fn table(runs: &[RunReport]) -> String {
    let mut text = String::new();
    row(&mut text, "", runs, |run| run.label.clone());
    let _ = writeln!(text, "|---|{}", "---|".repeat(runs.len()));
    row(&mut text, "valid", runs, |run| if run.valid { "yes".to_owned() } else { "**NO**".to_owned() });
    row(&mut text, "sent / finished / failed / cancelled", runs, |run| {
        let requests = &run.requests;
        format!("{} / {} / {} / {}", requests.sent, requests.finished, requests.failed, requests.cancelled)
    });
    row(&mut text, "output tokens/s", runs, |run| format!("{:.1}", run.rates.output_tokens_per_s));
    row(&mut text, "requests/s", runs, |run| format!("{:.2}", run.rates.requests_per_s));
    if runs.iter().any(|run| !run.slo.is_empty()) {
        row(&mut text, "objective", runs, |run| run.objectives().to_string());
        row(&mut text, "attainment over sent", runs, |run| format!("{:.1} %", run.attainment.share * 100.0));
        row(&mut text, "goodput requests/s", runs, |run| format!("{:.2}", run.rates.goodput_per_s));
    }
    for metric in Metric::ALL {
        let name = format!("{} p50 / p90 / p99 / max", metric.name());
        row(&mut text, &name, runs, |run| {
            let of = run.latency(metric);
            [of.p50, of.p90, of.p99, of.max].map(show_ms).join(" / ")
        });
    }
    row(&mut text, "first contact ttft", runs, |run| show_ms(run.subject.cold_ttft_ms));
    row(&mut text, "own lag p99: sending / event loop", runs, |run| {
        format!("{} / {}", show_ms(run.lag.send_ms.p99), show_ms(run.lag.event_loop_ms.p99))
    });
    text
}

/// What a reader must know, run by run.
pub fn remarks(runs: &[RunReport]) -> String {
    let mut text = String::new();
    for run in runs {
        for reason in &run.lag.invalid_because {
            let _ = writeln!(text, "- **{} is invalid**: {reason}", run.label);
        }
        for note in &run.notes {
            let _ = writeln!(text, "- {}: {note}", run.label);
        }
        for (kind, n) in &run.requests.failures {
            let _ = writeln!(text, "- {}: {n} failed ({kind}); {}", run.label, first_error(run));
        }
        for fault in &run.faults {
            let at = fault.at_us as f64 / 1e6;
            let recovery = show_ms(fault.recovery_s * 1e3);
            let _ = writeln!(
                text,
                "- {}: {at:.1} s {}: {} lost, recovered after {recovery}",
                run.label, fault.what, fault.lost
            );
        }
    }
    text
}

/// Where and how: the lines under a table that make it a measurement.
pub fn provenance(run: &RunReport) -> String {
    let from = &run.provenance;
    let machine = &from.machine;
    let gpus = if machine.gpus.is_empty() { String::new() } else { format!(", {}", machine.gpus.join(", ")) };
    format!(
        "{}: {}, commit {}, {} × {} cores, {} GiB{gpus}, kernel {}; model {}; cache {}; `{}`\n",
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

fn row(text: &mut String, name: &str, runs: &[RunReport], cell: impl Fn(&RunReport) -> String) {
    let cells: Vec<_> = runs.iter().map(|run| cell(run).replace('|', "\\|")).collect();
    let _ = writeln!(text, "| {name} | {} |", cells.join(" | "));
}

fn first_error(run: &RunReport) -> String {
    run.samples.errors.first().map_or(String::new(), |error| error.chars().take(160).collect())
}
