//! Tests of faults: their cost on planned requests, and a real process with faults on schedule.

use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command};
use std::time::Duration;

use bench::metrics::Objectives;
use bench::puppet::{Ending, Script, ScriptedServer};
use bench::record::RequestRecord;
use bench::recovery::{Cost, costs};
use bench::report::RunReport;

use crate::{millis, recorded};

/// Returns a hundred requests, ten per second. Those due in `bad` (seconds) fail.
fn records(bad: std::ops::Range<f64>) -> Vec<RequestRecord> {
    (0..100)
        .map(|nth| {
            let mut script = Script::even(5, millis(100), millis(10));
            if bad.contains(&(f64::from(nth) / 10.0)) {
                script.ending = Ending::Cut;
            }
            recorded(nth, u64::from(nth) * 100_000, &script, 4096)
        })
        .collect()
}

fn cost(bad: std::ops::Range<f64>, faults_s: &[f64]) -> Vec<Cost> {
    let at_us: Vec<_> = faults_s.iter().map(|seconds| (seconds * 1e6) as u64).collect();
    costs(&records(bad), &at_us, &Objectives::default())
}

#[test]
fn recovery_lasts_until_users_are_served_as_before() {
    // The requests due from 4.0 to 5.5 s fail. The fault is injected at 4.05 s, while the request of 4.0 s
    // runs, so one request is lost.
    let found = cost(4.0..5.55, &[4.05])[0];
    assert_eq!(found.lost, 1);
    assert!((found.recovery_s - (5.5 - 4.05)).abs() < 1e-6, "{found:?}");
}

#[test]
fn a_fault_without_effect_costs_nothing() {
    assert_eq!(cost(0.0..0.0, &[4.05]), [Cost { lost: 0, recovery_s: 0.0 }]);
}

#[test]
fn what_never_recovers_says_so_and_the_next_fault_ends_the_count() {
    let found = cost(6.0..99.0, &[2.0, 6.0]);
    assert_eq!((found[0].recovery_s, found[1].recovery_s), (0.0, f64::INFINITY));
}

fn victim() -> Child {
    Command::new("sleep").arg("600").spawn().expect("a process")
}

#[tokio::test]
async fn a_schedule_is_carried_out_while_the_load_goes_on() {
    let script = Script::even(5, millis(5), millis(2));
    let puppet = ScriptedServer::start("127.0.0.1:0", Duration::ZERO, ScriptedServer::always(&script))
        .await
        .expect("a puppet");
    let folder = tempfile::tempdir().expect("a folder");
    let (at, mut child) = (folder.path().display(), victim());
    let touched = folder.path().join("touched");
    let schedule = format!(
        "[[fault]]\nat = \"150ms\"\ndo = \"stop\"\npid = {pid}\nvictim = \"v\"\n\
         [[fault]]\nat = \"250ms\"\ndo = \"cont\"\nvictim = \"v\"\n\
         [[fault]]\nat = \"300ms\"\ndo = \"restart\"\nvictim = \"v\"\ncommand = [\"touch\", \"{}\"]\n",
        touched.display(),
        pid = child.id()
    );
    std::fs::write(folder.path().join("faults.toml"), schedule).expect("written");
    let url = puppet.url();
    crate::commands::run(&format!(
        "faults --url {url} --quiet --rate 100 --duration 400ms --schedule {at}/faults.toml --out {at}/f.json"
    ))
    .await;
    let status = child.wait().expect("it has ended");
    assert_eq!(status.signal(), Some(9));
    let report = RunReport::read(&folder.path().join("f.json")).expect("a report");
    let marks: Vec<_> =
        report.faults.iter().map(|fault| fault.what.split(' ').next().unwrap_or("")).collect();
    assert_eq!(marks, ["stop", "cont", "restart"]);
    let appears = async {
        while !touched.exists() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), appears).await.expect("the command ran");
}
