//! Draws the start times of sessions in an open loop. They are drawn beforehand, so no answer delays them.

use std::path::Path;
use std::time::Duration;

use clap::ValueEnum;

use crate::error::{BenchError, Result, read_text};
use crate::random::Random;

/// How the gaps between sessions are distributed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Process {
    /// All gaps are equal.
    Constant,
    /// Exponential gaps, as independent users cause them.
    #[default]
    Poisson,
    /// Gaps of a gamma distribution; `--burstiness` below 1 makes bursts, above 1 makes gaps more even.
    Gamma,
}

/// The settings of the start times.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ArrivalsSpec {
    pub process: Process,
    /// Sessions per second.
    pub rate: f64,
    /// The shape of the gamma distribution.
    pub burstiness: f64,
    /// The rate grows linearly from 0 to `rate` during this time.
    pub ramp: Duration,
    pub seed: u64,
}

/// Start times since the run's start, ascending.
pub type Arrivals = Box<dyn Iterator<Item = Duration> + Send>;

impl ArrivalsSpec {
    pub fn times(self) -> Arrivals {
        let mut random = Random::stream(self.seed, 0xa441);
        let mut even = 0.0;
        Box::new(std::iter::from_fn(move || {
            even += self.gap(&mut random);
            Some(Duration::from_secs_f64(self.ramped(even)))
        }))
    }

    fn gap(&self, random: &mut Random) -> f64 {
        let mean = 1.0 / self.rate;
        match self.process {
            Process::Constant => mean,
            Process::Poisson => random.exponential(mean),
            Process::Gamma => random.gamma(self.burstiness, mean / self.burstiness),
        }
    }

    /// Maps a time of the process at full rate to a time with the ramp, before which the same number of
    /// arrivals lies. During the ramp that number is `rate · t² / 2ramp`; after it every arrival is late by
    /// half the ramp.
    fn ramped(&self, even: f64) -> f64 {
        let ramp = self.ramp.as_secs_f64();
        if even < ramp / 2.0 { (2.0 * ramp * even).sqrt() } else { even + ramp / 2.0 }
    }
}

/// Reads arrival times, one number of seconds per line; `#` begins a comment.
pub fn read_arrivals(path: &Path) -> Result<Vec<Duration>> {
    let text = read_text(path)?;
    let lines = text.lines().map(|line| line.split('#').next().unwrap_or("").trim());
    let mut times = Vec::new();
    for (nth, line) in lines.enumerate().filter(|(_, line)| !line.is_empty()) {
        let time = line.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        times.push(
            time.ok_or_else(|| BenchError::parse(path, format!("line {}: `{line}` is no time", nth + 1)))?,
        );
    }
    if times.is_sorted() { Ok(times) } else { Err(BenchError::parse(path, "arrival times must ascend")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(process: Process, burstiness: f64, ramp_s: u64) -> ArrivalsSpec {
        ArrivalsSpec { process, rate: 10.0, burstiness, ramp: Duration::from_secs(ramp_s), seed: 3 }
    }

    fn gaps(spec: ArrivalsSpec, n: usize) -> Vec<f64> {
        let times: Vec<f64> = spec.times().take(n).map(|time| time.as_secs_f64()).collect();
        std::iter::once(times[0]).chain(times.windows(2).map(|pair| pair[1] - pair[0])).collect()
    }

    /// Returns the mean and the coefficient of variation of the gaps.
    fn variation(gaps: &[f64]) -> (f64, f64) {
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
        (mean, variance.sqrt() / mean)
    }

    #[test]
    fn each_process_has_its_rate_and_its_spread() {
        let check = |process, burstiness: f64, expected: f64| {
            let (mean, spread) = variation(&gaps(spec(process, burstiness, 0), 40_000));
            assert!((mean - 0.1).abs() < 0.003, "{process:?} has a mean gap of {mean}");
            assert!((spread - expected).abs() < 0.05, "{process:?} has a spread of {spread}");
        };
        check(Process::Constant, 1.0, 0.0);
        check(Process::Poisson, 1.0, 1.0);
        check(Process::Gamma, 4.0, 0.5);
        check(Process::Gamma, 0.25, 2.0);
    }

    #[test]
    fn a_ramp_halves_the_arrivals_of_its_time_and_leaves_the_rest() {
        let times: Vec<f64> =
            spec(Process::Constant, 1.0, 10).times().take(200).map(|t| t.as_secs_f64()).collect();
        let before = |seconds: f64| times.iter().filter(|time| **time < seconds + 1e-6).count();
        assert_eq!((before(5.0), before(10.0), before(11.0), before(20.0)), (12, 50, 60, 150));
    }

    #[test]
    fn a_file_of_times_is_read() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("arrivals.txt");
        let read = |text: &str| {
            std::fs::write(&path, text).expect("written");
            read_arrivals(&path)
        };
        let times = read("# seconds\n0.0\n0.5 # second\n\n2\n").expect("sound");
        assert_eq!(times, [0, 500, 2000].map(Duration::from_millis));
        assert!(read("1\n0.5\n").is_err());
        assert!(read("x\n").expect_err("not a number").in_full().contains("line 1"));
    }
}
