//! Transfers between nodes with several ranks, with equal or different numbers on the two sides.

use std::sync::Arc;

use kv_cache::FenceSignal;
use types::Destination;

use super::node::{BLOCK_TOKENS, N_LAYERS, Pair, handoff, whole};
use crate::arrival::ArrivalStatus;
use crate::error::TransferError;
use crate::lanes::Lanes;

/// A landing may name any number of ranks. If the ranks cannot share the heads, it is refused before a byte
/// moves.
pub async fn ranks_that_cannot_share_are_refused(pair: Arc<Pair>) {
    let (mut landing, mut arrival) = pair.land(BLOCK_TOKENS);
    landing.layout.shard.tp_size = 3;
    let to = Destination::Landing(landing);
    let error = pair.prefill.connector.open(&to).await.map(|_| ()).expect_err("4 heads, 3 ranks");
    assert!(matches!(error, TransferError::Layout(_)), "{error}");
    assert!(error.to_string().contains("4 KV heads do not spread over 3 ranks"), "{error}");
    assert!(matches!(arrival.poll(), ArrivalStatus::Waiting { received: 0, .. }));
}

/// Each layer is sent on all lanes before the next one is computed. The receiver's head counts the pages of other processes
/// when all of them have landed, so only its own are awaited here.
pub async fn each_layer_of_all_ranks_leaves_as_it_is_computed(pair: Arc<Pair>) {
    let n_tokens = 3 * BLOCK_TOKENS;
    let from = pair.prefill.computed(n_tokens, 6);
    let (landing, mut arrival) = pair.land(n_tokens);
    let lanes = Lanes::between(pair.prefill.parts.memory.n_ranks(), &landing.layout).expect("they can");
    let memory = &pair.decode.parts.memory;
    let lanes_here = lanes.to_ranks(&memory.ranks()).len();
    let has_first = landing.layout.group_indices().any(|group| {
        let layers = &landing.layout.group(group).layers;
        let first = layers.iter().position(|shape| shape.layer == 0);
        first.is_some_and(|pos| memory.has_layer(group, pos as u16))
    });
    let (signal, fence) = FenceSignal::new();
    let mut sender = pair.open(&landing).await.expect("granted");
    for span in whole(&landing) {
        sender.send(span, Arc::clone(&from), fence.clone()).await.expect("room");
    }
    signal.layers_done(1);
    if has_first {
        let first_layer = 3 * lanes_here;
        arrival.progress(first_layer - 1).await;
        let status = arrival.poll();
        let ArrivalStatus::Waiting { received, total } = status else { panic!("ended early: {status:?}") };
        assert_eq!((received, total), (first_layer, landing.wanted_pages() * lanes.len()));
    }
    signal.layers_done(N_LAYERS);
    sender.finish(handoff(&landing)).await.expect("delivered");
    pair.check(&arrival.settle().await.expect("arrived"), n_tokens, 6);
}
