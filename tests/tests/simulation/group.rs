//! The simulation of a node of several processes: see `baton_tests::sim::group`.

use std::time::Duration;

use baton_tests::sim::group::run;

use super::{number, played, search, told};

/// The number of seeds in a test run; `SEEDS` overrides it.
const SEEDS: u64 = 500;
/// How long the threads of the last seeds may take to end.
const THREADS_END_WITHIN_MS: u32 = 5_000;

#[test]
fn one_seed() {
    let report = played(run, number("SEED").unwrap_or(1));
    if std::env::var_os("SEED").is_some() {
        eprintln!("{}", report.lines.join("\n"));
    }
    assert!(report.faults.is_empty(), "{}", told(&report, "group::one_seed"));
}

#[test]
fn many_seeds() {
    let (wrong, _) = search(run, SEEDS);
    let stories: Vec<String> = wrong.iter().map(|report| told(report, "group::one_seed")).collect();
    assert!(wrong.is_empty(), "{}\n{} seeds are wrong", stories.join("\n\n"), wrong.len());
    let is_left = || !computing_threads().is_empty();
    for _ in (0..THREADS_END_WITHIN_MS).take_while(|_| is_left()) {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(!is_left(), "threads are left: {:?}", computing_threads());
}

/// Returns the names of all threads that compute steps.
fn computing_threads() -> Vec<String> {
    let threads = std::fs::read_dir("/proc/self/task").expect("Linux");
    let name = |thread: std::io::Result<std::fs::DirEntry>| {
        // The thread may end meanwhile.
        std::fs::read_to_string(thread.ok()?.path().join("comm")).ok()
    };
    let computes = |name: &String| ["steps", "stage", "sim worker"].iter().any(|kind| name.starts_with(kind));
    threads.filter_map(name).filter(computes).collect()
}
