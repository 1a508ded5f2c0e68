//! Probes and requests are answered during thousands of silent connections at every port, bodies that do not
//! end, and heads of one byte a second.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use baton_tests::Fleet;
use baton_tests::flood::{Flood, Flooding};
use baton_tests::probe::{serves_another, while_probed};
use baton_tests::process::resident_kib;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep};

/// The number of silent connections at one port.
const SILENT: usize = 5_000;
/// The number of connections opened in one second: less than the kernel's queue of a port holds, which is
/// 4,096.
const SILENT_PER_SECOND: usize = 2_500;

/// Starts one node of each kind. Ports for operators and for KV may log that they refused strangers.
async fn fleet() -> Fleet {
    let fleet = Fleet::start_pooled("mock", 1, 1, 1).await;
    fleet.router.expect_log(&["connection"]);
    fleet.nodes.iter().for_each(|node| node.process.expect_log(&["connection", "KV stream"]));
    fleet
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_connections_at_any_port_delay_no_probe() {
    let fleet = fleet().await;
    for port in fleet.ports() {
        let flooded = async {
            let mut flood = Flood::start(&[port], Flooding::Silent, SILENT, SILENT_PER_SECOND);
            flood.full().await;
            serves_another(&fleet.client()).await;
            drop(flood);
            serves_another(&fleet.client()).await;
        };
        while_probed(&fleet.health_ports(), &format!("silence at {port}"), flooded).await;
    }
}

/// The variable with the seconds for which the flood at all ports stays. `./test.sh long` sets it to minutes.
const FLOOD_S: &str = "TEST_FLOOD_S";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_connections_at_all_ports_delay_no_probe() {
    let seconds = std::env::var(FLOOD_S).map_or(10, |text| text.parse().expect("seconds"));
    let fleet = fleet().await;
    let ports = fleet.ports();
    let flooded = async {
        let mut floods: Vec<Flood> =
            ports.chunks(3).map(|ports| Flood::start(ports, Flooding::Silent, SILENT, 250)).collect();
        for flood in &mut floods {
            flood.full().await;
        }
        let until = Instant::now() + Duration::from_secs(seconds);
        while Instant::now() < until {
            serves_another(&fleet.client()).await;
            sleep(Duration::from_millis(100)).await;
        }
        drop(floods);
        serves_another(&fleet.client()).await;
    };
    while_probed(&fleet.health_ports(), "silence at all ports", flooded).await;
}

/// The number of bodies that do not end.
const BODIES: usize = 500;
const ROUTER_MIB_MAX: u64 = 512;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_that_do_not_end_cost_bounded_memory() {
    let fleet = fleet().await;
    let most = AtomicU64::new(0);
    let flooded = async {
        let mut flood = Flood::start(&[fleet.http], Flooding::Unfinished, BODIES, 50);
        let mut full = Box::pin(flood.full());
        let mut is_full = false;
        while !is_full {
            is_full = tokio::time::timeout(Duration::from_millis(100), &mut full).await.is_ok();
            most.fetch_max(resident_kib(fleet.router.pid()).expect("it runs") >> 10, Ordering::Relaxed);
            serves_another(&fleet.client()).await;
        }
    };
    while_probed(&fleet.health_ports(), "bodies", flooded).await;
    let most = most.into_inner();
    eprintln!("the router had {most} MiB");
    assert!(most < ROUTER_MIB_MAX, "the router had {most} MiB");
}

/// The number of connections of each kind at each port, and the seconds for which they stay.
const SLOW: usize = 50;
const SLOW_S: u64 = 12;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_byte_a_second_at_every_port_delays_no_probe() {
    let fleet = fleet().await;
    let flooded = async {
        let mut floods = [Flooding::Head, Flooding::Body]
            .map(|flooding| Flood::start(&fleet.ports(), flooding, SLOW, SLOW));
        for flood in &mut floods {
            flood.full().await;
        }
        let until = Instant::now() + Duration::from_secs(SLOW_S);
        while Instant::now() < until {
            serves_another(&fleet.client()).await;
            sleep(Duration::from_millis(100)).await;
        }
    };
    while_probed(&fleet.health_ports(), "one byte a second", flooded).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_head_of_one_byte_a_second_ends() {
    let settings = vec![("BATON_EXPERT__CONNECTIONS__HEAD_MS", "2000".to_owned())];
    let fleet = Fleet::start_each("mock", 1, 1, settings, |_| Vec::new()).await;
    let began = Instant::now();
    let mut slow = TcpStream::connect(fleet.http).await.expect("it listens");
    let head = b"GET /live HTTP/1.1\r\nhost: x\r\n";
    let mut written = 0;
    while slow.write_all(&head[written..=written]).await.is_ok() && written + 1 < head.len() {
        written += 1;
        sleep(Duration::from_secs(1)).await;
    }
    assert!(written < 10, "the connection was closed after {written} s");
    assert!(began.elapsed() >= Duration::from_secs(2), "it had its time");
}
