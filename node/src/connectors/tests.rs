use chassis::telemetry::Capture;
use kv_transfer::conformance::node::{Node, layout};

use super::*;

const HERE: &str = "this machine";

async fn node(name: &str, names: &[&str]) -> Connectors {
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    Connectors::build(&names, HERE, &Node::parts(name, layout())).await.expect("they work here")
}

fn peer(node: &Connectors, host: &str) -> PeerWires {
    PeerWires { node: NodeId::new("peer"), host: host.to_owned(), wires: node.addresses() }
}

fn chosen(node: &Connectors, peer: &PeerWires) -> Option<String> {
    node.shared_with(peer).map(|connector| connector.scheme().to_string())
}

#[tokio::test]
async fn auto_prefers_shared_memory_on_one_host_and_tcp_between_two() {
    let (near, far) = (node("near", &["auto"]).await, node("far", &["auto"]).await);
    assert_eq!(chosen(&near, &peer(&far, HERE)).as_deref(), Some("shm"));
    assert_eq!(chosen(&near, &peer(&far, "another machine")).as_deref(), Some("tcp"));
}

/// The names in `auto`: the fastest connector is first, and tcp, which always works, is last.
#[test]
fn auto_is_ordered_by_speed_and_only_tcp_is_needed() {
    let all = expand("auto");
    assert_eq!(all, [("cuda-ipc", false), ("nccl", false), ("shm", false), ("rdma", false), ("tcp", true)]);
}

/// RDMA is missing without a warning, because most machines have none.
#[tokio::test]
async fn a_machine_without_rdma_goes_on_without_it_and_says_so_once_asked() {
    if std::path::Path::new("/sys/class/infiniband").exists() {
        eprintln!("this machine has RDMA");
        return;
    }
    let capture = Capture::spans("decode");
    let _listening = capture.listen();
    node("near", &["auto"]).await;
    let lines: Vec<_> = capture.lines().iter().map(ToString::to_string).collect();
    assert!(
        lines.iter().any(|line| line.contains("connector is not supported on this machine")),
        "{lines:?}"
    );
    assert!(lines.iter().all(|line| !line.contains("WARN")), "{lines:?}");
    let names = ["rdma".to_owned()];
    let error =
        Connectors::build(&names, HERE, &Node::parts("far", layout())).await.expect_err("there is none");
    assert!(in_full(&error).contains("there is no RDMA device on this machine"), "{}", in_full(&error));
}

#[tokio::test]
async fn what_was_named_is_all_there_is() {
    let (near, far) = (node("near", &["shm"]).await, node("far", &["tcp"]).await);
    assert_eq!(chosen(&near, &peer(&far, HERE)), None);
    assert_eq!(
        chosen(&node("tcp", &["tcp"]).await, &peer(&node("auto", &["auto"]).await, HERE)).as_deref(),
        Some("tcp")
    );
}

/// Two nodes report the same host, but the peer's socket is not in this node's folder, so shm falls back
/// with one warning.
#[tokio::test]
async fn a_fall_back_is_a_warning_once() {
    let (near, far) = (node("near", &["auto"]).await, node("far", &["auto"]).await);
    let mut peer = peer(&far, HERE);
    peer.wires[0].endpoint = "/dev/shm/baton-of-another-container.sock".to_owned();
    let capture = Capture::spans("decode");
    let _listening = capture.listen();
    for _ in 0..3 {
        assert_eq!(chosen(&near, &peer).as_deref(), Some("tcp"));
    }
    let lines = capture.lines();
    let warnings = lines.iter().filter(|line| line.to_string().contains("falling back")).count();
    assert_eq!(warnings, 1, "{lines:?}");
}

#[tokio::test]
async fn a_connector_that_was_named_and_does_not_work_stops_the_start() {
    let names = ["pigeon".to_owned()];
    let error =
        Connectors::build(&names, HERE, &Node::parts("near", layout())).await.expect_err("no such wire");
    assert!(matches!(error, NodeError::Connector(_)), "{error}");
}

/// Each missing connector has its reason: there is no GPU, or the settings exclude it.
#[tokio::test]
async fn what_is_missing_is_said_with_its_reason() {
    let why = |node: &Connectors, scheme: &str| {
        node.missing()
            .into_iter()
            .find(|missing| missing.scheme.as_str() == scheme)
            .map(|missing| missing.why)
    };
    let auto = node("auto", &["auto"]).await;
    assert_eq!(why(&auto, "cuda-ipc").as_deref(), Some("its KV is not on a GPU"));
    assert_eq!((why(&auto, "shm"), why(&auto, "tcp")), (None, None));
    let narrow = node("narrow", &["tcp"]).await;
    assert_eq!(why(&narrow, "shm").as_deref(), Some("transfer.connectors is tcp"));
}

/// A connector that the machine should support fails to start: it is left out, with its error as the reason.
#[tokio::test]
async fn a_connector_that_fails_is_missing_with_its_error() {
    let parts = Node::parts("no GPU", layout());
    let failed = kv_transfer::build("cuda-ipc", parts).await.expect_err("there is no GPU memory");
    assert!(!in_full(&failed).is_empty());
}
