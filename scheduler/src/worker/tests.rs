//! Tests that step the worker by hand: no runtime, no thread, no sleep.

mod line;
mod mixes;
mod stages;
mod windows;

use std::time::Duration;

use engine::RowError;
use engine::backend::flaky::{Failures, Flaky};
use types::prompt::Priority;
use types::{FinishReason, RefusalKind, Sampling, StopRules, TokenId};

use crate::settings::SchedulerSettings;
use crate::sink::SequenceEnd;
use crate::submission::{NewSequence, Source};
use crate::testing::{
    BLOCK_TOKENS, Recorder, Recording, Rig, alone, arrived, deadline_in, mock, prompt, roomy,
};

impl super::Worker {
    /// Returns the sequences in each launched step, the oldest step first.
    fn ids_in_flight(&self) -> Vec<Vec<u64>> {
        self.flights.iter().map(|flight| flight.rows.iter().map(|row| row.id.0).collect()).collect()
    }
}

/// Returns a prompt that does not end by itself before `max_tokens`.
fn endless(id: &str, n_tokens: usize, max_tokens: u32) -> types::Prompt {
    let mut prompt = prompt(id, n_tokens, max_tokens);
    prompt.stop.ignore_eos = true;
    prompt
}

#[test]
fn a_prompt_becomes_numbered_steps_and_an_end() {
    let mut rig = Rig::new(32, roomy());
    let (_, recorded) = rig.stream(endless("a", 10, 5));
    rig.settle();
    let record = recorded.get();
    assert_eq!(record.steps.iter().map(|step| step.index).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
    let finishes: Vec<_> = record.steps.iter().map(|step| step.finish).collect();
    assert_eq!(finishes, [None, None, None, None, Some(FinishReason::Length)]);
    let usage = types::Usage { prompt_tokens: 10, cached_tokens: 0 };
    assert_eq!(record.end, Some(SequenceEnd::Finished { finish: Some(FinishReason::Length), usage }));
    drop(record);
    rig.assert_at_baseline();
}

#[test]
fn steps_overlap_and_what_is_computed_too_much_is_discarded() {
    let mut rig = Rig::new(64, roomy());
    let (_, recorded) = rig.stream(prompt("a", 10, 200));
    rig.settle();
    let n_steps = recorded.get().steps.len() as u64;
    assert_eq!(recorded.get().steps.last().expect("steps").finish, Some(FinishReason::Stop), "an early end");
    assert_eq!(rig.metric("discarded_rows_total"), 1, "the row launched before the end was known");
    assert_eq!(rig.metric("steps_total"), n_steps + 1);
    rig.assert_at_baseline();
}

#[test]
fn an_end_that_is_known_before_costs_no_row() {
    let mut rig = Rig::new(64, roomy());
    rig.stream(endless("a", 10, 7));
    rig.outbox(endless("b", 10, 7));
    rig.settle();
    assert_eq!(rig.metric("discarded_rows_total"), 0);
}

#[test]
fn overlap_changes_no_token() {
    for id in ["a", "b", "c"] {
        let prompt = prompt(id, 13, 60);
        let mut rig = Rig::new(64, roomy());
        let (_, recorded) = rig.stream(prompt.clone());
        rig.settle();
        assert_eq!(recorded.tokens(), alone(&prompt));
    }
}

#[test]
fn an_outbox_gets_every_block_once_and_one_step() {
    let settings = SchedulerSettings { step_tokens_max: 12, sequences_max: 8, ..roomy() };
    let mut rig = Rig::new(32, settings);
    let (_, recorded) = rig.outbox(prompt("a", 30, 50));
    rig.settle();
    let record = recorded.get();
    let blocks: Vec<_> = record.spans.iter().map(|(span, _)| span.blocks.clone()).collect();
    assert_eq!(blocks, [0..3, 3..6, 6..8], "12 tokens, 12 tokens, 6 tokens with a partial block");
    assert!(record.spans.iter().all(|(span, fence)| span.layers == (0..2) && fence.is_open(2)));
    assert_eq!(record.steps.len(), 1);
    assert!(matches!(record.end, Some(SequenceEnd::Finished { finish: None, .. })), "it goes on elsewhere");
    assert_eq!(rig.pool.counts().leased, 8, "the sink holds on to them");
    drop(record);
    recorded.get().leases.clear();
    rig.assert_at_baseline();
}

#[test]
fn a_cached_prefix_is_adopted_and_sent_first() {
    let mut rig = Rig::new(32, roomy());
    rig.outbox(prompt("a", 17, 1)).1.get().leases.clear();
    rig.settle();
    for (n_tokens, cached_blocks) in [(20, 4), (17, 4), (16, 3), (5, 1), (4, 0)] {
        let (_, recorded) = rig.outbox(prompt("a", n_tokens, 1));
        rig.settle();
        let mut record = recorded.get();
        let cached = record.timings[0].usage.cached_tokens as usize;
        assert_eq!(cached, cached_blocks * BLOCK_TOKENS, "of {n_tokens}: the last token is always computed");
        if cached_blocks > 0 {
            assert_eq!(record.spans[0].0.blocks, 0..cached_blocks as u32);
        }
        record.leases.clear();
    }
}

/// All prompts arrive before the first step, and a step has at most 8 tokens.
#[test]
fn prompts_wait_for_a_common_prefix_that_is_at_least_half_of_them() {
    let settings = SchedulerSettings { step_tokens_max: 8, sequences_max: 4, ..roomy() };
    for (n_tokens, n_cached) in [(33, 32), (36, 32), (64, 32), (72, 0), (9, 8)] {
        let mut rig = Rig::new(128, settings);
        let (_, first) = rig.stream(prompt("a", 33, 1));
        let mut later = prompt("a", n_tokens, 1);
        later.tokens = later
            .tokens
            .iter()
            .copied()
            .enumerate()
            .map(|(nth, token)| if nth < 33 { token } else { TokenId(64) })
            .collect();
        let (_, second) = rig.stream(later);
        let (_, other) = rig.stream(prompt("b", 20, 1));
        rig.settle();
        let cached = |recorded: &Recording| recorded.get().timings[0].usage.cached_tokens;
        assert_eq!([&first, &second, &other].map(cached), [0, n_cached, 0], "{n_tokens} tokens");
        rig.assert_at_baseline();
    }
}

/// A sequence whose earlier one ends without its blocks computes them itself.
#[test]
fn a_prompt_does_not_wait_for_one_that_is_cancelled() {
    let mut rig = Rig::new(64, SchedulerSettings { step_tokens_max: 8, sequences_max: 4, ..roomy() });
    let (first, _) = rig.stream(prompt("a", 33, 1));
    let (_, second) = rig.stream(prompt("a", 33, 1));
    rig.turn();
    rig.cancel(first);
    rig.settle();
    assert!(second.is_finished());
    rig.assert_at_baseline();
}

#[test]
fn what_was_generated_is_cached_too() {
    let mut rig = Rig::new(64, roomy());
    let (_, first) = rig.stream(endless("a", 8, 13));
    rig.settle();
    let mut longer = endless("a", 8, 1);
    longer.tokens = longer.tokens.iter().copied().chain(first.tokens()).collect();
    let (_, second) = rig.stream(longer);
    rig.settle();
    assert_eq!(
        second.get().timings[0].usage.cached_tokens,
        20,
        "8 + 13 tokens, all but the last of them computed"
    );
}

#[test]
fn tenants_do_not_share() {
    let mut rig = Rig::new(64, roomy());
    rig.stream(prompt("a", 17, 1));
    rig.settle();
    let mut foreign = prompt("a", 17, 1);
    foreign.tenant = types::TenantId::new("other");
    let (_, recorded) = rig.stream(foreign);
    rig.settle();
    assert_eq!(recorded.get().timings[0].usage.cached_tokens, 0);
}

#[test]
fn an_arrived_sequence_goes_on_where_the_other_node_stopped() {
    for n_tokens in [1, 3, 4, 5, 16] {
        let prompt = endless("a", n_tokens, 20);
        let mut rig = Rig::new(32, roomy());
        let source = arrived(&rig, &prompt).expect("room");
        let (sink, recorded) = Recorder::stream();
        let new = NewSequence {
            prompt: prompt.clone(),
            source,
            sink: Box::new(sink),
            steps_wanted: u32::MAX,
            constraint: None,
        };
        rig.submit(new).expect("it fits");
        rig.settle();
        assert_eq!(recorded.tokens(), alone(&prompt)[1..], "prompt of {n_tokens}");
        assert_eq!(recorded.get().steps[0].index, 1);
        assert_eq!(recorded.get().spans.len(), 0, "nothing to send");
        rig.assert_at_baseline();
    }
}

#[test]
fn wrong_kv_that_arrived_is_never_served() {
    let prompt = prompt("a", 10, 20);
    let mut rig = Rig::new(32, roomy());
    let source = arrived(&rig, &prompt).expect("room");
    let Source::Arrived { lease, .. } = &source else { panic!("it arrived") };
    let block = lease.table(types::GroupIdx(0))[1].0;
    rig.memory.write(types::GroupIdx(0), 1, block..block + 1).expect("no reader")[3] ^= 1;
    let (sink, recorded) = Recorder::stream();
    let (healthy, also) = (crate::testing::prompt("b", 10, 20), &mut rig);
    let (_, bystander) = also.stream(healthy.clone());
    also.submit(NewSequence {
        prompt,
        source,
        sink: Box::new(sink),
        steps_wanted: u32::MAX,
        constraint: None,
    })
    .expect("it fits");
    rig.settle();
    assert_eq!((recorded.refusal(), recorded.tokens().len()), (Some(RefusalKind::Failed), 0));
    assert_eq!(bystander.tokens(), alone(&healthy), "one row's failure is its own");
    rig.assert_at_baseline();
}

#[test]
fn a_first_token_that_was_the_last_ends_at_once() {
    let prompt = prompt("a", 10, 1);
    let mut rig = Rig::new(32, roomy());
    let source = arrived(&rig, &prompt).expect("room");
    let (sink, recorded) = Recorder::stream();
    rig.submit(NewSequence {
        prompt,
        source,
        sink: Box::new(sink),
        steps_wanted: u32::MAX,
        constraint: None,
    })
    .expect("it fits");
    assert!(recorded.is_finished());
    assert!(!rig.turn(), "nothing is computed");
    rig.assert_at_baseline();
}

#[test]
fn a_continued_prompt_counts_on() {
    let whole = endless("a", 10, 20);
    let tokens = alone(&whole);
    let mut rest = whole.clone();
    rest.tokens = whole.tokens.iter().copied().chain(tokens[..7].iter().copied()).collect();
    rest.n_generated = 7;
    let mut rig = Rig::new(32, roomy());
    let (_, recorded) = rig.stream(rest);
    rig.settle();
    assert_eq!(recorded.tokens(), tokens[7..]);
    assert_eq!(
        recorded.get().steps.iter().map(|step| step.index).collect::<Vec<_>>(),
        (7..20).collect::<Vec<_>>()
    );
    assert_eq!(recorded.get().timings[0].usage.prompt_tokens, 10);
}

#[test]
fn sampling_with_a_seed_is_the_same_when_continued() {
    let mut whole = endless("a", 10, 20);
    whole.sampling = Sampling { temperature: 0.8, seed: 42, ..Sampling::default() };
    let tokens = alone(&whole);
    let mut rest = whole.clone();
    rest.tokens = whole.tokens.iter().copied().chain(tokens[..5].iter().copied()).collect();
    rest.n_generated = 5;
    assert_eq!(alone(&rest), tokens[5..]);
}

#[test]
fn stop_rules() {
    let free = endless("a", 10, 20);
    let tokens = alone(&free);
    let stopped_by = |stop: StopRules| {
        let mut rig = Rig::new(32, roomy());
        let (_, recorded) = rig.stream(types::Prompt { stop, ..free.clone() });
        rig.settle();
        let record = recorded.get();
        (record.steps.len(), record.steps.last().and_then(|step| step.finish))
    };
    let base = free.stop.clone();
    let at = |nth: usize| StopRules { stop_tokens: vec![tokens[nth]], ..base.clone() };
    let first = tokens.iter().position(|token| *token == tokens[4]).expect("it is there");
    assert_eq!(stopped_by(base.clone()), (20, Some(FinishReason::Length)));
    assert_eq!(stopped_by(at(4)), (first + 1, Some(FinishReason::Stop)));
    let (n_steps, _) = stopped_by(StopRules { min_tokens: 18, ..at(4) });
    assert!(n_steps > 18, "no stop token before min_tokens");
    assert_eq!(stopped_by(StopRules { max_tokens: 1, ..base }), (1, Some(FinishReason::Length)));
}

#[test]
fn a_full_context_ends_a_sequence() {
    let mut rig = Rig::new(128, roomy());
    let (_, recorded) = rig.stream(endless("a", 250, 100));
    rig.settle();
    assert_eq!(recorded.tokens().len(), 6);
    assert_eq!(recorded.get().steps.last().expect("steps").finish, Some(FinishReason::Length));
}

#[test]
fn sequences_that_outgrow_the_pool_together_all_finish() {
    // Case F18: each sequence fits in the pool, but the sum of their growth does not.
    for steps_in_flight_max in [1, 2] {
        let settings = SchedulerSettings { growth_blocks: 0, steps_in_flight_max, ..roomy() };
        let mut rig = Rig::new(24, settings);
        let prompts: Vec<_> = (0..8).map(|nth| endless(&format!("p{nth}"), 5, 60)).collect();
        let recorded: Vec<_> = prompts.iter().map(|prompt| rig.stream(prompt.clone()).1).collect();
        rig.settle();
        for (prompt, recorded) in prompts.iter().zip(recorded) {
            assert_eq!(recorded.tokens(), alone(prompt), "{}", prompt.id);
        }
        assert!(rig.metric("preemptions_total") > 0, "the pool was too small");
        rig.assert_at_baseline();
    }
}

#[test]
fn the_oldest_is_never_preempted() {
    let mut rig = Rig::new(20, SchedulerSettings { growth_blocks: 0, ..roomy() });
    let (_, oldest) = rig.stream(endless("a", 5, 70));
    let others: Vec<_> = (0..6).map(|nth| rig.stream(endless(&format!("p{nth}"), 5, 70)).1).collect();
    while !oldest.has_ended() {
        assert!(rig.turn(), "it is not done");
    }
    assert!(others.iter().all(|other| !other.has_ended()), "none overtakes the oldest");
    rig.settle();
    assert!(others.iter().all(|other| other.is_finished()));
}

#[test]
fn arrived_sequences_that_are_preempted_are_computed_from_their_tokens() {
    // Case F20: KV that arrived over a connector is lost in a preemption and computed again, because it is
    // sent only once.
    let mut rig = Rig::new(20, SchedulerSettings { growth_blocks: 0, ..roomy() });
    let prompts: Vec<_> = (0..4).map(|nth| endless(&format!("p{nth}"), 9, 50)).collect();
    let mut recorded = Vec::new();
    for prompt in &prompts {
        let source = arrived(&rig, prompt).expect("room");
        let (sink, record) = Recorder::stream();
        let new = NewSequence {
            prompt: prompt.clone(),
            source,
            sink: Box::new(sink),
            steps_wanted: u32::MAX,
            constraint: None,
        };
        rig.submit(new).expect("it fits");
        recorded.push(record);
    }
    rig.settle();
    for (prompt, recorded) in prompts.iter().zip(recorded) {
        assert_eq!(recorded.tokens(), alone(prompt)[1..], "{}", prompt.id);
    }
    assert!(rig.metric("preemptions_total") > 0, "the pool was too small");
    rig.assert_at_baseline();
}

#[test]
fn blocks_held_elsewhere_delay_and_do_not_deadlock() {
    // Case F19: landings hold blocks that a running sequence needs.
    let mut rig = Rig::new(16, roomy());
    let (_, recorded) = rig.stream(endless("a", 5, 50));
    rig.turn();
    let landing = rig.pool.reserve(12, crate::testing::holder("landing")).expect("room");
    rig.settle();
    assert!(!recorded.has_ended(), "it waits for a block");
    drop(landing);
    rig.settle();
    assert!(recorded.is_finished());
    rig.assert_at_baseline();
}

#[test]
fn priorities_then_arrival() {
    let settings = SchedulerSettings { sequences_max: 1, ..roomy() };
    let mut rig = Rig::new(64, settings);
    let mut order = Vec::new();
    for (id, priority) in [("a", 0), ("b", 0), ("c", 5), ("d", 5)] {
        let mut prompt = endless(id, 5, 3);
        prompt.priority = Priority(priority);
        order.push((id, rig.stream(prompt).1));
    }
    let mut ended = Vec::new();
    while rig.turn() {
        for (id, recorded) in &order {
            if recorded.has_ended() && !ended.contains(id) {
                ended.push(*id);
            }
        }
    }
    assert_eq!(ended, ["c", "d", "a", "b"]);
}

#[test]
fn cancelled_at_any_turn_everything_comes_back() {
    for n_turns in 0..30 {
        let mut rig = Rig::new(64, SchedulerSettings { step_tokens_max: 16, sequences_max: 8, ..roomy() });
        let (id, recorded) = rig.stream(endless("a", 40, 20));
        let (_, other) = rig.stream(endless("b", 10, 20));
        for _ in 0..n_turns {
            rig.turn();
        }
        rig.cancel(id);
        let is_early = recorded.refusal() == Some(RefusalKind::Cancelled);
        assert!(is_early || recorded.is_finished(), "after {n_turns} turns");
        rig.settle();
        assert!(other.is_finished());
        rig.assert_at_baseline();
    }
}

#[test]
fn blocks_come_back_when_no_step_uses_them_and_no_sooner() {
    let mut rig = Rig::new(32, roomy());
    let (id, recorded) = rig.stream(endless("a", 10, 20));
    assert!(rig.launch(), "two steps are in flight");
    let leased = rig.pool.counts().leased;
    rig.cancel(id);
    assert!(recorded.has_ended(), "the client hears of it at once");
    assert_eq!(rig.pool.counts().leased, leased, "both steps may write");
    rig.worker.apply(super::Event::Collect);
    assert_eq!(rig.pool.counts().leased, leased, "one step may write");
    rig.worker.apply(super::Event::Collect);
    rig.assert_at_baseline();
}

#[test]
fn a_preempted_sequences_blocks_wait_for_the_step_in_flight() {
    let mut rig = Rig::new(20, SchedulerSettings { growth_blocks: 0, ..roomy() });
    for nth in 0..6 {
        rig.stream(endless(&format!("p{nth}"), 5, 70));
    }
    for _ in 0..100 {
        rig.turn_with_intruder();
    }
    rig.settle();
    assert!(rig.metric("preemptions_total") > 0, "the pool was too small");
    rig.assert_at_baseline();
}

#[test]
fn a_deadline_ends_a_sequence_without_new_work() {
    let mut rig = Rig::new(8, roomy());
    let mut late = endless("a", 5, 20);
    late.deadline = deadline_in(Duration::ZERO);
    let (_, recorded) = rig.stream(late);
    rig.settle();
    assert_eq!(recorded.refusal(), Some(RefusalKind::Deadline));
    rig.assert_at_baseline();
}

#[test]
fn a_sink_without_room_stops_its_sequence_only() {
    let mut rig = Rig::new(64, roomy());
    let (_, slow) = rig.stream(endless("a", 5, 20));
    let (_, quick) = rig.stream(endless("b", 5, 20));
    for _ in 0..3 {
        rig.turn();
    }
    let before = slow.tokens().len();
    slow.get().is_full = true;
    rig.settle();
    assert!(quick.is_finished());
    assert!(slow.tokens().len() <= before + crate::sink::SINK_SLACK, "no more than what was in flight");
    assert!(!slow.has_ended());
    slow.get().is_full = false;
    rig.settle();
    assert_eq!(slow.tokens(), alone(&endless("a", 5, 20)));
}

/// The sink has no room when blocks are given, and has some when the step is planned.
#[test]
fn a_sink_that_gets_room_meanwhile_lets_no_token_be_written_without_a_block() {
    let mut rig = Rig::new(64, roomy());
    let (_, recorded) = rig.stream(endless("a", 5, 70));
    recorded.get().is_read_meanwhile = true;
    rig.settle();
    recorded.get().is_read_meanwhile = false;
    recorded.get().is_full = false;
    rig.settle();
    assert_eq!(recorded.tokens(), alone(&endless("a", 5, 70)));
    rig.assert_at_baseline();
}

#[test]
fn a_failed_step_ends_its_sequences_and_no_others() {
    for failures in [
        Failures { launch: [2].into(), ..Failures::default() },
        Failures { collect: [2].into(), ..Failures::default() },
    ] {
        let flaky = Flaky::new(mock(64), failures);
        let mut rig = Rig::with_backend(Box::new(flaky), roomy());
        let (_, unlucky) = rig.stream(endless("a", 5, 20));
        rig.settle();
        assert_eq!(unlucky.refusal(), Some(RefusalKind::Failed));
        let (_, later) = rig.stream(endless("b", 5, 20));
        rig.settle();
        assert_eq!(later.tokens(), alone(&endless("b", 5, 20)), "the worker goes on");
        rig.assert_at_baseline();
    }
}

#[test]
fn a_failed_row_ends_its_sequence_which_may_go_on_elsewhere_unless_the_request_is_at_fault() {
    for (rows, refusal, n_late) in [
        ([].into(), None, 0),
        ([(1, RowError::LateMask)].into(), Some(RefusalKind::Failed), 1),
        ([(1, RowError::GrammarDeadEnd)].into(), Some(RefusalKind::Invalid), 0),
    ] {
        let flaky = Flaky::new(mock(64), Failures { rows, ..Failures::default() });
        let mut rig = Rig::with_backend(Box::new(flaky), roomy());
        let (_, recorded) = rig.stream(endless("a", 5, 20));
        rig.settle();
        assert_eq!(recorded.refusal(), refusal);
        assert_eq!(rig.metric("late_masks_total"), n_late);
        rig.assert_at_baseline();
    }
}

#[test]
fn a_lost_device_ends_everything() {
    let flaky = Flaky::new(mock(64), Failures { lost_from: Some(3), ..Failures::default() });
    let mut rig = Rig::with_backend(Box::new(flaky), roomy());
    let (_, one) = rig.stream(endless("a", 5, 20));
    let (_, two) = rig.stream(endless("b", 5, 20));
    rig.settle();
    assert_eq!((one.refusal(), two.refusal()), (Some(RefusalKind::Failed), Some(RefusalKind::Failed)));
    assert!(rig.worker.lost().is_some());
    let (_, late) = rig.stream(endless("c", 5, 20));
    assert_eq!(late.refusal(), Some(RefusalKind::Failed));
    rig.assert_at_baseline();
}

/// The check holds the pool, so a prompt that comes soon after another would wait for it.
#[test]
fn the_pool_is_checked_when_the_worker_has_been_idle_for_a_while() {
    let mut rig = Rig::new(64, roomy());
    let begin = rig.worker.world.now();
    rig.stream(endless("a", 20, 5));
    rig.settle();
    for (s, is_checked) in [(0, false), (29, false), (30, true), (90, true)] {
        rig.worker.idle(begin + Duration::from_secs(s));
        assert_eq!(rig.worker.is_checked, is_checked, "after {s} s");
    }
    rig.stream(endless("b", 20, 5));
    rig.settle();
    rig.worker.idle(begin + Duration::from_secs(200));
    assert!(!rig.worker.is_checked, "the time without work begins anew");
}

#[test]
fn load_says_what_is_there() {
    let settings = SchedulerSettings { step_tokens_max: 12, sequences_max: 2, ..roomy() };
    let mut rig = Rig::new(64, settings);
    for id in ["a", "b", "c"] {
        rig.stream(endless(id, 20, 5));
    }
    let load = rig.worker.load().node;
    assert_eq!((load.running, load.waiting, load.queued_tokens), (0, 3, 60));
    rig.turn();
    let load = rig.worker.load().node;
    assert_eq!((load.running, load.waiting, load.queued_tokens), (2, 1, 60 - 24));
    assert!(rig.worker.load().growth_reserve_blocks > 0);
    rig.settle();
    let load = rig.worker.load();
    assert_eq!((load.node.running, load.node.waiting, load.node.queued_tokens), (0, 0, 0));
    assert_eq!(load.growth_reserve_blocks, 0);
    assert!(load.node.steps_total > 0 && load.node.blocks.adds_up());
}
