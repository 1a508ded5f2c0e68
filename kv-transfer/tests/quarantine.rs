//! Tests that blocks that a wire may still write are not reused, and that blocks that no wire can write are
//! free at once.

use std::sync::Arc;
use std::time::Duration;

use baton_kv_transfer::conformance::node::{BLOCK_TOKENS, Make, Node, Pair, layout};
use baton_kv_transfer::connectors::flaky::Flaky;
use baton_kv_transfer::{ArrivalStatus, KvConnector, TransferError, build};
use tokio_util::sync::CancellationToken;

const N_TOKENS: u32 = 4 * BLOCK_TOKENS;
/// The blocks of each node, of all three layer groups together.
const N_BLOCKS: u32 = 12;

/// Makes two nodes whose wires cannot prove that they are quiet before `until`.
async fn unproven_pair(until: CancellationToken) -> Pair {
    let make: Make = Arc::new(move |parts| {
        let until = until.clone();
        Box::pin(async move {
            let flaky = Flaky::build("loopback", parts).await.expect("loopback needs nothing");
            flaky.cannot_prove_quiet(until);
            flaky as Arc<dyn KvConnector>
        })
    });
    Pair::new(&make).await
}

async fn loopback_pair() -> Pair {
    let make: Make =
        Arc::new(|parts| Box::pin(async { build("loopback", parts).await.expect("loopback needs nothing") }));
    Pair::new(&make).await
}

#[tokio::test(start_paused = true)]
async fn blocks_are_free_at_once_where_the_wire_is_quiet() {
    let pair = loopback_pair().await;
    let (landing, arrival) = pair.land(N_TOKENS);
    let _sender = pair.open(&landing).await.expect("granted");
    drop(arrival);
    assert!(pair.decode.is_at_baseline());
}

#[tokio::test(start_paused = true)]
async fn unproven_blocks_stay_in_quarantine_until_the_proof_and_not_until_a_timer() {
    let proof = CancellationToken::new();
    let pair = unproven_pair(proof.clone()).await;
    let (landing, arrival) = pair.land(N_TOKENS);
    let _sender = pair.open(&landing).await.expect("granted");
    drop(arrival);
    for _ in 0..3 {
        let counts = pair.decode.pool.counts();
        assert_eq!((counts.quarantined, counts.leased), (N_BLOCKS, 0));
        pair.decode.pool.integrity().expect("quarantine is part of the books");
        tokio::time::sleep(Duration::from_secs(3600)).await;
    }
    proof.cancel();
    pair.decode.at_baseline().await;
}

#[tokio::test(start_paused = true)]
async fn expired_landing_is_quarantined_too() {
    let proof = CancellationToken::new();
    let pair = unproven_pair(proof.clone()).await;
    let (_landing, mut arrival) = pair.land_for(N_TOKENS, Duration::from_secs(1));
    arrival.ended().await;
    assert!(matches!(arrival.poll(), ArrivalStatus::Failed(TransferError::Expired)));
    assert_eq!(pair.decode.pool.counts().quarantined, N_BLOCKS);
    proof.cancel();
    pair.decode.at_baseline().await;
}

#[tokio::test(start_paused = true)]
async fn kv_that_arrived_is_not_quarantined() {
    let pair = unproven_pair(CancellationToken::new()).await;
    pair.transfer(N_TOKENS, 1).await;
    pair.decode.at_baseline().await;
}

#[tokio::test(start_paused = true)]
async fn arrival_nobody_asked_for_gives_its_blocks_back() {
    let pair = loopback_pair().await;
    let from = pair.prefill.computed(N_TOKENS, 1);
    let (landing, arrival) = pair.land(N_TOKENS);
    pair.deliver(&landing, &from).await.expect("delivered");
    drop(arrival);
    assert!(pair.decode.is_at_baseline());
}

/// A worker's thread is outside of the runtime and may drop arrivals, so the drop needs no runtime.
#[tokio::test]
async fn arrival_may_be_dropped_outside_the_runtime() {
    let proof = CancellationToken::new();
    let pair = unproven_pair(proof.clone()).await;
    let (_landing, arrival) = pair.land(N_TOKENS);
    std::thread::spawn(move || drop(arrival)).join().expect("it needs no runtime");
    assert_eq!(pair.decode.pool.counts().quarantined, N_BLOCKS);
    proof.cancel();
    tokio::time::timeout(Duration::from_secs(20), pair.decode.at_baseline()).await.expect("in time");
}

#[tokio::test(start_paused = true)]
async fn an_arrival_is_handed_out_once() {
    let pair = loopback_pair().await;
    let from = pair.prefill.computed(N_TOKENS, 1);
    let (landing, mut arrival) = pair.land(N_TOKENS);
    pair.deliver(&landing, &from).await.expect("delivered");
    assert!(matches!(arrival.poll(), ArrivalStatus::Arrived(_)));
    assert!(matches!(arrival.poll(), ArrivalStatus::Failed(TransferError::Closed)));
}

#[tokio::test]
async fn an_unknown_connector_is_refused_with_the_known_ones() {
    let parts = Node::parts("n", layout());
    let error = build("pigeon", parts).await.map(|_| ()).expect_err("no such wire");
    assert_eq!(
        error.to_string(),
        "no connector is called \"pigeon\"; there are loopback, cuda-ipc, nccl, shm, rdma, tcp"
    );
}
