//! The pacing of the load.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};

use crate::client::exchange::ClientOptions;
use crate::error::{BenchError, Result};
use crate::load::drive::Pacing;
use crate::span::parse_span;
use crate::workload::ArrivalTimes;
use crate::workload::arrivals::{ArrivalsSpec, Process, read_arrivals};

/// Streams at a time in a closed loop, at most.
pub const CONCURRENCY_MAX: usize = 100_000;

/// The times of requests, and the part of them that counts.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Load")]
pub struct LoadArgs {
    /// Open loop: sessions a second, independent of the answers
    #[arg(long, value_name = "PER_SECOND", conflicts_with_all = ["concurrency", "arrivals"])]
    pub rate: Option<f64>,
    /// Closed loop: this many at a time. It hides queueing, so name it where you quote it
    #[arg(long, value_name = "N", conflicts_with = "arrivals")]
    pub concurrency: Option<usize>,
    /// Open loop at the times in this file, seconds, one a line
    #[arg(long, value_name = "FILE")]
    pub arrivals: Option<PathBuf>,
    /// Gaps of an open loop
    #[arg(long, value_enum, default_value_t)]
    pub process: Process,
    /// Shape of gamma gaps: below 1 bunched, 1 Poisson, above 1 evened out
    #[arg(long, default_value_t = 1.0, value_name = "SHAPE")]
    pub burstiness: f64,
    /// Stop after this many sessions
    #[arg(long, value_name = "N")]
    pub requests: Option<usize>,
    /// Start no session after this time; running ones are waited for
    #[arg(long, value_parser = parse_span, value_name = "SPAN")]
    pub duration: Option<Duration>,
    /// Grow to the full rate or concurrency during this time, which is not measured
    #[arg(long, default_value = "0s", value_parser = parse_span, value_name = "SPAN")]
    pub ramp: Duration,
    /// After the ramp, not measured either
    #[arg(long, default_value = "0s", value_parser = parse_span, value_name = "SPAN")]
    pub warmup: Duration,
    /// Before the last request is due, not measured
    #[arg(long, default_value = "0s", value_parser = parse_span, value_name = "SPAN")]
    pub cooldown: Duration,
    /// A request that takes longer has failed
    #[arg(long, default_value = "10m", value_parser = parse_span, value_name = "SPAN")]
    pub timeout: Duration,
    /// A new connection for every request instead of kept ones
    #[arg(long)]
    pub fresh_connections: bool,
    /// The run is invalid when the harness's own lag (p99) is above this
    #[arg(long, default_value = "5ms", value_parser = parse_span, value_name = "SPAN")]
    pub lag_limit: Duration,
}

impl LoadArgs {
    /// Refuses contradictory settings, and runs that would have no end.
    pub fn check(&self, arrivals: ArrivalTimes) -> Result<()> {
        let is_timed = arrivals == ArrivalTimes::Recorded;
        let is_paced = self.rate.is_some() || self.concurrency.is_some() || self.arrivals.is_some();
        let has_end =
            self.requests.is_some() || self.duration.is_some() || self.arrivals.is_some() || is_timed;
        let positive = |value: Option<f64>| value.is_none_or(|value| value > 0.0 && value.is_finite());
        match () {
            () if !is_paced && !is_timed => Err(BenchError::usage(
                "give --rate, --concurrency or --arrivals (a trace brings its own times)",
            )),
            () if !has_end => Err(BenchError::usage("give --requests or --duration")),
            () if !positive(self.rate) || !positive(Some(self.burstiness)) => {
                Err(BenchError::usage("--rate and --burstiness are above 0"))
            }
            () if self.concurrency.is_some_and(|n| n == 0 || n > CONCURRENCY_MAX) => {
                Err(BenchError::usage(format!("--concurrency is between 1 and {CONCURRENCY_MAX}")))
            }
            () => Ok(()),
        }
    }

    pub fn pacing(&self, seed: u64) -> Result<Pacing> {
        let (rate, ramp) = (self.rate, self.ramp);
        if let Some(concurrency) = self.concurrency {
            return Ok(Pacing::Closed { concurrency, ramp });
        }
        if let Some(path) = &self.arrivals {
            return Ok(Pacing::Open(Box::new(read_arrivals(path)?.into_iter())));
        }
        Ok(rate.map_or(Pacing::Timed, |rate| {
            let spec = ArrivalsSpec { process: self.process, rate, burstiness: self.burstiness, ramp, seed };
            Pacing::Open(spec.times())
        }))
    }

    pub fn client(&self) -> ClientOptions {
        ClientOptions { keeps_connections: !self.fresh_connections, timeout: self.timeout }
    }

    /// The beginning of the run that is not measured.
    pub fn skip(&self) -> Duration {
        self.ramp + self.warmup
    }

    /// The settings in the report.
    pub fn describe(&self) -> Value {
        let seconds = |span: Duration| span.as_secs_f64();
        let process = format!("{:?}", self.process).to_lowercase();
        json!({
            "loop": if self.concurrency.is_some() { "closed" } else { "open" },
            "rate": self.rate, "concurrency": self.concurrency, "arrivals": self.arrivals,
            "process": self.rate.map(|_| process), "burstiness": self.burstiness,
            "requests": self.requests, "duration_s": self.duration.map(seconds),
            "ramp_s": seconds(self.ramp), "warmup_s": seconds(self.warmup), "cooldown_s": seconds(self.cooldown),
            "timeout_s": seconds(self.timeout), "fresh_connections": self.fresh_connections,
        })
    }
}
