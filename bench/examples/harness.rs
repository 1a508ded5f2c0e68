//! `baton bench` as a program of its own, for work on the harness alone.

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
