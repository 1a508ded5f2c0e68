//! `baton bench transfer`: the KV transfer rate of connectors, compared with plain copies of the same bytes on the
//! same path.
//!
//! Suggested reading order: the parameters ([`case`]), KV in GPU memory ([`cards`]), the two nodes ([`ends`]), the
//! contents of their blocks before and after ([`contents`]), the plain copy ([`plain`]), the measurement of both in
//! turn ([`mod@measure`]) and the report ([`report`]).

mod args;
mod cards;
mod case;
mod contents;
mod ends;
mod measure;
mod plain;
mod report;

use std::process::ExitCode;
use std::time::Duration;

use bench::error::write_text;

pub(crate) use args::TransferArgs;
use case::{Case, Memory};
use measure::{CaseResult, measure};
use report::{TransferReport, TransferReports};

use crate::exit::CommandError;
use crate::output::{print, tell};

pub(crate) fn run(args: &TransferArgs) -> Result<ExitCode, CommandError> {
    let report =
        if args.from.is_empty() { measured(args)?.into() } else { TransferReports::read(&args.from)? };
    print(&format!("{}\n", report.table().to_markdown()))?;
    for run in report.provenance() {
        print(&format!("{run}\n"))?;
    }
    if let Some(path) = &args.out {
        report.write(path)?;
    }
    if let Some(path) = &args.html {
        write_text(path, &report.page()).map_err(CommandError::work)?;
    }
    if let Some(path) = &args.svg {
        write_text(path, &report.picture()).map_err(CommandError::work)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn measured(args: &TransferArgs) -> Result<TransferReport, CommandError> {
    let within = Duration::try_from_secs_f64(args.seconds)
        .map_err(|_| CommandError::usage("--seconds is not a time"))?;
    if args.tls && !args.connectors.iter().any(|connector| connector == WITH_TLS) {
        return Err(CommandError::usage("--tls measures tcp, and --connectors does not name it"));
    }
    let mut measured = Vec::new();
    for case in cases(args) {
        let one = on_threads(case, within)?;
        tell(&format!(
            "{} {} bytes: {:.2} GB/s, {:.2} of plain",
            one.case.wire(),
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
                    let case = |bytes, tls| Case {
                        connector: connector.clone(),
                        bytes,
                        blocks: *blocks,
                        layers: *layers,
                        digests: *digests,
                        streams: args.streams,
                        memory: memory_of(connector, args.memory),
                        tls,
                    };
                    let with_tls = args.tls && connector == WITH_TLS;
                    let kinds = if with_tls { &[false, true][..] } else { &[false] };
                    let sizes = args.sizes.iter().map(|size| size.0);
                    cases.extend(
                        sizes
                            .flat_map(|bytes| kinds.iter().map(move |tls| (bytes, *tls)))
                            .map(|(bytes, tls)| case(bytes, tls)),
                    );
                }
            }
        }
    }
    cases
}

/// The connector whose streams carry the KV, so that TLS encrypts it.
const WITH_TLS: &str = "tcp";

/// The connectors that do not work with host memory.
const BETWEEN_GPUS: &[&str] = &["cuda-ipc", "nccl"];

fn memory_of(connector: &str, wanted: Memory) -> Memory {
    if BETWEEN_GPUS.contains(&connector) { Memory::Gpus } else { wanted }
}

/// Measures a case on a runtime with one thread per core, as nodes have. The caller's runtime has one thread.
fn on_threads(case: Case, within: Duration) -> Result<CaseResult, CommandError> {
    let measured = std::thread::spawn(move || {
        let runtime = tokio::runtime::Runtime::new().map_err(CommandError::work)?;
        runtime.block_on(measure(&case, within))
    });
    measured.join().expect("a measurement does not panic")
}
