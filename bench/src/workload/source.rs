//! Makes a supply of sessions from the settings.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use serde_json::{Value, json};

use crate::error::{BenchError, Result};
use crate::random::Random;
use crate::span::parse_span;
use crate::workload::lengths::Lengths;
use crate::workload::mooncake::{TraceOptions, read_trace};
use crate::workload::prompt::Vocabulary;
use crate::workload::session::{Session, Sessions};
use crate::workload::sharegpt::{ShareGptOptions, read_sharegpt};
use crate::workload::synthetic::Synthetic;

/// Where prompts come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    /// Prompts of random token ids that have nothing in common
    #[default]
    Random,
    /// Prompts of random token ids; the sessions of a group share their first tokens
    SharedPrefix,
    /// Conversations of random token ids: each turn includes all turns before it
    MultiTurn,
    /// Conversations from a JSON file
    Sharegpt,
    /// Requests from a JSONL trace with times, lengths and prefix hashes
    Mooncake,
}

/// The settings of the requests.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Workload")]
pub struct WorkloadArgs {
    /// Where prompts come from
    #[arg(long, value_enum, default_value_t)]
    pub workload: Kind,
    /// The file of a sharegpt or mooncake workload
    #[arg(long, value_name = "FILE")]
    pub data: Option<PathBuf>,
    /// Number of tokens in a prompt, or in a turn: 1024, uniform:512..2048 or lognormal:MEDIAN,SIGMA
    #[arg(long, default_value = "512", value_name = "LENGTHS")]
    pub input_tokens: Lengths,
    /// Number of tokens in an answer
    #[arg(long, default_value = "128", value_name = "LENGTHS")]
    pub output_tokens: Lengths,
    /// Number of groups of sessions that share a prefix
    #[arg(long, default_value_t = 8, value_name = "N")]
    pub prefix_groups: u64,
    /// Number of tokens in the shared prefix
    #[arg(long, default_value_t = 1024, value_name = "N")]
    pub prefix_tokens: u32,
    /// Number of turns in a conversation (for a ShareGPT file the maximum)
    #[arg(long, default_value_t = 4, value_name = "N")]
    pub turns: u32,
    /// Mean wait between an answer and the next turn
    #[arg(long, default_value = "1s", value_parser = parse_span, value_name = "SPAN")]
    pub think: Duration,
    /// Factor for a trace's times: 2 halves its rate
    #[arg(long, default_value_t = 1.0, value_name = "FACTOR")]
    pub slowdown: f64,
    /// Factor for a trace's prompt lengths and the blocks that prompts share
    #[arg(long, default_value_t = 1.0, value_name = "FACTOR")]
    pub length_scale: f64,
    /// Number of tokens after which a trace's prompts are cut
    #[arg(long, default_value_t = u32::MAX, value_name = "N", hide_default_value = true)]
    pub input_max: u32,
    /// Number of tokens after which a trace's answers are cut
    #[arg(long, default_value_t = u32::MAX, value_name = "N", hide_default_value = true)]
    pub output_max: u32,
    /// Share of requests that are cancelled
    #[arg(long, default_value_t = 0.0, value_name = "SHARE")]
    pub cancel_rate: f64,
    /// Mean time after which such a request is cancelled (exponential)
    #[arg(long, default_value = "1s", value_parser = parse_span, value_name = "SPAN")]
    pub cancel_after: Duration,
    /// Token ids to draw prompts from
    #[arg(long, default_value = "33..127", value_name = "LOW..HIGH")]
    pub token_ids: Vocabulary,
    /// Seed of arrivals and lengths, to repeat them; random if not given
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Seed of the prompts' contents. With the same seed caches are warm; by default it is random, so that
    /// they are cold
    #[arg(long, value_name = "N")]
    pub salt: Option<u64>,
}

/// Makes the sessions of the workload, planned cancellations included.
pub fn sessions(args: &WorkloadArgs, seed: u64) -> Result<Sessions> {
    if !(0.0..=1.0).contains(&args.cancel_rate) {
        return Err(BenchError::usage("--cancel-rate is a share between 0 and 1"));
    }
    if args.turns == 0 || args.slowdown <= 0.0 || args.length_scale <= 0.0 {
        return Err(BenchError::usage("--turns, --slowdown and --length-scale are above 0"));
    }
    let source = source(args, seed)?;
    Ok(if args.cancel_rate > 0.0 { with_cancellations(source, args, seed) } else { source })
}

fn source(args: &WorkloadArgs, seed: u64) -> Result<Sessions> {
    match args.workload {
        Kind::Random => Ok(synthetic(args, seed, 0, 1).sessions()),
        Kind::SharedPrefix => Ok(synthetic(args, seed, args.prefix_groups, 1).sessions()),
        Kind::MultiTurn => Ok(synthetic(args, seed, args.prefix_groups, args.turns).sessions()),
        Kind::Sharegpt => {
            let options = ShareGptOptions { n_turns_max: args.turns, think: args.think, seed };
            read_sharegpt(data(args)?, options)
        }
        Kind::Mooncake => read_trace(data(args)?, args.trace_options()),
    }
}

fn data(args: &WorkloadArgs) -> Result<&std::path::Path> {
    args.data.as_deref().ok_or_else(|| BenchError::usage("this workload is read from a file: give --data"))
}

