//! The suite that every connector passes: the promises of `CONTRACT.md` for all wires.
//!
//! Each case starts with two fresh nodes, and ends with both pools complete and at their baseline. A connector's own
//! test calls [`conformance`] and then checks the promises of its wire alone.

pub mod abort;
pub mod delivery;
pub mod fault;
pub mod feed;
pub mod node;
pub mod processes;
pub mod ranks;
pub mod refusal;

use std::num::NonZero;
use std::sync::Arc;
use std::time::Duration;

use self::node::{Make, Pair, StagesAndRanks, layout, spread_layout};
use self::processes::{FollowerPath, ProcessParts, Side};
use crate::connector::KvConnector;
use crate::connector_parts::ConnectorParts;

/// The deadline of one case, with a margin for slow machines.
pub const CASE_WITHIN: Duration = Duration::from_secs(60);

/// The cases that are left out of the whole suite: none.
const WHOLE_SUITE: &[(&str, &str)] = &[];

macro_rules! cases {
    ($pair:expr, $without:expr; $($module:ident::$case:ident),* $(,)?) => {
        let names = [$(concat!(stringify!($module), "::", stringify!($case))),*];
        for (without, _) in $without {
            assert!(names.contains(without), "the suite has no case {without}");
        }
        $({
            let name = concat!(stringify!($module), "::", stringify!($case));
            if !$without.iter().any(|(without, _)| *without == name) {
                run(name, $pair, $module::$case).await;
            }
        })*
    };
}

