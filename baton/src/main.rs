//! The executable: its subcommands.
#![forbid(unsafe_code)]

mod bench_engine;
mod bench_transfer;
mod certs;
mod chat;
mod children;
mod cli;
mod doctor;
mod exit;
mod process_variables;
mod health;
mod http_url;
mod identity;
mod interrupt;
mod keys;
mod model;
mod node;
mod output;
mod pool;
mod rank;
mod config_file;
mod router;
mod switch;
mod up;

use std::process::ExitCode;

use clap::Parser as _;

use crate::cli::{AdminCommand, BenchCommand, Cli, Command};
use crate::exit::CommandError;

fn main() -> ExitCode {
    match run(Cli::parse()) {
        Ok(code) => code,
        Err(failed) => failed.report(),
    }
}

fn run(cli: Cli) -> Result<ExitCode, CommandError> {
    // Without a command there are files to check: clap prints the help if there is neither a command nor a
    // file.
    let Some(command) = cli.command else { return config_file::check(&cli.check_config) };
    raise_open_files();
    match command {
        Command::Up(args) => up::run(args),
        Command::Router(args) => router::run(&args),
        Command::Prefill(args) => node::run(types::Role::Prefill, &args),
        Command::Decode(args) => node::run(types::Role::Decode, &args),
        Command::Both(args) => node::run(types::Role::Both, &args),
        Command::Pool(args) => pool::run(&args),
        Command::Rank(args) => rank::run(&args),
        Command::Chat(args) => chat::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Health(args) => health::run(&args),
        Command::Sleep(args) => switch::sleep(&args),
        Command::Wake(args) => switch::wake(&args),
        Command::Admin(args) => match args.command {
            AdminCommand::Role(args) => switch::role(&args),
        },
        Command::Certs(args) => certs::run(&args),
        Command::Keys(args) => keys::run(&args),
        Command::Bench(args) => match args.command {
            BenchCommand::Server(command) => Ok(bench::run(bench::BenchArgs { command })),
            BenchCommand::Engine(args) => bench_engine::run(&args),
            BenchCommand::Transfer(args) => bench_transfer::run(&args),
        },
    }
}

/// Raises the limit of open files and sockets of this process to the maximum that the system allows.
///
/// The usual soft limit, 1,024, is for programs that use `select`. If the limit cannot be raised, the process
/// continues.
fn raise_open_files() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current != maximum {
        let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
    }
}
