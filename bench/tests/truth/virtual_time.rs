//! Tests every metric of programmed streams exactly: the whole path from bytes to numbers, with a virtual
//! clock.

use std::time::Duration;

use bench::metrics::Metric;
use bench::puppet::{Counting, Ending, Script, ScriptAction, Step};
use bench::record::{CountedBy, FailureKind, RequestRecord};

use crate::{millis, recorded};

/// Returns the script's token times in milliseconds, computed without the code under test.
fn token_times(script: &Script) -> Vec<f64> {
    let mut at = Duration::ZERO;
    let mut times = Vec::new();
    for step in &script.steps {
        at += step.after;
        let ms = at.as_secs_f64() * 1e3;
        times.extend(std::iter::repeat_n(ms, step.act.n_tokens() as usize));
    }
    times
}

fn gaps(times: &[f64]) -> Vec<f64> {
    times.windows(2).map(|pair| pair[1] - pair[0]).collect()
}

fn near(what: &str, got: f64, truth: f64) {
    assert!((got - truth).abs() < 1e-6, "{what}: {got} is not {truth}");
}

/// Checks every metric of the record against the script's own times.
fn check(script: &Script, record: &RequestRecord) {
    let times = token_times(script);
    let (first, second, last) = (times[0], times[1], times[times.len() - 1]);
    let of = |metric: Metric| metric.samples(std::iter::once(record));
    near("ttft", of(Metric::Ttft)[0], first);
    near("second token", of(Metric::SecondToken)[0], second);
    near("hand-over", of(Metric::Handover)[0], second - first);
    near("end to end", of(Metric::E2el)[0], last);
    near("tpot", of(Metric::Tpot)[0], (last - first) / (times.len() - 1) as f64);
    near("worst gap", of(Metric::WorstGap)[0], gaps(&times).into_iter().fold(0.0, f64::max));
    let pooled = of(Metric::Tbt);
    assert_eq!(pooled.len(), times.len() - 1);
    pooled.iter().zip(gaps(&times)).for_each(|(got, truth)| near("tbt", *got, truth));
    check_chunk_gaps(times, &of(Metric::Itl));
}

/// Checks the gaps between chunks. Tokens of one chunk have the same time, so the chunks' times are the times
/// without repeats.
fn check_chunk_gaps(mut times: Vec<f64>, got: &[f64]) {
    times.dedup();
    assert_eq!(got.len(), times.len() - 1);
    got.iter().zip(gaps(&times)).for_each(|(got, truth)| near("itl", *got, truth));
}

fn step(ms: u64, act: ScriptAction) -> Step {
    Step { after: millis(ms), act }
}

/// Checks the steps with all ways to count and all sizes of pieces. All must give the same result.
fn check_everywhere(steps: Vec<Step>) {
    for counting in [Counting::Ids, Counting::Usage] {
        let script = Script { status: 200, steps: steps.clone(), ending: Ending::Done, counting };
        for piece in [1, 7, 64, 1 << 20] {
            let record = recorded(0, 0, &script, piece);
            assert!(record.is_finished(), "{:?}", record.outcome);
            check(&script, &record);
        }
    }
}

#[test]
fn an_even_stream() {
    check_everywhere(Script::even(50, millis(300), millis(20)).steps);
}

#[test]
fn a_stall_in_the_middle() {
    let mut steps = Script::even(50, millis(300), millis(20)).steps;
    steps[30].after += millis(700);
    check_everywhere(steps);
}

#[test]
fn a_slow_hand_over() {
    let mut steps = Script::even(20, millis(80), millis(10)).steps;
    steps[1].after = millis(850);
    check_everywhere(steps);
}

#[test]
fn coalesced_chunks() {
    let mut steps = vec![step(100, ScriptAction::Tokens(1))];
    steps.extend((0..12).map(|_| step(80, ScriptAction::Tokens(4))));
    check_everywhere(steps);
}

#[test]
fn a_first_chunk_with_two_tokens_has_no_hand_over_gap() {
    check_everywhere(vec![step(100, ScriptAction::Tokens(2)), step(10, ScriptAction::Tokens(1))]);
}

#[test]
fn an_empty_first_chunk_is_not_a_token() {
    let mut steps = vec![step(1, ScriptAction::Empty)];
    steps.extend(Script::even(20, millis(400), millis(20)).steps);
    check_everywhere(steps);
}

#[test]
fn comments_and_empty_chunks_between_tokens_change_nothing() {
    let mut steps = vec![step(5, ScriptAction::Comment)];
    for _ in 0..10 {
        steps.extend([
            step(20, ScriptAction::Tokens(1)),
            step(3, ScriptAction::Comment),
            step(3, ScriptAction::Empty),
        ]);
    }
    check_everywhere(steps);
}

#[test]
fn a_token_without_text_counts_and_its_text_is_timed_apart() {
    let steps = vec![
        step(50, ScriptAction::Unseen(1)),
        step(30, ScriptAction::Unseen(1)),
        step(30, ScriptAction::Tokens(1)),
    ];
    check_everywhere(steps.clone());
    let script = Script { status: 200, steps, ending: Ending::Done, counting: Counting::Ids };
    near("text", Metric::FirstText.samples(std::iter::once(&recorded(0, 0, &script, 64)))[0], 110.0);
}

#[test]
fn without_counts_the_total_at_the_end_holds_and_the_record_says_so() {
    let steps = vec![step(50, ScriptAction::Tokens(1)), step(30, ScriptAction::Tokens(3))];
    let script = Script { status: 200, steps, ending: Ending::Done, counting: Counting::Nothing };
    let record = recorded(0, 0, &script, 64);
    assert_eq!(
        (record.counted_by, record.counted_tokens(), record.output_tokens()),
        (CountedBy::Total, 4, 4)
    );
}

#[test]
fn failures_are_infinitely_late_in_every_metric() {
    let even = Script::even(10, millis(50), millis(10));
    let mut erring = even.clone();
    erring.steps.insert(5, step(1, ScriptAction::Error));
    let cases = [
        (Script { status: 503, ..even.clone() }, FailureKind::Status),
        (Script { ending: Ending::Cut, ..even.clone() }, FailureKind::Broken),
        (erring, FailureKind::ErrorEvent),
        (Script { steps: vec![step(9, ScriptAction::Empty)], ..even }, FailureKind::Empty),
    ];
    for (script, kind) in cases {
        let mut record = recorded(0, 0, &script, 64);
        record.wanted_tokens = 10;
        assert_eq!(record.failure().map(|failure| failure.kind), Some(kind));
        for metric in Metric::ALL {
            let samples = metric.samples(std::iter::once(&record));
            assert_eq!(
                samples.iter().filter(|sample| sample.is_infinite()).count(),
                1,
                "{metric:?} of {kind:?}"
            );
        }
    }
}
