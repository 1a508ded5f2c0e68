//! Either side may cancel a transfer, or die, at any stage. The other side gets an error, and nothing leaks.

use std::sync::Arc;
use std::time::Duration;

use futures::poll;
use kv_cache::{FenceSignal, LayerFence};
use types::Landing;

use super::node::{BLOCK_TOKENS, Node, Pair, handoff, here, layout, pages, whole};
use crate::arrival::Arrival;
use crate::connector::KvSender;
use crate::error::TransferError;

const N_TOKENS: u32 = 20 * BLOCK_TOKENS;

/// The stage at which a transfer is cancelled.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Stage {
    Opened,
    /// One page of a computed layer was sent.
    SomeSent,
    /// All pages wait for layers that are not computed.
    FenceClosed,
    AllSent,
    Finishing,
}

const STAGES: [Stage; 5] =
    [Stage::Opened, Stage::SomeSent, Stage::FenceClosed, Stage::AllSent, Stage::Finishing];

struct Transfer {
    landing: Landing,
    arrival: Arrival,
    sender: Box<dyn KvSender>,
    /// The fence's signal, kept so that a closed fence stays closed and does not break.
    _signal: FenceSignal,
}

async fn at(stage: Stage, pair: &Pair) -> Transfer {
    let from = pair.prefill.computed(N_TOKENS, 1);
    let (landing, arrival) = pair.land(N_TOKENS);
    let mut sender = pair.open(&landing).await.expect("granted");
    let (signal, closed) = FenceSignal::new();
    let (spans, fence) = match stage {
        Stage::Opened => (vec![], closed),
        Stage::SomeSent => (pages(&landing)[..1].to_vec(), LayerFence::open()),
        Stage::FenceClosed | Stage::Finishing => (whole(&landing), closed),
        Stage::AllSent => (whole(&landing), LayerFence::open()),
    };
    for span in spans {
        sender.send(span, Arc::clone(&from), fence.clone()).await.expect("room");
    }
    Transfer { landing, arrival, sender, _signal: signal }
}

pub async fn sender_dropped_at_every_stage(pair: Arc<Pair>) {
    for stage in STAGES {
        let Transfer { landing, arrival, sender, _signal } = at(stage, &pair).await;
        if stage == Stage::Finishing {
            let mut finish = sender.finish(handoff(&landing));
            assert!(poll!(&mut finish).is_pending(), "nothing is computed");
            drop(finish);
        } else {
            drop(sender);
        }
        let error = arrival.settle().await.expect_err("it was given up");
        assert!(matches!(error, TransferError::Cancelled), "{stage:?}: {error}");
        pair.at_baseline().await;
    }
}

pub async fn arrival_dropped_at_every_stage(pair: Arc<Pair>) {
    let (landing, arrival) = pair.land(N_TOKENS);
    drop(arrival);
    let error = pair.open(&landing).await.map(|_| ()).expect_err("it is gone");
    assert!(matches!(error, TransferError::UnknownLanding), "{error}");
    for stage in STAGES {
        let Transfer { landing, arrival, mut sender, _signal } = at(stage, &pair).await;
        drop(arrival);
        let error = if matches!(stage, Stage::Opened | Stage::SomeSent) {
            refused_send(&pair, &landing, &mut *sender).await
        } else {
            sender.finish(handoff(&landing)).await.expect_err("the receiver is gone")
        };
        assert!(matches!(error, TransferError::Cancelled), "{stage:?}: {error}");
        pair.decode.at_baseline().await;
    }
}

/// Calls `send` until the cancellation arrives, and returns its error. No layer is computed, so the queue fills up,
/// and the call that finds no room waits for it.
async fn refused_send(pair: &Pair, landing: &Landing, sender: &mut dyn KvSender) -> TransferError {
    let from = pair.prefill.computed(N_TOKENS, 1);
    let (_signal, fence) = FenceSignal::new();
    for span in pages(landing).into_iter().skip(1) {
        if let Err(error) = sender.send(span, Arc::clone(&from), fence.clone()).await {
            return error;
        }
    }
    panic!("a queue is bounded, and smaller than this transfer")
}

pub async fn broken_fence_fails_both_sides(pair: Arc<Pair>) {
    let from = pair.prefill.computed(N_TOKENS, 2);
    let (landing, arrival) = pair.land(N_TOKENS);
    let mut sender = pair.open(&landing).await.expect("granted");
    let (signal, fence) = FenceSignal::new();
    for span in whole(&landing) {
        sender.send(span, Arc::clone(&from), fence.clone()).await.expect("room");
    }
    signal.layers_done(2);
    drop(signal);
    let error = sender.finish(handoff(&landing)).await.expect_err("layer 2 was never computed");
    assert!(matches!(error, TransferError::FenceBroken), "{error}");
    let error = arrival.settle().await.expect_err("it will never be whole");
    assert!(matches!(error, TransferError::FenceBroken), "{error}");
}

