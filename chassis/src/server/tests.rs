use std::io;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use axum::body::Bytes;
use axum::routing::{get, post};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::Notify;
use tokio::time::{Instant, timeout};

use super::*;
use crate::metrics::Metrics;
use crate::net::{MemoryNet, Net};
use crate::task::Task;

const SECOND: Duration = Duration::from_secs(1);
const ADDR: &str = "server:80";
const REQUEST: &[u8] = b"GET /peer HTTP/1.1\r\nhost: x\r\n\r\n";

struct Served {
    net: MemoryNet,
    shutdown: Shutdown,
    server: Task<Result<(), StillHeld>>,
}

async fn start(limits: ServerLimits) -> Served {
    let net = MemoryNet::new();
    let listener = net.listen(ADDR).await.expect("free");
    start_at(net, listener, limits)
}

fn start_at(net: MemoryNet, listener: Box<dyn Listener>, limits: ServerLimits) -> Served {
    let router = Router::new()
        .route(
            "/peer",
            get(|ConnectInfo(peer): ConnectInfo<SocketAddr>| async move { peer.ip().to_string() }),
        )
        .route("/forever", get(std::future::pending::<()>))
        .route("/length", post(async |body: Bytes| body.len().to_string()));
    let shutdown = Shutdown::new();
    let server = spawn_guarded(
        &Gate::new("test"),
        "server",
        serve(listener, PortTls::Plaintext, router, shutdown.clone(), limits),
    );
    Served { net, shutdown, server }
}

impl Served {
    async fn connect(&self) -> Stream {
        self.net.connect(ADDR).await.expect("the server listens")
    }

    /// Stops the server and returns how long that took.
    async fn stop(self) -> Duration {
        let start = Instant::now();
        self.shutdown.trigger();
        self.server.await.expect("the server ran").expect("nothing is late");
        start.elapsed()
    }
}

async fn answer(stream: &mut Stream) -> String {
    let mut answer = vec![0; 1024];
    let n = stream.read(&mut answer).await.expect("open");
    String::from_utf8_lossy(&answer[..n]).into_owned()
}

#[tokio::test(start_paused = true)]
async fn handlers_see_the_peer() {
    let served = start(ServerLimits::default()).await;
    let mut stream = served.connect().await;
    stream.write_all(REQUEST).await.expect("room");
    let answer = answer(&mut stream).await;
    assert!(answer.starts_with("HTTP/1.1 200 OK") && answer.ends_with("127.0.0.1"), "{answer}");
    assert_eq!(served.stop().await, Duration::ZERO, "an idle connection holds nothing up");
}

/// Returns default limits, except for connections.
fn limits(connections: ConnectionLimits) -> ServerLimits {
    ServerLimits { connections, ..ServerLimits::default() }
}

#[tokio::test(start_paused = true)]
async fn an_idle_connection_gives_way_and_a_served_one_does_not() {
    let metrics = Metrics::new("test");
    let refused = metrics.counter_vec("connections_refused_total", "Refused.", &["port", "reason"]);
    let limits = limits(ConnectionLimits { connections_max: 1, ..ConnectionLimits::default() });
    let served = start(ServerLimits { counts: ConnectionCounts::new(refused, "http"), ..limits }).await;
    let (mut idle, mut served_one) = (served.connect().await, served.connect().await);
    idle.write_all(REQUEST).await.expect("room");
    assert!(answer(&mut idle).await.starts_with("HTTP/1.1 200 OK"));
    served_one.write_all(b"GET /forever HTTP/1.1\r\nhost: x\r\n\r\n").await.expect("room");
    assert_eq!(timeout(SECOND, answer(&mut idle)).await.expect("closed"), "", "its place was needed");
    let line = "baton_test_connections_refused_total{port=\"http\",reason=\"displaced\"} 1";
    assert!(metrics.page().contains(line), "{}", metrics.page());
    // Time is paused and advances only when every task waits, so the sleep lets the server handle both
    // connections.
    tokio::time::sleep(SECOND).await;

    let mut waiting = served.connect().await;
    waiting.write_all(REQUEST).await.expect("room");
    timeout(SECOND, answer(&mut waiting)).await.expect_err("a request is under way");
    drop(served_one);
    assert!(timeout(SECOND, answer(&mut waiting)).await.expect("room").starts_with("HTTP/1.1 200 OK"));
}

#[tokio::test(start_paused = true)]
async fn requests_whose_bodies_do_not_arrive_give_way() {
    let limits = limits(ConnectionLimits { connections_max: 3, ..ConnectionLimits::default() });
    let served = start(limits).await;
    let mut half = Vec::new();
    for _ in 0..10 {
        let mut one = served.connect().await;
        one.write_all(b"POST /length HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\na").await.expect("room");
        tokio::time::sleep(SECOND).await;
        half.push(one);
    }
    let mut probe = served.connect().await;
    probe.write_all(REQUEST).await.expect("room");
    let answered = timeout(Duration::from_millis(100), answer(&mut probe)).await.expect("at once");
    assert!(answered.starts_with("HTTP/1.1 200 OK"), "{answered}");
    assert_eq!(timeout(SECOND, answer(&mut half[0])).await.expect("closed"), "", "its place was needed");
    let last = half.last_mut().expect("ten");
    last.write_all(b"bcd").await.expect("room");
    let answered = answer(last).await;
    assert!(answered.ends_with("\r\n\r\n4"), "the youngest keeps its place: {answered}");
}

