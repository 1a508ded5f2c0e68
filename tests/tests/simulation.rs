//! Many seeds, each a cluster with its clients and its faults: see `docs/simulation.md`.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};

use baton_tests::sim::{Plan, Report, run};

/// Seeds in a test run; `SEEDS` overrides it.
const SEEDS: u64 = 2_000;
/// The first seed; `FIRST` overrides it.
const FIRST: u64 = 0;
/// The number of failures that ends the search.
const FAILURES_MAX: usize = 5;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is not a number")))
}

/// The report of a failing seed.
fn told(report: &Report) -> String {
    format!(
        "{}\nseed {} is wrong:\n  {}\nrepeat it: SEED={} cargo test -p baton-tests --test simulation -- one_seed",
        report.lines.join("\n"),
        report.seed,
        report.faults.join("\n  "),
        report.seed
    )
}

fn played(seed: u64) -> Report {
    catch_unwind(AssertUnwindSafe(|| run(seed))).unwrap_or_else(|_| Report {
        seed,
        hash: 0,
        lines: Vec::new(),
        faults: vec!["the run panicked".to_owned()],
        tally: Default::default(),
    })
}

#[test]
fn one_seed() {
    let report = played(number("SEED").unwrap_or(1));
    if std::env::var_os("SEED").is_some() {
        eprintln!("{}\nhash {:016x} {:?}", report.lines.join("\n"), report.hash, report.tally);
    }
    assert!(report.faults.is_empty(), "{}", told(&report));
}

#[test]
fn the_same_seed_twice_is_the_same_run() {
    // Two routers wait for the load of the same nodes: tokio wakes them in either order (docs/simulation.md).
    for seed in (100..120).filter(|seed| Plan::draw(*seed).cluster.n_routers == 1) {
        let (one, other) = (played(seed), played(seed));
        if one.hash != other.hash {
            let differs = one.lines.iter().zip(&other.lines).find(|(one, other)| one != other);
            panic!("seed {seed}: {:016x} and {:016x}: {differs:?}", one.hash, other.hash);
        }
    }
}

#[test]
fn many_seeds() {
    let (first, count) = (number("FIRST").unwrap_or(FIRST), number("SEEDS").unwrap_or(SEEDS));
    let next = AtomicU64::new(first);
    let n_threads = std::thread::available_parallelism().map_or(1, usize::from);
    let search = || {
        let mut wrong = Vec::new();
        while wrong.len() < FAILURES_MAX {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= first + count {
                break;
            }
            let report = played(seed);
            if !report.faults.is_empty() {
                wrong.push(report);
            }
        }
        wrong
    };
    let wrong: Vec<Report> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..n_threads).map(|_| scope.spawn(search)).collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("runs are caught")).collect()
    });
    let stories: Vec<String> = wrong.iter().map(told).collect();
    assert!(wrong.is_empty(), "{}\n{} seeds are wrong", stories.join("\n\n"), wrong.len());
}