/// Runs every case on connectors that `make` builds.
///
/// # Panics
/// Panics with the case's name if the connector breaks the contract.
pub async fn conformance<F>(make: impl Fn(ConnectorParts) -> F + Send + Sync + 'static)
where
    F: Future<Output = Arc<dyn KvConnector>> + Send + 'static,
{
    conformance_without(WHOLE_SUITE, make).await;
}

/// Like [`conformance`], but leaves out some cases, each with the reason why it does not apply.
///
/// # Panics
/// Like [`conformance`], and if there is no such case.
pub async fn conformance_without<F>(
    without: &[(&str, &str)],
    make: impl Fn(ConnectorParts) -> F + Send + Sync + 'static,
) where
    F: Future<Output = Arc<dyn KvConnector>> + Send + 'static,
{
    let make: Make = Arc::new(move |parts| Box::pin(make(parts)));
    whole_suite(without, || Pair::new(&make)).await;
}

async fn whole_suite<P: Future<Output = Pair>>(without: &[(&str, &str)], pair: impl Fn() -> P) {
    cases! { &pair, without;
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
        delivery::interleaved_transfers_do_not_mix,
        feed::a_queue_arrives_equal,
        feed::a_queue_is_emptied_as_fences_open,
        feed::a_queue_with_a_wrong_chunk_fails,
        feed::a_queue_that_ends_early_fails_both_sides,
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

/// The ranks of the prefill node and of the decode node. There are four heads: with eight ranks, two ranks
/// hold each head.
pub const SIZES: &[Sides] = &[
    of_one_stage(1, 2),
    of_one_stage(2, 1),
    of_one_stage(2, 2),
    of_one_stage(1, 4),
    of_one_stage(4, 1),
    of_one_stage(4, 2),
    of_one_stage(2, 4),
    of_one_stage(8, 2),
    of_one_stage(2, 8),
];

/// Runs the cases that depend on ranks, for each pair of numbers in [`SIZES`].
///
/// # Panics
/// Like [`conformance`].
pub async fn conformance_of_ranks<F>(make: impl Fn(ConnectorParts) -> F + Send + Sync + 'static)
where
    F: Future<Output = Arc<dyn KvConnector>> + Send + 'static,
{
    conformance_between(SIZES, make).await;
}

/// Returns nodes of one stage with these numbers of ranks.
pub const fn of_one_stage(prefill_tp: u16, decode_tp: u16) -> Sides {
    (StagesAndRanks::new(1, prefill_tp), StagesAndRanks::new(1, decode_tp))
}

/// The stages and ranks of the prefill node and of the decode node.
pub type Sides = (StagesAndRanks, StagesAndRanks);

/// Nodes with several stages. The layers are [`node::layout`]'s, so the layers of a stage belong to several groups, and
/// with different numbers of stages the layers are cut at different places.
pub const STAGES: &[Sides] = &[
    (StagesAndRanks::new(2, 1), StagesAndRanks::new(1, 1)),
    (StagesAndRanks::new(1, 1), StagesAndRanks::new(2, 1)),
    (StagesAndRanks::new(2, 1), StagesAndRanks::new(2, 1)),
    (StagesAndRanks::new(2, 2), StagesAndRanks::new(1, 4)),
    (StagesAndRanks::new(3, 1), StagesAndRanks::new(2, 1)),
];

/// Runs the cases that depend on pipeline stages, for each pair of nodes in [`STAGES`].
///
/// # Panics
/// Like [`conformance`].
pub async fn conformance_of_stages<F>(make: impl Fn(ConnectorParts) -> F + Send + Sync + 'static)
where
    F: Future<Output = Arc<dyn KvConnector>> + Send + 'static,
{
    conformance_between(STAGES, make).await;
}

/// Like [`conformance_of_ranks`], but only between these nodes.
///
/// # Panics
/// Like [`conformance`].
pub async fn conformance_between<F>(
    sides: &[Sides],
    make: impl Fn(ConnectorParts) -> F + Send + Sync + 'static,
) where
    F: Future<Output = Arc<dyn KvConnector>> + Send + 'static,
{
    let make: Make = Arc::new(move |parts| Box::pin(make(parts)));
    for (prefill, decode) in sides {
        tracing::info!(?prefill, ?decode, "conformance suite starts with these stages and ranks");
        suite_of_ranks(|| Pair::between(&make, *prefill, *decode)).await;
    }
}

const TWO: NonZero<u16> = NonZero::new(2).expect("two is not zero");
const THREE: NonZero<u16> = NonZero::new(3).expect("three is not zero");

/// Nodes with a process for each stage; the other node of the pair has one process.
pub const PROCESSES: &[Sides] = &[
    (StagesAndRanks::new(2, 1), StagesAndRanks::new(2, 1)),
    (StagesAndRanks::new(3, 1), StagesAndRanks::new(1, 1)),
    (StagesAndRanks::new(7, 1), StagesAndRanks::new(1, 1)),
    (StagesAndRanks::new(2, 2), StagesAndRanks::new(1, 1)),
    (StagesAndRanks::new(3, 1), StagesAndRanks::new(1, 2)),
    (StagesAndRanks::new(2, 2), StagesAndRanks::new(2, 4)),
];

/// Nodes whose ranks are divided over processes: the number of processes, and the sides as in [`PROCESSES`].
pub const PROCESSES_OF_RANKS: &[(u16, Sides)] = &[
    (2, (StagesAndRanks::new(1, 2), StagesAndRanks::new(1, 1))),
    (2, (StagesAndRanks::new(1, 4), StagesAndRanks::new(1, 2))),
    (4, (StagesAndRanks::new(2, 2), StagesAndRanks::new(1, 4))),
    (8, (StagesAndRanks::new(2, 4), StagesAndRanks::new(3, 1))),
];

/// Runs every case with a node of two processes on one side, then on both, and those that depend on stages and ranks for
/// each pair of nodes in [`PROCESSES`] and [`PROCESSES_OF_RANKS`], in both directions.
///
/// # Panics
/// Like [`conformance`].
pub async fn conformance_of_processes<F>(
    follower_path: FollowerPath,
    make: impl Fn(ConnectorParts) -> F + Send + Sync + 'static,
) where
    F: Future<Output = Arc<dyn KvConnector>> + Send + 'static,
{
    let make: Make = Arc::new(move |parts| Box::pin(make(parts)));
    let start = async |side, n_processes, layout, pair| {
        let parts = ProcessParts { follower_path, ..ProcessParts::of(side, n_processes, layout) };
        parts.start(&make, pair).await
    };
    whole_suite(WHOLE_SUITE, || async { start(Side::Prefill, TWO, layout(), Pair::new(&make).await).await })
        .await;
    whole_suite(WHOLE_SUITE, || async { start(Side::Decode, TWO, layout(), Pair::new(&make).await).await })
        .await;
    let both = || async {
        let pair = start(Side::Prefill, TWO, layout(), Pair::new(&make).await).await;
        start(Side::Decode, THREE, layout(), pair).await
    };
    whole_suite(WHOLE_SUITE, both).await;
    for (several, other) in PROCESSES {
        tracing::info!(?several, ?other, "conformance suite starts with these processes and ranks");
        let one_stage = StagesAndRanks::new(1, several.tp_size);
        let layout = || spread_layout(several.tp_size);
        let to_one = || async {
            let pair = Pair::between(&make, one_stage, *other).await;
            start(Side::Prefill, several.n_stages, layout(), pair).await
        };
        suite_of_ranks(to_one).await;
        let from_one = || async {
            let pair = Pair::between(&make, *other, one_stage).await;
            start(Side::Decode, several.n_stages, layout(), pair).await
        };
        suite_of_ranks(from_one).await;
    }
    for (n_processes, (several, other)) in PROCESSES_OF_RANKS {
        tracing::info!(
            n_processes,
            ?several,
            ?other,
            "conformance suite starts with ranks in these processes"
        );
        let one_stage = StagesAndRanks::new(1, several.tp_size);
        let start = async |side, pair| {
            let layout = spread_layout(several.tp_size);
            let parts = ProcessParts::with_ranks(side, *n_processes, several.n_stages, &layout);
            ProcessParts { follower_path, ..parts }.start(&make, pair).await
        };
        let to_one = || async { start(Side::Prefill, Pair::between(&make, one_stage, *other).await).await };
        suite_of_ranks(to_one).await;
        let from_one = || async { start(Side::Decode, Pair::between(&make, *other, one_stage).await).await };
        suite_of_ranks(from_one).await;
        let both = || async {
            let pair = Pair::between(&make, one_stage, one_stage).await;
            start(Side::Decode, start(Side::Prefill, pair).await).await
        };
        suite_of_ranks(both).await;
    }
}

async fn suite_of_ranks<P: Future<Output = Pair>>(pair: impl Fn() -> P) {
    cases! { &pair, WHOLE_SUITE;
        delivery::bytes_arrive_equal,
        delivery::spans_arrive_in_any_order,
        delivery::last_block_may_be_partial,
        delivery::held_prefix_is_not_sent,
        delivery::nothing_to_send_is_a_transfer,
        delivery::neighbours_need_not_be_neighbours_there,
        delivery::interleaved_transfers_do_not_mix,
        ranks::ranks_that_cannot_share_are_refused,
        ranks::each_layer_of_all_ranks_leaves_as_it_is_computed,
        refusal::other_lengths,
        refusal::landing_is_opened_once,
        abort::sender_dropped_at_every_stage,
        abort::arrival_dropped_at_every_stage,
        abort::cancelled_open_leaves_nothing,
        fault::flipped_bit_is_refetched,
        fault::flipped_bit_twice_is_a_failure,
        fault::wrong_digest_is_refetched,
        fault::duplicate_frames_are_harmless,
        fault::lost_connection_fails_both_and_heals,
    }
}

async fn run<F, P>(name: &'static str, pair: &impl Fn() -> P, case: impl Fn(Arc<Pair>) -> F)
where
    F: Future<Output = ()>,
    P: Future<Output = Pair>,
{
    let all = async {
        let pair = Arc::new(pair().await);
        case(Arc::clone(&pair)).await;
        pair.at_baseline().await;
        Arc::into_inner(pair).expect("a case keeps nothing of its nodes").ends().await;
    };
    tracing::info!(case = name, "conformance case starts");
    tokio::time::timeout(node::here(CASE_WITHIN), all)
        .await
        .unwrap_or_else(|_| panic!("{name} does not end"));
}
