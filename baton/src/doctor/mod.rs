//! `baton doctor`: checks this machine and the requirements of a process's file, and gives advice.
//!
//! Suggested reading order: a finding ([`finding`]), then one file per group of findings.

mod finding;
mod report;
mod identity;
mod address;
mod certificate;
mod clock;
mod connectors;
mod files;
mod gpu;
mod host;
mod join;
mod model;
mod peer;
mod ports;
mod rdma;
mod registry;

use std::process::ExitCode;

use chassis::World;

use crate::cli::DoctorArgs;
use crate::config_file::ConfigFile;
use crate::exit::CommandError;
use crate::{interrupt, output};

use finding::{Finding, Level};

/// Runs all checks and prints the findings. The exit code is 1 if a finding prevents serving, otherwise 0,
/// even with warnings.
pub(crate) fn run(args: &DoctorArgs) -> Result<ExitCode, CommandError> {
    interrupt::says("interrupted: nothing was changed")?;
    let process = match &args.config {
        Some(file) => ConfigFile::read(file, std::env::vars())?,
        None => ConfigFile::default_router()?,
    };
    let (world, mut findings) = identity::look(&process);
    let runtime =
        tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(CommandError::start)?;
    findings.extend(runtime.block_on(look(&process, &world)));
    if let Some(addr) = &args.peer {
        findings.extend(runtime.block_on(peer::look(addr, world)));
    }
    let report = if args.json { report::json(&findings) } else { report::table(&findings) };
    output::print(&report)?;
    let broken = findings.iter().any(|finding| finding.level == Level::Bad);
    Ok(if broken { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Runs all groups of checks. The requirements of every process come first, then those of some connectors
/// only.
async fn look(process: &ConfigFile, world: &World) -> Vec<Finding> {
    let mut findings = files::look(process);
    findings.extend(ports::look(process));
    findings.extend(address::look(process));
    findings.extend(registry::look(process, world).await);
    findings.extend(join::look(process, world).await);
    findings.extend(model::look(process));
    findings.extend(host::look());
    findings.extend(clock::look());
    findings.extend(gpu::look());
    findings.extend(rdma::look());
    findings.extend(connectors::look(process).await);
    findings
}
