//! KV arrives complete and correct, and is reported only then.

use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use futures::poll;
use kv_cache::{FenceSignal, LayerFence};
use types::layout::KvLayout;
use types::{KvSpan, in_full};

use super::node::{BLOCK_TOKENS, N_LAYERS, Pair, handoff, pages, whole};
use crate::arrival::ArrivalStatus;
use crate::error::TransferError;

pub async fn bytes_arrive_equal(pair: Arc<Pair>) {
    for n_tokens in [1, BLOCK_TOKENS, 5 * BLOCK_TOKENS, 40 * BLOCK_TOKENS] {
        pair.transfer(n_tokens, u64::from(n_tokens)).await;
    }
}

pub async fn spans_arrive_in_any_order(pair: Arc<Pair>) {
    let n_tokens = 7 * BLOCK_TOKENS;
    let from = pair.prefill.computed(n_tokens, 1);
    let (landing, arrival) = pair.land(n_tokens);
    let mut spans = pages(&landing);
    spans.reverse();
    // The pages are sent with an odd stride that has no common factor with their number, so that each is sent
    // once.
    let n = spans.len();
    let stride = (n / 2..n).find(|stride| gcd(*stride, n) == 1).expect("n - 1 shares none");
    let mut sender = pair.open(&landing).await.expect("granted");
    for nth in 0..n {
        let span = spans[nth * stride % n].clone();
        sender.send(span, Arc::clone(&from), LayerFence::open()).await.expect("room");
    }
    sender.finish(handoff(&landing)).await.expect("delivered");
    pair.check(&arrival.settle().await.expect("arrived"), n_tokens, 1);
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

pub async fn last_block_may_be_partial(pair: Arc<Pair>) {
    for n_tokens in [1, 2, 3, 5 * BLOCK_TOKENS + 1, 5 * BLOCK_TOKENS + 3] {
        pair.transfer(n_tokens, 9).await;
    }
}

pub async fn held_prefix_is_not_sent(pair: Arc<Pair>) {
    let n_tokens = 6 * BLOCK_TOKENS + 2;
    let from = pair.prefill.computed(n_tokens, 3);
    let room = pair.decode.room(n_tokens);
    pair.decode.compute(&room, 0..4, 3);
    let request = pair.request(room, n_tokens, 4 * BLOCK_TOKENS);
    let (landing, mut arrival) = pair.decode.connector.land(request).expect("a proper request");
    assert_eq!(landing.wanted_blocks(), 4..7);
    let ArrivalStatus::Waiting { received: 0, total } = arrival.poll() else { panic!("nothing was sent") };
    assert_eq!(total, landing.wanted_pages());
    pair.deliver(&landing, &from).await.expect("delivered");
    let kv = arrival.settle().await.expect("arrived");
    pair.check(&kv, n_tokens, 3);
    assert_eq!(kv.bytes, 3 * block_bytes(&landing.layout), "held blocks did not travel");
}

fn block_bytes(layout: &KvLayout) -> u64 {
    layout.group_indices().map(|group| layout.block_bytes(group) as u64).sum()
}

pub async fn nothing_to_send_is_a_transfer(pair: Arc<Pair>) {
    let n_tokens = 2 * BLOCK_TOKENS;
    let room = pair.decode.room(n_tokens);
    pair.decode.compute(&room, 0..2, 4);
    let request = pair.request(room, n_tokens, n_tokens);
    let (landing, arrival) = pair.decode.connector.land(request).expect("a proper request");
    let sender = pair.open(&landing).await.expect("granted");
    sender.finish(handoff(&landing)).await.expect("delivered");
    let kv = arrival.settle().await.expect("arrived");
    pair.check(&kv, n_tokens, 4);
    assert_eq!(kv.bytes, 0);
}

/// The free blocks of both nodes have holes, in different places, so neighbours on one side are none on the
/// other.
pub async fn neighbours_need_not_be_neighbours_there(pair: Arc<Pair>) {
    let near = pair.prefill.perforate(2);
    let far = pair.decode.perforate(1);
    pair.transfer(9 * BLOCK_TOKENS, 5).await;
    drop((near, far));
}

pub async fn layers_leave_as_they_are_computed(pair: Arc<Pair>) {
    let n_tokens = 5 * BLOCK_TOKENS;
    let from = pair.prefill.computed(n_tokens, 6);
    let (landing, mut arrival) = pair.land(n_tokens);
    let (signal, fence) = FenceSignal::new();
    let mut sender = pair.open(&landing).await.expect("granted");
    for span in whole(&landing) {
        sender.send(span, Arc::clone(&from), fence.clone()).await.expect("room");
    }
    // Layers 0, 2 and 4 are the first group, so layer 0 can be sent although no other layer is computed.
    signal.layers_done(1);
    let first_layer = 5;
    arrival.progress(first_layer - 1).await;
    assert_eq!(received(arrival.poll()), first_layer, "only what is computed leaves");
    signal.layers_done(N_LAYERS);
    sender.finish(handoff(&landing)).await.expect("delivered");
    pair.check(&arrival.settle().await.expect("arrived"), n_tokens, 6);
}

fn received(status: ArrivalStatus) -> usize {
    match status {
        ArrivalStatus::Waiting { received, .. } => received,
        ended => panic!("ended early: {ended:?}"),
    }
}

pub async fn send_waits_for_room_and_not_for_the_fence(pair: Arc<Pair>) {
    let n_tokens = 64 * BLOCK_TOKENS;
    let from = pair.prefill.computed(n_tokens, 7);
    let (landing, arrival) = pair.land(n_tokens);
    let (signal, fence) = FenceSignal::new();
    let mut sender = pair.open(&landing).await.expect("granted");
    let mut rest = pages(&landing).into_iter();
    let mut n_taken = 0;
    // No layer is computed yet, so the queue fills up. The call that finds no room waits, and the test
    // repeats it.
    let refused = loop {
        let span = rest.next().expect("a queue is bounded, and smaller than this transfer");
        let mut send = Box::pin(sender.send(span.clone(), Arc::clone(&from), fence.clone()));
        match tokio::time::timeout(Duration::from_millis(20), &mut send).await {
            Ok(sent) => sent.expect("room"),
            Err(_) => break span,
        }
        n_taken += 1;
    };
    assert!(n_taken > 0, "send does not wait for the fence");
    signal.layers_done(N_LAYERS);
    for span in std::iter::once(refused).chain(rest) {
        sender.send(span, Arc::clone(&from), fence.clone()).await.expect("room");
    }
    sender.finish(handoff(&landing)).await.expect("delivered");
    pair.check(&arrival.settle().await.expect("arrived"), n_tokens, 7);
}

pub async fn lease_is_shared_until_the_wire_is_quiet(pair: Arc<Pair>) {
    let n_tokens = 3 * BLOCK_TOKENS;
    let from = pair.prefill.computed(n_tokens, 8);
    let (landing, arrival) = pair.land(n_tokens);
    let (signal, fence) = FenceSignal::new();
    let mut sender = pair.open(&landing).await.expect("granted");
    for span in whole(&landing) {
        sender.send(span, Arc::clone(&from), fence.clone()).await.expect("room");
    }
    drop(from);
    assert!(!pair.prefill.is_at_baseline(), "the wire still needs the blocks");
    signal.layers_done(N_LAYERS);
    sender.finish(handoff(&landing)).await.expect("delivered");
    pair.prefill.at_baseline().await;
    pair.check(&arrival.settle().await.expect("arrived"), n_tokens, 8);
}

pub async fn handoff_arrives_last_and_whole(pair: Arc<Pair>) {
    let n_tokens = 8 * BLOCK_TOKENS;
    let from = pair.prefill.computed(n_tokens, 9);
    let (landing, mut arrival) = pair.land(n_tokens);
    let mut sender = pair.open(&landing).await.expect("granted");
    for span in whole(&landing) {
        sender.send(span, Arc::clone(&from), LayerFence::open()).await.expect("room");
    }
    arrival.progress(landing.wanted_pages() - 1).await;
    assert!(matches!(arrival.poll(), ArrivalStatus::Waiting { .. }), "all pages, but no handoff");
    let finish = sender.finish(handoff(&landing));
    let (finished, arrived) = tokio::join!(finish, arrival.settle());
    finished.expect("delivered");
    assert_eq!(arrived.expect("arrived").handoff, handoff(&landing));
}

/// There are 64 transfers at once, and one side or the other cancels every third of them.
pub async fn interleaved_transfers_do_not_mix(pair: Arc<Pair>) {
    join_all((0..64).map(|nth| one_of_many(Arc::clone(&pair), nth))).await;
}

async fn one_of_many(pair: Arc<Pair>, nth: u64) {
    let n_tokens = 4 * BLOCK_TOKENS + nth as u32 % BLOCK_TOKENS;
    match nth % 6 {
        0 => arrival_is_dropped(&pair, n_tokens, nth).await,
        3 => sender_is_dropped(&pair, n_tokens, nth).await,
        _ => pair.transfer(n_tokens, nth).await,
    }
}

async fn arrival_is_dropped(pair: &Pair, n_tokens: u32, nth: u64) {
    let from = pair.prefill.computed(n_tokens, nth);
    let (landing, arrival) = pair.land(n_tokens);
    let mut deliver = Box::pin(pair.deliver(&landing, &from));
    // Each transfer is polled a few times, so that the drops occur at different stages.
    for _ in 0..nth % 7 {
        if let std::task::Poll::Ready(delivered) = poll!(&mut deliver) {
            return delivered.expect("it was faster than the drop");
        }
        tokio::task::yield_now().await;
    }
    drop(arrival);
    match deliver.await {
        Ok(()) | Err(TransferError::Cancelled | TransferError::UnknownLanding) => {}
        Err(error) => panic!("cancelled transfers end as such: {}", in_full(&error)),
    }
}

async fn sender_is_dropped(pair: &Pair, n_tokens: u32, nth: u64) {
    let from = pair.prefill.computed(n_tokens, nth);
    let (landing, arrival) = pair.land(n_tokens);
    let mut sender = pair.open(&landing).await.expect("granted");
    let spans = pages(&landing);
    for span in spans.iter().take(nth as usize % spans.len()) {
        sender.send(KvSpan::clone(span), Arc::clone(&from), LayerFence::open()).await.expect("room");
    }
    drop(sender);
    let error = arrival.settle().await.expect_err("it was given up");
    assert!(matches!(error, TransferError::Cancelled), "{error}");
}
