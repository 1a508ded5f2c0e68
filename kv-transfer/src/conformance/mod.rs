//! The suite that every connector passes: what `CONTRACT.md` says of all wires.
//!
//! Each case starts with two fresh nodes, and ends with both pools whole and at their baseline. A connector's own
//! test calls [`conformance`] and then pins what only its wire promises.

pub mod abort;
pub mod delivery;
pub mod fault;
pub mod node;
pub mod refusal;

use std::sync::Arc;
use std::time::Duration;

use self::node::{Make, Pair};
use crate::connector::{ConnectorParts, KvConnector};

/// How long one case may take, with a margin for slow machines.
pub const CASE_WITHIN: Duration = Duration::from_secs(60);

macro_rules! cases {
    ($make:expr; $($module:ident::$case:ident),* $(,)?) => {
        $(run(concat!(stringify!($module), "::", stringify!($case)), $make, $module::$case).await;)*
    };
}

/// Runs every case on connectors that `make` builds.
///
/// # Panics
/// With the case's name, where the connector does not do what the contract says.
pub async fn conformance<F>(make: impl Fn(ConnectorParts) -> F + Send + Sync + 'static)
where
    F: Future<Output = Arc<dyn KvConnector>> + Send + 'static,
{
    let make: Make = Arc::new(move |parts| Box::pin(make(parts)));
    cases! { &make;
        delivery::bytes_arrive_equal,
        delivery::spans_arrive_in_any_order,
        delivery::last_block_may_be_partial,
        delivery::held_prefix_is_not_sent,
        delivery::nothing_to_send_is_a_transfer,
        delivery::neighbours_need_not_be_neighbours_there,
        delivery::layers_leave_as_they_are_computed,
        delivery::send_waits_for_room_and_not_for_the_fence,
        delivery::lease_is_shared_until_the_wire_is_quiet,
        delivery::handoff_arrives_last_and_whole,
        delivery::meeting_a_peer_is_advice,
        delivery::interleaved_transfers_do_not_mix,
        refusal::unknown_landing,
        refusal::wrong_grant,
        refusal::wrong_epoch,
        refusal::other_model,
        refusal::other_layout,
        refusal::other_lengths,
        refusal::landing_is_opened_once,
        refusal::expired_landing,
        refusal::not_a_landing,
        refusal::land_checks_its_request,
        refusal::finish_with_pages_missing,
        refusal::page_is_sent_once,
        refusal::span_outside_the_sequence,
        refusal::handoff_of_another_sequence,
        abort::sender_dropped_at_every_stage,
        abort::arrival_dropped_at_every_stage,
        abort::broken_fence_fails_both_sides,
        abort::deadline_fails_both_sides,
        abort::receiver_dies,
        abort::sender_dies,
        abort::cancelled_open_leaves_nothing,
        fault::flipped_bit_is_refetched,
        fault::flipped_bit_twice_is_a_failure,
        fault::wrong_digest_is_refetched,
        fault::duplicate_frames_are_harmless,
        fault::late_frames_are_harmless,
        fault::lost_connection_fails_both_and_heals,
        fault::stalled_wire_fails_in_time,
        fault::a_thousand_flipped_bits_are_caught,
    }
}

async fn run<F>(name: &'static str, make: &Make, case: impl Fn(Arc<Pair>) -> F)
where
    F: Future<Output = ()>,
{
    let all = async {
        let pair = Arc::new(Pair::new(make).await);
        case(Arc::clone(&pair)).await;
        pair.at_baseline().await;
    };
    tracing::info!(case = name, "conformance");
    tokio::time::timeout(CASE_WITHIN, all).await.unwrap_or_else(|_| panic!("{name} does not end"));
}
