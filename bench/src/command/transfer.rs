//! `baton bench transfer`: how fast connectors move KV, against plain copies of the same bytes.

use std::path::PathBuf;
use std::time::Duration;

use chassis::byte_size::ByteSize;
use clap::Args;

use crate::command::{Ended, say, tell};
use crate::error::{BenchError, Result, write_text};
use crate::transfer::case::{Blocks, Case, Digests, Layers, Memory};
use crate::transfer::measure::{Measured, measure};
use crate::transfer::report::{TransferReport, TransferReports};

#[derive(Clone, Debug, Args)]
pub struct TransferArgs {
    /// Connectors that work within one machine: tcp, shm, loopback, cuda-ipc, nccl
    #[arg(long, value_delimiter = ',', default_value = "tcp,shm", value_name = "NAMES")]
    pub connectors: Vec<String>,
    /// Bytes of KV of one transfer
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "SIZES",
        default_value = "16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB,256MiB,1GiB,4GiB"
    )]
    pub sizes: Vec<ByteSize>,
    /// How the blocks lie, on both sides
    #[arg(long, value_enum, value_delimiter = ',', default_value = "contiguous,scattered")]
    pub blocks: Vec<Blocks>,
    /// How layers are handed in
    #[arg(long, value_enum, value_delimiter = ',', default_value = "at-once,streamed")]
    pub layers: Vec<Layers>,
    /// Whether pages are verified. Off is for measuring only: nodes have no such setting
    #[arg(long, value_enum, value_delimiter = ',', default_value = "on,off")]
    pub digests: Vec<Digests>,
    /// Where KV lies. Connectors between GPUs have it there in any case, on the first and the second GPU
    #[arg(long, value_enum, default_value = "host")]
    pub memory: Memory,
    /// Streams of the connector, and of the plain copy
    #[arg(long, default_value_t = 2)]
    pub streams: u16,
    /// About how long each combination is measured
    #[arg(long, default_value_t = 2.0, value_name = "SECONDS")]
    pub seconds: f64,
    /// Where the numbers go, as JSON
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Where the page with the plots goes
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// Where the plots alone go
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Measure nothing: put together what earlier runs on one machine have written with --out
    #[arg(long, value_delimiter = ',', value_name = "FILES")]
    pub from: Vec<PathBuf>,
}

pub fn run(args: &TransferArgs) -> Result<Ended> {
    let report =
        if args.from.is_empty() { measured(args)?.into() } else { TransferReports::read(&args.from)? };
    say(&report.table().to_markdown());
    report.provenance().iter().for_each(|run| say(run));
    if let Some(path) = &args.out {
        report.write(path)?;
    }
    if let Some(path) = &args.html {
        write_text(path, &report.page())?;
    }
    if let Some(path) = &args.svg {
        write_text(path, &report.picture())?;
    }
    Ok(Ended::Well)
}

fn measured(args: &TransferArgs) -> Result<TransferReport> {
    let within = Duration::try_from_secs_f64(args.seconds)
        .map_err(|_| BenchError::usage("--seconds is not a time"))?;
    let mut measured = Vec::new();
    for case in cases(args) {
        let one = on_threads(case, within)?;
        tell(&format!(
            "{} {} bytes: {:.2} GB/s, {:.2} of plain",
            one.case.connector,
            one.case.bytes,
            one.rate / 1e9,
            one.ratio
        ));
        measured.push(one);
    }
    let command = std::env::args().skip(1).collect::<Vec<_>>().join(" ");
    Ok(TransferReport::new(format!("baton {command}"), measured))
}

fn cases(args: &TransferArgs) -> Vec<Case> {
    let mut cases = Vec::new();
    for connector in &args.connectors {
        for blocks in &args.blocks {
            for layers in &args.layers {
                for digests in &args.digests {
                    cases.extend(args.sizes.iter().map(|size| Case {
                        connector: connector.clone(),
                        bytes: size.0,
                        blocks: *blocks,
                        layers: *layers,
                        digests: *digests,
                        streams: args.streams,
                        memory: memory_of(connector, args.memory),
                    }));
                }
            }
        }
    }
    cases
}

/// Connectors that no host memory will do for.
const BETWEEN_GPUS: &[&str] = &["cuda-ipc", "nccl"];

fn memory_of(connector: &str, wanted: Memory) -> Memory {
    if BETWEEN_GPUS.contains(&connector) { Memory::Gpus } else { wanted }
}

/// A node's connectors run on as many threads as there are cores; the harness around them has one.
fn on_threads(case: Case, within: Duration) -> Result<Measured> {
    let measured = std::thread::spawn(move || {
        let runtime = tokio::runtime::Runtime::new().map_err(BenchError::Prepare)?;
        runtime.block_on(measure(&case, within))
    });
    measured.join().expect("a measurement does not panic")
}
