//! Tests of whole commands against a puppet in the same process.

use std::path::Path;
use std::time::Duration;

use bench::command::{BenchArgs, CommandOutcome, dispatch};
use bench::puppet::{Script, ScriptedServer};
use bench::report::RunReport;
use clap::Parser;

use crate::millis;

#[derive(Debug, Parser)]
#[command(no_binary_name = true)]
struct Typed {
    #[command(flatten)]
    bench: BenchArgs,
}

/// Runs a command. Its run may be invalid, because the machine may be busy.
pub(crate) async fn run(line: &str) {
    let typed = Typed::try_parse_from(line.split_whitespace()).expect("it parses");
    let ended = tokio::time::timeout(Duration::from_secs(120), dispatch(typed.bench.command)).await;
    let ended = ended.expect("it ends").expect("it runs");
    assert!(matches!(ended, CommandOutcome::Well | CommandOutcome::Invalid));
}

async fn fails(line: &str, reason: &str) {
    let typed = Typed::try_parse_from(line.split_whitespace()).expect("it parses");
    let error = dispatch(typed.bench.command).await.expect_err(line).in_full();
    assert!(error.contains(reason), "{error}");
}

async fn puppet(ttft_ms: u64) -> ScriptedServer {
    let script = Script::even(6, millis(ttft_ms), millis(4));
    ScriptedServer::start("127.0.0.1:0", Duration::ZERO, ScriptedServer::always(&script))
        .await
        .expect("a puppet")
}

fn read(folder: &Path, name: &str) -> RunReport {
    RunReport::read(&folder.join(name)).expect(name)
}

#[tokio::test]
async fn serve_writes_a_report_and_report_draws_it() {
    let (puppet, folder) = (puppet(15).await, tempfile::tempdir().expect("a folder"));
    let at = folder.path().display();
    let url = puppet.url();
    run(&format!(
        "serve --url {url} --quiet --rate 200 --requests 40 --seed 3 --output-tokens 6 --slo ttft=5s,tbt=5s \
         --cancel-rate 0.1 --cancel-after 1h --out {at}/one.json"
    ))
    .await;
    let report = read(folder.path(), "one.json");
    assert_eq!((report.requests.sent, report.requests.failed, report.provenance.seed), (40, 0, 3));
    assert_eq!(report.attainment.good, report.requests.finished);
    assert!(report.latency(bench::metrics::Metric::Ttft).min >= 15.0);
    run(&format!("report {at}/one.json --html {at}/page.html")).await;
    let page = std::fs::read_to_string(folder.path().join("page.html")).expect("a page");
    assert!(page.contains("<svg") && page.contains("Time to first token"));
}

#[tokio::test]
async fn a_sweep_is_one_report_for_each_point_and_compare_reads_two() {
    let (puppet, folder) = (puppet(10).await, tempfile::tempdir().expect("a folder"));
    let at = folder.path().display();
    let url = puppet.url();
    run(&format!(
        "serve --url {url} --quiet --sweep concurrency=1,8 --requests 16 --output-tokens 6 --out {at}/s.json"
    ))
    .await;
    let (one, eight) =
        (read(folder.path(), "s-concurrency-1.json"), read(folder.path(), "s-concurrency-8.json"));
    assert_eq!((one.label.as_str(), eight.requests.finished), ("concurrency=1", 16));
    assert!(eight.rates.output_tokens_per_s > one.rates.output_tokens_per_s * 2.0);
    run(&format!("compare {at}/s-concurrency-1.json {at}/s-concurrency-8.json")).await;
}

#[tokio::test]
async fn the_search_ends_and_every_probe_is_kept() {
    let (puppet, folder) = (puppet(5).await, tempfile::tempdir().expect("a folder"));
    let at = folder.path().display();
    let url = puppet.url();
    // The search goes down until it stops, because no server answers within one microsecond.
    run(&format!(
        "serve --url {url} --quiet --rate 4000 --find-rate 0.9 --requests 2 --output-tokens 6 --slo ttft=1us \
         --lag-limit 1h --out {at}/f.json"
    ))
    .await;
    assert!(std::fs::read_dir(folder.path()).expect("there").count() >= 8);
}

#[tokio::test]
async fn ab_finds_the_slower_side() {
    let (quick, slow, folder) = (puppet(10).await, puppet(60).await, tempfile::tempdir().expect("a folder"));
    let at = folder.path().display();
    let (a, b) = (quick.url(), slow.url());
    run(&format!(
        "ab --a {a} --b {b} --b-label slow --quiet --pairs 4 --concurrency 2 --requests 6 --output-tokens 6 --out {at}/ab.json"
    ))
    .await;
    let report = read(folder.path(), "ab-b.json");
    assert_eq!((report.label.as_str(), report.requests.finished), ("slow", 24));
    let contrasts = report.shared["ab"].as_array().expect("the comparison");
    let ttft = contrasts.iter().find(|contrast| contrast["name"] == "ttft p50").expect("the median");
    assert!(ttft["low"].as_f64().expect("a number") > 1.5, "{ttft}");
}

#[tokio::test]
async fn what_makes_no_sense_is_refused_before_anything_is_sent() {
    fails("serve --requests 5", "--rate").await;
    fails("serve --rate 5", "--duration").await;
    fails("serve --rate 5 --requests 5 --find-rate 0.9", "needs --slo").await;
    fails("serve --rate 5 --requests 5 --url ftp://x", "http:// or https://").await;
    fails("ab --a http://x --pairs 2 --rate 1", "--pairs").await;
    assert!(Typed::try_parse_from("serve --rate 1 --concurrency 2".split(' ')).is_err());
}

#[test]
fn the_arguments_are_sound() {
    use clap::CommandFactory;
    Typed::command().debug_assert();
}
