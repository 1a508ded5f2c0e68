//! Puppets for `bench/routers.py` and `bench/streams.py`: engines that answer at once, and the clients that load a router before them.
//!
//! A request's `max_tokens` is the number of chunks of its answer, and its `seed` the time between two chunks in
//! milliseconds. One thread runs everything.

mod grpc;
mod http;
mod load;
mod streams;

use std::process::ExitCode;

use chassis::World;
use tokio::runtime::Builder;
use tokio::task::LocalSet;

const USAGE: &str = "puppets http PREFILL_ADDR DECODE_ADDR | puppets grpc ROUTER_GRPC_ADDR PREFILL_ADDR DECODE_ADDR… | \
                     puppets load ROUTER_HTTP_ADDR chat|tokens CONNECTIONS SECONDS CHUNKS GAP_MS | \
                     puppets streams ROUTER_HTTP_ADDR STREAMS SECONDS PROMPT_TOKENS GAP_MS";

/// Returns the time in microseconds, as a token id: it begins again after 71 minutes.
fn now_us() -> u32 {
    World::real().unix_time().as_micros() as u32
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
    let done = LocalSet::new().block_on(&runtime, async {
        match args.as_slice() {
            ["http", prefill, decode] => http::serve(prefill, decode).await,
            ["grpc", router, prefill, decode @ ..] => grpc::serve(router, prefill, decode).await,
            ["streams", rest @ ..] => streams::run(rest).await,
            ["load", rest @ ..] => load::run(rest).await,
            _ => Err(USAGE.to_owned()),
        }
    });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            use std::io::Write as _;
            drop(writeln!(std::io::stderr(), "{reason}"));
            ExitCode::FAILURE
        }
    }
}
