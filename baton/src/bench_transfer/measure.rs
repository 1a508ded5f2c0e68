//! Measures one case: plain copy and connector in turn, so that other load on the machine affects both.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::bench_transfer::case::Case;
use crate::bench_transfer::ends::{Ends, not_moved};
use crate::bench_transfer::plain::Plain;
use crate::exit::CommandError;

/// The smallest number of pairs, for a meaningful median. A pair is one plain copy and one transfer.
pub const N_PAIRS_MIN: usize = 5;
/// The largest number of pairs. A small message takes little time, and more pairs give no more information.
const N_PAIRS_MAX: usize = 400;
/// The number of first pairs that are not counted: they open connections and touch memory mappings for the
/// first time.
const N_WARM: usize = 2;

/// The results of one case.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CaseResult {
    #[serde(flatten)]
    pub case: Case,
    pub n_pairs: usize,
    /// Bytes per second of the median transfer over the connector.
    pub rate: f64,
    /// Bytes per second of the median plain copy.
    pub plain_rate: f64,
    /// The median over the pairs of the plain copy's time divided by the connector's time.
    pub ratio: f64,
    pub ratio_low: f64,
    pub ratio_high: f64,
    /// The latency of one transfer, from the request for a landing to the report that all KV has arrived.
    pub latency_us_p50: f64,
    pub latency_us_p90: f64,
    pub plain_us_p50: f64,
    /// The CPU time of the median transfer, over all threads of the process.
    #[serde(default)]
    pub processor_us_p50: f64,
    #[serde(default)]
    pub plain_processor_us_p50: f64,
}

/// Measures a case for about `within`, with at least [`N_PAIRS_MIN`] pairs.
pub async fn measure(case: &Case, within: Duration) -> Result<CaseResult, CommandError> {
    let ends = Ends::new(case).await?;
    check(&ends).await?;
    let mut plain = Plain::of(case, &ends).await?;
    let mut pairs = Vec::new();
    let mut began = Instant::now();
    for nth in 0..N_WARM + N_PAIRS_MAX {
        if nth == N_WARM {
            pairs.clear();
            began = Instant::now();
        }
        if pairs.len() >= N_PAIRS_MIN && nth > N_WARM && began.elapsed() > within {
            break;
        }
        pairs.push(pair(&ends, &mut plain).await?);
    }
    drop(plain);
    ends.close().await?;
    Ok(summary(case, &pairs))
}

/// Runs one transfer and compares its bytes, before anything else is copied to the far side.
async fn check(ends: &Ends) -> Result<(), CommandError> {
    let room = ends.transfer().await?;
    if ends.are_equal(&room)? { Ok(()) } else { Err(not_moved("KV arrived wrong")) }
}

#[derive(Clone, Copy, Debug)]
struct Pair {
    plain: ElapsedTime,
    connector: ElapsedTime,
}

/// The time that one operation took, in seconds.
#[derive(Clone, Copy, Debug)]
struct ElapsedTime {
    wall: f64,
    /// The CPU time of all threads of the process.
    processor: f64,
}

struct Stopwatch {
    start: Instant,
    processor: f64,
}

impl Stopwatch {
    fn start() -> Self {
        Self { start: Instant::now(), processor: processor_seconds() }
    }

    fn stop(self) -> ElapsedTime {
        let wall = self.start.elapsed().as_secs_f64();
        ElapsedTime { wall, processor: processor_seconds() - self.processor }
    }
}

fn processor_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

async fn pair(ends: &Ends, plain: &mut Plain) -> Result<Pair, CommandError> {
    let (runs, room) = ends.runs()?;
    let runs: Arc<[_]> = runs.into();
    let watch = Stopwatch::start();
    plain.copy(ends, &runs, &room).await?;
    let plain = watch.stop();
    drop(room);
    let watch = Stopwatch::start();
    drop(ends.transfer().await?);
    Ok(Pair { plain, connector: watch.stop() })
}

