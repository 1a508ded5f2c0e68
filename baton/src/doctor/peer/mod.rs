//! Sends KV to a decode node over each connector that both ends have, and reports the rate.
//!
//! The doctor works as a prefill node does: it requests a landing from a decode node, fills it, and hands
//! off. It marks the first token as the last one, so the node releases the blocks at once. Nothing is
//! decoded, and nothing is cached.

mod trial;

use std::time::Duration;

use chassis::World;
use chassis::identity::ExpectedPeer;
use chassis::rpc::{RpcLimits, channel};

use super::finding::Finding;
use trial::{Peer, Trial, TrialError};

const GROUP: &str = "peer";
/// The longest time for all transfers over one connector, connection setup included.
const WIRE_WITHIN: Duration = Duration::from_secs(20);

/// Tests every connector to the decode node at `addr`.
pub(super) async fn look(addr: &str, world: World) -> Vec<Finding> {
    let peer = Peer::new(channel(&world, addr, ExpectedPeer::DecodeNode, RpcLimits::default()), world);
    let mut findings = Vec::new();
    for scheme in kv_transfer::connectors().iter().map(|wire| wire.name).filter(|name| *name != "loopback") {
        match tokio::time::timeout(WIRE_WITHIN, trial::run(&peer, scheme)).await {
            Ok(Ok(trial)) => findings.push(moved(addr, scheme, &trial)),
            Ok(Err(error)) if error.concerns_the_peer() => return vec![unreachable(addr, &error)],
            Ok(Err(error)) => findings.push(failed(addr, scheme, &error)),
            Err(_) => findings.push(silent(addr, scheme)),
        }
    }
    findings
}

fn moved(addr: &str, scheme: &str, trial: &Trial) -> Finding {
    let rate = trial.bytes as f64 / trial.best.as_secs_f64() / 1e9;
    let (mib, best_ms) = (trial.bytes as f64 / f64::from(1 << 20), trial.best.as_secs_f64() * 1e3);
    Finding::ok(
        GROUP,
        format!(
            "{addr} over {scheme}: {rate:.2} GB/s ({mib:.1} MiB in {best_ms:.1} ms, the best of {}, verified by the node)",
            trial.n_transfers
        ),
    )
}

fn unreachable(addr: &str, error: &TrialError) -> Finding {
    Finding::bad(
        GROUP,
        format!("{addr}: {error}"),
        "name a decode node's gRPC address (`node.listen`, or `address` in a router's /debug/cluster), see that it is \
         ready, and that no firewall or NetworkPolicy is between",
    )
}

fn failed(addr: &str, scheme: &str, error: &TrialError) -> Finding {
    match error {
        TrialError::NotInCommon(_) => Finding::note(
            GROUP,
            format!("{addr} over {scheme}: not available on both ends"),
            format!(
                "add \"{scheme}\" to that node's `connectors` if you want it; some connectors work only within one host"
            ),
        ),
        TrialError::NotHere(_) => Finding::note(
            GROUP,
            format!("{addr} over {scheme}: {error}"),
            "nothing to do, unless this machine should have the missing hardware or library",
        ),
        _ => Finding::bad(
            GROUP,
            format!("{addr} over {scheme}: {error}"),
            "check that the connector's port is open between the two machines, and check that node's log",
        ),
    }
}

fn silent(addr: &str, scheme: &str) -> Finding {
    Finding::bad(
        GROUP,
        format!("{addr} over {scheme}: no transfer ended within {WIRE_WITHIN:?}"),
        "packets may be dropped on the way: open the connector's port (`transfer.listen`) and check that the MTU is the same on the whole path",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Level;

    #[tokio::test]
    async fn a_peer_that_nobody_is_at_is_found_out() {
        let free = std::net::TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("bound");
        let findings = look(&free.to_string(), World::real()).await;
        assert_eq!(findings.len(), 1, "{findings:?}");
        assert_eq!(findings[0].level, Level::Bad);
        assert!(findings[0].advice.contains("node.listen"), "{findings:?}");
    }
}
