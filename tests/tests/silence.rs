//! Thousands of connections that say nothing, at every port in turn, and a head of one byte a second: probes are
//! answered, and so are requests.

use std::net::SocketAddr;
use std::time::Duration;

use baton_tests::{Ask, Client, Fleet, in_time};
use futures::future::join_all;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::time::Instant;

/// Silent connections at one port.
const SILENT: usize = 5_000;
/// Connections that are made at one time: fewer than the kernel's queue of a port holds.
const AT_ONCE: usize = 50;
/// What a probe takes, half of the time. Single probes may wait for one of two busy processors.
const PROBE_MEDIAN: Duration = Duration::from_millis(100);
/// What every probe takes at most: less than the manifests allow.
const PROBE_MAX: Duration = Duration::from_secs(1);

/// Opens silent connections, and lets go of those that the port closes at once.
async fn flood(port: SocketAddr) -> Vec<TcpStream> {
    let mut open = Vec::with_capacity(SILENT);
    while open.len() < SILENT {
        let batch = join_all((0..AT_ONCE).map(|_| TcpStream::connect(port)));
        open.extend(
            in_time("connections", batch).await.into_iter().map(|stream| stream.expect("it listens")),
        );
    }
    open
}

/// Probes every process: the time that each probe took.
async fn probe(clients: &[Client]) -> Vec<Duration> {
    let mut times = Vec::new();
    for page in ["/live", "/ready"] {
        for client in clients {
            let asked = Instant::now();
            let (status, body) = client.get(page).await;
            assert_eq!(status.as_u16(), 200, "{client:?} {page}: {body}");
            times.push(asked.elapsed());
        }
    }
    times
}

fn judge(port: SocketAddr, mut times: Vec<Duration>) {
    times.sort_unstable();
    let (median, max) = (times[times.len() / 2], times[times.len() - 1]);
    assert!(median <= PROBE_MEDIAN && max <= PROBE_MAX, "{port}: median {median:?}, at most {max:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_connections_at_any_port_close_none() {
    let fleet = Fleet::start("mock", 1, 1).await;
    // An operator's port and a wire say that strangers were refused: that is what is done here.
    fleet.router.expect_log(&["connection"]);
    fleet.nodes.iter().for_each(|node| node.process.expect_log(&["connection", "kv stream"]));
    let nodes = fleet.nodes.iter().flat_map(|node| [node.grpc, node.admin, node.kv]);
    let ports: Vec<SocketAddr> = [fleet.http, fleet.grpc].into_iter().chain(nodes).collect();
    let probed = fleet.nodes.iter().map(|node| Client::new(node.admin)).chain([fleet.client()]);
    let probed: Vec<Client> = probed.collect();
    for port in ports {
        let silent = flood(port).await;
        let mut times = Vec::new();
        for _ in 0..3 {
            times.extend(probe(&probed).await);
        }
        judge(port, times);
        let answer = fleet.client().ask(&Ask::new(vec![3; 100], 4)).await;
        assert!(!answer.expect("another client is served").tokens.is_empty());
        drop(silent);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_head_of_one_byte_a_second_ends() {
    let settings = vec![("BATON_CONNECTIONS__HEAD_MS", "2000".to_owned())];
    let fleet = Fleet::start_each("mock", 1, 1, settings, |_| Vec::new()).await;
    let mut slow = TcpStream::connect(fleet.http).await.expect("it listens");
    let began = Instant::now();
    let head = b"GET /live HTTP/1.1\r\nhost: x\r\n";
    let mut written = 0;
    while slow.write_all(&head[written..=written]).await.is_ok() && written + 1 < head.len() {
        written += 1;
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert!(written < 10, "the connection was closed after {written} s");
    assert!(began.elapsed() >= Duration::from_secs(2), "it had its time");
}