fn summary(case: &Case, pairs: &[Pair]) -> CaseResult {
    let sorted = |of: fn(&Pair) -> f64| {
        let mut values: Vec<f64> = pairs.iter().map(of).collect();
        values.sort_by(f64::total_cmp);
        values
    };
    let (plain, connector) = (sorted(|pair| pair.plain.wall), sorted(|pair| pair.connector.wall));
    let ratio = sorted(|pair| pair.plain.wall / pair.connector.wall);
    CaseResult {
        case: case.clone(),
        n_pairs: pairs.len(),
        rate: case.bytes as f64 / at(&connector, 0.5),
        plain_rate: case.bytes as f64 / at(&plain, 0.5),
        ratio: at(&ratio, 0.5),
        ratio_low: at(&ratio, 0.25),
        ratio_high: at(&ratio, 0.75),
        latency_us_p50: at(&connector, 0.5) * 1e6,
        latency_us_p90: at(&connector, 0.9) * 1e6,
        plain_us_p50: at(&plain, 0.5) * 1e6,
        processor_us_p50: at(&sorted(|pair| pair.connector.processor), 0.5) * 1e6,
        plain_processor_us_p50: at(&sorted(|pair| pair.plain.processor), 0.5) * 1e6,
    }
}

/// Returns the value at the quantile `share` of sorted values, without interpolation.
fn at(sorted: &[f64], share: f64) -> f64 {
    sorted[((sorted.len() - 1) as f64 * share).round() as usize]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench_transfer::case::{Blocks, Digests, Layers, Memory};

    fn case(connector: &str, blocks: Blocks, layers: Layers, digests: Digests) -> Case {
        let (connector, memory) = (connector.to_owned(), Memory::Host);
        Case { connector, bytes: 4 << 20, blocks, layers, digests, streams: 2, memory, tls: false }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn every_connector_of_one_machine_is_measured() {
        for connector in ["loopback", "shm", "tcp"] {
            for (blocks, layers, digests) in [
                (Blocks::Contiguous, Layers::AtOnce, Digests::On),
                (Blocks::Scattered, Layers::Streamed, Digests::On),
                (Blocks::Scattered, Layers::AtOnce, Digests::Off),
            ] {
                if connector == "loopback" && digests == Digests::Off {
                    continue;
                }
                let case = case(connector, blocks, layers, digests);
                let measured = measure(&case, Duration::ZERO).await.expect("it arrives");
                assert_eq!(measured.n_pairs, N_PAIRS_MIN);
                assert!(measured.rate > 0.0 && measured.ratio > 0.0, "{measured:?}");
                let (ours, plain) = (measured.processor_us_p50, measured.plain_processor_us_p50);
                assert!(ours > 0.0 && plain > 0.0, "{measured:?}");
            }
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn tcp_is_measured_over_tls() {
        let plain = case("tcp", Blocks::Scattered, Layers::Streamed, Digests::On);
        let case = Case { tls: true, ..plain };
        let measured = measure(&case, Duration::ZERO).await.expect("it arrives");
        assert_eq!((measured.n_pairs, measured.case.wire().as_str()), (N_PAIRS_MIN, "tcp over TLS"));
    }

    #[test]
    fn medians_are_of_pairs() {
        let took = |wall| ElapsedTime { wall, processor: 2.0 * wall };
        let pair = |plain, connector| Pair { plain: took(plain), connector: took(connector) };
        let case = case("shm", Blocks::Contiguous, Layers::AtOnce, Digests::On);
        let measured = summary(&case, &[pair(1.0, 2.0), pair(3.0, 4.0), pair(9.0, 10.0)]);
        assert_eq!((measured.ratio, measured.ratio_low, measured.ratio_high), (0.75, 0.75, 0.9));
        assert_eq!(measured.rate, case.bytes as f64 / 4.0);
        assert_eq!((measured.processor_us_p50, measured.plain_processor_us_p50), (8e6, 6e6));
    }
}