fn synthetic(args: &WorkloadArgs, seed: u64, n_groups: u64, n_turns: u32) -> Synthetic {
    Synthetic {
        input: args.input_tokens,
        output: args.output_tokens,
        n_groups,
        prefix_tokens: args.prefix_tokens,
        n_turns,
        think: args.think,
        seed,
    }
}

/// Adds planned cancellations to the sessions. They are drawn before any request is sent, so the latencies
/// have no bias without them.
fn with_cancellations(source: Sessions, args: &WorkloadArgs, seed: u64) -> Sessions {
    let mut random = Random::stream(seed, 0xca4c);
    let (rate, mean) = (args.cancel_rate, args.cancel_after.as_secs_f64());
    Box::new(source.map(move |mut session: Session| {
        for turn in &mut session.turns {
            let (gives_up, after) = (random.unit() < rate, random.exponential(mean));
            turn.cancel_after = gives_up.then(|| Duration::from_secs_f64(after));
        }
        session
    }))
}

/// Where the times of requests come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArrivalTimes {
    /// From the rate or the concurrency of the load.
    Generated,
    /// From a trace.
    Recorded,
}

impl WorkloadArgs {
    fn trace_options(&self) -> TraceOptions {
        TraceOptions {
            slowdown: self.slowdown,
            length_scale: self.length_scale,
            input_max: self.input_max,
            output_max: self.output_max,
        }
    }

    pub fn arrival_times(&self) -> ArrivalTimes {
        if self.workload == Kind::Mooncake { ArrivalTimes::Recorded } else { ArrivalTimes::Generated }
    }

    /// Returns the largest number of turns in a session.
    pub fn n_turns(&self) -> u32 {
        if matches!(self.workload, Kind::MultiTurn | Kind::Sharegpt) { self.turns } else { 1 }
    }

    /// Returns whether prompts are text instead of token ids.
    pub fn is_text(&self) -> bool {
        self.workload == Kind::Sharegpt
    }

    /// Returns the settings for the report.
    pub fn describe(&self) -> Value {
        let kind =
            self.workload.to_possible_value().map_or(String::new(), |value| value.get_name().to_owned());
        let mut described = json!({"kind": kind, "cancel_rate": self.cancel_rate});
        let extra = match self.workload {
            Kind::Sharegpt => json!({"data": self.data, "turns": self.turns}),
            Kind::Mooncake => {
                json!({"data": self.data, "slowdown": self.slowdown, "length_scale": self.length_scale,
                                     "input_max": self.input_max, "output_max": self.output_max})
            }
            _ => {
                json!({"input_tokens": self.input_tokens.to_string(), "output_tokens": self.output_tokens.to_string()})
            }
        };
        let prefix = json!({"prefix_groups": self.prefix_groups, "prefix_tokens": self.prefix_tokens});
        let parts = match self.workload {
            Kind::SharedPrefix => vec![extra, prefix],
            Kind::MultiTurn => vec![extra, prefix, json!({"turns": self.turns})],
            _ => vec![extra],
        };
        for part in parts {
            if let (Value::Object(all), Value::Object(part)) = (&mut described, part) {
                all.extend(part);
            }
        }
        described
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Typed {
        #[command(flatten)]
        workload: WorkloadArgs,
    }

    fn typed(args: &[&str]) -> WorkloadArgs {
        Typed::parse_from([&["x"], args].concat()).workload
    }

    #[test]
    fn cancellations_come_at_their_rate_and_leave_the_rest_alone() {
        let plain: Vec<_> = sessions(&typed(&[]), 5).expect("sound").take(4000).collect();
        let args = typed(&["--cancel-rate", "0.25", "--cancel-after", "2s"]);
        let cancelling: Vec<_> = sessions(&args, 5).expect("sound").take(4000).collect();
        let waits: Vec<_> = cancelling.iter().filter_map(|session| session.turns[0].cancel_after).collect();
        assert!((900..1100).contains(&waits.len()), "{}", waits.len());
        let mean = waits.iter().map(Duration::as_secs_f64).sum::<f64>() / waits.len() as f64;
        assert!((1.8..2.2).contains(&mean), "{mean}");
        for (with, without) in cancelling.iter().zip(&plain) {
            assert_eq!(with.turns[0].recipe, without.turns[0].recipe);
        }
    }

    #[test]
    fn a_workload_of_a_file_needs_one() {
        for kind in ["sharegpt", "mooncake"] {
            assert!(sessions(&typed(&["--workload", kind]), 1).is_err(), "{kind}");
        }
        assert!(sessions(&typed(&["--cancel-rate", "2"]), 1).is_err());
    }

    #[test]
    fn kinds_differ_in_turns_and_prefixes() {
        let first = |args: &[&str]| sessions(&typed(args), 1).expect("sound").next().expect("endless");
        assert_eq!(first(&[]).turns.len(), 1);
        assert_eq!(first(&["--workload", "multi-turn", "--turns", "3"]).turns.len(), 3);
        let shared =
            first(&["--workload", "shared-prefix", "--prefix-tokens", "100", "--input-tokens", "11"]);
        assert_eq!(shared.turns[0].recipe.n_tokens(), 111);
    }
}
