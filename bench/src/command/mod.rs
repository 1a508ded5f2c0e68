//! What is typed behind `baton bench`, one file for each subcommand.

pub mod ab;
pub mod compare;
pub mod faults;
pub mod measure;
pub mod puppet;
pub mod report;
pub mod scenario;
pub mod search;
pub mod serve;

use std::io::Write as _;
use std::process::ExitCode;

use clap::{Args, Subcommand};

use crate::error::{BenchError, Result};
use crate::load::probe::raise_descriptor_limit;

/// Measure an OpenAI-compatible server.
#[derive(Clone, Debug, Args)]
pub struct BenchArgs {
    #[command(subcommand)]
    pub command: BenchCommand,
}

#[derive(Clone, Debug, Subcommand)]
#[allow(clippy::large_enum_variant, reason = "there is one of it in a process")]
pub enum BenchCommand {
    /// Load a server and report TTFT, TBT and goodput
    Serve(serve::ServeArgs),
    /// Two servers or settings, interleaved in one run: the ratio and how sure it is
    Ab(ab::AbArgs),
    /// Load a cluster while its nodes are killed, stopped and restarted
    Faults(faults::FaultsArgs),
    /// Reports as one HTML page, and as a Markdown table on standard output
    Report(report::ReportArgs),
    /// Say what differs between two reports, and whether it is more than noise
    Compare(compare::CompareArgs),
    /// Run a kept scenario
    Scenario(scenario::ScenarioArgs),
    /// A server with programmed delays, to measure the harness itself
    Puppet(puppet::ScriptedServerArgs),
}

/// How a command ended, where it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    Well,
    /// The numbers are there and must not be quoted.
    Invalid,
}

/// Exit codes: 0 well, 1 an error, 3 a run that is not valid. (2 is clap's.)
const EXIT_INVALID: u8 = 3;

/// Runs a command to its end on this thread: load comes from one core by construction.
/// Builds its own runtime, so it must not be called inside one (use `spawn_blocking` there).
pub fn run(args: BenchArgs) -> ExitCode {
    raise_descriptor_limit();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(4).build();
    let ended = match runtime {
        Ok(runtime) => runtime.block_on(dispatch(args.command)),
        Err(error) => Err(BenchError::Prepare(error)),
    };
    match ended {
        Ok(Ended::Well) => ExitCode::SUCCESS,
        Ok(Ended::Invalid) => ExitCode::from(EXIT_INVALID),
        Err(error) => {
            say_error(&error);
            ExitCode::FAILURE
        }
    }
}

/// Every branch on the heap: the commands' futures are large, and they nest.
pub async fn dispatch(command: BenchCommand) -> Result<Ended> {
    match command {
        BenchCommand::Serve(args) => Box::pin(serve::run(args)).await,
        BenchCommand::Ab(args) => Box::pin(ab::run(args)).await,
        BenchCommand::Faults(args) => Box::pin(faults::run(args)).await,
        BenchCommand::Report(args) => report::run(&args),
        BenchCommand::Compare(args) => compare::run(&args),
        BenchCommand::Scenario(args) => Box::pin(scenario::run(args)).await,
        BenchCommand::Puppet(args) => Box::pin(puppet::run(args)).await,
    }
}

/// Results go to standard output; a reader who has left is no error.
pub(crate) fn say(text: &str) {
    let _ = writeln!(std::io::stdout().lock(), "{text}");
}

/// What is about the run and not its result.
pub(crate) fn tell(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}

fn say_error(error: &BenchError) {
    tell(&format!("error: {}", error.in_full()));
}
