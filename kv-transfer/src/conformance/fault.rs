//! A wire that corrupts, duplicates, delays or loses KV never delivers wrong KV, and never blocks a caller for ever.

use std::sync::Arc;
use std::time::Duration;

use super::node::{BLOCK_TOKENS, Node, Pair, here, layout};
use crate::connector_parts::ConnectorParts;
use crate::error::TransferError;
use crate::faults::{Fault, FaultKind};
use crate::landings::LandRequest;

const N_TOKENS: u32 = 20 * BLOCK_TOKENS;

/// Checks that a transfer arrives although a fault hits one of its frames.
async fn survives(pair: &Pair, fault: Fault) {
    let (faults, before) = (&pair.prefill.parts.faults, pair.prefill.parts.faults.n_hit());
    faults.inject(fault.clone());
    pair.transfer(N_TOKENS, 1).await;
    assert!(faults.n_hit() > before, "{fault:?} was not played");
}

pub async fn flipped_bit_is_refetched(pair: Arc<Pair>) {
    for after_bytes in [0, 1_000, 20_000] {
        survives(&pair, Fault::once(FaultKind::FlipBit(4_321)).after(after_bytes)).await;
    }
}

/// The fault hits the first page every time that it is sent.
pub async fn flipped_bit_twice_is_a_failure(pair: Arc<Pair>) {
    pair.prefill.parts.faults.inject(Fault::once(FaultKind::FlipBit(0)).times(u32::MAX));
    let from = pair.prefill.computed(BLOCK_TOKENS, 2);
    let (landing, arrival) = pair.land(BLOCK_TOKENS);
    let error = pair.deliver(&landing, &from).await.expect_err("it was spoilt twice");
    assert!(matches!(error, TransferError::Corrupted { .. }), "{error}");
    let error = arrival.settle().await.expect_err("it is never delivered");
    assert!(matches!(error, TransferError::Corrupted { .. }), "{error}");
}

pub async fn wrong_digest_is_refetched(pair: Arc<Pair>) {
    survives(&pair, Fault::once(FaultKind::WrongDigest).after(2_000)).await;
}

pub async fn duplicate_frames_are_harmless(pair: Arc<Pair>) {
    survives(&pair, Fault::once(FaultKind::Duplicate).times(u32::MAX)).await;
}

pub async fn late_frames_are_harmless(pair: Arc<Pair>) {
    survives(&pair, Fault::once(FaultKind::Delay(Duration::from_millis(20))).times(u32::MAX)).await;
}

pub async fn lost_connection_fails_both_and_heals(pair: Arc<Pair>) {
    for after_bytes in [0, 3_000, 20_000] {
        pair.prefill.parts.faults.inject(Fault::once(FaultKind::Lose).after(after_bytes));
        let from = pair.prefill.computed(N_TOKENS, 3);
        let (landing, arrival) = pair.land(N_TOKENS);
        let error = pair.deliver(&landing, &from).await.expect_err("the connection is lost");
        assert!(matches!(error, TransferError::ConnectionLost { .. }), "{error}");
        let error = arrival.settle().await.expect_err("the connection is lost");
        let lost = matches!(error, TransferError::ConnectionLost { .. } | TransferError::Peer(_));
        assert!(lost, "{error}");
        drop(from);
        pair.at_baseline().await;
        pair.transfer(N_TOKENS, 4).await;
    }
}

/// No frame reaches either side any more. Both sides get a typed error by the landing's deadline, or after
/// the stall time.
pub async fn stalled_wire_fails_in_time(pair: Arc<Pair>) {
    let parts = Node::parts("stalling", layout());
    let (faults, world) = (parts.faults.clone(), parts.world.clone());
    let third = pair.third(with_stall(parts, 200)).await;
    faults.inject(Fault::once(FaultKind::Stall).after(2_000).times(u32::MAX));
    let from = third.computed(N_TOKENS, 5);
    let request = pair.request(pair.decode.room(N_TOKENS), N_TOKENS, 0);
    let deadline = world.deadline_in(Duration::from_millis(500));
    let (landing, arrival) = pair.decode.connector.land(LandRequest { deadline, ..request }).expect("proper");
    let before = world.now();
    let deliver = async {
        let to = types::Destination::Landing(landing.clone());
        let mut sender = third.connector.open(&to).await?;
        for span in super::node::whole(&landing) {
            sender.send(span, Arc::clone(&from), kv_cache::LayerFence::open()).await?;
        }
        sender.finish(super::node::handoff(&landing)).await
    };
    let (delivered, arrived) = tokio::join!(deliver, arrival.settle());
    delivered.expect_err("nothing went through");
    arrived.expect_err("nothing came");
    assert!(before.elapsed() < here(Duration::from_secs(5)), "{:?}", before.elapsed());
}

fn with_stall(parts: ConnectorParts, stall_ms: u64) -> ConnectorParts {
    let settings = crate::TransferSettings { stall_ms, ..parts.settings };
    ConnectorParts { settings, ..parts }
}

/// The flipped bit depends on the transfer, and may be in any of its frames.
pub async fn a_thousand_flipped_bits_are_caught(pair: Arc<Pair>) {
    const N_TRANSFERS: u64 = 1_000;
    let n_tokens = 4 * BLOCK_TOKENS;
    for nth in 0..N_TRANSFERS {
        let flip = FaultKind::FlipBit(nth.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 8);
        pair.prefill.parts.faults.inject(Fault::once(flip).after(nth * 37 % 5_000));
        pair.transfer(n_tokens, nth).await;
        assert_eq!(pair.prefill.parts.faults.n_hit(), nth + 1, "transfer {nth} was not hit");
    }
}
