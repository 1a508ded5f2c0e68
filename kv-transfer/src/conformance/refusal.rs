//! Refusals of wrong landings. They come before any byte moves.

use std::sync::Arc;
use std::time::Duration;

use kv_cache::LayerFence;
use types::{
    Destination, Epoch, Fingerprint, Grant, GroupIdx, KvDtype, KvLayout, KvSpan, Landing, TransferId,
};

use super::node::{BLOCK_TOKENS, Node, Pair, handoff, handoff_of, layout, pages, whole};
use crate::arrival::{Arrival, ArrivalStatus};
use crate::connector_parts::ConnectorParts;
use crate::error::TransferError;
use crate::landings::LandRequest;

const N_TOKENS: u32 = 3 * BLOCK_TOKENS;

/// Checks that opening a landing with a changed address is refused, and does not harm the landing.
async fn refuses(
    pair: &Pair,
    change: impl FnOnce(&mut Landing),
    expected: impl FnOnce(&TransferError) -> bool,
) {
    let (landing, mut arrival) = pair.land(N_TOKENS);
    let mut changed = landing.clone();
    change(&mut changed);
    let error = pair.open(&changed).await.map(|_| ()).expect_err("it must be refused");
    assert!(expected(&error), "{error}");
    assert_untouched(&mut arrival);
    let from = pair.prefill.computed(N_TOKENS, 1);
    pair.deliver(&landing, &from).await.expect("the right address is let in");
    pair.check(&arrival.settle().await.expect("arrived"), N_TOKENS, 1);
}

fn assert_untouched(arrival: &mut Arrival) {
    assert!(matches!(arrival.poll(), ArrivalStatus::Waiting { received: 0, .. }), "{arrival:?}");
}

pub async fn unknown_landing(pair: Arc<Pair>) {
    let unknown = |landing: &mut Landing| landing.transfer = TransferId(landing.transfer.0 ^ 1);
    refuses(&pair, unknown, |error| matches!(error, TransferError::UnknownLanding)).await;
}

pub async fn wrong_grant(pair: Arc<Pair>) {
    let wrong = |landing: &mut Landing| {
        let mut bytes = landing.grant.to_bytes();
        bytes[15] ^= 0x80;
        landing.grant = Grant::from_bytes(bytes);
    };
    refuses(&pair, wrong, |error| matches!(error, TransferError::WrongGrant)).await;
}

pub async fn wrong_epoch(pair: Arc<Pair>) {
    let wrong = |landing: &mut Landing| landing.epoch = Epoch(landing.epoch.0 + 1);
    refuses(&pair, wrong, |error| matches!(error, TransferError::WrongEpoch)).await;
}

/// The sender reports the exact difference of the two models. The receiver also refuses if its sender did not
/// check.
pub async fn other_model(pair: Arc<Pair>) {
    let other = Fingerprint::new([("weights".to_owned(), "another".to_owned())]);
    let claimed = |landing: &mut Landing| landing.fingerprint = other.clone();
    refuses(&pair, claimed, |error| error.to_string().contains("weights: conformance here, another there"))
        .await;
    let third = ConnectorParts { fingerprint: other.clone(), ..Node::parts("other", layout()) };
    let third = pair.third(third).await;
    careless(&pair, &third, |landing| landing.fingerprint = other.clone()).await;
}

pub async fn other_layout(pair: Arc<Pair>) {
    let other = KvLayout { dtype: KvDtype::F16, ..layout() };
    let claimed = |landing: &mut Landing| landing.layout = other.clone();
    refuses(&pair, claimed, |error| error.to_string().contains("kv.dtype: f32 here, f16 there")).await;
    let third = pair.third(Node::parts("other", other.clone())).await;
    careless(&pair, &third, |landing| landing.layout = other.clone()).await;
}

/// Checks that the receiver refuses a landing that is changed so that the sender's own check passes.
async fn careless(pair: &Pair, sender: &Node, change: impl FnOnce(&mut Landing)) {
    let (mut landing, mut arrival) = pair.land(N_TOKENS);
    change(&mut landing);
    let error =
        sender.connector.open(&Destination::Landing(landing)).await.map(|_| ()).expect_err("it differs");
    assert!(matches!(error, TransferError::Mismatch(_)), "{error}");
    assert_untouched(&mut arrival);
}

pub async fn other_lengths(pair: Arc<Pair>) {
    let longer = |landing: &mut Landing| landing.n_tokens += 1;
    refuses(&pair, longer, |error| matches!(error, TransferError::Mismatch(_))).await;
    let held = |landing: &mut Landing| landing.held_tokens = BLOCK_TOKENS;
    refuses(&pair, held, |error| matches!(error, TransferError::Mismatch(_))).await;
}

pub async fn landing_is_opened_once(pair: Arc<Pair>) {
    let (landing, arrival) = pair.land(N_TOKENS);
    let first = pair.open(&landing).await.expect("granted");
    for _ in 0..2 {
        let error = pair.open(&landing).await.map(|_| ()).expect_err("the grant is used up");
        assert!(matches!(error, TransferError::AlreadyOpened), "{error}");
    }
    let mut first = first;
    let from = pair.prefill.computed(N_TOKENS, 2);
    for span in whole(&landing) {
        first.send(span, Arc::clone(&from), LayerFence::open()).await.expect("room");
    }
    first.finish(handoff(&landing)).await.expect("the first one is not disturbed");
    let error = pair.open(&landing).await.map(|_| ()).expect_err("it has arrived");
    assert!(matches!(error, TransferError::AlreadyOpened), "{error}");
    pair.check(&arrival.settle().await.expect("arrived"), N_TOKENS, 2);
    let error = pair.open(&landing).await.map(|_| ()).expect_err("it is forgotten");
    assert!(matches!(error, TransferError::UnknownLanding), "{error}");
}

