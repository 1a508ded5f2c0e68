//! Tests of the rdma connector over real verbs: in the VM of `tests/rdma-vm`, over Soft-RoCE.
//!
//! `TEST_RDMA_PORTS` names the ports to use, such as `rxe1 rxe2`. Without it these tests are ignored.

use std::sync::Arc;

use baton_kv_transfer::conformance::node::expect_slowness;
use baton_kv_transfer::conformance::{conformance, conformance_between, of_one_stage};
use baton_kv_transfer::{ConnectorParts, KvConnector, build};

/// The factor by which this machine is slower: the VM's CPU is emulated, and shares the machine with other
/// work.
const SLOWER: u32 = 5;

/// Returns the RDMA ports of the two nodes.
fn ports() -> [String; 2] {
    let named = std::env::var("TEST_RDMA_PORTS").expect("tests/rdma-vm names the ports in TEST_RDMA_PORTS");
    // Logs the running case, and why a stream has ended, because a VM shows nothing else.
    let logged =
        "warn,baton_kv_transfer::conformance=info,baton_kv_transfer::connectors::link::receiver=info";
    let cases = tracing_subscriber::fmt().with_env_filter(logged);
    let _ = cases.without_time().with_ansi(false).with_writer(std::io::stderr).try_init();
    expect_slowness(SLOWER);
    let mut named = named.split(' ').map(str::to_owned);
    let first = named.next().expect("a name");
    let second = named.next().unwrap_or_else(|| first.clone());
    [first, second]
}

/// Builds an rdma connector: decode nodes on the second port, all other nodes on the first.
async fn built([first, second]: [String; 2], mut parts: ConnectorParts) -> Arc<dyn KvConnector> {
    parts.settings.rdma_device = if parts.node.as_str() == "decode" { second } else { first };
    build("rdma", parts).await.expect("the port is up")
}

#[tokio::test]
#[ignore = "wants RDMA devices: tests/rdma-vm/run.sh runs it in a VM"]
async fn rdma() {
    let ports = ports();
    conformance(move |parts| built(ports.clone(), parts)).await;
}

/// All transfers share one connection's queue pairs, and each rank has its own memory.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "wants RDMA devices: tests/rdma-vm/run.sh runs it in a VM"]
async fn rdma_between_ranks() {
    let ports = ports();
    let sides = [of_one_stage(1, 2), of_one_stage(4, 1)];
    conformance_between(&sides, move |parts| built(ports.clone(), parts)).await;
}
