//! Injects the faults of a schedule at their times.

use std::collections::HashMap;
use std::process::Command;

use rustix::process::{Pid, Signal, kill_process};
use tokio::time::Instant;

use crate::client::TargetServer;
use crate::clock::PreciseTimer;
use crate::error::{BenchError, Result};
use crate::faults::cluster::Cluster;
use crate::faults::schedule::{Choice, FaultAction, Schedule, Victim};

/// A fault that was injected, and when.
#[derive(Clone, Debug, PartialEq)]
pub struct InjectedFault {
    pub at: Instant,
    pub what: String,
}

/// Injects the faults of a schedule, with times from `start`, and appends each to `injected`. The first
/// failure ends the injection. A stopped process stays stopped unless the schedule continues it.
pub async fn inject_all(
    schedule: &Schedule,
    target: &TargetServer,
    start: Instant,
    injected: &mut Vec<InjectedFault>,
) -> Result<()> {
    let mut timer = PreciseTimer::new().map_err(BenchError::Prepare)?;
    let mut known = HashMap::new();
    for fault in &schedule.faults {
        timer.until(start + fault.at).await;
        inject(&fault.action, target, &mut known).await?;
        injected.push(InjectedFault { at: Instant::now(), what: fault.action.name() });
    }
    Ok(())
}

async fn inject(action: &FaultAction, target: &TargetServer, known: &mut HashMap<String, Pid>) -> Result<()> {
    match action {
        FaultAction::Kill(victim) => signal(victim, Signal::KILL, target, known).await,
        FaultAction::Stop(victim) => signal(victim, Signal::STOP, target, known).await,
        FaultAction::Cont(victim) => signal(victim, Signal::CONT, target, known).await,
        FaultAction::Run(command) => run(command.clone()).await,
        FaultAction::Restart(victim, command) => {
            signal(victim, Signal::KILL, target, known).await?;
            run(command.clone()).await
        }
    }
}

async fn signal(
    victim: &Victim,
    signal: Signal,
    target: &TargetServer,
    known: &mut HashMap<String, Pid>,
) -> Result<()> {
    let pid = find(victim, target, known).await?;
    if let Some(name) = &victim.name {
        known.insert(name.clone(), pid);
    }
    kill_process(pid, signal).map_err(|errno| refused(victim, errno))
}

async fn find(victim: &Victim, target: &TargetServer, known: &HashMap<String, Pid>) -> Result<Pid> {
    let pid = match &victim.choice {
        Choice::Pid(pid) => Pid::from_raw(*pid),
        Choice::Role { role, which } => {
            let cluster = Cluster::ask(target).await?;
            cluster.find(role, *which).and_then(|node| Pid::from_raw(node.pid))
        }
        Choice::Remembered => victim.name.as_ref().and_then(|name| known.get(name).copied()),
    };
    pid.ok_or_else(|| refused(victim, "there is no such node"))
}

fn refused(victim: &Victim, reason: impl ToString) -> BenchError {
    BenchError::Fault { what: format!("{victim:?}"), reason: reason.to_string() }
}

/// Starts a command on another thread, because starting it takes a millisecond, which would delay the load
/// loop. Its end is not waited for, so an ended command stays in the process table until the run ends.
async fn run(command: Vec<String>) -> Result<()> {
    let program = command[0].clone();
    let start =
        move || Command::new(&command[0]).args(&command[1..]).stdin(std::process::Stdio::null()).spawn();
    let started =
        tokio::task::spawn_blocking(start).await.unwrap_or_else(|error| Err(std::io::Error::other(error)));
    started.map(drop).map_err(|source| BenchError::Start { program, source })
}
