//! Sends KV to another node for real, over each wire that both ends have, and says how fast it went.
//!
//! It does what a prefill node does: it asks a decode node for a landing, fills it, and hands over. The first token that
//! it hands over is marked as the last one, so the node gives the blocks back at once: nothing is decoded, and nothing
//! is put into a cache.

mod trial;

use std::time::Duration;

use chassis::World;
use chassis::rpc::{RpcLimits, channel};

use super::finding::Finding;
use trial::{Peer, Trial, TrialError};

const GROUP: &str = "peer";
/// One wire may take this long over all of its transfers, first contact included.
const WIRE_WITHIN: Duration = Duration::from_secs(20);

/// Tries every wire to the decode node at `addr`.
pub(super) async fn look(addr: &str, world: World) -> Vec<Finding> {
    let peer = Peer::new(channel(&world, addr, RpcLimits::default()), world);
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
            "{addr} over {scheme}: {rate:.2} GB/s ({mib:.1} MiB in {best_ms:.1} ms, the best of {}, verified there)",
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
            format!("{addr} over {scheme}: not a wire that both ends have"),
            format!(
                "add \"{scheme}\" to that node's `connectors` if it is meant to be; some only work within one host"
            ),
        ),
        TrialError::NotHere(_) => Finding::note(
            GROUP,
            format!("{addr} over {scheme}: {error}"),
            "nothing to do, unless this machine is meant to have what is missing",
        ),
        _ => Finding::bad(
            GROUP,
            format!("{addr} over {scheme}: {error}"),
            "see that the wire's own port is open between the two machines, and what that node's log says at this time",
        ),
    }
}

fn silent(addr: &str, scheme: &str) -> Finding {
    Finding::bad(
        GROUP,
        format!("{addr} over {scheme}: no transfer ended within {WIRE_WITHIN:?}"),
        "packets are dropped in between: open the wire's own port (`transfer.listen`) and see that the MTU is the same all the way",
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
