//! A sender takes a sequence's KV out of its caller's queue.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use kv_cache::{BlockLease, FenceSignal, LayerFence};
use tokio::sync::mpsc;
use types::{Landing, TransferId};

use super::node::{BLOCK_TOKENS, N_LAYERS, Pair, handoff, handoff_of, pages, whole};
use crate::chunk_queue::{Chunk, ChunkQueue};
use crate::error::TransferError;

const N_TOKENS: u32 = 3 * BLOCK_TOKENS;

/// Cuts a whole sequence into chunks, one for each page.
fn chunks(landing: &Landing, from: &Arc<BlockLease>, ready: &LayerFence) -> Vec<Chunk> {
    let kv = |span| Chunk::Kv { span, from: Arc::clone(from), ready: ready.clone() };
    pages(landing).into_iter().map(kv).collect()
}

pub async fn a_queue_arrives_equal(pair: Arc<Pair>) {
    for n_tokens in [1, BLOCK_TOKENS, 5 * BLOCK_TOKENS + 3] {
        let from = pair.prefill.computed(n_tokens, 21);
        let (landing, arrival) = pair.land(n_tokens);
        let mut queued = chunks(&landing, &from, &LayerFence::open());
        queued.push(Chunk::Handoff(handoff(&landing)));
        let sender = pair.open(&landing).await.expect("granted");
        sender.feed(ChunkQueue::of(queued)).await.expect("delivered");
        pair.check(&arrival.settle().await.expect("arrived"), n_tokens, 21);
    }
}

pub async fn a_queue_is_emptied_as_fences_open(pair: Arc<Pair>) {
    let n_tokens = 64 * BLOCK_TOKENS;
    let from = pair.prefill.computed(n_tokens, 22);
    let (landing, arrival) = pair.land(n_tokens);
    let (signal, fence) = FenceSignal::new();
    let n_taken = Arc::new(AtomicUsize::new(0));
    let (producer, received) = mpsc::channel(1);
    let count = Arc::clone(&n_taken);
    let queue = ChunkQueue::new(received, move || {
        count.fetch_add(1, Ordering::Relaxed);
    });
    let sender = pair.open(&landing).await.expect("granted");
    let mut fed = sender.feed(queue);
    let mut rest = chunks(&landing, &from, &fence).into_iter();
    let n_chunks = rest.len();
    // No layer is computed yet, so the sender stops taking chunks and the producer waits.
    loop {
        let room = producer.reserve();
        tokio::select! {
            _ = &mut fed => panic!("it ended before its handoff"),
            room = room => room.expect("the queue lives").send(rest.next().expect("a sender takes few ahead")),
            () = tokio::time::sleep(Duration::from_millis(20)) => break,
        }
    }
    let n_ahead = n_taken.load(Ordering::Relaxed);
    assert!(
        n_ahead < n_chunks / 4,
        "{n_ahead} of {n_chunks} chunks are taken before their layers are computed"
    );
    signal.layers_done(N_LAYERS);
    let produce = async {
        for chunk in rest {
            producer.send(chunk).await.expect("the queue lives");
        }
        producer.send(Chunk::Handoff(handoff(&landing))).await.expect("the queue lives");
    };
    let (delivered, ()) = tokio::join!(fed, produce);
    delivered.expect("delivered");
    assert_eq!(n_taken.load(Ordering::Relaxed), n_chunks + 1);
    pair.check(&arrival.settle().await.expect("arrived"), n_tokens, 22);
}

pub async fn a_queue_with_a_wrong_chunk_fails(pair: Arc<Pair>) {
    let from = pair.prefill.computed(N_TOKENS, 23);
    let (ready, short) = (LayerFence::open(), pair.prefill.computed(BLOCK_TOKENS, 23));
    type Spoil<'a> = &'a (dyn Fn(&Landing, &mut Vec<Chunk>) + Sync);
    let twice: Spoil<'_> =
        &|landing, queued| queued.extend(chunks(landing, &from, &ready).into_iter().take(1));
    let missing: Spoil<'_> = &|_, queued| drop(queued.pop());
    let short: Spoil<'_> = &|landing, queued| {
        let span = whole(landing).swap_remove(0);
        *queued = vec![Chunk::Kv { span, from: Arc::clone(&short), ready: ready.clone() }];
    };
    let other: Spoil<'_> = &|landing, queued| {
        queued.push(Chunk::Handoff(handoff_of(TransferId(landing.transfer.0 ^ 1), N_TOKENS)))
    };
    for spoil in [twice, missing, short, other] {
        let (landing, arrival) = pair.land(N_TOKENS);
        let mut queued = chunks(&landing, &from, &ready);
        spoil(&landing, &mut queued);
        queued.push(Chunk::Handoff(handoff(&landing)));
        let sender = pair.open(&landing).await.expect("granted");
        let error = sender.feed(ChunkQueue::of(queued)).await.expect_err("a wrong chunk");
        let is_named = matches!(error, TransferError::BadRequest(_) | TransferError::Incomplete { .. });
        assert!(is_named, "{error}");
        arrival.settle().await.expect_err("it was given up");
    }
}

pub async fn a_queue_that_ends_early_fails_both_sides(pair: Arc<Pair>) {
    let from = pair.prefill.computed(N_TOKENS, 24);
    let (landing, arrival) = pair.land(N_TOKENS);
    let queue = ChunkQueue::of(chunks(&landing, &from, &LayerFence::open()));
    let sender = pair.open(&landing).await.expect("granted");
    let error = sender.feed(queue).await.expect_err("no handoff");
    assert!(matches!(error, TransferError::Unfinished), "{error}");
    let error = arrival.settle().await.expect_err("it will never be complete");
    // Either error is right, because within one process the receiver gets the sender's own error.
    assert!(matches!(error, TransferError::Cancelled | TransferError::Unfinished), "{error}");
}
