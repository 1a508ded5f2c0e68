//! Checks the port where the head of a node of several processes waits for the others.

use std::io::{Error, ErrorKind};
use std::time::Duration;

use chassis::World;
use chassis::identity::link;

use crate::config_file::ConfigFile;

use super::finding::Finding;

const GROUP: &str = "processes";
/// The longest wait for the head's answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);
/// The variable of `baton rank --of`. Where it is set, this process is no head.
const HEAD: &str = "BATON_RANK_OF";

pub(super) async fn look(process: &ConfigFile, world: &World) -> Vec<Finding> {
    let ConfigFile::Node(config) = process else { return Vec::new() };
    match (config.group.grid.n_processes(), std::env::var(HEAD)) {
        (1, _) => Vec::new(),
        (_, Ok(head)) => vec![reached(&head, world).await],
        (n, Err(_)) => {
            let found =
                format!("expert.model.join {}: the head waits there for {}", config.group.listen, n - 1);
            let advice =
                format!("run `baton doctor` with {HEAD}=HOST:PORT on their hosts, to see that they reach it");
            vec![Finding::note(GROUP, found, advice)]
        }
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