pub async fn expired_landing(pair: Arc<Pair>) {
    let (landing, arrival) = pair.land_for(N_TOKENS, Duration::from_millis(1));
    arrival.ended().await;
    let error = pair.open(&landing).await.map(|_| ()).expect_err("it has expired");
    assert!(matches!(error, TransferError::Expired), "{error}");
    assert!(matches!(arrival.settle().await, Err(TransferError::Expired)));
}

pub async fn not_a_landing(pair: Arc<Pair>) {
    let held = Destination::Held(TransferId(1));
    let error = pair.prefill.connector.open(&held).await.map(|_| ()).expect_err("nothing to send to");
    assert!(matches!(error, TransferError::WrongDestination(_)), "{error}");
    let other_wire = |landing: &mut Landing| landing.wire.scheme = types::Scheme::new("pigeon");
    refuses(&pair, other_wire, |error| matches!(error, TransferError::WrongDestination(_))).await;
}

pub async fn land_checks_its_request(pair: Arc<Pair>) {
    let land = |change: &dyn Fn(&mut LandRequest)| {
        let mut request = pair.request(pair.decode.room(N_TOKENS), N_TOKENS, 0);
        change(&mut request);
        pair.decode.connector.land(request).map(|_| ())
    };
    land(&|_| {}).expect("a proper request");
    land(&|request| request.held_tokens = 1).expect_err("held tokens are whole blocks");
    land(&|request| request.held_tokens = N_TOKENS + BLOCK_TOKENS).expect_err("more than all is held");
    land(&|request| request.n_tokens += 1).expect_err("the lease is too short");
    let (landing, _arrival) = pair.land(N_TOKENS);
    land(&|request| request.transfer = landing.transfer).expect_err("one landing per transfer");
}

pub async fn finish_with_pages_missing(pair: Arc<Pair>) {
    let from = pair.prefill.computed(N_TOKENS, 3);
    let (landing, arrival) = pair.land(N_TOKENS);
    let mut sender = pair.open(&landing).await.expect("granted");
    for span in pages(&landing).into_iter().skip(1) {
        sender.send(span, Arc::clone(&from), LayerFence::open()).await.expect("room");
    }
    let error = sender.finish(handoff(&landing)).await.expect_err("one page is missing");
    assert!(matches!(error, TransferError::Incomplete { sent: 20, wanted: 21 }), "{error}");
    arrival.settle().await.expect_err("it was given up");
}

pub async fn page_is_sent_once(pair: Arc<Pair>) {
    let from = pair.prefill.computed(N_TOKENS, 4);
    let (landing, arrival) = pair.land(N_TOKENS);
    let mut sender = pair.open(&landing).await.expect("granted");
    let span = whole(&landing).swap_remove(0);
    sender.send(span.clone(), Arc::clone(&from), LayerFence::open()).await.expect("room");
    let error = sender.send(span, Arc::clone(&from), LayerFence::open()).await.expect_err("once is enough");
    assert!(matches!(error, TransferError::BadRequest(_)), "{error}");
    drop((sender, arrival));
}

pub async fn span_outside_the_sequence(pair: Arc<Pair>) {
    let from = pair.prefill.computed(N_TOKENS, 5);
    let (landing, arrival) = pair.land(N_TOKENS);
    let mut sender = pair.open(&landing).await.expect("granted");
    let inside = KvSpan { group: GroupIdx(0), blocks: 0..3, layers: 0..3 };
    for outside in [
        KvSpan { blocks: 0..4, ..inside.clone() },
        KvSpan { layers: 0..4, ..inside.clone() },
        KvSpan { group: GroupIdx(3), ..inside.clone() },
    ] {
        let error = sender.send(outside, Arc::clone(&from), LayerFence::open()).await.expect_err("outside");
        assert!(matches!(error, TransferError::BadRequest(_)), "{error}");
    }
    let short = pair.prefill.computed(BLOCK_TOKENS, 5);
    let error = sender.send(inside, short, LayerFence::open()).await.expect_err("a lease of one block");
    assert!(matches!(error, TransferError::BadRequest(_)), "{error}");
    drop((sender, arrival));
}

pub async fn handoff_of_another_sequence(pair: Arc<Pair>) {
    for change in [1, 0] {
        let from = pair.prefill.computed(N_TOKENS, 6);
        let (landing, arrival) = pair.land(N_TOKENS);
        let mut sender = pair.open(&landing).await.expect("granted");
        for span in whole(&landing) {
            sender.send(span, Arc::clone(&from), LayerFence::open()).await.expect("room");
        }
        let other = TransferId(landing.transfer.0 ^ change);
        let handoff = handoff_of(other, landing.n_tokens - (1 - change as u32));
        let error = sender.finish(handoff).await.expect_err("it is another one's");
        assert!(matches!(error, TransferError::BadRequest(_)), "{error}");
        arrival.settle().await.expect_err("it was given up");
    }
}
