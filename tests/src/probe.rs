//! Probes the health of every process while a test disturbs the cluster, and checks how long the answers
//! took.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::future::join_all;
use tokio::time::{MissedTickBehavior, interval};

use crate::{Ask, Client, Stopwatch, in_time};

/// The time limit of a probe on a machine with a free processor.
pub const PROBE_MAX: Duration = Duration::from_millis(100);
/// The time limit of a probe during which the kernel dropped packets, and of one in every [`ONE_IN`] others: a lost
/// packet is sent again after 200 ms, and then after 400 ms.
const RETRANSMITTED_MAX: Duration = Duration::from_secs(1);
const ONE_IN: usize = 50;
/// A connection may be closed without an answer, in favour of new ones, if its request comes this late: a flood opens 2,500
/// connections in a second, and an admin port has 64.
const DISPLACED_AFTER: Duration = Duration::from_millis(20);
const PROBE_EVERY: Duration = Duration::from_millis(50);
/// The unit of times in `/proc/stat`.
const TICK: Duration = Duration::from_millis(10);
const PAGES: [&str; 2] = ["/live", "/ready"];

/// A port that serves the health of a process, and the process.
#[derive(Clone, Debug)]
pub struct Probed {
    pub client: Client,
    pub pid: u32,
}

/// One answer: the time that it took, and what the machine explains of it.
#[derive(Debug)]
struct Probe {
    took: Duration,
    /// The time in which threads were ready and got no processor.
    waited: Duration,
    /// Whether the kernel dropped packets meanwhile.
    dropped: bool,
    /// Connections that the process closed without an answer.
    n_closed: u32,
}

impl Probe {
    fn is_explained(&self) -> bool {
        let limit = if self.dropped { RETRANSMITTED_MAX } else { PROBE_MAX };
        self.took <= limit + self.waited && (self.n_closed == 0 || self.waited >= DISPLACED_AFTER)
    }
}

/// Runs `happens` while `/live` and `/ready` of each process are requested every 50 ms, by a new connection
/// each time.
///
/// Other work of the machine delays every process. So the time in which threads of the process, or of this test, were
/// ready and got no processor is not counted. A flood that ends closes all its connections at once, which can be more
/// packets than the kernel's queue holds: a probe whose packets were dropped there gets the time of a retransmission. A probe
/// whose connection was closed asks again.
///
/// # Panics
/// If an answer is not 200, if more than one in `ONE_IN` takes longer than [`PROBE_MAX`], or one longer than a second.
pub async fn while_probed<T>(probed: &[Probed], trouble: &str, happens: impl Future<Output = T>) -> T {
    let over = AtomicBool::new(false);
    let asked: Vec<_> = probed.iter().flat_map(|probed| PAGES.map(|page| (probed, page))).collect();
    let probes = join_all(asked.iter().map(|(probed, page)| probe(probed, page, &over)));
    let happening = async {
        let seen = happens.await;
        over.store(true, Ordering::Relaxed);
        seen
    };
    let (probes, seen) = tokio::join!(probes, happening);
    let mut slow = Vec::new();
    for ((probed, page), probes) in asked.iter().zip(&probes) {
        let unexplained = probes.iter().filter(|probe| !probe.is_explained());
        slow.extend(unexplained.map(|probe| (probe, format!("{:?} {page}: {probe:?}", probed.client))));
    }
    let n: usize = probes.iter().map(Vec::len).sum();
    eprintln!("{trouble}: {}; unexplained: {}", summary(probes.iter().flatten()), slow.len());
    let is_lost = |(probe, _): &(&Probe, String)| probe.took > RETRANSMITTED_MAX + probe.waited;
    assert!(slow.len() * ONE_IN <= n && !slow.iter().any(is_lost), "{trouble}: {n} probes, slow: {slow:?}");
    seen
}

fn summary<'a>(probes: impl Iterator<Item = &'a Probe>) -> String {
    let mut times: Vec<Duration> = probes.map(|probe| probe.took).collect();
    times.sort_unstable();
    let slow = times.iter().filter(|took| **took > PROBE_MAX).count();
    let (n, max) = (times.len(), times.last().expect("there are probes"));
    format!("{n} probes, median {:?}, at most {max:?}, {slow} over {PROBE_MAX:?}", times[n / 2])
}

/// Requests one page of one process repeatedly until `over` is set.
async fn probe(Probed { client, pid }: &Probed, page: &str, over: &AtomicBool) -> Vec<Probe> {
    let mut ticks = interval(PROBE_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut probes = Vec::new();
    while !over.load(Ordering::Relaxed) {
        ticks.tick().await;
        let (watch, before, drops) = (Stopwatch::start(), waited_for_processor(*pid), dropped_packets());
        let mut n_closed = 0;
        let answered = async {
            loop {
                match client.try_get(page).await {
                    Ok(answer) => return answer,
                    Err(_) => n_closed += 1,
                }
            }
        };
        let (status, body) = in_time("a probe", answered).await;
        assert_eq!(status.as_u16(), 200, "{client:?} {page}: {body}");
        let took = watch.elapsed();
        let waited = waited_for_processor(*pid).saturating_sub(before);
        probes.push(Probe { took, waited, dropped: dropped_packets() > drops, n_closed });
    }
    probes
}

/// Returns the time that threads of a process, and of this one, have spent in the kernel's queues of ready
/// threads, plus the time that the hypervisor has taken from the processors.
fn waited_for_processor(pid: u32) -> Duration {
    let of_thread = |thread: std::io::Result<std::fs::DirEntry>| {
        let times = std::fs::read_to_string(thread.ok()?.path().join("schedstat")).ok()?;
        times.split(' ').nth(1)?.parse::<u64>().ok()
    };
    let threads = [pid, std::process::id()].map(|pid| std::fs::read_dir(format!("/proc/{pid}/task")));
    let queued: u64 = threads.into_iter().flatten().flatten().filter_map(of_thread).sum();
    let stat = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let stolen = stat.split_whitespace().nth(8).and_then(|ticks| ticks.parse().ok()).unwrap_or(0);
    Duration::from_nanos(queued) + TICK * stolen
}

/// Returns the number of packets that the kernel dropped because a processor's queue of received packets was full.
fn dropped_packets() -> u64 {
    let processors = std::fs::read_to_string("/proc/net/softnet_stat").unwrap_or_default();
    let dropped = |line: &str| u64::from_str_radix(line.split_whitespace().nth(1)?, 16).ok();
    processors.lines().filter_map(dropped).sum()
}

/// Requests a short answer.
///
/// # Panics
/// If the client gets no answer.
pub async fn serves_another(client: &Client) {
    let answer = client.ask(&Ask::new(vec![3; 100], 4)).await;
    assert!(!answer.expect("another client is served").tokens.is_empty());
}
