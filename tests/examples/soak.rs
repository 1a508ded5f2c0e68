//! Runs mixed load on real processes, with a fault every few seconds, for a given time.
//!
//! `cargo run --release -p baton-tests --example soak -- [MINUTES]` (24 by default). Every answer is compared
//! with that of an undisturbed cluster. Every request must end by its deadline with tokens or a typed error.
//! At the end every block must be back, and memory must not have grown; otherwise the exit code is 1.
#![allow(clippy::large_futures, reason = "one loop that is awaited once")]

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use baton_tests::check::prompts;
use baton_tests::fleet::{Fleet, PACED};
use baton_tests::logs::{A_NODE_DIES, A_NODE_STANDS_STILL, THE_REGISTRY_IS_AWAY};
use baton_tests::process::{open_files, resident_kib};
use baton_tests::sim::chance::Chance;
use baton_tests::{Answer, Ask, Client, Failed, Up, in_time};
use futures::future::join_all;
use rustix::process::Signal;
use tokio::time::{Instant, sleep, timeout};

const MINUTES: u64 = 24;
/// The number of clients that send requests at one time.
const CLIENTS: usize = 12;
/// The deadline of a request, and how much later than its deadline it may end.
const DEADLINE: Duration = Duration::from_secs(30);
const LATE: Duration = Duration::from_secs(1);
/// The time of the first memory sample, when caches are full.
const WARM: Duration = Duration::from_secs(240);
/// How much the memory of processes that were never restarted may grow after the first sample.
const GROWTH_MAX: f64 = 0.10;
const GROWTH_SLACK_KIB: u64 = 8 << 10;
/// The codes of errors that a fault explains. A broken connection is not among them.
const TYPED: &[&str] =
    &["no_nodes", "deadline", "failed", "wire", "full", "queue", "draining", "overloaded", "landing"];

/// A request and its expected answer.
struct Known {
    ask: Ask,
    answer: Answer,
}

#[derive(Default)]
struct RequestCounts {
    whole: AtomicUsize,
    left: AtomicUsize,
    /// The number of refused requests by their error code.
    refused: Mutex<BTreeMap<String, usize>>,
    wrong: Mutex<Vec<String>>,
    faults: AtomicU64,
}

impl RequestCounts {
    fn accuse(&self, what: String) {
        eprintln!("WRONG: {what}");
        self.wrong.lock().unwrap_or_else(PoisonError::into_inner).push(what);
    }

    fn refused(&self, failed: &Failed) {
        if !TYPED.contains(&failed.code.as_str()) {
            self.accuse(format!("a request ended with {failed:?}"));
        }
        let mut refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        *refused.entry(failed.code.clone()).or_default() += 1;
    }

    fn told(&self) -> String {
        let refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        format!(
            "{} faults, {} whole, {} left, refused {refused:?}",
            self.faults.load(Ordering::Relaxed),
            self.whole.load(Ordering::Relaxed),
            self.left.load(Ordering::Relaxed)
        )
    }
}

async fn known() -> Vec<Known> {
    let mut chance = Chance::named(1, "soak");
    let short = prompts(31, 40, 300).into_iter();
    let long = prompts(37, 8, 1_800).into_iter();
    let asks: Vec<Ask> = short
        .chain(long)
        .map(|prompt| {
            let n = chance.within(1..=250) as u32;
            let ask = Ask::new(prompt, n).with("ignore_eos", chance.one_in(2).into());
            ask.header("x-baton-timeout-ms", DEADLINE.as_millis())
        })
        .collect();
    let up = Up::start(&["--colocated"]).await;
    let client = up.client();
    let answers = in_time("the undisturbed answers", join_all(asks.iter().map(|ask| client.ask(ask)))).await;
    let whole =
        |(ask, answer): (Ask, Result<Answer, Failed>)| Known { ask, answer: answer.expect("an answer") };
    asks.into_iter().zip(answers).map(whole).collect()
}

// === clients ===

async fn client(nth: u64, client: Client, known: &[Known], tally: &RequestCounts, over: &AtomicBool) {
    let mut chance = Chance::named(nth, "client");
    while !over.load(Ordering::Relaxed) {
        let one = chance.pick(known);
        if chance.one_in(6) {
            leave(&client, &one.ask, chance.millis(0..=1_500)).await;
            tally.left.fetch_add(1, Ordering::Relaxed);
        } else {
            ask(&client, one, tally).await;
        }
        sleep(chance.millis(0..=150)).await;
    }
}

async fn leave(client: &Client, ask: &Ask, patience: Duration) {
    let _ = timeout(patience, client.ask(ask)).await;
}

async fn ask(client: &Client, one: &Known, tally: &RequestCounts) {
    match timeout(DEADLINE + LATE, client.ask(&one.ask)).await {
        Err(_) => tally.accuse("a request hangs".to_owned()),
        Ok(Ok(answer)) if answer.tokens == one.answer.tokens && answer.finish == one.answer.finish => {
            tally.whole.fetch_add(1, Ordering::Relaxed);
        }
        Ok(Ok(answer)) => tally.accuse(format!("{answer:?} instead of {:?}", one.answer)),
        Ok(Err(failed)) => tally.refused(&failed),
    }
}

