//! Thousands of silent connections at every port, bodies that do not end, and a head of one byte a second: probes and
//! requests are answered.

use std::net::SocketAddr;
use std::time::Duration;

use baton_tests::process::resident_kib;
use baton_tests::{Ask, Client, Fleet, free_addr, in_time};
use futures::future::join_all;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::time::Instant;

/// Silent connections at one port.
const SILENT: usize = 5_000;
/// Silent connections at each of the nine ports at the same time: both ends fit into the usual 20,000 descriptors.
const SILENT_AT_ALL: usize = 1_900;
/// The number of connections that are opened at one time: below the kernel's queue of a port.
const AT_ONCE: usize = 50;
/// The median time of a probe. Single probes may wait for one of two busy processors.
const PROBE_MEDIAN: Duration = Duration::from_millis(100);
/// The longest time of a probe: less than the manifests allow.
const PROBE_MAX: Duration = Duration::from_secs(1);

/// Opens silent connections, and drops those that the port closes at once.
async fn flood(port: SocketAddr, n: usize) -> Vec<TcpStream> {
    let mut open = Vec::with_capacity(n);
    while open.len() < n {
        let batch = join_all((0..AT_ONCE).map(|_| TcpStream::connect(port)));
        open.extend(
            in_time("connections", batch).await.into_iter().map(|stream| stream.expect("it listens")),
        );
    }
    open
}

/// Probes every process. Returns the time of each probe.
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

fn judge(trouble: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    let (median, max) = (times[times.len() / 2], times[times.len() - 1]);
    eprintln!("{trouble}: median {median:?}, at most {max:?}");
    assert!(median <= PROBE_MEDIAN && max <= PROBE_MAX, "{trouble}: median {median:?}, at most {max:?}");
}

/// One node of each kind, and the router's admin port.
async fn fleet() -> (Fleet, SocketAddr) {
    let admin = free_addr();
    let settings = vec![("BATON_ROUTER__ADMIN", admin.to_string())];
    (Fleet::start_with("mock", 1, 1, settings).await, admin)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_connections_at_all_ports_close_none() {
    let (fleet, admin) = fleet().await;
    // Admin ports and wires log refused strangers, which this test causes.
    fleet.router.expect_log(&["connection"]);
    fleet.nodes.iter().for_each(|node| node.process.expect_log(&["connection", "kv stream"]));
    let nodes = fleet.nodes.iter().flat_map(|node| [node.grpc, node.admin, node.kv]);
    let ports: Vec<SocketAddr> = [fleet.http, fleet.grpc, admin].into_iter().chain(nodes).collect();
    let probed = fleet.nodes.iter().map(|node| node.admin).chain([admin, fleet.http]).map(Client::new);
    let probed: Vec<Client> = probed.collect();
    for port in &ports {
        let silent = flood(*port, SILENT).await;
        served(&port.to_string(), &fleet, &probed).await;
        drop(silent);
    }
    let mut silent = Vec::new();
    for port in &ports {
        silent.extend(flood(*port, SILENT_AT_ALL).await);
    }
    served("all ports", &fleet, &probed).await;
    assert_eq!(silent.len(), SILENT_AT_ALL * ports.len());
}

/// Probes are answered in time, and another client is served.
async fn served(trouble: &str, fleet: &Fleet, probed: &[Client]) {
    let mut times = Vec::new();
    for _ in 0..3 {
        times.extend(probe(probed).await);
    }
    judge(trouble, times);
    let answer = fleet.client().ask(&Ask::new(vec![3; 100], 4)).await;
    assert!(!answer.expect("another client is served").tokens.is_empty());
}

/// The number of bodies that do not end.
const BODIES: usize = 500;
const BODY_BYTES: usize = 8 << 20;
const ROUTER_MIB_MAX: u64 = 512;

/// Sends a request with all but the last byte of its body. Ends early if the router closes the connection.
async fn unfinished_body(port: SocketAddr) -> TcpStream {
    let mut stream = TcpStream::connect(port).await.expect("it listens");
    let head = format!("POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {BODY_BYTES}\r\n\r\n");
    stream.write_all(head.as_bytes()).await.expect("a head");
    let piece = vec![b' '; 1 << 16];
    for _ in 0..BODY_BYTES / piece.len() - 1 {
        if stream.write_all(&piece).await.is_err() {
            break;
        }
    }
    stream
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_that_do_not_end_cost_bounded_memory() {
    let (fleet, admin) = fleet().await;
    let probed: Vec<Client> = [admin, fleet.http].map(Client::new).to_vec();
    let (mut open, mut times, mut mib) = (Vec::new(), Vec::new(), Vec::new());
    while open.len() < BODIES {
        let batch = join_all((0..AT_ONCE).map(|_| unfinished_body(fleet.http)));
        open.extend(in_time("bodies", batch).await);
        times.extend(probe(&probed).await);
        mib.push(resident_kib(fleet.router.pid()).expect("it runs") >> 10);
        let answer = fleet.client().ask(&Ask::new(vec![3; 100], 4)).await;
        assert!(!answer.expect("another client is served").tokens.is_empty());
    }
    let max = mib.iter().max().copied().unwrap_or_default();
    assert!(max < ROUTER_MIB_MAX, "the router had {mib:?} MiB");
    eprintln!("the router had {mib:?} MiB");
    judge("bodies", times);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_head_of_one_byte_a_second_ends() {
    let settings = vec![("BATON_EXPERT__CONNECTIONS__HEAD_MS", "2000".to_owned())];
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