pub async fn deadline_fails_both_sides(pair: Arc<Pair>) {
    // One transfer makes the connection before the test, because this can take as long as the deadline on
    // some wires.
    pair.transfer(BLOCK_TOKENS, 2).await;
    let from = pair.prefill.computed(N_TOKENS, 3);
    let (landing, arrival) = pair.land_for(N_TOKENS, here(Duration::from_millis(300)));
    let (_signal, fence) = FenceSignal::new();
    // On a loaded machine the deadline may pass before everything is sent, so an error is accepted here.
    let deliver = async {
        let mut sender = pair.open(&landing).await?;
        for span in whole(&landing) {
            sender.send(span, Arc::clone(&from), fence.clone()).await?;
        }
        sender.finish(handoff(&landing)).await
    };
    let error = deliver.await.expect_err("nothing was computed in time");
    assert!(matches!(error, TransferError::Expired), "{error}");
    // The arrival was not polled, but its blocks are back.
    pair.decode.at_baseline().await;
    assert!(matches!(arrival.settle().await, Err(TransferError::Expired)));
}

pub async fn receiver_dies(pair: Arc<Pair>) {
    let third = pair.third(Node::parts("mortal", layout())).await;
    let request = pair.request(third.room(N_TOKENS), N_TOKENS, 0);
    let (landing, arrival) = third.connector.land(request).expect("a proper request");
    let from = pair.prefill.computed(N_TOKENS, 4);
    let mut sender = pair.open(&landing).await.expect("granted");
    let span = pages(&landing).swap_remove(0);
    sender.send(span, Arc::clone(&from), LayerFence::open()).await.expect("room");
    let (pool, connector) = (third.pool.clone(), third.connector);
    drop(connector);
    let error = arrival.settle().await.expect_err("its connector is gone");
    assert!(matches!(error, TransferError::Closed), "{error}");
    // The test waits, because a GPU may be in the middle of a copy. If the CPU writes, the blocks are free at
    // once.
    let mut freed = pool.freed();
    while pool.counts().free != pool.counts().total {
        freed.changed().await.expect("the landing's lease comes back");
    }
    let rest = pages(&landing).into_iter().skip(1);
    for span in rest {
        if sender.send(span, Arc::clone(&from), LayerFence::open()).await.is_err() {
            break;
        }
    }
    let error = sender.finish(handoff(&landing)).await.expect_err("the receiver is gone");
    let expected = matches!(
        error,
        TransferError::ConnectionLost { .. } | TransferError::Closed | TransferError::Incomplete { .. }
    );
    assert!(expected, "{error}");
    pair.open(&landing).await.map(|_| ()).expect_err("the receiver is gone");
    pair.transfer(N_TOKENS, 5).await;
}

pub async fn sender_dies(pair: Arc<Pair>) {
    let third = pair.third(Node::parts("mortal prefill", layout())).await;
    let from = third.computed(N_TOKENS, 6);
    let (landing, arrival) = pair.land(N_TOKENS);
    let to = types::Destination::Landing(landing.clone());
    let mut sender = third.connector.open(&to).await.expect("granted");
    let span = pages(&landing).swap_remove(0);
    sender.send(span, from, LayerFence::open()).await.expect("room");
    arrival.progress(0).await;
    drop((sender, third));
    let error = arrival.settle().await.expect_err("its sender is gone");
    assert!(matches!(error, TransferError::Cancelled | TransferError::ConnectionLost { .. }), "{error}");
    pair.at_baseline().await;
    pair.transfer(N_TOKENS, 7).await;
}

/// The caller of `open` is dropped while it waits for the receiver's answer.
pub async fn cancelled_open_leaves_nothing(pair: Arc<Pair>) {
    for n_polls in 0..4 {
        let (landing, arrival) = pair.land(N_TOKENS);
        let mut open = Box::pin(pair.open(&landing));
        let mut opened = None;
        for _ in 0..n_polls {
            if let std::task::Poll::Ready(sender) = poll!(&mut open) {
                opened = Some(sender);
                break;
            }
            tokio::task::yield_now().await;
        }
        drop((open, opened, arrival));
        pair.at_baseline().await;
    }
}