#[tokio::test(start_paused = true)]
async fn silent_slow_and_idle_clients_are_closed() {
    let bounds = ConnectionLimits {
        first_byte_ms: 1_000,
        head_ms: 2_000,
        idle_ms: 3_000,
        ..ConnectionLimits::default()
    };
    let served = start(limits(bounds)).await;
    for (first, seconds) in [(&b""[..], 1), (b"G", 2), (b"GET /peer HTTP/1.1\r\n", 2), (REQUEST, 3)] {
        let mut stream = served.connect().await;
        stream.write_all(first).await.expect("room");
        let start = Instant::now();
        if first == REQUEST {
            assert!(answer(&mut stream).await.starts_with("HTTP/1.1 200 OK"));
        }
        assert_eq!(answer(&mut stream).await, "");
        assert_eq!(start.elapsed().as_secs(), seconds, "{first:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_drain_is_bounded() {
    let served = start(ServerLimits { drain: SECOND * 3, ..ServerLimits::default() }).await;
    let mut stream = served.connect().await;
    stream.write_all(b"GET /forever HTTP/1.1\r\nhost: x\r\n\r\n").await.expect("room");
    tokio::task::yield_now().await;
    assert_eq!(served.stop().await.as_secs(), 3);
    assert_eq!(answer(&mut stream).await, "");
}

/// A listener that fails once before every connection.
#[derive(Debug)]
struct Flaky {
    inner: Box<dyn Listener>,
    failed: Mutex<bool>,
}

#[async_trait]
impl Listener for Flaky {
    async fn accept(&mut self) -> io::Result<(Stream, SocketAddr)> {
        let failed = std::mem::replace(self.failed.get_mut().unwrap(), true);
        if !failed {
            return Err(io::Error::other("out of file descriptors"));
        }
        let accepted = self.inner.accept().await;
        *self.failed.get_mut().unwrap() = false;
        accepted
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.inner.local_addr()
    }
}

#[tokio::test(start_paused = true)]
async fn a_failed_accept_is_not_the_end() {
    let net = MemoryNet::new();
    let inner = net.listen(ADDR).await.expect("free");
    let listener = Box::new(Flaky { inner, failed: Mutex::new(false) });
    let router = Router::new().route("/peer", get(|| async { "here" }));
    let shutdown = Shutdown::new();
    let _server = spawn_guarded(
        &Gate::new("test"),
        "server",
        serve(listener, PortTls::Plaintext, router, shutdown, ServerLimits::default()),
    );
    for _ in 0..3 {
        let mut stream = net.connect(ADDR).await.expect("the server listens");
        stream.write_all(REQUEST).await.expect("room");
        assert!(answer(&mut stream).await.ends_with("here"));
    }
}

/// A listener that accepts until it is notified, and then fails as if the process had no file descriptor
/// left.
#[derive(Debug)]
struct OutOfDescriptors {
    inner: Box<dyn Listener>,
    told: Arc<Notify>,
}

#[async_trait]
impl Listener for OutOfDescriptors {
    async fn accept(&mut self) -> io::Result<(Stream, SocketAddr)> {
        tokio::select! {
            () = self.told.notified() => Err(io::Error::other("too many open files")),
            accepted = self.inner.accept() => accepted,
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.inner.local_addr()
    }
}

#[tokio::test(start_paused = true)]
async fn a_failed_accept_closes_the_oldest_idle_connection() {
    let net = MemoryNet::new();
    let inner = net.listen(ADDR).await.expect("free");
    let told = Arc::new(Notify::new());
    let listener = Box::new(OutOfDescriptors { inner, told: told.clone() });
    let served = start_at(net, listener, ServerLimits::default());
    let mut serving = served.connect().await;
    serving.write_all(b"GET /forever HTTP/1.1\r\nhost: x\r\n\r\n").await.expect("room");
    let mut idle = Vec::new();
    for _ in 0..2 {
        let mut one = served.connect().await;
        one.write_all(REQUEST).await.expect("room");
        assert!(answer(&mut one).await.starts_with("HTTP/1.1 200 OK"));
        idle.push(one);
    }
    let [mut oldest, mut younger] = idle.try_into().expect("two");
    told.notify_one();
    assert_eq!(timeout(SECOND, answer(&mut oldest)).await.expect("closed"), "", "it was the oldest idle one");
    younger.write_all(REQUEST).await.expect("open");
    assert!(answer(&mut younger).await.starts_with("HTTP/1.1 200 OK"), "one failure closes one connection");
    timeout(SECOND, answer(&mut serving)).await.expect_err("a request is under way");
    let mut new = served.connect().await;
    new.write_all(REQUEST).await.expect("room");
    assert!(answer(&mut new).await.starts_with("HTTP/1.1 200 OK"), "the port goes on accepting");
}
