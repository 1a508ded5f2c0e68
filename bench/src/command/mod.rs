//! The subcommands of `baton bench`, one file each.

pub mod ab;
pub mod compare;
pub mod explain;
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
    /// Measure two servers or settings in turns, and report the ratio with its interval
    Ab(ab::AbArgs),
    /// Load a cluster while its nodes are killed, stopped and restarted
    Faults(faults::FaultsArgs),
    /// Write reports as one HTML page, and as a Markdown table on standard output
    Report(report::ReportArgs),
    /// Show where the time went in a run with --explain, as a table and as stacked bars
    Explain(explain::ExplainArgs),
    /// Show the differences between two reports, and whether they are more than noise
    Compare(compare::CompareArgs),
    /// Run a scenario of the suite
    Scenario(scenario::ScenarioArgs),
    /// Run a server with programmed delays, to measure the harness itself
    Puppet(puppet::ScriptedServerArgs),
}

/// How a command ended, if without an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandOutcome {
    Well,
    /// The run is not valid, so its numbers must not be quoted.
    Invalid,
}

/// The exit code of a run that is not valid. Success is 0, an error 1, and clap uses 2.
const EXIT_INVALID: u8 = 3;

/// Runs a command on this thread, because all load comes from one core. It makes its own runtime, so it must
/// not be called inside one (use `spawn_blocking` there).
pub fn run(args: BenchArgs) -> ExitCode {
    raise_descriptor_limit();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(4).build();
    let ended = match runtime {
        Ok(runtime) => runtime.block_on(dispatch(args.command)),
        Err(error) => Err(BenchError::Prepare(error)),
    };
    match ended {
        Ok(CommandOutcome::Well) => ExitCode::SUCCESS,
        Ok(CommandOutcome::Invalid) => ExitCode::from(EXIT_INVALID),
        Err(error) => {
            say_error(&error);
            ExitCode::FAILURE
        }
    }
}

/// Runs a command. Every branch is boxed, because the commands' futures are large and nested.
pub async fn dispatch(command: BenchCommand) -> Result<CommandOutcome> {
    match command {
        BenchCommand::Serve(args) => Box::pin(serve::run(args)).await,
        BenchCommand::Ab(args) => Box::pin(ab::run(args)).await,
        BenchCommand::Faults(args) => Box::pin(faults::run(args)).await,
        BenchCommand::Report(args) => report::run(&args),
        BenchCommand::Explain(args) => explain::run(&args),
        BenchCommand::Compare(args) => compare::run(&args),
        BenchCommand::Scenario(args) => Box::pin(scenario::run(args)).await,
        BenchCommand::Puppet(args) => Box::pin(puppet::run(args)).await,
    }
}

/// Writes a result to standard output. A closed pipe is no error.
pub(crate) fn say(text: &str) {
    let _ = writeln!(std::io::stdout().lock(), "{text}");
}

/// Writes a message about the run to standard error.
pub(crate) fn tell(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}

fn say_error(error: &BenchError) {
    tell(&format!("error: {}", error.in_full()));
}
