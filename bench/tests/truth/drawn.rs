//! Tests of formats: traces, packed reports and pages.

use bench::metrics::{LagSamples, Metric, Objectives, Window};
use bench::puppet::{Ending, Script};
use bench::record::{CountedBy, RequestRecord};
use bench::report::{FaultMark, MeasuredServer, Provenance, ReportParts, RunReport, html, markdown};

use crate::{millis, recorded};

fn records(ttft_ms: u64) -> Vec<RequestRecord> {
    (0..40)
        .map(|nth| {
            let mut script = Script::even(20, millis(ttft_ms + u64::from(nth) * 3), millis(12));
            script.ending = if nth == 7 { Ending::Cut } else { Ending::Done };
            recorded(nth, u64::from(nth) * 50_000, &script, 4096)
        })
        .collect()
}

fn report(label: &str, records: &[RequestRecord]) -> RunReport {
    let subject = MeasuredServer {
        url: "http://puppet".to_owned(),
        endpoint: "completions".to_owned(),
        model: "puppet".to_owned(),
        return_token_ids: true,
        continuous_usage: true,
        ignore_eos: true,
        counted_by: CountedBy::TokenIds,
        cold_ttft_ms: 700.0,
        cold_second_token_ms: f64::NAN,
        config: serde_json::Map::new(),
    };
    let parts = ReportParts {
        label: label.to_owned(),
        provenance: Provenance::default(),
        subject,
        lag: LagSamples { send_ms: vec![0.2; 40], ..LagSamples::default() }.judge(millis(5)),
        window: Window::whole(records),
        objectives: "ttft=150ms".parse::<Objectives>().expect("sound"),
    };
    RunReport::new(parts, records)
}

#[test]
fn a_report_is_read_back_as_it_was() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("run.json");
    let (records, mut written) = (records(100), report("one", &records(100)));
    written.faults.push(FaultMark {
        at_us: 5,
        what: "kill decode 0".to_owned(),
        lost: 1,
        recovery_s: f64::INFINITY,
    });
    written.write(&path).expect("written");
    let read = RunReport::read(&path).expect("readable");
    assert_eq!(read.records().expect("sound"), records);
    let (ttft, as_written) = (read.latency(Metric::Ttft), written.latency(Metric::Ttft));
    assert_eq!((ttft.count, ttft.p50, ttft.max), (as_written.count, as_written.p50, f64::INFINITY));
    assert_eq!((read.faults, read.valid), (written.faults, true));
    // Fields with vLLM's names are at the top level of the file.
    let text = std::fs::read_to_string(&path).expect("there");
    let json: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    for name in ["completed", "duration", "p99_ttft_ms", "median_itl_ms", "request_goodput", "model_id"] {
        assert!(!json[name].is_null(), "{name}");
    }
}

#[test]
fn a_page_needs_nothing_from_elsewhere() {
    let runs = [report("first <run>", &records(100)), report("second", &records(180))];
    let page = html::page("Two runs", &runs).expect("drawn");
    for foreign in ["<script", "http-equiv", "src=", "href=", "@import", "url("] {
        assert!(!page.contains(foreign), "{foreign}");
    }
    // The page has six distributions, and two timelines for each run.
    assert_eq!(page.matches("<svg").count(), 6 + 4);
    assert!(page.contains("first &lt;run&gt;") && !page.contains("NaN"));
}

#[test]
fn a_table_has_a_column_for_each_run_and_shows_failures_as_never() {
    let runs = [report("one", &records(100)), report("two", &records(180))];
    let table = markdown::table(&runs).to_markdown();
    assert!(table.lines().all(|line| line.matches('|').count() == 4), "{table}");
    let ttft = table.lines().find(|line| line.starts_with("| ttft")).expect("a row");
    assert!(ttft.contains("never"), "{ttft}");
    assert!(markdown::remark_list(&runs).contains("1 failed (broken)"));
}

#[test]
fn sweeps_are_drawn_as_curves_of_throughput_against_latency() {
    let labels = ["remote rate=1", "remote rate=2", "colocated rate=1", "colocated rate=2"];
    let runs = labels.map(|label| report(label, &records(100)));
    let page = html::page("Sweeps", &runs).expect("drawn");
    // The page has six distributions, four trade-offs with a p50 and a p99 of each sweep, and two timelines
    // for each run.
    assert_eq!(page.matches("<svg").count(), 6 + 4 + 8);
    assert_eq!((page.matches(">remote p99<").count(), page.matches(">colocated p50<").count()), (4, 4));
}

#[test]
fn many_runs_are_rows() {
    let runs = [100, 120, 140, 160].map(|ttft_ms| report(&format!("at {ttft_ms}"), &records(ttft_ms)));
    let table = markdown::table(&runs);
    assert!(table.rows.len() == 4 && table.rows.iter().all(|row| row.len() == table.header.len()));
    assert_eq!(table.rows[3][0], "at 160");
}

#[test]
fn a_late_harness_makes_a_run_invalid() {
    let late = |send: f64, seen: f64| {
        let (send_ms, event_loop_ms) = (vec![send; 9], vec![seen; 9]);
        LagSamples { send_ms, event_loop_ms, ..LagSamples::default() }.judge(millis(5)).is_valid()
    };
    assert_eq!([late(1.0, 1.0), late(9.0, 1.0), late(1.0, 9.0)], [true, false, false]);
    assert!(!LagSamples { harness_failures: 1, ..LagSamples::default() }.judge(millis(5)).is_valid());
}
