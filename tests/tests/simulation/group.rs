//! The simulation of a node of several processes: see `baton_tests::sim::group`.

use std::time::Duration;

use baton_tests::sim::Report;
use baton_tests::sim::group::plan::has_process_faults;
use baton_tests::sim::group::{landings, run};

use super::{number, played, search, told};

/// The number of seeds in a test run; `SEEDS` overrides it.
const SEEDS: u64 = 500;
/// How long the threads of the last seeds may take to end.
const THREADS_END_WITHIN_MS: u32 = 5_000;

#[test]
fn one_seed() {
    check_one(run, "group::one_seed");
}

#[test]
fn many_seeds() {
    check_many(run, "group::one_seed");
}

#[test]
fn one_seed_of_landings() {
    check_one(landings::run, "group::one_seed_of_landings");
}

#[test]
fn many_seeds_of_landings() {
    check_many(landings::run, "group::one_seed_of_landings");
}

/// If no landing failed, or none arrived, no seed would test it.
#[test]
fn landings_end_in_each_way() {
    let lines: Vec<String> = (0..60).flat_map(|seed| played(landings::run, seed).lines).collect();
    let ends: [&[&str]; 8] = [
        &["landing", "is answered"],
        &["landing", "is given up"],
        &["landing", "fails: the landing's deadline has passed"],
        &["landing", "fails: the peer cancelled the transfer"],
        &["landing", "fails: a process of this node is lost"],
        &["landing", "holds blocks of the prompt"],
        &["1 frames of sender", "had a fault"],
        &["the head ends", "is lost"],
    ];
    for end in ends {
        let is_it = |line: &String| end.iter().all(|part| line.contains(part));
        assert!(lines.iter().any(is_it), "{end:?}");
    }
}

/// If no process died, or none stood still, no seed would test it.
#[test]
fn processes_die_and_pause() {
    let seeds: Vec<u64> = (0..200).filter(|seed| has_process_faults(*seed)).collect();
    for run in [run, landings::run] {
        let lines: Vec<String> = seeds.iter().flat_map(|seed| played(run, *seed).lines).collect();
        for what in [
            "Dies(Head, Process)",
            "Dies(Head, Machine)",
            "Pauses(Head, ",
            "Dies(Follower",
            "Pauses(Follower",
        ] {
            // The plan's own line names faults that may not happen.
            let is_it = |line: &String| line.contains(what) && !line.contains("Plan {");
            assert!(lines.iter().any(is_it), "{what}");
        }
        for end in ["follower 0 ends: the head at", "follower 3 ends: the head at"] {
            assert!(lines.iter().any(|line| line.contains(end)), "{end}");
        }
    }
}

/// Runs one seed. `test` is the test that repeats it.
fn check_one(run: fn(u64) -> Report, test: &str) {
    let report = played(run, number("SEED").unwrap_or(1));
    if std::env::var_os("SEED").is_some() {
        eprintln!("{}", report.lines.join("\n"));
    }
    assert!(report.faults.is_empty(), "{}", told(&report, test));
}

fn check_many(run: fn(u64) -> Report, test: &str) {
    let (wrong, _) = search(run, SEEDS);
    let stories: Vec<String> = wrong.iter().map(|report| told(report, test)).collect();
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
    let computes =
        |name: &String| ["results", "stage", "sim worker"].iter().any(|kind| name.starts_with(kind));
    threads.filter_map(name).filter(computes).collect()
}
