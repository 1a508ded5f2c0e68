//! The settings of the load: when sessions start, and which part of the run counts.

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

/// The largest number of concurrent streams in a closed loop.
pub const CONCURRENCY_MAX: usize = 100_000;

/// When requests are sent, and which of them count.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Load")]
pub struct LoadArgs {
    /// Open loop: sessions per second, independent of the answers
    #[arg(long, value_name = "PER_SECOND", conflicts_with_all = ["concurrency", "arrivals"])]
    pub rate: Option<f64>,
    /// Closed loop: this many sessions at a time. A closed loop hides queueing, so say so where you quote its
    /// numbers
    #[arg(long, value_name = "N", conflicts_with = "arrivals")]
    pub concurrency: Option<usize>,
    /// Open loop at the times in this file: one number of seconds per line
    #[arg(long, value_name = "FILE")]
    pub arrivals: Option<PathBuf>,
    /// How the gaps of an open loop are distributed
    #[arg(long, value_enum, default_value_t)]
    pub process: Process,
    /// Shape of gamma gaps: below 1 bunched, 1 as Poisson, above 1 more even
    #[arg(long, default_value_t = 1.0, value_name = "SHAPE")]
    pub burstiness: f64,
    /// Stop after this many sessions
    #[arg(long, value_name = "N")]
    pub requests: Option<usize>,
    /// Start no session after this time; running sessions are waited for
    #[arg(long, value_parser = parse_span, value_name = "SPAN")]
    pub duration: Option<Duration>,
    /// Grow to the full rate or concurrency during this time, which is not measured
    #[arg(long, default_value = "0s", value_parser = parse_span, value_name = "SPAN")]
    pub ramp: Duration,
    /// Time after the ramp that is not measured either
    #[arg(long, default_value = "0s", value_parser = parse_span, value_name = "SPAN")]
    pub warmup: Duration,
    /// Time before the last due request that is not measured
    #[arg(long, default_value = "0s", value_parser = parse_span, value_name = "SPAN")]
    pub cooldown: Duration,
    /// A request that takes longer has failed
    #[arg(long, default_value = "10m", value_parser = parse_span, value_name = "SPAN")]
    pub timeout: Duration,
    /// Use a new connection for every request, instead of kept connections
    #[arg(long)]
    pub fresh_connections: bool,
    /// The largest lag of the harness itself (p99) with which a run is valid
    #[arg(long, default_value = "5ms", value_parser = parse_span, value_name = "SPAN")]
    pub lag_limit: Duration,
}

impl LoadArgs {
    /// Checks that the settings agree with each other, and that the run has an end.
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

    /// Returns the length of the first part of the run, which is not measured.
    pub fn skip(&self) -> Duration {
        self.ramp + self.warmup
    }

    /// Returns the settings for the report.
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
