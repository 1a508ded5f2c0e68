//! Runs `baton bench` as a separate program, for work on the harness alone.

use std::process::ExitCode;

use clap::Parser;

#[derive(Debug, Parser)]
struct Typed {
    #[command(flatten)]
    bench: bench::BenchArgs,
}

fn main() -> ExitCode {
    bench::run(Typed::parse().bench)
}