// === faults ===

/// Injects one fault on one node and describes it. The first node of each kind is killed and restarted. The
/// second is only stopped, so that its memory can be measured all the time.
async fn fault(fleet: &mut Fleet, chance: &mut Chance) -> String {
    let nth = chance.below(fleet.nodes.len() as u64) as usize;
    let pause = chance.millis(100..=7_000);
    let lives_on = fleet.nodes[nth].name.ends_with("-1");
    let node = &mut fleet.nodes[nth];
    let what = if lives_on { 0 } else { chance.below(4) };
    match what {
        0 | 1 => {
            node.process.signal(Signal::STOP);
            sleep(pause).await;
            node.process.signal(Signal::CONT);
            format!("{} stood still for {pause:?}", node.name)
        }
        2 => {
            node.process.kill();
            sleep(pause / 2).await;
            node.process.revive();
            format!("{} was killed, and was away for {:?}", node.name, pause / 2)
        }
        _ => {
            node.process.restart().await;
            format!("{} was restarted", node.name)
        }
    }
}

async fn faults(fleet: &mut Fleet, tally: &RequestCounts, until: Instant) -> BTreeMap<String, u64> {
    let mut chance = Chance::named(2, "faults");
    let (began, mut warm) = (Instant::now(), BTreeMap::new());
    while Instant::now() < until {
        sleep(chance.millis(1_500..=4_000)).await;
        let what = fault(fleet, &mut chance).await;
        tally.faults.fetch_add(1, Ordering::Relaxed);
        eprintln!("{:>6.1} s {what}; {}; {}", began.elapsed().as_secs_f64(), tally.told(), sizes(fleet));
        if warm.is_empty() && began.elapsed() > WARM {
            warm = resident(fleet);
        }
    }
    warm
}

fn resident(fleet: &Fleet) -> BTreeMap<String, u64> {
    let size = |pid| resident_kib(pid).unwrap_or(0);
    fleet.processes().into_iter().map(|(name, process)| (name.to_owned(), size(process.pid()))).collect()
}

fn sizes(fleet: &Fleet) -> String {
    let size = |(name, process): (&str, &baton_tests::Process)| {
        let kib = resident_kib(process.pid()).unwrap_or(0);
        format!("{name} {:.1} MiB {} fds", kib as f64 / 1024.0, open_files(process.pid()))
    };
    fleet.processes().into_iter().map(size).collect::<Vec<_>>().join(", ")
}

/// Checks that the memory of processes that were never restarted has not grown.
fn judge_memory(warm: &BTreeMap<String, u64>, now: &BTreeMap<String, u64>, tally: &RequestCounts) {
    for (name, before) in warm.iter().filter(|(name, _)| !name.ends_with("-0")) {
        let after = now[name];
        let bound = before + (*before as f64 * GROWTH_MAX) as u64 + GROWTH_SLACK_KIB;
        eprintln!("{name}: {before} KiB when warm, {after} KiB at the end");
        if after > bound {
            tally.accuse(format!("{name} grew from {before} to {after} KiB"));
        }
    }
}

async fn soak(minutes: u64) -> RequestCounts {
    let known = known().await;
    let mut fleet = Fleet::start(PACED, 2, 2).await;
    for parts in [A_NODE_DIES, A_NODE_STANDS_STILL, THE_REGISTRY_IS_AWAY] {
        fleet.expect_log(parts);
    }
    let (tally, over) = (RequestCounts::default(), AtomicBool::new(false));
    let until = Instant::now() + Duration::from_secs(60 * minutes);
    let endpoint = fleet.client();
    let clients = (0..CLIENTS as u64).map(|nth| client(nth, endpoint.clone(), &known, &tally, &over));
    let breaking = async {
        let warm = faults(&mut fleet, &tally, until).await;
        over.store(true, Ordering::Relaxed);
        warm
    };
    let (_, warm) = tokio::join!(join_all(clients), breaking);
    fleet.all_ready().await;
    fleet.baseline().await;
    for one in &known {
        if endpoint.ask(&one.ask).await.map(|answer| answer.tokens).as_ref() != Ok(&one.answer.tokens) {
            tally.accuse("a request after all faults is not answered well".to_owned());
        }
    }
    fleet.baseline().await;
    judge_memory(&warm, &resident(&fleet), &tally);
    let errors: Vec<String> = fleet.processes().iter().flat_map(|(_, process)| errors(process)).collect();
    errors.into_iter().for_each(|line| tally.accuse(line));
    tally
}

/// Returns the lines at `ERROR` in the process's log.
fn errors(process: &baton_tests::Process) -> Vec<String> {
    process.log().lines().filter(|line| line.contains(" ERROR ")).map(str::to_owned).collect()
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> ExitCode {
    let asked = std::env::args().nth(1).map(|text| text.parse().expect("a number of minutes"));
    let minutes = asked.unwrap_or(MINUTES);
    let tally = soak(minutes).await;
    let n_wrong = tally.wrong.lock().unwrap_or_else(PoisonError::into_inner).len();
    eprintln!("{minutes} minutes: {}; {n_wrong} wrong", tally.told());
    if n_wrong == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
