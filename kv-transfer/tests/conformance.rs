//! Every connector of this crate passes the suite.

use std::io;
use std::num::NonZero;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock};

use async_trait::async_trait;

use baton_kv_transfer::conformance::node::{BLOCK_TOKENS, Make, Pair, layout};
use baton_kv_transfer::conformance::processes::{FollowerPath, ProcessParts, Side};
use baton_kv_transfer::conformance::{
    conformance, conformance_of_processes, conformance_of_ranks, conformance_of_stages,
};
use baton_kv_transfer::connectors::flaky::Flaky;
use baton_kv_transfer::connectors::nccl::double::Double;
use baton_kv_transfer::connectors::{nccl, shm, tcp};
use baton_kv_transfer::{ConnectorParts, KvConnector, build};
use chassis::identity::{Identity, Tls, TlsPem};
use chassis::net::{Listener, Net, Stream, TcpNet};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, SanType};
use types::Destination;

async fn built(name: &'static str, parts: ConnectorParts) -> Arc<dyn KvConnector> {
    build(name, parts).await.expect("a free port")
}

#[tokio::test(start_paused = true)]
async fn loopback() {
    conformance(|parts| built("loopback", parts)).await;
}

#[tokio::test]
async fn tcp() {
    conformance(|parts| built("tcp", parts)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tcp_on_many_threads() {
    conformance(|parts| built("tcp", parts)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tcp_of_several_processes() {
    conformance_of_processes(FollowerPath::OfMemory, |parts| built("tcp", parts)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tcp_of_several_processes_in_slots() {
    conformance_of_processes(FollowerPath::DoubleSlots, |parts| in_slots("tcp", parts)).await;
}

/// The same node with a certificate.
fn with_certificate(mut parts: ConnectorParts) -> ConnectorParts {
    static TLS: LazyLock<Tls> = LazyLock::new(certificate);
    parts.world = parts.world.with_identity(Identity::default().with_tls(TLS.clone()));
    parts
}

/// A certificate for a node of either role.
fn certificate() -> Tls {
    let mut params = CertificateParams::new([]).expect("no names");
    params.subject_alt_names = vec![SanType::URI("baton://c/both/*".try_into().expect("ASCII"))];
    let mut ca = CertificateParams::new([]).expect("no names");
    ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = || KeyPair::generate().expect("randomness");
    let (ca, own) = (CertifiedIssuer::self_signed(ca, key()).expect("it can sign itself"), key());
    let cert = params.signed_by(&own, &ca).expect("the CA can sign").pem();
    let pem = TlsPem { ca: ca.pem().into(), cert: cert.into(), key: own.serialize_pem().into() };
    Tls::of_pem(&pem).expect("it loads")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tcp_over_tls() {
    conformance(|parts| built("tcp", with_certificate(parts))).await;
}

/// The network of this machine, with the number of connections made.
#[derive(Debug, Default)]
struct CountingNet(AtomicU32);

#[async_trait]
impl Net for CountingNet {
    async fn connect(&self, addr: &str) -> io::Result<Stream> {
        self.0.fetch_add(1, Ordering::Relaxed);
        TcpNet.connect(addr).await
    }

    async fn listen(&self, addr: &str) -> io::Result<Box<dyn Listener>> {
        TcpNet.listen(addr).await
    }
}

#[tokio::test]
async fn a_tcp_link_has_twice_as_many_streams_over_tls() {
    for (is_encrypted, n_expected) in [(false, 2), (true, 4)] {
        let net = Arc::new(CountingNet::default());
        let counted = Arc::clone(&net);
        let make: Make = Arc::new(move |mut parts| {
            parts.world = parts.world.clone().with_net(Arc::clone(&counted) as Arc<dyn Net>);
            let parts = if is_encrypted { with_certificate(parts) } else { parts };
            Box::pin(built("tcp", parts))
        });
        let pair = Pair::new(&make).await;
        let (landing, _arrival) = pair.land(BLOCK_TOKENS);
        let sender = pair.prefill.connector.open(&Destination::Landing(landing)).await;
        drop(sender.expect("the peer is there"));
        assert_eq!(net.0.load(Ordering::Relaxed), n_expected, "encrypted: {is_encrypted}");
    }
}

#[tokio::test]
async fn several_processes_send_over_tls() {
    let make: Make = Arc::new(|parts| Box::pin(built("tcp", with_certificate(parts))));
    let mut parts = ProcessParts::new(NonZero::new(3).expect("some"), layout());
    parts.followers = parts.followers.into_iter().map(with_certificate).collect();
    let pair = parts.start(&make, Pair::new(&make).await).await;
    pair.transfer(9 * BLOCK_TOKENS, 1).await;
    pair.at_baseline().await;
}

#[tokio::test]
async fn several_processes_receive_over_tls() {
    let make: Make = Arc::new(|parts| Box::pin(built("tcp", with_certificate(parts))));
    let mut parts = ProcessParts::of(Side::Decode, NonZero::new(3).expect("some"), layout());
    parts.followers = parts.followers.into_iter().map(with_certificate).collect();
    let pair = parts.start(&make, Pair::new(&make).await).await;
    pair.transfer(9 * BLOCK_TOKENS, 1).await;
    pair.at_baseline().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shm_over_tls() {
    conformance(|parts| built("shm", with_certificate(parts))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nccl_over_tls() {
    let double = Double::default();
    conformance(move |parts| over_the_double(double.clone(), with_certificate(parts))).await;
}

#[tokio::test]
async fn shm() {
    conformance(|parts| built("shm", parts)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shm_on_many_threads() {
    conformance(|parts| built("shm", parts)).await;
}

/// The suite passes if pages cannot be shared with other processes.
#[tokio::test]
async fn shm_through_a_stage() {
    let staged = |parts| async { shm::listen_staged(parts).await.expect("a folder for sockets") };
    conformance(move |parts| async move { staged(parts).await as Arc<dyn KvConnector> }).await;
}

/// Makes the shm or tcp connector with slots as for GPUs, over the double of a GPU. `examples/gpu_conformance` runs the
/// same suite on GPUs.
async fn in_slots(name: &'static str, mut parts: ConnectorParts) -> Arc<dyn KvConnector> {
    // The suite needs transfers of many frames, and frames of GPUs are larger than the setting.
    parts.settings.frame_bytes = 128;
    match name {
        "shm" => shm::listen_double(parts).await.expect("a folder for sockets"),
        _ => tcp::listen_double(parts).await.expect("a free port"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shm_in_slots() {
    conformance(|parts| in_slots("shm", parts)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shm_in_slots_between_ranks() {
    conformance_of_ranks(|parts| in_slots("shm", parts)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tcp_in_slots() {
    conformance(|parts| in_slots("tcp", parts)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tcp_in_slots_between_ranks() {
    conformance_of_ranks(|parts| in_slots("tcp", parts)).await;
}

#[tokio::test(start_paused = true)]
async fn loopback_between_ranks() {
    conformance_of_ranks(|parts| built("loopback", parts)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tcp_between_ranks() {
    conformance_of_ranks(|parts| built("tcp", parts)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shm_between_ranks() {
    conformance_of_ranks(|parts| built("shm", parts)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shm_between_ranks_through_a_stage() {
    let staged = |parts| async { shm::listen_staged(parts).await.expect("a folder for sockets") };
    conformance_of_ranks(move |parts| async move { staged(parts).await as Arc<dyn KvConnector> }).await;
}

/// Makes the nccl connector over the test double. `examples/gpu_conformance` runs the same suite on GPUs.
async fn over_the_double(double: Double, mut parts: ConnectorParts) -> Arc<dyn KvConnector> {
    // The suite needs transfers of many frames, so the setting is small: messages are many times larger than
    // it.
    parts.settings.frame_bytes = 8;
    // The threads of both nodes are in one process, so the spin is short: with a long one they would only
    // take the CPU from each other.
    parts.settings.spin_us = 20;
    nccl::listen_double(parts, &double).await.expect("a free port")
}

async fn nccl_over_the_double() {
    let double = Double::default();
    conformance(move |parts| over_the_double(double.clone(), parts)).await;
}

#[tokio::test]
async fn nccl() {
    nccl_over_the_double().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nccl_on_many_threads() {
    nccl_over_the_double().await;
}

/// There is a queue for each pair of ranks with common heads, so the suite also covers lanes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nccl_between_ranks() {
    let double = Double::default();
    conformance_of_ranks(move |parts| over_the_double(double.clone(), parts)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tcp_between_stages() {
    conformance_of_stages(|parts| built("tcp", parts)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shm_between_stages() {
    conformance_of_stages(|parts| built("shm", parts)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nccl_between_stages() {
    let double = Double::default();
    conformance_of_stages(move |parts| over_the_double(double.clone(), parts)).await;
}

/// The wrapper adds no faults; the connector inside applies the suite's faults.
#[tokio::test(start_paused = true)]
async fn flaky_loopback() {
    conformance(|parts| async {
        let faults = parts.faults.clone();
        Flaky::over(built("loopback", parts).await, faults) as Arc<dyn KvConnector>
    })
    .await;
}
