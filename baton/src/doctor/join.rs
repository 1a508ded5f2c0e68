//! Checks the connections between the processes of one node: the port where the head waits, and NCCL between GPUs of
//! one stage.

use std::io::{Error, ErrorKind};
use std::path::PathBuf;
use std::time::Duration;

use chassis::World;
use chassis::identity::link;
use engine::Device;

use crate::config_file::ConfigFile;

use super::finding::Finding;
use super::gpu;

const GROUP: &str = "processes";
const NCCL: &str = "libnccl.so.2";
/// The longest wait for the head's answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);
/// The variable of `baton rank --of`. Where it is set, this process is no head.
const HEAD: &str = "BATON_RANK_OF";

pub(super) async fn look(process: &ConfigFile, world: &World) -> Vec<Finding> {
    let ConfigFile::Node(config) = process else { return Vec::new() };
    let grid = config.group.grid;
    let mut findings = match (grid.n_processes(), std::env::var(HEAD)) {
        (1, _) => Vec::new(),
        (_, Ok(head)) => vec![reached(&head, world).await],
        (n, Err(_)) => {
            let found =
                format!("expert.model.join {}: the head waits there for {}", config.group.listen, n - 1);
            let advice =
                format!("run `baton doctor` with {HEAD}=HOST:PORT on their hosts, to see that they reach it");
            vec![Finding::note(GROUP, found, advice)]
        }
    };
    if grid.processes_of_stage() > 1 && config.engine.device != Device::Cpu {
        findings.push(nccl(gpu::library(NCCL)));
    }
    findings
}

/// Reports whether NCCL is there, without which GPUs of one stage in several processes do not start.
fn nccl(found: Option<PathBuf>) -> Finding {
    match found {
        Some(path) => Finding::note(
            GROUP,
            format!("{} (adds up the results of GPUs of one stage)", path.display()),
            "let the processes reach each other at ports that Linux chooses, on the network that NCCL_SOCKET_IFNAME names",
        ),
        None => Finding::bad(
            GROUP,
            format!(
                "{NCCL} (adds up the results of GPUs of one stage) was not found in the loader's folders"
            ),
            "install NVIDIA's libnccl2 2.18 or later, or set expert.model.stages to 0",
        ),
    }
}

/// Returns whether a node's process waits for the others, instead of joining a head.
pub(super) fn is_head() -> bool {
    std::env::var_os(HEAD).is_none()
}

/// Connects to the head as a follower does.
async fn reached(head: &str, world: &World) -> Finding {
    let late = |_| Err(ErrorKind::TimedOut.into());
    match tokio::time::timeout(ANSWER_WITHIN, link::dial_head(world, head)).await.unwrap_or_else(late) {
        Ok(_) => Finding::ok(GROUP, format!("the head's join port {head}: reachable")),
        Err(error) => Finding::bad(
            GROUP,
            format!("the head's join port {head}: {}", what(&error)),
            advice(head, &error),
        ),
    }
}

fn what(error: &Error) -> String {
    match error.kind() {
        ErrorKind::TimedOut => format!("no answer within {} s", ANSWER_WITHIN.as_secs()),
        _ => error.to_string(),
    }
}

fn advice(head: &str, error: &Error) -> String {
    let port = head.rsplit_once(':').map_or(head, |(_, port)| port);
    match error.kind() {
        ErrorKind::ConnectionRefused => format!(
            "start the head, the node with expert.model.join on port {port}: it listens there as long as it runs"
        ),
        ErrorKind::TimedOut | ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable => format!(
            "open TCP port {port} of the head's host for this host, in firewalls, security groups and NetworkPolicies"
        ),
        _ => format!(
            "set {HEAD} to expert.model.join of the head, and give both processes the same cluster.secret_file or \
             certificates of one CA"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::finding::Level;
    use super::*;

    #[test]
    fn gpus_of_one_stage_do_not_start_without_nccl() {
        assert_eq!(nccl(None).level, Level::Bad);
        assert_eq!(nccl(Some(PathBuf::from("/usr/lib64/libnccl.so.2"))).level, Level::Note);
    }
}
