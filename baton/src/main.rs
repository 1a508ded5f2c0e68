//! The executable: subcommands and nothing else.
#![forbid(unsafe_code)]

mod chat;
mod children;
mod cli;
mod exit;
mod node;
mod router;
mod up;

use std::process::ExitCode;

use clap::Parser as _;

use crate::cli::{Cli, Command};
use crate::exit::Failed;

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(code) => code,
        Err(failed) => failed.report(),
    }
}

fn run(command: Command) -> Result<ExitCode, Failed> {
    match command {
        Command::Up(args) => up::run(args),
        Command::Router(args) => router::run(&args),
        Command::Prefill(args) => node::run(types::Role::Prefill, &args),
        Command::Decode(args) => node::run(types::Role::Decode, &args),
        Command::Both(args) => node::run(types::Role::Both, &args),
        Command::Chat(args) => chat::run(&args),
        Command::Bench(args) => Ok(bench::run(*args)),
    }
}
